"""Entropy and the other statistics of a row of logits, as the formulas read."""

from __future__ import annotations

import torch
from torch import Tensor


def log_probabilities(logits: Tensor) -> Tensor:
    """Log softmax; a row with NaN or +inf, or of -inf only, is NaN throughout."""
    shifted = logits - logits.detach().amax(-1, keepdim=True)  # a large maximum would swallow the sum
    # finite logits that lie farther apart than the dtype reaches are not infinitely far apart
    shifted = torch.where(logits == -torch.inf, shifted, shifted.clamp_min(torch.finfo(logits.dtype).min))
    return shifted - torch.logsumexp(shifted, -1, keepdim=True)


def undefined(logits: Tensor) -> Tensor:
    """Rows that are no distribution [...]."""
    return torch.isnan(logits).any(-1) | (logits.amax(-1).abs() == torch.inf)


def entropy(logits: Tensor) -> Tensor:
    """H = -sum p log p, with 0 log 0 = 0."""
    log_p = log_probabilities(logits)
    p = log_p.exp()
    # the inner where keeps -inf out of the product, so that autograd never meets 0 * inf
    terms = torch.where(logits == -torch.inf, 0.0, p * torch.where(logits == -torch.inf, 0.0, log_p))
    return torch.where(undefined(logits), torch.nan, -terms.sum(-1))


def token_stats(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(entropy, logsumexp, confidence, token, margin) of every row."""
    bad = undefined(logits)
    p = torch.softmax(logits, -1)
    token = torch.where(bad, 0, logits.argmax(-1))
    confidence = p.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    others = p.scatter(-1, token.unsqueeze(-1), 0.0)
    floats = (entropy(logits), torch.logsumexp(logits, -1), confidence, confidence - others.amax(-1))
    h, lse, confidence, margin = (torch.where(bad, torch.nan, x) for x in floats)
    return h, lse, confidence, token, margin


def linear_token_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`token_stats` of the logits that a linear head makes of hidden states."""
    return token_stats(torch.nn.functional.linear(hidden, weight, bias))
