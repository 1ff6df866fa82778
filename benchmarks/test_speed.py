"""`pytest benchmarks [--quick] [-k STEM]`: every way of every workload of mdmi_fast/bench, checked, then timed.

pytest-benchmark times one way after the other; ratios to be relied on come from `mdmi-fast bench`, which alternates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any

import pytest

from mdmi_fast.bench import STEMS
from mdmi_fast.bench.measure import Checked, Workload, check, threads


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    ways = [
        pytest.param((workload, name), id=f"{stem}: {workload.name}: {name}")
        for stem in STEMS
        for workload in import_module(f"mdmi_fast.bench.{stem}").workloads(metafunc.config.getoption("--quick"))
        for name in workload.ways
    ]
    metafunc.parametrize("way", ways, indirect=True)


@lru_cache(maxsize=1)
def _checked(workload: Workload) -> Checked:
    return check(workload, workload.make())


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """One way of a workload, after all of its ways gave the right answer."""
    workload, name = request.param
    with threads(1):
        checked = _checked(workload)
        if name in checked.unable:
            pytest.skip(checked.unable[name])
        yield checked.able[name]


def test_speed(benchmark: Any, way: Callable[[], Any]) -> None:
    benchmark(way)
