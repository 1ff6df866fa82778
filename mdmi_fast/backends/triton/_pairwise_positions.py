"""Lists of the masked positions of every sequence, which say what pairs the kernels look at."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.triton import _common

_BLOCK = 1024


@triton.jit(do_not_specialize=["n", "mask_b"])
def _positions_kernel(mask_ptr, positions_ptr, n, mask_b, mask_n, BLOCK: tl.constexpr):
    """The masked positions of a sequence, ascending, then -1."""
    b = tl.program_id(0).to(tl.int64)
    found = 0
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        masked = tl.load(mask_ptr + b * mask_b + i.to(tl.int64) * mask_n, mask=i < n, other=0).to(tl.int32)
        place = found + tl.cumsum(masked, 0) - 1
        tl.store(positions_ptr + b * n + place, i, mask=masked != 0)
        found += tl.sum(masked, 0)
    for start in range(found, n, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(positions_ptr + b * n + place, -1, mask=place < n)


@triton.jit
def listed(list_ptr, place, n_list):
    """Positions at some places of a list, -1 at places outside; no list: the places themselves."""
    inside = (place >= 0) & (place < n_list)
    if list_ptr is None:
        position = tl.where(inside, place, -1)
    else:
        position = tl.load(list_ptr + place, mask=inside, other=-1)
    return position


def masked_positions(mask: Tensor | None) -> Tensor | None:
    """The masked positions of every sequence [B, N] int32, ascending, then -1; None if all are."""
    if mask is None:
        return None
    positions = torch.empty(mask.shape, dtype=torch.int32, device=mask.device)
    batch, n = mask.shape
    args = (mask, positions, n, *mask.stride())
    _common.launch(_positions_kernel, batch if n else 0, _common.Tile(warps=4), *args, BLOCK=_BLOCK)
    return positions
