"""The reductions over K alternatives that labels need, against the torch expressions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import ops, reference
from mdmi_fast.bench.child import MIB, in_child, peak_growth
from mdmi_fast.bench.measure import Figure, Unavailable, Work, Workload, threads

Inputs = tuple[Tensor, Tensor, Tensor]
TORCH = "the torch expression"
TARGETS: Mapping[str, float | None] = {
    "kl_divergence": None,
    "expected_entropy": 10.0,
    "expected_kl": 10.0,
    "mixture_entropy": None,
    "mixture_stats": 10.0,
}


def workloads(quick: bool = False) -> list[Workload]:
    # K alternatives written at one position, so many states, N positions, V tokens: amino acids and Sudoku.
    shapes = [(20, 1, 128, 20), (9, 4, 81, 10)] if quick else [(20, 32, 128, 20), (20, 32, 512, 33), (9, 512, 81, 10)]
    return [_workload(op, shape) for op in TARGETS for shape in shapes]


def others(quick: bool = False) -> Iterator[Figure]:
    """Memory above inputs and output, as a share of the stack of all alternatives: a temporary of its size is 100%.

    Weights in float64, [K, ...] without V, are a few percent.
    """
    shape = (20, 4, 512, 33) if quick else (20, 32, 512, 33)
    measure, most, stack = "temporaries, share of the [K, ..., V] stack", 10.0, 4 * math.prod(shape)
    ops_of = ("expected_entropy", "expected_kl", "mixture_entropy", "mixture_stats")
    cases = [f"{op}, {' x '.join(map(str, shape))}" for op in ops_of]
    try:
        peaks = in_child(_peaks, ops_of, shape)
    except Unavailable as reason:
        for case in cases:
            yield Figure(case, measure, math.nan, "%", most, "<=", note=str(reason))
        return
    for case, (ours, theirs) in zip(cases, peaks, strict=True):
        note = f"{ours / MIB:.1f} MiB; the torch expression {theirs / MIB:.0f} MiB; the stack {stack / MIB:.0f} MiB"
        yield Figure(case, measure, 100 * ours / stack, "%", most, "<=", note=note)


def _make(k: int, states: int, n: int, v: int) -> Inputs:
    generator = torch.Generator().manual_seed(k * v)
    logits = 3.0 * torch.randn(k, states, n, v, generator=generator)
    weights = torch.softmax(torch.randn(k, states, n, generator=generator), 0)
    return logits, weights, 3.0 * torch.randn(states, n, v, generator=generator)


def _kl_in_torch(logits: Tensor, weights: Tensor, base: Tensor) -> Tensor:
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(base, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _expected_entropy_in_torch(logits: Tensor, weights: Tensor, base: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits, -1)
    return -(weights * (log_p.exp() * log_p).sum(-1)).sum(0)


def _expected_kl_in_torch(logits: Tensor, weights: Tensor, base: Tensor) -> Tensor:
    return (weights * _kl_in_torch(logits, weights, base)).sum(0)


def _mixture_entropy_in_torch(logits: Tensor, weights: Tensor, base: Tensor) -> Tensor:
    mixture = (weights.unsqueeze(-1) * torch.softmax(logits, -1)).sum(0)
    return -(mixture * mixture.log()).sum(-1)


def _mixture_stats_in_torch(logits: Tensor, weights: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three with one softmax, which is less than the three expressions above."""
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(base, -1)
    p = log_p.exp()
    mixture = (weights.unsqueeze(-1) * p).sum(0)
    entropy, kl = -(p * log_p).sum(-1), (p * (log_p - log_q)).sum(-1)
    return -(mixture * mixture.log()).sum(-1), (weights * entropy).sum(0), (weights * kl).sum(0)


_IN_TORCH: Mapping[str, Callable[..., Any]] = {
    "kl_divergence": _kl_in_torch,
    "expected_entropy": _expected_entropy_in_torch,
    "expected_kl": _expected_kl_in_torch,
    "mixture_entropy": _mixture_entropy_in_torch,
    "mixture_stats": _mixture_stats_in_torch,
}


def _call(library: Any, op: str, logits: Tensor, weights: Tensor, base: Tensor) -> Any:
    """An op of mdmi_fast.ops or its reference."""
    function: Callable[..., Any] = getattr(library, op)
    if op == "kl_divergence":
        return function(logits, base.expand_as(logits))
    return function(logits, weights, base) if op in ("expected_kl", "mixture_stats") else function(logits, weights)


def _one_tensor(found: Any) -> Tensor:
    return torch.stack(found) if isinstance(found, tuple) else found


def _some(inputs: Inputs) -> Inputs:
    """A few positions, in float64: what the reference is asked for."""
    logits, weights, base = (x.double() for x in inputs)
    positions = _some_positions(base.shape[1])
    return logits[:, :, positions], weights[:, :, positions], base[:, positions]


def _some_positions(n: int) -> Tensor:
    return torch.linspace(0, n - 1, min(n, 16)).long()


def _workload(op: str, shape: tuple[int, int, int, int]) -> Workload:
    k, states, n, v = shape
    target = TARGETS[op]
    return Workload(
        name=f"{op}, {k} x {states} x {n} x {v}",
        make=lambda: _make(*shape),
        ways={
            "fused": lambda inputs: _call(ops, op, *inputs),
            TORCH: lambda inputs: _IN_TORCH[op](*inputs),
        },
        expected=lambda inputs: _one_tensor(_call(reference, op, *_some(inputs))),
        read=lambda inputs, found: _one_tensor(found)[..., _some_positions(n)],
        tolerance=1e-5,
        at_least={} if target is None else {TORCH: target},
        work=Work("bytes", 4.0 * k * states * n * v),
    )


def _peaks(ops_of: list[str], shape: tuple[int, int, int, int]) -> list[tuple[int, int]]:
    """In a child: bytes above inputs and output of every op, (fused, torch expression)."""
    with threads(1):
        inputs, small = _make(*shape), _make(2, 2, 16, shape[-1])

        def peak(run: Callable[[Inputs], Any]) -> int:
            output = (
                4 * _one_tensor(run(small)).numel() // 32 * math.prod(shape[1:-1])
            )  # loads libraries, starts threads
            return peak_growth(lambda: run(inputs)) - output

        return [
            (peak(lambda x, op=op: _call(ops, op, *x)), peak(lambda x, op=op: _IN_TORCH[op](*x)))  # type: ignore[misc]
            for op in ops_of
        ]
