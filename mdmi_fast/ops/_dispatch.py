"""Choosing a backend, per call. README.md beside this file says what a backend provides."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.checks import describe, one_of
from mdmi_fast.errors import UnsupportedError

_DEVICES = {"triton": "cuda", "cpp": "cpu"}  # torch runs on all

BACKENDS = ("triton", "cpp", "torch")
"""Names of the backends; the first that can run a call is the default."""

OPS = {
    "stats": ("entropy", "token_stats", "linear_token_stats"),
    "kl": ("kl_divergence", "expected_entropy", "expected_kl", "mixture_entropy", "mixture_stats"),
    "dense": ("mlp",),
    "pairwise": ("pairwise_mlp", "pairwise_mlp_rows", "pairwise_mlp_band"),
    "select": ("select_budget", "select_budget_band", "select_threshold", "color", "score_and_select"),
}
"""The public ops by stem."""

_FUNCTIONS = {
    f"pairwise_mlp_{layout}{direction}": f"pairwise_mlp{direction}"
    for layout in ("rows", "band")
    for direction in ("", "_backward")
}
"""Where the function of a backend has another name than the op: it sees in the call which pairs are asked for."""


@functools.cache
def _module(backend: str, stem: str) -> types.ModuleType | str:
    """The module of a backend, or why there is none."""
    try:
        return importlib.import_module(f"mdmi_fast.backends.{backend}.{stem}")
    except ImportError as error:
        return f"cannot be imported ({error})"


def _interpreted(backend: str, device: str) -> bool:
    """Whether Triton's interpreter, meant for tests, would run a backend's kernels on a CPU."""
    return backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def _missing(backend: str, stem: str, op: str, device: str) -> list[str]:
    """Why a backend cannot run an op on a kind of device whatever the tensors; empty if it can."""
    if backend in _DEVICES and device != _DEVICES[backend] and not _interpreted(backend, device):
        return [f"runs on {_DEVICES[backend]} tensors, got {device}"]
    module = _module(backend, stem)
    if isinstance(module, str):
        return [module]
    return [] if hasattr(module, _FUNCTIONS.get(op, op)) else [f"has no {op} yet"]


@functools.cache
def _able(stem: str, op: str, device: str, named: str | None) -> list[tuple[str, types.ModuleType]]:
    """The backends, or the one named, that have an op for a kind of device, with their modules; the best first."""
    # interpreted kernels are for those who ask for them
    names = [name for name in BACKENDS if not _interpreted(name, device)] if named is None else [named]
    return [(name, _module(name, stem)) for name in names if not _missing(name, stem, op, device)]  # type: ignore[misc]


def _refusals(
    module: types.ModuleType | str, op: str, tensors: Sequence[Tensor], precision: str | None
) -> Sequence[str]:
    """Why a backend that has an op cannot run a call; empty if it can."""
    refusals = vars(module).get("refusals")
    return refusals(op, tensors, precision) if refusals else ()


@functools.cache
def _say_slower_once(reason: str) -> None:
    warnings.warn(f"mdmi_fast: the C++ extension {reason}; CPU tensors take the slower torch backend", stacklevel=2)


def choose(
    stem: str, op: str, backend: str | None, tensors: Sequence[Tensor], precision: str | None = None
) -> tuple[str, Any]:
    """The backend of a call and its function.

    Args:
        stem: module of the op.
        op: name of the function.
        backend: the one to take, or None for MDMI_BACKEND, or else the first that can run the call.
        tensors: inputs that the choice depends on.
        precision: of the call, if the op has one.

    Raises:
        ValueError: no backend of that name.
        UnsupportedError: the one named cannot run the call; every backend's reasons are listed.
    """
    named = backend if backend is not None else os.environ.get("MDMI_BACKEND") or None
    if named is not None:
        one_of(op, "MDMI_BACKEND" if backend is None else "backend", named, BACKENDS)
    device = tensors[0].device.type
    for name, module in _able(stem, op, device, named):
        if not _refusals(module, op, tensors, precision):
            if named is None and name == "torch" and device == "cpu":
                missing = _module("cpp", stem)
                if isinstance(missing, str):
                    _say_slower_once(missing)
            return name, getattr(module, _FUNCTIONS.get(op, op))
    reasons = []
    for name in BACKENDS:
        said = _missing(name, stem, op, device) or _refusals(_module(name, stem), op, tensors, precision)
        reasons += [f"{name}: {reason}" for reason in said or ["can run this call, but was not asked to"]]
    inputs = "; ".join(describe(t) for t in tensors)
    asked = f" by {named}" if named else ""
    raise UnsupportedError(reasons, f"{op} ({inputs}{f'; precision {precision}' if precision else ''}){asked}")


def run(
    stem: str, op: str, backend: str | None, tensors: Sequence[Tensor], precision: str | None = None
) -> Callable[..., Any]:
    """The function of the backend chosen, to be called on the tensors' device and outside autocast: the operands' dtypes decide."""
    _, function = choose(stem, op, backend, tensors, precision)
    return there(function, tensors[0].device)


def there(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function, to be called on that device and outside autocast."""
    if device.type != "cuda" and not torch.is_autocast_enabled(device.type):
        return function
    return functools.partial(_call_there, function, device)


def _call_there(function: Callable[..., Any], device: torch.device, *args: Any) -> Any:
    with contextlib.ExitStack() as stack:
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            # a kernel is launched on the current device, whatever its tensors lie on
            stack.enter_context(torch.cuda.device(device))
        return function(*args)


def provided(backend: str, stem: str, name: str) -> Any:
    """A function that a backend may or may not have, or None."""
    return check.attribute(_module(backend, stem), name)


def backends(device: str | torch.device = "cpu") -> dict[str, dict[str, list[str]]]:
    """What can run where: {op: {backend: reasons against it}}, an empty list where it can.

    Args:
        device: of the tensors the ops would be called with.

    Raises:
        ValueError: for what is no device.

    Example:
        >>> from mdmi_fast import ops
        >>> ops.backends("cpu")["entropy"]["torch"]
        []
        >>> ops.backends("cpu")["entropy"]["triton"]
        ['runs on cuda tensors, got cpu']
    """
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise ValueError(f"backends: device must be one such as 'cpu' or 'cuda', got {device!r}") from None
    return {op: {name: _missing(name, stem, op, kind) for name in BACKENDS} for stem, ops in OPS.items() for op in ops}
