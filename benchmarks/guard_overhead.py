"""What watching costs a decoding pass: python benchmarks/guard_overhead.py.

Puzzles sampled within a budget of mutual information, plain and watched, the ways taken in turn. All sequences go to
the watched policy, so that the passes are the same: what a sequential control costs is its share of passes, not this.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from mdmi_fast import MIBudget, decode, load_estimator, load_model
from mdmi_fast.bench.report import write_table
from mdmi_fast.decoding import Policy
from mdmi_fast.tasks.sudoku.puzzles import validation_puzzles
from mdmi_fast.watch import Traced
from mdmi_fast.watch.guard import Guard, Thresholds

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
        "guard without audits": Guard(policy, thresholds=everything, audit_share=0.0, movement_share=0.0),
        "guard, 2% of passes probed": Guard(policy, thresholds=everything, audit_share=0.02, movement_share=0.0),
        "guard, every pass compared": Guard(policy, thresholds=everything, audit_share=0.0, movement_share=1.0),
        "traced, nobody recording": Traced(policy),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    passes = 0
    for turn in range(ROUNDS + 1):
        seeds = torch.arange(BOARDS) + BOARDS * turn
        plain = decode(model, tokens, policy, seeds=seeds, temperature=1.0)
        passes += int(plain.passes.max()) if turn else 0  # the first turn is for warming up
        for name, way in ways.items():
            start = time.perf_counter()
            result = decode(model, tokens, way, seeds=seeds, temperature=1.0)
            if isinstance(way, Guard):
                way.finish(seeds, quality=[1.0] * BOARDS, passes=result.passes)
            if turn:
                seconds[name].append(time.perf_counter() - start)
            assert torch.equal(result.tokens, plain.tokens), name
    rows = []
    for name, taken in seconds.items():
        # The mean, for audits come now and then; each round against the plain decode of the same round.
        extra = [mine - base for mine, base in zip(taken, seconds["plain"], strict=True)]
        rows.append((name, f"{1e6 * sum(taken) / passes:.0f}", f"{1e6 * sum(extra) / passes:.1f}"))
        print(f"{name:<30}{rows[-1][1]:>8} us a pass of up to {BOARDS} boards, {rows[-1][2]:>8} us more than plain")
    write_table(RESULTS, ["policy", "us_per_pass", "us_more_than_plain"], rows)


if __name__ == "__main__":
    main()
