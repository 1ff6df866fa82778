"""Figures with their 95% intervals."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, deviation: float) -> Interval:
        """Of a figure whose error is normal with this standard deviation."""
        return cls(value, value - 1.96 * deviation, value + 1.96 * deviation)

    @classmethod
    def resampled(cls, values: Tensor) -> Interval:
        """Of [1 + R] values, the figure itself and those of R resamples: the middle 95% of these."""
        low, high = np.quantile(values[1:].double().cpu().numpy(), [0.025, 0.975])
        return cls(float(values[0]), float(low), float(high))


def mean_interval(values: Floats) -> Interval:
    """A mean of at least two independent values."""
    return Interval.of(float(values.mean()), float(values.std(ddof=1)) / len(values) ** 0.5)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95% interval of a share (Wilson, 1927).

    Raises:
        ValueError: without a trial.
    """
    if trials < 1:
        raise ValueError(f"wilson: trials must be at least 1, got {trials}")
    z = 1.959964
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # 0 and 1 belong to their intervals, rounding notwithstanding.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def paired_bootstrap(ours: Any, theirs: Any, *, draws: int = 2000, seed: int = 0) -> Interval:
    """Mean of ours - theirs [S] over the same cases, and its interval by resampling cases."""
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(difference), (draws, len(difference)))
    low, high = np.quantile(difference[picks].mean(axis=1), [0.025, 0.975])
    return Interval(float(difference.mean()), float(low), float(high))
