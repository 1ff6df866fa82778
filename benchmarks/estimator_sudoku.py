"""Figures of the Sudoku estimators: `python benchmarks/estimator_sudoku.py FOLDER [--only held-out|splits|refinement]`.

Labels are kept in FOLDER, so a run that was interrupted goes on; about 25 minutes on one core in all. Results go to
benchmarks/results/estimator_sudoku.csv, .json and .png.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any, Literal

import torch

from mdmi_fast import evaluate_estimator, load_estimator, train_estimator
from mdmi_fast.cli._options import plain
from mdmi_fast.cli._report import as_dict
from mdmi_fast.estimator import PairScorer, evaluate_splits
from mdmi_fast.estimator.data import Example, read_examples
from mdmi_fast.estimator.plots import plot_evaluation
from mdmi_fast.estimator.splits import BUILT
from mdmi_fast.labels import write_labels
from mdmi_fast.tasks.sudoku.estimator import SudokuMIEstimator
from mdmi_fast.tasks.sudoku.model import SudokuModel, load_model
from mdmi_fast.tasks.sudoku.states import decoding_states
from mdmi_fast.tasks.sudoku.train_estimator import RECIPES

RESULTS = Path(__file__).parent / "results"
EPSILON = {"joint": 0.002, "entropy": 0.0}
"""Nats; the joint form as in training."""
HELD_OUT, SEED = 1000, 101
"""States that no training drew: its seeds are 1, 2 ..."""
NOISE = 0.1
"""Of the moved model: Gaussian, in units of each weight matrix's standard deviation."""
NEW, OLD, REFINEMENT_EPOCHS = 300, 1000, 20


def labels_of(
    model: SudokuModel,
    tokens: torch.Tensor,
    folder: Path,
    form: Literal["joint", "entropy"] = "joint",
    *,
    hidden: bool = False,
) -> list[Example]:
    write_labels(model, tokens, folder, forms=(form,), epsilon=EPSILON[form], hidden=hidden)
    return read_examples(folder, form, model=model)


def held_out(folder: Path) -> dict[str, Any]:
    """Shipped estimators on unseen states, in both forms of the label."""
    found = {}
    for strength in ("strong", "weak"):
        model, estimator = load_model(strength), load_estimator(f"sudoku:{strength}")
        tokens = decoding_states(model, HELD_OUT, seed=SEED)
        forms: tuple[Literal["joint", "entropy"], ...] = ("joint", "entropy")
        for form in forms:
            labels = labels_of(model, tokens, folder / f"held_out_{strength}_{form}", form)
            found[f"{strength}, {form} form"] = as_dict(evaluate_estimator(estimator, model, labels))
    return found


def splits(folder: Path) -> dict[str, Any]:
    """The strong estimator in distribution, shifted and against an adversary, beside the baselines."""
    model = load_model("strong")
    tokens = decoding_states(model, HELD_OUT, seed=SEED)
    sets = {"in distribution": labels_of(model, tokens, folder / "held_out_strong_joint")}
    for name, build in BUILT.items():
        sets[name] = labels_of(model, build(model, tokens[:200]), folder / f"split_{name}")
    evaluation = evaluate_splits(load_estimator("sudoku"), model, sets)
    plot_evaluation(evaluation, RESULTS / "estimator_sudoku.png")
    return {
        f"{split}, {source}": as_dict(report)
        for split, reports in evaluation.reports.items()
        for source, report in reports.items()
    } | {"verdict": evaluation.verdict}


def refinement(folder: Path) -> dict[str, Any]:
    """The strong estimator after the network's weights were moved: as it is, refined, and trained anew on as little.

    All labels of the refinement bring the hidden states of the model that they are of.
    """
    original, moved = load_model("strong"), load_model("strong")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            weight += NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
    unseen = labels_of(moved, decoding_states(moved, 500, seed=SEED), folder / "moved_unseen")
    new = labels_of(moved, decoding_states(moved, NEW, seed=1), folder / "moved_new", hidden=True)
    old = labels_of(original, decoding_states(original, OLD, seed=1), folder / "old", hidden=True)
    tokens = decoding_states(original, HELD_OUT, seed=SEED)
    before = labels_of(original, tokens, folder / "held_out_strong_joint")
    training = {**RECIPES["strong"].training, "patience": REFINEMENT_EPOCHS}
    found: dict[str, Any] = {}

    def judge(name: str, estimator: PairScorer) -> None:
        found[name] = as_dict(evaluate_estimator(estimator, moved, unseen))
        found[f"{name}, on the model of before"] = as_dict(evaluate_estimator(estimator, original, before))

    def refine(name: str, estimator: PairScorer, mixed: list[Example] | None) -> float:
        start = time.process_time()
        train_estimator(estimator, moved, new, old=mixed, epochs=REFINEMENT_EPOCHS, **training)
        spent = time.process_time() - start
        judge(name, estimator)
        return spent

    def fresh() -> SudokuMIEstimator:
        torch.manual_seed(0)
        return SudokuMIEstimator(**RECIPES["strong"].network)

    judge("as shipped", load_estimator("sudoku"))
    seconds = refine("refined", load_estimator("sudoku"), old)
    forgetful = [state._replace(hidden=None) for state in old]
    refine("refined, old states seen by the moved model", load_estimator("sudoku"), forgetful)
    refine("refined without old states", load_estimator("sudoku"), None)
    refine("trained anew on the new states", fresh(), None)
    start = time.process_time()
    train_estimator(fresh(), original, forgetful, epochs=1, **training)
    # The recipe trains on its states and then on twice as many.
    whole = RECIPES["strong"].epochs * 3 * RECIPES["strong"].states / OLD * (time.process_time() - start)
    r = {name: report["pearson"] for name, report in found.items()}
    lost = r["as shipped, on the model of before"] - r["as shipped"]
    return found | {
        "share of the lost r recovered": (r["refined"] - r["as shipped"]) / lost,
        "CPU seconds": {"refinement": seconds, "training": whole},
        "share of the training time": seconds / whole,
    }


STAGES = {"held-out": held_out, "splits": splits, "refinement": refinement}
FIELDS = ("pairs", "pearson", "spearman", "mean_absolute_error", "false_independence", "safe_tau", "partner_rank")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where labels are kept")
    parser.add_argument("--only", choices=STAGES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "estimator_sudoku.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for stage in [options.only] if options.only else STAGES:
        found[stage] = plain(STAGES[stage](options.folder))
        path.write_text(json.dumps(found, indent=1) + "\n")
    with (RESULTS / "estimator_sudoku.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["stage", "case", *FIELDS, "command"])
        for stage, cases in found.items():
            for case, value in cases.items():
                row = [value[field] for field in FIELDS] if isinstance(value, dict) and "pearson" in value else None
                if row is not None:
                    cells = [f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row]
                    table.writerow(
                        [stage, case, *cells, f"python benchmarks/estimator_sudoku.py --only {stage} FOLDER"]
                    )
                    print(stage, case, *cells)


if __name__ == "__main__":
    main()
