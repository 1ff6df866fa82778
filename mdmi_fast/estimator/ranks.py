"""Ranks, correlations and shares of predictions and labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def row_ranks(x: Tensor, pairs: Tensor) -> Tensor:
    """Ranks along the last axis among the entries of `pairs`, ties at their mean; 0 elsewhere."""
    x = x.masked_fill(~pairs, torch.inf).contiguous()
    ordered = x.sort(-1).values
    ranks = torch.searchsorted(ordered, x) + torch.searchsorted(ordered, x, right=True)
    return (ranks.double() / 2).masked_fill(~pairs, 0.0)


def share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's r of two float64 vectors; NaN where one is constant or empty."""
    if len(x) == 0 or any(bool((z == z[0]).all()) for z in (x, y)):
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x.norm() * y.norm()))


def ranks(x: Tensor) -> Tensor:
    """Ranks with ties at their mean."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    ranks: Tensor = (counts.cumsum(0).double() - (counts - 1) / 2)[inverse]
    return ranks
