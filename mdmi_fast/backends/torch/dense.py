"""Rows through dense layers, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast.backends.torch._tiles import compute_dtype


def mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    dtype = compute_dtype(x, *weights, *biases)
    if x.numel() == 0:
        return torch.zeros(*x.shape[:-1], weights[-1].shape[1], dtype=torch.float32, device=x.device)
    weights, biases = [w.to(dtype) for w in weights], [b.to(dtype) for b in biases]
    # A matrix product rounds a row by the matrix's shape and the row's place in it, so every sequence (the rows behind
    # the first dimension) is multiplied by itself, in memory of its own.
    parts = x.unbind(0) if x.ndim > 2 else [x]
    return torch.stack([_apply(part.to(dtype, copy=True), weights, biases) for part in parts]).view(
        *x.shape[:-1], weights[-1].shape[1]
    )


def _apply(z: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        z = z @ weight + bias
        if index + 1 < len(weights):
            z = z.relu()
    return z.float()
