"""Entropy of the mixture of K alternatives, alone or with the expected values of `kl` in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.triton._common import (
    above_floor,
    accumulator,
    actual,
    defined,
    entropy_of,
    load_logits,
    part_of_program,
    part_ptrs,
    product,
    rounded,
    row_ptrs,
    row_tile,
    rows_of_block,
    tile_sums,
    torch_dtype,
    view_of,
)
from mdmi_fast.backends.triton._kl_rows import (
    UNIT,
    Rows,
    alternatives,
    entropy_rows,
    kl_rows,
    kl_value,
    launch,
    weight_of,
)


@triton.jit
def _norms_kernel(x, sums_ptr, sizes, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row block, k): top and total of the rows of alternative k, fields [2, K, row]."""
    block, part = part_of_program(sizes)
    row, inside = rows_of_block(block, sizes, ROWS)
    x_ptrs = (row_ptrs(x, row, sizes) + part.to(tl.int64) * actual(x.k))[:, None]
    top, total, _ = entropy_rows(Rows(x_ptrs, x.v), inside, sizes.n_v, ACC, COLUMNS)
    tl.store(part_ptrs(sums_ptr, 0, part, row, sizes), top, mask=inside)
    tl.store(part_ptrs(sums_ptr, 1, part, row, sizes), total, mask=inside)


@triton.jit
def _share(weight, x, top, total):
    """What an alternative adds to the mixture on a tile of its logits."""
    return product(weight[:, None], tl.exp(x - top[:, None]) / defined(total)[:, None])


@triton.jit
def _slope(mixture):
    """-log of the mixture, 0 where that is 0."""
    return tl.where(mixture == 0, 0.0, -tl.log(mixture))


@triton.jit
def _mixture_kernel(
    x, w, sums_ptr, out_ptr, slope_ptr, sizes, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Entropy of the mixture, or its slope -log m [row, V] if slope_ptr is given; rows of one tile need no sums of
    `_norms_kernel`.
    """
    row, inside = rows_of_block(tl.program_id(0), sizes, ROWS)
    x_ptrs = row_ptrs(x, row, sizes)[:, None]
    h = tl.zeros((ROWS,), ACC)
    for start in range(0, sizes.n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < sizes.n_v)[None, :]
        mixture = tl.zeros((ROWS, COLUMNS), ACC)
        for part in range(actual(sizes.n_parts)):
            k = tl.cast(part, tl.int64)
            logits = load_logits(x_ptrs + k * actual(x.k) + columns[None, :] * x.v, within, ACC)
            if sums_ptr is None:
                top, total, _ = tile_sums(logits)
            else:
                top = tl.load(part_ptrs(sums_ptr, 0, part, row, sizes), mask=inside, other=0.0)
                total = tl.load(part_ptrs(sums_ptr, 1, part, row, sizes), mask=inside, other=1.0)
            mixture += _share(weight_of(w, row, k, inside, sizes, ACC), logits, top, total)
        slope = _slope(mixture)
        if slope_ptr is not None:
            tl.store(slope_ptr + row[:, None] * sizes.n_v + columns[None, :], slope, mask=within)
        h += tl.sum(tl.where(within, mixture * slope, 0.0), 1)
    if out_ptr is not None:
        tl.store(out_ptr + row, h.to(tl.float32), mask=inside)


@triton.jit
def _mixture_stats_kernel(
    x,
    w,
    y,
    sums_ptr,
    mixture_ptr,
    entropy_ptr,
    kl_ptr,
    sizes,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Expected entropy and KL, and the mixture's entropy of rows of one tile, which is still in the cache when it is added to the
    mixture; of longer rows what `_mixture_kernel` needs, fields [2, K, row] of sums_ptr.
    """
    row, inside = rows_of_block(tl.program_id(0), sizes, ROWS)
    x_ptrs = row_ptrs(x, row, sizes)[:, None]
    y_ptrs = row_ptrs(y, row, sizes)[:, None]
    columns = tl.arange(0, COLUMNS).to(tl.int64)
    within = inside[:, None] & (columns < sizes.n_v)[None, :]
    entropy, kl, mixture = tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC), tl.zeros((ROWS, COLUMNS), ACC)
    for part in range(actual(sizes.n_parts)):
        k = tl.cast(part, tl.int64)
        k_ptrs = x_ptrs + k * actual(x.k)
        top, total, weighted, cross, _, total_q, escaped = kl_rows(
            Rows(k_ptrs, x.v), Rows(y_ptrs, y.v), inside, sizes.n_v, ACC, COLUMNS
        )
        weight = weight_of(w, row, k, inside, sizes, ACC)
        entropy += product(weight, entropy_of(total, weighted))
        kl += product(weight, kl_value(total, cross, total_q, escaped))
        if sums_ptr is None:
            mixture += _share(weight, load_logits(k_ptrs + columns[None, :] * x.v, within, ACC), top, total)
        else:
            tl.store(part_ptrs(sums_ptr, 0, part, row, sizes), top, mask=inside)
            tl.store(part_ptrs(sums_ptr, 1, part, row, sizes), total, mask=inside)
    tl.store(entropy_ptr + row, entropy.to(tl.float32), mask=inside)
    tl.store(kl_ptr + row, (kl / UNIT).to(tl.float32), mask=inside)
    if sums_ptr is None:
        h = tl.sum(tl.where(within, mixture * _slope(mixture), 0.0), 1)
        tl.store(mixture_ptr + row, h.to(tl.float32), mask=inside)


@triton.jit
def _mixture_backward_kernel(
    x, w, slope_ptr, grad_ptr, dx, sizes, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Program (row block, k): w_k q_k (slope - sum q_k slope) times grad."""
    block, part = part_of_program(sizes)
    k = part.to(tl.int64)
    row, inside = rows_of_block(block, sizes, ROWS)
    x_ptrs = (row_ptrs(x, row, sizes) + k * actual(x.k))[:, None]
    slope_ptrs = slope_ptr + row[:, None] * sizes.n_v
    dx_ptrs = (row_ptrs(dx, row, sizes) + k * actual(dx.k))[:, None]
    top, total, mean = tl.full((ROWS,), -float("inf"), ACC), tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC)
    for start in range(0, sizes.n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < sizes.n_v)[None, :]
        logits = load_logits(x_ptrs + columns[None, :] * x.v, within, ACC)
        new_top = tl.maximum(top, tl.max(logits, 1))
        scale = tl.exp(top - above_floor(new_top))
        e = tl.exp(logits - above_floor(new_top)[:, None])
        slope = tl.load(slope_ptrs + columns[None, :], mask=within, other=0.0)
        total = scale * total + tl.sum(e, 1)
        mean = scale * mean + tl.sum(e * slope, 1)
        top = new_top
    weight = weight_of(w, row, k, inside, sizes, ACC)
    grad = tl.load(grad_ptr + row, mask=inside, other=0.0).to(ACC)
    # a slope that is NaN says that the mixture is undefined
    counts = (weight != 0) & (mean == mean)
    for start in range(0, sizes.n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < sizes.n_v)[None, :]
        logits = load_logits(x_ptrs + columns[None, :] * x.v, within, ACC)
        slope = tl.load(slope_ptrs + columns[None, :], mask=within, other=0.0)
        slope = tl.exp(logits - top[:, None]) / total[:, None] * (slope - (mean / total)[:, None])
        d = tl.where(counts[:, None], product(slope, product(weight, grad)[:, None]), 0.0)
        tl.store(dx_ptrs + columns[None, :] * dx.v, rounded(d, dx.ptr.dtype.element_ty), mask=within)


# --- launching


def _sums(x: Tensor, acc: tl.dtype) -> Tensor | None:
    """Room for the sums of alternatives [2, K, row] of a view [outer, inner, K, V]; rows of one tile need none."""
    outer, inner, n_k, n_v = x.shape
    if n_v <= row_tile(n_v, acc).columns:
        return None
    return torch.empty(2, n_k, outer * inner, dtype=torch_dtype(acc), device=x.device)


def _mixture(x: Tensor, w: Tensor, out: Tensor | None, slope: Tensor | None, acc: tl.dtype) -> None:
    """Entropy or slope of the mixture of a view [outer, inner, K, V]."""
    sums = _sums(x, acc)
    if sums is not None:
        launch(_norms_kernel, x, acc, sums, per_alternative=True)
    launch(_mixture_kernel, x, acc, view_of(w, "k"), sums, out, slope)


def mixture_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    result = torch.empty(logits.shape[1:-1], dtype=torch.float32, device=logits.device)
    acc = accumulator(logits, weights)
    for x, w, out in alternatives(result.shape, logits, weights.movedim(0, -1), result):
        _mixture(x, w, out, None, acc)
    return result


def mixture_entropy_backward(grad: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    acc = accumulator(logits, weights)
    rows = (dx.movedim(0, -2), weights.movedim(0, -1), grad.contiguous())
    for x, out, w, g in alternatives(logits.shape[1:-1], logits, *rows):
        outer, inner, _, n_v = x.shape
        slope = torch.empty(outer * inner, n_v, dtype=torch_dtype(acc), device=x.device)  # 1 / K of the gradient
        _mixture(x, w, None, slope, acc)
        launch(_mixture_backward_kernel, x, acc, view_of(w, "k"), slope, g, view_of(out, "kv"), per_alternative=True)
    return dx


def mixture_stats(logits: Tensor, weights: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = base_logits.shape[:-1]
    mixture, entropy, kl = (torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(3))
    acc = accumulator(logits, weights, base_logits)
    rows = (weights.movedim(0, -1), base_logits, mixture, entropy, kl)
    for x, w, y, out, *expected in alternatives(shape, logits, *rows):
        sums, weighting = _sums(x, acc), view_of(w, "k")
        launch(_mixture_stats_kernel, x, acc, weighting, view_of(y, "v"), sums, out, *expected)
        if sums is not None:
            launch(_mixture_kernel, x, acc, weighting, sums, out, None)
    return mixture, entropy, kl
