"""Training of the shipped networks: `python -m mdmi_fast.tasks.sudoku.train_network strong|weak`."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from mdmi_fast.errors import run_program
from mdmi_fast.files import check_folder, replace_file
from mdmi_fast.tasks.sudoku.model import CELLS, ITERATIONS, SudokuModel
from mdmi_fast.tasks.sudoku.puzzles import training_boards

BATCH = 32
STEPS = {"strong": 10_000, "weak": 600}
PEAK_RATE, WARM_UP = 4e-3, 50
CHECKPOINT_EVERY = 500
"""Steps."""


def random_masks(count: int, random: np.random.Generator) -> torch.Tensor:
    """[count, 81] bool, True = given: half the boards as full as a puzzle being solved, half anything at all."""
    clues = np.where(random.random(count) < 0.5, random.integers(17, 51, count), random.integers(0, CELLS, count))
    rank = random.random((count, CELLS)).argsort(axis=1).argsort(axis=1)
    return torch.from_numpy(rank < clues[:, None])


def loss_of(model: SudokuModel, boards: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Cross-entropy at masked cells, averaged per board, over all iterations with more weight on the later ones."""
    scores = model.logits_of_every_iteration(boards.where(given, 0))
    iterations = len(scores)
    targets = (boards - 1).expand(iterations, *boards.shape)
    surprise = F.cross_entropy(scores.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)
    per_board = (surprise * ~given).sum(-1) / (~given).sum(-1).clamp(min=1)
    weight = torch.linspace(0.3, 1.0, iterations) if iterations > 1 else torch.ones(1)
    return (per_board.mean(-1) * weight).sum() / weight.sum()


def train(strength: str, folder: Path, *, steps: int, seed: int = 0) -> Path:
    """Train a network; a checkpoint beside the result lets an interrupted run go on where it was.

    Args:
        strength: which of the shipped ones.
        folder: where.
        steps: batches of 32 boards.
        seed: of everything.

    Returns:
        The file of the weights, `network_STRENGTH.safetensors`.

    Raises:
        ValueError: if the checkpoint belongs to a run with another number of steps or another seed.
    """
    result, checkpoint = folder / f"network_{strength}.safetensors", folder / f"network_{strength}.checkpoint"
    torch.manual_seed(seed)
    model = SudokuModel(ITERATIONS[strength])
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=1e-3)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if (state["steps"], state["seed"]) != (steps, seed):
            raise ValueError(
                f"{checkpoint}: of a run of {state['steps']} steps with seed {state['seed']}, "
                f"asked for {steps} with seed {seed}; delete it to begin anew"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    boards = torch.from_numpy(training_boards()).long()
    progress = tqdm(range(first, steps), initial=first, total=steps, disable=None, unit="step")
    for step in progress:
        random = np.random.default_rng((seed, step))
        rate = PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = boards[torch.from_numpy(random.integers(0, len(boards), BATCH))]
        loss = loss_of(model, batch, random_masks(BATCH, random))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        if (step + 1) % CHECKPOINT_EVERY == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
                "steps": steps,
                "seed": seed,
            }
            with replace_file(checkpoint) as temporary:
                torch.save(state, temporary)
    model.save(result)
    checkpoint.unlink(missing_ok=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strength", choices=sorted(ITERATIONS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "weights", help="folder (default: shipped)")
    parser.add_argument("--steps", type=int, help="batches of 32 boards (default: as shipped)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    check_folder(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    path = train(options.strength, options.out, steps=options.steps or STEPS[options.strength], seed=options.seed)
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    sys.exit(run_program("python -m mdmi_fast.tasks.sudoku.train_network", main))
