"""Watching a quantity one observation at a time, with a known rate of false alarms however long it is watched."""

from __future__ import annotations

import math
from collections.abc import Sequence

_STAKES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.9)
"""Shares of the most that may be bet: small ones find small shifts, large ones find large shifts soon."""


class Evidence:
    """Evidence that the mean of bounded observations has fallen below 0.

    M_s <- max(M_s, 1) (1 - s x / upper) for every stake s, and an alarm when the mean of the M_s reaches `interval`.

    While the mean of x is at least 0, every factor is 1 or less on average, whatever the distribution and however x
    depends on the past: on average at least `interval` observations pass before a false alarm (an e-detector: Shin,
    Ramdas and Rinaldo, arXiv 2203.03532). The max lets a shift be found soon after a long good time.

    Args:
        upper: no x exceeds it; above 0.
        interval: observations, on average at least, from one false alarm to the next.
        capital: the M_s of an earlier run.

    Example:
        >>> evidence = Evidence(upper=1.0, interval=1000)
        >>> any(evidence.add(x) for x in [0.1, -0.1] * 1000)
        False
        >>> next(n for n in range(1000) if evidence.add(-0.3))
        36
    """

    def __init__(self, *, upper: float, interval: float, capital: Sequence[float] | None = None) -> None:
        if not upper > 0:
            raise ValueError(f"Evidence: upper must be above 0, got {upper}")
        if not interval > 1:
            raise ValueError(f"Evidence: interval must be above 1, got {interval}")
        if capital is not None and len(capital) != len(_STAKES):
            raise ValueError(f"Evidence: capital must be {len(_STAKES)} numbers, got {len(capital)}")
        self.upper, self.interval = upper, interval
        self.capital = [1.0] * len(_STAKES) if capital is None else list(capital)

    def add(self, x: float) -> bool:
        """Take one observation; whether it completes the evidence. Then everything starts anew.

        Raises:
            ValueError: for NaN, or an x above `upper`.
        """
        if not x <= self.upper:
            raise ValueError(f"Evidence: x must be at most {self.upper}, got {x}")
        bet = x / self.upper
        self.capital = [max(held, 1.0) * (1.0 - stake * bet) for held, stake in zip(self.capital, _STAKES, strict=True)]
        alarm = math.fsum(self.capital) / len(_STAKES) >= self.interval
        if alarm:
            self.reset()
        return alarm

    def reset(self) -> None:
        self.capital = [1.0] * len(_STAKES)
