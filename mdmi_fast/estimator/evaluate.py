"""How good an estimator is on labelled states it was not trained on, and whether it may decode (arXiv 2605.20187)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.estimator.data import Batch, Example, Labels, device_of, examples, read_batch
from mdmi_fast.estimator.ranks import correlation, fitted, ranks, row_ranks, share
from mdmi_fast.estimator.scorer import PairScorer
from mdmi_fast.estimator.seen import SeenStates, fingerprints, padding_of
from mdmi_fast.models import MaskedModel

BINS = (-torch.inf, 0.1, 0.5, 1.0)
"""Lower edges of the calibration bins of the label, nats; labels of the "entropy" form may be negative."""
TAUS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Thresholds of independence, nats, at which a report says how often it errs."""
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Edges of the bins of the masked share of a state."""
MOST_FALSE = 0.05
"""Of the pairs predicted independent, the share that may be dependent."""
GOOD, POOR = 0.85, 0.75
"""Correlation to be reached, and that under which training starts again (arXiv 2605.20187)."""
_SAMPLE = 200_000


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


class Evaluation(NamedTuple):
    """An estimator and its baselines on several sets of labels.

    Attributes:
        reports: split -> "estimator" or a baseline -> report.
        verdict: whether the estimator may decode, by its report on the first split.
        samples: split -> [n, 2] float64, predicted and labelled values of up to 200,000 pairs.
    """

    reports: dict[str, dict[str, PairReport]]
    verdict: str
    samples: dict[str, Tensor]


Source = Callable[[Batch], Tensor]
"""Gives [B, N, N] for a batch: mutual information, or anything that grows with it."""


def _distance(batch: Batch) -> Tensor:
    place = torch.arange(batch.mask.shape[1], device=batch.mask.device)
    return -(place - place.unsqueeze(1)).abs().float().expand(batch.mi.shape)


def _stats(batch: Batch) -> ops.TokenStats:
    assert batch.stats is not None  # `read_batch` leaves them out only where that is asked for
    return batch.stats


def _pairwise(values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return combine(values.unsqueeze(-1), values.unsqueeze(-2))


BASELINES: dict[str, Source] = {
    "constant": lambda batch: torch.zeros_like(batch.mi),
    "min(H_i, H_j)": lambda batch: _pairwise(_stats(batch).entropy, torch.minimum),
    "distance": _distance,
    "confidences": lambda batch: -_pairwise(_stats(batch).confidence, torch.mul),
}
"""What an estimator has to beat; each is put on the scale of nats by the best line a + b x, b >= 0, through the labels
themselves, which favours it."""


def evaluate_estimator(
    estimator: Callable[..., Tensor],
    model: MaskedModel,
    labels: Labels,
    *,
    tau: float = 0.01,
    batch_size: int = 64,
    all_states: bool = False,
) -> PairReport:
    """Compare an estimator's predictions with labels, pair by pair (i < j, both masked).

    States that the estimator was trained on, as far as it has `seen` them on record, are left out.

    Args:
        estimator: a `PairScorer`, or any function of hidden [B, N, D] and mask [B, N] that gives mutual information
            [B, N, N] in nats.
        model: whose hidden states the labels belong to.
        labels: states to judge it on.
        tau: nats below which a pair counts as independent.
        batch_size: states at once.
        all_states: judge it on those it was trained on too.

    Returns:
        PairReport; its field `states` says what was left out.

    Raises:
        ValueError: if the estimator was trained on all the states, or those left hold fewer than two masked pairs, or one
            that is not finite (the "kl" form may be inf).

    Numerics:
        Sums in float64.
    """
    sources = {"estimator": _as_source(estimator)}
    return _collect(sources, estimator, model, labels, tau, batch_size, all_states)[0]["estimator"]


def evaluate_splits(
    estimator: PairScorer,
    model: MaskedModel,
    splits: Mapping[str, Labels],
    *,
    tau: float = 0.01,
    batch_size: int = 64,
    all_states: bool = False,
) -> Evaluation:
    """Judge an estimator beside the baselines on several sets of labels.

    Args:
        estimator: to be judged.
        model: whose hidden states the labels belong to.
        splits: name -> states to judge it on; the first ones are like those it will meet.
        tau: as for `evaluate_estimator`, like the rest.
        batch_size: states at once.
        all_states: judge it on those it was trained on too.

    Raises:
        ValueError: as `evaluate_estimator`, or if there are no splits.
    """
    if not splits:
        raise ValueError("evaluate_splits: splits must hold at least one set of labels, got none")
    sources = {"estimator": _as_source(estimator), **BASELINES}
    reports, samples = {}, {}
    for name, labels in splits.items():
        reports[name], samples[name] = _collect(sources, estimator, model, labels, tau, batch_size, all_states)
    return Evaluation(reports, verdict(next(iter(reports.values()))["estimator"]), samples)


def judged_states(
    estimator: object, model: MaskedModel, labels: Labels, *, all_states: bool = False
) -> tuple[Sequence[Example], JudgedStates]:
    """The states of labels that an estimator is judged on, and what is known of them.

    Args:
        estimator: one with a record in its attribute `seen`; any other may have been trained on any state.
        model: whose padding does not count.
        labels: the states.
        all_states: leave none out.
    """
    states = examples(labels)
    seen: SeenStates = check.attribute(estimator, "seen") or SeenStates.none(complete=False)
    marks = fingerprints(states, padding_of(model))
    trained, held_out = torch.isin(marks, seen.trained), torch.isin(marks, seen.held_out)
    kept = torch.full_like(trained, True) if all_states else ~trained
    told = JudgedStates(
        judged=int(kept.sum()),
        left_out=int((~kept).sum()),
        trained_on=int((trained & kept).sum()),
        held_out=int(held_out.sum()),
        complete=seen.complete,
    )
    return [states[number] for number in kept.nonzero().flatten().tolist()], told


def verdict(report: PairReport) -> str:
    """One line that begins with "usable" or "retrain", by the limits GOOD, POOR and MOST_FALSE."""
    said = _verdict(report)
    trained_on = report.states.trained_on
    return f"{said}; trained on {trained_on} of the {report.states.judged} states judged" if trained_on else said


def _verdict(report: PairReport) -> str:
    r = f"Pearson r = {report.pearson:.3f}"
    if not report.pearson >= POOR:
        return f"retrain: {r}, below {POOR}"
    goal = "" if report.pearson >= GOOD else f", below the goal of {GOOD}"
    if report.false_independence <= MOST_FALSE:
        return f"usable: {r}{goal}; {report.false_independence:.1%} false independence at {report.tau:g} nats"
    if math.isnan(report.safe_tau):
        return f"retrain: {r}{goal}, but more than {MOST_FALSE:.0%} false independence at every threshold"
    here = f"{report.false_independence:.1%} false independence"
    if math.isnan(report.false_independence):
        here = "no pair is predicted independent"
    return (
        f"usable: {r}{goal}; as a budget, and as a threshold from {report.safe_tau:g} nats ({here} at {report.tau:g})"
    )


def _as_source(estimator: Callable[..., Tensor]) -> Source:
    if isinstance(estimator, PairScorer):
        return lambda batch: estimator(batch.hidden, batch.mask, batch.stats)
    return lambda batch: estimator(batch.hidden, batch.mask)


@torch.no_grad()
def _collect(
    sources: Mapping[str, Source],
    estimator: object,
    model: MaskedModel,
    labels: Labels,
    tau: float,
    batch_size: int,
    all_states: bool,
) -> tuple[dict[str, PairReport], Tensor]:
    """A report for every source in one run of the model, and a sample of what the first source predicts."""
    device = device_of(estimator)
    states, told = judged_states(estimator, model, labels, all_states=all_states)
    if told.left_out and not states:
        raise ValueError(
            f"evaluate_estimator: labels must hold states that the estimator was not trained on, got {told.left_out} that "
            "it was trained on; all_states=True judges it on them"
        )
    values: dict[str, list[Tensor]] = {name: [torch.zeros(0, dtype=torch.float32, device="cpu")] for name in sources}
    partners: dict[str, list[Tensor]] = {name: [] for name in sources}
    actual, ratios = ([torch.zeros(0, dtype=torch.float32, device="cpu")] for _ in range(2))
    for first in range(0, len(states), batch_size):
        batch = read_batch(states[first : first + batch_size], model, device)
        upper = batch.pairs.triu()
        actual.append(batch.mi[upper].cpu())
        ratios.append(batch.masked_share[:, None, None].expand_as(batch.mi)[upper].cpu())
        for name, source in sources.items():
            predicted = source(batch)
            values[name].append(predicted[upper].cpu())
            partners[name].append(_partners(predicted, batch, tau))
    a, ratio = torch.cat(actual).double(), torch.cat(ratios)
    if len(a) < 2:
        raise ValueError(f"evaluate_estimator: labels must hold at least two masked pairs, got {len(a)}")
    if not bool(a.isfinite().all()):
        raise ValueError(f"evaluate_estimator: labels must be finite, got {int((~a.isfinite()).sum())} that are not")
    some = torch.randperm(len(a), generator=torch.Generator().manual_seed(0), device="cpu")[:_SAMPLE]
    reports = {}
    for name in sources:
        p = torch.cat(values[name]).double()
        if name in BASELINES:
            p = fitted(p, a)
        rank_sum, ranked, hits, dependent = torch.stack(partners[name]).sum(0).tolist()
        reports[name] = _report(p, a, ratio, some, tau, share(rank_sum, ranked), share(hits, dependent), told)
    judged = torch.cat(values[next(iter(sources))]).double()
    return reports, torch.stack([judged[some], a[some]], 1)


def _report(
    p: Tensor,
    a: Tensor,
    ratio: Tensor,
    some: Tensor,
    tau: float,
    partner_rank: float,
    top_partner: float,
    states: JudgedStates,
) -> PairReport:
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
        partner_rank=partner_rank,
        top_partner=top_partner,
        states=states,
    )


def _independence(p: Tensor, a: Tensor, tau: float) -> Independence:
    called, independent = p < tau, a < tau
    right = float((called & independent).sum())
    precision = share(right, float(called.sum()))
    return Independence(tau, precision, share(right, float(independent.sum())), 1.0 - precision)


def _safe_tau(by_tau: tuple[Independence, ...]) -> float:
    safe = list(takewhile(lambda at: at.false_independence <= MOST_FALSE, reversed(by_tau)))
    return safe[-1].tau if safe else math.nan


def _partners(predicted: Tensor, batch: Batch, tau: float) -> Tensor:
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
