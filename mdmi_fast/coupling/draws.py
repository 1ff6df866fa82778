"""What a coupling is trained and judged on: states, the tokens drawn from them, and what the model says afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast.coupling.trajectories import Trajectories
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import call_model, visible_positions

_AT_ONCE = 256
"""States of one batch of the model."""
_LEAST = -60.0
"""Nats: log-probabilities are kept in half precision, and none is -inf."""


class Draws(NamedTuple):
    """Base states, tokens drawn from them one after the other, and the model's marginals before and after.

    Attributes:
        hidden: [S, N, D] float16, of the base states.
        before: [S, N, V] float16, log-probabilities in the base states.
        after: [S, N, V] float16, once the drawn tokens stand there.
        drawn: [S, N] bool, the positions drawn.
        left: [S, N] bool, those still masked afterwards.
        tokens: [S, N] int64, the finished sequences.
    """

    hidden: Tensor
    before: Tensor
    after: Tensor
    drawn: Tensor
    left: Tensor
    tokens: Tensor

    def of(self, index: Tensor) -> Draws:
        """Some of the states."""
        return Draws(*(field[index] for field in self))


class Pairs(NamedTuple):
    """One drawn token and one masked position each.

    Attributes:
        drawn: [P, D] float16, hidden states of the positions drawn, in the base states.
        waiting: [P, D] float16, of the masked positions.
        tokens: [P] int64, what was drawn.
        a: [P] int64, where.
        j: [P] int64, the masked positions.
        before: [P, V] float16, log-probabilities of the masked position in the base state.
        after: [P, V] float16, once the token is there.
    """

    drawn: Tensor
    waiting: Tensor
    tokens: Tensor
    a: Tensor
    j: Tensor
    before: Tensor
    after: Tensor

    def of(self, index: Tensor) -> Pairs:
        """Some of the pairs."""
        return Pairs(*(field[index] for field in self))


def chunks(
    trajectories: Trajectories, *, states: int, most: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Base states at random: sequences, passes and how many tokens are drawn, 1 to `most` of about equal shares an octave.

    Sequences of fewer than two passes have no such state and are left out.
    """
    usable = (trajectories.lengths >= 2).nonzero().squeeze(-1)
    if not len(usable):
        return
    rows = usable[torch.arange(states, device="cpu") % len(usable)]
    octaves = torch.rand(states, generator=generator, dtype=torch.float64, device="cpu")
    octaves *= float(torch.tensor(most + 1.0, device="cpu").log2())
    counts = torch.minimum(octaves.exp2().long(), trajectories.lengths[rows] - 1).clamp(1, most)
    places = torch.rand(states, generator=generator, dtype=torch.float64, device="cpu")
    passes = (places * (trajectories.lengths[rows] - counts)).long()
    yield from zip(rows.split(_AT_ONCE), passes.split(_AT_ONCE), counts.split(_AT_ONCE), strict=True)


@torch.no_grad()
def ask(model: MaskedModel, trajectories: Trajectories, rows: Tensor, passes: Tensor, counts: Tensor) -> Draws:
    """What the model says before and after `counts` passes, from `passes` on, of some sequences; all [S]."""
    order = trajectories.order[rows]
    begin, end = passes.unsqueeze(-1), (passes + counts).unsqueeze(-1)

    def answer(at: Tensor) -> tuple[Tensor, Tensor]:
        tokens = trajectories.states(rows, at)
        output = call_model("train_coupling", model, tokens, visible_positions("train_coupling", model, tokens, None))
        return output.hidden.half(), output.logits.float().log_softmax(-1).clamp(min=_LEAST).half()

    (hidden, before), (_, after) = answer(passes), answer(passes + counts)
    drawn, left = (order >= begin) & (order < end), order >= end
    return Draws(hidden, before, after, drawn, left, trajectories.tokens[rows])


def near_pairs(draws: Draws, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence, drawn position and masked position, [Q] each, of all pairs at most so far apart."""
    place = torch.arange(draws.drawn.shape[1], device=draws.drawn.device)
    near = (place - place.unsqueeze(-1)).abs() <= reach
    found = (draws.drawn.unsqueeze(-1) & draws.left.unsqueeze(-2) & near).nonzero()
    return found[:, 0], found[:, 1], found[:, 2]


def pairs_of(draws: Draws, reach: int) -> Pairs:
    """The pairs of states from which one token was drawn."""
    b, a, j = near_pairs(draws, reach)
    return Pairs(
        draws.hidden[b, a], draws.hidden[b, j], draws.tokens[b, a], a, j, draws.before[b, j], draws.after[b, j]
    )


def divergence(after: Tensor, guess: Tensor) -> Tensor:
    """KL(after || guess) [...] nats of log-probabilities [..., V]."""
    after = after.float()
    return (after.exp() * (after - guess.float())).sum(-1)
