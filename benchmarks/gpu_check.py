"""Everything the Triton backend promises, checked and timed on one GPU in under four minutes.

    python -m benchmarks.gpu_check                # results/gpu_CARD.csv, and a table of ratios
    python -m benchmarks.gpu_check --rehearse     # here, under Triton's interpreter, at tiny sizes: its times mean nothing

First every op at real sizes against float64; an op that is wrong is not timed. Then times: medians, each call after the second-level
cache was overwritten ("cold"), and replays of a captured CUDA graph for what is launched in every decoding step. Beside
them run PyTorch's ways, a copy and a matrix product of the same card, so that every ratio is of one run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mdmi_fast import ops, reference
from mdmi_fast.bench.report import write_table

Network = tuple[list[Tensor], list[Tensor], Tensor, Tensor]
Run = Callable[[], Any]


@dataclass
class Sizes:
    """What is checked and timed; `--rehearse` shrinks all of it."""

    checked: int = 192
    timed: tuple[int, ...] = (256, 1024, 2048)
    networks: tuple[tuple[int, ...], ...] = ((512, 256), (256, 128))
    vocabularies: tuple[tuple[int, int], ...] = ((1_000_000, 10), (300_000, 33), (512, 50257), (128, 151936))
    """Rows and V."""
    head: tuple[int, int, int] = (512, 4096, 128256)
    """Rows, D and V."""
    square: int = 8192
    copied: int = 1 << 30
    """Bytes."""
    rounds: int = 15


REHEARSAL = Sizes(11, (8,), ((16, 8),), ((6, 33),), (4, 16, 40), 16, 1 << 10, 1)


@dataclass
class Report:
    """Rows of the CSV file."""

    device: torch.device
    card: str
    sizes: Sizes
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, op: str, case: str, way: str, value: float, unit: str, note: str = "") -> None:
        versions = {"card": self.card, "torch": torch.__version__, "date": date.today().isoformat()}
        row = {**versions, "kind": kind, "op": op, "case": case, "way": way, "value": value, "unit": unit, "note": note}
        self.rows.append(row)
        print(f"{kind:8} {op:22} {case:28} {way:24} {value:12.4g} {unit} {note}", flush=True)

    # --- times

    def cold(self, run: Run) -> float:
        """Median seconds of a call that finds nothing of its operands in the cache."""
        run()
        if self.device.type != "cuda":
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        spoiler = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        times = []
        for _ in range(self.sizes.rounds):
            spoiler.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def replayed(self, run: Run) -> float:
        """Median seconds of a replay of the call as a CUDA graph; fails if the call cannot be captured."""
        if self.device.type != "cuda":
            return self.cold(run)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return self.cold(graph.replay)

    def time(self, op: str, case: str, ways: dict[str, Run], measure: Callable[[Run], float] | None = None) -> None:
        """Times of ways; one that PyTorch refuses, for instance for want of memory, is noted instead."""
        for way, run in ways.items():
            try:
                self.add("time", op, case, way, (measure or self.cold)(run) * 1e3, "ms")
            except torch.OutOfMemoryError as error:
                self.add("time", op, case, way, float("nan"), "ms", f"refused: {type(error).__name__}")

    # --- checks

    def check(self, op: str, case: str, got: Any, expected: Any, bound: float) -> None:
        """Largest error against float64, relative to the expected magnitude or absolute, whichever is smaller."""
        worst = 0.0
        for a, b in zip(*((x if isinstance(x, (tuple, list)) else (x,)) for x in (got, expected)), strict=True):
            a, b = a.double(), b.double()
            error = ((a - b).abs() / b.abs().clamp_min(1.0)).nan_to_num(float("inf"))
            worst = max(worst, float(torch.where(a.isnan() & b.isnan(), 0.0, error).max()))
        self.add("check", op, case, "triton", worst, "error", "" if worst <= bound else f"WRONG, bound {bound}")

    @property
    def wrong(self) -> list[str]:
        return [f"{row['op']} ({row['case']})" for row in self.rows if row["note"].startswith("WRONG")]


def network(widths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Network:
    made = {"device": device, "dtype": dtype}
    weights = [torch.randn(a, b, **made) * (2 / a) ** 0.5 for a, b in itertools.pairwise(widths)]
    return (
        weights,
        [torch.randn(b, **made) * 0.1 for b in widths[1:]],
        torch.randn(widths[-1], **made) / 16,
        torch.zeros((), **made),
    )


def exact(net: Network) -> Network:
    return [w.double() for w in net[0]], [b.double() for b in net[1]], net[2].double(), net[3].double()


def split(u: Tensor, v: Tensor, net: Network) -> Tensor:
    """The pair network as a careful user writes it: the first layer on positions."""
    z = (u.unsqueeze(-2) + v.unsqueeze(-3)).relu()
    for weight, bias in zip(net[0], net[1], strict=True):
        z = F.relu(z @ weight + bias)
    return z @ net[2] + net[3]


def concatenated(hidden: Tensor, first: Tensor, net: Network) -> Tensor:
    """As a user writes it first: both states of every pair side by side, then linear layers."""
    n = hidden.shape[-2]
    pairs = torch.cat([hidden.unsqueeze(-2).expand(-1, -1, n, -1), hidden.unsqueeze(-3).expand(-1, n, -1, -1)], -1)
    z = F.relu(pairs @ first)
    for weight, bias in zip(net[0], net[1], strict=True):
        z = F.relu(z @ weight + bias)
    return z @ net[2] + net[3]


def check_pairs(report: Report) -> None:
    n, device = report.sizes.checked, report.device
    mask = torch.rand(2, n, device=device) < 0.8
    first = report.sizes.networks[0]
    deepest = (*first, 64, 32)
    for widths in (*report.sizes.networks, (*first, 64), deepest):
        for dtype, precision, bound in (
            (torch.bfloat16, "bf16", 2e-2),
            (torch.float32, "tf32", 5e-3),
            (torch.float32, "fp32", 2e-5),
        ):
            u, v = torch.randn(2, 2, n, widths[0], device=device).to(dtype)
            net = network(widths, device, dtype)
            case = f"{'/'.join(map(str, widths))} {precision}"
            options = {"mask": mask, "symmetry": "mean"}
            got = ops.pairwise_mlp(u, v, *net, precision=precision, backend="triton", **options)
            expected = reference.pairwise_mlp(u.double(), v.double(), *exact(net), **options)
            report.check("pairwise_mlp", case, got, expected, bound)
            check_pair_gradients(report, case, u, v, net, precision, 10 * bound, options)
            if widths not in (first, deepest):
                continue  # every layout compiles kernels of its own
            rows = torch.randint(0, n, (2, 5), device=device)
            got = ops.pairwise_mlp_rows(u, v, *net, rows, precision=precision, backend="triton", **options)
            report.check("pairwise_mlp_rows", case, got, expected[torch.arange(2, device=device)[:, None], rows], bound)
            got = ops.pairwise_mlp_band(u, v, *net, 4, precision=precision, backend="triton", **options)
            banded = reference.pairwise_mlp_band(u.double(), v.double(), *exact(net), 4, **options)
            report.check("pairwise_mlp_band", case, got, banded, bound)


def check_pair_gradients(
    report: Report, case: str, u: Tensor, v: Tensor, net: Network, precision: str, bound: float, options: dict[str, Any]
) -> None:
    gradients = []
    for to, module, extra in (
        (lambda x: x.clone(), ops, {"precision": precision, "backend": "triton"}),
        (lambda x: x.double(), reference, {}),
    ):
        weights, biases, w_out, b_out = [[to(w) for w in net[0]], [to(b) for b in net[1]], to(net[2]), to(net[3])]
        leaves = [to(u), to(v), *weights, *biases, w_out]
        for leaf in leaves:
            leaf.requires_grad_()
        module.pairwise_mlp(*leaves[:2], weights, biases, w_out, b_out, **options, **extra).mean().backward()
        gradients.append([leaf.grad for leaf in leaves])
    scale = [b.abs().max().clamp_min(1e-30) for b in gradients[1]]  # each against its own largest entry
    got, expected = ([g / s for g, s in zip(grads, scale, strict=True)] for grads in gradients)
    report.check("pairwise_mlp_backward", case, got, expected, bound)


def check_rows(report: Report) -> None:
    device = report.device
    for rows, n_v in report.sizes.vocabularies:
        x = torch.randn(min(rows, 64), n_v, device=device) * 3
        x[0, ::2] = -torch.inf
        x[1] = torch.nan
        report.check(
            "token_stats", f"V {n_v}", ops.token_stats(x, backend="triton"), reference.token_stats(x.double()), 1e-5
        )
        k = torch.randn(4, min(rows, 16), n_v, device=device) * 3
        weights = torch.rand(k.shape[:2], device=device)
        for op, args in (
            ("expected_entropy", ()),
            ("expected_kl", (k[-1],)),
            ("mixture_entropy", ()),
            ("mixture_stats", (k[-1],)),
        ):
            got = getattr(ops, op)(k, weights, *args, backend="triton")
            expected = getattr(reference, op)(k.double(), weights.double(), *(a.double() for a in args))
            report.check(op, f"V {n_v}", got, expected, 2e-5)
    rows, d, n_v = report.sizes.head
    hidden, weight = (torch.randn(a, d, device=device).bfloat16() / d**0.25 for a in (min(rows, 32), n_v))
    expected = reference.token_stats(hidden.double() @ weight.double().T)
    report.check(
        "linear_token_stats", f"V {n_v}", ops.linear_token_stats(hidden, weight, backend="triton"), expected, 1e-4
    )
    layers = (
        [torch.randn(d, 64, device=device) / d**0.5, torch.randn(64, 8, device=device)],
        [torch.randn(64, device=device), torch.randn(8, device=device)],
    )
    dense = (hidden.double() @ layers[0][0].double() + layers[1][0]).relu() @ layers[0][1].double() + layers[1][1]
    report.check("mlp", f"D {d}", ops.mlp(hidden, *layers, backend="triton"), dense, 1e-4)


def check_selections(report: Report) -> None:
    """Bit for bit against the CPU."""
    n, device = report.sizes.checked, report.device
    entropy, mi, mask = torch.rand(4, n), torch.randn(4, n, n) * 0.1, torch.rand(4, n) < 0.8
    given, masked = [x.to(device) for x in (entropy, mi)], mask.to(device)
    for order in ("entropy", "cheapest"):
        options = {"gamma": n / 20, "order": order}
        got = ops.select_budget(*given, mask=masked, backend="triton", **options)
        expected = ops.select_budget(entropy, mi, mask=mask, backend="torch", **options)
        report.check("select_budget", order, [x.cpu() for x in got], expected, 0.0)
    got = ops.select_threshold(*given, tau=0.1, mask=masked, backend="triton")
    expected = ops.select_threshold(entropy, mi, tau=0.1, mask=mask, backend="torch")
    report.check("select_threshold", "tau 0.1", [x.cpu() for x in got], expected, 0.0)
    got = ops.color(given[1], tau=0.2, mask=masked, backend="triton").cpu()
    report.check("color", "tau 0.2", got, ops.color(mi, tau=0.2, mask=mask, backend="torch"), 0.0)


def time_peaks(report: Report) -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and FLOP a second of a bf16 product of random numbers."""
    size, side = report.sizes.copied, report.sizes.square
    source, target = torch.empty(2, size // 2, dtype=torch.uint8, device=report.device)
    copy = size / report.cold(lambda: target.copy_(source))
    a, b = torch.randn(2, side, side, device=report.device).bfloat16()
    product = 2 * side**3 / report.cold(lambda: a @ b)
    report.add("peak", "copy", f"{size} bytes", "torch", copy / 1e9, "GB/s")
    report.add("peak", "matmul", f"{side} bf16", "torch", product / 1e12, "TFLOP/s")
    return copy, product


def time_pairs(report: Report, peak: float) -> None:
    compiled = torch.compile(split)
    for widths in report.sizes.networks:
        for n in report.sizes.timed:
            u, v = torch.randn(2, 1, n, widths[0], device=report.device).bfloat16()
            net = network(widths, report.device, torch.bfloat16)
            first = torch.randn(2 * widths[0], widths[0], device=report.device).bfloat16() / widths[0] ** 0.5
            prepared = ops.prepare_pairwise(*net, precision="bf16", backend="triton")
            case = f"{'/'.join(map(str, widths))} N {n}"

            def ours(
                symmetry: str, u: Tensor = u, v: Tensor = v, net: Network = net, prepared: Any = prepared
            ) -> Tensor:
                return ops.pairwise_mlp(u, v, *net, symmetry=symmetry, prepared=prepared)

            ways: dict[str, Run] = {
                "triton none": lambda ours=ours: ours("none"),
                "triton upper": lambda ours=ours: ours("upper"),
                "torch split": lambda u=u, v=v, net=net: split(u, v, net),
                "torch concatenation": lambda u=u, f=first, net=net: concatenated(u, f, net),
            }
            if report.device.type == "cuda":
                ways["torch.compile split"] = lambda u=u, v=v, net=net: compiled(u, v, net)
            with torch.no_grad():
                report.time("pairwise_mlp", case, ways)
                report.time(
                    "pairwise_mlp", case, {"triton upper, graph": lambda ours=ours: ours("upper")}, report.replayed
                )
            seconds = report.rows[-len(ways) - 1]["value"] / 1e3
            useful = 2 * n * n * widths[0] * widths[1]
            report.add("rate", "pairwise_mlp", case, "triton none", 100 * useful / seconds / peak, "% of matmul")
            leaves = [u.float().requires_grad_(), v.float().requires_grad_()]

            def step(backend: str, leaves: list[Tensor] = leaves, net: Network = net) -> None:
                ops.pairwise_mlp(*leaves, *net, precision="bf16", backend=backend).sum().backward()

            report.time(
                "pairwise_mlp forward and backward",
                case,
                {"triton": lambda s=step: s("triton"), "torch tiled": lambda s=step: s("torch")},
            )


def time_rows(report: Report, peak: float) -> None:
    for rows, n_v in report.sizes.vocabularies:
        x = torch.randn(rows, n_v, device=report.device).bfloat16()
        case = f"{rows} x {n_v} bf16"

        def torch_entropy(x: Tensor = x) -> Tensor:
            log_p = x.float().log_softmax(-1)
            return -(log_p.exp() * log_p).sum(-1)

        report.time("entropy", case, {"triton": lambda x=x: ops.entropy(x, backend="triton"), "torch": torch_entropy})
        seconds = report.rows[-2]["value"] / 1e3
        report.add("rate", "entropy", case, "triton", 100 * x.numel() * 2 / seconds / peak, "% of copy")
        report.time("token_stats", case, {"triton": lambda x=x: ops.token_stats(x, backend="triton")})
    rows, d, n_v = report.sizes.head
    hidden, weight = (torch.randn(a, d, device=report.device).bfloat16() / d**0.25 for a in (rows, n_v))
    ways = {
        "triton": lambda: ops.linear_token_stats(hidden, weight, backend="triton"),
        "torch, then triton": lambda: ops.token_stats(hidden @ weight.T, backend="triton"),
    }
    report.time("linear_token_stats", f"{rows} x {d} x {n_v}", ways)


def time_step(report: Report) -> None:
    """What a decoding step adds to a model's pass: statistics, scores and a selection, as one graph."""
    n, widths = report.sizes.timed[min(1, len(report.sizes.timed) - 1)], report.sizes.networks[0]
    logits = torch.randn(1, n, report.sizes.vocabularies[0][1], device=report.device).bfloat16()
    u, v = torch.randn(2, 1, n, widths[0], device=report.device).bfloat16()
    net = network(widths, report.device, torch.bfloat16)
    mask = torch.rand(1, n, device=report.device) < 0.7
    prepared = ops.prepare_pairwise(*net, precision="bf16", backend="triton")

    def step() -> ops.Selection:
        stats = ops.token_stats(logits, backend="triton")
        return ops.score_and_select(stats.entropy, u, v, *net, gamma=2.0, mask=mask, prepared=prepared)

    report.time("MI step", f"N {n}", {"triton": step})
    report.time("MI step", f"N {n}", {"triton, graph": step}, report.replayed)


def ratios(report: Report) -> None:
    """The table: how many times as long every other way takes."""
    print(f"\n{'op and case':58} {'way':24} times as long as triton")
    times = [row for row in report.rows if row["kind"] == "time"]
    for row in times:
        ours = next(r for r in times if (r["op"], r["case"]) == (row["op"], row["case"]))
        if row is not ours:
            print(
                f"{row['op'] + ' ' + row['case']:58} {row['way']:24} {row['value'] / ours['value']:8.2f} {row['note']}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes under Triton's interpreter")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the CSV file")
    options = parser.parse_args()
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error("there is no GPU here; --rehearse runs without one")
    device = torch.device("cpu" if options.rehearse else "cuda")
    card = "rehearsal" if options.rehearse else torch.cuda.get_device_name()
    torch.manual_seed(0)
    report = Report(device, card, REHEARSAL if options.rehearse else Sizes())
    begin = time.perf_counter()
    check_pairs(report)
    check_rows(report)
    check_selections(report)
    if report.wrong:
        sys.exit(f"wrong, so nothing is timed: {', '.join(report.wrong)}")
    copy, product = time_peaks(report)
    time_rows(report, copy)
    time_pairs(report, product)
    time_step(report)
    ratios(report)
    print(f"\n{time.perf_counter() - begin:.0f} s on {card}")
    path = options.output / f"gpu_{re.sub(r'[^A-Za-z0-9]+', '_', card)}.csv"
    write_table(path, report.rows[0], report.rows)
    print(path)


if __name__ == "__main__":
    main()
