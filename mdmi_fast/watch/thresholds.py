"""When a guard warns and when it intervenes: its thresholds, and what each signal leads to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mdmi_fast import checks as check


@dataclass(frozen=True)
class Thresholds:
    """When the guard warns and when it intervenes.

    Raises:
        TypeError: for what is no number.
        ValueError: for a number out of its range; it is named.

    Attributes:
        correlation_alert: r of predicted and probed mutual information, below which the limit is tightened; below 1.
        correlation_off: below which decoding falls back to sequential; below 1.
        quality_alert: drop of quality relative to the control, beyond which the limit is tightened; a share.
        quality_off: beyond which decoding falls back; a share.
        latency_alert: rise of seconds a sequence relative to the control, beyond which an alarm is counted.
        false_independence_alert: share of the pairs predicted below `tau` that are probed above it, beyond which
            the limit is tightened; above 0.
        movement_off: slope of how marginals move on predicted mutual information (`mdmi_fast.watch.audit`), below
            which decoding falls back; from 0 and below 1.
        stages: shares of the sequences that the watched policy gets, one after the other.
        tau: nats, for false independence.
        interval: observations on average, at least, between two false alarms of a signal; above 1.
        step_interval: the same for moving on to the next stage although quality has dropped by `quality_off`.
        audited_positions: audits that make one observation of r, and reveals that make one of the slope.
        cooldown: finished sequences before a fallback or a tightened limit is tried less strictly; doubled with
            every fallback that follows, 32-fold at most.
    """

    correlation_alert: float = 0.80
    correlation_off: float = 0.75
    quality_alert: float = 0.01
    quality_off: float = 0.02
    latency_alert: float = 0.10
    false_independence_alert: float = 0.05
    movement_off: float = 0.5
    stages: tuple[float, ...] = (0.05, 0.5, 0.98)
    tau: float = 0.05
    interval: float = 10_000.0
    step_interval: float = 1_000.0
    audited_positions: int = 20
    cooldown: int = 10_000

    def __post_init__(self) -> None:
        ranges: list[tuple[str, Callable[[float], bool], str]] = [
            ("correlation_alert", lambda x: -1 <= x < 1, "from -1 and below 1"),
            ("correlation_off", lambda x: -1 <= x < 1, "from -1 and below 1"),
            ("quality_alert", lambda x: 0 <= x <= 1, "from 0 to 1"),
            ("quality_off", lambda x: 0 <= x <= 1, "from 0 to 1"),
            ("latency_alert", lambda x: 0 <= x < math.inf, "finite and at least 0"),
            ("false_independence_alert", lambda x: 0 < x <= 1, "above 0 and at most 1"),
            ("movement_off", lambda x: 0 <= x < 1, "from 0 and below 1"),
            ("tau", lambda x: 0 <= x < math.inf, "finite and at least 0"),
            ("interval", lambda x: 1 < x < math.inf, "finite and above 1"),
            ("step_interval", lambda x: 1 < x < math.inf, "finite and above 1"),
        ]
        for name, holds, expected in ranges:
            value = check.number("Thresholds", name, getattr(self, name))
            if not holds(value):
                raise ValueError(f"Thresholds: {name} must be {expected}, got {value}")
        if not isinstance(self.stages, tuple | list):
            raise TypeError(f"Thresholds: stages must be a sequence of numbers, got {check.describe(self.stages)}")
        if not self.stages or not all(0 < check.number("Thresholds", "stages", share) < 1 for share in self.stages):
            raise ValueError(f"Thresholds: stages must be shares between 0 and 1, got {self.stages}")
        check.whole("Thresholds", "audited_positions", self.audited_positions, 1)
        check.whole("Thresholds", "cooldown", self.cooldown, 0)


class Signal(NamedTuple):
    """Something a guard gathers evidence of.

    Attributes:
        name: as it is counted.
        leads_to: what the guard does on evidence: counts it, halves the policy's limit, falls back to sequential decoding, or
            gives the policy the share of the next stage.
        upper: the largest observation.
    """

    name: str
    leads_to: Literal["count", "tighten", "fall back", "next stage"]
    upper: Callable[[Thresholds], float] = lambda limits: 1.0


EVIDENCE = (
    Signal("quality_alert", "tighten"),
    Signal("quality_off", "fall back"),
    Signal("correlation_alert", "tighten", lambda limits: 1.0 - limits.correlation_alert),
    Signal("correlation_off", "fall back", lambda limits: 1.0 - limits.correlation_off),
    Signal("false_independence_alert", "tighten", lambda limits: limits.false_independence_alert),
    Signal("movement_off", "fall back", lambda limits: 1.0 - limits.movement_off),
    Signal("latency_alert", "count"),
    Signal("step", "next stage"),
)
"""Every signal with evidence."""

SIGNALS = (*(signal.name for signal in EVIDENCE if signal.leads_to != "next stage"), "error")
"""What a guard counts alarms of; an error of the policy is one at once."""
