"""How a tensor crosses to C++: an address, a dtype code, strides in elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

Layout = tuple[int, int, int]
Rows = tuple[int, int, Layout]


def single_or_double(x: Tensor) -> Tensor:
    """x as float32 or float64: a copy only where x is a half."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def same_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All as float64 if any of them is: doubles have kernels of their own."""
    if any(x.dtype == torch.float64 for x in tensors):
        return tuple(x.double() for x in tensors)
    return tensors


def address_of(name: str, x: Tensor) -> int:
    """Where x begins, for an argument that C++ takes for absent where its address is 0."""
    address = x.data_ptr()
    if address == 0 and x.numel() > 0:
        raise ValueError(f"{name} must have memory, got shape {tuple(x.shape)} whose storage was freed")
    return address


def mask_of(mask: Tensor | None) -> tuple[Any, ...]:
    """Address and strides of a [B, N] mask; address 0 means that every position is masked."""
    if mask is None:
        return 0, (0, 0)
    return address_of("mask", mask), mask.stride()


def _two_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout | None:
    """(inner size, outer stride, inner stride) of the leading axes `shape`, or None where they need more."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    if len(axes) > 2:
        return None
    (_, outer), (inner, step) = [(1, 0)] * (2 - len(axes)) + axes
    return inner, outer, step


def rows_of(x: Tensor, skip: int = 0) -> tuple[Tensor, Rows]:
    """The rows [..., V] of x behind its first `skip` axes, and the tensor they point into: a copy only where the last
    axis is not contiguous or the leading ones have more than two strides.
    """
    if x.is_contiguous():  # the common case, without the general one's price
        return x, (x.data_ptr(), DTYPE[x.dtype], (x.shape[skip:-1].numel(), 0, x.shape[-1]))
    lead = slice(skip, x.dim() - 1)
    layout = _two_strides(x.shape[lead], x.stride()[lead]) if x.stride(-1) == 1 or x.shape[-1] == 1 else None
    if layout is None:
        x = x.contiguous()
        layout = (1, x.shape[-1], 0)
    return x, (x.data_ptr(), DTYPE[x.dtype], layout)
