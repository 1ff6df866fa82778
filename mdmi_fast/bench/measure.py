"""Measuring: check every way of a workload, then time them in turn, then say what was reached."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mdmi_fast import get_num_threads, set_num_threads

Ways = Mapping[str, Callable[[Any], Any]]
Compare = Literal[">=", "<="]

ROUNDS = 5
_MOST_ROUNDS = 60
_SAMPLE_SECONDS = 2e-3
"""A sample repeats a short call until it lasts this long; the clock itself costs under a tenth of a microsecond."""
_LONG_SECONDS = 0.1
"""A call that takes so long needs no other one to be warm."""


class WrongAnswer(Exception):  # noqa: N818 - what happened, in two words
    """A way does not give the expected answer: no speed of the workload may be printed."""


class Unavailable(Exception):  # noqa: N818 - as above
    """A way cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Work:
    """What our way must do at least, to be compared with the most that the processor can do.

    Attributes:
        kind: "flops" or "bytes" read.
        amount: of one call.
        at_least: share of the peak that is the target, or None.
    """

    kind: Literal["flops", "bytes"]
    amount: float
    at_least: float | None = None


@dataclass(frozen=True, eq=False)
class Workload:
    """One thing to do, and the ways to do it; the first is ours.

    Attributes:
        name: of the case.
        make: the inputs.
        ways: by name; each takes the inputs.
        expected: the right answer, of the reference in float64.
        read: what of a way's result is compared with it.
        tolerance: the largest difference allowed, relative to the largest expected value where that is above 1.
        at_least: how many times faster than a way ours should be; ways left out are shown without a target.
        share_of: a way, and the share of its time that ours may take.
        at_most: seconds that our way may take.
        work: compared with the processor's peak.
        parts: the fraction of the work that a way does, where doing all of it would take too long; 1 if left out.
        unchecked: ways that do something else, such as the model whose time ours is compared with.
    """

    name: str
    make: Callable[[], Any]
    ways: Ways
    expected: Callable[[Any], Tensor]
    read: Callable[[Any, Any], Tensor] = lambda inputs, result: result
    tolerance: float = 1e-4
    at_least: Mapping[str, float] = field(default_factory=dict)
    share_of: tuple[str, float | None] | None = None
    at_most: float | None = None
    work: Work | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        case: what was done.
        measure: what the value says.
        value: in `unit`; NaN where nothing was measured, and `note` says why.
        unit: "x", "%", "us" or "MiB".
        target: in the same unit, or None.
        compare: on which side of the target the value should be.
        ours: median seconds of our way, NaN where no time was taken.
        other: of what it was compared with.
        note: one line.
        refused: the answer was wrong, so nothing was measured.
    """

    case: str
    measure: str
    value: float
    unit: str
    target: float | None = None
    compare: Compare = ">="
    ours: float = math.nan
    other: float = math.nan
    note: str = ""
    refused: bool = False

    @property
    def verdict(self) -> str:
        """One of "reached", "MISSED", "REFUSED", "n/a", or "" where there is no target."""
        if self.refused:
            return "REFUSED"
        if math.isnan(self.value):
            return "n/a"
        if self.target is None:
            return ""
        reached = self.value >= self.target if self.compare == ">=" else self.value <= self.target
        return "reached" if reached else "MISSED"


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Torch and mdmi_fast with n threads."""
    before, ours = torch.get_num_threads(), get_num_threads()
    torch.set_num_threads(n)
    set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        set_num_threads(ours)


class Checked(NamedTuple):
    """Ways whose answers are right.

    Attributes:
        able: those that can run here, bound to their inputs.
        unable: the reasons of the others.
        first: seconds of the first call, which was the check.
    """

    able: dict[str, Callable[[], Any]]
    unable: dict[str, str]
    first: dict[str, float]


def check(workload: Workload, inputs: Any) -> Checked:
    """Run every way once, which warms it, against the expected answer.

    Raises:
        WrongAnswer: if one of them is wrong.
    """
    expected = workload.expected(inputs).double()
    checked = Checked({}, {}, {})
    for name, way in workload.ways.items():
        start = time.perf_counter()
        try:
            result = way(inputs)
        except Unavailable as reason:
            checked.unable[name] = str(reason)
            continue
        checked.first[name] = time.perf_counter() - start
        checked.able[name] = partial(way, inputs)
        if name not in workload.unchecked:
            _compare(workload, name, workload.read(inputs, result).double(), expected)
    return checked


def _compare(workload: Workload, way: str, got: Tensor, expected: Tensor) -> None:
    if got.shape != expected.shape:
        raise WrongAnswer(f"{way} answers {tuple(got.shape)} values, expected {tuple(expected.shape)}")
    if not expected.numel():
        return
    difference = float(((got - expected).abs() / expected.abs().amax().clamp(min=1.0)).amax())
    if not difference <= workload.tolerance:  # NaN is a difference too
        raise WrongAnswer(f"{way} differs from the reference by {difference:.2g}, allowed is {workload.tolerance:.2g}")


def alternate(ways: Mapping[str, Callable[[], Any]], first: Mapping[str, float], *, seconds: float) -> dict[str, float]:
    """Median seconds of a call of every way, timed in turn, A B A B, warm.

    Args:
        ways: by name.
        first: seconds of a call already made.
        seconds: to go on for where calls are short; at least `ROUNDS` rounds are made.
    """
    repeats = {name: 1 if first.get(name, 0.0) > _LONG_SECONDS else _repeats(run) for name, run in ways.items()}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        for done in range(_MOST_ROUNDS):
            if done >= ROUNDS and time.perf_counter() > end:
                break
            for name, run in ways.items():
                start = time.perf_counter()
                for _ in range(repeats[name]):
                    run()
                samples[name].append((time.perf_counter() - start) / repeats[name])
    finally:
        gc.enable()
    return {name: statistics.median(times) for name, times in samples.items()}


def _repeats(run: Callable[[], Any]) -> int:
    """Calls that fill a sample."""
    once = math.inf
    for _ in range(2):  # the first may still find cold caches
        start = time.perf_counter()
        run()
        once = min(once, time.perf_counter() - start)
        if once > _SAMPLE_SECONDS:
            break
    return max(1, math.ceil(_SAMPLE_SECONDS / once))


_MATMUL = "large torch matmul"


@cache
def _square(n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, n, generator=generator), torch.randn(n, n, generator=generator), torch.empty(n, n)


@cache
def _long_tensor() -> Tensor:
    return torch.ones(32 * 2**20)


def yardstick(kind: str) -> tuple[str, Callable[[], Any], float]:
    """What the processor can do at most, on the threads in use: (name, run, amount of work of a run).

    Multiply-adds: the extension's own chain of them in registers, `_C.fma_burst(rounds) -> operations done`, in builds
    that have it; else a large matrix product of torch. Reading: the maximum of a tensor larger than any cache.
    """
    if kind == "bytes":
        long = _long_tensor()
        return "read bandwidth", long.amax, long.numel() * long.element_size()
    burst = _fma_burst()
    if burst is not None and get_num_threads() == 1:
        rounds = 1_000_000
        return "FMA peak", lambda: burst(rounds), float(burst(rounds))
    a, b, product = _square(1024)
    return _MATMUL, lambda: torch.mm(a, b, out=product), 2.0 * 1024**3


def _fma_burst() -> Callable[[int], int] | None:
    try:
        from mdmi_fast import _C
    except ImportError:
        return None
    return getattr(_C, "fma_burst", None)


def figures(workload: Workload, *, quick: bool = False) -> list[Figure]:
    """Check a workload and time it; a wrong answer gives a refusal and no speed."""
    try:
        able, unable, first = check(workload, workload.make())
    except WrongAnswer as wrong:
        return [Figure(workload.name, "answer", math.nan, "", note=str(wrong), refused=True)]
    ours, *others = workload.ways
    if ours in unable:
        return [Figure(workload.name, ours, math.nan, "", note=unable[ours])]
    ruler, amount = "", 0.0
    if workload.work is not None:
        ruler, run, amount = yardstick(workload.work.kind)
        able[ruler] = run
    seconds = alternate(able, first, seconds=0.1 if quick else 1.0)
    for name, part in workload.parts.items():
        if name in seconds:
            seconds[name] /= part
    taken = seconds[ours]
    # A matrix product is no peak: a kernel may beat it, and targets are shares of the peak.
    peak = math.nan
    if workload.work is not None and ruler != _MATMUL:
        peak = workload.work.amount / taken / (amount / seconds[ruler])
    found = []
    if workload.at_most is not None:
        found.append(Figure(workload.name, f"time of {ours}", taken * 1e6, "us", workload.at_most * 1e6, "<=", taken))
    for name in others:
        remark = f"measured on 1/{1 / workload.parts[name]:.0f} of the pairs" if name in workload.parts else ""
        found.append(_versus(workload, name, taken, seconds.get(name), unable.get(name, remark), peak))
    if workload.work is not None:
        found.append(_share_of_peak(workload, workload.work, taken, ruler, amount / seconds[ruler]))
    return found


def _versus(workload: Workload, other: str, ours: float, seconds: float | None, note: str, peak: float) -> Figure:
    value = math.nan if seconds is None else seconds / ours
    if workload.share_of is not None and other == workload.share_of[0]:
        most = workload.share_of[1]
        target = None if most is None else 100 * most
        measure = f"share of {other}"
        return Figure(workload.name, measure, 100 / value, "%", target, "<=", ours, seconds or math.nan, note)
    target = workload.at_least.get(other)
    if target is not None and value < target and value / peak < target:  # peak is NaN where it is not known
        note = f"{note + '; ' if note else ''}at the peak it would be {value / peak:.1f}x"
    return Figure(workload.name, f"against {other}", value, "x", target, ">=", ours, seconds or math.nan, note)


def _share_of_peak(workload: Workload, work: Work, ours: float, ruler: str, peak: float) -> Figure:
    unit = "GFLOP/s" if work.kind == "flops" else "GB/s"
    note = f"{work.amount / ours / 1e9:.1f} of {peak / 1e9:.1f} {unit}"
    target = None if work.at_least is None or ruler == _MATMUL else 100 * work.at_least
    return Figure(
        workload.name, f"share of {ruler}", 100 * work.amount / ours / peak, "%", target, ">=", ours, note=note
    )
