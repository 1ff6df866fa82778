"""Figures of predicted against labelled mutual information."""

from __future__ import annotations

import math
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast.estimator.data import Batch
from mdmi_fast.estimator.ranks import correlation, ranks, row_ranks, share
from mdmi_fast.statistics import Interval

BINS = (-torch.inf, 0.1, 0.5, 1.0)
"""Lower edges of the calibration bins of the label, nats; labels of the "entropy" form may be negative."""
TAUS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Thresholds of independence, nats, at which a report says how often it errs."""
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Edges of the bins of the masked share of a state."""
MOST_FALSE = 0.05
"""Of the pairs predicted independent, the share that may be dependent."""
_SAMPLE = 200_000
_DRAWS = 400


class Independence(NamedTuple):
    """How well "the mutual information is below tau" is predicted.

    Attributes:
        tau: nats.
        precision: of the pairs predicted independent, the share that is.
        recall: of the independent pairs, the share predicted so.
        false_independence: of the pairs predicted independent, the share that is not.
    """

    tau: float
    precision: float
    recall: float
    false_independence: float


class MaskRatio(NamedTuple):
    """The correlations over states whose masked share lies in [low, high), the last bin with its end."""

    low: float
    high: float
    pairs: int
    pearson: float
    spearman: float


class JudgedStates(NamedTuple):
    """Which of the states given a report is about, by what the estimator's record says (`SeenStates`).

    Attributes:
        judged: states that were judged.
        left_out: others that were not, because the estimator was trained on them.
        trained_on: of those judged, the states it was trained on.
        held_out: of those judged, the states that were held out in its training and chose the epoch that was kept, which
            favours it a little.
        complete: whether the record is of all its training; if not, it may have been trained on any other state.
    """

    judged: int
    left_out: int
    trained_on: int
    held_out: int
    complete: bool


class PairReport(NamedTuple):
    """Predicted against labelled mutual information over all masked pairs; NaN where something does not exist.

    Attributes:
        pairs: how many.
        pearson: correlation of the values.
        spearman: correlation of their ranks (of 200,000 pairs drawn at random, where there are more).
        mean_absolute_error: nats.
        calibration: mean absolute error of pairs whose label lies below .1, in [.1, .5), in [.5, 1) and above, nats.
        tau: nats below which a pair counts as independent in the three rows that follow.
        precision: as in `Independence`, like the next two.
        recall: see there.
        false_independence: above 5%, raise tau or retrain.
        safe_tau: the least of `by_tau` from which on at most 5% of the pairs predicted independent are dependent.
        by_tau: the same for all thresholds.
        by_mask_ratio: correlations by the masked share of the state.
        partner_rank: Spearman's correlation between a position's partners, averaged over positions: how well they are
            ordered, which is what decoding uses.
        top_partner: of the positions that depend on another one by tau or more, the share whose strongest partner is
            predicted to be the strongest.
        states: which states the pairs are of.
        interval: the 95% interval of `pearson`, by resampling states.
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
    safe_tau: float
    by_tau: tuple[Independence, ...]
    by_mask_ratio: tuple[MaskRatio, ...]
    partner_rank: float
    top_partner: float
    states: JudgedStates
    interval: tuple[float, float]


class JudgedPairs(NamedTuple):
    """The labels that predictions are compared with.

    Attributes:
        mi: [Q] float64, nats.
        ratio: [Q], the masked share of the pair's state.
        state: [Q] int64, the number of the state, from 0.
    """

    mi: Tensor
    ratio: Tensor
    state: Tensor

    def sample(self) -> Tensor:
        """[n] int64, up to 200,000 of the pairs, drawn at random."""
        return torch.randperm(len(self.mi), generator=torch.Generator().manual_seed(0), device="cpu")[:_SAMPLE]

    def resampled(self, p: Tensor) -> Tensor:
        """[1 + R] float64: Pearson's r of predictions p [Q], then that of R resamples of the states, the same for all p."""
        states = int(self.state.max()) + 1
        x, y = p - p.mean(), self.mi - self.mi.mean()
        moments = torch.stack([torch.ones_like(x), x, y, x * x, y * y, x * y], 1)
        sums = moments.new_zeros(states, 6).index_add_(0, self.state, moments)
        drawn = torch.randint(states, (_DRAWS, states), generator=torch.Generator().manual_seed(0), device="cpu")
        weights = torch.ones(1 + _DRAWS, states, dtype=torch.float64, device="cpu")
        weights[1:] = weights.new_zeros(_DRAWS, states).scatter_add_(1, drawn, weights[1:].clone())
        n, sx, sy, xx, yy, xy = (weights @ sums).unbind(1)
        found = (n * xy - sx * sy) / ((n * xx - sx * sx) * (n * yy - sy * sy)).sqrt()
        # Of predictions that are all alike rounding leaves any quotient, infinity included.
        return found.masked_fill(~found.isfinite(), math.nan) if states > 1 else torch.full_like(found, math.nan)


def report_of(judged: JudgedPairs, p: Tensor, partners: Tensor, tau: float, states: JudgedStates) -> PairReport:
    """The report on predictions p [Q] float64 whose `partners_found` sum to `partners` [4]."""
    a, ratio, some = judged.mi, judged.ratio, judged.sample()
    rank_sum, ranked, hits, dependent = partners.tolist()
    error = (p - a).abs()
    calibration = tuple(
        float(error[(a >= low) & (a < high)].mean()) for low, high in zip(BINS, (*BINS[1:], torch.inf), strict=True)
    )
    here = _independence(p, a, tau)
    by_tau = tuple(_independence(p, a, at) for at in TAUS)
    by_ratio = []
    for low, high in pairwise(RATIOS):
        inside = (ratio >= low) & ((ratio < high) | (high == RATIOS[-1]))
        sampled = some[inside[some]]
        spearman = correlation(ranks(p[sampled]), ranks(a[sampled]))
        by_ratio.append(MaskRatio(low, high, int(inside.sum()), correlation(p[inside], a[inside]), spearman))
    interval = Interval.resampled(judged.resampled(p))
    return PairReport(
        pairs=len(p),
        pearson=correlation(p, a),
        spearman=correlation(ranks(p[some]), ranks(a[some])),
        mean_absolute_error=float(error.mean()),
        calibration=calibration,
        tau=tau,
        precision=here.precision,
        recall=here.recall,
        false_independence=here.false_independence,
        safe_tau=_safe_tau(by_tau),
        by_tau=by_tau,
        by_mask_ratio=tuple(by_ratio),
        partner_rank=share(rank_sum, ranked),
        top_partner=share(hits, dependent),
        states=states,
        interval=(interval.low, interval.high),
    )


def _independence(p: Tensor, a: Tensor, tau: float) -> Independence:
    called, independent = p < tau, a < tau
    right = float((called & independent).sum())
    precision = share(right, float(called.sum()))
    return Independence(tau, precision, share(right, float(independent.sum())), 1.0 - precision)


def _safe_tau(by_tau: tuple[Independence, ...]) -> float:
    safe = list(takewhile(lambda at: at.false_independence <= MOST_FALSE, reversed(by_tau)))
    return safe[-1].tau if safe else math.nan


def partners_found(predicted: Tensor, batch: Batch, tau: float) -> Tensor:
    """[4] float64: the sum of the positions' rank correlations, how many have one; strongest partners found, and asked for."""
    pairs, mi = batch.pairs, batch.mi
    x, y = (row_ranks(z, pairs) for z in (predicted, mi))
    count = pairs.sum(-1, keepdim=True).clamp(min=1)
    x, y = ((z - z.sum(-1, keepdim=True) / count).masked_fill(~pairs, 0.0) for z in (x, y))
    scale = x.norm(dim=-1) * y.norm(dim=-1)
    ranked = scale > 0
    correlations = (x * y).sum(-1)[ranked] / scale[ranked]
    strongest = mi.masked_fill(~pairs, -torch.inf).max(-1)
    asked = (strongest.values >= tau) & (pairs.sum(-1) > 1)
    found = predicted.masked_fill(~pairs, -torch.inf).argmax(-1) == strongest.indices
    sums = (correlations.sum(), ranked.sum(), (found & asked).sum(), asked.sum())
    return torch.stack([value.double() for value in sums]).cpu()
