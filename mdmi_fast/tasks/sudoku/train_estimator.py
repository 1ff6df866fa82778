"""Labels and training of the shipped estimator: `python -m mdmi_fast.tasks.sudoku.train_estimator strong|weak FOLDER`.

Rounds: each but the first labels states that decoding with the last round's estimator leads to, and trains on all
labels so far. An interrupted run goes on with the labels, epochs and rounds it has.

"strong" takes 14 CPU minutes and reached r = .878 on the 1,000 held-out states of benchmarks/estimator_sudoku.py (measured
before a training began at the constant nearest to its labels), where the shipped estimator reaches .885; "weak" takes 7
and reaches r = .945 on the tenth of its states that it holds out, like the shipped one.

The shipped files are not the output of one such run. Strong: 5,000 + 5,000 + 6,000 states, 20 epochs without weighting
underestimates, then 6 at a rate of 2e-3 with it. Weak: the recipe below, run by an earlier version.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from mdmi_fast.errors import run_program
from mdmi_fast.estimator import PairReport, TrainingProgress, train_estimator
from mdmi_fast.estimator.data import Example, read_examples
from mdmi_fast.estimator.evaluate import verdict
from mdmi_fast.files import check_folder
from mdmi_fast.labels import write_labels
from mdmi_fast.tasks.sudoku.estimator import SudokuMIEstimator
from mdmi_fast.tasks.sudoku.model import ITERATIONS, SudokuModel, load_model
from mdmi_fast.tasks.sudoku.states import decoding_states

ROUNDS, EPSILON = 2, 0.002


class Recipe(NamedTuple):
    """States to label in each round, and how a network of these sizes is trained on all of them."""

    states: int
    epochs: int
    network: dict[str, Any]
    training: dict[str, Any]


RECIPES = {
    "strong": Recipe(
        4000,
        20,
        {"features": 12, "stem": 48, "layers": (48, 16)},
        {"learning_rate": 5e-3, "underestimation": 4.0},
    ),
    "weak": Recipe(3000, 12, {"features": 10, "stem": 32, "layers": (32, 16)}, {"learning_rate": 5e-3}),
}


def label(model: SudokuModel, folder: Path, *, states: int, seed: int, mi: SudokuMIEstimator | None) -> list[Example]:
    """Label states of all tasks in the joint form, every entry within EPSILON nats of full probing."""
    tokens = decoding_states(model, states, seed=seed, mi=mi)
    with tqdm(total=states, disable=None, unit="state", desc="labels") as bar:
        write_labels(model, tokens, folder, epsilon=EPSILON, progress=bar.update)
    return read_examples(folder, "joint", model=model)


def train(
    strength: str, labels: list[Example], checkpoint: Path, *, epochs: int, seed: int = 0
) -> tuple[SudokuMIEstimator, PairReport]:
    """Train an estimator; returns it with its report on held-out states."""
    torch.manual_seed(seed)

    def show(progress: TrainingProgress) -> None:
        held = progress.held_out
        print(f"epoch {progress.epoch}: loss {progress.loss:.5f}, held-out r {held.pearson:.4f}", file=sys.stderr)

    recipe = RECIPES[strength]
    estimator = SudokuMIEstimator(**recipe.network)
    estimator, report = train_estimator(
        estimator,
        load_model(strength),
        labels,
        epochs=epochs,
        seed=seed,
        checkpoint=checkpoint,
        on_epoch=show,
        **recipe.training,
    )
    estimator.provenance = {
        "model": f"sudoku:{strength}",
        "form": "joint",
        "epsilon": EPSILON,
        "states": len(labels),
        **recipe.training,
        "held_out_pearson": round(report.pearson, 4),
    }
    return estimator, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strength", choices=sorted(ITERATIONS), help="which network it is for")
    parser.add_argument("folder", type=Path, help="where the labels and the rounds' estimators are kept")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--states", type=int, help="to label in each round (default: the recipe's)")
    parser.add_argument("--epochs", type=int, help="of each round (default: the recipe's)")
    parser.add_argument("--out", type=Path, help="folder of the estimator (default: as shipped)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    check_folder(options.folder)
    check_folder(options.out)
    torch.set_num_threads(options.threads)
    model, recipe = load_model(options.strength), RECIPES[options.strength]
    states, epochs = options.states or recipe.states, options.epochs or recipe.epochs
    labels: list[Example] = []
    estimator = None
    for number in range(1, options.rounds + 1):
        labels += label(model, options.folder / f"round-{number}", states=states, seed=number, mi=estimator)
        kept = options.folder / f"estimator-{number}"
        if not kept.exists():
            checkpoint = options.folder / f"checkpoint-{number}.pt"
            estimator, report = train(options.strength, labels, checkpoint, epochs=epochs)
            estimator.save_pretrained(kept)
            checkpoint.unlink()
            print(f"round {number}: {verdict(report)}")
        estimator = SudokuMIEstimator.from_pretrained(kept)
    if estimator is not None:
        shipped = Path(__file__).parent / "weights" / f"estimator_{options.strength}"
        estimator.save_pretrained(options.out or shipped)


if __name__ == "__main__":
    sys.exit(run_program("python -m mdmi_fast.tasks.sudoku.train_estimator", main))
