"""Labels and training of the shipped estimator: `python -m mdmi_fast.tasks.sudoku.train_estimator strong|weak FOLDER`.

Two rounds: the second labels states that decoding with the first round's estimator leads to, and trains on both. An
interrupted run goes on with the labels it has.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from mdmi_fast.estimator import PairReport, TrainingProgress, train_estimator
from mdmi_fast.labels import LabelSet, read_labels, write_labels
from mdmi_fast.tasks.sudoku.estimator import SudokuMIEstimator
from mdmi_fast.tasks.sudoku.model import ITERATIONS, MASK_TOKEN, SudokuModel, load_model
from mdmi_fast.tasks.sudoku.states import decoding_states

STATES, EPSILON = 5000, 0.002
FEATURES, LAYERS = 10, (32, 16)
EPOCHS, RATE = 16, 5e-3


def label(model: SudokuModel, folder: Path, *, states: int, seed: int, mi: SudokuMIEstimator | None) -> LabelSet:
    """Label states of all tasks in the joint form, every entry within EPSILON nats of full probing."""
    tokens = decoding_states(model, states, seed=seed, mi=mi)
    with tqdm(total=states, disable=None, unit="state", desc="labels") as bar:
        write_labels(model, tokens, folder, epsilon=EPSILON, progress=bar.update)
    return read_labels(folder, mask_token_id=MASK_TOKEN)


def train(strength: str, labels: LabelSet, *, epochs: int, seed: int = 0) -> tuple[SudokuMIEstimator, PairReport]:
    """Train an estimator; returns it with its report on held-out states."""
    torch.manual_seed(seed)

    def show(progress: TrainingProgress) -> None:
        held = progress.held_out
        print(f"epoch {progress.epoch}: loss {progress.loss:.5f}, held-out r {held.pearson:.4f}", file=sys.stderr)

    estimator = SudokuMIEstimator(features=FEATURES, layers=LAYERS)
    estimator, report = train_estimator(
        estimator, load_model(strength), labels, epochs=epochs, learning_rate=RATE, seed=seed, on_epoch=show
    )
    estimator.provenance = {
        "model": f"sudoku:{strength}",
        "form": "joint",
        "epsilon": EPSILON,
        "states": len(labels.tokens),
        "held_out_pearson": round(report.pearson, 4),
    }
    return estimator, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strength", choices=sorted(ITERATIONS), help="which network it is for")
    parser.add_argument("folder", type=Path, help="where the labels and the first round's estimator are kept")
    parser.add_argument("--states", type=int, default=STATES, help="of each round")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, help="folder of the estimator (default: as shipped)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(options.strength)
    first_labels = label(model, options.folder / "round-1", states=options.states, seed=1, mi=None)
    kept = options.folder / "estimator-1"
    if kept.exists():
        first = SudokuMIEstimator.from_pretrained(kept)
    else:
        first, _ = train(options.strength, first_labels, epochs=options.epochs // 2)
        first.save_pretrained(kept)
    second_labels = label(model, options.folder / "round-2", states=options.states, seed=2, mi=first)
    both = LabelSet(*(torch.cat(fields) for fields in zip(first_labels, second_labels, strict=True)))
    estimator, report = train(options.strength, both, epochs=options.epochs)
    estimator.save_pretrained(options.out or Path(__file__).parent / "weights" / f"estimator_{options.strength}")
    print(report)


if __name__ == "__main__":
    main()
