"""Entropy and the other statistics of rows of logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.ops._dispatch import run
from mdmi_fast.ops._register import registered


class TokenStats(NamedTuple):
    """Statistics of rows of logits [..., V], each [...]."""

    entropy: Tensor
    """float32, nats."""
    logsumexp: Tensor
    """float32."""
    confidence: Tensor
    """float32, the largest probability."""
    token: Tensor
    """int64, the lowest index that has it."""
    margin: Tensor
    """float32, the largest probability minus the second largest; 1 where V is 1."""


def entropy(logits: Tensor, *, backend: str | None = None) -> Tensor:
    """Entropy of softmax(logits).

    H = -sum_v p_v log p_v, p = softmax(logits), 0 log 0 = 0

    Args:
        logits: [..., V] float64, float32, bfloat16 or float16, any strides, V >= 1. Differentiable.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [...] float32, nats.

    Raises:
        TypeError: logits is not a floating tensor.
        ValueError: logits has no last dimension, or an empty one.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Accumulated in float32 (float64 for float64), shifted by the row's maximum; within 2e-6 of float64 at V = 10 and
        4e-6 at V = 256,000. A logit of -inf is a probability of 0 and has gradient 0, whatever comes in. A row with NaN or +inf, or of -inf only, is
        NaN and has gradient 0.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> ops.entropy(torch.tensor([[0.0, 0.0, -torch.inf], [3.0, -torch.inf, -torch.inf]]))
        tensor([0.6931, 0.0000])
    """
    check.rows_of("entropy", "logits", logits, "[..., V]")
    return _entropy(logits, backend)


@registered("entropy")
def _entropy(logits: Tensor, backend: str | None) -> Tensor:
    return run("stats", "entropy", backend, [logits])(logits)  # type: ignore[no-any-return]


@_entropy.register_fake
def _(logits: Tensor, backend: str | None) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.float32)


@registered("entropy_backward")
def _entropy_backward(grad: Tensor, logits: Tensor, backend: str | None) -> Tensor:
    return run("stats", "entropy_backward", backend, [logits])(grad, logits)  # type: ignore[no-any-return]


@_entropy_backward.register_fake
def _(grad: Tensor, logits: Tensor, backend: str | None) -> Tensor:
    return logits.new_empty(logits.shape)


def _entropy_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, ctx.backend = inputs
    ctx.save_for_backward(logits)


def _entropy_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (logits,) = ctx.saved_tensors
    return _entropy_backward(grad, logits, ctx.backend), None


_entropy.register_autograd(_entropy_gradient, setup_context=_entropy_setup)


def token_stats(logits: Tensor, *, backend: str | None = None) -> TokenStats:
    """Everything a decoding policy asks of rows of logits, in one read.

    p = softmax(logits): H = -sum p log p, log sum exp, p_top1, argmax, p_top1 - p_top2

    Args:
        logits: [..., V] float64, float32, bfloat16 or float16, any strides, V >= 1. Differentiable (all but `token`).
        backend: "triton", "cpp", "torch" or None.

    Returns:
        TokenStats(entropy, logsumexp, confidence, token, margin), each [...].

    Raises:
        TypeError: logits is not a floating tensor.
        ValueError: logits has no last dimension, or an empty one.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        As `entropy`. Undefined rows (NaN, +inf, or -inf only) are NaN in every float and 0 in `token`, with gradient 0.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> stats = ops.token_stats(torch.tensor([0.0, 0.0, 0.0, 0.0]))
        >>> stats.confidence, stats.token, stats.margin
        (tensor(0.2500), tensor(0), tensor(0.))
    """
    check.rows_of("token_stats", "logits", logits, "[..., V]")
    return TokenStats(*_token_stats(logits, backend))


@registered("token_stats")
def _token_stats(logits: Tensor, backend: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return run("stats", "token_stats", backend, [logits])(logits)  # type: ignore[no-any-return]


def _empty_stats(like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    h, lse, confidence, margin = (like.new_empty(like.shape[:-1], dtype=torch.float32) for _ in range(4))
    return h, lse, confidence, like.new_empty(like.shape[:-1], dtype=torch.int64), margin


@_token_stats.register_fake
def _(logits: Tensor, backend: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_stats(logits)


@registered("token_stats_backward")
def _token_stats_backward(
    grad_entropy: Tensor,
    grad_logsumexp: Tensor,
    grad_confidence: Tensor,
    grad_margin: Tensor,
    logits: Tensor,
    backend: str | None,
) -> Tensor:
    args = (grad_entropy, grad_logsumexp, grad_confidence, grad_margin, logits)
    return run("stats", "token_stats_backward", backend, [logits])(*args)  # type: ignore[no-any-return]


@_token_stats_backward.register_fake
def _(
    grad_entropy: Tensor,
    grad_logsumexp: Tensor,
    grad_confidence: Tensor,
    grad_margin: Tensor,
    logits: Tensor,
    backend: str | None,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _token_stats_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, ctx.backend = inputs
    ctx.save_for_backward(logits)


def _token_stats_gradient(
    ctx: Any, grad_h: Tensor, grad_lse: Tensor, grad_confidence: Tensor, grad_token: None, grad_margin: Tensor
) -> tuple[Tensor, None]:
    (logits,) = ctx.saved_tensors
    return _token_stats_backward(grad_h, grad_lse, grad_confidence, grad_margin, logits, ctx.backend), None


_token_stats.register_autograd(_token_stats_gradient, setup_context=_token_stats_setup)


def linear_token_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> TokenStats:
    """`token_stats` of hidden @ weight.T + bias, in vocabulary tiles: the logits [..., V] are never held.

    Args:
        hidden: [..., D] float64, float32, bfloat16 or float16.
        weight: [V, D], the head of the language model, V >= 1, D >= 1.
        bias: [V] or None.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        TokenStats(entropy, logsumexp, confidence, token, margin), each [...].

    Raises:
        TypeError: an operand is not a floating tensor.
        ValueError: shapes do not match, or operands are on several devices.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Products and sums in float32 (float64 if an operand is), so half-precision operands give finite and more exact
        logits than a half-precision head. Undefined rows as in `token_stats`. No gradient.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> ops.linear_token_stats(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])).token
        tensor(1)
    """
    check.rows_of("linear_token_stats", "hidden", hidden, "[..., D]")
    check.floating("linear_token_stats", "weight", weight)
    if weight.ndim != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"linear_token_stats: weight must be [V, D] with V at least 1 and D = {hidden.shape[-1]}, "
            f"got {check.describe(weight)}"
        )
    if bias is not None:
        check.floating("linear_token_stats", "bias", bias)
        check.shape("linear_token_stats", "bias", bias, weight.shape[:1], "[V]")
    check.same_device("linear_token_stats", hidden=hidden, weight=weight, bias=bias)
    return TokenStats(*_linear_token_stats(hidden, weight, bias, backend))


@registered("linear_token_stats")
def _linear_token_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = [x for x in (hidden, weight, bias) if x is not None]
    return run("stats", "linear_token_stats", backend, tensors)(hidden, weight, bias)  # type: ignore[no-any-return]


@_linear_token_stats.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_stats(hidden)
