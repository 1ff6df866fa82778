"""How good an estimator is on labelled states it was not trained on (row S14 of the source)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast.labels import LabelSet, masked_pairs
from mdmi_fast.models import MaskedModel

BINS = (-torch.inf, 0.1, 0.5, 1.0)
"""Lower edges of the calibration bins of the label, nats; labels of the "entropy" form may be negative."""


class PairReport(NamedTuple):
    """Predicted against labelled mutual information over all masked pairs.

    Attributes:
        pairs: how many.
        pearson: correlation of the values.
        spearman: correlation of their ranks (of 200,000 pairs drawn at random, where there are more).
        mean_absolute_error: nats.
        calibration: mean absolute error of pairs whose label lies below .1, in [.1, .5), in [.5, 1) and above, nats; NaN
            where there are none.
        tau: nats below which a pair counts as independent in the three rows that follow.
        precision: of the pairs predicted independent, the share that is.
        recall: of the independent pairs, the share predicted so.
        false_independence: of the pairs predicted independent, the share that is not: above 5%, raise tau or retrain.
    """

    pairs: int
    pearson: float
    spearman: float
    mean_absolute_error: float
    calibration: tuple[float, ...]
    tau: float
    precision: float
    recall: float
    false_independence: float


def evaluate_estimator(
    estimator: Callable[[Tensor, Tensor], Tensor],
    model: MaskedModel,
    labels: LabelSet,
    *,
    tau: float = 0.01,
    batch_size: int = 64,
) -> PairReport:
    """Compare an estimator's predictions with labels, pair by pair (i < j, both masked).

    Args:
        estimator: hidden [B, N, D] and mask [B, N] to mutual information [B, N, N], nats.
        model: whose hidden states the labels belong to.
        labels: states the estimator has not seen.
        tau: nats below which a pair counts as independent.
        batch_size: states at once.

    Returns:
        PairReport; a correlation is NaN where one side is constant, a share where it is one of nothing.

    Raises:
        ValueError: if the labels hold fewer than two masked pairs.

    Numerics:
        Sums in float64.
    """
    predicted, actual = [torch.zeros(0)], [torch.zeros(0)]
    upper = torch.ones(labels.mask.shape[1], labels.mask.shape[1]).triu(1).bool()
    with torch.no_grad():
        for first in range(0, len(labels.tokens), batch_size):
            part = LabelSet(*(field[first : first + batch_size] for field in labels))
            pairs = masked_pairs(part.mask) & upper
            predicted.append(estimator(model(part.tokens).hidden, part.mask)[pairs])
            actual.append(part.mi[pairs])
    p, a = torch.cat(predicted).double(), torch.cat(actual).double()
    if len(p) < 2:
        raise ValueError(f"evaluate_estimator: labels must hold at least two masked pairs, got {len(p)}")
    error = (p - a).abs()
    calibration = tuple(
        float(error[(a >= low) & (a < high)].mean()) for low, high in zip(BINS, (*BINS[1:], torch.inf), strict=True)
    )
    called, independent = p < tau, a < tau
    right = float((called & independent).sum())
    precision = right / float(called.sum()) if bool(called.any()) else float("nan")
    recall = right / float(independent.sum()) if bool(independent.any()) else float("nan")
    some = torch.randperm(len(p), generator=torch.Generator().manual_seed(0))[:200_000]
    return PairReport(
        len(p),
        correlation(p, a),
        correlation(_ranks(p[some]), _ranks(a[some])),
        float(error.mean()),
        calibration,
        tau,
        precision,
        recall,
        1.0 - precision,
    )


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's r of two float64 vectors; NaN where one is constant."""
    if any(bool((z == z[0]).all()) for z in (x, y)):
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x.norm() * y.norm()))


def _ranks(x: Tensor) -> Tensor:
    """Ranks with ties at their mean."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    ranks: Tensor = (counts.cumsum(0).double() - (counts - 1) / 2)[inverse]
    return ranks
