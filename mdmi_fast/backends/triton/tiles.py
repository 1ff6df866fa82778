"""How the pair kernels are cut into tiles: one table, keyed by architecture, precision and width of the network.

The choices come from `python -m benchmarks.static_report`, which compiles the alternatives for every architecture. None
depends on the number of positions or sequences, so a pair is summed the same way in any batch.
"""

from typing import NamedTuple

from mdmi_fast.backends.triton._common import Tile


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


def is_half(precision: str) -> bool:
    return precision in ("bf16", "fp16")


def kind_of(direction: str, precision: str, widths: tuple[int, int, int]) -> str:
    """What the table calls a network of widths H1, H2 and H3, 0 where there is no such layer."""
    _, h2, h3 = widths
    kind = "half" if is_half(precision) else precision
    if h3:
        return f"{kind}, two layers"
    narrow = direction == "forward" and kind == "half" and h2 <= 128
    return f"{kind}, narrow" if narrow else kind


def tile_of(direction: str, target: str, kind: str) -> PairTile:
    """The choice for a target's launches: "forward", "backward" (gradients of u and v) or "weights" (those of the network)."""
    table = {"forward": FORWARD, "backward": BACKWARD, "weights": WEIGHTS}[direction]
    return SPECIAL.get((direction, target, kind)) or table[kind]
