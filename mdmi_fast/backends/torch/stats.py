"""Statistics of rows of logits, a tile of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast.backends.torch._tiles import compute_dtype, row_sum, row_tiles, tile_rows

Stats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def probabilities(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Softmax and log softmax of the rows of one tile [r, V]; undefined rows are NaN throughout.

    The log of 0 is the lowest finite number, so that p log p is 0 there. The sums are torch's cascaded ones: those inside
    torch.log_softmax lose 2e-4 nats of entropy in float32 at V = 256,000.
    """
    logits = logits.to(dtype).contiguous()  # the order of a sum follows the layout
    shifted = (logits - logits.amax(-1, keepdim=True)).clamp_min_(torch.finfo(dtype).min)
    p = shifted.exp()
    total = row_sum(p).unsqueeze(-1)
    return p.div_(total), shifted.sub_(total.log())


def product(a: Tensor, b: Tensor) -> Tensor:
    """a * b in which 0 times anything is 0: a weight, a probability or a slope of 0 silences inf and NaN."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


def entropy_rows(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Entropy of the rows of one tile [r, V]."""
    p, log_p = probabilities(logits, dtype)
    return 0.0 - row_sum(p.mul_(log_p))  # 0.0 - 0.0 is 0.0, and -0.0 is not


def entropy(logits: Tensor) -> Tensor:
    lead = logits.shape[:-1]
    result = torch.empty(lead, dtype=torch.float32, device=logits.device)
    for x, out in row_tiles(lead, logits.shape[-1], logits, result):
        out.copy_(entropy_rows(x, compute_dtype(logits)))
    return result


def entropy_grad_rows(logits: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of `entropy_rows` times grad [r]; 0 in undefined rows."""
    p, log_p = probabilities(logits, dtype)
    h = row_sum(p * log_p).neg_().unsqueeze(-1)
    return torch.where(h.isnan(), 0.0, product(p.mul_(log_p.add_(h)), -grad.to(dtype).unsqueeze(-1)))


def entropy_backward(grad: Tensor, logits: Tensor) -> Tensor:
    lead = logits.shape[:-1]
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for x, g, out in row_tiles(lead, logits.shape[-1], logits, grad, result):
        out.copy_(entropy_grad_rows(x, g, compute_dtype(logits)))
    return result


def _empty_stats(lead: torch.Size, device: torch.device) -> Stats:
    h, lse, confidence, margin = (torch.empty(lead, dtype=torch.float32, device=device) for _ in range(4))
    return h, lse, confidence, torch.empty(lead, dtype=torch.int64, device=device), margin


def token_stats(logits: Tensor) -> Stats:
    lead, dtype = logits.shape[:-1], compute_dtype(logits)
    result = _empty_stats(lead, logits.device)
    for x, h, lse, confidence, token, margin in row_tiles(lead, logits.shape[-1], logits, *result):
        top, index = x.max(-1, keepdim=True)
        p, log_p = probabilities(x, dtype)
        p_top = p.gather(-1, index).squeeze(-1)
        lse.copy_((top.to(dtype) - log_p.gather(-1, index)).squeeze(-1))
        confidence.copy_(p_top)
        token.copy_(torch.where(p_top.isnan(), 0, index.squeeze(-1)))
        margin.copy_(p_top - p.scatter(-1, index, 0.0).amax(-1))
        h.copy_(0.0 - row_sum(p.mul_(log_p)))
    return result


def token_stats_backward(
    grad_entropy: Tensor, grad_logsumexp: Tensor, grad_confidence: Tensor, grad_margin: Tensor, logits: Tensor
) -> Tensor:
    lead, dtype = logits.shape[:-1], compute_dtype(logits)
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    grads = (grad_entropy, grad_logsumexp, grad_confidence, grad_margin)
    for x, g_h, g_lse, g_conf, g_margin, out in row_tiles(lead, logits.shape[-1], logits, *grads, result):
        g_h, g_lse, g_conf, g_margin = (g.to(dtype).unsqueeze(-1) for g in (g_h, g_lse, g_conf, g_margin))
        token = x.max(-1, keepdim=True).indices
        p, log_p = probabilities(x, dtype)
        h = row_sum(p * log_p).neg_().unsqueeze(-1)
        p_top = p.gather(-1, token)
        p_second, second = p.scatter(-1, token, -1.0).max(-1, keepdim=True)
        p_second = p_second.clamp_min(0.0)  # V = 1 has no runner-up
        d_top = (-p * p_top).scatter_add_(-1, token, p_top)
        d_margin = d_top + p * p_second
        d_margin.scatter_add_(-1, second, -p_second)
        dx = product(p, g_lse) + product(d_top, g_conf) + product(d_margin, g_margin) - product(p * (log_p + h), g_h)
        out.copy_(torch.where(h.isnan(), 0.0, dx))
    return result


def linear_token_stats(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Stats:
    lead, n_vocabulary = hidden.shape[:-1], weight.shape[0]
    dtype = compute_dtype(*(x for x in (hidden, weight, bias) if x is not None))
    result = _empty_stats(lead, hidden.device)
    # as many rows as columns in a tile of logits: the matrix product reads the least
    side = max(1, int(tile_rows(1, hidden.device) ** 0.5))
    n_columns = max(side, tile_rows(max(1, min(side, lead.numel())), hidden.device))
    for x, h, lse, confidence, token, margin in row_tiles(lead, tile_rows(1, hidden.device) // side, hidden, *result):
        x = x.to(dtype)
        n = x.shape[0]
        top, second = x.new_full((n,), -torch.inf), x.new_full((n,), -torch.inf)
        index = torch.zeros(n, dtype=torch.int64, device=x.device)
        total, weighted = x.new_zeros(n), x.new_zeros(n)  # sums of e^(x - top) and of e^(x - top) (x - top)
        for start in range(0, n_vocabulary, n_columns):
            columns = slice(start, start + n_columns)
            logits = x @ weight[columns].to(dtype).T
            if bias is not None:
                logits += bias[columns].to(dtype)
            tile_top, tile_index = logits.max(-1)
            runner_up = logits.scatter(-1, tile_index.unsqueeze(-1), -torch.inf).amax(-1)
            second = torch.maximum(torch.maximum(second, runner_up), torch.minimum(top, tile_top))
            index = torch.where(tile_top > top, tile_index + start, index)
            new_top = torch.maximum(top, tile_top)
            # a row of nothing but -inf so far keeps sums of 0 instead of -inf - -inf
            base = torch.where(new_top == -torch.inf, 0.0, new_top)
            scale = (top - base).exp()
            shift = (top - base).clamp_min_(torch.finfo(dtype).min)
            logits = (logits - base.unsqueeze(-1)).clamp_min_(torch.finfo(dtype).min)
            p = logits.exp()
            weighted = product(scale, weighted + product(shift, total)) + row_sum(logits.mul_(p))
            total = scale * total + row_sum(p)
            top = new_top
        total = torch.where(total == 0, torch.nan, total)
        h.copy_(total.log() - weighted / total)
        lse.copy_(top + total.log())
        confidence.copy_(total.reciprocal())
        token.copy_(torch.where(total.isnan(), 0, index))
        margin.copy_((1.0 - (second - top).exp()) / total)
    return result
