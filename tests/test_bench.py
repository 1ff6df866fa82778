"""The benchmarks: what they say, and that they say no speed of a wrong answer."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from pathlib import Path

import pytest
import torch

import mdmi_fast
from mdmi_fast.bench import STEMS, report
from mdmi_fast.bench.child import MIB, in_child, peak_growth
from mdmi_fast.bench.measure import Figure, Unavailable, Work, Workload, alternate, figures, threads
from mdmi_fast.cli import main

ROOT = Path(__file__).parent.parent

DOUBLE = Workload(
    name="double",
    make=lambda: torch.arange(4.0),
    ways={"ours": lambda x: x + x, "slow": lambda x: sum(x * 0.02 for _ in range(100))},
    expected=lambda x: 2 * x.double(),
    at_least={"slow": 2.0},
)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before, ours = torch.get_num_threads(), mdmi_fast._threads._threads
    yield
    torch.set_num_threads(before)
    mdmi_fast._threads._threads = ours


def wrong(x: torch.Tensor) -> torch.Tensor:
    return 2 * x + 1


def test_a_ratio_is_the_others_time_over_ours_and_is_judged_by_its_target() -> None:
    (found,) = figures(DOUBLE, quick=True)
    assert (found.measure, found.unit, found.verdict) == ("against slow", "x", "reached")
    assert found.value == pytest.approx(found.other / found.ours)
    assert found.value > 2
    (found,) = figures(replace(DOUBLE, at_least={"slow": 1e9}), quick=True)
    assert found.verdict == "MISSED"


@pytest.mark.parametrize("way", ["ours", "slow"])
def test_a_wrong_answer_of_any_way_gives_no_speed(way: str) -> None:
    (found,) = figures(replace(DOUBLE, ways={**DOUBLE.ways, way: wrong}), quick=True)
    assert found.refused
    assert math.isnan(found.value)
    assert math.isnan(found.ours)
    assert f"{way} differs from the reference by 0.17" in found.note  # 1 in 6, the largest expected value


@pytest.mark.parametrize("answer", [torch.full((4,), torch.nan), torch.zeros(3)])
def test_nan_and_another_shape_are_wrong_answers(answer: torch.Tensor) -> None:
    (found,) = figures(replace(DOUBLE, ways={"ours": lambda x: answer}), quick=True)
    assert found.refused


def test_what_cannot_run_here_is_shown_with_its_reason() -> None:
    def unable(x: torch.Tensor) -> torch.Tensor:
        raise Unavailable("no such instructions")

    (found,) = figures(replace(DOUBLE, ways={**DOUBLE.ways, "slow": unable}), quick=True)
    assert (found.verdict, found.note) == ("n/a", "no such instructions")
    (found,) = figures(replace(DOUBLE, ways={"ours": unable}), quick=True)
    assert (found.verdict, found.note) == ("n/a", "no such instructions")


def test_a_part_of_the_work_is_scaled_to_all_of_it() -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.003)
        return 2 * x

    same = replace(DOUBLE, ways={"ours": slow, "slow": lambda x: slow(x)}, parts={"slow": 0.1})
    (found,) = figures(same, quick=True)
    assert 4 < found.value < 25  # ten times as long, on a busy machine
    assert found.note == "measured on 1/10 of the pairs"


def test_work_is_compared_with_what_the_processor_can_do() -> None:
    found = figures(replace(DOUBLE, work=Work("bytes", 16.0), at_most=1.0), quick=True)
    assert [f.measure for f in found] == ["time of ours", "against slow", "share of read bandwidth"]
    assert found[0].verdict == "reached"
    assert 0 < found[2].value < 100


def test_ways_are_timed_in_turn() -> None:
    order = ""

    def way(name: str) -> None:
        nonlocal order
        order += name
        torch.zeros(2**20)

    alternate({"a": lambda: way("a"), "b": lambda: way("b")}, {}, seconds=0.0)
    turns = "".join(name for name, _ in groupby(order))  # a sample of a fast machine may hold several calls
    assert turns.endswith("ab" * 5)


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["stats", "select"])
def test_the_command_prints_a_table_and_writes_csv_and_picture(
    stem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", stem, "--quick", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"\n{stem}, 1 thread" in out
    with (tmp_path / f"{stem}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 5
    assert all(row["case"] in out for row in rows)
    assert {row["command"] for row in rows} == {f"mdmi-fast bench {stem} --quick --threads 1"}
    assert all(row["processor"] and row["torch"] and row["date"] and float(row["value"]) > 0 for row in rows)
    assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_fails_and_prints_no_speed_where_an_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = replace(DOUBLE, ways={**DOUBLE.ways, "ours": wrong})
    monkeypatch.setattr("mdmi_fast.bench.labels.workloads", lambda quick: [bad])
    monkeypatch.setattr("mdmi_fast.bench.labels.others", lambda quick: [])
    assert main(["bench", "labels", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    (row,) = (line for line in out.splitlines() if line.startswith("double"))
    assert "REFUSED" in row
    assert " us" not in row
    assert " ms" not in row
    assert "1 REFUSED" in out
    with (tmp_path / "labels.csv").open() as file:
        (saved,) = csv.DictReader(file)
    assert (saved["verdict"], saved["value"], saved["ours_seconds"]) == ("REFUSED", "", "")


def test_an_unknown_stem_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "nothing"])
    assert f"must be one of {', '.join(STEMS)}, got nothing" in capsys.readouterr().err


def test_a_line_shows_target_and_verdict() -> None:
    text = report.line(Figure("case", "against b", 12.345, "x", 15.0, ">=", 1e-3, 12.345e-3, "why"))
    cells = [cell for cell in text.split("  ") if cell]
    assert [cell.strip() for cell in cells] == [
        "case",
        "against b",
        "12.3 x",
        ">= 15 x",
        "MISSED",
        "1 ms against 12.3 ms; why",
    ]


def test_every_stem_has_workloads_in_both_sizes() -> None:
    for stem in STEMS:
        module = import_module(f"mdmi_fast.bench.{stem}")
        for quick in (False, True):
            assert all(len(workload.ways) > 1 for workload in module.workloads(quick))


def test_pytest_runs_the_benchmarks() -> None:
    files = [
        "benchmarks",
        "--quick",
        "-k",
        "select and N and 64 and entropy_weight and numpy and not score",
        "--benchmark-max-time=0.1",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    # Beside other tests pytest-benchmark would time nothing.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def allocated(mebibytes: int) -> int:
    return peak_growth(lambda: torch.ones(mebibytes * MIB // 4))


def test_memory_of_a_child_is_what_it_took() -> None:
    try:
        taken = in_child(allocated, 40)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert 39 * MIB <= taken < 44 * MIB  # whole pages, and some were there before


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(Unavailable, match="ended with 1: ZeroDivisionError"):
        in_child(divide, 0)


def divide(by: int) -> float:
    return 1 / by


def test_threads_are_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    with threads(2):
        assert (torch.get_num_threads(), mdmi_fast.get_num_threads()) == (2, 2)
    assert torch.get_num_threads() == before


def test_a_table_is_written_by_column_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    report.write_table(path, ["a", "b"], [{"b": 2, "a": 1}, {"b": 3}, (4, 5)])
    assert path.read_text() == "a,b\n1,2\n,3\n4,5\n"
    for row in ({"c": 1}, (1,), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"write_table: rows must fit the columns \['a', 'b'\], got"):
            report.write_table(path, ["a", "b"], [row])
    assert path.read_text() == "a,b\n1,2\n,3\n4,5\n"
