"""KL divergence, and what labels need of K alternatives: their expected entropy, expected KL, and the entropy of the mixture."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.ops._dispatch import run
from mdmi_fast.ops._register import registered


def kl_divergence(p_logits: Tensor, q_logits: Tensor, *, backend: str | None = None) -> Tensor:
    """KL divergence of softmax(p_logits) from softmax(q_logits).

    KL(p || q) = sum_v p_v (log p_v - log q_v)

    Args:
        p_logits: [..., V] float64, float32, bfloat16 or float16, any strides, V >= 1. Differentiable.
        q_logits: [..., V] of the same shape (expand it to broadcast). Differentiable.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [...] float32, nats, never negative.

    Raises:
        TypeError: an operand is not a floating tensor.
        ValueError: shapes differ or V is 0, or the operands are on several devices.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Accumulated in float32 (float64 if an operand is). A p logit of -inf adds 0, also where q is 0. A q logit of -inf
        where the p logit is not gives +inf; logits that are finite do so only where the value exceeds float32. An undefined row
        (NaN, +inf, or -inf only) on either side gives NaN. Rows that are not finite have gradient 0, and so has a probability of
        0, whatever comes in.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> p, q = torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, 0.0])
        >>> ops.kl_divergence(p, q), ops.kl_divergence(q, p)
        (tensor(0.6931), tensor(inf))
    """
    check.rows_of("kl_divergence", "p_logits", p_logits, "[..., V]")
    check.floating("kl_divergence", "q_logits", q_logits)
    check.shape("kl_divergence", "q_logits", q_logits, p_logits.shape, "of the shape of p_logits")
    check.same_device("kl_divergence", p_logits=p_logits, q_logits=q_logits)
    return _kl_divergence(p_logits, q_logits, backend)


@registered("kl_divergence")
def _kl_divergence(p_logits: Tensor, q_logits: Tensor, backend: str | None) -> Tensor:
    tensors = [p_logits, q_logits]
    return run("kl", "kl_divergence", backend, tensors)(*tensors)  # type: ignore[no-any-return]


@_kl_divergence.register_fake
def _(p_logits: Tensor, q_logits: Tensor, backend: str | None) -> Tensor:
    return p_logits.new_empty(p_logits.shape[:-1], dtype=torch.float32)


@registered("kl_divergence_backward")
def _kl_divergence_backward(
    grad: Tensor, p_logits: Tensor, q_logits: Tensor, backend: str | None
) -> tuple[Tensor, Tensor]:
    tensors = [p_logits, q_logits]
    return run("kl", "kl_divergence_backward", backend, tensors)(grad, *tensors)  # type: ignore[no-any-return]


@_kl_divergence_backward.register_fake
def _(grad: Tensor, p_logits: Tensor, q_logits: Tensor, backend: str | None) -> tuple[Tensor, Tensor]:
    return p_logits.new_empty(p_logits.shape), q_logits.new_empty(q_logits.shape)


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _kl_divergence_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    p_logits, q_logits = ctx.saved_tensors
    return *_kl_divergence_backward(grad, p_logits, q_logits, ctx.backend), None


_kl_divergence.register_autograd(_kl_divergence_gradient, setup_context=_save_all)


def _check_alternatives(op: str, logits: Tensor, weights: Tensor) -> None:
    check.rows_of(op, "logits", logits, "[K, ..., V]", 2)
    check.floating(op, "weights", weights)
    check.shape(op, "weights", weights, logits.shape[:-1], "[K, ...]")
    check.same_device(op, logits=logits, weights=weights)
    if weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: weights must not require a gradient (it has none): pass weights.detach()")


def _check_base(op: str, logits: Tensor, base_logits: Tensor) -> None:
    check.floating(op, "base_logits", base_logits)
    check.shape(op, "base_logits", base_logits, logits.shape[1:], "[..., V]")
    check.same_device(op, logits=logits, base_logits=base_logits)


def expected_entropy(logits: Tensor, weights: Tensor, *, backend: str | None = None) -> Tensor:
    """Expected entropy of K alternatives.

    sum_k w_k H(softmax(logits_k))

    Args:
        logits: [K, ..., V] float64, float32, bfloat16 or float16, any strides, V >= 1. Differentiable.
        weights: [K, ...], probabilities over K; constants. They are not checked, and not normalised.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [...] float32, nats.

    Raises:
        TypeError: an operand is not a floating tensor.
        ValueError: shapes do not match, weights require a gradient, or the operands are on several devices.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Accumulated in float32 (float64 if an operand is), k ascending, without a [K, ...] temporary. A weight of 0 adds 0
        whatever the entropy is, and has gradient 0 whatever comes in; else as `entropy`.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> ops.expected_entropy(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]), torch.tensor([0.5, 0.5]))
        tensor(0.3466)
    """
    _check_alternatives("expected_entropy", logits, weights)
    return _expected_entropy(logits, weights, backend)


@registered("expected_entropy")
def _expected_entropy(logits: Tensor, weights: Tensor, backend: str | None) -> Tensor:
    tensors = [logits, weights]
    return run("kl", "expected_entropy", backend, tensors)(*tensors)  # type: ignore[no-any-return]


@_expected_entropy.register_fake
def _(logits: Tensor, weights: Tensor, backend: str | None) -> Tensor:
    return logits.new_empty(logits.shape[1:-1], dtype=torch.float32)


@registered("expected_entropy_backward")
def _expected_entropy_backward(grad: Tensor, logits: Tensor, weights: Tensor, backend: str | None) -> Tensor:
    tensors = [logits, weights]
    return run("kl", "expected_entropy_backward", backend, tensors)(grad, *tensors)  # type: ignore[no-any-return]


@_expected_entropy_backward.register_fake
def _(grad: Tensor, logits: Tensor, weights: Tensor, backend: str | None) -> Tensor:
    return logits.new_empty(logits.shape)


def _expected_entropy_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    logits, weights = ctx.saved_tensors
    return _expected_entropy_backward(grad, logits, weights, ctx.backend), None, None


_expected_entropy.register_autograd(_expected_entropy_gradient, setup_context=_save_all)


def expected_kl(logits: Tensor, weights: Tensor, base_logits: Tensor, *, backend: str | None = None) -> Tensor:
    """Expected KL divergence of K alternatives from a base.

    sum_k w_k KL(softmax(logits_k) || softmax(base_logits))

    Args:
        logits: [K, ..., V] float64, float32, bfloat16 or float16, any strides, V >= 1. Differentiable.
        weights: [K, ...], probabilities over K; constants. They are not checked, and not normalised.
        base_logits: [..., V]. Differentiable.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [...] float32, nats.

    Raises:
        TypeError: an operand is not a floating tensor.
        ValueError: shapes do not match, weights require a gradient, or the operands are on several devices.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Accumulated in float32 (float64 if an operand is), k ascending, without a [K, ...] temporary. A weight of 0 adds 0
        whatever the divergence is, and has gradient 0 whatever comes in; else as `kl_divergence`, each weighted term a row.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> alternatives = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
        >>> ops.expected_kl(alternatives, torch.tensor([0.5, 0.5]), torch.zeros(2))
        tensor(0.6931)
    """
    _check_alternatives("expected_kl", logits, weights)
    _check_base("expected_kl", logits, base_logits)
    return _expected_kl(logits, weights, base_logits, backend)


@registered("expected_kl")
def _expected_kl(logits: Tensor, weights: Tensor, base_logits: Tensor, backend: str | None) -> Tensor:
    tensors = [logits, weights, base_logits]
    return run("kl", "expected_kl", backend, tensors)(*tensors)  # type: ignore[no-any-return]


@_expected_kl.register_fake
def _(logits: Tensor, weights: Tensor, base_logits: Tensor, backend: str | None) -> Tensor:
    return logits.new_empty(logits.shape[1:-1], dtype=torch.float32)


@registered("expected_kl_backward")
def _expected_kl_backward(
    grad: Tensor, logits: Tensor, weights: Tensor, base_logits: Tensor, backend: str | None
) -> tuple[Tensor, Tensor]:
    tensors = [logits, weights, base_logits]
    return run("kl", "expected_kl_backward", backend, tensors)(grad, *tensors)  # type: ignore[no-any-return]


@_expected_kl_backward.register_fake
def _(grad: Tensor, logits: Tensor, weights: Tensor, base_logits: Tensor, backend: str | None) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), base_logits.new_empty(base_logits.shape)


def _expected_kl_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
    logits, weights, base_logits = ctx.saved_tensors
    d_logits, d_base = _expected_kl_backward(grad, logits, weights, base_logits, ctx.backend)
    return d_logits, None, d_base, None


_expected_kl.register_autograd(_expected_kl_gradient, setup_context=_save_all)


def mixture_entropy(logits: Tensor, weights: Tensor, *, backend: str | None = None) -> Tensor:
    """Entropy of a mixture of K alternatives.

    H(sum_k w_k softmax(logits_k)); minus `expected_entropy`, it is the mutual information of the alternative and the token

    Args:
        logits: [K, ..., V] float64, float32, bfloat16 or float16, any strides, V >= 1. Differentiable.
        weights: [K, ...], probabilities over K; constants. They are not checked, and not normalised.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [...] float32, nats.

    Raises:
        TypeError: an operand is not a floating tensor.
        ValueError: shapes do not match, weights require a gradient, or the operands are on several devices.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Accumulated in float32 (float64 if an operand is), k ascending. A weight of 0 adds 0 whatever its row is, and has gradient
        0 whatever comes in; any other undefined row (NaN, +inf, or -inf only) gives NaN, with gradient 0.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> alternatives = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
        >>> ops.mixture_entropy(alternatives, torch.tensor([0.5, 0.5]))
        tensor(0.6931)
    """
    _check_alternatives("mixture_entropy", logits, weights)
    return _mixture_entropy(logits, weights, backend)


@registered("mixture_entropy")
def _mixture_entropy(logits: Tensor, weights: Tensor, backend: str | None) -> Tensor:
    tensors = [logits, weights]
    return run("kl", "mixture_entropy", backend, tensors)(*tensors)  # type: ignore[no-any-return]


@_mixture_entropy.register_fake
def _(logits: Tensor, weights: Tensor, backend: str | None) -> Tensor:
    return logits.new_empty(logits.shape[1:-1], dtype=torch.float32)


@registered("mixture_entropy_backward")
def _mixture_entropy_backward(grad: Tensor, logits: Tensor, weights: Tensor, backend: str | None) -> Tensor:
    tensors = [logits, weights]
    return run("kl", "mixture_entropy_backward", backend, tensors)(grad, *tensors)  # type: ignore[no-any-return]


@_mixture_entropy_backward.register_fake
def _(grad: Tensor, logits: Tensor, weights: Tensor, backend: str | None) -> Tensor:
    return logits.new_empty(logits.shape)


def _mixture_entropy_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    logits, weights = ctx.saved_tensors
    return _mixture_entropy_backward(grad, logits, weights, ctx.backend), None, None


_mixture_entropy.register_autograd(_mixture_entropy_gradient, setup_context=_save_all)


class MixtureStats(NamedTuple):
    """Statistics of K alternatives [K, ..., V], each [...] float32, nats."""

    mixture_entropy: Tensor
    """H(sum_k w_k softmax(logits_k))."""
    expected_entropy: Tensor
    """sum_k w_k H(softmax(logits_k))."""
    expected_kl: Tensor
    """sum_k w_k KL(softmax(logits_k) || softmax(base_logits))."""


def mixture_stats(logits: Tensor, weights: Tensor, base_logits: Tensor, *, backend: str | None = None) -> MixtureStats:
    """Everything that a label asks of K alternatives, in one read of them.

    `mixture_entropy`, `expected_entropy` and `expected_kl`; the first minus the second is the mutual information of the
    alternative and the token

    Args:
        logits: [K, ..., V] float64, float32, bfloat16 or float16, any strides, V >= 1.
        weights: [K, ...], probabilities over K. They are not checked, and not normalised.
        base_logits: [..., V].
        backend: "triton", "cpp", "torch" or None.

    Returns:
        MixtureStats(mixture_entropy, expected_entropy, expected_kl), each [...].

    Raises:
        TypeError: an operand is not a floating tensor.
        ValueError: shapes do not match, weights require a gradient, or the operands are on several devices.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Each as the op of its name. No gradient.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> alternatives = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
        >>> stats = ops.mixture_stats(alternatives, torch.tensor([0.5, 0.5]), torch.zeros(2))
        >>> stats.mixture_entropy, stats.expected_entropy, stats.expected_kl
        (tensor(0.6931), tensor(0.), tensor(0.6931))
    """
    _check_alternatives("mixture_stats", logits, weights)
    _check_base("mixture_stats", logits, base_logits)
    return MixtureStats(*_mixture_stats(logits, weights, base_logits, backend))


@registered("mixture_stats")
def _mixture_stats(
    logits: Tensor, weights: Tensor, base_logits: Tensor, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = [logits, weights, base_logits]
    return run("kl", "mixture_stats", backend, tensors)(*tensors)  # type: ignore[no-any-return]


@_mixture_stats.register_fake
def _(logits: Tensor, weights: Tensor, base_logits: Tensor, backend: str | None) -> tuple[Tensor, Tensor, Tensor]:
    mixture, entropy, kl = (logits.new_empty(logits.shape[1:-1], dtype=torch.float32) for _ in range(3))
    return mixture, entropy, kl
