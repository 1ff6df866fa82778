"""KL divergence and the reductions over K alternatives that labels need, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads
from mdmi_fast.native._memory import DTYPE, Layout, Rows, address_of, rows_of, same_width
from mdmi_fast.native.stats import entropy_backward

Stack = tuple[Rows, Layout, int]


def _stack(logits: Tensor, weights: Tensor | None) -> tuple[tuple[Tensor, Tensor | None], Stack]:
    """Logits [K, ..., V] with weights [K, ...], and the tensors that they point into."""
    n_rows = logits.shape[1:-1].numel()
    logits, rows = rows_of(logits, skip=1)
    weights = None if weights is None else weights.double().contiguous()
    layout = (logits.shape[0], logits.stride(0), n_rows)
    return (logits, weights), (rows, layout, 0 if weights is None else address_of("weights", weights))


def _out(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), DTYPE[x.dtype]


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    return expected_kl(p_logits.unsqueeze(0), None, q_logits)


def kl_divergence_backward(grad: Tensor, p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    d_p, d_q = expected_kl_backward(grad, p_logits.unsqueeze(0), None, q_logits)
    return d_p.squeeze(0), d_q


def _stack_stats(
    logits: Tensor,
    weights: Tensor | None,
    base_logits: Tensor | None = None,
    *,
    mixture: Tensor | None = None,
    entropy: Tensor | None = None,
    kl: Tensor | None = None,
) -> None:
    """Writes what is asked for, in one read of the logits."""
    base: Rows = (0, 0, (1, 0, 0))
    if base_logits is not None:
        logits, base_logits = same_width(logits, base_logits)
        base_logits, base = rows_of(base_logits)
    alive, stack = _stack(logits, weights)
    out = [0 if x is None else x.data_ptr() for x in (mixture, entropy, kl)]
    _C.stack_stats(stack, base, logits.shape[-1], out, get_num_threads())
    del alive


def _new(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape[1:-1], dtype=torch.float32)


def expected_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    result = _new(logits)
    _stack_stats(logits, weights, entropy=result)
    return result


def expected_entropy_backward(grad: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    # a weight of 0 silences its alternative, also where the gradient that came in is inf
    return entropy_backward(torch.where(weights == 0, 0.0, grad.double() * weights.double()), logits)


def expected_kl(logits: Tensor, weights: Tensor | None, base_logits: Tensor) -> Tensor:
    result = _new(logits)
    _stack_stats(logits, weights, base_logits, kl=result)
    return result


def expected_kl_backward(
    grad: Tensor, logits: Tensor, weights: Tensor | None, base_logits: Tensor
) -> tuple[Tensor, Tensor]:
    dtypes = logits.dtype, base_logits.dtype
    logits, base_logits = same_width(logits, base_logits)
    d_logits, d_base = (torch.empty(x.shape, dtype=x.dtype) for x in (logits, base_logits))
    grad = grad.double().contiguous()
    alive, stack = _stack(logits, weights)
    base_logits, base = rows_of(base_logits)
    _C.expected_kl_backward(
        stack, base, base_logits.shape[-1], grad.data_ptr(), _out(d_logits), _out(d_base), get_num_threads()
    )
    del alive
    return d_logits.to(dtypes[0]), d_base.to(dtypes[1])


def mixture_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    result = _new(logits)
    _stack_stats(logits, weights, mixture=result)
    return result


def mixture_stats(logits: Tensor, weights: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mixture, entropy, kl = (_new(logits) for _ in range(3))
    _stack_stats(logits, weights, base_logits, mixture=mixture, entropy=entropy, kl=kl)
    return mixture, entropy, kl


def mixture_entropy_backward(grad: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    result = torch.empty(logits.shape, dtype=logits.dtype)
    grad = grad.double().contiguous()
    alive, stack = _stack(logits, weights)
    _C.mixture_entropy_backward(stack, logits.shape[-1], grad.data_ptr(), _out(result), get_num_threads())
    del alive
    return result
