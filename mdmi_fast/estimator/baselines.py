"""What an estimator has to beat: what anybody could say of a pair without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.estimator.data import Batch, Example, read_batch
from mdmi_fast.estimator.table import DistanceTable
from mdmi_fast.models import MaskedModel

Source = Callable[[Batch], Tensor]
"""Gives [B, N, N] nats for a batch."""
TABLE = "table"
BASELINES = ("constant", "min(H_i, H_j)", "confidences", TABLE, "table and H", "shuffled")
"""A line through each of the first three; the `DistanceTable`; a line through it, min(H_i, H_j) and their product; and the
estimator's own predictions, each for another pair of the same state."""


def fit_baselines(
    states: Sequence[Example], model: MaskedModel, device: torch.device, *, batch_size: int
) -> dict[str, Source]:
    """All baselines but the shuffled one.

    Args:
        states: that they are fitted to, of any lengths.
        model: whose labels they are.
        device: of the model.
        batch_size: states at once.
    """
    table = DistanceTable.fit(states).to(device)

    def by_table(batch: Batch) -> Tensor:
        return table.forward(batch.hidden, batch.mask)

    def least(batch: Batch) -> Tensor:
        entropy = _stats(batch).entropy
        return torch.minimum(entropy.unsqueeze(-1), entropy.unsqueeze(-2))

    def sure(batch: Batch) -> Tensor:
        confidence = _stats(batch).confidence
        return -confidence.unsqueeze(-1) * confidence.unsqueeze(-2)

    features: Mapping[str, tuple[Source, ...]] = {
        "constant": (),
        "min(H_i, H_j)": (least,),
        "confidences": (sure,),
        "table and H": (by_table, least, lambda batch: by_table(batch) * least(batch)),
    }
    values: dict[str, list[Tensor]] = {name: [] for name in features}
    labels = []
    for first in range(0, len(states), batch_size):
        batch = read_batch(states[first : first + batch_size], model, device)
        upper = batch.pairs.triu()
        labels.append(batch.mi[upper].double().cpu())
        for name, sources in features.items():
            found = [torch.ones_like(batch.mi), *(source(batch) for source in sources)]
            values[name].append(torch.stack([one[upper].double().cpu() for one in found], 1))
    mi = torch.cat(labels)
    lines = {name: _line(features[name], torch.cat(values[name]), mi) for name in features}
    return {name: by_table if name == TABLE else lines[name] for name in BASELINES if name != "shuffled"}


def shuffled(source: Source) -> Source:
    """A source whose answers go to other masked positions of the same state: right in size, wrong in place."""

    def found(batch: Batch) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        order = torch.arange(batch.mask.shape[1], device="cpu").repeat(len(batch.mask), 1)
        for row, mask in zip(order, batch.mask.cpu(), strict=True):
            places = mask.nonzero().flatten()
            row[places] = places[torch.randperm(len(places), generator=generator, device="cpu")]
        order = order.to(batch.mask.device)
        rows = torch.arange(len(order), device=order.device)[:, None, None]
        return source(batch)[rows, order.unsqueeze(-1), order.unsqueeze(-2)]

    return found


def _stats(batch: Batch) -> ops.TokenStats:
    assert batch.stats is not None  # `read_batch` leaves them out only where that is asked for
    return batch.stats


def _line(sources: tuple[Source, ...], values: Tensor, mi: Tensor) -> Source:
    """What is nearest to the labels in least squares; one source alone has no falling line."""
    weights = torch.linalg.lstsq(values, mi.unsqueeze(1), driver="gelsd").solution.flatten()
    if len(weights) == 2 and float(weights[1]) < 0:
        weights = torch.stack([mi.mean(), torch.zeros_like(weights[1])])
    constant, *slopes = weights.tolist()

    def line(batch: Batch) -> Tensor:
        found = torch.full_like(batch.mi, constant)
        for slope, source in zip(slopes, sources, strict=True):
            found = found + slope * source(batch)
        return found

    return line
