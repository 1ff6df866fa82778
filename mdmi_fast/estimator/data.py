"""Labelled states on their way to an estimator: the one place that knows how labels are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mdmi_fast import ops
from mdmi_fast.labels import Form, LabelSet, masked_pairs
from mdmi_fast.labels.store import INDEX_FILE
from mdmi_fast.models import MaskedModel


class Batch(NamedTuple):
    """Some labelled states, with all of their pairs.

    Attributes:
        hidden: [B, N, D], as the model gives it.
        stats: of the model's logits, every field [B, N].
        mask: [B, N] bool, True = masked.
        mi: [B, N, N] float32, nats.
        pairs: [B, N, N] bool, True where both ends are masked and differ.
    """

    hidden: Tensor
    stats: ops.TokenStats
    mask: Tensor
    mi: Tensor
    pairs: Tensor


@torch.no_grad()
def read_batch(labels: LabelSet, model: MaskedModel, chosen: Tensor, device: torch.device) -> Batch:
    """Fetch some states of a set of labels and run the model on them.

    Args:
        labels: where from.
        model: whose labels they are.
        chosen: [B] int64, numbers of the states.
        device: of the model, and of everything that comes back.
    """
    output = model(labels.tokens[chosen].to(device))
    mask = labels.mask[chosen].to(device)
    mi = labels.mi[chosen].to(device)
    return Batch(output.hidden, ops.token_stats(output.logits), mask, mi, masked_pairs(mask))


def read_form(folder: Path) -> Form:
    """The form in which a folder of labels was made.

    Raises:
        FileNotFoundError: if it holds no labels.
    """
    form: Form = json.loads((folder / INDEX_FILE).read_text())["form"]
    return form


def joined(first: LabelSet, second: LabelSet) -> LabelSet:
    """Both sets as one, the states of the first before those of the second.

    Raises:
        ValueError: if their states differ in length.
    """
    lengths = first.tokens.shape[1], second.tokens.shape[1]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"labels can be joined only if their states have one length, got {lengths[0]} and {lengths[1]}"
        )
    return LabelSet(*(torch.cat(fields) for fields in zip(first, second, strict=True)))


def taken(labels: LabelSet, chosen: Tensor) -> LabelSet:
    """The states of the numbers given."""
    return LabelSet(*(field[chosen] for field in labels))


def split_states(labels: LabelSet, held_out: float, seed: int) -> tuple[LabelSet, LabelSet]:
    """Part the states, never the pairs of one state: (to train on, held out).

    Raises:
        ValueError: if nothing is left to train on.
    """
    order = torch.randperm(len(labels.tokens), generator=torch.Generator().manual_seed(seed))
    count = max(1, round(held_out * len(order)))
    if count >= len(order):
        raise ValueError(f"train_estimator: holding out {count} states leaves nothing of {len(order)} to train on")
    return taken(labels, order[count:]), taken(labels, order[:count])


def device_of(estimator: object, labels: LabelSet) -> torch.device:
    """Where an estimator lives; one without weights goes where the labels are."""
    weights = estimator.parameters() if isinstance(estimator, nn.Module) else iter(())
    return next((weight.device for weight in weights), labels.tokens.device)
