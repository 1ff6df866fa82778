"""The budgeted selection, against a careful greedy loop in Python with numpy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdmi_fast import ops, reference
from mdmi_fast.backends.calls import Budget
from mdmi_fast.bench.measure import Unavailable, Work, Workload, threads

Inputs = tuple[Tensor, Tensor]
GAMMA = 1.0
NUMPY = "greedy in numpy"
KERNEL = "the kernel, without the op's checks"
_MOST_SECONDS = {64: 5e-6, 1024: 60e-6}
_CHECKED = 2
"""Sequences of a batch that the reference, a slow loop, is asked for; the first ones."""


def workloads(quick: bool = False) -> list[Workload]:
    sizes = (64, 256) if quick else (64, 256, 1024, 4096)
    found = [_workload(f"N {n}", 1, n, 1.0, _MOST_SECONDS.get(n)) for n in sizes]
    found += [_workload(f"N {n}", 1, n, 0.0) for n in sizes]
    found += [_workload(f"batch 64, N {n}", 64, n, 1.0) for n in sizes if n <= 1024]
    found += [_band_workload(2_000 if quick else 20_000, 64, weight) for weight in (1.0, 0.0)]
    return found if (os.cpu_count() or 1) == 1 else [*found, _two_threads(64, 256)]


def _make(batch: int, n: int) -> Inputs:
    """Entropies and MI of a masked sequence: a few nats, and most pairs nearly independent."""
    generator = torch.Generator().manual_seed(n)
    entropy = 1.5 * torch.rand(batch, n, generator=generator)
    mi = 0.02 * torch.rand(batch, n, n, generator=generator).pow(4)
    return entropy, (mi + mi.mT) / 2


# Unlike the op it does not look for NaN.
def _numpy_row(h: Any, mi: Any, entropy_weight: float) -> tuple[Any, float]:
    order = np.argsort(h, kind="stable")
    own, shared = entropy_weight * h.astype(np.float64), np.zeros(len(h))
    selected = np.zeros(len(h), dtype=bool)
    remaining, spent = GAMMA, 0.0
    for rank, i in enumerate(order):
        if rank and own[i] > remaining:
            break
        cost = own[i] + shared[i]
        if rank and cost > remaining:
            continue
        selected[i] = True
        remaining -= cost
        spent += cost
        shared += np.maximum(mi[:, i], 0.0)
    return selected, spent


def _in_numpy(inputs: Inputs, entropy_weight: float) -> tuple[Tensor, Tensor]:
    entropy, mi = (x.numpy() for x in inputs)
    rows = [_numpy_row(h, m, entropy_weight) for h, m in zip(entropy, mi, strict=True)]
    return torch.from_numpy(np.stack([s for s, _ in rows])), torch.tensor([c for _, c in rows], dtype=torch.float64)


def _read(inputs: Inputs, found: tuple[Tensor, Tensor]) -> Tensor:
    selected, spent = found
    return torch.cat([selected[:_CHECKED].double(), spent[:_CHECKED, None]], 1)


def _expected(inputs: Inputs, entropy_weight: float) -> Tensor:
    entropy, mi = (x[:_CHECKED] for x in inputs)
    gamma = torch.full((len(entropy),), GAMMA, dtype=torch.float64)
    return _read(inputs, reference.select_budget(entropy, mi, gamma, entropy_weight=entropy_weight))


def _op(inputs: Inputs, entropy_weight: float) -> tuple[Tensor, Tensor]:
    return ops.select_budget(*inputs, gamma=GAMMA, entropy_weight=entropy_weight)


def _kernel(inputs: Inputs, entropy_weight: float) -> tuple[Tensor, Tensor]:
    try:
        from mdmi_fast.backends.cpp import select
    except ImportError as error:
        raise Unavailable(f"the extension {error}") from error
    gamma = torch.full((len(inputs[0]),), GAMMA, dtype=torch.float64)
    entropy, mi = inputs
    return select.select_budget(entropy, mi, None, Budget(gamma, 1.0, entropy_weight))


def _workload(name: str, batch: int, n: int, entropy_weight: float, at_most: float | None = None) -> Workload:
    return Workload(
        name=f"{name}, entropy_weight {entropy_weight:g}",
        make=lambda: _make(batch, n),
        ways={
            "op": lambda inputs: _op(inputs, entropy_weight),
            NUMPY: lambda inputs: _in_numpy(inputs, entropy_weight),
            KERNEL: lambda inputs: _kernel(inputs, entropy_weight),
        },
        expected=lambda inputs: _expected(inputs, entropy_weight),
        read=_read,
        tolerance=1e-12,  # selections are equal; numpy's sums may round otherwise
        at_most=at_most,
        work=Work("bytes", 4.0 * batch * n * n),  # a NaN anywhere in the matrix is an error, so all of it is read
    )


def _make_band(n: int, window: int) -> Inputs:
    generator = torch.Generator().manual_seed(n)
    entropy = 1.5 * torch.rand(1, n, generator=generator)
    return entropy, 0.02 * torch.rand(1, n, 2 * window + 1, generator=generator).pow(4)


def _band_workload(n: int, window: int, entropy_weight: float) -> Workload:
    def on(backend: str | None) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
        return lambda inputs: ops.select_budget_band(
            *inputs, gamma=GAMMA, entropy_weight=entropy_weight, backend=backend
        )

    return Workload(
        name=f"band, N {n}, window {window}, entropy_weight {entropy_weight:g}",
        make=lambda: _make_band(n, window),
        ways={"op": on(None), "the torch backend": on("torch")},
        # The reference would build the whole matrix; the tests compare both backends with it on short sequences.
        expected=lambda inputs: _read(inputs, on("torch")(inputs)),
        read=_read,
        tolerance=0.0,
        work=Work("bytes", 4.0 * n * (2 * window + 1)),
    )


def _two_threads(batch: int, n: int) -> Workload:
    def on(count: int) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
        def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
            with threads(count):
                return _op(inputs, 1.0)

        return run

    return Workload(
        name=f"2 threads, batch {batch}, N {n}",
        make=lambda: _make(batch, n),
        ways={"2 threads": on(2), "1 thread": on(1)},
        expected=lambda inputs: _expected(inputs, 1.0),
        read=_read,
        tolerance=0.0,
    )
