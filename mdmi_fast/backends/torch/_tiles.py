"""How large a temporary may be, and how rows are cut into tiles of that size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements of one temporary: 1 MiB of float32 stays in a CPU core's second-level cache; a GPU wants enough work per launch.
_CPU_ELEMENTS = 1 << 18
_GPU_ELEMENTS = 1 << 24

# torch splits a sum that has a single result over threads from 32,768 elements on: pieces below that, and
# a row has the same sum alone and in a batch.
_SUM_PIECE = 1 << 14


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def tile_rows(width: int, device: torch.device) -> int:
    """Rows of `width` elements that make one tile, at least one."""
    return max(1, (_CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS) // max(width, 1))


def row_tiles(lead: torch.Size, width: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tiles of rows of tensors that share their leading dimensions: views [r, ...] of each, whatever the strides.

    Args:
        lead: the shared leading dimensions.
        width: elements that one row needs.
        tensors: [*lead, ...] each.
    """
    try:
        flat = [t.view(lead.numel(), *t.shape[len(lead) :]) for t in tensors]
    except RuntimeError:  # these strides cannot be one dimension
        for parts in zip(*(t.unbind(0) for t in tensors), strict=True):
            yield from row_tiles(lead[1:], width, *parts)
        return
    step = tile_rows(width, tensors[0].device)
    for start in range(0, lead.numel(), step):
        yield tuple(t[start : start + step] for t in flat)


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension that does not depend on how many rows there are."""
    first, *others = (piece.sum(-1) for piece in torch.split(x, _SUM_PIECE, -1))
    for other in others:
        first = first + other
    return first
