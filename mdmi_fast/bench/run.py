"""All figures of a stem, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from mdmi_fast.bench.measure import Figure, figures


def measure_stem(stem: str, *, quick: bool = False) -> Iterator[Figure]:
    """Measure a stem on the threads in use.

    Args:
        stem: one of `STEMS`.
        quick: small sizes and few samples, to see that everything runs; targets, meant for the full sizes, are left out.
    """
    module: Any = import_module(f"mdmi_fast.bench.{stem}")
    for workload in module.workloads(quick):
        yield from _shown(figures(workload, quick=quick), quick)
    if hasattr(module, "others"):
        yield from _shown(module.others(quick), quick)


def _shown(found: Any, quick: bool) -> Iterator[Figure]:
    for figure in found:
        yield replace(figure, target=None) if quick else figure
