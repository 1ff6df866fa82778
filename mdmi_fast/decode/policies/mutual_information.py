"""Policies that look at pairs of positions, and where the pairs' mutual information comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.decode.policies.base import Step, at_least, random_numbers
from mdmi_fast.labels import FORMS, Form, label_mi
from mdmi_fast.ops import Selection, TokenStats
from mdmi_fast.ops import _checks as check


class StepwiseMI(Protocol):
    """A source of mutual information that needs to know more of the pass than hidden states."""

    needs_step: ClassVar[Literal[True]]

    def __call__(self, hidden: Tensor, mask: Tensor, step: int) -> Tensor: ...


MISource = Callable[[Tensor, Tensor], Tensor] | StepwiseMI
"""An estimator, or anything that turns hidden [B, N, D] and mask [B, N] into mutual information [B, N, N] in nats."""


def pairwise_mi(source: MISource, hidden: Tensor, mask: Tensor, step: int) -> Tensor:
    """[B, N, N] nats from any kind of source."""
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
        at_least("Probing", "epsilon", self.epsilon, 0.0)
        check.whole("Probing", "batch_size", self.batch_size, 1)
        if self.epsilon > 0 and self.form != "joint":
            raise ValueError(f"Probing: epsilon > 0 needs form='joint', whose error is proven, got {self.form!r}")

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
        luck = random_numbers(step, mask, stream=1, length=len(row))
        # The pairs with both ends masked come first in either order; the rest keeps its zeros.
        places = (~both).to(torch.int8).argsort(dim=-1, stable=True)
        drawn = luck.masked_fill(~both, torch.inf).argsort(dim=-1, stable=True)
        values = mi[:, row, column]
        dealt = torch.zeros_like(values).scatter(-1, places, values.gather(-1, drawn)) * both
        shuffled = torch.zeros_like(mi)
        shuffled[:, row, column] = dealt
        return shuffled + shuffled.transpose(-1, -2)


@dataclass(frozen=True)
class MIBudget:
    """Greedy selection within a budget: cost_i = entropy_weight H_i + lam sum_{j chosen} I_ij (row S8 of the source).

    entropy_weight 1 is the published rule. For sampling at temperature 1 use 0: independent positions of any entropy
    can be drawn together without error, so only dependence is a cost.

    Args:
        mi: an estimator, or another source such as `Probing`.
        gamma: nats a pass may spend, at least 0, may be inf.
        lam: weight of dependence, finite, at least 0.
        entropy_weight: weight of a position's own entropy, finite, at least 0.
        order: "entropy" looks at positions by entropy, ascending; "cheapest" takes the least cost at each moment.
        limit: most positions of a pass, at least 1; None for no limit.
    """

    mi: MISource
    gamma: float
    lam: float = 1.0
    entropy_weight: float = 1.0
    order: Literal["entropy", "cheapest"] = "entropy"
    limit: int | None = None

    def __post_init__(self) -> None:
        at_least("MIBudget", "gamma", self.gamma, 0.0)
        check.weight("MIBudget", "lam", self.lam)
        check.weight("MIBudget", "entropy_weight", self.entropy_weight)
        check.one_of("MIBudget", "order", self.order, ("entropy", "cheapest"))
        if self.limit is not None:
            check.whole("MIBudget", "limit", self.limit, 1)

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        lazy = getattr(self.mi, "score_and_select", None) if self.order == "entropy" else None
        if lazy is not None:
            selection: Selection = lazy(
                stats.entropy,
                hidden,
                mask,
                gamma=self.gamma,
                lam=self.lam,
                entropy_weight=self.entropy_weight,
                limit=self.limit,
            )
            return selection
        return ops.select_budget(
            stats.entropy,
            pairwise_mi(self.mi, hidden, mask, step),
            gamma=self.gamma,
            lam=self.lam,
            entropy_weight=self.entropy_weight,
            order=self.order,
            mask=mask,
            limit=self.limit,
        )


@dataclass(frozen=True)
class MIThreshold:
    """A maximal set of positions, lowest entropy first, with I_ij < tau for every pair (row S9 of the source).

    Args:
        mi: an estimator, or another source such as `Probing`.
        tau: nats below which a pair counts as independent, at least 0.
        limit: most positions of a pass, at least 1; None for no limit.
    """

    mi: MISource
    tau: float
    limit: int | None = None

    def __post_init__(self) -> None:
        at_least("MIThreshold", "tau", self.tau, 0.0)
        if self.limit is not None:
            check.whole("MIThreshold", "limit", self.limit, 1)

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        mi = pairwise_mi(self.mi, hidden, mask, step)
        return ops.select_threshold(stats.entropy, mi, tau=self.tau, mask=mask, limit=self.limit)


__all__ = ["MIBudget", "MISource", "MIThreshold", "Probing", "Shuffled", "Step", "StepwiseMI", "pairwise_mi"]
