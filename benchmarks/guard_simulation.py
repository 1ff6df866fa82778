"""How soon the guard finds harm, and how often it cries wolf: python benchmarks/guard_simulation.py [--runs N].

Sequences are simulated with the qualities and correlations that the Sudoku model was measured to have: 92.6% valid
boards, and an r of 0.89 with a standard deviation of 0.036 in blocks of 20 audited positions. The defaults of
`Thresholds` decide. A delay counts the sequences (or audits) from the change to the alarm. Movement is not
simulated: boards are sampled from empty grids one cell a pass, and the shipped estimator's predictions of every reveal
are compared with the next pass; runs draw from these reveals, and broken estimators are made of its predictions.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mdmi_fast import EntropyBound, Sequential, decode, load_estimator, load_model
from mdmi_fast.bench.report import write_table
from mdmi_fast.decoding.policies import Step
from mdmi_fast.estimator.scorer import PairScorer
from mdmi_fast.ops import Selection, TokenStats
from mdmi_fast.watch.audit import MovementBlock, Reveal
from mdmi_fast.watch.evidence import Evidence
from mdmi_fast.watch.guard import Guard, Thresholds

RESULTS = Path(__file__).parent / "results" / "guard.csv"
QUALITY, CORRELATION, CORRELATION_SD = 0.926, 0.89, 0.036
LONGEST, CHUNK = 400_000, 200


class Row(NamedTuple):
    signal: str
    situation: str
    unit: str
    runs: int
    observed: int
    alarms: int
    median: str
    p95: str


def first_change(guard: Guard, quality: float, luck: np.random.Generator) -> int | None:
    """Sequences until share or limit of the guard change; None if they do not."""
    before = (guard.share, guard.state.scale)
    for first in range(0, LONGEST, CHUNK):
        seeds = luck.integers(0, 2**62, CHUNK).tolist()
        means = [quality if guard._arm(seed) else QUALITY for seed in seeds]
        good = (luck.random(CHUNK) < means).astype(float).tolist()
        guard.finish(torch.tensor(seeds), quality=good)
        if (guard.share, guard.state.scale) != before:
            return first + CHUNK
    return None


def canary(runs: int) -> Iterator[Row]:
    for stage, share in enumerate(Thresholds().stages):
        for drop in (0.0, 0.03, 0.1, 0.5):
            found, watched = [], 0
            last = stage + 1 == len(Thresholds().stages)
            name = "fallback or tighter limit" if drop else "false alarm" if last else "next stage"
            for run in range(runs):
                guard = Guard(EntropyBound(1.0))
                guard.state.stage = stage
                delay = first_change(guard, QUALITY * (1 - drop), np.random.default_rng(run))
                watched += delay or LONGEST
                good = guard.share > share if name == "next stage" else guard.share < share or guard.state.scale < 1
                if delay is not None and good:
                    found.append(delay)
            yield row(name, f"{share:.0%} of sequences, quality -{drop:.0%}", "sequences", runs, watched, found)


def correlation(runs: int) -> Iterator[Row]:
    limits = Thresholds()
    for mean in (0.75, 0.7, 0.6, 0.3):
        found, watched = [], 0
        for run in range(runs):
            luck = np.random.default_rng(run)
            evidence = Evidence(upper=1 - limits.correlation_off, interval=limits.interval)
            blocks = np.minimum(luck.normal(mean, CORRELATION_SD, 5_000), 1.0)
            delay = next((n for n, r in enumerate(blocks, 1) if evidence.add(r - limits.correlation_off)), None)
            watched += (delay or len(blocks)) * limits.audited_positions
            found += [] if delay is None else [delay * limits.audited_positions]
        yield row("correlation_off", f"r {CORRELATION} -> {mean}", "audits", runs, watched, found)


def false_alarms(runs: int) -> Iterator[Row]:
    """At the worst that is still allowed: quality exactly 2% below, r exactly 0.75."""
    limits = Thresholds()
    count = 20_000
    for name, upper in (("quality_off", 1.0), ("correlation_off", 1 - limits.correlation_off)):
        alarms = 0
        for run in range(runs):
            luck = np.random.default_rng(run)
            if name == "quality_off":
                kept = 1 - limits.quality_off
                ours, theirs = (luck.random(count) < mean for mean in (QUALITY * kept, QUALITY))
                xs = ours - kept * theirs
            else:
                xs = luck.normal(0.0, CORRELATION_SD, count).clip(max=upper)
            evidence = Evidence(upper=upper, interval=limits.interval)
            alarms += sum(evidence.add(float(x)) for x in xs)
        yield Row(
            f"{name}, false alarms", "exactly at the threshold", "observations", runs, runs * count, alarms, "", ""
        )


Reveals = list[tuple[torch.Tensor, torch.Tensor]]
"""Predicted mutual information of the pairs of a reveal, and how far the marginals moved."""


class Recorder:
    """Sequential decoding in which every reveal of every sequence is looked at."""

    def __init__(self, estimator: PairScorer) -> None:
        self.estimator, self.luck = estimator, random.Random(0)
        self.waiting: list[Reveal] = []
        self.seen: Reveals = []

    def select(self, stats: TokenStats, hidden: torch.Tensor, mask: torch.Tensor, step: Step) -> Selection:
        for reveal in self.waiting:
            moved = reveal.moved(step, step.model.mask_token_id)
            if moved is not None:
                self.seen.append((reveal.predicted, moved))
        selection = Sequential().select(stats, hidden, mask, step)
        rows = [row for row, masked in enumerate(mask.sum(dim=-1).tolist()) if masked >= 3]
        self.waiting = [
            Reveal.of(self.estimator, hidden, mask, step, row, int(selection.selected[row].nonzero()), self.luck)
            for row in rows
        ]
        return selection


def movement(runs: int) -> Iterator[Row]:
    model, recorder = load_model("sudoku"), Recorder(load_estimator("sudoku"))
    decode(model, torch.full((40, 81), model.mask_token_id), recorder, temperature=1.0, seeds=torch.arange(40))
    whole = MovementBlock()
    for predicted, moved in recorder.seen:
        whole.add(predicted, moved)
    slope = whole.slope()
    limits = Thresholds()
    broken: list[tuple[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]]] = [
        ("as shipped", lambda predicted, _: predicted),
        ("scaled to a slope of 0.5", lambda predicted, _: predicted * (slope / limits.movement_off)),
        ("noise of twice its spread", lambda p, g: p + 2 * p.std() * torch.randn(p.shape, generator=g)),
        ("3 times too high", lambda predicted, _: 3 * predicted),
        ("pairs shuffled", lambda predicted, g: predicted[torch.randperm(len(predicted), generator=g)]),
        ("0 for all pairs", lambda predicted, _: torch.zeros_like(predicted)),
    ]
    for name, change in broken:
        found, watched, slopes = [], 0, []
        for run in range(runs):
            luck, draws = np.random.default_rng(run), torch.Generator().manual_seed(run)
            evidence = Evidence(upper=1 - limits.movement_off, interval=limits.interval)
            for number in range(1, 501):
                block = MovementBlock()
                for at in luck.integers(0, len(recorder.seen), limits.audited_positions):
                    predicted, moved = recorder.seen[at]
                    block.add(change(predicted, draws), moved)
                slopes.append(block.slope())
                watched += limits.audited_positions
                if evidence.add(min(slopes[-1], 1.0) - limits.movement_off):
                    found.append(number * limits.audited_positions)
                    break
        mean, deviation = statistics.mean(slopes), statistics.stdev(slopes)
        situation = f"Sudoku estimator, {name}: slope {mean:.2f}, sd {deviation:.2f} of {limits.audited_positions}"
        yield row("movement_off", situation, "reveals", runs, watched, found)


def row(signal: str, situation: str, unit: str, runs: int, observed: int, delays: list[int]) -> Row:
    median = f"{statistics.median(delays):.0f}" if delays else ""
    p95 = f"{np.percentile(delays, 95):.0f}" if delays else ""
    return Row(signal, situation, unit, runs, observed, len(delays), median, p95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    rows = []
    for part in (canary, correlation, movement, false_alarms):
        for found in part(runs):
            rows.append(found)
            print("  ".join(str(value) for value in found), flush=True)
    write_table(
        RESULTS, ["signal", "situation", "unit", "runs", "observed", "alarms", "median_delay", "p95_delay"], rows
    )


if __name__ == "__main__":
    main()
