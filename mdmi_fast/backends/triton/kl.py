"""KL divergence, and the reductions over K alternatives: a program takes some rows and goes through their alternatives in order.

Alternatives are views [outer, inner, K, V] beside rows [outer, inner, V], so one kernel serves `kl_divergence` (K = 1, no
weights) and `expected_kl`.

Log ratios are held in units of 1 / UNIT: the sum of any number of them over finite logits is finite, also where a ratio exceeds
float32. Scaling by a power of two is exact, so nothing else is rounded otherwise.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.triton import _common
from mdmi_fast.backends.triton._common import (
    LOWEST,
    RowTile,
    above_floor,
    accumulator,
    defined,
    entropy_of,
    load_logits,
    merge_sums,
    product,
    rounded,
    row_offset,
    row_strides,
    row_tile,
    row_views,
    tile_sums,
    torch_dtype,
)
from mdmi_fast.backends.triton.stats import entropy_backward

UNIT = tl.constexpr(2.0**-34)

# Sizes and strides that differ from call to call; the others belong to a model and may be compiled in.
_VARYING = ["n_rows", "n_inner", "n_k", "x_outer", "w_outer", "y_outer", "out_outer", "x_k", "w_k", "out_k"]


@triton.jit
def _weight(w_ptr, row, k, inside, n_inner, w_outer, w_inner, w_k, ACC: tl.constexpr):
    """Weights of alternative k; 1 where there are none."""
    if w_ptr is None:
        weight = tl.full(row.shape, 1.0, ACC)
    else:
        offsets = row_offset(row, n_inner, w_outer, w_inner) + k * w_k
        weight = tl.load(w_ptr + offsets, mask=inside, other=0.0).to(ACC)
    return weight


@triton.jit
def _entropy_rows(x_ptrs, inside, n_v, x_v, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of whole rows."""
    top, total, weighted = tl.full((ROWS,), -float("inf"), ACC), tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC)
    for start in range(0, n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        x = load_logits(x_ptrs + columns[None, :] * x_v, inside[:, None] & (columns < n_v)[None, :], ACC)
        tile_top, tile_total, tile_weighted = tile_sums(x)
        top, total, weighted = merge_sums(top, total, weighted, tile_top, tile_total, tile_weighted)
    return top, total, weighted


@triton.jit(do_not_specialize=_VARYING)
def _expected_entropy_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    n_rows,
    n_inner,
    n_k,
    n_v,
    x_outer,
    x_inner,
    x_k,
    x_v,
    w_outer,
    w_inner,
    w_k,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_ptrs = x_ptr + row_offset(row, n_inner, x_outer, x_inner)[:, None]
    result = tl.zeros((ROWS,), ACC)
    for i in range(n_k):
        k = tl.cast(i, tl.int64)
        _, total, weighted = _entropy_rows(x_ptrs + k * x_k, inside, n_v, x_v, ACC, ROWS, COLUMNS)
        weight = _weight(w_ptr, row, k, inside, n_inner, w_outer, w_inner, w_k, ACC)
        result += product(weight, entropy_of(total, weighted))
    tl.store(out_ptr + row, result.to(tl.float32), mask=inside)


@triton.jit
def _in_units(x, base, ACC: tl.constexpr):
    """(x - base) UNIT, in which -inf is a number that no finite logit comes near."""
    FLOOR: tl.constexpr = -1e300 if tl.float64 == ACC else -1e30
    return tl.maximum(x * UNIT - base * UNIT, FLOOR)


@triton.jit
def _kl_rows(x_ptrs, y_ptrs, inside, n_v, x_v, y_v, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over whole rows of p (logits x) and q (logits y): top, total and weighted of p; cross, the sum of
    exp(x - top_p) ((x - top_p) - (y - top_q)) in units; top and total of q; and whether p > 0 where q = 0.
    """
    nothing, zero = tl.full((ROWS,), -float("inf"), ACC), tl.zeros((ROWS,), ACC)
    top_p, total_p, weighted, cross, top_q, total_q, escaped = nothing, zero, zero, zero, nothing, zero, zero
    for start in range(0, n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < n_v)[None, :]
        x = load_logits(x_ptrs + columns[None, :] * x_v, within, ACC)
        y = load_logits(y_ptrs + columns[None, :] * y_v, within, ACC)
        new_p, new_q = tl.maximum(top_p, tl.max(x, 1)), tl.maximum(top_q, tl.max(y, 1))
        base_p, base_q = above_floor(new_p), above_floor(new_q)
        shift_p = top_p - base_p
        scale_p = tl.exp(shift_p)
        shifted_x = x - base_p[:, None]
        e = tl.exp(shifted_x)
        weighted = scale_p * (weighted + tl.maximum(shift_p, LOWEST) * total_p)
        weighted += tl.sum(e * tl.maximum(shifted_x, LOWEST), 1)
        shift = _in_units(top_p, base_p, ACC) - _in_units(top_q, base_q, ACC)
        ratio = _in_units(x, base_p[:, None], ACC) - _in_units(y, base_q[:, None], ACC)
        cross = scale_p * (cross + shift * total_p) + tl.sum(e * ratio, 1)
        total_p = scale_p * total_p + tl.sum(e, 1)
        total_q = tl.exp(top_q - base_q) * total_q + tl.sum(tl.exp(y - base_q[:, None]), 1)
        infinite = (y == -float("inf")) & (x != -float("inf"))
        escaped = tl.maximum(escaped, tl.max(infinite.to(ACC), 1))
        top_p, top_q = new_p, new_q
    return top_p, total_p, weighted, cross, top_q, total_q, escaped


@triton.jit
def _kl_value(total_p, cross, total_q, escaped):
    """KL in units."""
    total_p, total_q = defined(total_p), defined(total_q)
    kl = cross / total_p - (tl.log(total_p) - tl.log(total_q)) * UNIT
    kl = tl.where(kl < 0, 0.0, kl)
    return tl.where((escaped > 0) & (total_p == total_p) & (total_q == total_q), float("inf"), kl)


@triton.jit(do_not_specialize=_VARYING)
def _expected_kl_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    out_ptr,
    n_rows,
    n_inner,
    n_k,
    n_v,
    x_outer,
    x_inner,
    x_k,
    x_v,
    w_outer,
    w_inner,
    w_k,
    y_outer,
    y_inner,
    y_v,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_ptrs = x_ptr + row_offset(row, n_inner, x_outer, x_inner)[:, None]
    y_ptrs = y_ptr + row_offset(row, n_inner, y_outer, y_inner)[:, None]
    result = tl.zeros((ROWS,), ACC)
    for i in range(n_k):
        k = tl.cast(i, tl.int64)
        _, total_p, _, cross, _, total_q, escaped = _kl_rows(
            x_ptrs + k * x_k, y_ptrs, inside, n_v, x_v, y_v, ACC, ROWS, COLUMNS
        )
        weight = _weight(w_ptr, row, k, inside, n_inner, w_outer, w_inner, w_k, ACC)
        result += product(weight, _kl_value(total_p, cross, total_q, escaped))
    tl.store(out_ptr + row, (result / UNIT).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _kl_backward_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    grad_ptr,
    dx_ptr,
    sums_ptr,
    n_rows,
    n_inner,
    n_k,
    n_v,
    x_outer,
    x_inner,
    x_k,
    x_v,
    w_outer,
    w_inner,
    w_k,
    y_outer,
    y_inner,
    y_v,
    out_outer,
    out_inner,
    out_k,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (row block, k): the gradient of p's logits, and what that of q's logits needs of alternative k: its
    coefficient (weight times grad, 0 where the KL is not finite), top and total, fields [3, K, row].
    """
    program = tl.program_id(0)
    k = (program % n_k).to(tl.int64)
    row = (program // n_k).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_ptrs = x_ptr + (row_offset(row, n_inner, x_outer, x_inner) + k * x_k)[:, None]
    y_ptrs = y_ptr + row_offset(row, n_inner, y_outer, y_inner)[:, None]
    dx_ptrs = dx_ptr + (row_offset(row, n_inner, out_outer, out_inner) + k * out_k)[:, None]
    top_p, total_p, _, cross, top_q, total_q, escaped = _kl_rows(
        x_ptrs, y_ptrs, inside, n_v, x_v, y_v, ACC, ROWS, COLUMNS
    )
    kl = _kl_value(total_p, cross, total_q, escaped)
    grad = tl.load(grad_ptr + row, mask=inside, other=0.0).to(ACC)
    weight = _weight(w_ptr, row, k, inside, n_inner, w_outer, w_inner, w_k, ACC)
    finite = (kl < float("inf")) & (tl.abs(product(weight, kl) / UNIT) < float("inf"))
    coefficient = tl.where(finite, product(weight, grad), 0.0)
    size = n_rows.to(tl.int64) * n_k
    tl.store(sums_ptr + k * n_rows + row, coefficient, mask=inside)
    tl.store(sums_ptr + size + k * n_rows + row, top_p, mask=inside)
    tl.store(sums_ptr + 2 * size + k * n_rows + row, total_p, mask=inside)
    for start in range(0, n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < n_v)[None, :]
        x = load_logits(x_ptrs + columns[None, :] * x_v, within, ACC)
        y = load_logits(y_ptrs + columns[None, :] * y_v, within, ACC)
        ratio = _in_units(x, top_p[:, None], ACC) - _in_units(y, top_q[:, None], ACC)
        slope = tl.exp(x - top_p[:, None]) / total_p[:, None] * (ratio - (cross / total_p)[:, None])
        dx = tl.where(finite[:, None], product(slope, coefficient[:, None]) / UNIT, 0.0)
        tl.store(dx_ptrs + columns[None, :], rounded(dx, dx_ptr.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=_VARYING)
def _kl_base_backward_kernel(
    x_ptr,
    y_ptr,
    sums_ptr,
    dy_ptr,
    n_rows,
    n_inner,
    n_k,
    n_v,
    x_outer,
    x_inner,
    x_k,
    x_v,
    y_outer,
    y_inner,
    y_v,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient dy [row, V] of q's logits, the sum over k of coefficient_k (q - p_k)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_ptrs = x_ptr + row_offset(row, n_inner, x_outer, x_inner)[:, None]
    y_ptrs = y_ptr + row_offset(row, n_inner, y_outer, y_inner)[:, None]
    top_q, total_q, _ = _entropy_rows(y_ptrs, inside, n_v, y_v, ACC, ROWS, COLUMNS)
    size = n_rows.to(tl.int64) * n_k
    for start in range(0, n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < n_v)[None, :]
        y = load_logits(y_ptrs + columns[None, :] * y_v, within, ACC)
        q = tl.exp(y - top_q[:, None]) / total_q[:, None]
        dy = tl.zeros((ROWS, COLUMNS), ACC)
        for i in range(n_k):
            k = tl.cast(i, tl.int64)
            coefficient = tl.load(sums_ptr + k * n_rows + row, mask=inside, other=0.0)[:, None]
            top_p = tl.load(sums_ptr + size + k * n_rows + row, mask=inside, other=0.0)[:, None]
            total_p = tl.load(sums_ptr + 2 * size + k * n_rows + row, mask=inside, other=1.0)[:, None]
            x = load_logits(x_ptrs + k * x_k + columns[None, :] * x_v, within, ACC)
            dy += product(coefficient, q - tl.exp(x - top_p) / total_p)
        tl.store(dy_ptr + row[:, None] * n_v + columns[None, :], rounded(dy, dy_ptr.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=_VARYING)
def _norms_kernel(
    x_ptr,
    sums_ptr,
    n_rows,
    n_inner,
    n_k,
    n_v,
    x_outer,
    x_inner,
    x_k,
    x_v,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (row block, k): top and total of the rows of alternative k, fields [2, K, row]."""
    program = tl.program_id(0)
    k = (program % n_k).to(tl.int64)
    row = (program // n_k).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_ptrs = x_ptr + (row_offset(row, n_inner, x_outer, x_inner) + k * x_k)[:, None]
    top, total, _ = _entropy_rows(x_ptrs, inside, n_v, x_v, ACC, ROWS, COLUMNS)
    tl.store(sums_ptr + k * n_rows + row, top, mask=inside)
    tl.store(sums_ptr + n_rows.to(tl.int64) * n_k + k * n_rows + row, total, mask=inside)


@triton.jit
def _share(weight, x, top, total):
    """What an alternative adds to the mixture on a tile of its logits."""
    return product(weight[:, None], tl.exp(x - top[:, None]) / defined(total)[:, None])


@triton.jit
def _slope(mixture):
    """-log of the mixture, 0 where that is 0."""
    return tl.where(mixture == 0, 0.0, -tl.log(mixture))


@triton.jit(do_not_specialize=_VARYING)
def _mixture_kernel(
    x_ptr,
    w_ptr,
    sums_ptr,
    out_ptr,
    slope_ptr,
    n_rows,
    n_inner,
    n_k,
    n_v,
    x_outer,
    x_inner,
    x_k,
    x_v,
    w_outer,
    w_inner,
    w_k,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Entropy of the mixture, or its slope -log m [row, V] if slope_ptr is given; rows of one tile need no sums of
    `_norms_kernel`.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_ptrs = x_ptr + row_offset(row, n_inner, x_outer, x_inner)[:, None]
    size = n_rows.to(tl.int64) * n_k
    h = tl.zeros((ROWS,), ACC)
    for start in range(0, n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < n_v)[None, :]
        mixture = tl.zeros((ROWS, COLUMNS), ACC)
        for i in range(n_k):
            k = tl.cast(i, tl.int64)
            x = load_logits(x_ptrs + k * x_k + columns[None, :] * x_v, within, ACC)
            if sums_ptr is None:
                top, total, _ = tile_sums(x)
            else:
                top = tl.load(sums_ptr + k * n_rows + row, mask=inside, other=0.0)
                total = tl.load(sums_ptr + size + k * n_rows + row, mask=inside, other=1.0)
            weight = _weight(w_ptr, row, k, inside, n_inner, w_outer, w_inner, w_k, ACC)
            mixture += _share(weight, x, top, total)
        slope = _slope(mixture)
        if slope_ptr is not None:
            tl.store(slope_ptr + row[:, None] * n_v + columns[None, :], slope, mask=within)
        h += tl.sum(tl.where(within, mixture * slope, 0.0), 1)
    if out_ptr is not None:
        tl.store(out_ptr + row, h.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _mixture_stats_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    sums_ptr,
    mixture_ptr,
    entropy_ptr,
    kl_ptr,
    n_rows,
    n_inner,
    n_k,
    n_v,
    x_outer,
    x_inner,
    x_k,
    x_v,
    w_outer,
    w_inner,
    w_k,
    y_outer,
    y_inner,
    y_v,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Expected entropy and KL, and the mixture's entropy of rows of one tile, which is still in the cache when it is added to the
    mixture; of longer rows what `_mixture_kernel` needs, fields [2, K, row] of sums_ptr.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_ptrs = x_ptr + row_offset(row, n_inner, x_outer, x_inner)[:, None]
    y_ptrs = y_ptr + row_offset(row, n_inner, y_outer, y_inner)[:, None]
    columns = tl.arange(0, COLUMNS).to(tl.int64)
    within = inside[:, None] & (columns < n_v)[None, :]
    entropy, kl, mixture = tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC), tl.zeros((ROWS, COLUMNS), ACC)
    for i in range(n_k):
        k = tl.cast(i, tl.int64)
        top, total, weighted, cross, _, total_q, escaped = _kl_rows(
            x_ptrs + k * x_k, y_ptrs, inside, n_v, x_v, y_v, ACC, ROWS, COLUMNS
        )
        weight = _weight(w_ptr, row, k, inside, n_inner, w_outer, w_inner, w_k, ACC)
        entropy += product(weight, entropy_of(total, weighted))
        kl += product(weight, _kl_value(total, cross, total_q, escaped))
        if sums_ptr is None:
            x = load_logits(x_ptrs + k * x_k + columns[None, :] * x_v, within, ACC)
            mixture += _share(weight, x, top, total)
        else:
            tl.store(sums_ptr + k * n_rows + row, top, mask=inside)
            tl.store(sums_ptr + (n_k + k) * n_rows + row, total, mask=inside)
    tl.store(entropy_ptr + row, entropy.to(tl.float32), mask=inside)
    tl.store(kl_ptr + row, (kl / UNIT).to(tl.float32), mask=inside)
    if sums_ptr is None:
        h = tl.sum(tl.where(within, mixture * _slope(mixture), 0.0), 1)
        tl.store(mixture_ptr + row, h.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _mixture_backward_kernel(
    x_ptr,
    w_ptr,
    slope_ptr,
    grad_ptr,
    dx_ptr,
    n_rows,
    n_inner,
    n_k,
    n_v,
    x_outer,
    x_inner,
    x_k,
    x_v,
    w_outer,
    w_inner,
    w_k,
    out_outer,
    out_inner,
    out_k,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (row block, k): w_k q_k (slope - sum q_k slope) times grad."""
    program = tl.program_id(0)
    k = (program % n_k).to(tl.int64)
    row = (program // n_k).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_ptrs = x_ptr + (row_offset(row, n_inner, x_outer, x_inner) + k * x_k)[:, None]
    slope_ptrs = slope_ptr + row[:, None] * n_v
    dx_ptrs = dx_ptr + (row_offset(row, n_inner, out_outer, out_inner) + k * out_k)[:, None]
    top, total, mean = tl.full((ROWS,), -float("inf"), ACC), tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC)
    for start in range(0, n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < n_v)[None, :]
        x = load_logits(x_ptrs + columns[None, :] * x_v, within, ACC)
        new_top = tl.maximum(top, tl.max(x, 1))
        scale = tl.exp(top - above_floor(new_top))
        e = tl.exp(x - above_floor(new_top)[:, None])
        slope = tl.load(slope_ptrs + columns[None, :], mask=within, other=0.0)
        total = scale * total + tl.sum(e, 1)
        mean = scale * mean + tl.sum(e * slope, 1)
        top = new_top
    weight = _weight(w_ptr, row, k, inside, n_inner, w_outer, w_inner, w_k, ACC)
    grad = tl.load(grad_ptr + row, mask=inside, other=0.0).to(ACC)
    # a slope that is NaN says that the mixture is undefined
    counts = (weight != 0) & (mean == mean)
    for start in range(0, n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < n_v)[None, :]
        x = load_logits(x_ptrs + columns[None, :] * x_v, within, ACC)
        slope = tl.load(slope_ptrs + columns[None, :], mask=within, other=0.0)
        slope = tl.exp(x - top[:, None]) / total[:, None] * (slope - (mean / total)[:, None])
        dx = tl.where(counts[:, None], product(slope, product(weight, grad)[:, None]), 0.0)
        tl.store(dx_ptrs + columns[None, :], rounded(dx, dx_ptr.dtype.element_ty), mask=within)


def _views(lead: torch.Size, logits: Tensor, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views [outer, inner, K, V] of logits [K, *lead, V], and [outer, inner, ...] of rows [*lead, ...]."""
    return row_views(lead, logits.movedim(0, -2), *rows)


def _alternatives(x: Tensor) -> tuple[int, int, int, int]:
    """Strides of a view [outer, inner, K, V]."""
    return (*row_strides(x), *x.stride()[2:])


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    """n_rows, n_inner, n_k and n_v of a view [outer, inner, K, V]."""
    return x.shape[0] * x.shape[1], x.shape[1], x.shape[2], x.shape[3]


def _launch(kernel, x: Tensor, acc: tl.dtype, tile: RowTile, *args: object, per_alternative: bool = False) -> None:
    """One program for each block of rows of x [outer, inner, K, V], or for each block and alternative."""
    n_rows, _, n_k, _ = _sizes(x)
    n_programs = triton.cdiv(n_rows, tile.rows) * (n_k if per_alternative else 1)
    _common.launch(kernel, n_programs, tile.tile, *args, ACC=acc, ROWS=tile.rows, COLUMNS=tile.columns)


def _weighted(weights: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if weights is None else (*row_strides(weights), weights.stride(2))


def expected_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    result = torch.empty(logits.shape[1:-1], dtype=torch.float32, device=logits.device)
    acc = accumulator(logits, weights)
    tile = row_tile(logits.shape[-1], acc)
    for x, w, out in _views(result.shape, logits, weights.movedim(0, -1), result):
        args = (x, w, out, *_sizes(x), *_alternatives(x), *_weighted(w))
        _launch(_expected_entropy_kernel, x, acc, tile, *args)
    return result


def expected_entropy_backward(grad: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    dtype = torch_dtype(accumulator(logits, weights))
    return entropy_backward(torch.where(weights == 0, 0.0, weights.to(dtype) * grad.to(dtype)), logits)


def expected_kl(logits: Tensor, weights: Tensor | None, base_logits: Tensor) -> Tensor:
    result = torch.empty(logits.shape[1:-1], dtype=torch.float32, device=logits.device)
    weighting = [] if weights is None else [weights.movedim(0, -1)]
    acc = accumulator(logits, base_logits, *weighting)
    tile = row_tile(logits.shape[-1], acc)
    for x, y, out, *w in _views(result.shape, logits, base_logits, result, *weighting):
        weight = w[0] if w else None
        strides = (*_alternatives(x), *_weighted(weight), *row_strides(y), y.stride(2))
        _launch(_expected_kl_kernel, x, acc, tile, x, weight, y, out, *_sizes(x), *strides)
    return result


def expected_kl_backward(
    grad: Tensor, logits: Tensor, weights: Tensor | None, base_logits: Tensor
) -> tuple[Tensor, Tensor]:
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    dy = torch.empty(base_logits.shape, dtype=base_logits.dtype, device=base_logits.device)
    weighting = [] if weights is None else [weights.movedim(0, -1)]
    acc = accumulator(logits, base_logits, *weighting)
    tile = row_tile(logits.shape[-1], acc)
    rows = (dx.movedim(0, -2), base_logits, dy, grad.contiguous(), *weighting)
    for x, out, y, out_y, g, *w in _views(base_logits.shape[:-1], logits, *rows):
        weight = w[0] if w else None
        n_rows, _, n_k, _ = _sizes(x)
        sums = torch.empty(3, n_k, n_rows, dtype=torch_dtype(acc), device=x.device)
        y_strides = (*row_strides(y), y.stride(2))
        strides = (*_alternatives(x), *_weighted(weight), *y_strides, *_alternatives(out)[:3])
        args = (x, weight, y, g, out, sums, *_sizes(x), *strides)
        _launch(_kl_backward_kernel, x, acc, tile, *args, per_alternative=True)
        args = (x, y, sums, out_y, *_sizes(x), *_alternatives(x), *y_strides)
        _launch(_kl_base_backward_kernel, x, acc, tile, *args)
    return dx, dy


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    return expected_kl(p_logits.unsqueeze(0), None, q_logits)


def kl_divergence_backward(grad: Tensor, p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    d_p, d_q = expected_kl_backward(grad, p_logits.unsqueeze(0), None, q_logits)
    return d_p.squeeze(0), d_q


def _mixture_sums(x: Tensor, acc: tl.dtype) -> Tensor | None:
    """Room for the sums of alternatives [2, K, row] of a view [outer, inner, K, V]; rows of one tile need none."""
    n_rows, _, n_k, n_v = _sizes(x)
    if n_v <= row_tile(n_v, acc).columns:
        return None
    return torch.empty(2, n_k, n_rows, dtype=torch_dtype(acc), device=x.device)


def _mixture(x: Tensor, w: Tensor, out: Tensor | None, slope: Tensor | None, acc: tl.dtype) -> None:
    """Entropy or slope of the mixture of a view [outer, inner, K, V]."""
    tile, sums = row_tile(x.shape[-1], acc), _mixture_sums(x, acc)
    if sums is not None:
        _launch(_norms_kernel, x, acc, tile, x, sums, *_sizes(x), *_alternatives(x), per_alternative=True)
    args = (x, w, sums, out, slope, *_sizes(x), *_alternatives(x), *_weighted(w))
    _launch(_mixture_kernel, x, acc, tile, *args)


def mixture_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    result = torch.empty(logits.shape[1:-1], dtype=torch.float32, device=logits.device)
    acc = accumulator(logits, weights)
    for x, w, out in _views(result.shape, logits, weights.movedim(0, -1), result):
        _mixture(x, w, out, None, acc)
    return result


def mixture_entropy_backward(grad: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    acc = accumulator(logits, weights)
    tile = row_tile(logits.shape[-1], acc)
    rows = (dx.movedim(0, -2), weights.movedim(0, -1), grad.contiguous())
    for x, out, w, g in _views(logits.shape[1:-1], logits, *rows):
        n_rows, _, _, n_v = _sizes(x)
        slope = torch.empty(n_rows, n_v, dtype=torch_dtype(acc), device=x.device)  # 1 / K of the gradient
        _mixture(x, w, None, slope, acc)
        args = (x, w, slope, g, out, *_sizes(x), *_alternatives(x), *_weighted(w), *_alternatives(out)[:3])
        _launch(_mixture_backward_kernel, x, acc, tile, *args, per_alternative=True)
    return dx


def mixture_stats(logits: Tensor, weights: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = base_logits.shape[:-1]
    mixture, entropy, kl = (torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(3))
    acc = accumulator(logits, weights, base_logits)
    tile = row_tile(logits.shape[-1], acc)
    rows = (weights.movedim(0, -1), base_logits, mixture, entropy, kl)
    for x, w, y, *out in _views(shape, logits, *rows):
        sums = _mixture_sums(x, acc)
        strides = (*_alternatives(x), *_weighted(w), *row_strides(y), y.stride(2))
        _launch(_mixture_stats_kernel, x, acc, tile, x, w, y, sums, *out, *_sizes(x), *strides)
        if sums is not None:
            args = (x, w, sums, out[0], None, *_sizes(x), *_alternatives(x), *_weighted(w))
            _launch(_mixture_kernel, x, acc, tile, *args)
    return mixture, entropy, kl
