"""One decoding step of a long sequence within a window: its time and its memory; python benchmarks/long_sequences.py.

20,000 positions, all masked, pairs at most 64 apart. The states are drawn at random: the model
itself is not part of the figures. Memory is the peak of the process over what it held before the step.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from pathlib import Path

import torch

from mdmi_fast import MIBudget, PairwiseMIEstimator, ops, set_num_threads
from mdmi_fast.bench.report import write_table
from mdmi_fast.estimator import Windowed

RESULTS = Path(__file__).parent / "results" / "long_sequences.csv"
N, WINDOW, WIDTH, VOCABULARY = 20_000, 64, 256, 33


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@torch.no_grad()
def step(layers: tuple[int, ...], weight: float, gamma: float) -> tuple[float, float, float, int]:
    """Seconds of the whole step and of the selection alone, MB, and positions taken."""
    torch.set_num_threads(1)
    set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    estimator = PairwiseMIEstimator(WIDTH, layers=layers).eval()
    policy = MIBudget(Windowed(estimator, WINDOW), gamma=gamma, entropy_weight=weight)
    logits = 4 * torch.randn(1, N, VOCABULARY, generator=generator)
    hidden, mask = torch.randn(1, N, WIDTH, generator=generator), torch.ones(1, N, dtype=torch.bool)
    before = peak_mb()
    start = time.perf_counter()
    stats = ops.token_stats(logits)
    taken = policy.select(stats, hidden, mask, 0)
    seconds = time.perf_counter() - start
    memory = peak_mb() - before
    band = estimator.band(hidden[:, :1000], mask[:, :1000], WINDOW).repeat(1, N // 1000, 1)
    start = time.perf_counter()
    ops.select_budget_band(stats.entropy, band, gamma=gamma, entropy_weight=weight, mask=mask)
    return seconds, time.perf_counter() - start, memory, int(taken.selected.sum())


def main() -> None:
    rows = []
    print(f"{'layers':<12}{'entropy_weight':>15}{'gamma':>8}{'step s':>9}{'selection s':>13}{'MB':>7}{'taken':>7}")
    for layers, weight, gamma in [((64, 32), 0.0, 2.0), ((256, 128), 0.0, 2.0), ((512, 256), 1.0, 2.0)]:
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a process of its own, for its peak of memory
            seconds, selection, memory, taken = pool.apply(step, (layers, weight, gamma))
        name = "/".join(map(str, layers))
        print(f"{name:<12}{weight:>15g}{gamma:>8g}{seconds:>9.2f}{selection:>13.3f}{memory:>7.0f}{taken:>7}")
        rows.append((name, weight, gamma, N, WINDOW, f"{seconds:.3f}", f"{selection:.4f}", f"{memory:.0f}", taken))
    columns = [
        "layers",
        "entropy_weight",
        "gamma",
        "n",
        "window",
        "step_seconds",
        "selection_seconds",
        "peak_mb",
        "taken",
    ]
    write_table(RESULTS, columns, rows)


if __name__ == "__main__":
    main()
