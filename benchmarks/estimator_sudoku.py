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
from mdmi_fast.tasks.sudoku.train_estimator import EPOCHS, FEATURES, LAYERS, RATE, STEM, UNDERESTIMATION

RESULTS = Path(__file__).parent / "results"
EPSILON = {"joint": 0.002, "entropy": 0.0}
"""Nats; the joint form as in training."""
HELD_OUT, SEED = 1000, 101
"""States that no training drew: its seeds are 1, 2 ..."""
NOISE = 0.1
"""Of the moved model: Gaussian, in units of each weight matrix's standard deviation."""
NEW, REFINEMENT_EPOCHS = 300, 20


def labels_of(
    model: SudokuModel, tokens: torch.Tensor, folder: Path, form: Literal["joint", "entropy"] = "joint"
) -> list[Example]:
    write_labels(model, tokens, folder, forms=(form,), epsilon=EPSILON[form])
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
    """The strong estimator after the network's weights were moved: as it is, refined, and trained anew on as little."""
    original, moved = load_model("strong"), load_model("strong")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            weight += NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
    unseen = labels_of(moved, decoding_states(moved, 500, seed=SEED), folder / "moved_unseen")
    new = labels_of(moved, decoding_states(moved, NEW, seed=1), folder / "moved_new")
    old = labels_of(original, decoding_states(original, 4000, seed=1), folder / "old")
    tokens = decoding_states(original, HELD_OUT, seed=SEED)
    before = labels_of(original, tokens, folder / "held_out_strong_joint")
    recipe: dict[str, Any] = {"learning_rate": RATE, "underestimation": UNDERESTIMATION, "patience": REFINEMENT_EPOCHS}

    def judged(estimator: PairScorer) -> dict[str, Any]:
        return as_dict(evaluate_estimator(estimator, moved, unseen))

    def refined(mixed: list[Example] | None) -> tuple[dict[str, Any], dict[str, Any], float]:
        start = time.process_time()
        estimator, _ = train_estimator(
            load_estimator("sudoku"), moved, new, old=mixed, epochs=REFINEMENT_EPOCHS, **recipe
        )
        spent = time.process_time() - start
        return judged(estimator), as_dict(evaluate_estimator(estimator, original, before)), spent

    kept = as_dict(evaluate_estimator(load_estimator("sudoku"), original, before))
    lost = judged(load_estimator("sudoku"))
    alone, alone_before, _ = refined(None)
    mixed, mixed_before, seconds = refined(old[:1000])
    torch.manual_seed(0)
    fresh = SudokuMIEstimator(features=FEATURES, stem=STEM, layers=LAYERS)
    train_estimator(fresh, moved, new, epochs=REFINEMENT_EPOCHS, **recipe)
    start = time.process_time()
    torch.manual_seed(0)
    train_estimator(SudokuMIEstimator(features=FEATURES, stem=STEM, layers=LAYERS), original, old, epochs=1, **recipe)
    epoch = time.process_time() - start
    return {
        "before the move": kept,
        "after the move": lost,
        "refined": mixed,
        "refined, on the model of before": mixed_before,
        "refined without old labels": alone,
        "refined without old labels, on the model of before": alone_before,
        "trained anew on the new states": judged(fresh),
        "share of the loss recovered": (mixed["pearson"] - lost["pearson"]) / (kept["pearson"] - lost["pearson"]),
        # The recipe trains on 4,000 and then on 8,000 states, EPOCHS each.
        "CPU seconds": {"refinement": seconds, "one epoch of 4,000 states": epoch, "training": 3 * EPOCHS * epoch},
        "share of the training time": seconds / (3 * EPOCHS * epoch),
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
