"""Policies that look at pairs of positions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast._moved import renamed_fields
from mdmi_fast.decoding.policies.limits import Limit, checked_limit, limit_of
from mdmi_fast.decoding.policies.order import take_lowest
from mdmi_fast.decoding.policies.registry import (
    COUNT,
    LIMIT,
    NUMBER,
    WHOLE,
    Seen,
    above_diagonal,
    one_of,
    policy,
)
from mdmi_fast.decoding.policies.rule import Rule, nothing_spent
from mdmi_fast.decoding.policies.sources import MISource, largest_mi, needs_step, pairwise_mi, scorer_of
from mdmi_fast.decoding.policies.step import Step, required
from mdmi_fast.ops import Selection, TokenStats


class PairRule(Rule):
    """A rule on entropies and pairs: where the mutual information is asked for, and what stands in where it is not.

    With fewer than `mi_min_masked` or more than `mi_max_masked` positions masked the source is not asked: min(H_i, H_j),
    which no mutual information exceeds, takes its place, so that such a pass risks less, and may take less, than with it.
    Nor is the source asked about a sequence where it cannot matter.
    """

    mi: MISource
    mi_min_masked: int
    mi_max_masked: int | None
    limit: int | None

    @property
    def reads_stats_only(self) -> bool:
        return not needs_step(self.mi)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        step = step.with_stats(stats)
        known: Tensor | None = None
        notes = step.notes
        if notes is not None:
            known = notes["mi"] = pairwise_mi(self.mi, hidden, mask, step)
        if self.mi_min_masked <= 1 and self.mi_max_masked is None:
            return self._with_source(stats, hidden, mask, step, known)
        count = mask.sum(dim=-1, keepdim=True)
        without = count < min(self.mi_min_masked, mask.shape[1] + 1)
        if self.mi_max_masked is not None:
            without |= count > min(self.mi_max_masked, mask.shape[1])
        bounded = self._apply(stats, largest_mi(stats.entropy, mask & without), mask & without, step)
        if bool(without.all()):
            return bounded
        asked = self._with_source(stats, hidden, mask & ~without, step, known)
        return Selection(bounded.selected | asked.selected, bounded.spent + asked.spent)

    def _with_source(
        self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step, known: Tensor | None
    ) -> Selection:
        if known is None:
            useful = mask & self._can_use_mi(stats, mask, step).unsqueeze(-1)
            if bool(useful.any()):
                known = pairwise_mi(self.mi, hidden, useful, step)
            else:
                known = stats.entropy.new_zeros(()).expand(*mask.shape, mask.shape[1])
        return self._apply(stats, known, mask, step)

    def _can_use_mi(self, stats: TokenStats, mask: Tensor, step: Step) -> Tensor:
        """[B] bool: sequences whose selection may depend on mutual information."""
        more_than_one = mask.sum(dim=-1) > 1
        return more_than_one if self.limit != 1 else torch.zeros_like(more_than_one)

    def _check_counts(self) -> None:
        owner = type(self).__name__
        if self.limit is not None:
            check.whole(owner, "limit", self.limit, 1)
        check.whole(owner, "mi_min_masked", self.mi_min_masked, 0)
        if self.mi_max_masked is not None:
            check.whole(owner, "mi_max_masked", self.mi_max_masked, 1)

    @abstractmethod
    def _apply(self, stats: TokenStats, mi: Tensor, mask: Tensor, step: Step) -> Selection:
        """The rule itself."""


def _budget_prices(seen: Seen, options: Mapping[str, str]) -> Tensor | None:
    if seen.mi is None:
        return None
    order = seen.entropy.argsort()
    lam, weight = (float(options.get(name, 1.0)) for name in ("lam", "entropy_weight"))
    dependence = seen.mi[order][:, order].tril(-1).sum(1)
    return (weight * seen.entropy[order] + lam * dependence).cumsum(0)[1:]


def _pair_prices(seen: Seen, options: Mapping[str, str]) -> Tensor | None:
    return None if seen.mi is None else above_diagonal(seen.mi)


_COUNTS = {"limit": COUNT, "mi_min_masked": WHOLE, "mi_max_masked": COUNT}


@renamed_fields(lazy=("mi_min_masked", lambda masked: masked + 1), most=("mi_max_masked", lambda masked: masked))
@policy(
    "mi-budget",
    unmasks="by entropy, while entropy_weight * entropy + lam * (MI to those chosen) sums to at most gamma nats; "
    "entropy_weight=0 for sampling",
    value=("gamma", LIMIT),
    options={"lam": NUMBER, "entropy_weight": NUMBER, "order": one_of("entropy", "cheapest"), **_COUNTS},
    needs_mi=True,
    prices=_budget_prices,
    tried=("",),
    tried_sampling=("entropy_weight=0",),
)
@dataclass(frozen=True)
class MIBudget(PairRule):
    """Greedy selection within a budget: cost_i = entropy_weight H_i + lam sum_{j chosen} I_ij (arXiv 2605.20187).

    entropy_weight 1 is the published rule. For sampling at temperature 1 use 0: independent positions of any entropy
    can be drawn together without error, so only dependence is a cost.

    Cost: the source's, for at most N^2 pairs a sequence; an estimator with `score_and_select` scores only those that
    can matter. Needs hidden states.

    Args:
        mi: an estimator, or another source such as `Probing`.
        gamma: nats a pass may spend, at least 0, may be inf; a number, one a sequence, or a `Schedule`.
        lam: weight of dependence, finite, at least 0.
        entropy_weight: weight of a position's own entropy, finite, at least 0.
        order: "entropy" looks at positions by entropy, ascending; "cheapest" takes the least cost at each moment.
        limit: most positions of a pass, at least 1; None for no limit.
        mi_min_masked: with fewer positions masked, min(H_i, H_j) stands in for I_ij and the source is not asked.
        mi_max_masked: likewise with more positions masked than this: the cost of a pass grows with its square. A limit in
            seconds is `TimeLimited`. None for no limit.
    """

    mi: MISource
    gamma: Limit
    lam: float = 1.0
    entropy_weight: float = 1.0
    order: Literal["entropy", "cheapest"] = "entropy"
    limit: int | None = None
    mi_min_masked: int = 0
    mi_max_masked: int | None = None

    def __post_init__(self) -> None:
        checked_limit("MIBudget", "gamma", self.gamma)
        check.weight("MIBudget", "lam", self.lam)
        check.weight("MIBudget", "entropy_weight", self.entropy_weight)
        check.one_of("MIBudget", "order", self.order, ("entropy", "cheapest"))
        self._check_counts()

    def _with_source(
        self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step, known: Tensor | None
    ) -> Selection:
        scorer = scorer_of(self.mi)
        if scorer is None or self.order != "entropy" or hidden is None:
            return super()._with_source(stats, hidden, mask, step, known)
        return scorer(
            stats.entropy,
            hidden,
            mask,
            gamma=limit_of(self.gamma, mask, step),
            lam=self.lam,
            entropy_weight=self.entropy_weight,
            limit=self.limit,
            stats=stats,
        )

    def _can_use_mi(self, stats: TokenStats, mask: Tensor, step: Step) -> Tensor:
        several = super()._can_use_mi(stats, mask, step)
        if self.lam == 0 or mask.shape[1] < 2:
            return torch.zeros_like(several)
        if self.entropy_weight == 0:
            return several
        # The first is free to exceed the budget; a second has to fit by its own entropy.
        own = float(self.entropy_weight) * stats.entropy.double().masked_fill(~mask, torch.inf)
        first, second = own.topk(2, dim=-1, largest=False).values.unbind(dim=-1)
        return several & (second <= limit_of(self.gamma, mask, step) - first)

    def _apply(self, stats: TokenStats, mi: Tensor, mask: Tensor, step: Step) -> Selection:
        return ops.select_budget(
            stats.entropy,
            mi,
            gamma=limit_of(self.gamma, mask, step),
            lam=self.lam,
            entropy_weight=self.entropy_weight,
            order=self.order,
            mask=mask,
            limit=self.limit,
        )


@renamed_fields(lazy=("mi_min_masked", lambda masked: masked + 1), most=("mi_max_masked", lambda masked: masked))
@policy(
    "mi-threshold",
    unmasks="a set without a pair of tau nats or more",
    value=("tau", LIMIT),
    options=_COUNTS,
    needs_mi=True,
    prices=_pair_prices,
    tried=("",),
)
@dataclass(frozen=True)
class MIThreshold(PairRule):
    """A maximal set of positions, lowest entropy first, with I_ij < tau for every pair (arXiv 2605.20187).

    Cost: the source's, for N^2 pairs a sequence. Needs hidden states.

    Args:
        mi: an estimator, or another source such as `Probing`.
        tau: nats below which a pair counts as independent, at least 0; a number, one a sequence, or a `Schedule`.
        limit: most positions of a pass, at least 1; None for no limit.
        mi_min_masked: with fewer positions masked, min(H_i, H_j) stands in for I_ij and the source is not asked.
        mi_max_masked: likewise with more positions masked than this: the cost of a pass grows with its square. A limit in
            seconds is `TimeLimited`. None for no limit.
    """

    mi: MISource
    tau: Limit
    limit: int | None = None
    mi_min_masked: int = 0
    mi_max_masked: int | None = None

    def __post_init__(self) -> None:
        checked_limit("MIThreshold", "tau", self.tau)
        self._check_counts()

    def _apply(self, stats: TokenStats, mi: Tensor, mask: Tensor, step: Step) -> Selection:
        tau = limit_of(self.tau, mask, step)
        if isinstance(tau, float | int):
            return ops.select_threshold(stats.entropy, mi, tau=tau, mask=mask, limit=self.limit)
        selected, spent = torch.zeros_like(mask), torch.zeros_like(tau)
        for value in tau.unique().tolist():
            own = mask & (tau == value).unsqueeze(-1)
            part = ops.select_threshold(stats.entropy, mi, tau=value, mask=own, limit=self.limit)
            selected, spent = selected | part.selected, spent + part.spent
        return Selection(selected, spent)


@policy(
    "coloring",
    unmasks="one group of a plan of all that is masked, without a pair of tau nats or more inside a group; planned "
    "again after replan passes",
    value=("tau", NUMBER),
    options={"replan": COUNT},
    needs_mi=True,
    prices=_pair_prices,
    tried=("replan=2",),
)
@dataclass(frozen=True)
class Coloring(Rule):
    """All masked positions planned ahead as groups without a pair of I_ij >= tau; a pass takes one group (arXiv 2605.20187).

    The groups are the colours of `ops.color`; a pass takes that of the position whose entropy is lowest now. Fewer
    questions to the source than `MIThreshold`, which asks in every pass; a plan knows nothing of what was written since.

    Cost: the source's for N^2 pairs, once a plan. Needs hidden states and a `Step` with memory.

    Args:
        mi: an estimator, or another source such as `Probing`.
        tau: nats below which a pair counts as independent, at least 0.
        replan: passes that a plan serves, at least 1; None: all.
    """

    mi: MISource
    tau: float
    replan: int | None = None

    def __post_init__(self) -> None:
        check.at_least("Coloring", "tau", self.tau, 0.0)
        if self.replan is not None:
            check.whole("Coloring", "replan", self.replan, 1)

    @property
    def reads_stats_only(self) -> bool:
        return not needs_step(self.mi)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        memory = required("Coloring", "memory", step.memory)
        step = step.with_stats(stats)
        fresh = (mask.new_full(mask.shape, -1, dtype=torch.int64), mask.new_zeros(len(mask), dtype=torch.int64))
        group, age = memory.get(self, fresh)
        outdated = (mask & (group < 0)).any(dim=-1)
        if self.replan is not None:
            outdated |= age >= min(self.replan, torch.iinfo(torch.int32).max)
        notes = step.notes
        if notes is not None:
            notes["mi"] = pairwise_mi(self.mi, hidden, mask, step)
        if bool(outdated.any()):
            planned = mask & outdated.unsqueeze(-1)
            mi = pairwise_mi(self.mi, hidden, planned, step) if notes is None else notes["mi"]
            group = torch.where(outdated.unsqueeze(-1), ops.color(mi, tau=self.tau, mask=planned), group)
            age = age.masked_fill(outdated, 0)
        first = take_lowest(stats.entropy, mask, 1)
        selected = mask & (group == (group * first).sum(dim=-1, keepdim=True))
        memory[self] = (group.masked_fill(selected, -1), age + 1)
        return nothing_spent(selected)
