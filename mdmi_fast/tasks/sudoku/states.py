"""States to label: what a model meets while it decodes, from an empty grid to a nearly full one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mdmi_fast.decoding.policies import MIBudget, MISource, Policy, Random, Sequential, Step
from mdmi_fast.decoding.randomness import uniform
from mdmi_fast.decoding.sampling import sample
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import token_stats
from mdmi_fast.tasks.sudoku.model import CELLS, MASK_TOKEN
from mdmi_fast.tasks.sudoku.puzzles import training_boards

_AT_ONCE = 500


def decoding_states(model: MaskedModel, count: int, *, seed: int, mi: MISource | None = None) -> Tensor:
    """Draw partly filled boards [count, 81] int64 of all tasks of the demo.

    Half of them were filled by the model itself from an empty grid and a quarter from 17 to 30 clues of a true board,
    at temperature 1; the rest are true boards under a random mask. How much is filled is uniform. The model fills one
    cell a pass, by entropy or at random, or, in half of the boards where `mi` is given, what a mutual information
    budget takes: so an estimator can be trained on the states that it leads to itself.

    Args:
        model: fills the boards.
        count: how many states.
        seed: of everything.
        mi: predicts mutual information for the budget.
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
        order = torch.from_numpy(random.random(size))
        seeds = torch.from_numpy(random.integers(0, 2**62, size))
        by_budget = order < 0.5 if mi is not None else torch.zeros(size, dtype=torch.bool, device="cpu")
        policies: list[tuple[Tensor, Policy]] = [
            (~by_budget & (order < 0.75), Random(1)),
            (~by_budget & (order >= 0.75), Sequential()),
        ]
        if mi is not None:
            tight = by_budget & (order < 0.25)
            policies += [(tight, MIBudget(mi, 0.02, entropy_weight=0.0))]
            policies += [(by_budget & ~tight, MIBudget(mi, 0.06, entropy_weight=0.0))]
        for rows, policy in policies:
            start[rows] = _fill(model, start[rows], goal[rows], policy, seeds[rows])
        states.append(start)
    return torch.cat(states)


@torch.no_grad()
def _fill(model: MaskedModel, tokens: Tensor, goal: Tensor, policy: Policy, seeds: Tensor) -> Tensor:
    """Fill cells at temperature 1 as the policy says until `goal` cells are filled."""
    for index in range(CELLS):
        active = ((tokens != MASK_TOKEN).sum(-1) < goal).nonzero().squeeze(-1)
        if not len(active):
            break
        state = tokens[active]
        output, mask = model(state), state == MASK_TOKEN
        step = Step(index, model=model, tokens=state, seeds=seeds[active])
        chosen = policy.select(token_stats(output.logits), output.hidden, mask, step).selected
        uniforms = uniform(seeds[active], index, 0, torch.arange(CELLS, device=tokens.device))
        state[chosen] = sample(output.logits[chosen], uniforms[chosen], 1.0)
        tokens[active] = state
    return tokens
