"""Labels and training of the shipped estimator: `python -m mdmi_fast.tasks.sudoku.train_estimator --labels FOLDER`.

Both halves can be interrupted: labels go on where they were, and the training is minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from mdmi_fast.estimator import PairReport, TrainingProgress, train_estimator
from mdmi_fast.labels import read_labels, write_labels
from mdmi_fast.tasks.sudoku.estimator import SudokuMIEstimator
from mdmi_fast.tasks.sudoku.model import MASK_TOKEN, load_model
from mdmi_fast.tasks.sudoku.states import decoding_states

STATES, EPSILON = 5000, 0.01
FEATURES, LAYERS = 10, (32, 16)
EPOCHS, RATE = 10, 5e-3


def label(folder: Path, *, states: int, seed: int = 1) -> None:
    """Label states of all tasks in the joint form, every entry within EPSILON nats of full probing."""
    model = load_model()
    tokens = decoding_states(model, states, seed=seed)
    with tqdm(total=states, disable=None, unit="state", desc="labels") as bar:
        write_labels(model, tokens, folder, epsilon=EPSILON, progress=bar.update)


def train(labels: Path, out: Path, *, epochs: int = EPOCHS, seed: int = 0) -> PairReport:
    """Train and save the estimator; returns its report on held-out states."""
    torch.manual_seed(seed)
    estimator = SudokuMIEstimator(features=FEATURES, layers=LAYERS)

    def show(progress: TrainingProgress) -> None:
        held = progress.held_out
        print(f"epoch {progress.epoch}: loss {progress.loss:.5f}, held-out r {held.pearson:.4f}", file=sys.stderr)

    data = read_labels(labels, mask_token_id=MASK_TOKEN)
    estimator, report = train_estimator(
        estimator, load_model(), data, epochs=epochs, learning_rate=RATE, seed=seed, on_epoch=show
    )
    estimator.provenance = {
        "model": "sudoku strong",
        "form": "joint",
        "epsilon": EPSILON,
        "states": len(data.tokens),
        "held_out_pearson": round(report.pearson, 4),
    }
    estimator.save_pretrained(out)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", type=Path, required=True, help="folder of the labels, made or finished first")
    parser.add_argument("--states", type=int, default=STATES)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "weights" / "estimator")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    label(options.labels, states=options.states)
    print(train(options.labels, options.out, epochs=options.epochs))


if __name__ == "__main__":
    main()
