"""KL divergence and the three reductions over K alternatives that labels need."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast.reference.stats import entropy, log_probabilities, undefined


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) = sum p (log p - log q); p = 0 adds 0, p > 0 where q = 0 gives inf."""
    zero_p, zero_q = p_logits == -torch.inf, q_logits == -torch.inf
    log_p, log_q = log_probabilities(p_logits), log_probabilities(q_logits)
    skip = zero_p | zero_q
    ratio = torch.where(zero_p, 0.0, log_p) - torch.where(zero_q, 0.0, log_q)
    kl = torch.where(skip, 0.0, log_p.exp() * ratio).sum(-1).clamp_min(0.0)
    kl = torch.where((zero_q & ~zero_p).any(-1), torch.inf, kl)
    return torch.where(undefined(p_logits) | undefined(q_logits), torch.nan, kl)


def _weighted(weights: Tensor, terms: Tensor) -> Tensor:
    """sum_k w_k term_k, where a weight of 0 silences its term."""
    return torch.where(weights == 0, 0.0, weights * torch.where(weights == 0, 0.0, terms)).sum(0)


def expected_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    """sum_k w_k H(softmax(logits_k))."""
    return _weighted(weights, entropy(logits))


def expected_kl(logits: Tensor, weights: Tensor, base_logits: Tensor) -> Tensor:
    """sum_k w_k KL(softmax(logits_k) || softmax(base))."""
    return _weighted(weights, kl_divergence(logits, base_logits.expand_as(logits)))


def mixture_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    """H(sum_k w_k softmax(logits_k))."""
    probabilities = torch.where(undefined(logits).unsqueeze(-1), torch.nan, torch.softmax(logits, -1))
    mixture = _weighted(weights.unsqueeze(-1), probabilities)
    return -torch.where(mixture == 0, 0.0, mixture * torch.where(mixture == 0, 1.0, mixture).log()).sum(-1)


def mixture_stats(logits: Tensor, weights: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three reductions."""
    mixture, entropy = mixture_entropy(logits, weights), expected_entropy(logits, weights)
    return mixture, entropy, expected_kl(logits, weights, base_logits)
