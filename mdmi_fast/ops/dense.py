"""Rows through a few dense layers, each row by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.backends.torch._tiles import compute_dtype
from mdmi_fast.ops._dispatch import run, there
from mdmi_fast.ops._register import registered


def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, backend: str | None = None) -> Tensor:
    """Dense layers on rows, with the promise that a sequence's result does not depend on the rest of the batch.

    z = relu(z W_k + b_k) for each layer but the last, then z W + b

    A plain matrix product rounds a row differently in another batch; an estimator that decodes must not.

    Args:
        x: [B, ..., D] or [rows, D] floating, any strides.
        weights: one or more matrices [in, out].
        biases: their biases [out].
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [..., out of the last layer] float32. Differentiable in all operands.

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
    check.dense_layers("mlp", weights, biases, x.shape[-1], x=x)
    if not weights:
        raise ValueError("mlp: weights must hold at least one layer, got none")
    return _mlp(x, list(weights), list(biases), backend)


@registered("mlp")
def _mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor], backend: str | None) -> Tensor:
    return run("dense", "mlp", backend, [x, *weights, *biases])(x, weights, biases)  # type: ignore[no-any-return]


@_mlp.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor], backend: str | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weights[-1].shape[1], dtype=torch.float32)


@registered("mlp_backward")
def _mlp_backward(grad: Tensor, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """Gradients of x, the weights and the biases, one after the other; activations are computed again."""
    return there(_gradients, x.device)(grad, x, weights, biases)  # type: ignore[no-any-return]


def _gradients(grad: Tensor, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    dtype = compute_dtype(x, *weights, *biases)
    inputs = [x.reshape(-1, x.shape[-1]).to(dtype)]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        inputs.append((inputs[-1] @ weight.to(dtype) + bias.to(dtype)).relu())
    flow = grad.reshape(-1, grad.shape[-1]).to(dtype)
    d_weights, d_biases = [], []
    for weight, bias, z in zip(reversed(weights), reversed(biases), reversed(inputs), strict=True):
        d_weights.append((z.T @ flow).to(weight.dtype))
        d_biases.append(flow.sum(0).to(bias.dtype))
        flow = flow @ weight.to(dtype).T
        if z is not inputs[0]:
            flow = flow.masked_fill(z <= 0, 0.0)  # not times 0: the flow may be inf
    return [flow.to(x.dtype).reshape(x.shape), *reversed(d_weights), *reversed(d_biases)]


@_mlp_backward.register_fake
def _(grad: Tensor, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, *weights, *biases)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, biases, _ = inputs
    ctx.n_layers = len(weights)
    ctx.save_for_backward(x, *weights, *biases)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor], None]:
    x, *layers = ctx.saved_tensors
    n = ctx.n_layers
    d_x, *d_layers = _mlp_backward(grad, x, layers[:n], layers[n:])
    return d_x, d_layers[:n], d_layers[n:], None


_mlp.register_autograd(_gradient, setup_context=_setup)
