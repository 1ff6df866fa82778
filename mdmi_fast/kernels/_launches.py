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


LAST_LAYER = 256
GRADIENT_INPUTS = 128

def forward(device, precision, h1, h2, h3):
    return PairTile(8, 16, 64, 256 if not h3 else 64, Tile(8, 3)) if precision in ("bf16", "fp16") else PairTile(8, 8, 32, 64, Tile(8, 1))

def backward(device, precision, h1, h2):
    return PairTile(8, 8, 64, 128, Tile(8, 2)) if precision in ("bf16", "fp16") else PairTile(4, 8, 32, 64, Tile(8, 1))
