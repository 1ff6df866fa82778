"""Sudoku boards in few passes: the digits of a pass drawn independently, coupled, and with the couplings of other boards.

mdmi-fast couple --model sudoku --data grids.txt --order entropy --states 8000 --out coupling  # 600 lines of 81 zeros
python benchmarks/sudoku_coupling.py --coupling coupling --out benchmarks/results/sudoku_coupling.csv

A budget on predicted mutual information (the shipped estimator) at several sizes. "generate" begins at an empty grid, "complete" at 20
random clues of a board, both at temperature 1; "solve" takes the shipped test puzzles at temperature 0, where a coupling counts only if it
is told to. The control "dealt out" gives every cell the correction that was meant for the same turn of another board. The share of valid boards has
a Wilson interval of 95%, the difference from independent drawing a paired one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdmi_fast import MIBudget, decode, load_coupling, load_estimator, load_model
from mdmi_fast.bench.report import write_table
from mdmi_fast.coupling import LearnedCoupling
from mdmi_fast.decoding.coupling import CoupledPass
from mdmi_fast.decoding.policies import Step
from mdmi_fast.models import MaskedModel
from mdmi_fast.statistics import paired_bootstrap, wilson
from mdmi_fast.tasks.sudoku.boards import is_valid_board
from mdmi_fast.tasks.sudoku.puzzles import random_boards, random_clues, test_puzzles

GAMMAS = {
    "generate": (0.005, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 1.0),
    "complete": (0.005, 0.02, 0.06, 0.2, 0.4, 1.0),
    "solve": (0.05, 0.3, 1.0, 3.0),
}


class DealtOut:
    """The corrections of the board before, and nothing for the first."""

    def __init__(self, coupling: LearnedCoupling) -> None:
        self.coupling, self.greedy = coupling, True

    def check_model(self, model: MaskedModel) -> None:
        self.coupling.check_model(model)

    def begin(self, step: Step, hidden: Tensor, order: Tensor) -> CoupledPass:
        return _Rolled(self.coupling.begin(step, hidden, order))


class _Rolled:
    def __init__(self, inner: CoupledPass) -> None:
        self.inner, self.tell = inner, inner.tell

    def correction(self, k: int) -> Tensor | None:
        found = self.inner.correction(k)
        return None if found is None else found.roll(1, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coupling", required=True, help="its folder")
    parser.add_argument("--boards", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, mi, coupling = load_model("sudoku"), load_estimator("sudoku"), load_coupling(options.coupling)
    coupling.greedy = True  # used at temperature 0 too, to see what it brings
    boards = random_boards(options.boards, seed=7)
    start = {
        "generate": torch.zeros(options.boards, 81, dtype=torch.int64),
        "complete": torch.from_numpy(random_clues(boards, 20, seed=7).astype(np.int64)),
        "solve": torch.from_numpy(test_puzzles().givens[: options.boards].astype(np.int64)),
    }
    rows: list[dict[str, Any]] = []
    for task, gammas in GAMMAS.items():
        for gamma in gammas:
            independent: Any = None
            drawings = {"independent": None, "coupled": coupling, "dealt out": DealtOut(coupling)}
            for drawing, of in drawings.items():
                began = time.process_time()
                result = decode(
                    model,
                    start[task],
                    MIBudget(mi, gamma, entropy_weight=1.0 if task == "solve" else 0.0),
                    temperature=0.0 if task == "solve" else 1.0,
                    generator=torch.Generator().manual_seed(0),
                    coupling=of,
                )
                seconds = time.process_time() - began
                valid = is_valid_board(result.tokens).numpy().astype(float)
                independent = valid if independent is None else independent
                low, high = wilson(int(valid.sum()), len(valid))
                difference = paired_bootstrap(valid, independent)
                rows.append(
                    {
                        "task": task,
                        "gamma": gamma,
                        "drawing": drawing,
                        "boards": len(valid),
                        "passes": round(float(result.passes.double().mean()), 2),
                        "valid": round(float(valid.mean()), 4),
                        "valid_low": round(low, 4),
                        "valid_high": round(high, 4),
                        "minus_independent": round(difference.value, 4),
                        "minus_independent_low": round(difference.low, 4),
                        "minus_independent_high": round(difference.high, 4),
                        "cpu_seconds": round(seconds, 2),
                    }
                )
                print(rows[-1], flush=True)
    write_table(options.out, rows[0], (row.values() for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
