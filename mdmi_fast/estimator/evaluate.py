"""How good an estimator is on labelled states it was not trained on, and whether it may decode (arXiv 2605.20187)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.estimator.baselines import TABLE, Source, fit_baselines, shuffled
from mdmi_fast.estimator.data import Example, Labels, device_of, examples, read_batch
from mdmi_fast.estimator.report import MOST_FALSE, JudgedPairs, JudgedStates, PairReport, partners_found, report_of
from mdmi_fast.estimator.scorer import PairScorer
from mdmi_fast.estimator.seen import SeenStates, fingerprints, padding_of
from mdmi_fast.estimator.table import DistanceTable
from mdmi_fast.models import MaskedModel
from mdmi_fast.statistics import Interval

GOOD, POOR = 0.85, 0.75
"""Correlation to be reached, and that under which training starts again (arXiv 2605.20187)."""
_FOLDS, _FITTED = 5, 500
"""Parts of the states judged, each of which is judged by baselines fitted to the others; states that are enough to fit them."""


class Evaluation(NamedTuple):
    """An estimator and its baselines on several sets of labels.

    Attributes:
        reports: split -> "estimator" or a baseline -> report.
        verdict: whether the estimator may decode, by its report on the first split.
        leads: baseline -> by how much the estimator's r on the first split is above that baseline's, with its interval.
        samples: split -> [n, 2] float64, predicted and labelled values of up to 200,000 pairs.
    """

    reports: dict[str, dict[str, PairReport]]
    verdict: str
    leads: dict[str, Interval]
    samples: dict[str, Tensor]


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
    states, told = _states_to_judge(estimator, model, labels, all_states=all_states)
    judge = _Judge(estimator, model, tau, batch_size)
    judge.read(states, {})
    return judge.reports(told)["estimator"]


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

    The baselines are fitted to those states of the first set that the estimator was trained on. Where that set holds none,
    or they are judged too, each fifth of its states is judged by baselines fitted to the rest, and the other sets by
    baselines fitted to all of it.

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
    device = device_of(estimator)

    def baselines(states: Sequence[Example]) -> dict[str, Source]:
        return fit_baselines(states[:_FITTED], model, device, batch_size=batch_size)

    reports: dict[str, dict[str, PairReport]] = {}
    samples, leads = {}, {}
    shared: dict[str, Source] | None = None
    for name, labels in splits.items():
        whole = examples(labels)
        states, told = _states_to_judge(estimator, model, whole, all_states=all_states)
        judge = _Judge(estimator, model, tau, batch_size)
        if shared is None:
            judged = {id(state) for state in states}
            fitted = [state for state in whole if id(state) not in judged and len(state.mi)]
            shared = baselines(fitted or states)
            for part, others in [(states, None)] if fitted or len(states) < 2 else _folds(states):
                own = shared if others is None else baselines(others)
                judge.read(part, {**own, "constant": shared["constant"]})  # which varies with nothing
            leads = judge.leads()
        else:
            judge.read(states, shared)
        reports[name], samples[name] = judge.reports(told), judge.sample()
    first = next(iter(reports.values()))
    beaten = None if isinstance(estimator, DistanceTable) else leads[TABLE]
    said = verdict(first["estimator"], first[TABLE], beaten)
    return Evaluation(reports, said, leads, samples)


def _folds(states: Sequence[Example]) -> list[tuple[Sequence[Example], Sequence[Example] | None]]:
    """(part, all others); where the others hold no pair, None."""
    count = min(_FOLDS, len(states))
    ends = [fold * len(states) // count for fold in range(count + 1)]
    found: list[tuple[Sequence[Example], Sequence[Example] | None]] = []
    for low, high in pairwise(ends):
        others = [*states[:low], *states[high:]]
        found.append((states[low:high], others if any(len(state.mi) for state in others) else None))
    return found


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


def verdict(report: PairReport, table: PairReport | None = None, lead: Interval | None = None) -> str:
    """One line that begins with "usable", "retrain" or "use the table".

    Args:
        report: of the estimator.
        table: of the `DistanceTable`, on the same states.
        lead: by how much the estimator's r is above the table's; None: it need not be.
    """
    said = _verdict(report)
    if table is not None and lead is not None and not lead.low > 0:
        against = (
            f"Pearson r = {report.pearson:.3f} is not above the {table.pearson:.3f} of the mean label at each distance beyond its "
            f"interval ({lead.low:+.3f} to {lead.high:+.3f})"
        )
        better = table.pearson >= POOR
        said = f"use the table, by mdmi-fast train --architecture table: {against}" if better else f"retrain: {against}"
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


def _states_to_judge(
    estimator: object, model: MaskedModel, labels: Labels, *, all_states: bool
) -> tuple[Sequence[Example], JudgedStates]:
    states, told = judged_states(estimator, model, labels, all_states=all_states)
    if told.left_out and not states:
        raise ValueError(
            f"evaluate_estimator: labels must hold states that the estimator was not trained on, got {told.left_out} that "
            "it was trained on; all_states=True judges it on them"
        )
    pairs = sum(len(state.mi) for state in states)
    if pairs < 2:
        raise ValueError(f"evaluate_estimator: labels must hold at least two masked pairs, got {pairs}")
    wrong = sum(int((~state.mi.isfinite()).sum()) for state in states)
    if wrong:
        raise ValueError(f"evaluate_estimator: labels must be finite, got {wrong} that are not")
    return states, told


class _Judge:
    """Predictions of an estimator and its baselines, collected part by part."""

    def __init__(self, estimator: Callable[..., Tensor], model: MaskedModel, tau: float, batch_size: int) -> None:
        self._source, self._device = _as_source(estimator), device_of(estimator)
        self._model, self._tau, self._batch_size = model, tau, batch_size
        self._values: dict[str, list[Tensor]] = {}
        self._partners: dict[str, list[Tensor]] = {}
        self._labels: list[tuple[Tensor, Tensor, Tensor]] = []
        self._states = 0

    @torch.no_grad()
    def read(self, states: Sequence[Example], baselines: Mapping[str, Source]) -> None:
        """Ask the estimator, and baselines where there are any, about some states, in one run of the model."""
        sources = {"estimator": self._source, **baselines}
        if baselines:
            sources["shuffled"] = shuffled(self._source)
        for first in range(0, len(states), self._batch_size):
            batch = read_batch(states[first : first + self._batch_size], self._model, self._device)
            upper = batch.pairs.triu()
            ratio = batch.masked_share[:, None, None].expand_as(batch.mi)[upper].cpu()
            self._labels.append((batch.mi[upper].cpu(), ratio, upper.nonzero()[:, 0].cpu() + self._states))
            self._states += len(batch.mask)
            for name, source in sources.items():
                predicted = source(batch)
                self._values.setdefault(name, []).append(predicted[upper].cpu())
                self._partners.setdefault(name, []).append(partners_found(predicted, batch, self._tau))

    def _judged(self) -> JudgedPairs:
        mi, ratio, state = (torch.cat(parts) for parts in zip(*self._labels, strict=True))
        return JudgedPairs(mi.double(), ratio, state)

    def _predicted(self, name: str) -> Tensor:
        return torch.cat(self._values[name]).double()

    def reports(self, told: JudgedStates) -> dict[str, PairReport]:
        """Of the estimator and of every baseline."""
        judged = self._judged()
        return {
            name: report_of(judged, self._predicted(name), torch.stack(parts).sum(0), self._tau, told)
            for name, parts in self._partners.items()
        }

    def leads(self) -> dict[str, Interval]:
        """Of the estimator's r over that of every baseline."""
        judged = self._judged()
        own = judged.resampled(self._predicted("estimator"))
        return {
            name: Interval.resampled(own - judged.resampled(self._predicted(name)))
            for name in self._values
            if name != "estimator"
        }

    def sample(self) -> Tensor:
        """[n, 2] float64: predicted and labelled values of some pairs."""
        judged = self._judged()
        some = judged.sample()
        return torch.stack([self._predicted("estimator")[some], judged.mi[some]], 1)
