"""Rows through dense layers, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads
from mdmi_fast.backends.calls import PairNetwork
from mdmi_fast.backends.cpp._memory import rows_of
from mdmi_fast.backends.cpp.pairwise import prepare_pairwise


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    return ["computes in float32, got float64"] if any(x.dtype == torch.float64 for x in tensors) else []


def mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    empty, zero = torch.empty(0, dtype=torch.float32, device="cpu"), torch.zeros((), dtype=torch.float32, device="cpu")
    network = prepare_pairwise(PairNetwork(weights, biases, empty, zero), "fp32")
    result = torch.empty(*x.shape[:-1], weights[-1].shape[1], dtype=torch.float32, device="cpu")
    x, (address, _, (inner, outer_stride, inner_stride)) = rows_of(x.float())
    n_rows = x.shape[:-1].numel()
    _C.mlp(network, address, n_rows, max(inner, 1), outer_stride, inner_stride, result.data_ptr(), get_num_threads())
    return result
