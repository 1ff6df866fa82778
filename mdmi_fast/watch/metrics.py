"""Metrics for Prometheus, made when they are read: decoding itself only counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from mdmi_fast.cache import Counts
from mdmi_fast.errors import require
from mdmi_fast.watch.audit import CALIBRATION_EDGES
from mdmi_fast.watch.guard import Guard
from mdmi_fast.watch.state import read_state
from mdmi_fast.watch.thresholds import SIGNALS


class Counted(Protocol):
    """A cache, or what is known of one in another process."""

    @property
    def counts(self) -> Mapping[str, Counts]: ...


class Collector:
    """A custom collector of prometheus-client: register it, or let `serve` show it.

    Args:
        guards: by name: a guard of this process, or the state file of one of any process.
        caches: by name: what has counts of stores, such as a `Cache` of this process.

    Raises:
        UnsupportedError: prometheus-client is not installed.

    Example:
        >>> from prometheus_client import CollectorRegistry, generate_latest
        >>> from mdmi_fast import Sequential
        >>> registry = CollectorRegistry()
        >>> registry.register(Collector(guards={"main": Guard(Sequential())}))
        >>> print(generate_latest(registry).decode().splitlines()[2])
        mdmi_guard_up{guard="main"} 1.0
    """

    def __init__(
        self, *, guards: Mapping[str, Guard | Path] | None = None, caches: Mapping[str, Counted] | None = None
    ) -> None:
        self._core = require("prometheus_client.core", "metrics", "Collector")
        self._guards, self._caches = dict(guards or {}), dict(caches or {})

    def collect(self) -> Iterator[Any]:
        reports = {name: _report(guard) for name, guard in self._guards.items()}
        if self._guards:
            up = {(name,): float(report is not None) for name, report in reports.items()}
            yield self._gauge("mdmi_guard_up", "Whether the guard's state could be read.", ["guard"], up)
            yield from self._of_guards({name: report for name, report in reports.items() if report is not None})
        if self._caches:
            yield from self._of_caches()

    def _of_guards(self, reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
        def of_each(key: str) -> dict[tuple[str], Any]:
            return {(name,): report[key] for name, report in reports.items() if report[key] is not None}

        for name, text, key in [
            ("mdmi_guard_share_ratio", "Share of new sequences that the watched policy decodes.", "share"),
            ("mdmi_guard_limit_scale_ratio", "What the policy's limit is multiplied by.", "scale"),
            ("mdmi_guard_fallen_back", "1 while everything is decoded sequentially.", "fallen_back"),
            ("mdmi_guard_correlation", "Pearson's r of predicted and probed MI, last block.", "correlation"),
            (
                "mdmi_guard_false_independence_ratio",
                "Pairs predicted independent that are not, last block.",
                "false_independence",
            ),
            (
                "mdmi_guard_movement_slope",
                "Slope of how marginals move on predicted MI, last block; 1 is right.",
                "movement_slope",
            ),
            (
                "mdmi_guard_movement_ratio",
                "How marginals move as a multiple of what was predicted, last block.",
                "movement_ratio",
            ),
        ]:
            yield self._gauge(name, text, ["guard"], of_each(key))
        for name, text, key in [
            ("mdmi_guard_audits", "Positions probed to check the estimator.", "audits"),
            ("mdmi_guard_reveals", "Unmasked positions compared with the next pass.", "reveals"),
            ("mdmi_guard_errors", "Failures of the watched policy.", "errors"),
        ]:
            yield self._counter(name, text, ["guard"], of_each(key))
        # From 0 on: of a series that begins with its first alarm, Prometheus sees no increase.
        alarms = {(name, kind): report["alarms"].get(kind, 0) for name, report in reports.items() for kind in SIGNALS}
        yield self._counter("mdmi_guard_alarms", "Alarms by signal.", ["guard", "signal"], alarms)
        edges = [str(edge) for edge in CALIBRATION_EDGES] + ["+Inf"]
        errors = {
            (name, edge): error
            for name, report in reports.items()
            for edge, error in zip(edges, report["calibration"], strict=False)
        }
        text = "Mean |predicted - probed| of pairs with probed MI below the edge, last block."
        yield self._gauge("mdmi_guard_calibration_error_nats", text, ["guard", "below"], errors)
        sides = {(name, side): report[side] for name, report in reports.items() for side in ("policy", "control")}
        for name, text, key in [
            ("mdmi_guard_sequences", "Finished sequences.", "sequences"),
            ("mdmi_guard_passes", "Forward passes of finished sequences.", "passes"),
        ]:
            counts = {labels: side[key] for labels, side in sides.items()}
            yield self._counter(name, text, ["guard", "side"], counts)
        for name, text, key, count in [
            ("mdmi_guard_quality_ratio", "Quality of finished sequences, from 0 to 1.", "quality", "judged"),
            ("mdmi_guard_decoding_seconds", "Seconds that finished sequences took.", "seconds", "timed"),
        ]:
            summary = self._core.SummaryMetricFamily(name, text, labels=["guard", "side"])
            for labels, side in sides.items():
                summary.add_metric(labels, side[count], side[key])
            yield summary

    def _of_caches(self) -> Iterator[Any]:
        counts = {(name, store): held for name, cache in self._caches.items() for store, held in cache.counts.items()}
        requests = {
            (*labels, result): vars(held)[field]
            for labels, held in counts.items()
            for result, field in (("hit", "hits"), ("miss", "misses"), ("corrupt", "corrupt"))
        }
        text = "Look-ups by result; a corrupt entry counts as a miss as well."
        yield self._counter("mdmi_cache_requests", text, ["cache", "store", "result"], requests)
        for name, text, field in [
            ("mdmi_cache_read_bytes", "Bytes of entries found.", "read_bytes"),
            ("mdmi_cache_written_bytes", "Bytes of entries stored.", "written_bytes"),
            ("mdmi_cache_seconds", "Seconds spent in stores.", "seconds"),
        ]:
            values = {labels: vars(held)[field] for labels, held in counts.items()}
            yield self._counter(name, text, ["cache", "store"], values)

    def _gauge(self, name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Any:
        return _filled(self._core.GaugeMetricFamily(name, text, labels=labels), values)

    def _counter(self, name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Any:
        """A counter; the format adds "_total" to its name."""
        return _filled(self._core.CounterMetricFamily(name, text, labels=labels), values)


def serve(collector: Collector, *, host: str = "127.0.0.1", port: int = 9464) -> Any:
    """Answer Prometheus over HTTP from a thread of this process.

    Args:
        collector: what to show, beside what prometheus-client says of the process.
        host: to listen at.
        port: 0 takes a free one.

    Returns:
        The running http.server, whose `server_port` is the port and whose `shutdown()` ends it.

    Raises:
        UnsupportedError: prometheus-client is not installed.
        OSError: the port is taken.
    """
    client = require("prometheus_client", "metrics", "serve")
    registry = client.CollectorRegistry()
    registry.register(collector)
    for own in (client.ProcessCollector, client.PlatformCollector):
        own(registry=registry)
    server, _ = client.start_http_server(port, addr=host, registry=registry)
    return server


def _report(guard: Guard | Path) -> Mapping[str, Any] | None:
    """What a guard knows, or None if its file cannot be read: Prometheus is told so instead of getting no answer."""
    if isinstance(guard, Guard):
        return guard.report()
    try:
        state, share = read_state(guard)
    except (OSError, ValueError):
        return None
    return {**dataclasses.asdict(state), "share": share}


def _filled(family: Any, values: Mapping[Any, float]) -> Any:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
