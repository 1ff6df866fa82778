"""Policies that look at pairs of positions, and where the pairs' mutual information comes from."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.decoding.policies.base import (
    Limit,
    Memory,
    Rule,
    Step,
    checked_limit,
    limit_of,
    nothing_spent,
    random_numbers,
    take_lowest,
)
from mdmi_fast.decoding.randomness import places
from mdmi_fast.labels import FORMS, Form, label_mi
from mdmi_fast.ops import Selection, TokenStats

Answer = TypeVar("Answer")


class StepwiseMI(Protocol):
    """A source of mutual information that needs to know more of the pass than hidden states."""

    needs_step: ClassVar[Literal[True]]

    def __call__(self, hidden: Tensor, mask: Tensor, step: int) -> Tensor: ...


MISource = Callable[[Tensor, Tensor], Tensor] | StepwiseMI
"""An estimator, or anything that turns hidden [B, N, D] and mask [B, N] into mutual information [B, N, N] in nats."""


def pairwise_mi(source: MISource, hidden: Tensor | None, mask: Tensor, step: int) -> Tensor:
    """[B, N, N] nats from any kind of source.

    Raises:
        TypeError: for what is no source.
        ValueError: if there is no hidden state to ask it about.
    """
    if isinstance(source, type) or not callable(source):
        raise TypeError(f"policy: mi must be an estimator, Probing() or another callable, got {source!r}")
    if hidden is None:
        raise ValueError("policy: hidden must be [B, N, D] for mutual information, got None")
    if getattr(source, "needs_step", False):
        return source(hidden, mask, step)  # type: ignore[call-arg]
    return source(hidden, mask)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Probing:
    """The model's own answer, by probing every value of every masked position in every pass: an oracle for study.

    Args:
        form: which reading of the probes, see `label_mi`.
        epsilon: nats an entry may be wrong by, see `label_mi`.
        batch_size: sequences in one forward pass.
    """

    needs_step: ClassVar[Literal[True]] = True
    form: Form = "joint"
    epsilon: float = 0.0
    batch_size: int = 512

    def __post_init__(self) -> None:
        check.one_of("Probing", "form", self.form, FORMS)
        check.at_least("Probing", "epsilon", self.epsilon, 0.0)
        check.whole("Probing", "batch_size", self.batch_size, 1)

    def __call__(self, hidden: Tensor, mask: Tensor, step: int) -> Tensor:
        model, tokens = getattr(step, "model", None), getattr(step, "tokens", None)
        if model is None or tokens is None:
            raise ValueError("Probing: step must be a Step with model and tokens, got a bare number")
        return label_mi(
            model,
            tokens,
            mask,
            form=self.form,
            epsilon=self.epsilon,
            attention_mask=getattr(step, "attention_mask", None),
            batch_size=self.batch_size,
        ).mi


@dataclass(frozen=True)
class Shuffled:
    """A control: the values of another source, dealt out at random among the masked pairs of each sequence.

    Like `Random`, it needs a `Step` with seeds, or all sequences are dealt alike.

    Args:
        source: a symmetric one; of each pair the value of i < j counts.
    """

    needs_step: ClassVar[Literal[True]] = True
    source: MISource

    def __call__(self, hidden: Tensor, mask: Tensor, step: int) -> Tensor:
        mi = pairwise_mi(self.source, hidden, mask, step)
        row, column = torch.triu_indices(mask.shape[1], mask.shape[1], offset=1, device=mask.device)
        both = mask[:, row] & mask[:, column]
        # Pairs are numbered within their own sequence, so that padding changes nothing.
        visible = getattr(step, "attention_mask", None)
        place = places(mask, visible)
        length = mask.shape[1] if visible is None else visible.sum(dim=-1, keepdim=True)
        first, second = place[..., row], place[..., column]
        number = first * length - first * (first + 1) // 2 + second - first - 1
        luck = random_numbers(step, mask, stream=1, index=number)
        # The pairs with both ends masked come first in either order; the rest keeps its zeros.
        order = (~both).to(torch.int8).argsort(dim=-1, stable=True)
        drawn = luck.masked_fill(~both, torch.inf).argsort(dim=-1, stable=True)
        values = mi[:, row, column]
        dealt = torch.zeros_like(values).scatter(-1, order, values.gather(-1, drawn)) * both
        shuffled = torch.zeros_like(mi)
        shuffled[:, row, column] = dealt
        return shuffled + shuffled.transpose(-1, -2)


def _extra(source: MISource, stats: TokenStats) -> dict[str, TokenStats]:
    """What a source with `score_and_select` wants to know besides."""
    return {"stats": stats} if getattr(source, "needs_step", False) else {}


class Within:
    """Another source as long as its answers are fast enough; else min(H_i, H_j) stands in for I_ij.

    How long an answer will take is predicted from the seconds a pair of the last one, a tenth less after every pass without.
    So results depend on the clock, and on the batch: use `most` of the rules instead where decoding has to be reproducible.

    Args:
        source: the other source.
        seconds: most of a pass, at least 0.
    """

    needs_step: ClassVar[Literal[True]] = True

    def __init__(self, source: MISource, seconds: float) -> None:
        self.source, self.seconds = source, check.at_least("Within", "seconds", seconds, 0.0)
        self._seconds_a_pair = 0.0

    def __repr__(self) -> str:
        return f"Within({self.source!r}, {self.seconds})"

    def __call__(self, hidden: Tensor, mask: Tensor, step: int) -> Tensor:
        stats = getattr(step, "stats", None)
        if stats is None:
            raise ValueError("Within: step must be a Step with stats, got a bare number")
        return self._in_time(
            mask, lambda: pairwise_mi(self.source, hidden, mask, step), lambda: _most_mi(stats.entropy, mask)
        )

    @property
    def score_and_select(self) -> Callable[..., Selection] | None:
        """As that of the source, if it has one."""
        scorer: Callable[..., Selection] | None = getattr(self.source, "score_and_select", None)
        if scorer is None:
            return None

        def select(entropy: Tensor, hidden: Tensor, mask: Tensor, *, stats: TokenStats, **rule: Any) -> Selection:
            return self._in_time(
                mask,
                lambda: Selection(*scorer(entropy, hidden, mask, **rule, **_extra(self.source, stats))),
                lambda: ops.select_budget(entropy, _most_mi(entropy, mask), mask=mask, **rule),
            )

        return select

    def _in_time(self, mask: Tensor, ask: Callable[[], Answer], do_without: Callable[[], Answer]) -> Answer:
        pairs = int(mask.sum(dim=-1).square().sum())
        if pairs * self._seconds_a_pair > self.seconds:
            self._seconds_a_pair *= 0.9
            return do_without()
        start = time.perf_counter()
        answer = ask()
        if mask.is_cuda:
            torch.cuda.synchronize(mask.device)
        self._seconds_a_pair = (time.perf_counter() - start) / max(pairs, 1)
        return answer


def _most_mi(entropy: Tensor, mask: Tensor) -> Tensor:
    """[B, N, N] nats: min(H_i, H_j) of masked pairs, which no mutual information exceeds."""
    known = entropy.masked_fill(~mask, 0.0)
    return torch.minimum(known.unsqueeze(-1), known.unsqueeze(-2))


class _PairRule(Rule):
    """A rule on entropies and pairs: where the mutual information is asked for, and what stands in where it is not.

    With at most `lazy` or more than `most` positions masked the source is not asked: min(H_i, H_j),
    which no mutual information exceeds, takes its place, so that such a pass risks less, and may take less, than with it.
    Nor is the source asked about a sequence where it cannot matter.
    """

    mi: MISource
    lazy: int
    most: int | None
    limit: int | None

    @property
    def reads_stats_only(self) -> bool:
        return not getattr(self.mi, "needs_step", False)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int) -> Selection:
        step = Step.with_stats(step, stats)
        known: Tensor | None = None
        notes = step.notes
        if notes is not None:
            known = notes["mi"] = pairwise_mi(self.mi, hidden, mask, step)
        if self.lazy == 0 and self.most is None:
            return self._with_source(stats, hidden, mask, step, known)
        count = mask.sum(dim=-1, keepdim=True)
        without = count <= min(self.lazy, mask.shape[1])
        if self.most is not None:
            without |= count > min(self.most, mask.shape[1])
        bounded = self._apply(stats, _most_mi(stats.entropy, mask & without), mask & without, step)
        if bool(without.all()):
            return bounded
        asked = self._with_source(stats, hidden, mask & ~without, step, known)
        return Selection(bounded.selected | asked.selected, bounded.spent + asked.spent)

    def _with_source(
        self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int, known: Tensor | None
    ) -> Selection:
        if known is None:
            useful = mask & self._can_use_mi(stats, mask, step).unsqueeze(-1)
            if bool(useful.any()):
                known = pairwise_mi(self.mi, hidden, useful, step)
            else:
                known = stats.entropy.new_zeros(()).expand(*mask.shape, mask.shape[1])
        return self._apply(stats, known, mask, step)

    def _can_use_mi(self, stats: TokenStats, mask: Tensor, step: int) -> Tensor:
        """[B] bool: sequences whose selection may depend on mutual information."""
        more_than_one = mask.sum(dim=-1) > 1
        return more_than_one if self.limit != 1 else torch.zeros_like(more_than_one)

    @abstractmethod
    def _apply(self, stats: TokenStats, mi: Tensor, mask: Tensor, step: int) -> Selection:
        """The rule itself."""


@dataclass(frozen=True)
class MIBudget(_PairRule):
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
        lazy: with at most so many positions masked, min(H_i, H_j) stands in for I_ij and the source is not asked.
        most: likewise with more positions masked than this: what a pass may take at most grows with its square. A limit in
            seconds is `Within`. None for no limit.
    """

    mi: MISource
    gamma: Limit
    lam: float = 1.0
    entropy_weight: float = 1.0
    order: Literal["entropy", "cheapest"] = "entropy"
    limit: int | None = None
    lazy: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        checked_limit("MIBudget", "gamma", self.gamma)
        check.weight("MIBudget", "lam", self.lam)
        check.weight("MIBudget", "entropy_weight", self.entropy_weight)
        check.one_of("MIBudget", "order", self.order, ("entropy", "cheapest"))
        if self.limit is not None:
            check.whole("MIBudget", "limit", self.limit, 1)
        check.whole("MIBudget", "lazy", self.lazy, 0)
        if self.most is not None:
            check.whole("MIBudget", "most", self.most, 1)

    def _with_source(
        self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int, known: Tensor | None
    ) -> Selection:
        scorer = getattr(self.mi, "score_and_select", None)
        if scorer is None or self.order != "entropy" or hidden is None:
            return super()._with_source(stats, hidden, mask, step, known)
        selection: Selection = scorer(
            stats.entropy,
            hidden,
            mask,
            gamma=limit_of(self.gamma, mask, step),
            lam=self.lam,
            entropy_weight=self.entropy_weight,
            limit=self.limit,
            **_extra(self.mi, stats),
        )
        return selection

    def _can_use_mi(self, stats: TokenStats, mask: Tensor, step: int) -> Tensor:
        several = super()._can_use_mi(stats, mask, step)
        if self.lam == 0 or mask.shape[1] < 2:
            return torch.zeros_like(several)
        if self.entropy_weight == 0:
            return several
        # The first is free to exceed the budget; a second has to fit by its own entropy.
        own = float(self.entropy_weight) * stats.entropy.double().masked_fill(~mask, torch.inf)
        first, second = own.topk(2, dim=-1, largest=False).values.unbind(dim=-1)
        return several & (second <= limit_of(self.gamma, mask, step) - first)

    def _apply(self, stats: TokenStats, mi: Tensor, mask: Tensor, step: int) -> Selection:
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


@dataclass(frozen=True)
class MIThreshold(_PairRule):
    """A maximal set of positions, lowest entropy first, with I_ij < tau for every pair (arXiv 2605.20187).

    Cost: the source's, for N^2 pairs a sequence. Needs hidden states.

    Args:
        mi: an estimator, or another source such as `Probing`.
        tau: nats below which a pair counts as independent, at least 0; a number, one a sequence, or a `Schedule`.
        limit: most positions of a pass, at least 1; None for no limit.
        lazy: with at most so many positions masked, min(H_i, H_j) stands in for I_ij and the source is not asked.
        most: likewise with more positions masked than this: what a pass may take at most grows with its square. A limit in
            seconds is `Within`. None for no limit.
    """

    mi: MISource
    tau: Limit
    limit: int | None = None
    lazy: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        checked_limit("MIThreshold", "tau", self.tau)
        if self.limit is not None:
            check.whole("MIThreshold", "limit", self.limit, 1)
        check.whole("MIThreshold", "lazy", self.lazy, 0)
        if self.most is not None:
            check.whole("MIThreshold", "most", self.most, 1)

    def _apply(self, stats: TokenStats, mi: Tensor, mask: Tensor, step: int) -> Selection:
        tau = limit_of(self.tau, mask, step)
        if isinstance(tau, float | int):
            return ops.select_threshold(stats.entropy, mi, tau=tau, mask=mask, limit=self.limit)
        selected, spent = torch.zeros_like(mask), torch.zeros_like(tau)
        for value in tau.unique().tolist():
            own = mask & (tau == value).unsqueeze(-1)
            part = ops.select_threshold(stats.entropy, mi, tau=value, mask=own, limit=self.limit)
            selected, spent = selected | part.selected, spent + part.spent
        return Selection(selected, spent)


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
        return not getattr(self.mi, "needs_step", False)

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int) -> Selection:
        memory: Memory = self._of_step(step, "memory")
        step = Step.with_stats(step, stats)
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


__all__ = [
    "Coloring",
    "MIBudget",
    "MISource",
    "MIThreshold",
    "Probing",
    "Shuffled",
    "Step",
    "StepwiseMI",
    "Within",
    "pairwise_mi",
]
