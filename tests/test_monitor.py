"""What Prometheus, Grafana and OpenTelemetry get to see, checked by their own tools."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from mdmi_fast import EntropyBound, MIBudget, Probing, TopK, UnsupportedError, decode
from mdmi_fast.cache import Cache, CachedMI, MemoryStore
from mdmi_fast.models.exact import JointTable
from mdmi_fast.watch import Collector, Traced
from mdmi_fast.watch.guard import Guard, Thresholds
from mdmi_fast.watch.thresholds import SIGNALS
from tests._monitoring import (
    MONITOR,
    alert_names,
    asked_by_alerts,
    asked_by_panels,
    fires,
    metrics_in,
    promtool,
    values,
)


def used(folder: Path) -> tuple[Guard, Cache]:
    """A guard and a cache that something happened to."""
    model = JointTable(torch.rand(3, 3, 3, 3, generator=torch.Generator().manual_seed(0)) ** 8)
    cache = Cache(MemoryStore())
    policy = MIBudget(CachedMI(Probing(), model, cache), gamma=0.3, entropy_weight=0.0)
    limits = Thresholds(stages=(0.5,), audited_positions=2, interval=20, tau=1.0)
    guard = Guard(policy, thresholds=limits, audit_share=0.5, state=folder / "main.json", watched="test")
    for turn in range(3):
        seeds = torch.arange(32) + 32 * turn
        result = decode(model, torch.full((32, 4), 3), guard, seeds=seeds)
        quality = [0.1 if guard._arm(seed) else 1.0 for seed in seeds.tolist()]
        guard.finish(seeds, quality=quality, seconds=[0.5] * 32, passes=result.passes)
    guard.state.movement_slope, guard.state.movement_ratio = 0.9, 1.1  # as a source that does not probe has
    guard.save()
    return guard, cache


def scraped(collector: Collector) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(collector)
    return values(generate_latest(registry).decode())


def test_the_numbers_are_those_of_the_guard_and_the_cache(tmp_path: Path) -> None:
    guard, cache = used(tmp_path)
    seen = scraped(Collector(guards={"main": guard}, caches={"mi": cache}))
    for side in ("policy", "control"):
        totals = getattr(guard.state, side)
        assert seen["mdmi_guard_quality_ratio_count", "main", side] == totals.sequences > 0
        assert seen["mdmi_guard_quality_ratio_sum", "main", side] == pytest.approx(totals.quality)
        assert seen["mdmi_guard_decoding_seconds_sum", "main", side] == pytest.approx(0.5 * totals.sequences)
        assert seen["mdmi_guard_passes_total", "main", side] == totals.passes
    assert seen["mdmi_guard_correlation", "main"] == pytest.approx(1.0, abs=1e-3)
    assert seen["mdmi_guard_share_ratio", "main"] == guard.share
    assert seen["mdmi_guard_alarms_total", "main", "quality_off"] == guard.state.alarms["quality_off"] > 0
    assert seen["mdmi_cache_requests_total", "mi", "hit", "memory"] == cache.counts["memory"].hits > 0
    assert seen["mdmi_cache_read_bytes_total", "mi", "memory"] == cache.counts["memory"].read_bytes > 0


def test_a_state_that_cannot_be_read_is_a_number_too(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.json").write_text('{"share": 0.5, "policy": {}, "control": {}}')
    (tmp_path / "edited.json").write_text('{"share": "x", "watched": "", "policy": {}, "control": {}}')
    names = ("broken", "none", "empty", "edited")
    seen = scraped(Collector(guards={name: tmp_path / f"{name}.json" for name in names}))
    assert seen == {("mdmi_guard_up", name): 0.0 for name in names}


def test_a_state_of_an_older_version_is_read(tmp_path: Path) -> None:
    used(tmp_path)
    state = json.loads((tmp_path / "main.json").read_text())
    for name in ("movement_slope", "movement_ratio", "reveals"):
        state.pop(name)
    (tmp_path / "main.json").write_text(json.dumps(state))
    seen = scraped(Collector(guards={"main": tmp_path / "main.json"}))
    assert (seen["mdmi_guard_up", "main"], seen["mdmi_guard_reveals_total", "main"]) == (1.0, 0.0)


def test_the_command_serves_what_guards_wrote_until_it_is_told_to_end(tmp_path: Path) -> None:
    guard, _ = used(tmp_path)
    states = [str(tmp_path / "main.json"), str(tmp_path / "later.json")]
    command = [sys.executable, "-m", "mdmi_fast", "serve-metrics", *states, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with urllib.request.urlopen(address, timeout=10) as answer:
                seen = values(answer.read().decode())
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert process.stderr is not None
        assert "later.json: there is no such file yet; mdmi_guard_up of later is 0" in process.stderr.read()
    assert (seen["mdmi_guard_up", "main"], seen["mdmi_guard_up", "later"]) == (1.0, 0.0)
    assert seen["mdmi_guard_quality_ratio_count", "main", "policy"] == guard.state.policy.sequences
    assert any(name == "process_resident_memory_bytes" for name, *_ in seen)


def said_by(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and standard error of `serve-metrics`, which must not start."""
    command = [sys.executable, "-m", "mdmi_fast", "serve-metrics", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    used(tmp_path)
    good, bad = tmp_path / "main.json", tmp_path / "bad.json"
    bad.write_text("{")
    code, text = said_by(bad)
    assert (code, text.count("\n")) == (1, 1)
    assert f"{bad}: not the state of a guard" in text
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = said_by(good, "--port", str(port))
    assert (code, text) == (1, f"127.0.0.1:{port}: cannot listen there: Address already in use\n")
    code, text = said_by(good, "--port", "65536")
    assert code == 2
    assert "--port: must be at most 65535, got 65536" in text


def test_metrics_are_named_as_prometheus_wants_them(tmp_path: Path) -> None:
    guard, cache = used(tmp_path)
    registry = CollectorRegistry()
    registry.register(Collector(guards={"main": guard}, caches={"mi": cache}))
    assert promtool("check", "metrics", stdin=generate_latest(registry)).stderr == b""


def of_two_sides(name: str, *, policy: float, control: float, count: float = 100.0) -> dict[str, str]:
    """Series of a summary, by side, that grow by so much a minute."""
    series = {}
    for side, amount in (("policy", policy), ("control", control)):
        series[f'{name}_sum{{guard="main", side="{side}"}}'] = f"0+{amount}x200"
        series[f'{name}_count{{guard="main", side="{side}"}}'] = f"0+{count}x200"
    return series


def histogram(name: str, *, below: float, seconds: float) -> dict[str, str]:
    """Series of a histogram of 100 a minute, so many of which take up to `seconds` and the others up to twice as long."""
    edges = {f"{seconds:g}": below, f"{2 * seconds:g}": 100.0, "+Inf": 100.0}
    return {f'{name}_bucket{{instance="a", le="{edge}"}}': f"0+{count}x200" for edge, count in edges.items()}


def requests(failed: float) -> dict[str, str]:
    counts = {"200": 100.0 - failed, "503": failed}
    return {f'mdmi_requests_total{{instance="a", status="{status}"}}': f"0+{n}x200" for status, n in counts.items()}


ALERTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "MdmiFellBack": (
        {'mdmi_guard_fallen_back{guard="main"}': "1x200"},
        {'mdmi_guard_fallen_back{guard="main"}': "0x200"},
    ),
    "MdmiCorrelationLow": (
        {'mdmi_guard_correlation{guard="main"}': "0.79x200"},
        {'mdmi_guard_correlation{guard="main"}': "0.81x200"},
    ),
    "MdmiMovementWrong": (
        {'mdmi_guard_movement_slope{guard="main"}': "0.4x200"},
        {'mdmi_guard_movement_slope{guard="main"}': "0.6x200"},
    ),
    "MdmiQualityDropped": (
        of_two_sides("mdmi_guard_quality_ratio", policy=88, control=90),
        of_two_sides("mdmi_guard_quality_ratio", policy=89.5, control=90),
    ),
    "MdmiSlowerThanSequential": (
        of_two_sides("mdmi_guard_decoding_seconds", policy=12, control=10),
        of_two_sides("mdmi_guard_decoding_seconds", policy=10.5, control=10),
    ),
    "MdmiFalseIndependence": (
        {'mdmi_guard_false_independence_ratio{guard="main"}': "0.06x200"},
        {'mdmi_guard_false_independence_ratio{guard="main"}': "0.04x200"},
    ),
    "MdmiCacheCorrupt": (
        {'mdmi_cache_requests_total{cache="mi", store="disk", result="corrupt"}': "0x150 1x50"},
        {'mdmi_cache_requests_total{cache="mi", store="disk", result="corrupt"}': "0x200"},
    ),
    "MdmiStateUnreadable": ({'mdmi_guard_up{guard="main"}': "0x200"}, {'mdmi_guard_up{guard="main"}': "1x200"}),
    "MdmiServiceErrors": (requests(2), requests(0.5)),
    "MdmiServiceSlow": (
        histogram("mdmi_request_seconds", below=98, seconds=5),
        histogram("mdmi_request_seconds", below=100, seconds=5),
    ),
    "MdmiQueueFilling": (
        {'mdmi_requests_waiting{instance="a"}': "300x200", 'mdmi_requests_waiting_limit{instance="a"}': "512x200"},
        {'mdmi_requests_waiting{instance="a"}': "200x200", 'mdmi_requests_waiting_limit{instance="a"}': "512x200"},
    ),
    "MdmiQueueSlow": (
        histogram("mdmi_queue_seconds", below=90, seconds=1),
        histogram("mdmi_queue_seconds", below=96, seconds=1),
    ),
    "MdmiWorkersDie": (
        {'mdmi_worker_restarts_total{instance="a"}': "0x170 5x30"},
        {'mdmi_worker_restarts_total{instance="a"}': "0x170 1x30"},
    ),
    "MdmiWorkersMissing": (
        {'mdmi_workers{instance="a"}': "1x200", 'mdmi_workers_wanted{instance="a"}': "2x200"},
        {'mdmi_workers{instance="a"}': "2x200", 'mdmi_workers_wanted{instance="a"}': "2x200"},
    ),
}
"""For each alert, series over which it fires and series over which it nearly does."""


def test_every_alert_is_tried() -> None:
    promtool("check", "rules", Path(str(MONITOR / "alerts.yml")))
    assert set(ALERTS) == alert_names()
    assert len(ALERTS) == len(asked_by_alerts())


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires_when_it_should_and_not_otherwise(name: str, tmp_path: Path) -> None:
    bad, good = ALERTS[name]
    fires(bad, {name}, tmp_path)
    fires(good, set(), tmp_path)


def test_dashboard_and_alerts_ask_for_metrics_that_exist_and_show_all_of_them(tmp_path: Path) -> None:
    guard, cache = used(tmp_path)
    names = {name for name, *_ in scraped(Collector(guards={"main": guard}, caches={"mi": cache}))}
    asked = metrics_in(asked_by_panels() + asked_by_alerts())
    assert {name for name in asked if name.startswith(("mdmi_guard", "mdmi_cache"))} == names
    board = json.loads((MONITOR / "grafana.json").read_text())
    assert len(board["panels"]) == len({panel["id"] for panel in board["panels"]})
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(places) == len(set(places))


def test_an_alarm_is_seen_from_the_first_on(tmp_path: Path) -> None:
    """Prometheus sees no increase of a series that begins with its first alarm."""
    guard = Guard(TopK(2), state=tmp_path / "main.json", watched="test")
    guard.save()
    before = scraped(Collector(guards={"main": tmp_path / "main.json"}))
    alarms = {name[2] for name in before if name[0] == "mdmi_guard_alarms_total"}
    assert alarms == set(SIGNALS) == (set(guard._evidence) - {"step"}) | {"error"}
    assert {before["mdmi_guard_alarms_total", "main", signal] for signal in SIGNALS} == {0.0}


def test_means_are_of_the_sequences_that_were_told(tmp_path: Path) -> None:
    guard = Guard(TopK(2), thresholds=Thresholds(stages=(0.5,)), state=tmp_path / "main.json", watched="test")
    for seed in range(8):
        guard._arm(seed)
    guard.finish(torch.arange(4), quality=[1.0] * 4)
    guard.finish(torch.arange(4, 8), seconds=[2.0] * 4)
    seen = scraped(Collector(guards={"main": tmp_path / "main.json"}))
    for key, mean in (("quality_ratio", 1.0), ("decoding_seconds", 2.0)):
        count = sum(seen[f"mdmi_guard_{key}_count", "main", side] for side in ("policy", "control"))
        assert (count, sum(seen[f"mdmi_guard_{key}_sum", "main", side] for side in ("policy", "control"))) == (
            4,
            4 * mean,
        )
    assert sum(seen["mdmi_guard_sequences_total", "main", side] for side in ("policy", "control")) == 8
    # A state of an older version, which told nothing of it: all were told of what there is a sum of.
    state = json.loads((tmp_path / "main.json").read_text())
    for side in ("policy", "control"):
        del state[side]["judged"], state[side]["timed"]
        state[side]["seconds"] = 0.0
    (tmp_path / "main.json").write_text(json.dumps(state))
    older = scraped(Collector(guards={"main": tmp_path / "main.json"}))
    for side in ("policy", "control"):
        assert older["mdmi_guard_quality_ratio_count", "main", side] == state[side]["sequences"]
        assert older["mdmi_guard_decoding_seconds_count", "main", side] == 0


def test_every_pass_is_a_span_with_what_was_taken() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    model = JointTable(torch.ones(2, 2, 2))
    decode(model, torch.full((5, 3), 2), Traced(TopK(2), provider.get_tracer("test")))
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["mdmi.select"] * 2
    assert dict(spans[0].attributes) == {
        "mdmi.step": 0,
        "mdmi.sequences": 5,
        "mdmi.masked": 15,
        "mdmi.selected": 10,
    }


def test_without_the_extras_it_is_said_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'mdmi-fast\[metrics\]'"):
        Collector(guards={"main": Guard(EntropyBound(1.0))})
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'mdmi-fast\[tracing\]'"):
        Traced(TopK(2))
