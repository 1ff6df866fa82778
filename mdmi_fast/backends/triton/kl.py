"""KL divergence and expected values over K alternatives: a program takes some rows and goes through their alternatives in order.

One kernel serves `kl_divergence` (K = 1, no weights) and `expected_kl`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.triton._common import (
    accumulator,
    actual,
    entropy_of,
    load_logits,
    part_of_program,
    part_ptrs,
    product,
    rounded,
    row_ptrs,
    rows_of_block,
    torch_dtype,
    view_of,
)
from mdmi_fast.backends.triton._kl_rows import (
    UNIT,
    Rows,
    alternatives,
    entropy_rows,
    in_units,
    kl_rows,
    kl_value,
    launch,
    weight_of,
)
from mdmi_fast.backends.triton._mixture import mixture_entropy, mixture_entropy_backward, mixture_stats
from mdmi_fast.backends.triton.stats import entropy_backward

__all__ = [
    "expected_entropy",
    "expected_entropy_backward",
    "expected_kl",
    "expected_kl_backward",
    "kl_divergence",
    "kl_divergence_backward",
    "mixture_entropy",
    "mixture_entropy_backward",
    "mixture_stats",
]


@triton.jit
def _expected_entropy_kernel(x, w, out_ptr, sizes, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, inside = rows_of_block(tl.program_id(0), sizes, ROWS)
    x_ptrs = row_ptrs(x, row, sizes)[:, None]
    result = tl.zeros((ROWS,), ACC)
    for i in range(actual(sizes.n_parts)):
        k = tl.cast(i, tl.int64)
        _, total, weighted = entropy_rows(Rows(x_ptrs + k * actual(x.k), x.v), inside, sizes.n_v, ACC, COLUMNS)
        result += product(weight_of(w, row, k, inside, sizes, ACC), entropy_of(total, weighted))
    tl.store(out_ptr + row, result.to(tl.float32), mask=inside)


@triton.jit
def _expected_kl_kernel(x, w, y, out_ptr, sizes, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, inside = rows_of_block(tl.program_id(0), sizes, ROWS)
    x_ptrs = row_ptrs(x, row, sizes)[:, None]
    y_ptrs = row_ptrs(y, row, sizes)[:, None]
    result = tl.zeros((ROWS,), ACC)
    for i in range(actual(sizes.n_parts)):
        k = tl.cast(i, tl.int64)
        _, total_p, _, cross, _, total_q, escaped = kl_rows(
            Rows(x_ptrs + k * actual(x.k), x.v), Rows(y_ptrs, y.v), inside, sizes.n_v, ACC, COLUMNS
        )
        weight = weight_of(w, row, k, inside, sizes, ACC)
        result += product(weight, kl_value(total_p, cross, total_q, escaped))
    tl.store(out_ptr + row, (result / UNIT).to(tl.float32), mask=inside)


@triton.jit
def _kl_backward_kernel(
    x, w, y, grad_ptr, dx, sums_ptr, sizes, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Program (row block, k): the gradient of p's logits, and what that of q's logits needs of alternative k: its
    coefficient (weight times grad, 0 where the KL is not finite), top and total, fields [3, K, row].
    """
    block, part = part_of_program(sizes)
    k = part.to(tl.int64)
    row, inside = rows_of_block(block, sizes, ROWS)
    x_ptrs = (row_ptrs(x, row, sizes) + k * actual(x.k))[:, None]
    y_ptrs = row_ptrs(y, row, sizes)[:, None]
    dx_ptrs = (row_ptrs(dx, row, sizes) + k * actual(dx.k))[:, None]
    top_p, total_p, _, cross, top_q, total_q, escaped = kl_rows(
        Rows(x_ptrs, x.v), Rows(y_ptrs, y.v), inside, sizes.n_v, ACC, COLUMNS
    )
    kl = kl_value(total_p, cross, total_q, escaped)
    grad = tl.load(grad_ptr + row, mask=inside, other=0.0).to(ACC)
    weight = weight_of(w, row, k, inside, sizes, ACC)
    finite = (kl < float("inf")) & (tl.abs(product(weight, kl) / UNIT) < float("inf"))
    coefficient = tl.where(finite, product(weight, grad), 0.0)
    tl.store(part_ptrs(sums_ptr, 0, part, row, sizes), coefficient, mask=inside)
    tl.store(part_ptrs(sums_ptr, 1, part, row, sizes), top_p, mask=inside)
    tl.store(part_ptrs(sums_ptr, 2, part, row, sizes), total_p, mask=inside)
    for start in range(0, sizes.n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < sizes.n_v)[None, :]
        p = load_logits(x_ptrs + columns[None, :] * x.v, within, ACC)
        q = load_logits(y_ptrs + columns[None, :] * y.v, within, ACC)
        ratio = in_units(p, top_p[:, None], ACC) - in_units(q, top_q[:, None], ACC)
        slope = tl.exp(p - top_p[:, None]) / total_p[:, None] * (ratio - (cross / total_p)[:, None])
        dp = tl.where(finite[:, None], product(slope, coefficient[:, None]) / UNIT, 0.0)
        tl.store(dx_ptrs + columns[None, :] * dx.v, rounded(dp, dx.ptr.dtype.element_ty), mask=within)


@triton.jit
def _kl_base_backward_kernel(
    x, y, sums_ptr, dy_ptr, sizes, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The gradient dy [row, V] of q's logits, the sum over k of coefficient_k (q - p_k)."""
    row, inside = rows_of_block(tl.program_id(0), sizes, ROWS)
    x_ptrs = row_ptrs(x, row, sizes)[:, None]
    y_ptrs = row_ptrs(y, row, sizes)[:, None]
    top_q, total_q, _ = entropy_rows(Rows(y_ptrs, y.v), inside, sizes.n_v, ACC, COLUMNS)
    for start in range(0, sizes.n_v, COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        within = inside[:, None] & (columns < sizes.n_v)[None, :]
        logits = load_logits(y_ptrs + columns[None, :] * y.v, within, ACC)
        q = tl.exp(logits - top_q[:, None]) / total_q[:, None]
        dy = tl.zeros((ROWS, COLUMNS), ACC)
        for part in range(actual(sizes.n_parts)):
            k = tl.cast(part, tl.int64)
            coefficient = tl.load(part_ptrs(sums_ptr, 0, part, row, sizes), mask=inside, other=0.0)[:, None]
            top_p = tl.load(part_ptrs(sums_ptr, 1, part, row, sizes), mask=inside, other=0.0)[:, None]
            total_p = tl.load(part_ptrs(sums_ptr, 2, part, row, sizes), mask=inside, other=1.0)[:, None]
            logits = load_logits(x_ptrs + k * actual(x.k) + columns[None, :] * x.v, within, ACC)
            dy += product(coefficient, q - tl.exp(logits - top_p) / total_p)
        dy_ptrs = dy_ptr + row[:, None] * sizes.n_v + columns[None, :]
        tl.store(dy_ptrs, rounded(dy, dy_ptr.dtype.element_ty), mask=within)


# --- launching


def _beside(weights: Tensor | None) -> list[Tensor]:
    """Weights as rows [*lead, K], if there are any."""
    return [] if weights is None else [weights.movedim(0, -1)]


def expected_entropy(logits: Tensor, weights: Tensor) -> Tensor:
    result = torch.empty(logits.shape[1:-1], dtype=torch.float32, device=logits.device)
    acc = accumulator(logits, weights)
    for x, w, out in alternatives(result.shape, logits, weights.movedim(0, -1), result):
        launch(_expected_entropy_kernel, x, acc, view_of(w, "k"), out)
    return result


def expected_entropy_backward(grad: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    dtype = torch_dtype(accumulator(logits, weights))
    return entropy_backward(torch.where(weights == 0, 0.0, weights.to(dtype) * grad.to(dtype)), logits)


def expected_kl(logits: Tensor, weights: Tensor | None, base_logits: Tensor) -> Tensor:
    result = torch.empty(logits.shape[1:-1], dtype=torch.float32, device=logits.device)
    acc = accumulator(logits, base_logits, *_beside(weights))
    for x, y, out, *given in alternatives(result.shape, logits, base_logits, result, *_beside(weights)):
        w = view_of(*given, "k") if given else None
        launch(_expected_kl_kernel, x, acc, w, view_of(y, "v"), out)
    return result


def expected_kl_backward(
    grad: Tensor, logits: Tensor, weights: Tensor | None, base_logits: Tensor
) -> tuple[Tensor, Tensor]:
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    dy = torch.empty(base_logits.shape, dtype=base_logits.dtype, device=base_logits.device)
    acc = accumulator(logits, base_logits, *_beside(weights))
    rows = (dx.movedim(0, -2), base_logits, dy, grad.contiguous(), *_beside(weights))
    for x, out_x, y, out_y, g, *given in alternatives(base_logits.shape[:-1], logits, *rows):
        w = view_of(*given, "k") if given else None
        outer, inner, n_k, _ = x.shape
        sums = torch.empty(3, n_k, outer * inner, dtype=torch_dtype(acc), device=x.device)
        base = view_of(y, "v")
        launch(_kl_backward_kernel, x, acc, w, base, g, view_of(out_x, "kv"), sums, per_alternative=True)
        launch(_kl_base_backward_kernel, x, acc, base, sums, out_y)
    return dx, dy


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    return expected_kl(p_logits.unsqueeze(0), None, q_logits)


def kl_divergence_backward(grad: Tensor, p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    d_p, d_q = expected_kl_backward(grad, p_logits.unsqueeze(0), None, q_logits)
    return d_p.squeeze(0), d_q
