"""How much of what tokens of one pass do to each other a coupling explains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast._threads import one_torch_thread
from mdmi_fast.coupling.draws import Draws, ask, chunks, divergence, near_pairs
from mdmi_fast.coupling.learned import LearnedCoupling
from mdmi_fast.coupling.trajectories import Trajectories
from mdmi_fast.models import MaskedModel

_BINS = ((1, 1), (2, 3), (4, 7), (8, 16))
_AT_ONCE, _RESAMPLES = 64, 1000


class Share(NamedTuple):
    """A share of a divergence that is explained, with a 95% interval of resampled states; below 0 it got worse."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class CouplingReport:
    """What a coupling makes of unseen sequences.

    Attributes:
        divergence: nats, KL from the marginals before the draws to those after, the mean over what is masked.
        explained: the share of it that the corrections take away.
        by_drawn: the same by how many tokens were drawn: "1", "2-3", "4-7", "8-16", those that occurred.
        control: the same with the hidden states of another sequence, all else as it is: what needs no state.
        strength: what all corrections are multiplied by.
        states: how many were judged.
    """

    divergence: float
    explained: Share
    by_drawn: dict[str, Share]
    control: Share
    strength: float
    states: int


def after_draws(coupling: LearnedCoupling, draws: Draws) -> Tensor:
    """Log-probabilities [Q, V] of what is masked after the draws, as the coupling corrects those from before."""
    b, a, j = near_pairs(draws, coupling.reach)
    drawn = coupling.project(draws.hidden[draws.drawn].float())[0]
    waiting = coupling.project(draws.hidden[draws.left].float())[1]

    def places(where: Tensor) -> Tensor:
        return (where.flatten().long().cumsum(0) - 1).view_as(where)

    to = places(draws.left)[b, j]
    shift = coupling.shift(drawn[places(draws.drawn)[b, a]], waiting[to], draws.tokens[b, a], a, j)
    total = shift.new_zeros(len(waiting), coupling.shift_size).index_add(0, to, shift)
    corrected: Tensor = draws.before[draws.left].float() + coupling.strength * coupling.output(total)
    return corrected.log_softmax(-1)


@one_torch_thread()
@torch.no_grad()
def evaluate_coupling(
    coupling: LearnedCoupling,
    model: MaskedModel,
    trajectories: Trajectories,
    *,
    states: int = 1_000,
    most_drawn: int = 16,
    seed: int = 0,
) -> CouplingReport:
    """Judge a coupling on sequences that it was not trained on.

    Args:
        coupling: to be judged.
        model: whose trajectories they are.
        trajectories: see `draw_trajectories`.
        states: base states, two calls of the model each.
        most_drawn: tokens drawn from a state, 1 to so many.
        seed: of the states.

    Raises:
        TypeError: if coupling or trajectories are something else.
        ValueError: if the coupling was made for another model, states or most_drawn is less than 1, or no sequence has two
            passes.
    """
    for name, value, kind in (("coupling", coupling, LearnedCoupling), ("trajectories", trajectories, Trajectories)):
        if not isinstance(value, kind):
            raise TypeError(f"evaluate_coupling: {name} must be a {kind.__name__}, got {check.shown(value)}")
    if min(states, most_drawn) < 1:
        raise ValueError(f"evaluate_coupling: states and most_drawn must be at least 1, got {states} and {most_drawn}")
    coupling.check_model(model)
    generator = torch.Generator().manual_seed(seed)
    parts = [
        ask(model, trajectories, *chunk)
        for chunk in chunks(trajectories, states=states, most=most_drawn, generator=generator)
    ]
    if not parts:
        raise ValueError("evaluate_coupling: trajectories must hold a sequence of two passes or more, got none")
    return report_on(coupling, Draws(*(torch.cat(field) for field in zip(*parts, strict=True))), seed=seed)


@torch.no_grad()
def report_on(coupling: LearnedCoupling, draws: Draws, *, seed: int) -> CouplingReport:
    """The report on some draws."""
    before, after, control = (torch.zeros(len(draws.tokens), dtype=torch.float64, device="cpu") for _ in range(3))
    masked = 0
    for index in torch.arange(len(draws.tokens), device="cpu").split(_AT_ONCE):
        some = draws.of(index)
        row = some.left.nonzero()[:, 0]
        other = some._replace(hidden=some.hidden.roll(1, 0))
        for total, guess in (
            (before, some.before[some.left]),
            (after, after_draws(coupling, some)),
            (control, after_draws(coupling, other)),
        ):
            total[index] = torch.zeros(len(index), dtype=torch.float64, device="cpu").index_add(
                0, row, divergence(some.after[some.left], guess).double()
            )
        masked += len(row)
    counts = draws.drawn.sum(-1)
    by_drawn = {}
    for least, most in _BINS:
        chosen = (counts >= least) & (counts <= most)
        if bool(chosen.any()):
            by_drawn[f"{least}-{most}" if most > least else f"{least}"] = _share(before[chosen], after[chosen], seed)
    return CouplingReport(
        float(before.sum()) / max(masked, 1),
        _share(before, after, seed),
        by_drawn,
        _share(before, control, seed),
        coupling.strength,
        len(counts),
    )


def _share(before: Tensor, after: Tensor, seed: int) -> Share:
    """1 - after / before, of sums over states [S]."""
    generator = torch.Generator().manual_seed(seed)
    again = torch.randint(len(before), (_RESAMPLES, len(before)), generator=generator, device="cpu")
    shares = 1 - after[again].sum(-1) / before[again].sum(-1)
    low, high = shares.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64, device="cpu")).tolist()
    return Share(float(1 - after.sum() / before.sum()), low, high)
