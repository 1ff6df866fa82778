"""The measurements of the demo: every policy on real Sudoku, solving (one right answer) and sampling (many).

All settings below were chosen on the validation puzzles and on other random boards than those measured here; see
benchmarks/sudoku_frontier.py, which sweeps them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mdmi_fast.decoding import (
    Confidence,
    ConfidenceBudget,
    EntropyBound,
    MIBudget,
    MIThreshold,
    Policy,
    Probing,
    Random,
    Sequential,
    Shuffled,
    TopK,
    decode,
)
from mdmi_fast.estimator import PairScorer
from mdmi_fast.labels import FORMS
from mdmi_fast.models import MaskedModel
from mdmi_fast.statistics import paired_bootstrap, wilson
from mdmi_fast.tasks.sudoku.model import CELLS, MASK_TOKEN
from mdmi_fast.tasks.sudoku.puzzles import is_valid_board, random_boards, random_clues, test_puzzles, validation_puzzles

Split = Literal["test", "validation"]
_AT_ONCE = 200
"""Boards of one batch: the states of more of them outgrow the memory that is kept between passes."""
CLUES = 20
"""Of the boards to complete: few enough for many solutions."""


@dataclass(frozen=True)
class Row:
    """One policy on one task.

    Attributes:
        task: "solve" (hard puzzles, temperature 0), "generate" (from an empty grid) or "complete" (from 20 random
            clues), both at temperature 1.
        regime: "strong" or "weak", the network.
        policy: a readable name.
        boards: how many were decoded.
        passes: mean forward passes a board took part in.
        solved: share of boards that obey the rules.
        low, high: 95% Wilson interval of `solved`.
        seconds: wall clock of the whole row.
        against_sequential: difference of `solved` to the sequential row, None for itself.
        against_low, against_high: its 95% interval (paired bootstrap over boards).
        speedup: wall clock of the sequential row over this one's.
    """

    task: str
    regime: str
    policy: str
    boards: int
    passes: float
    solved: float
    low: float
    high: float
    seconds: float
    against_sequential: float | None
    against_low: float | None
    against_high: float | None
    speedup: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Task:
    """Boards to decode, all policies the same ones, with the same seeds."""

    name: str
    tokens: Tensor
    temperature: float
    seeds: Tensor


def make_task(name: str, boards: int, *, split: Split = "test") -> Task:
    """The boards of a task: shipped puzzles, empty grids, or random boards with 20 clues left.

    Args:
        name: "solve", "generate" or "complete".
        boards: how many.
        split: "test" for what is reported, "validation" for choosing settings; they share no board and no seed.

    Raises:
        ValueError: for an unknown name, or more puzzles than ship.
    """
    seed = {"test": 1, "validation": 2}[split]
    seeds = torch.arange(boards, device="cpu") + seed * 1_000_003
    if name == "solve":
        givens = torch.from_numpy((test_puzzles() if split == "test" else validation_puzzles()).givens).long()
        if boards > len(givens):
            raise ValueError(f"make_task: {len(givens)} {split} puzzles ship, got boards={boards}")
        return Task(name, givens[:boards], 0.0, seeds)
    if name == "generate":
        return Task(name, torch.full((boards, CELLS), MASK_TOKEN, device="cpu"), 1.0, seeds)
    if name == "complete":
        full = random_boards(boards, seed=seed + 70)
        return Task(name, torch.from_numpy(random_clues(full, CLUES, seed=seed + 80)).long(), 1.0, seeds)
    raise ValueError(f"make_task: name must be 'solve', 'generate' or 'complete', got {name!r}")


def solving_policies(regime: str, mi: PairScorer, *, full: bool = False) -> dict[str, Policy]:
    """Policies for one right answer; the first is the yardstick of the rest. `full` adds the controls."""
    settings: dict[str, dict[str, tuple[float, ...]]] = {
        "strong": {"bound": (0.005, 0.2), "confidence": (0.002, 0.05), "mi": (0.05, 0.3)},
        "weak": {"bound": (0.02, 0.1), "confidence": (0.02, 0.05), "mi": (0.1,)},
    }
    careful_and_fast = settings[regime]
    policies: dict[str, Policy] = {
        "sequential": Sequential(),
        "random 4": Random(4),
        "top-4": TopK(4),
        "confidence 0.9": Confidence(0.9),
    }
    policies |= {f"entropy bound {gamma}": EntropyBound(gamma) for gamma in careful_and_fast["bound"]}
    policies |= {
        f"confidence budget {epsilon}": ConfidenceBudget(epsilon) for epsilon in careful_and_fast["confidence"]
    }
    policies |= {f"MI budget {gamma}": MIBudget(mi, gamma) for gamma in careful_and_fast["mi"]}
    if full:
        policies["MI threshold 0.05"] = MIThreshold(mi, 0.05)
        for gamma in (0.05, 0.1, 0.3, 0.6):
            policies[f"MI budget {gamma}"] = MIBudget(mi, gamma)
            policies[f"MI budget {gamma}, cheapest"] = MIBudget(mi, gamma, order="cheapest")
            policies[f"control: shuffled MI budget {gamma}"] = MIBudget(Shuffled(mi), gamma)
        for gamma in (0.02, 0.05, 0.1, 0.2, 0.5):
            policies[f"entropy bound {gamma}"] = EntropyBound(gamma)
        for epsilon in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2):
            policies[f"confidence budget {epsilon}"] = ConfidenceBudget(epsilon)
    return policies


def sampling_policies(mi: PairScorer, *, full: bool = False) -> dict[str, Policy]:
    """Policies for drawing one of many answers; the first is the yardstick of the rest. `full` adds the controls."""
    policies: dict[str, Policy] = {
        "sequential": Sequential(),
        "top-2": TopK(2),
        "entropy bound 0.5": EntropyBound(0.5),
        "entropy bound 2.3": EntropyBound(2.3),
    }
    for gamma in (0.005, 0.02, 0.06):
        policies[f"MI budget {gamma}, no entropy"] = MIBudget(mi, gamma, entropy_weight=0.0)
    policies["MI threshold 0.02"] = MIThreshold(mi, 0.02)
    if full:
        policies["entropy bound 1.0"] = EntropyBound(1.0)
        policies["MI budget 0.1, no entropy"] = MIBudget(mi, 0.1, entropy_weight=0.0)
        for gamma in (0.5, 1.0):
            policies[f"MI budget {gamma}, published rule"] = MIBudget(mi, gamma)
        for gamma in (0.01, 0.02, 0.06):
            policies[f"MI budget {gamma}, no entropy, cheapest"] = MIBudget(
                mi, gamma, entropy_weight=0.0, order="cheapest"
            )
        policies["MI threshold 0.005"] = MIThreshold(mi, 0.005)
        for gamma in (0.005, 0.02, 0.06):
            policies[f"control: shuffled MI budget {gamma}, no entropy"] = MIBudget(
                Shuffled(mi), gamma, entropy_weight=0.0
            )
    return policies


def oracle_policies(task: str) -> dict[str, Policy]:
    """The rules with MI probed from the model itself at every pass, in all three forms, instead of predicted."""
    policies: dict[str, Policy] = {"sequential, same boards": Sequential()}
    for form in FORMS:
        probed = Probing(form, epsilon=0.005 if form == "joint" else 0.0)
        if task == "solve":
            policies[f"probed MI ({form}) budget 0.3"] = MIBudget(probed, 0.3)
        else:
            policies[f"probed MI ({form}) budget 0.02, no entropy"] = MIBudget(probed, 0.02, entropy_weight=0.0)
    control = Shuffled(Probing("joint", epsilon=0.005))
    if task == "solve":
        policies["control: shuffled probed MI (joint) budget 0.3"] = MIBudget(control, 0.3)
    else:
        policies["control: shuffled probed MI (joint) budget 0.02, no entropy"] = MIBudget(
            control, 0.02, entropy_weight=0.0
        )
    return policies


def measure(
    model: MaskedModel,
    regime: str,
    task: Task,
    policies: dict[str, Policy],
    *,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Row]:
    """Decode the task's boards with every policy; the first one is what the others are compared with."""
    yardstick: tuple[Tensor, float] | None = None
    for name, policy in policies.items():
        start = time.perf_counter()
        parts = [
            decode(model, tokens, policy, temperature=task.temperature, seeds=seeds, progress=progress)
            for tokens, seeds in zip(task.tokens.split(_AT_ONCE), task.seeds.split(_AT_ONCE), strict=True)
        ]
        seconds = time.perf_counter() - start
        solved = is_valid_board(torch.cat([part.tokens for part in parts]))
        passes = torch.cat([part.passes for part in parts])
        low, high = wilson(int(solved.sum()), len(solved))
        difference, least, most = None, None, None
        if yardstick is None:
            yardstick = (solved, seconds)
        else:
            difference, least, most = paired_bootstrap(solved, yardstick[0])
        yield Row(
            task.name,
            regime,
            name,
            len(solved),
            float(passes.double().mean()),
            float(solved.double().mean()),
            low,
            high,
            seconds,
            difference,
            least,
            most,
            yardstick[1] / seconds,
        )
