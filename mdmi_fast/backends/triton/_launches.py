"""How the pair kernels are cut into tiles: one table, keyed by architecture, precision and width of the network.

The choices come from `python -m benchmarks.static_report`, which compiles the alternatives for every architecture. None
depends on the number of positions or sequences, so a pair is summed the same way in any batch. Nothing is measured in normal
use; inside `mdmi_fast.tune` the candidates of a key are, once.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from mdmi_fast.backends.triton import _common
from mdmi_fast.backends.triton._common import Tile
from mdmi_fast.files import read_json, replace_file


class PairTile(NamedTuple):
    """A tile of i x j pairs; at most k inputs and n outputs of a layer at a time, and `last` outputs of the second of two layers."""

    i: int
    j: int
    k: int
    n: int
    tile: Tile
    last: int = 256


GRADIENT_INPUTS = 128
"""Inputs of the tile of a weight's gradient that one program holds."""

# Half precision: 128 pairs and all outputs of the layer at once, so that activations are formed once and weights are read once
# for 128 pairs. fp32 has no tensor cores on NVIDIA: 4 warps, because a thread with more sums loads less for each and, with
# registers for 8 warps, spills on sm_90 and sm_100. "narrow": at most 128 outputs.
FORWARD = {
    "half": PairTile(8, 16, 64, 256, Tile(8, 3)),
    "half, narrow": PairTile(8, 16, 64, 128, Tile(8, 3)),
    "half, two layers": PairTile(8, 16, 64, 64, Tile(8, 2)),
    "tf32": PairTile(8, 16, 32, 128, Tile(8, 3)),
    "tf32, two layers": PairTile(8, 16, 32, 64, Tile(8, 2), last=128),
    "fp32": PairTile(8, 8, 32, 64, Tile(4, 1)),
    "fp32, two layers": PairTile(8, 8, 32, 32, Tile(8, 1), last=64),
}
BACKWARD = {
    "half": PairTile(8, 8, 64, 128, Tile(8, 2)),
    "tf32": PairTile(8, 8, 32, 64, Tile(8, 2)),
    "fp32": PairTile(4, 8, 32, 64, Tile(4, 1)),
}
# Beside a tile of pairs these hold one of a weight's gradient.
WEIGHTS = {
    "half": PairTile(8, 8, 64, 64, Tile(8, 2)),
    "tf32": PairTile(8, 8, 32, 64, Tile(8, 2)),
    "fp32": PairTile(4, 8, 32, 32, Tile(8, 1)),
}
# Where a target needs another choice than the general one, because that one would spill or take too much shared memory there.
SPECIAL = {
    # 64 inputs at a time spill
    ("forward", "sm_80", "half"): PairTile(8, 16, 32, 256, Tile(8, 3)),
    ("forward", "sm_80", "half, two layers"): PairTile(8, 16, 32, 64, Tile(8, 2), last=128),
    # 128 x 256 sums do not fit in registers when they come out of tensor memory
    ("forward", "sm_100", "half"): PairTile(16, 16, 32, 128, Tile(8, 2)),
    # 256 pairs of a narrow layer fit, and keep the tensor cores busier: more products for each instruction that forms activations
    ("forward", "sm_100", "half, narrow"): PairTile(16, 16, 64, 128, Tile(8, 3)),
    ("forward", "gfx942", "half, narrow"): PairTile(16, 16, 64, 128, Tile(8, 2)),
    ("forward", "sm_100", "half, two layers"): PairTile(8, 16, 32, 64, Tile(8, 2), last=128),
    # three stages take more than its 64 KiB of shared memory
    ("forward", "gfx942", "half"): PairTile(8, 16, 64, 256, Tile(8, 2)),
    ("forward", "gfx942", "tf32"): PairTile(8, 8, 32, 128, Tile(8, 2)),
}

_CANDIDATES = {
    "half": [
        (i, j, k, n, Tile(warps, stages))
        for i, j in ((8, 8), (8, 16), (16, 16))
        for k in (32, 64)
        for n in (128, 256)
        for warps in (4, 8)
        for stages in (2, 3)
    ],
    "single": [
        (i, j, 32, n, Tile(warps, stages))
        for i, j in ((4, 8), (8, 8), (8, 16))
        for n in (64, 128)
        for warps in (4, 8)
        for stages in (1, 2)
    ],
}

_tuned: dict[str, PairTile] = {}
_tuning = False
_forced: PairTile | None = None


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def pair_tile(
    direction: str, device: torch.device, precision: str, widths: tuple[int, int, int], run: Callable[[PairTile], None]
) -> PairTile:
    """The tile of a launch.

    Args:
        direction: "forward", "backward" (gradients of u and v) or "weights" (those of the network).
        device: of the tensors.
        precision: of the products.
        widths: H1, H2 and H3, 0 where there is no such layer.
        run: launches with a tile; called only inside `mdmi_fast.tune`.
    """
    group = "half" if precision in ("bf16", "fp16") else precision
    if widths[2]:
        group += ", two layers"
    elif direction == "forward" and group == "half" and widths[1] <= 128:
        group += ", narrow"
    if _forced is not None:
        return _forced
    if _tuned or _tuning:
        key = f"{_card(device)}: {direction}, {group}, {widths[0]}/{widths[1]}/{widths[2]}"
        if _tuning and key not in _tuned:
            _tuned[key] = _fastest(device, "half" if precision in ("bf16", "fp16") else "single", run)
        if key in _tuned:
            return _tuned[key]
    table = {"forward": FORWARD, "backward": BACKWARD, "weights": WEIGHTS}[direction]
    return SPECIAL.get((direction, _common.target_name(device), group)) or table[group]


def _seconds(device: torch.device, run: Callable[[], None]) -> float:
    """Median of five runs after one that compiles."""
    run()
    times = []
    for _ in range(5):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _fastest(device: torch.device, kind: str, run: Callable[[PairTile], None]) -> PairTile:
    times = {}
    for candidate in (PairTile(*values) for values in _CANDIDATES[kind]):
        try:
            times[candidate] = _seconds(device, lambda tile=candidate: run(tile))
        except triton.runtime.errors.OutOfResources:
            continue  # this card has not the shared memory or registers for it
    return min(times, key=times.__getitem__)


def load(path: Path) -> None:
    """Load the choices of tiles that `save` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    rows = read_json(path, "not the choices of `tune`")
    if not isinstance(rows, dict) or not all(_is_tile(row) for row in rows.values()):
        raise ValueError(f"{path}: not the choices of `tune`: expected an object of lists of six numbers >= 1")
    for key, (*sizes, warps, stages) in rows.items():
        _tuned[key] = PairTile(*sizes, Tile(warps, stages))


def _is_tile(row: object) -> bool:
    return isinstance(row, list) and len(row) == 6 and all(type(number) is int and number >= 1 for number in row)


def save(path: Path) -> None:
    rows = {key: [*tile[:4], tile.tile.warps, tile.tile.stages] for key, tile in sorted(_tuned.items())}
    with replace_file(path) as temporary:
        temporary.write_text(json.dumps(rows, indent=1) + "\n")


@contextmanager
def measured() -> Iterator[None]:
    """Launches of the block whose key is unknown are measured with every candidate."""
    global _tuning
    _tuning = True
    try:
        yield
    finally:
        _tuning = False


@contextmanager
def forced(tile: PairTile) -> Iterator[None]:
    """Every pair launch of the block takes this tile: to look at one choice alone."""
    global _forced
    _forced = tile
    try:
        yield
    finally:
        _forced = None
