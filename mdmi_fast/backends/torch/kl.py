"""KL divergence and the reductions over K alternatives, a tile of rows at a time and one alternative after the other.

Log ratios are held in quarters: that of any two finite logits is finite, also where the ratio itself exceeds the dtype. Scaling
by 4 is exact, so nothing else is rounded otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast.backends.torch._tiles import compute_dtype, row_sum, row_tiles
from mdmi_fast.backends.torch.stats import entropy_grad_rows, entropy_rows, probabilities, product


def _quarter_logs(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Softmax and a quarter of log softmax of the rows of one tile [r, V]; undefined rows are NaN throughout."""
    logits = logits.to(dtype).contiguous() / 4
    shifted = (logits - logits.amax(-1, keepdim=True)).clamp_min_(torch.finfo(dtype).min / 2)
    p = (4 * shifted).exp()
    total = row_sum(p).unsqueeze(-1)
    return p.div_(total), shifted.sub_(total.log() / 4)


def _quarter_kl_rows(p_logits: Tensor, q_logits: Tensor, dtype: torch.dtype) -> Tensor:
    """A quarter of the KL of the rows of one tile [r, V]."""
    p, log_p = _quarter_logs(p_logits, dtype)
    _, log_q = _quarter_logs(q_logits, dtype)
    kl = row_sum(p.mul_(log_p.sub_(log_q))).clamp_min_(0.0)
    escaped = ((q_logits == -torch.inf) & (p_logits != -torch.inf)).any(-1)
    return torch.where(escaped & ~kl.isnan(), torch.inf, kl)


def _kl_grad_rows(
    p_logits: Tensor, q_logits: Tensor, weight: Tensor, grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of weight [r] times the KL of rows, times grad [r]; 0 where the value is not finite."""
    kl = _quarter_kl_rows(p_logits, q_logits, dtype).unsqueeze(-1)
    p, log_p = _quarter_logs(p_logits, dtype)
    q, log_q = _quarter_logs(q_logits, dtype)
    weight, grad = weight.to(dtype).unsqueeze(-1), grad.to(dtype).unsqueeze(-1)
    finite, g = kl.isfinite() & (4 * product(weight, kl)).isfinite(), product(weight, grad)
    d_p = torch.where(finite, 4 * product(p * (log_p - log_q - kl), g), 0.0)
    d_q = torch.where(finite, product(q - p, g), 0.0)
    return d_p, d_q


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    lead = p_logits.shape[:-1]
    result = torch.empty(lead, dtype=torch.float32, device=p_logits.device)
    for p, q, out in row_tiles(lead, p_logits.shape[-1], p_logits, q_logits, result):
        out.copy_(4 * _quarter_kl_rows(p, q, compute_dtype(p_logits, q_logits)))
    return result


def kl_divergence_backward(grad: Tensor, p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    lead = p_logits.shape[:-1]
    grad_p = torch.empty(p_logits.shape, dtype=p_logits.dtype, device=p_logits.device)
    grad_q = torch.empty(q_logits.shape, dtype=q_logits.dtype, device=q_logits.device)
    tiles = row_tiles(lead, p_logits.shape[-1], p_logits, q_logits, grad, grad_p, grad_q)
    for p, q, g, out_p, out_q in tiles:
        d_p, d_q = _kl_grad_rows(p, q, torch.ones_like(g), g, compute_dtype(p_logits, q_logits))
        out_p.copy_(d_p)
        out_q.copy_(d_q)
    return grad_p, grad_q


def _rows_first(logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[K, ..., V] and [K, ...] as views [..., K, V] and [..., K], so that rows can be cut into tiles."""
    return logits.movedim(0, -2), weights.movedim(0, -1)


def expected_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    lead, dtype = logits.shape[1:-1], compute_dtype(logits, weights)
    result = torch.empty(lead, dtype=torch.float32, device=logits.device)
    for x, w, out in row_tiles(lead, logits.shape[-1], *_rows_first(logits, weights), result):
        total = torch.zeros(out.shape, dtype=dtype, device=out.device)
        for k in range(w.shape[-1]):
            total += product(w[:, k].to(dtype), entropy_rows(x[:, k], dtype))
        out.copy_(total)
    return result


def expected_entropy_backward(grad: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    lead, dtype = logits.shape[1:-1], compute_dtype(logits, weights)
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    views = (*_rows_first(logits, weights), grad, result.movedim(0, -2))
    for x, w, g, out in row_tiles(lead, logits.shape[-1], *views):
        for k in range(w.shape[-1]):
            out[:, k] = entropy_grad_rows(x[:, k], product(w[:, k].to(dtype), g.to(dtype)), dtype)
    return result


def expected_kl(logits: Tensor, weights: Tensor, base_logits: Tensor) -> Tensor:
    lead, dtype = logits.shape[1:-1], compute_dtype(logits, weights, base_logits)
    result = torch.empty(lead, dtype=torch.float32, device=logits.device)
    for x, w, base, out in row_tiles(lead, logits.shape[-1], *_rows_first(logits, weights), base_logits, result):
        total = torch.zeros(out.shape, dtype=dtype, device=out.device)
        for k in range(w.shape[-1]):
            total += product(w[:, k].to(dtype), _quarter_kl_rows(x[:, k], base, dtype))
        out.copy_(4 * total)
    return result


def expected_kl_backward(grad: Tensor, logits: Tensor, weights: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor]:
    lead, dtype = logits.shape[1:-1], compute_dtype(logits, weights, base_logits)
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    grad_base = torch.empty(base_logits.shape, dtype=base_logits.dtype, device=base_logits.device)
    views = (*_rows_first(logits, weights), base_logits, grad, grad_logits.movedim(0, -2), grad_base)
    for x, w, base, g, out, out_base in row_tiles(lead, logits.shape[-1], *views):
        total = torch.zeros(base.shape, dtype=dtype, device=base.device)
        for k in range(w.shape[-1]):
            d_x, d_base = _kl_grad_rows(x[:, k], base, w[:, k], g, dtype)
            out[:, k] = d_x
            total += d_base
        out_base.copy_(total)
    return grad_logits, grad_base


def _mixture_rows(logits: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_k w_k softmax(logits_k) of one tile: [r, K, V] and [r, K] to [r, V]."""
    mixture = torch.zeros(logits.shape[0], logits.shape[-1], dtype=dtype, device=logits.device)
    for k in range(weights.shape[-1]):
        mixture += product(weights[:, k, None].to(dtype), probabilities(logits[:, k], dtype)[0])
    return mixture


def mixture_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    lead, dtype = logits.shape[1:-1], compute_dtype(logits, weights)
    result = torch.empty(lead, dtype=torch.float32, device=logits.device)
    for x, w, out in row_tiles(lead, logits.shape[-1], *_rows_first(logits, weights), result):
        mixture = _mixture_rows(x, w, dtype)
        out.copy_(0.0 - row_sum(torch.xlogy(mixture, mixture)))
    return result


def mixture_entropy_backward(grad: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    lead, dtype = logits.shape[1:-1], compute_dtype(logits, weights)
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    views = (*_rows_first(logits, weights), grad, result.movedim(0, -2))
    for x, w, g, out in row_tiles(lead, logits.shape[-1], *views):
        mixture = _mixture_rows(x, w, dtype)
        slope = torch.where(mixture == 0, 0.0, -mixture.log())
        undefined = slope.isnan().any(-1, keepdim=True)
        for k in range(w.shape[-1]):
            q, _ = probabilities(x[:, k], dtype)
            d_x = q * (slope - row_sum(q * slope).unsqueeze(-1))
            d_x = product(d_x, product(w[:, k].to(dtype), g.to(dtype)).unsqueeze(-1))
            out[:, k] = torch.where(undefined, 0.0, d_x)
    return result


def mixture_stats(logits: Tensor, weights: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mixture, entropy = mixture_entropy(logits, weights), expected_entropy(logits, weights)
    return mixture, entropy, expected_kl(logits, weights, base_logits)
