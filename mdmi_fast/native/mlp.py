"""Rows through dense layers, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads
from mdmi_fast.native.pairwise import prepare_pairwise


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    return ["computes in float32, got float64"] if any(x.dtype == torch.float64 for x in tensors) else []


def _two_level(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x [..., D] with contiguous rows, and how its rows lie: rows of an inner run, stride between runs and within."""
    if x.dtype != torch.float32 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        x = x.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    runs: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    if len(runs) > 2:
        x = x.contiguous()
        runs = [(x.shape[:-1].numel(), x.shape[-1])]
    runs = [(1, 0)] * (2 - len(runs)) + runs
    return x, runs[1][0], runs[0][1], runs[1][1]


def mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    network = prepare_pairwise(weights, biases, torch.empty(0), torch.zeros(()), "fp32")
    result = torch.empty(*x.shape[:-1], weights[-1].shape[1])
    x, inner, outer_stride, inner_stride = _two_level(x)
    _C.mlp(
        network,
        x.data_ptr(),
        x.shape[:-1].numel(),
        max(inner, 1),
        outer_stride,
        inner_stride,
        result.data_ptr(),
        get_num_threads(),
    )
    return result
