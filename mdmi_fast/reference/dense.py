"""Rows through dense layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = (x @ weight + bias).relu()
    return x @ weights[-1] + biases[-1]
