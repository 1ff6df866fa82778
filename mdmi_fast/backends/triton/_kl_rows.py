"""What the kernels of `kl` and `_mixture` share: alternatives with their weights, and the sums over whole rows.

Alternatives are views [outer, inner, K, V] beside rows [outer, inner, V]; the parts of a row are its alternatives.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.triton import _common
from mdmi_fast.backends.triton._common import (
    LOWEST,
    above_floor,
    actual,
    defined,
    load_logits,
    merge_sums,
    row_ptrs,
    row_tile,
    row_views,
    sizes_of,
    tile_sums,
    view_of,
)

UNIT = tl.constexpr(2.0**-34)
"""Log ratios are held in units of 1 / UNIT: the sum of any number of them over finite logits is finite, also where a ratio exceeds
float32. Scaling by a power of two is exact, so nothing else is rounded otherwise."""


@triton.jit
def weight_of(w, row, k, inside, sizes, ACC: tl.constexpr):
    """Weights of alternative k; 1 where there are none."""
    if w is None:
        weight = tl.full(row.shape, 1.0, ACC)
    else:
        weight = tl.load(row_ptrs(w, row, sizes) + k * actual(w.k), mask=inside, other=0.0).to(ACC)
    return weight


class Rows(NamedTuple):
    """Rows of logits: where each begins [R, 1], and how far apart its entries are."""

    ptrs: Any
    v: Any


@triton.jit
def entropy_rows(x, inside, n_v, ACC: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of whole rows."""
    ROWS: tl.constexpr = inside.shape[0]
    top, total, weighted = tl.full((ROWS,), -float("inf"), ACC), tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC)
    for start in range(0, n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        tile = load_logits(x.ptrs + columns[None, :] * x.v, inside[:, None] & (columns < n_v)[None, :], ACC)
        tile_top, tile_total, tile_weighted = tile_sums(tile)
        top, total, weighted = merge_sums(top, total, weighted, tile_top, tile_total, tile_weighted)
    return top, total, weighted


@triton.jit
def in_units(x, base, ACC: tl.constexpr):
    """(x - base) UNIT, in which -inf is a number that no finite logit comes near."""
    FLOOR: tl.constexpr = -1e300 if tl.float64 == ACC else -1e30
    return tl.maximum(x * UNIT - base * UNIT, FLOOR)


@triton.jit
def kl_rows(p, q, inside, n_v, ACC: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over whole rows of logits of p and q: top, total and weighted of p; cross, the sum of
    exp(x - top_p) ((x - top_p) - (y - top_q)) in units; top and total of q; and whether p > 0 where q = 0.
    """
    ROWS: tl.constexpr = inside.shape[0]
    nothing, zero = tl.full((ROWS,), -float("inf"), ACC), tl.zeros((ROWS,), ACC)
    top_p, total_p, weighted, cross, top_q, total_q, escaped = nothing, zero, zero, zero, nothing, zero, zero
    for start in range(0, n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < n_v)[None, :]
        x = load_logits(p.ptrs + columns[None, :] * p.v, within, ACC)
        y = load_logits(q.ptrs + columns[None, :] * q.v, within, ACC)
        new_p, new_q = tl.maximum(top_p, tl.max(x, 1)), tl.maximum(top_q, tl.max(y, 1))
        base_p, base_q = above_floor(new_p), above_floor(new_q)
        shift_p = top_p - base_p
        scale_p = tl.exp(shift_p)
        shifted_x = x - base_p[:, None]
        e = tl.exp(shifted_x)
        weighted = scale_p * (weighted + tl.maximum(shift_p, LOWEST) * total_p)
        weighted += tl.sum(e * tl.maximum(shifted_x, LOWEST), 1)
        shift = in_units(top_p, base_p, ACC) - in_units(top_q, base_q, ACC)
        ratio = in_units(x, base_p[:, None], ACC) - in_units(y, base_q[:, None], ACC)
        cross = scale_p * (cross + shift * total_p) + tl.sum(e * ratio, 1)
        total_p = scale_p * total_p + tl.sum(e, 1)
        total_q = tl.exp(top_q - base_q) * total_q + tl.sum(tl.exp(y - base_q[:, None]), 1)
        infinite = (y == -float("inf")) & (x != -float("inf"))
        escaped = tl.maximum(escaped, tl.max(infinite.to(ACC), 1))
        top_p, top_q = new_p, new_q
    return top_p, total_p, weighted, cross, top_q, total_q, escaped


@triton.jit
def kl_value(total_p, cross, total_q, escaped):
    """KL in units."""
    total_p, total_q = defined(total_p), defined(total_q)
    kl = cross / total_p - (tl.log(total_p) - tl.log(total_q)) * UNIT
    kl = tl.where(kl < 0, 0.0, kl)
    return tl.where((escaped > 0) & (total_p == total_p) & (total_q == total_q), float("inf"), kl)


def alternatives(lead: torch.Size, logits: Tensor, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views [outer, inner, K, V] of logits [K, *lead, V], and [outer, inner, ...] of rows [*lead, ...]."""
    return row_views(lead, logits.movedim(0, -2), *rows)


def launch(kernel, x: Tensor, acc: tl.dtype, *args: object, per_alternative: bool = False) -> None:
    """One program for each block of rows of x [outer, inner, K, V], or for each block and alternative; takes x, args and sizes."""
    outer, inner, n_k, n_v = x.shape
    tile = row_tile(n_v, acc)
    n_programs = triton.cdiv(outer * inner, tile.rows) * (n_k if per_alternative else 1)
    args = (view_of(x, "kv"), *args, sizes_of(x, n_k))
    _common.launch(kernel, n_programs, tile.tile, *args, ACC=acc, ROWS=tile.rows, COLUMNS=tile.columns)
