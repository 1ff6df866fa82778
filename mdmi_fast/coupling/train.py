"""Training a coupling on what its model says before and after tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mdmi_fast import checks as check
from mdmi_fast._threads import one_torch_thread
from mdmi_fast.coupling.draws import Draws, Pairs, ask, chunks, divergence, pairs_of
from mdmi_fast.coupling.evaluate import CouplingReport, after_draws, report_on
from mdmi_fast.coupling.learned import C, LearnedCoupling
from mdmi_fast.coupling.trajectories import Trajectories
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.identity import identity

_PAIRS, _STATES = 512, 32
"""Pairs and states of one step."""
_FLOOR = 0.02
"""Nats added to a pair's divergence, in proportion to which it is drawn: weak pairs must be seen to be left alone."""
_STRENGTHS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)


class CouplingProgress(NamedTuple):
    """Where training stands.

    Attributes:
        stage: "pairs" or "products".
        step: of the stage, from 1.
        steps: how many it has.
        loss: the mean of the last steps, nats.
    """

    stage: str
    step: int
    steps: int
    loss: float


@one_torch_thread()
def train_coupling(
    coupling: C,
    model: MaskedModel,
    trajectories: Trajectories,
    *,
    states: int = 16_000,
    steps: int = 3_000,
    most_drawn: int = 16,
    learning_rate: float = 2e-3,
    weight_decay: float = 1e-3,
    held_out: float = 0.1,
    seed: int = 0,
    on_progress: Callable[[CouplingProgress], object] | None = None,
) -> tuple[C, CouplingReport]:
    """Fit a coupling to its model, without a single probe: decoded sequences hold what is to be learned.

    First single pairs: the model's marginal at j once one token was drawn at a, pairs drawn in proportion to how much
    that changed; averaged over all positions the few that change would drown. Then products: 1 to `most_drawn` tokens
    drawn, and the marginals of all that is masked afterwards, because the errors of many pairs add up in the exponent.
    Last, the strength, by which all corrections are multiplied, is the one of least divergence on held-out sequences.

    Args:
        coupling: trained in place; `trained_on` is set to the model.
        model: whose trajectories they are.
        trajectories: see `draw_trajectories`; a share of the sequences is held out.
        states: base states asked about for pairs, two calls of the model each; a third as many for products.
        steps: of the first stage; a third as many of the second.
        most_drawn: tokens of a product.
        learning_rate: of AdamW, falling along a cosine; half of it for products. Gradients are clipped at norm 1.
        weight_decay: of AdamW.
        held_out: share of the sequences that is only judged on.
        seed: of states, pairs and batches; the weights come as they are.
        on_progress: called every hundred steps.

    Returns:
        The coupling in evaluation mode and its report on held-out sequences.

    Raises:
        TypeError: if coupling or trajectories are something else.
        ValueError: if sizes of model and coupling differ, sequences are too few or a number is out of range.
    """
    _check(coupling, model, trajectories, states, steps, most_drawn, held_out)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(trajectories.tokens), generator=generator, device="cpu")
    n_judged = max(1, round(held_out * len(order)))
    judged, trained = trajectories.of(order[:n_judged]), trajectories.of(order[n_judged:])
    coupling.train()
    pairs = _many_pairs(model, trained, states, coupling.reach, generator)
    if not len(pairs.tokens):
        raise ValueError("train_coupling: trajectories must hold two positions near each other, got none")
    _fit(
        coupling, _pair_batches(coupling, pairs, generator), "pairs", steps, (learning_rate, weight_decay), on_progress
    )
    draws = _many_draws(model, trained, max(1, states // 3), most_drawn, generator)
    batches = _product_batches(coupling, draws, generator)
    _fit(coupling, batches, "products", steps // 3, (learning_rate / 2, weight_decay), on_progress)
    coupling.eval()
    unseen = _many_draws(model, judged, max(_STATES, states // 20), most_drawn, generator)
    with torch.no_grad():
        coupling.strength = min(_STRENGTHS, key=lambda strength: _loss_at(coupling, unseen, strength))
    coupling.trained_on = identity(model)
    return coupling, report_on(coupling, unseen, seed=seed)


def _check(
    coupling: LearnedCoupling,
    model: MaskedModel,
    trajectories: Trajectories,
    states: int,
    steps: int,
    most_drawn: int,
    held_out: float,
) -> None:
    for name, value, kind in (("coupling", coupling, LearnedCoupling), ("trajectories", trajectories, Trajectories)):
        if not isinstance(value, kind):
            raise TypeError(f"train_coupling: {name} must be a {kind.__name__}, got {check.shown(value)}")
    sizes = (model.hidden_size, model.vocab_size)
    if (coupling.hidden_size, coupling.vocab_size) != sizes:
        raise ValueError(
            f"train_coupling: coupling must be for hidden states of {sizes[0]} and {sizes[1]} tokens as the model's, got "
            f"{coupling.hidden_size} and {coupling.vocab_size}"
        )
    if min(states, steps, most_drawn) < 1:
        raise ValueError(
            f"train_coupling: states, steps and most_drawn must be at least 1, got {states}, {steps}, {most_drawn}"
        )
    if not 0 < held_out < 1:
        raise ValueError(f"train_coupling: held_out must be a share between 0 and 1, got {held_out}")
    long = int((trajectories.lengths >= 2).sum())
    if long < 2 or long < len(trajectories.tokens):
        raise ValueError(
            "train_coupling: trajectories must be at least two sequences of two passes or more each, got "
            f"{len(trajectories.tokens)}, {long} of them so long"
        )


def _many_pairs(
    model: MaskedModel, trajectories: Trajectories, states: int, reach: int, generator: torch.Generator
) -> Pairs:
    parts = [
        pairs_of(ask(model, trajectories, *chunk), reach)
        for chunk in chunks(trajectories, states=states, most=1, generator=generator)
    ]
    return Pairs(*(torch.cat(field) for field in zip(*parts, strict=True)))


def _many_draws(
    model: MaskedModel, trajectories: Trajectories, states: int, most: int, generator: torch.Generator
) -> Draws:
    parts = [
        ask(model, trajectories, *chunk)
        for chunk in chunks(trajectories, states=states, most=most, generator=generator)
    ]
    return Draws(*(torch.cat(field) for field in zip(*parts, strict=True)))


def _pair_batches(coupling: LearnedCoupling, pairs: Pairs, generator: torch.Generator) -> Callable[[], Tensor]:
    weight = divergence(pairs.after, pairs.before).double() + _FLOOR
    cumulative = weight.cumsum(0)

    def loss() -> Tensor:
        places = torch.rand(_PAIRS, generator=generator, dtype=torch.float64, device="cpu") * cumulative[-1]
        some = pairs.of(torch.searchsorted(cumulative, places).clamp(max=len(weight) - 1))
        drawn, waiting = coupling.project(some.drawn.float())[0], coupling.project(some.waiting.float())[1]
        shift = coupling.shift(drawn, waiting, some.tokens, some.a, some.j)
        guess = (some.before.float() + coupling.output(shift)).log_softmax(-1)
        return divergence(some.after, guess).mean()

    return loss


def _product_batches(coupling: LearnedCoupling, draws: Draws, generator: torch.Generator) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        some = draws.of(torch.randint(len(draws.tokens), (_STATES,), generator=generator, device="cpu"))
        return divergence(some.after[some.left], after_draws(coupling, some)).mean()

    return loss


def _fit(
    coupling: LearnedCoupling,
    batch_loss: Callable[[], Tensor],
    stage: str,
    steps: int,
    rates: tuple[float, float],
    on_progress: Callable[[CouplingProgress], object] | None,
) -> None:
    parameters = [p for p in coupling.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rates[0], weight_decay=rates[1])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    total = 0.0
    for step in range(1, steps + 1):
        loss = batch_loss()
        if not bool(loss.isfinite()):
            raise ValueError(
                f"train_coupling: the loss of {stage} is {float(loss)} in step {step}; try a lower learning_rate"
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        total += float(loss.detach())
        if step % 100 == 0 and on_progress is not None:
            on_progress(CouplingProgress(stage, step, steps, total / 100))
        if step % 100 == 0:
            total = 0.0


def _loss_at(coupling: LearnedCoupling, draws: Draws, strength: float) -> float:
    coupling.strength = strength
    total = 0.0
    for index in torch.arange(len(draws.tokens), device="cpu").split(_STATES):
        some = draws.of(index)
        total += float(divergence(some.after[some.left], after_draws(coupling, some)).double().sum())
    return total
