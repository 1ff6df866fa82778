"""What watching costs a decoding pass: python benchmarks/guard_overhead.py.

Puzzles decoded within a budget of mutual information, plain and watched, the ways taken in turn. All sequences go to
the watched policy, so that the passes are the same: what a sequential control costs is its share of passes, not this.
"""

from __future__ import annotations

import csv
import statistics
import time
from pathlib import Path

import torch

from mdmi_fast import MIBudget, decode, load_estimator, load_model
from mdmi_fast.decode import Policy
from mdmi_fast.decode.guard import Guard, Thresholds
from mdmi_fast.files import replace_file
from mdmi_fast.monitor import Traced
from mdmi_fast.tasks.sudoku.puzzles import validation_puzzles

RESULTS = Path(__file__).parent / "results" / "guard_overhead.csv"
BOARDS, ROUNDS = 64, 15


def main() -> None:
    torch.set_num_threads(1)
    model = load_model("sudoku")
    policy = MIBudget(load_estimator("sudoku"), gamma=0.05)
    tokens = torch.from_numpy(validation_puzzles().givens[:BOARDS]).long()
    everything = Thresholds(stages=(1 - 1e-12,))
    ways: dict[str, Policy] = {
        "plain": policy,
        "guard without audits": Guard(policy, thresholds=everything, audit_share=0.0),
        "guard, 2% of passes audited": Guard(policy, thresholds=everything, audit_share=0.02),
        "traced, nobody recording": Traced(policy),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    plain = None
    for turn in range(ROUNDS + 1):
        seeds = torch.arange(BOARDS) + BOARDS * turn
        for name, way in ways.items():
            start = time.perf_counter()
            result = decode(model, tokens, way, seeds=seeds)
            if isinstance(way, Guard):
                way.finish(seeds, quality=[1.0] * BOARDS, passes=result.passes)
            if turn:  # the first is for warming up
                seconds[name].append(time.perf_counter() - start)
            plain = result.tokens if plain is None else plain
            assert torch.equal(result.tokens, plain), name
    passes = int(result.passes.max())
    rows = []
    for name, taken in seconds.items():
        # The mean, for audits come now and then; each round against the plain decode of the same round.
        extra = [mine - base for mine, base in zip(taken, seconds["plain"], strict=True)]
        per_pass = 1e6 * statistics.mean(taken) / passes
        rows.append((name, f"{per_pass:.0f}", f"{1e6 * statistics.mean(extra) / passes:.1f}"))
        print(f"{name:<30}{rows[-1][1]:>8} us a pass of up to {BOARDS} boards, {rows[-1][2]:>8} us more than plain")
    with replace_file(RESULTS) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["policy", "us_per_pass", "us_more_than_plain"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
