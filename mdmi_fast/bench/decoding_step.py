"""The whole MI step of a decoding pass, as a share of the model's forward; and the clock of decoding from end to end."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.bench import _sudoku as sudoku
from mdmi_fast.bench.measure import Figure, Workload
from mdmi_fast.decoding import DecodeResult, MIBudget, Policy, Sequential, decode
from mdmi_fast.estimator import PairwiseMIEstimator
from mdmi_fast.models import load_model
from mdmi_fast.ops import Selection
from mdmi_fast.tasks.protein.models import is_fetched
from mdmi_fast.tasks.sudoku.demo import Task, make_task
from mdmi_fast.tasks.sudoku.model import MASK_TOKEN

FORWARD, SEQUENTIAL = "the network's forward", "one position a pass"
ANTIBODY = (("antiberty", "antiberty", 0.05), ("sapiens", "sapiens:heavy", 0.15))
"""Package, model, and the share of the model's forward that the step may take."""


def workloads(quick: bool = False) -> list[Workload]:
    names = ("shipped",) if quick else ("shipped", "64/32")
    sizes = ((8, 1),) if quick else ((32, 1), (96, 16), (100, 100))
    found = [_step(name, *size, *budget) for name in names for size in sizes for budget in sudoku.BUDGETS]
    boards = 4 if quick else 50
    if not quick:
        found += [_antibody(model, most) for package, model, most in ANTIBODY if is_fetched(package)]
    return [*found, _whole("generate", boards, 0.02, 0.0), _whole("solve", boards, 0.3, 1.0)]


def others(quick: bool = False) -> Iterator[Figure]:
    for package, model, most in ANTIBODY:
        if not is_fetched(package):
            note = f"mdmi-fast models fetch {package}"
            yield Figure(model, "share of its forward", math.nan, "%", 100 * most, "<=", note=note)


@torch.no_grad()
def _mi_step(batches: list[sudoku.Pass], policy: Policy) -> list[Selection]:
    """What decoding does between the forward and writing tokens."""
    return [policy.select(ops.token_stats(one.logits), one.hidden, one.mask, 0) for one in batches]


def _step(name: str, count: int, batch: int, gamma: float, weight: float) -> Workload:
    how = f"{count} states one by one" if batch == 1 else f"batch {batch}"

    def expected(batches: list[sudoku.Pass]) -> Tensor:
        scorer = sudoku.estimator(name)
        return torch.cat([sudoku.expected_selection(scorer, one, gamma, weight) for one in batches])

    return Workload(
        name=f"{how}, estimator {name}, gamma {gamma:g}, entropy_weight {weight:g}",
        make=lambda: sudoku.passes(count, batch=batch),
        ways={
            "MI step": lambda batches: _mi_step(
                batches, MIBudget(sudoku.estimator(name), gamma, entropy_weight=weight)
            ),
            FORWARD: lambda batches: [sudoku.model()(one.tokens) for one in batches],
        },
        expected=expected,
        read=lambda batches, found: torch.cat([sudoku.flat(one) for one in found]),
        tolerance=0.0,
        share_of=(FORWARD, 0.25),
        unchecked=(FORWARD,),
    )


def _antibody(name: str, most: float) -> Workload:
    """One chain of 120 random residues, half of them masked; an untrained estimator whose answers are as small as most MI is."""
    model, gamma = load_model(name), 0.3
    torch.manual_seed(0)
    scorer = PairwiseMIEstimator(model.hidden_size, layers=(64, 32)).eval()
    torch.nn.init.constant_(scorer.last.bias, -6.0)

    def make() -> list[sudoku.Pass]:
        generator = torch.Generator().manual_seed(0)
        chains = torch.tensor([ord(residue) for residue in "ACDEFGHIKLMNPQRSTVWY"])
        picks = chains[torch.randint(20, (4, 120), generator=generator)]
        picks[:, torch.randperm(120, generator=generator)[:60]] = ord("_")
        found = []
        for row in picks.tolist():
            tokens = model.tokenizer.encode(["".join(map(chr, row))])  # type: ignore[attr-defined]
            output = model(tokens)
            found.append(sudoku.Pass(tokens, tokens == model.mask_token_id, output.logits, output.hidden))
        return found

    return Workload(
        name=f"4 chains of 120 one by one, {name}, estimator 64/32, gamma {gamma:g}, entropy_weight 0",
        make=make,
        ways={
            "MI step": lambda batches: _mi_step(batches, MIBudget(scorer, gamma, entropy_weight=0.0)),
            FORWARD: lambda batches: [model(one.tokens) for one in batches],
        },
        expected=lambda batches: torch.cat([sudoku.expected_selection(scorer, one, gamma, 0.0) for one in batches]),
        read=lambda batches, found: torch.cat([sudoku.flat(one) for one in found]),
        tolerance=0.0,
        share_of=(FORWARD, most),
        unchecked=(FORWARD,),
    )


def _whole(kind: str, boards: int, gamma: float, weight: float) -> Workload:
    def run(task: Task, policy: Policy) -> DecodeResult:
        return decode(sudoku.model(), task.tokens, policy, temperature=task.temperature, seeds=task.seeds)

    return Workload(
        name=f"decode, {kind} {boards} boards, gamma {gamma:g}, entropy_weight {weight:g}",
        make=lambda: make_task(kind, boards, split="validation"),
        ways={
            "MI budget": lambda task: run(task, MIBudget(sudoku.estimator("shipped"), gamma, entropy_weight=weight)),
            SEQUENTIAL: lambda task: run(task, Sequential()),
        },
        expected=lambda task: torch.where(task.tokens == MASK_TOKEN, 1, 0),  # filled in, and nothing else touched
        read=lambda task, result: ((result.tokens != MASK_TOKEN) & (result.tokens != task.tokens)).long(),
        tolerance=0.0,
        at_least={SEQUENTIAL: 1.0},
    )
