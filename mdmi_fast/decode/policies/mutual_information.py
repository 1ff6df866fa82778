"""Policies that look at pairs of positions, and where the pairs' mutual information comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.decode.policies.base import Step, at_least, random_numbers
from mdmi_fast.labels import FORMS, Form, label_mi
from mdmi_fast.ops import Selection, TokenStats


class StepwiseMI(Protocol):
    """A source of mutual information that needs to know more of the pass than hidden states."""

    needs_step: Literal[True]

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

    form: Form = "joint"
    epsilon: float = 0.0
    batch_size: int = 512
    needs_step: Literal[True] = True

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"Probing: form must be one of {', '.join(FORMS)}, got {self.form!r}")

    def __call__(self, hidden: Tensor, mask: Tensor, step: int) -> Tensor:
        model, tokens = getattr(step, "model", None), getattr(step, "tokens", None)
        if model is None or tokens is None:
            raise ValueError("Probing: step must be a Step with model and tokens, got a bare number")
        return label_mi(
            model, tokens, mask, form=self.form, epsilon=self.epsilon, batch_size=self.batch_size
        ).mi


@dataclass(frozen=True)
class Shuffled:
    """A control: the values of another source, dealt out at random among the masked pairs of each sequence."""

    source: MISource
    needs_step: Literal[True] = True

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
        gamma: nats a pass may spend.
        lam: weight of dependence.
        entropy_weight: weight of a position's own entropy.
        order: "entropy" looks at positions by entropy, ascending; "cheapest" takes the least cost at each moment.
        limit: most positions of a pass; None for no limit.
    """

    mi: MISource
    gamma: float
    lam: float = 1.0
    entropy_weight: float = 1.0
    order: Literal["entropy", "cheapest"] = "entropy"
    limit: int | None = None

    def __post_init__(self) -> None:
        at_least("MIBudget", "gamma", self.gamma, 0.0)
        at_least("MIBudget", "lam", self.lam, 0.0)
        at_least("MIBudget", "entropy_weight", self.entropy_weight, 0.0)
        if self.order not in ("entropy", "cheapest"):
            raise ValueError(f"MIBudget: order must be 'entropy' or 'cheapest', got {self.order!r}")

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
        tau: nats below which a pair counts as independent.
        limit: most positions of a pass; None for no limit.
    """

    mi: MISource
    tau: float
    limit: int | None = None

    def __post_init__(self) -> None:
        at_least("MIThreshold", "tau", self.tau, 0.0)

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        mi = pairwise_mi(self.mi, hidden, mask, step)
        return ops.select_threshold(stats.entropy, mi, tau=self.tau, mask=mask, limit=self.limit)


__all__ = ["MIBudget", "MISource", "MIThreshold", "Probing", "Shuffled", "Step", "StepwiseMI", "pairwise_mi"]
