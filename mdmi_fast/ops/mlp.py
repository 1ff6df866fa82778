"""Rows through a few dense layers, each row by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mdmi_fast.ops import _checks as check
from mdmi_fast.ops._dispatch import call
from mdmi_fast.ops._register import registered


def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, backend: str | None = None) -> Tensor:
    """Dense layers on rows, with the promise that a sequence's result does not depend on the rest of the batch.

    z = relu(z W_k + b_k) for each layer but the last, then z W + b

    A plain matrix product rounds a row differently in another batch; an estimator that decodes must not.

    Args:
        x: [B, ..., D] or [D_rows, D] floating, any strides.
        weights: one or more matrices [in, out].
        biases: their biases [out].
        backend: "cpp", "torch" or None.

    Returns:
        [..., out of the last layer] float32. Without gradient: train with torch.nn.functional.linear.

    Raises:
        TypeError: an operand is not a floating tensor, or weights is no sequence of tensors.
        ValueError: shapes do not match, or operands are on several devices.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Sums in float32 (float64 if an operand is), in an order that depends on the row alone ("cpp") or on the
        sequence alone ("torch").

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> ops.mlp(torch.tensor([[1.0, 2.0]]), [torch.ones(2, 1)], [torch.zeros(1)])
        tensor([[3.]])
    """
    check.rows_of("mlp", "x", x, "[..., D]")
    for name, layers in (("weights", weights), ("biases", biases)):
        if isinstance(layers, Tensor) or not isinstance(layers, Sequence):
            raise TypeError(f"mlp: {name} must be a sequence of tensors, got {type(layers).__name__}")
    if not weights or len(weights) != len(biases):
        raise ValueError(f"mlp: weights and biases must be one a layer, got {len(weights)} and {len(biases)}")
    width = x.shape[-1]
    for k, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        check.floating("mlp", f"weights[{k}]", weight)
        check.floating("mlp", f"biases[{k}]", bias)
        if weight.ndim != 2 or weight.shape[0] != width or 0 in weight.shape:
            raise ValueError(f"mlp: weights[{k}] must be [{width}, out], none empty, got {check.describe(weight)}")
        check.shape("mlp", f"biases[{k}]", bias, weight.shape[1:], "[out]")
        check.same_device("mlp", x=x, **{f"weights[{k}]": weight, f"biases[{k}]": bias})
        width = weight.shape[1]
    return _mlp(x, list(weights), list(biases), backend)


@registered("mlp")
def _mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor], backend: str | None) -> Tensor:
    return call("mlp", "mlp", backend, [x, *weights, *biases], None, x, weights, biases)  # type: ignore[no-any-return]


@_mlp.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor], backend: str | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weights[-1].shape[1], dtype=torch.float32)
