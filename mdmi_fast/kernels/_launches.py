"""How the pair kernels are cut into tiles: one table, keyed by architecture, precision and width of the network.

The choices come from `python -m benchmarks.static_report`, which compiles the alternatives for every architecture and says why
these were kept. No choice depends on the number of positions or sequences: a pair is summed the same way in any batch.
"""

from typing import NamedTuple

from mdmi_fast.kernels._common import Tile


class PairTile(NamedTuple):
    """A tile of i x j pairs; k inputs of a layer at a time, at most n outputs of it in registers."""

    i: int
    j: int
    k: int
    n: int
    tile: Tile


HALF, SINGLE = "half", "single"
"""Precisions alike: bf16 and fp16; tf32 and fp32."""

# (target, precision, whether a layer is wider than 128): tile.
FORWARD = {}
BACKWARD = {}
