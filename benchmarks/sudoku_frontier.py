"""Sweep every policy's settings on validation boards: passes against valid boards. The demo's settings come from here.

python benchmarks/sudoku_frontier.py --task generate --regime strong --out benchmarks/results/sudoku_frontier.csv
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import fields
from pathlib import Path

import torch

from mdmi_fast.decoding import ConfidenceBudget, EntropyBound, MIBudget, MIThreshold, Policy, Sequential, Shuffled, TopK
from mdmi_fast.estimator import PairScorer, load_estimator
from mdmi_fast.tasks.sudoku.demo import Row, make_task, measure
from mdmi_fast.tasks.sudoku.model import load_model


def sweep(task: str, mi: PairScorer) -> dict[str, Policy]:
    policies: dict[str, Policy] = {"sequential": Sequential()}
    policies |= {f"top-{k}": TopK(k) for k in (2, 4, 8)}
    policies |= {f"entropy bound {g}": EntropyBound(g) for g in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)}
    if task == "solve":
        policies |= {
            f"confidence budget {e}": ConfidenceBudget(e) for e in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
        }
        for gamma in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
            policies[f"MI budget {gamma}"] = MIBudget(mi, gamma)
            policies[f"MI budget {gamma}, cheapest"] = MIBudget(mi, gamma, order="cheapest")
            policies[f"shuffled MI budget {gamma}"] = MIBudget(Shuffled(mi), gamma)
        return policies
    for gamma in (0.005, 0.01, 0.02, 0.03, 0.06, 0.12):
        policies[f"MI budget {gamma}, no entropy"] = MIBudget(mi, gamma, entropy_weight=0.0)
        policies[f"MI budget {gamma}, no entropy, cheapest"] = MIBudget(mi, gamma, entropy_weight=0.0, order="cheapest")
    for tau in (0.002, 0.005, 0.01, 0.02, 0.05):
        policies[f"MI threshold {tau}"] = MIThreshold(mi, tau)
    policies["shuffled MI budget 0.02, no entropy"] = MIBudget(Shuffled(mi), 0.02, entropy_weight=0.0)
    return policies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("solve", "generate", "complete"), required=True)
    parser.add_argument("--regime", choices=("strong", "weak"), default="strong")
    parser.add_argument("--boards", type=int, default=200)
    parser.add_argument("--estimator", default="sudoku", help="name or folder")
    parser.add_argument("--only", default="", help="policies whose name contains this, and the sequential one")
    parser.add_argument("--out", type=Path, help="append rows to this CSV")
    options = parser.parse_args()
    policies = sweep(options.task, load_estimator(options.estimator))
    chosen = {name: policy for name, policy in policies.items() if name == "sequential" or options.only in name}
    task = make_task(options.task, options.boards, split="validation")
    rows = []
    for row in measure(load_model(options.regime), options.regime, task, chosen):
        rows.append(row)
        print(
            f"{row.policy:45s} {row.passes:6.2f} passes  {row.solved:6.1%} [{row.low:.1%}, {row.high:.1%}]  {row.seconds:5.1f} s",
            flush=True,
        )
    if options.out:
        new = not options.out.exists()
        with options.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            if new:
                writer.writeheader()
            writer.writerows(row.as_dict() for row in rows)


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
