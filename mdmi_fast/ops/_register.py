"""Registering functions as torch operators, without their price where nothing needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Registered(Generic[P, R]):
    """A function, and the operator `mdmi_fast::name` that runs it.

    Calling it goes through the operator where a compiler, a tracer, a tensor subclass or a gradient has to see it. Elsewhere
    it runs the function itself: the operator would add 20 to 60 microseconds, several times what a small call takes.
    """

    def __init__(self, name: str, function: Callable[P, R]) -> None:
        self.function = function
        self.operator = torch.library.custom_op(f"mdmi_fast::{name}", function, mutates_args=())
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


def registered(name: str) -> Callable[[Callable[P, R]], Registered[P, R]]:
    """Decorator that makes a function a `Registered`."""
    return lambda function: Registered(name, function)
