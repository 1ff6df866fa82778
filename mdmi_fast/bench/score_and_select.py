"""Lazy scoring against scoring everything, on real decoding states: time, and the pairs that were scored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.backends.calls import Budget, PairCall, PairRule
from mdmi_fast.bench import _sudoku as sudoku
from mdmi_fast.bench.measure import Figure, Workload
from mdmi_fast.estimator import Head, PairScorer
from mdmi_fast.ops import Selection

FULL = "pairwise_mlp + select_budget"


@dataclass(frozen=True)
class Scored:
    """A batch of states, its halves made."""

    state: sudoku.Pass
    entropy: Tensor
    u: Tensor
    v: Tensor


@dataclass(frozen=True)
class Inputs:
    """Batches that one call goes through in turn, and the packed network."""

    scorer: PairScorer
    batches: list[Scored]
    head: Head
    prepared: ops.PreparedPairwise

    @property
    def network(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        return self.head.weights, self.head.biases, self.head.w_out, self.head.b_out


def workloads(quick: bool = False) -> list[Workload]:
    names = ("shipped",) if quick else ("shipped", "64/32", "512/256")
    sizes = ((8, 1),) if quick else ((32, 1), (100, 100))
    return [_workload(name, *size, *budget) for name in names for size in sizes for budget in sudoku.BUDGETS]


def others(quick: bool = False) -> Iterator[Figure]:
    """How many pairs were scored, of all masked ones."""
    for name in ("shipped",) if quick else ("shipped", "64/32", "512/256"):
        inputs = _make(name, 8 if quick else 100, 100)
        for gamma, weight in sudoku.BUDGETS:
            yield _pairs_scored(name, inputs, gamma, weight)
    note = "this package holds no antibody model"
    yield Figure("antibody model", f"against {FULL}", math.nan, "x", 5.0, note=note)


def _case(name: str, gamma: float, weight: float) -> str:
    return f"estimator {name}, gamma {gamma:g}, entropy_weight {weight:g}"


@torch.no_grad()
def _make(name: str, count: int, batch: int) -> Inputs:
    scorer = sudoku.estimator(name)
    head = scorer.head()
    batches = [
        Scored(state, ops.token_stats(state.logits).entropy, *scorer.halves(state.hidden))
        for state in sudoku.passes(count, batch=batch)
    ]
    return Inputs(scorer, batches, head, ops.prepare_pairwise(head.weights, head.biases, head.w_out, head.b_out))


@torch.no_grad()
def _lazy(inputs: Inputs, gamma: float, weight: float) -> list[Selection]:
    return [
        ops.score_and_select(
            one.entropy,
            one.u,
            one.v,
            *inputs.network,
            gamma=gamma,
            entropy_weight=weight,
            mask=one.state.mask,
            prepared=inputs.prepared,
            combine=inputs.scorer.combine,
            symmetry=inputs.scorer.symmetry,
            activation="softplus",
        )
        for one in inputs.batches
    ]


@torch.no_grad()
def _full(inputs: Inputs, gamma: float, weight: float) -> list[Selection]:
    found = []
    for one in inputs.batches:
        mi = ops.pairwise_mlp(
            one.u,
            one.v,
            *inputs.network,
            mask=one.state.mask,
            combine=inputs.scorer.combine,
            symmetry=inputs.scorer.symmetry,
            activation="softplus",
            prepared=inputs.prepared,
        )
        found.append(ops.select_budget(one.entropy, mi, gamma=gamma, entropy_weight=weight, mask=one.state.mask))
    return found


def _workload(name: str, count: int, batch: int, gamma: float, weight: float) -> Workload:
    how = f"{count} states one by one" if batch == 1 else f"batch {batch}"
    return Workload(
        name=f"{how}, {_case(name, gamma, weight)}",
        make=lambda: _make(name, count, batch),
        ways={
            "score_and_select": lambda inputs: _lazy(inputs, gamma, weight),
            FULL: lambda inputs: _full(inputs, gamma, weight),
        },
        expected=lambda inputs: torch.cat(
            [sudoku.expected_selection(inputs.scorer, one.state, gamma, weight) for one in inputs.batches]
        ),
        read=lambda inputs, found: torch.cat([sudoku.flat(one) for one in found]),
        tolerance=0.0,
        at_least={FULL: 5.0},
    )


def _pairs_scored(name: str, inputs: Inputs, gamma: float, weight: float) -> Figure:
    measure = "pairs scored, share of the masked ones"
    try:
        from mdmi_fast.backends.cpp import select
    except ImportError as error:
        return Figure(_case(name, gamma, weight), measure, math.nan, "%", note=f"the extension {error}")
    counted, all_pairs, chosen = 0, 0, 0
    for one in inputs.batches:
        masked = one.state.mask.sum(-1)
        all_pairs += int((masked * (masked - 1) // 2).sum())
        budget = torch.full((len(masked),), gamma, dtype=torch.float64)
        scorer = inputs.scorer
        call = PairCall(
            one.u,
            one.v,
            inputs.prepared.network,
            PairRule(scorer.combine, scorer.symmetry, "softplus", "fp32"),
            one.state.mask,
            packed=inputs.prepared.packed,
        )
        with torch.no_grad():
            selected, _, pairs = select.score_and_select_counted(one.entropy, call, Budget(budget, 1.0, weight))
        counted += pairs
        chosen += int(selected.sum())
    note = f"{counted:,} of {all_pairs:,}; {chosen / sum(len(one.entropy) for one in inputs.batches):.1f} positions chosen a state"
    return Figure(_case(name, gamma, weight), measure, 100 * counted / max(all_pairs, 1), "%", note=note)
