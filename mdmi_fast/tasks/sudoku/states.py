"""States to label: what a model meets while it decodes, from an empty grid to a nearly full one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mdmi_fast.decode.loop import sample
from mdmi_fast.decode.policies.base import take_lowest
from mdmi_fast.decode.randomness import uniform
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import token_stats
from mdmi_fast.tasks.sudoku.model import CELLS, MASK_TOKEN
from mdmi_fast.tasks.sudoku.puzzles import training_boards

_AT_ONCE = 500


def decoding_states(model: MaskedModel, count: int, *, seed: int) -> Tensor:
    """Draw partly filled boards [count, 81] int64 of all tasks of the demo.

    Half of them were filled by the model itself from an empty grid and a quarter from 17 to 30 clues of a true board,
    at temperature 1, one cell after another by entropy or at random; the rest are true boards under a random mask. How
    much is filled is uniform.

    Args:
        model: fills the boards.
        count: how many states, at least 1.
        seed: of everything.

    Returns:
        Every one with at least one blank.
    """
    random = np.random.default_rng(seed)
    boards = torch.from_numpy(training_boards()).long()
    states = []
    for first in range(0, count, _AT_ONCE):
        size = min(_AT_ONCE, count - first)
        truth = boards[torch.from_numpy(random.integers(0, len(boards), size))]
        kind = torch.from_numpy(random.choice(3, size, p=[0.5, 0.25, 0.25]))
        clues = torch.from_numpy(random.integers(17, 31, size)).where(kind == 1, 0)
        goal = clues + torch.from_numpy(random.random(size)) * (CELLS - clues)
        clues, goal = goal.long().where(kind == 2, clues), goal.long()
        rank = torch.from_numpy(random.random((size, CELLS)).argsort(axis=1).argsort(axis=1))
        start = truth.where(rank < clues.unsqueeze(-1), MASK_TOKEN)
        at_random = torch.from_numpy(random.random(size) < 0.5)
        seeds = torch.from_numpy(random.integers(0, 2**62, size))
        states.append(_fill(model, start, goal, at_random, seeds))
    return torch.cat(states)


@torch.no_grad()
def _fill(model: MaskedModel, tokens: Tensor, goal: Tensor, at_random: Tensor, seeds: Tensor) -> Tensor:
    """Fill cells one by one at temperature 1 until `goal` cells are filled."""
    for step in range(CELLS):
        active = ((tokens != MASK_TOKEN).sum(-1) < goal).nonzero().squeeze(-1)
        if not len(active):
            break
        state = tokens[active]
        logits = model(state).logits
        luck, order = (uniform(seeds[active], step, stream, CELLS) for stream in (0, 1))
        key = order.where(at_random[active].unsqueeze(-1), token_stats(logits).entropy.double())
        chosen = take_lowest(key, state == MASK_TOKEN, 1)
        state[chosen] = sample(logits[chosen], luck[chosen], 1.0)
        tokens[active] = state
    return tokens
