"""Policies that look at every position by itself. All cost one sort of N numbers a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.policies.limits import Limit, checked_limit, limit_of
from mdmi_fast.decoding.policies.order import longest_prefix, random_numbers, take_lowest
from mdmi_fast.decoding.policies.registry import COUNT, LIMIT, NUMBER, policy, threshold
from mdmi_fast.decoding.policies.rule import Rule, nothing_spent
from mdmi_fast.decoding.policies.step import Step
from mdmi_fast.ops import Selection, TokenStats


@policy("sequential", unmasks="the position of lowest entropy")
@dataclass(frozen=True)
class Sequential(Rule):
    """One position a pass, the one of lowest entropy: argmin_i H_i. The slowest policy, and the yardstick."""

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        return nothing_spent(take_lowest(stats.entropy, mask, 1))


@policy("topk", unmasks="the k most confident positions", value=("k", COUNT), tried=("",))
@dataclass(frozen=True)
class TopK(Rule):
    """The k positions of highest confidence max_v p(v) ("naive parallel"; LLaDA's rule, arXiv 2502.09992).

    Args:
        k: positions a pass, at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        check.whole("TopK", "k", self.k, 1)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        return nothing_spent(take_lowest(-stats.confidence, mask, self.k))


@policy("random", unmasks="k positions at random", value=("k", COUNT), tried=("",))
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

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        return nothing_spent(take_lowest(random_numbers(step, mask, stream=1), mask, self.k))


@policy(
    "confidence",
    unmasks="every position of at least this confidence, or the surest",
    value=("threshold", NUMBER),
    prices=lambda seen, options: seen.doubt.sort().values[1:],
    setting=threshold,
    tried=("",),
)
@dataclass(frozen=True)
class Confidence(Rule):
    """Every position with max_v p(v) >= threshold, or the most confident one (Fast-dLLM, arXiv 2505.22618).

    Args:
        threshold: a probability; above 1 it is never reached.
    """

    threshold: float

    def __post_init__(self) -> None:
        check.at_least("Confidence", "threshold", self.threshold, 0.0)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        sure = (stats.confidence >= float(self.threshold)) & mask
        return nothing_spent(sure | take_lowest(-stats.confidence, mask, 1))


def _following(n: int, device: torch.device | str) -> Tensor:
    """[n] int64: 2 .. n + 1, one more than how many positions would be taken."""
    return torch.arange(2, n + 2, device=device)


@policy(
    "confidence-factor",
    unmasks="the n surest, for the largest n with (n + 1)(1 - confidence of the n-th) < factor",
    value=("factor", NUMBER),
    prices=lambda seen, options: (_following(len(seen.doubt), "cpu") * seen.doubt.sort().values)[1:],
    tried=("",),
)
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

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        doubt = (1.0 - stats.confidence.double()).masked_fill(~mask, torch.inf).sort(dim=-1).values
        count = (
            (_following(mask.shape[1], mask.device) * doubt < float(self.factor))
            .sum(dim=-1)
            .clamp(min=1)
            .minimum(mask.sum(dim=-1))
        )
        return nothing_spent(take_lowest(-stats.confidence, mask, count))


@policy(
    "confidence-budget",
    unmasks="the surest, while the chances of error sum to at most epsilon",
    value=("epsilon", LIMIT),
    prices=lambda seen, options: seen.doubt.sort().values.cumsum(0)[1:],
    tried=("",),
)
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

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        epsilon = limit_of(self.epsilon, mask, step)
        return Selection(*longest_prefix(1.0 - stats.confidence, mask, epsilon))


@policy(
    "entropy-bound",
    unmasks="the lowest entropies, while their sum without the largest stays within gamma nats",
    value=("gamma", LIMIT),
    prices=lambda seen, options: seen.entropy.sort().values.cumsum(0)[:-1],
    tried=("",),
)
@dataclass(frozen=True)
class EntropyBound(Rule):
    """The most positions, lowest entropy first, with sum_i H_i - max_i H_i <= gamma (arXiv 2505.24857).

    Args:
        gamma: nats, at least 0.
    """

    gamma: Limit

    def __post_init__(self) -> None:
        checked_limit("EntropyBound", "gamma", self.gamma)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        gamma = limit_of(self.gamma, mask, step)
        return Selection(*longest_prefix(stats.entropy, mask, gamma, free_last=True))
