"""`pytest benchmarks/bench_STEM.py [--quick]`: every way of every workload of mdmi_fast/bench/STEM.py, checked, then timed.

pytest-benchmark times one way after the other; ratios to be relied on come from `mdmi-fast bench`, which alternates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest

from mdmi_fast.bench.measure import Checked, Workload, check, threads


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="small sizes")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" in metafunc.fixturenames:
        workloads = metafunc.module.workloads(metafunc.config.getoption("--quick"))
        pairs = [(workload, name) for workload in workloads for name in workload.ways]
        metafunc.parametrize("way", pairs, indirect=True, ids=[f"{w.name}: {name}" for w, name in pairs])


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
