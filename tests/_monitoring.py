"""What test_monitor.py and test_service.py ask of the dashboard and the alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

MONITOR = files("mdmi_fast.watch")


def values(text: str) -> dict[tuple[str, ...], float]:
    """What Prometheus is answered with, by name and label values."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def asked_by_panels() -> list[str]:
    board = json.loads((MONITOR / "grafana.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def asked_by_alerts() -> list[str]:
    return re.findall(r"expr: (.*?)\n +(?:for|labels):", (MONITOR / "alerts.yml").read_text(), flags=re.DOTALL)


def metrics_in(expressions: list[str]) -> set[str]:
    return {name for text in expressions for name in re.findall(r"\bmdmi_\w+", text)}


def alert_names() -> set[str]:
    return set(re.findall(r"alert: (\w+)", (MONITOR / "alerts.yml").read_text()))


def promtool(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run([binary, *map(str, arguments)], input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done


def fires(series: Mapping[str, str], expected: set[str], folder: Path, *, minutes: int = 180) -> None:
    """Have promtool say which alerts fire, once each, over series of one value a minute."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)]
    test = {
        "rule_files": [str(MONITOR / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": text} for name, text in series.items()],
                "promql_expr_test": [
                    {
                        "expr": "count by (alertname) (ALERTS{alertstate='firing'})",
                        "eval_time": f"{minutes}m",
                        "exp_samples": samples,
                    }
                ],
            }
        ],
    }
    path = folder / "alerts_test.yml"
    path.write_text(json.dumps(test))  # JSON is YAML
    promtool("test", "rules", path)
