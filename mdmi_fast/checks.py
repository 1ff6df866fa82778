"""Argument checks: one message shape, `op: argument must be ..., got ...`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATING = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


LARGEST_INT = 2**63 - 1
"""What tensors and kernels count with."""


def describe(value: object) -> str:
    """What a message says it got."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return f"a nested tensor of {str(value.dtype).removeprefix('torch.')} on {value.device}"
        layout = "" if value.layout is torch.strided else f" {str(value.layout).removeprefix('torch.')}"
        return f"shape {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{layout} on {value.device}"
    return f"{shown(value)} ({type(value).__name__})"


def shown(value: object) -> str:
    """The value as text that fits in a message."""
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return f"{'-' if value < 0 else ''}2**{abs(value).bit_length() - 1} or more"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def dense(op: str, name: str, value: object) -> Tensor:
    """The value, a tensor whose elements lie in memory at strides."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        raise TypeError(f"{op}: {name} must be a dense tensor, got {describe(value)}")
    return value


def floating(op: str, name: str, value: object) -> Tensor:
    """The value, a dense floating tensor."""
    tensor = dense(op, name, value)
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{op}: {name} must be float64, float32, bfloat16 or float16, got {describe(tensor)}")
    return tensor


def of_kind(op: str, name: str, value: object, dtype: torch.dtype) -> Tensor:
    """The value, a dense tensor of that dtype."""
    tensor = dense(op, name, value)
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {str(dtype).removeprefix('torch.')}, got {describe(tensor)}")
    return tensor


def shape(op: str, name: str, value: Tensor, expected: Sequence[int], text: str) -> None:
    """`text` names the dimensions, such as "[..., N]"."""
    if value.shape != tuple(expected):
        raise ValueError(f"{op}: {name} must be {text} = {tuple(expected)}, got {describe(value)}")


def rows_of(op: str, name: str, value: object, text: str, n_trailing: int = 1) -> Tensor:
    """The value, a floating tensor with at least the trailing dimensions and a last one that is not empty."""
    tensor = floating(op, name, value)
    if tensor.ndim < n_trailing or tensor.shape[-1] == 0:
        raise ValueError(
            f"{op}: {name} must be {text} with {text.split()[-1].rstrip(']')} at least 1, got {describe(tensor)}"
        )
    return tensor


def same_device(op: str, **tensors: Tensor | None) -> None:
    """All on the device of the first."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(
                f"{op}: tensors must be on one device, got {first} on {device} and {name} on {tensor.device}"
            )


def one_of(op: str, name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}")


def number(op: str, name: str, value: object) -> float:
    """The value as a float, not NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{op}: {name} must be a number, got {describe(value)}")
    try:
        x = float(value)
    except OverflowError:
        raise ValueError(f"{op}: {name} must be a number that float64 can hold, got {shown(value)}") from None
    if math.isnan(x):
        raise ValueError(f"{op}: {name} must not be NaN")
    return x


def at_least(op: str, name: str, value: object, least: float) -> float:
    """The value as a float of at least `least`; may be inf."""
    x = number(op, name, value)
    if x < least:
        raise ValueError(f"{op}: {name} must be at least {least:g}, got {shown(value)}")
    return x


def weight(op: str, name: str, value: object) -> float:
    """The value as a finite float of at least 0."""
    x = number(op, name, value)
    if not 0.0 <= x < math.inf:
        raise ValueError(f"{op}: {name} must be finite and at least 0, got {shown(value)}")
    return x


def attribute(holder: object, name: str) -> Any:
    """An attribute that somebody else's object may lack; None where it does."""
    return getattr(holder, name, None)


def whole(op: str, name: str, value: object, least: int, most: float = LARGEST_INT) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {describe(value)}")
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {shown(value)}")
    if value > most:
        raise ValueError(f"{op}: {name} must be at most {most}, got {shown(value)}")
    return value


def one_batch(x: Tensor, n_trailing: int) -> Tensor:
    """x with exactly one dimension before its last n_trailing."""
    if x.ndim == n_trailing + 1:
        return x  # the common case: a reshape that does nothing still takes a microsecond
    n_lead = x.ndim - n_trailing
    return x.reshape(math.prod(x.shape[:n_lead]), *x.shape[n_lead:])


def sequences(op: str, **given: object) -> None:
    """Each a list or tuple, or what else counts as a sequence; no tensor."""
    for name, value in given.items():
        if isinstance(value, Tensor) or not isinstance(value, Sequence):
            raise TypeError(f"{op}: {name} must be a sequence of tensors, got {type(value).__name__}")


def dense_layers(
    op: str, weights: Sequence[Tensor], biases: Sequence[Tensor], n_in: int | None, **beside: Tensor
) -> None:
    """Weights [in, out] and biases [out] that follow each other, the first taking n_in inputs (None: any)."""
    sequences(op, weights=weights, biases=biases)
    if len(weights) != len(biases):
        raise ValueError(f"{op}: biases must be one a layer, got {len(weights)} weights and {len(biases)} biases")
    for k, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        floating(op, f"weights[{k}]", weight)
        floating(op, f"biases[{k}]", bias)
        if weight.ndim != 2 or 0 in weight.shape or n_in not in (None, weight.shape[0]):
            expected = "[in, out]" if n_in is None else f"[in, out] with in = {n_in}"
            raise ValueError(f"{op}: weights[{k}] must be {expected}, none empty, got {describe(weight)}")
        shape(op, f"biases[{k}]", bias, weight.shape[1:], "[out]")
        beside |= {f"weights[{k}]": weight, f"biases[{k}]": bias}
        n_in = weight.shape[1]
    same_device(op, **beside)
