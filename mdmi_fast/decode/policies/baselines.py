"""Policies that look at every position by itself (row S10 of the source)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mdmi_fast.decode.policies.base import at_least, longest_prefix, random_numbers, take_lowest
from mdmi_fast.ops import Selection, TokenStats
from mdmi_fast.ops import _checks as check


def _selection(selected: Tensor) -> Selection:
    return Selection(selected, torch.zeros(selected.shape[0], dtype=torch.float64, device=selected.device))


@dataclass(frozen=True)
class Sequential:
    """One position a pass, the one of lowest entropy: argmin_i H_i. The slowest policy, and the yardstick."""

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        return _selection(take_lowest(stats.entropy, mask, 1))


@dataclass(frozen=True)
class TopK:
    """The k positions of highest confidence max_v p(v) ("naive parallel"; LLaDA's rule).

    Args:
        k: positions a pass, at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        check.whole("TopK", "k", self.k, 1)

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        return _selection(take_lowest(-stats.confidence, mask, self.k))


@dataclass(frozen=True)
class Random:
    """k masked positions drawn at random: what any order at all gives.

    The draw depends on a sequence's seed and the pass, so it needs a `Step` with seeds; with a bare number all
    sequences of the batch draw alike.

    Args:
        k: positions a pass, at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        check.whole("Random", "k", self.k, 1)

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        return _selection(take_lowest(random_numbers(step, mask, stream=1), mask, self.k))


@dataclass(frozen=True)
class Confidence:
    """Every position with max_v p(v) >= threshold, or the most confident one (Fast-dLLM, arXiv 2505.22618).

    Args:
        threshold: a probability; above 1 it is never reached.
    """

    threshold: float

    def __post_init__(self) -> None:
        at_least("Confidence", "threshold", self.threshold, 0.0)

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        sure = (stats.confidence >= self.threshold) & mask
        return _selection(sure | take_lowest(-stats.confidence, mask, 1))


@dataclass(frozen=True)
class ConfidenceBudget:
    """The most positions, surest first, with sum_i (1 - max_v p_i(v)) <= epsilon.

    The sum bounds the probability that any of the argmax tokens is wrong (union bound), which is the risk when one
    right answer is sought: at temperature 0 this is the natural rule. The surest position is always taken.

    Args:
        epsilon: the risk of a pass, at least 0.
    """

    epsilon: float

    def __post_init__(self) -> None:
        at_least("ConfidenceBudget", "epsilon", self.epsilon, 0.0)

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        return Selection(*longest_prefix(1.0 - stats.confidence, mask, self.epsilon))


@dataclass(frozen=True)
class EntropyBound:
    """The most positions, lowest entropy first, with sum_i H_i - max_i H_i <= gamma (arXiv 2505.24857).

    Args:
        gamma: nats, at least 0.
    """

    gamma: float

    def __post_init__(self) -> None:
        at_least("EntropyBound", "gamma", self.gamma, 0.0)

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        return Selection(*longest_prefix(stats.entropy, mask, self.gamma, free_last=True))
