"""Registering functions as torch operators, without their price where nothing needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Registered(Generic[P, R]):
    """A function, and the operator `mdmi_fast::name` that runs it.

    Calling it goes through the operator where a compiler, a tracer, a tensor subclass or a gradient has to see it. Elsewhere
    it runs the function itself: the operator would add 20 to 60 microseconds, several times what a small call takes.
    """

    def __init__(self, name: str, function: Callable[P, R], schema: str | None = None) -> None:
        self.function = function
        self.operator = torch.library.custom_op(f"mdmi_fast::{name}", function, mutates_args=(), schema=schema)
        self.register_fake = self.operator.register_fake
        self.register_autograd = self.operator.register_autograd

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or _traced() or _watched(args, torch.is_grad_enabled()):
            return self.operator(*args, **kwargs)  # type: ignore[no-any-return]
        return self.function(*args, **kwargs)


def _traced() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def _watched(values: Iterable[Any], gradients: bool) -> bool:
    """Whether a tensor among the values is of a subclass or wants a gradient."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            if gradients and value.requires_grad:
                return True
        elif isinstance(value, Tensor) or (kind is list and _watched(value, gradients)):
            return True
    return False


def registered(name: str, schema: str | None = None) -> Callable[[Callable[P, R]], Registered[P, R]]:
    """Decorator that makes a function a `Registered`; its annotations are the schema unless one is given."""
    return lambda function: Registered(name, function, schema)


def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """A `setup_context` that saves all inputs for `kept`: tensors as autograd wants them saved, lists among them."""
    tensors: list[Tensor | None] = []
    ctx.rest = []
    for value in inputs:
        if isinstance(value, Tensor):
            tensors.append(value)
            ctx.rest.append(_ONE)
        elif isinstance(value, list | tuple):
            tensors.extend(value)
            ctx.rest.append(_Several(len(value)))
        else:
            ctx.rest.append(value)
    ctx.save_for_backward(*tensors)


def kept(ctx: Any) -> list[Any]:
    """The inputs that `keep` saved."""
    tensors = iter(ctx.saved_tensors)
    return [
        next(tensors) if value is _ONE else list(islice(tensors, value.n)) if isinstance(value, _Several) else value
        for value in ctx.rest
    ]


class _Several(NamedTuple):
    """Stands for a list of tensors."""

    n: int


_ONE = object()
"""Stands for a tensor."""
