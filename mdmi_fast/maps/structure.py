"""A map against what was expected of it: a structure that is known, or another map."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast.labels import masked_pairs
from mdmi_fast.maps.mi import MIMap, Pair, check_tau, strength


class StructureReport(NamedTuple):
    """A map against a structure that was expected, every field [N, N] bool and symmetric, masked pairs only.

    Attributes:
        found: expected, and dependent.
        unexpected: dependent without being expected.
        missing: expected, and independent although both positions are open enough to show it.
        settled: expected, but the entropy of one end is below tau: mutual information never exceeds it.
    """

    found: Tensor
    unexpected: Tensor
    missing: Tensor
    settled: Tensor


def compare_structure(mi: MIMap, expected: Tensor, *, tau: float) -> StructureReport:
    """Point out unexpected and missing dependencies.

    Args:
        mi: the map.
        expected: [N, N] bool, True where a pair should depend on each other; either direction counts.
        tau: nats from which on a pair counts as dependent.

    Raises:
        ValueError: for another shape or dtype, or a tau that is not a number of at least 0.
    """
    check_tau("compare_structure", tau)
    _check_expected("compare_structure", mi, expected)
    pairs = masked_pairs(mi.mask)
    dependent = (strength(mi.mi) >= tau) & pairs
    wanted = (expected | expected.T) & pairs
    open_enough = mi.entropy >= tau
    silent = wanted & ~dependent
    missing = silent & open_enough.unsqueeze(0) & open_enough.unsqueeze(1)
    return StructureReport(wanted & dependent, dependent & ~wanted, missing, silent & ~missing)


class Surprises(NamedTuple):
    """Pairs that do not look like the others of their kind, every field [N, N] bool and symmetric.

    Attributes:
        unexpected: not in the structure, and stronger than such pairs are.
        missing: in the structure, and weaker than such pairs are.
    """

    unexpected: Tensor
    missing: Tensor


_FLOOR = 1e-6
"""Nats below which mutual information is noise of the arithmetic, and taken for as much."""


def find_surprises(mi: MIMap, expected: Tensor, *, rate: float = 0.05) -> Surprises:
    """Unexpected and missing dependencies, with a bound on the share of false ones among them.

    In each kind of pairs, those in the structure and the others, log I is taken to be symmetric around its median,
    whatever its tails, but for the surprises, which are few. So as many pairs lie t beyond the median on the wrong side by chance as on the
    right one, and the smallest t is taken at which (1 + pairs beyond t on the wrong side) / (pairs beyond t on the right
    side) is at most `rate`: on average a share of at most `rate` is false (the bound of Barber and Candes, Annals of
    Statistics 43, 2015). Fewer than 1 / rate pairs that stand out cannot be distinguished from chance: none is named.

    Args:
        mi: the map.
        expected: [N, N] bool, the structure; either direction counts.
        rate: the false discovery rate, between 0 and 1.

    Raises:
        ValueError: for another shape or dtype, or a rate out of range.
    """
    _check_expected("find_surprises", mi, expected)
    if not 0 < rate < 1:
        raise ValueError(f"find_surprises: rate must be between 0 and 1, got {rate}")
    open_enough = mi.entropy > _FLOOR  # the others have no mutual information to show
    pairs = masked_pairs(mi.mask & open_enough).triu(1)
    known = (expected | expected.T) & pairs
    logs = strength(mi.mi).double().clamp(min=_FLOOR).log()

    def keep(kind: Tensor, sign: float) -> Tensor:
        if not bool(kind.any()):
            return torch.zeros_like(kind)
        center = logs[kind].median()
        distances = sign * (logs[kind] - center)
        seen = float(center) - math.log(_FLOOR) if sign > 0 else math.inf  # how far the wrong side can be seen
        kept = kind & (sign * (logs - center) >= _surprising(distances, seen, rate))
        return kept | kept.T

    return Surprises(keep(pairs & ~known, 1.0), keep(known, -1.0))


def _surprising(distances: Tensor, seen: float, rate: float) -> float:
    """The distance from the median, at most `seen`, from which on values are kept; inf if none is."""
    right, wrong = distances[distances > 0].sort().values, (-distances).sort().values
    by_chance = len(wrong) - torch.searchsorted(wrong, right)
    fits = ((1 + by_chance) <= rate * torch.arange(len(right), 0, -1, device=right.device)) & (right <= seen)
    return float(right[fits][0]) if bool(fits.any()) else math.inf


def roc_area(mi: MIMap, expected: Tensor) -> float:
    """The chance that a pair of the structure has more mutual information than another one, ties counting half.

    The area under the ROC curve of "in the structure" by mutual information: 1 finds it perfectly, 1/2 not at all.

    Args:
        mi: the map.
        expected: [N, N] bool, the structure; either direction counts.

    Returns:
        From 0 to 1; NaN if all masked pairs are of one kind.

    Raises:
        ValueError: for another shape or dtype.
    """
    _check_expected("roc_area", mi, expected)
    pairs = masked_pairs(mi.mask).triu(1)
    scores, known = strength(mi.mi)[pairs], (expected | expected.T)[pairs]
    inside, outside = scores[known].sort().values, scores[~known].sort().values
    if not len(inside) or not len(outside):
        return math.nan
    below = torch.searchsorted(outside, inside, right=False) + torch.searchsorted(outside, inside, right=True)
    return float(below.double().mean()) / 2 / len(outside)


class MapComparison(NamedTuple):
    """Two maps of the same positions: predicted against probed, or one model against another.

    Attributes:
        correlation: Pearson's r over the pairs masked in both; NaN where one side does not vary.
        mean_error: nats, the mean of |first - second|.
        pairs: those that differ most, the largest difference first; `mi` is first - second.
    """

    correlation: float
    mean_error: float
    pairs: list[Pair]


def compare_maps(first: MIMap, second: MIMap, *, limit: int = 20) -> MapComparison:
    """How far two maps agree.

    Args:
        first: a map.
        second: another of as many positions.
        limit: pairs to name.

    Raises:
        ValueError: for maps of different lengths, or without a pair that both have.
    """
    if first.mi.shape != second.mi.shape:
        raise ValueError(
            f"compare_maps: both maps must have as many positions, got {len(first.mi)} and {len(second.mi)}"
        )
    where = masked_pairs(first.mask & second.mask).triu(1).nonzero()
    if not len(where):
        raise ValueError("compare_maps: no pair is masked in both maps")
    a, b = (strength(side.mi).double()[where[:, 0], where[:, 1]] for side in (first, second))
    difference = a - b
    x, y = a - a.mean(), b - b.mean()
    scale = float((x.square().sum() * y.square().sum()).sqrt())
    order = difference.abs().argsort(descending=True, stable=True)[:limit].tolist()
    pairs = [Pair(int(where[at, 0]), int(where[at, 1]), float(difference[at])) for at in order]
    return MapComparison(float((x * y).sum()) / scale if scale else math.nan, float(difference.abs().mean()), pairs)


def _check_expected(owner: str, mi: MIMap, expected: Tensor) -> None:
    if expected.shape != mi.mi.shape or expected.dtype != torch.bool:
        raise ValueError(
            f"{owner}: expected must be {tuple(mi.mi.shape)} bool like mi, got {tuple(expected.shape)} {expected.dtype}"
        )
