"""Registering functions as torch operators, without their price where nothing needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mdmi_fast.checks import one_of
from mdmi_fast.errors import UnsupportedError
from mdmi_fast.ops._dispatch import BACKENDS

P = ParamSpec("P")
R = TypeVar("R")

_functorch: Any = torch._C._functorch


class Registered(Generic[P, R]):
    """A function, and the operator `mdmi_fast::name` that runs it.

    Calling it goes through the operator where a compiler, a tracer, a transform, a mode, a tensor subclass or a gradient has to
    see it. Elsewhere it runs the function itself: the operator would add 20 to 60 microseconds, several times what a
    small call takes.

    Derivatives are those of `backward` calls, once. What asks for others (forward mode, `torch.func.grad`, a second
    derivative) gets an UnsupportedError instead of a result that has lost them.
    """

    def __init__(self, name: str, function: Callable[P, R], schema: str | None = None) -> None:
        self.name, self.function = name, function
        self.operator = torch.library.custom_op(f"mdmi_fast::{name}", function, mutates_args=(), schema=schema)
        self.operator.register_vmap(self._one_by_one)
        self.operator.register_autograd(self._no_gradient)  # until there is one
        self.register_fake = self.operator.register_fake
        self.register_autograd = self.operator.register_autograd
        self._names_backend = self.operator._opoverload._schema.arguments[-1].name == "backend"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.seen(args):
            # before torch refuses it in its own words; where torch sees nothing, the choice of a backend checks it
            if self._names_backend and args[-1] is not None:
                one_of(self._called, "backend", args[-1], BACKENDS)
            return self.operator(*args, **kwargs)  # type: ignore[no-any-return]
        return self.function(*args, **kwargs)

    def seen(self, args: Iterable[Any]) -> bool:
        """Whether torch has to see a call with these arguments.

        Raises:
            UnsupportedError: it would lose a derivative.
        """
        if torch.compiler.is_compiling():
            return True
        transformed = _functorch.peek_interpreter_stack() is not None
        if (transformed or forward_ad._current_level >= 0) and any(map(_differentiated, _tensors(args))):
            reason = "has gradients of backward calls only: neither forward mode nor torch.func.grad and its relatives"
            raise UnsupportedError([reason], self._called)
        if not (
            transformed
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._is_tracing()
            or _watched(args, torch.is_grad_enabled())
        ):
            return False
        lists = any(isinstance(value, list) for value in args)
        if lists and any(map(_functorch.is_legacy_batchedtensor, _tensors(args))):
            reason = "takes lists of tensors, which torch cannot batch here: use torch.vmap, or one gradient at a time"
            raise UnsupportedError([reason], f"{self.name} in a batch of gradients")
        return True

    @property
    def _called(self) -> str:
        forward = self.name.removesuffix("_backward")
        return forward if forward == self.name else f"a gradient of the gradient of {forward}"

    def _no_gradient(self, ctx: Any, *grads: Any) -> None:
        what = self._called if self.name.endswith("_backward") else f"a gradient of {self.name}"
        raise UnsupportedError(["has none"], what)

    def _one_by_one(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """The rule of `torch.vmap`: one call for each element of the batch."""
        if info.batch_size == 0:
            raise UnsupportedError(
                ["runs once for each element of a batch, and there is none"], f"{self._called} under vmap"
            )
        (leaves, spec), (axes, _) = tree_flatten(args), tree_flatten(in_dims)
        results = []
        for index in range(info.batch_size):
            some = [x if axis is None else x.select(axis, index) for x, axis in zip(leaves, axes, strict=True)]
            results.append(self.operator(*tree_unflatten(some, spec)))
        stacked = tree_map(lambda *parts: torch.stack(parts), *results)
        return stacked, tree_map(lambda _: 0, stacked)


def in_memory(x: Tensor) -> bool:
    """Whether x has an address of its own, nothing that stands for a tensor inside a transform or a subclass."""
    plain = type(x) is Tensor or type(x) is torch.nn.Parameter
    return plain and not (
        _functorch.is_functorch_wrapped_tensor(x)
        or _functorch.is_legacy_batchedtensor(x)
        or torch._is_functional_tensor(x)
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from _tensors(value)


def _differentiated(x: Tensor) -> bool:
    """Whether a derivative of x is followed that no `backward` call asks for."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x) and ((x.requires_grad and torch.is_grad_enabled()) or _has_tangent(x)):
            return True
        x = _functorch.get_unwrapped(x)
    return _has_tangent(x)


def _has_tangent(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _watched(values: Iterable[Any], gradients: bool) -> bool:
    """Whether a tensor among the values is of a subclass, not in memory as it reads, or wants a gradient."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            if gradients and value.requires_grad:
                return True
            # Its elements, outside transforms, are what lies in memory: not negated lazily, not zeros without memory.
            if value.is_meta or value.is_neg() or value._is_zerotensor() or _functorch.is_legacy_batchedtensor(value):
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
