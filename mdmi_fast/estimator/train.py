"""Training of an estimator on labelled states of a frozen model (row S6 of the source)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast.estimator.evaluate import PairReport, evaluate_estimator
from mdmi_fast.estimator.network import E
from mdmi_fast.labels import LabelSet, masked_pairs
from mdmi_fast.models import MaskedModel


class TrainingProgress(NamedTuple):
    """What an epoch ended with: the mean training loss and the report on held-out states."""

    epoch: int
    loss: float
    held_out: PairReport


class _Best(NamedTuple):
    score: float
    epoch: int
    weights: dict[str, Tensor]
    report: PairReport


def split_states(labels: LabelSet, held_out: float, seed: int) -> tuple[LabelSet, LabelSet]:
    """Part the states, never the pairs of one state: (to train on, held out).

    Raises:
        ValueError: if nothing is left to train on.
    """
    order = torch.randperm(len(labels.tokens), generator=torch.Generator().manual_seed(seed))
    count = max(1, round(held_out * len(order)))
    if count >= len(order):
        raise ValueError(f"train_estimator: holding out {count} states leaves nothing of {len(order)} to train on")
    held, kept = order[:count], order[count:]
    return LabelSet(*(field[kept] for field in labels)), LabelSet(*(field[held] for field in labels))


def root_loss(predicted: Tensor, labels: LabelSet, underestimation: float = 1.0) -> Tensor:
    """Mean squared difference of the square roots over masked pairs.

    Most pairs share nearly nothing and a few share much: the root keeps the many small values from being lost beside
    the few large ones. `underestimation` weights the squares of pairs predicted too low.
    """
    pairs = masked_pairs(labels.mask)
    small = 1e-6  # keeps the root's slope finite at 0
    gap = (predicted + small).sqrt() - (labels.mi.clamp(min=0) + small).sqrt()
    weight = torch.where(gap < 0, underestimation, 1.0) * pairs
    return (gap.square() * weight).sum() / pairs.sum().clamp(min=1)


def train_estimator(
    estimator: E,
    model: MaskedModel,
    labels: LabelSet,
    *,
    epochs: int = 20,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-3,
    underestimation: float = 1.0,
    held_out: float = 0.1,
    patience: int = 5,
    seed: int = 0,
    on_epoch: Callable[[TrainingProgress], None] | None = None,
) -> tuple[E, PairReport]:
    """Fit an estimator to the labels of a frozen model; the weights of the best epoch are kept.

    The loss is `root_loss`, the best epoch that of the highest held-out correlation.

    Args:
        estimator: trained in place.
        model: whose hidden states the labels belong to.
        labels: of states of this model.
        epochs: most passes over the states; the rate falls to 0 along a cosine.
        batch_size: states a step; a state brings all of its pairs.
        learning_rate: of AdamW, with gradients clipped at norm 1.
        weight_decay: of AdamW.
        underestimation: how much heavier a prediction below the label weighs than one above. For sampling take more
            than 1: a dependence overlooked spoils the sequence, one imagined costs a pass.
        held_out: share of the states that is only judged on.
        patience: epochs without a better held-out correlation before it stops.
        seed: of the split and the order.
        on_epoch: called after every epoch.

    Returns:
        The estimator in evaluation mode and its report on the held-out states.

    Raises:
        ValueError: if there are too few states, a label is not finite, epochs or batch_size is less than 1,
            underestimation is not positive, or the loss stops being a number.
    """
    if not 0 < underestimation < math.inf:
        raise ValueError(f"train_estimator: underestimation must be a positive number, got {underestimation}")
    if min(epochs, batch_size) < 1:
        raise ValueError(f"train_estimator: epochs and batch_size must be at least 1, got {epochs} and {batch_size}")
    if not bool(labels.mi.isfinite().all()):
        state = int((~labels.mi.isfinite()).nonzero()[0, 0])
        raise ValueError(f"train_estimator: labels must be finite, got another one in state {state}")
    train, judge = split_states(labels, held_out, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(estimator.parameters(), lr=learning_rate, weight_decay=weight_decay)
    steps_per_epoch = -(-len(train.tokens) // batch_size)
    best: _Best | None = None
    for epoch in range(epochs):
        estimator.train()
        total = 0.0
        for index, chosen in enumerate(torch.randperm(len(train.tokens), generator=generator).split(batch_size)):
            done = (epoch * steps_per_epoch + index) / (epochs * steps_per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * done))
            batch = LabelSet(*(field[chosen] for field in train))
            with torch.no_grad():
                hidden = model(batch.tokens).hidden
            loss = root_loss(estimator(hidden, batch.mask), batch, underestimation)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(estimator.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        if not math.isfinite(total):
            raise ValueError(f"train_estimator: the loss of epoch {epoch} is {total}; lower learning_rate")
        report = evaluate_estimator(estimator.eval(), model, judge)
        if on_epoch is not None:
            on_epoch(TrainingProgress(epoch, total / steps_per_epoch, report))
        score = -math.inf if math.isnan(report.pearson) else report.pearson  # NaN: all predictions are equal
        if best is None or score > best.score:
            best = _Best(score, epoch, copy.deepcopy(estimator.state_dict()), report)
        elif epoch - best.epoch >= patience:
            break
    assert best is not None  # there was at least one epoch
    estimator.load_state_dict(best.weights)
    return estimator, best.report
