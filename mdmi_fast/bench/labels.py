"""Labels by probing: the passes that a proven error bound leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from mdmi_fast.bench import _sudoku as sudoku
from mdmi_fast.bench.measure import Figure, Workload
from mdmi_fast.labels import MILabels, label_mi
from mdmi_fast.tasks.sudoku.model import DIGITS, MASK_TOKEN

EPSILON = 0.01
_MOST_PASSES = 30.0


def workloads(quick: bool = False) -> list[Workload]:
    count = 4 if quick else 16
    return [
        Workload(
            name=_case(count),
            make=lambda: sudoku.states(count),
            ways={
                "label_mi within the bound": lambda states: label_mi(sudoku.model(), states, epsilon=EPSILON),
                "every probe": lambda states: label_mi(sudoku.model(), states),
            },
            expected=lambda states: label_mi(sudoku.model(), states).mi,
            read=_mi,
            tolerance=EPSILON,
        )
    ]


def others(quick: bool = False) -> Iterator[Figure]:
    states = sudoku.states(4 if quick else 100)
    found = label_mi(sudoku.model(), states, epsilon=EPSILON)
    probes = 1 + DIGITS * (states == MASK_TOKEN).sum(-1)
    measure = "passes, share of 1 + M V"
    worst = float(found.bound.max())
    yield Figure(
        _case(len(states)),
        measure,
        100 * float(found.passes.sum() / probes.sum()),
        "%",
        _MOST_PASSES,
        "<=",
        note=f"{int(found.passes.sum()):,} of {int(probes.sum()):,}; largest bound {worst:.2g} nats",
    )
    note = "this package holds no antibody model"
    yield Figure("antibody model", measure, math.nan, "%", _MOST_PASSES, "<=", note=note)


def _case(count: int) -> str:
    return f"{count} Sudoku states, epsilon {EPSILON:g}"


def _mi(states: Tensor, found: MILabels) -> Tensor:
    return found.mi
