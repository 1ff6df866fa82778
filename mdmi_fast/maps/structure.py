"""A map against what was expected of it: a structure that is known, or another map (row S19 of the source)."""

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
    """Point out unexpected and missing dependencies (row S19 of the source).

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
    """Pairs that do not look like the others of their kind, every field [N, N] and symmetric.

    Attributes:
        unexpected: bool, not in the structure, and stronger than such pairs are.
        missing: bool, in the structure, and weaker than such pairs are.
        p_value: float64, of the test that the pair took part in; 1 elsewhere.
    """

    unexpected: Tensor
    missing: Tensor
    p_value: Tensor


_FLOOR = 1e-6
"""Nats below which mutual information is noise of the arithmetic."""


def find_surprises(mi: MIMap, expected: Tensor, *, rate: float = 0.05) -> Surprises:
    """Unexpected and missing dependencies, with a bound on the share of false ones among them.

    In each kind of pairs, those in the structure and the others, log I is taken to be normal but for the surprises;
    its center and width are the median and 1.4826 times the median absolute deviation, which surprises move little, of
    the pairs above 1e-6 nats: below, rounding decides.
    Of the upper tail of the others, and the lower tail of those in the structure, the Benjamini-Hochberg procedure
    keeps so many that on average a share of at most `rate` is false. That holds as far as log I is normal: a rate of
    0.05 was 0.06 in simulations of that kind, and 0.37 and 0.62 where log I had the tails of Student's t with 10 and 5
    degrees of freedom (tests/test_maps.py). Maps of the Sudoku model have such tails: there it is an order of pairs
    worth a look, not a bound.

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
    pairs = masked_pairs(mi.mask).triu(1)
    known = (expected | expected.T) & pairs
    logs = strength(mi.mi).double().clamp(min=_FLOOR).log()
    p_value = torch.ones_like(logs)

    def keep(kind: Tensor, sign: float) -> Tensor:
        values = logs[kind]
        usual = values[values > math.log(_FLOOR)]
        if not len(usual):
            return torch.zeros_like(kind)
        center = usual.median()
        width = (1.4826 * (usual - center).abs().median()).clamp(min=1e-9)
        p_value[kind] = 0.5 * torch.erfc(sign * (values - center) / width / math.sqrt(2))
        kept = kind & (p_value <= _benjamini_hochberg(p_value[kind], rate))
        return kept | kept.T

    unexpected, missing = keep(pairs & ~known, 1.0), keep(known, -1.0)
    return Surprises(unexpected, missing, torch.minimum(p_value, p_value.T))


def _benjamini_hochberg(p: Tensor, rate: float) -> float:
    """The largest p-value that is kept; -1 if none is."""
    ordered = p.sort().values
    fits = ordered <= rate * torch.arange(1, len(p) + 1, dtype=p.dtype) / len(p)
    return float(ordered[fits][-1]) if bool(fits.any()) else -1.0


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
