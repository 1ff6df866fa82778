"""What Prometheus, Grafana and OpenTelemetry get to see, checked by their own tools."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mdmi_fast import EntropyBound, MIBudget, Probing, TopK, UnsupportedError, decode
from mdmi_fast.cache import Cache, CachedMI, MemoryStore
from mdmi_fast.models.exact import JointTable
from mdmi_fast.watch import Collector, Traced
from mdmi_fast.watch.guard import Guard, Thresholds

MONITOR = files("mdmi_fast.watch")


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


def values(text: str) -> dict[tuple[str, ...], float]:
    """By name and label values."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


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


def promtool(*arguments: str | Path) -> None:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_are_named_as_prometheus_wants_them(tmp_path: Path) -> None:
    guard, cache = used(tmp_path)
    registry = CollectorRegistry()
    registry.register(Collector(guards={"main": guard}, caches={"mi": cache}))
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(
        [binary, "check", "metrics"], input=generate_latest(registry), capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_alerts_fire_when_they_should_and_not_otherwise(tmp_path: Path) -> None:
    rules = Path(str(MONITOR / "alerts.yml"))
    promtool("check", "rules", rules)
    series = {
        'mdmi_guard_correlation{guard="bad"}': "0.7x200",
        'mdmi_guard_correlation{guard="good"}': "0.9x200",
        'mdmi_guard_movement_slope{guard="bad"}': "0.3x200",
        'mdmi_guard_movement_slope{guard="good"}': "0.9x200",
        'mdmi_guard_fallen_back{guard="bad"}': "1x200",
        'mdmi_guard_fallen_back{guard="good"}': "0x200",
    }
    for guard, policy in (("bad", 88), ("good", 90)):
        for side, good in (("policy", policy), ("control", 90)):
            series[f'mdmi_guard_quality_ratio_sum{{guard="{guard}", side="{side}"}}'] = f"0+{good}x200"
            series[f'mdmi_guard_quality_ratio_count{{guard="{guard}", side="{side}"}}'] = "0+100x200"
    test = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": text} for name, text in series.items()],
                "promql_expr_test": [
                    {
                        "expr": "count by (alertname, guard) (ALERTS{alertstate='firing'})",
                        "eval_time": "180m",
                        "exp_samples": [
                            {"labels": f'{{alertname="{name}", guard="bad"}}', "value": 1}
                            for name in (
                                "MdmiCorrelationLow",
                                "MdmiFellBack",
                                "MdmiMovementWrong",
                                "MdmiQualityDropped",
                            )
                        ],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(test))  # JSON is YAML
    promtool("test", "rules", path)


def test_dashboard_and_alerts_ask_for_metrics_that_exist(tmp_path: Path) -> None:
    guard, cache = used(tmp_path)
    names = {name for name, *_ in scraped(Collector(guards={"main": guard}, caches={"mi": cache}))}
    board = json.loads((MONITOR / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) == len(board["panels"]) == len({panel["id"] for panel in board["panels"]})
    asked.append((MONITOR / "alerts.yml").read_text())
    wanted = {name for text in asked for name in re.findall(r"\bmdmi_(?:guard|cache)_\w+", text)}
    assert wanted - names - {"mdmi_guard_alarms_total"} == set()
    assert len(wanted) > 10


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
