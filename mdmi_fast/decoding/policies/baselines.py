"""Policies that look at every position by itself. All cost one sort of N numbers a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.policies.base import (
    Limit,
    Rule,
    checked_limit,
    limit_of,
    longest_prefix,
    nothing_spent,
    random_numbers,
    take_lowest,
)
from mdmi_fast.ops import Selection, TokenStats


@dataclass(frozen=True)
class Sequential(Rule):
    """One position a pass, the one of lowest entropy: argmin_i H_i. The slowest policy, and the yardstick."""

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int) -> Selection:
        return nothing_spent(take_lowest(stats.entropy, mask, 1))


@dataclass(frozen=True)
class TopK(Rule):
    """The k positions of highest confidence max_v p(v) ("naive parallel"; LLaDA's rule, arXiv 2502.09992).

    Args:
        k: positions a pass, at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        check.whole("TopK", "k", self.k, 1)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int) -> Selection:
        return nothing_spent(take_lowest(-stats.confidence, mask, self.k))


@dataclass(frozen=True)
class Random(Rule):
    """k masked positions drawn at random: what any order at all gives.

    The draw depends on a sequence's seed and the pass, so it needs a `Step` with seeds; with a bare number all
    sequences of the batch draw alike.

    Args:
        k: positions a pass, at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        check.whole("Random", "k", self.k, 1)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int) -> Selection:
        return nothing_spent(take_lowest(random_numbers(step, mask, stream=1), mask, self.k))


@dataclass(frozen=True)
class Confidence(Rule):
    """Every position with max_v p(v) >= threshold, or the most confident one (Fast-dLLM, arXiv 2505.22618).

    Args:
        threshold: a probability; above 1 it is never reached.
    """

    threshold: float

    def __post_init__(self) -> None:
        check.at_least("Confidence", "threshold", self.threshold, 0.0)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int) -> Selection:
        sure = (stats.confidence >= float(self.threshold)) & mask
        return nothing_spent(sure | take_lowest(-stats.confidence, mask, 1))


@dataclass(frozen=True)
class ConfidenceFactor(Rule):
    """The n most confident positions, n the largest with (n + 1)(1 - c_n) < factor, c_n the n-th highest confidence.

    The threshold rises with the number taken (Fast-dLLM, arXiv 2505.22618, its second rule). One position at least.

    Args:
        factor: at least 0.
    """

    factor: float

    def __post_init__(self) -> None:
        check.at_least("ConfidenceFactor", "factor", self.factor, 0.0)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int) -> Selection:
        doubt = (1.0 - stats.confidence.double()).masked_fill(~mask, torch.inf).sort(dim=-1).values
        following = torch.arange(2, mask.shape[1] + 2, device=mask.device)
        count = (following * doubt < float(self.factor)).sum(dim=-1).clamp(min=1).minimum(mask.sum(dim=-1))
        return nothing_spent(take_lowest(-stats.confidence, mask, count))


@dataclass(frozen=True)
class ConfidenceBudget(Rule):
    """The most positions, surest first, with sum_i (1 - max_v p_i(v)) <= epsilon.

    The sum bounds the probability that any of the argmax tokens is wrong (union bound), which is the risk when one
    right answer is sought: at temperature 0 this is the natural rule. The surest position is always taken.

    Args:
        epsilon: the risk of a pass, at least 0.
    """

    epsilon: Limit

    def __post_init__(self) -> None:
        checked_limit("ConfidenceBudget", "epsilon", self.epsilon)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int) -> Selection:
        epsilon = limit_of(self.epsilon, mask, step)
        return Selection(*longest_prefix(1.0 - stats.confidence, mask, epsilon))


@dataclass(frozen=True)
class EntropyBound(Rule):
    """The most positions, lowest entropy first, with sum_i H_i - max_i H_i <= gamma (arXiv 2505.24857).

    Args:
        gamma: nats, at least 0.
    """

    gamma: Limit

    def __post_init__(self) -> None:
        checked_limit("EntropyBound", "gamma", self.gamma)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int) -> Selection:
        gamma = limit_of(self.gamma, mask, step)
        return Selection(*longest_prefix(stats.entropy, mask, gamma, free_last=True))
