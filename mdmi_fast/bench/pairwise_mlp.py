"""Scores of all pairs: fused against PyTorch, half the work for symmetric scores, precisions, threads, processors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.bench import _baselines as torch_ways
from mdmi_fast.bench._baselines import Network, network
from mdmi_fast.bench.child import MIB, in_child, peak_growth
from mdmi_fast.bench.measure import Figure, Unavailable, Work, Workload, figures, threads

FUSED = "fused fp32"
CONCATENATING, SPLIT, TILED = "concatenating PyTorch", "split PyTorch", "tiled PyTorch"
COMPILED = "torch.compile of the split form"
_PAIRS_AT_ONCE = 2**15
"""Of a PyTorch way in one call, 64 MiB of activations or more; it does a part of the rows where there are more pairs."""


def workloads(quick: bool = False) -> list[Workload]:
    sizes = (64,) if quick else (64, 128, 256, 512, 1024)
    shapes = ((256, 128),) if quick else ((512, 256), (256, 128))
    found = [_against_pytorch(n, layers, compiled=not quick and n == 256) for layers in shapes for n in sizes]
    for layers in shapes:
        for n in sizes[:1] if quick else (64, 256):
            found += [_upper(n, layers), _equal_halves(n, layers), _shifted(n, layers)]
    found += [_small(batch) for batch in ((1,) if quick else (1, 100))]
    found += [_small_product(batch) for batch in ((1,) if quick else (1, 100))]
    if (os.cpu_count() or 1) > 1:
        found += [_two_threads(n, shapes[0]) for n in ((64,) if quick else (64, 256))]
    if _has_bf16():
        found += [_bf16(n, shapes[0]) for n in ((64,) if quick else (64, 256))]
    return found


def others(quick: bool = False) -> Iterator[Figure]:
    if not _has_bf16():
        yield Figure(
            "bf16", "against fp32", math.nan, "x", 1.8, note="this processor has no bf16 dot instructions in use"
        )
    if (os.cpu_count() or 1) < 2:
        yield Figure("2 threads", "against 1 thread", math.nan, "x", 1.8, note="this machine has one processor")
    yield from _forced_isas(quick)
    yield _memory(256 if quick else 2048)


def _case(n: int, layers: tuple[int, ...]) -> str:
    return f"N {n}, H {'/'.join(map(str, layers))}"


def _useful_flops(net_layers: tuple[int, ...], batch: int, n: int, d: int) -> float:
    """Multiply-adds of the halves and of the dense layers of all pairs, counted twice each."""
    widths = [*net_layers, 1]
    per_pair = sum(a * b for a, b in pairwise(widths))
    return 2.0 * batch * (n * n * per_pair + 2 * n * d * net_layers[0])


def _rows(n: int) -> int:
    return min(n, max(1, _PAIRS_AT_ONCE // n))


def _against_pytorch(n: int, layers: tuple[int, ...], *, compiled: bool = False) -> Workload:
    d, rows = layers[0], _rows(n)
    ways = {
        FUSED: torch_ways.fused,
        CONCATENATING: torch_ways.concatenated,
        SPLIT: torch_ways.split,
        TILED: torch_ways.tiled,
        **({COMPILED: torch_ways.compiled_split} if compiled else {}),
    }
    return Workload(
        name=_case(n, layers),
        make=lambda: network(1, n, d, layers, rows=rows),
        ways=ways,
        expected=torch_ways.expected,
        read=torch_ways.sampled,
        at_least={CONCATENATING: 15.0, SPLIT: 4.5, TILED: 2.2},
        work=Work("flops", _useful_flops(layers, 1, n, d), 0.85),
        parts={name: rows / n for name in ways if name != FUSED and rows < n},
    )


def _scores(symmetry: str, precision: str | None = None) -> Callable[[Network], Tensor]:
    return lambda net: ops.pairwise_mlp(net.u, net.v, *net.head, symmetry=symmetry, precision=precision)


def _above_diagonal(net: Network, scores: Tensor) -> Tensor:
    rows, columns = torch_ways.sample(net)
    return torch_ways.sampled(net, scores) * (rows[:, None] < columns)


def _expected_above_diagonal(net: Network) -> Tensor:
    rows, columns = torch_ways.sample(net)
    return torch_ways.expected(net) * (rows[:, None] < columns)


def _upper(n: int, layers: tuple[int, ...]) -> Workload:
    return Workload(
        name=f"upper, {_case(n, layers)}",
        make=lambda: network(1, n, layers[0], layers),
        ways={'symmetry "upper"': _scores("upper"), '"none"': _scores("none")},
        expected=_expected_above_diagonal,
        read=_above_diagonal,
        at_least={'"none"': 1.85},
    )


def _equal_halves(n: int, layers: tuple[int, ...]) -> Workload:
    def make() -> tuple[Network, Network]:
        net = network(1, n, layers[0], layers)
        return replace(net, v=net.u), replace(net, v=net.u.clone())

    scores = _scores("none")
    return Workload(
        name=f"equal halves, {_case(n, layers)}",
        make=make,
        ways={"equal halves": lambda nets: scores(nets[0]), "a copy as the other half": lambda nets: scores(nets[1])},
        expected=lambda nets: torch_ways.expected(nets[0]),
        read=lambda nets, found: torch_ways.sampled(nets[0], found),
        at_least={"a copy as the other half": 1.85},
    )


class _Shifted(NamedTuple):
    net: Network
    shift: Tensor
    distance: Tensor


def _shifted(n: int, layers: tuple[int, ...]) -> Workload:
    """What a number for each distance costs, or for each relation of two positions."""

    def make() -> _Shifted:
        place = torch.arange(n, device="cpu")
        distance = (place - place.unsqueeze(-1)).abs().clamp(1, 64) - 1
        return _Shifted(network(1, n, layers[0], layers), torch.randn(64, device="cpu"), distance.to(torch.int32))

    def scores(x: _Shifted, **shift: Any) -> Tensor:
        return ops.pairwise_mlp(x.net.u, x.net.v, *x.net.head, **shift)

    def expected(x: _Shifted) -> Tensor:
        more = x.shift[x.distance.long()].fill_diagonal_(0.0)
        return torch_ways.expected(x.net) + torch_ways.sampled(x.net, more.unsqueeze(0))

    return Workload(
        name=f"with a shift, {_case(n, layers)}",
        make=make,
        ways={
            "by distance": lambda x: scores(x, shift=x.shift),
            "no shift": scores,
            "by relation": lambda x: scores(x, shift=x.shift, relation=x.distance),
        },
        expected=expected,
        read=lambda x, found: torch_ways.sampled(x.net, found),
        at_least={"no shift": 0.95},
        unchecked=("no shift",),
    )


def _small(batch: int) -> Workload:
    """The small estimator, its weights packed once as decoding does."""
    layers = (64, 32)

    def make() -> Network:
        net = network(batch, 81, 180, layers)
        return replace(net, prepared=ops.prepare_pairwise(*net.head))

    return Workload(
        name=f"batch {batch}, {_case(81, layers)}",
        make=make,
        ways={FUSED: torch_ways.fused, SPLIT: torch_ways.split, TILED: torch_ways.tiled},
        expected=torch_ways.expected,
        read=torch_ways.sampled,
        work=Work("flops", _useful_flops(layers, batch, 81, 180)),
    )


def _small_product(batch: int) -> Workload:
    """The shape of the shipped Sudoku estimator: a product of equal halves, pairs above the diagonal only."""
    layers = (117, 32, 16)

    def make() -> Network:
        net = network(batch, 81, 1, layers)
        return replace(net, v=net.u, prepared=ops.prepare_pairwise(*net.head))

    def ours(net: Network) -> Tensor:
        return ops.pairwise_mlp(net.u, net.v, *net.head, combine="mul", symmetry="upper", prepared=net.prepared)

    def above_diagonal(net: Network) -> Tensor:
        i, j = torch.triu_indices(81, 81, 1)
        scores = net.u.new_zeros(batch, 81, 81)
        scores[:, i, j] = torch_ways.dense((net.u[:, i] * net.u[:, j]).flatten(0, 1), net).view(batch, -1)
        return scores + scores.mT

    return Workload(
        name=f"batch {batch}, product, {_case(81, layers)}",
        make=make,
        ways={FUSED: ours, "PyTorch, pairs above the diagonal": above_diagonal},
        expected=lambda net: torch_ways.expected(net, combine="mul"),
        read=torch_ways.sampled,
    )


def _two_threads(n: int, layers: tuple[int, ...]) -> Workload:
    def on(count: int) -> Callable[[Network], Tensor]:
        def run(net: Network) -> Tensor:
            with threads(count):
                return scores(net)

        return run

    scores = _scores("none")
    return Workload(
        name=f"2 threads, {_case(n, layers)}",
        make=lambda: network(1, n, layers[0], layers),
        ways={"2 threads": on(2), "1 thread": on(1)},
        expected=torch_ways.expected,
        read=torch_ways.sampled,
        at_least={"1 thread": 1.8},
    )


def _has_bf16() -> bool:
    try:
        from mdmi_fast import _C
    except ImportError:
        return False
    return bool(_C.isa() == "avx512bf16")


def _bf16(n: int, layers: tuple[int, ...]) -> Workload:
    return Workload(
        name=f"bf16, {_case(n, layers)}",
        make=lambda: network(1, n, layers[0], layers),
        ways={"bf16": _scores("none", "bf16"), "fp32": _scores("none")},
        expected=torch_ways.expected,
        read=torch_ways.sampled,
        tolerance=3e-2,  # operands of 8 bits
        at_least={"fp32": 1.8},
    )


def _forced_isas(quick: bool) -> Iterator[Figure]:
    """Each instruction set that this processor has, in a process that is told to use no other."""
    case = "MDMI_FORCE_ISA"
    try:
        from mdmi_fast import _C
    except ImportError:
        yield Figure(case, "share of FMA peak", math.nan, "%", 85.0, note="the extension is not built")
        return
    here = _C.supported_isas()
    for isa in here:
        try:
            for found in in_child(_forced, isa, 64 if quick else 256, MDMI_FORCE_ISA=isa):
                yield Figure(**found)
        except Unavailable as reason:
            yield Figure(f"{case}={isa}", "answer", math.nan, "", note=str(reason))
    for isa in sorted({"scalar", "avx2", "neon"} - set(here)):
        yield Figure(f"{case}={isa}", "answer", math.nan, "", note="another processor's")


def _forced(isa: str, n: int) -> list[dict[str, Any]]:
    """In a child: scores checked and timed on the forced instruction set."""
    from mdmi_fast import _C

    layers = (512, 256)
    if _C.isa() != isa:
        raise RuntimeError(f"forced {isa}, runs {_C.isa()}")
    with threads(1):
        workload = Workload(
            name=f"MDMI_FORCE_ISA={isa}, {_case(n, layers)}",
            make=lambda: network(1, n, layers[0], layers),
            ways={FUSED: torch_ways.fused, TILED: torch_ways.tiled},
            expected=torch_ways.expected,
            read=torch_ways.sampled,
            work=Work("flops", _useful_flops(layers, 1, n, layers[0]), 0.85 if isa == "avx2" else None),
        )
        return [asdict(figure) for figure in figures(workload, quick=True)]


def _memory(n: int) -> Figure:
    case, measure = _case(n, (512, 256)), "memory above inputs and output"
    try:
        grown = in_child(_peak_of_scoring, n)
    except Unavailable as reason:
        return Figure(case, measure, math.nan, "MiB", 64.0, "<=", note=str(reason))
    return Figure(case, measure, grown / MIB, "MiB", 64.0, "<=", note=f"the output itself is {4 * n * n / MIB:.0f} MiB")


def _peak_of_scoring(n: int) -> int:
    """In a child: bytes above inputs and output."""
    small, large = network(1, 32, 512, (512, 256)), network(1, n, 512, (512, 256))
    score = _scores("none")
    score(small)  # loads libraries and starts threads
    return peak_growth(lambda: score(large)) - 4 * n * n
