"""Entropy and the other statistics of rows of logits: one read, in tiles; long rows are shared by several programs.

A program sums up its part of some rows. Where that is the whole row it writes the results; else it writes partial sums,
which a second kernel merges. The gradient needs the same partial sums and a second read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.triton import _common
from mdmi_fast.backends.triton._common import (
    LOWEST,
    ROW_SPLIT,
    accumulator,
    defined,
    entropy_of,
    load_logits,
    matrix_product,
    matrix_tile,
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

Stats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _tile_top2(x, columns, top):
    """Column of top, the second largest and its column, of a tile [R, C]; lowest columns at ties."""
    token = tl.min(tl.where(x == top[:, None], columns[None, :], 2147483647), 1)
    others = tl.where(columns[None, :] == token[:, None], -float("inf"), x)
    second = tl.max(others, 1)
    runner_up = tl.min(tl.where(others == second[:, None], columns[None, :], 2147483647), 1)
    return token, second, runner_up


@triton.jit
def _merge_top2(top_a, token_a, second_a, runner_up_a, top_b, token_b, second_b, runner_up_b):
    """The two largest of two parts of a row, a before b."""
    b_first = top_b > top_a
    rest_a = tl.where(b_first, top_a, second_a)
    rest_b = tl.where(b_first, second_b, top_b)
    column_a = tl.where(b_first, token_a, runner_up_a)
    column_b = tl.where(b_first, runner_up_b, token_b)
    token = tl.where(b_first, token_b, token_a)
    return token, tl.maximum(rest_a, rest_b), tl.where(rest_a >= rest_b, column_a, column_b)


@triton.jit
def _add_tile(x, columns, top, total, weighted, token, second, runner_up, TOP2: tl.constexpr):
    """The state of rows with one more tile [R, C] of their logits."""
    tile_top, tile_total, tile_weighted = tile_sums(x)
    if TOP2:
        tile_token, tile_second, tile_runner_up = _tile_top2(x, columns, tile_top)
        token, second, runner_up = _merge_top2(
            top, token, second, runner_up, tile_top, tile_token, tile_second, tile_runner_up
        )
    top, total, weighted = merge_sums(top, total, weighted, tile_top, tile_total, tile_weighted)
    return top, total, weighted, token, second, runner_up


@triton.jit
def _empty_state(ROWS: tl.constexpr, ACC: tl.constexpr):
    nothing = tl.full((ROWS,), -float("inf"), ACC)
    zero, column = tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), tl.int32)
    return nothing, zero, zero, column, nothing, column


@triton.jit
def _store_partial(
    sums_ptr, columns_ptr, place, size, inside, top, total, weighted, token, second, runner_up, TOP2: tl.constexpr
):
    """Writes the state of rows to place in fields of `size` elements."""
    tl.store(sums_ptr + place, top, mask=inside)
    tl.store(sums_ptr + size + place, total, mask=inside)
    tl.store(sums_ptr + 2 * size + place, weighted, mask=inside)
    if TOP2:
        tl.store(sums_ptr + 3 * size + place, second, mask=inside)
        tl.store(columns_ptr + place, token, mask=inside)
        tl.store(columns_ptr + size + place, runner_up, mask=inside)


@triton.jit
def _merged(sums_ptr, columns_ptr, row, n_rows, n_splits, ROWS: tl.constexpr, ACC: tl.constexpr, TOP2: tl.constexpr):
    """The state of whole rows from partial ones [field, split, row]."""
    top, total, weighted, token, second, runner_up = _empty_state(ROWS, ACC)
    inside = row < n_rows
    size = n_rows.to(tl.int64) * n_splits
    for split in range(n_splits):
        place = split * n_rows.to(tl.int64) + row
        part_top = load_logits(sums_ptr + place, inside, ACC)
        part_total = tl.load(sums_ptr + size + place, mask=inside, other=0.0)
        part_weighted = tl.load(sums_ptr + 2 * size + place, mask=inside, other=0.0)
        if TOP2:
            part_second = load_logits(sums_ptr + 3 * size + place, inside, ACC)
            part_token = tl.load(columns_ptr + place, mask=inside, other=0)
            part_runner_up = tl.load(columns_ptr + size + place, mask=inside, other=0)
            token, second, runner_up = _merge_top2(
                top, token, second, runner_up, part_top, part_token, part_second, part_runner_up
            )
        top, total, weighted = merge_sums(top, total, weighted, part_top, part_total, part_weighted)
    return top, total, weighted, token, second, runner_up


@triton.jit
def _store_stats(
    entropy_ptr,
    logsumexp_ptr,
    confidence_ptr,
    token_ptr,
    margin_ptr,
    row,
    inside,
    top,
    total,
    weighted,
    token,
    second,
    TOP2: tl.constexpr,
):
    tl.store(entropy_ptr + row, entropy_of(total, weighted).to(tl.float32), mask=inside)
    if TOP2:
        total = defined(total)
        tl.store(logsumexp_ptr + row, (top + tl.log(total)).to(tl.float32), mask=inside)
        tl.store(confidence_ptr + row, (1.0 / total).to(tl.float32), mask=inside)
        tl.store(token_ptr + row, tl.where(total != total, 0, token).to(tl.int64), mask=inside)
        tl.store(margin_ptr + row, ((1.0 - tl.exp(second - top)) / total).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_splits", "n_inner", "stride_outer"])
def _stats_kernel(
    x_ptr,
    sums_ptr,
    columns_ptr,
    entropy_ptr,
    logsumexp_ptr,
    confidence_ptr,
    token_ptr,
    margin_ptr,
    n_rows,
    n_splits,
    n_inner,
    n_v,
    stride_outer,
    stride_inner,
    stride_v,
    TOP2: tl.constexpr,
    PARTIAL: tl.constexpr,
    SPLIT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (row block, split): columns [SPLIT * split, SPLIT * (split + 1)) of ROWS rows."""
    program = tl.program_id(0)
    split = program % n_splits
    row = (program // n_splits).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_ptrs = x_ptr + row_offset(row, n_inner, stride_outer, stride_inner)[:, None]
    top, total, weighted, token, second, runner_up = _empty_state(ROWS, ACC)
    first = split * SPLIT
    for start in range(first, tl.minimum(first + SPLIT, n_v), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        # without a bound of the split: it is a multiple of COLUMNS, or the whole row
        x = load_logits(
            x_ptrs + columns.to(tl.int64)[None, :] * stride_v, inside[:, None] & (columns < n_v)[None, :], ACC
        )
        top, total, weighted, token, second, runner_up = _add_tile(
            x, columns, top, total, weighted, token, second, runner_up, TOP2
        )
    if PARTIAL:
        place = split * n_rows.to(tl.int64) + row
        size = n_rows.to(tl.int64) * n_splits
        _store_partial(sums_ptr, columns_ptr, place, size, inside, top, total, weighted, token, second, runner_up, TOP2)
    else:
        _store_stats(
            entropy_ptr,
            logsumexp_ptr,
            confidence_ptr,
            token_ptr,
            margin_ptr,
            row,
            inside,
            top,
            total,
            weighted,
            token,
            second,
            TOP2,
        )


@triton.jit(do_not_specialize=["n_rows", "n_splits"])
def _linear_stats_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    sums_ptr,
    columns_ptr,
    n_rows,
    n_splits,
    n_v,
    x_row,
    w_v,
    w_k,
    D: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (split, row block): partial sums over the vocabulary's columns [SPLIT * split, SPLIT * (split + 1))."""
    program = tl.program_id(0)
    n_blocks = tl.cdiv(n_rows, ROWS)
    split = program // n_blocks
    row = (program % n_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    top, total, weighted, token, second, runner_up = _empty_state(ROWS, tl.float32)
    first = split * SPLIT
    for start in range(first, tl.minimum(first + SPLIT, n_v), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        known = columns < n_v
        x = matrix_product(
            x_ptr + (row * x_row)[:, None],
            inside,
            w_ptr + (columns.to(tl.int64) * w_v)[None, :],
            known,
            1,
            w_k,
            D,
            OPERAND,
            "ieee",
            ROWS,
            COLUMNS,
            BLOCK_K,
        )
        if bias_ptr is not None:
            x += tl.load(bias_ptr + columns, mask=known, other=0.0)[None, :]
        x = tl.where(known[None, :], x, -float("inf"))
        top, total, weighted, token, second, runner_up = _add_tile(
            x, columns, top, total, weighted, token, second, runner_up, True
        )
    place = split * n_rows.to(tl.int64) + row
    size = n_rows.to(tl.int64) * n_splits
    _store_partial(sums_ptr, columns_ptr, place, size, inside, top, total, weighted, token, second, runner_up, True)


@triton.jit(do_not_specialize=["n_rows", "n_splits"])
def _stats_merge_kernel(
    sums_ptr,
    columns_ptr,
    entropy_ptr,
    logsumexp_ptr,
    confidence_ptr,
    token_ptr,
    margin_ptr,
    n_rows,
    n_splits,
    TOP2: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    top, total, weighted, token, second, _ = _merged(sums_ptr, columns_ptr, row, n_rows, n_splits, ROWS, ACC, TOP2)
    _store_stats(
        entropy_ptr,
        logsumexp_ptr,
        confidence_ptr,
        token_ptr,
        margin_ptr,
        row,
        row < n_rows,
        top,
        total,
        weighted,
        token,
        second,
        TOP2,
    )


@triton.jit
def _load_grad(grad_ptr, row, inside, ACC: tl.constexpr):
    return tl.load(grad_ptr + row, mask=inside, other=0.0).to(ACC)[:, None]


@triton.jit(do_not_specialize=["n_rows", "n_splits", "n_inner", "stride_outer"])
def _stats_backward_kernel(
    x_ptr,
    sums_ptr,
    columns_ptr,
    grad_entropy_ptr,
    grad_logsumexp_ptr,
    grad_confidence_ptr,
    grad_margin_ptr,
    dx_ptr,
    n_rows,
    n_splits,
    n_inner,
    n_v,
    stride_outer,
    stride_inner,
    stride_v,
    TOP2: tl.constexpr,
    SPLIT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient dx [row, V] of the columns of `_stats_kernel`'s program, from the partial sums."""
    program = tl.program_id(0)
    first = program % n_splits * SPLIT
    row = (program // n_splits).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < n_rows
    x_ptrs = x_ptr + row_offset(row, n_inner, stride_outer, stride_inner)[:, None]
    top, total, weighted, token, second, runner_up = _merged(
        sums_ptr, columns_ptr, row, n_rows, n_splits, ROWS, ACC, TOP2
    )
    h = entropy_of(total, weighted)
    total = defined(total)
    g_h = _load_grad(grad_entropy_ptr, row, inside, ACC)
    if TOP2:
        p_top = (1.0 / total)[:, None]
        p_second = (tl.exp(second - top) / total)[:, None]
        g_margin = _load_grad(grad_margin_ptr, row, inside, ACC)
        g_top = _load_grad(grad_confidence_ptr, row, inside, ACC)
        g_logsumexp = _load_grad(grad_logsumexp_ptr, row, inside, ACC)
    for start in range(first, tl.minimum(first + SPLIT, n_v), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        within = inside[:, None] & (columns < n_v)[None, :]
        x = load_logits(x_ptrs + columns.to(tl.int64)[None, :] * stride_v, within, ACC)
        shifted = x - top[:, None]
        p = tl.exp(shifted) / total[:, None]
        dx = product(p * tl.maximum(shifted + (h - tl.log(total))[:, None], LOWEST), -g_h)
        if TOP2:
            d_top = tl.where(columns[None, :] == token[:, None], p_top, 0.0) - p * p_top
            d_second = tl.where(columns[None, :] == runner_up[:, None], p_second, 0.0) - p * p_second
            dx += product(p, g_logsumexp) + product(d_top, g_top) + product(d_top - d_second, g_margin)
        dx = tl.where((h != h)[:, None], 0.0, dx)
        tl.store(dx_ptr + row[:, None] * n_v + columns[None, :], rounded(dx, dx_ptr.dtype.element_ty), mask=within)


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    exact = op == "linear_token_stats" and any(t.dtype == torch.float64 for t in tensors)
    return ["multiplies in float32, got float64"] if exact else []


_LINEAR_SPLIT = 4096


def _n_splits(n_v: int) -> int:
    return triton.cdiv(n_v, ROW_SPLIT)


def _workspace(n_rows: int, n_splits: int, acc: tl.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    sums = torch.empty(4, n_splits, n_rows, dtype=torch_dtype(acc), device=device)
    return sums, torch.empty(2, n_splits, n_rows, dtype=torch.int32, device=device)


def _sum_rows(x: Tensor, workspace: tuple[Tensor, Tensor] | None, out: list[Tensor | None], top2: bool) -> None:
    """Statistics of a view [outer, inner, V] into out, or their partial sums into a workspace."""
    n_rows, n_v = x.shape[0] * x.shape[1], x.shape[2]
    n_splits, acc = _n_splits(n_v), accumulator(x)
    tile = row_tile(n_v, acc)
    _common.launch(
        _stats_kernel,
        triton.cdiv(n_rows, tile.rows) * n_splits,
        tile.tile,
        x,
        *(workspace or (None, None)),
        *out,
        n_rows,
        n_splits,
        x.shape[1],
        n_v,
        *row_strides(x),
        x.stride(2),
        TOP2=top2,
        PARTIAL=workspace is not None,
        SPLIT=ROW_SPLIT,
        ACC=acc,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )


_MERGED_ROWS = 32


def _merge(workspace: tuple[Tensor, Tensor], acc: tl.dtype, out: list[Tensor | None], top2: bool) -> None:
    _, n_splits, n_rows = workspace[0].shape
    _common.launch(
        _stats_merge_kernel,
        triton.cdiv(n_rows, _MERGED_ROWS),
        _common.Tile(warps=1),
        *workspace,
        *out,
        n_rows,
        n_splits,
        TOP2=top2,
        ACC=acc,
        ROWS=_MERGED_ROWS,
    )


def _forward(logits: Tensor, out: list[Tensor | None], top2: bool) -> None:
    """Fills out, [*lead] each, with entropy, logsumexp, confidence, token and margin; None = not asked for."""
    given = [t for t in out if t is not None]
    for x, *parts in row_views(logits.shape[:-1], logits, *given):
        targets = [*parts, *[None] * (len(out) - len(parts))]
        if _n_splits(x.shape[2]) == 1:
            _sum_rows(x, None, targets, top2)
        else:
            acc = accumulator(x)
            workspace = _workspace(x.shape[0] * x.shape[1], _n_splits(x.shape[2]), acc, x.device)
            _sum_rows(x, workspace, [None] * len(out), top2)
            _merge(workspace, acc, targets, top2)


def _backward(logits: Tensor, grads: list[Tensor | None], top2: bool) -> Tensor:
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    given = [g.contiguous() for g in grads if g is not None]
    for x, out, *parts in row_views(logits.shape[:-1], logits, dx, *given):
        n_rows, n_v = x.shape[0] * x.shape[1], x.shape[2]
        n_splits, acc = _n_splits(n_v), accumulator(x)
        tile = row_tile(n_v, acc)
        workspace = _workspace(n_rows, n_splits, acc, x.device)
        _sum_rows(x, workspace, [None] * 5, top2)
        _common.launch(
            _stats_backward_kernel,
            triton.cdiv(n_rows, tile.rows) * n_splits,
            tile.tile,
            x,
            *workspace,
            *[*parts, *[None] * (len(grads) - len(parts))],
            out,
            n_rows,
            n_splits,
            x.shape[1],
            n_v,
            *row_strides(x),
            x.stride(2),
            TOP2=top2,
            SPLIT=ROW_SPLIT,
            ACC=acc,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
        )
    return dx


def _empty_stats(lead: torch.Size, device: torch.device) -> Stats:
    h, lse, confidence, margin = (torch.empty(lead, dtype=torch.float32, device=device) for _ in range(4))
    return h, lse, confidence, torch.empty(lead, dtype=torch.int64, device=device), margin


def entropy(logits: Tensor) -> Tensor:
    result = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    _forward(logits, [result, None, None, None, None], top2=False)
    return result


def entropy_backward(grad: Tensor, logits: Tensor) -> Tensor:
    return _backward(logits, [grad, None, None, None], top2=False)


def token_stats(logits: Tensor) -> Stats:
    result = _empty_stats(logits.shape[:-1], logits.device)
    _forward(logits, list(result), top2=True)
    return result


def token_stats_backward(
    grad_entropy: Tensor, grad_logsumexp: Tensor, grad_confidence: Tensor, grad_margin: Tensor, logits: Tensor
) -> Tensor:
    return _backward(logits, [grad_entropy, grad_logsumexp, grad_confidence, grad_margin], top2=True)


def linear_token_stats(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Stats:
    (n_v, d), lead = weight.shape, hidden.shape[:-1]
    x = hidden.reshape(-1, d).contiguous()
    n_splits = triton.cdiv(n_v, _LINEAR_SPLIT)
    workspace = _workspace(x.shape[0], n_splits, tl.float32, x.device)
    tile, operand = matrix_tile(x, weight)
    _common.launch(
        _linear_stats_kernel,
        triton.cdiv(x.shape[0], tile.rows) * n_splits,
        tile.tile,
        x,
        weight,
        bias if bias is None else bias.float().contiguous(),
        *workspace,
        x.shape[0],
        n_splits,
        n_v,
        d,
        *weight.stride(),
        D=d,
        OPERAND=operand,
        SPLIT=_LINEAR_SPLIT,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK_K=tile.k,
    )
    result = _empty_stats(lead, x.device)
    _merge(workspace, tl.float32, list(result), top2=True)
    return result
