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
    Lines,
    Matrix,
    Sizes,
    accumulator,
    actual,
    defined,
    entropy_of,
    load_logits,
    matrix_product,
    matrix_tile,
    part_of_program,
    product,
    rounded,
    row_ptrs,
    row_tile,
    row_views,
    rows_of_block,
    sizes_of,
    torch_dtype,
    varying,
    view_of,
)
from mdmi_fast.backends.triton._stats_state import (
    Fields,
    Partial,
    add_tile,
    empty_state,
    merged,
    store_partial,
    store_stats,
)

Stats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _stats_kernel(
    x,
    partial,
    out,
    sizes,
    TOP2: tl.constexpr,
    SPLIT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (row block, part): columns [SPLIT * part, SPLIT * (part + 1)) of ROWS rows, into partial or, if that is None, out."""
    block, part = part_of_program(sizes)
    row, inside = rows_of_block(block, sizes, ROWS)
    x_ptrs = row_ptrs(x, row, sizes)[:, None]
    state = empty_state(ROWS, ACC)
    first = part * SPLIT
    for start in range(first, tl.minimum(first + SPLIT, sizes.n_v), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        # without a bound of the part: it is a multiple of COLUMNS, or the whole row
        within = inside[:, None] & (columns < sizes.n_v)[None, :]
        logits = load_logits(x_ptrs + columns.to(tl.int64)[None, :] * x.v, within, ACC)
        state = add_tile(state, logits, columns, TOP2)
    if partial is None:
        store_stats(out, state, row, inside, TOP2)
    else:
        store_partial(partial, state, part, (row, inside), sizes, TOP2)


@triton.jit
def _linear_stats_kernel(
    x_ptr,
    w,
    bias_ptr,
    partial,
    sizes,
    D: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (part, row block): partial states over the vocabulary's columns [SPLIT * part, SPLIT * (part + 1)).

    x is [n_rows, D] in one piece, w [V, D].
    """
    n_blocks = tl.cdiv(actual(sizes.n_rows), ROWS)
    part = tl.program_id(0) // n_blocks
    row, inside = rows_of_block(tl.program_id(0) % n_blocks, sizes, ROWS)
    state = empty_state(ROWS, tl.float32)
    first = part * SPLIT
    for start in range(first, tl.minimum(first + SPLIT, sizes.n_v), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        known = columns < sizes.n_v
        columns_of_w = Lines(w.ptr + columns.to(tl.int64) * w.row, known, w.column)
        x = matrix_product(Lines(x_ptr + row * D, inside, 1), columns_of_w, D, OPERAND, "ieee", BLOCK_K)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + columns, mask=known, other=0.0)[None, :]
        state = add_tile(state, tl.where(known[None, :], x, -float("inf")), columns, True)
    store_partial(partial, state, part, (row, inside), sizes, True)


@triton.jit
def _stats_merge_kernel(partial, out, sizes, TOP2: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr):
    row, inside = rows_of_block(tl.program_id(0), sizes, ROWS)
    store_stats(out, merged(partial, row, inside, sizes, ACC, TOP2), row, inside, TOP2)


@triton.jit
def _load_grad(grad_ptr, row, inside, ACC: tl.constexpr):
    return tl.load(grad_ptr + row, mask=inside, other=0.0).to(ACC)[:, None]


@triton.jit
def _stats_backward_kernel(
    x,
    partial,
    grad,
    dx_ptr,
    sizes,
    TOP2: tl.constexpr,
    SPLIT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient dx [row, V] of the columns of `_stats_kernel`'s program, from the partial states."""
    block, part = part_of_program(sizes)
    row, inside = rows_of_block(block, sizes, ROWS)
    x_ptrs = row_ptrs(x, row, sizes)[:, None]
    state = merged(partial, row, inside, sizes, ACC, TOP2)
    h = entropy_of(state.total, state.weighted)
    total = defined(state.total)
    g_h = _load_grad(grad.entropy, row, inside, ACC)
    if TOP2:
        p_top = (1.0 / total)[:, None]
        p_second = (tl.exp(state.second - state.top) / total)[:, None]
        g_margin = _load_grad(grad.margin, row, inside, ACC)
        g_top = _load_grad(grad.confidence, row, inside, ACC)
        g_logsumexp = _load_grad(grad.logsumexp, row, inside, ACC)
    first = part * SPLIT
    for start in range(first, tl.minimum(first + SPLIT, sizes.n_v), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        within = inside[:, None] & (columns < sizes.n_v)[None, :]
        logits = load_logits(x_ptrs + columns.to(tl.int64)[None, :] * x.v, within, ACC)
        shifted = logits - state.top[:, None]
        p = tl.exp(shifted) / total[:, None]
        dx = product(p * tl.maximum(shifted + (h - tl.log(total))[:, None], LOWEST), -g_h)
        if TOP2:
            d_top = tl.where(columns[None, :] == state.token[:, None], p_top, 0.0) - p * p_top
            d_second = tl.where(columns[None, :] == state.runner_up[:, None], p_second, 0.0) - p * p_second
            dx += product(p, g_logsumexp) + product(d_top, g_top) + product(d_top - d_second, g_margin)
        dx = tl.where((h != h)[:, None], 0.0, dx)
        dx_ptrs = dx_ptr + row[:, None] * sizes.n_v + columns[None, :]
        tl.store(dx_ptrs, rounded(dx, dx_ptr.dtype.element_ty), mask=within)


# --- launching

_LINEAR_SPLIT = 4096
_MERGED_ROWS = 32


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    exact = op == "linear_token_stats" and any(t.dtype == torch.float64 for t in tensors)
    return ["multiplies in float32, got float64"] if exact else []


def _n_parts(n_v: int) -> int:
    return triton.cdiv(n_v, ROW_SPLIT)


def _scratch(n_rows: int, n_parts: int, acc: tl.dtype, device: torch.device) -> Partial:
    sums = torch.empty(4, n_parts, n_rows, dtype=torch_dtype(acc), device=device)
    return Partial(sums, torch.empty(2, n_parts, n_rows, dtype=torch.int32, device=device))


def _scratch_of(x: Tensor) -> Partial:
    """For the rows of a view [outer, inner, V]."""
    outer, inner, n_v = x.shape
    return _scratch(outer * inner, _n_parts(n_v), accumulator(x), x.device)


def _launch(kernel, x: Tensor, *args: object, top2: bool) -> None:
    """One program for each block and part of the rows of a view [outer, inner, V]."""
    (outer, inner, n_v), acc = x.shape, accumulator(x)
    n_parts, tile = _n_parts(n_v), row_tile(n_v, acc)
    _common.launch(
        kernel,
        triton.cdiv(outer * inner, tile.rows) * n_parts,
        tile.tile,
        view_of(x, "v"),
        *args,
        sizes_of(x, n_parts),
        TOP2=top2,
        SPLIT=ROW_SPLIT,
        ACC=acc,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )


def _launch_merge(partial: Partial, out: Fields, acc: tl.dtype, top2: bool) -> None:
    _, n_parts, n_rows = partial.sums.shape
    sizes = Sizes(varying(n_rows), None, varying(n_parts), None)
    options = {"TOP2": top2, "ACC": acc, "ROWS": _MERGED_ROWS}
    n_programs = triton.cdiv(n_rows, _MERGED_ROWS)
    _common.launch(_stats_merge_kernel, n_programs, _common.Tile(warps=1), partial, out, sizes, **options)


def _forward(logits: Tensor, out: Fields, top2: bool) -> None:
    """Fills out, [*lead] each."""
    asked = {name: t for name, t in out._asdict().items() if t is not None}
    for x, *parts in row_views(logits.shape[:-1], logits, *asked.values()):
        targets = Fields(**dict(zip(asked, parts, strict=True)))
        if _n_parts(logits.shape[-1]) == 1:
            _launch(_stats_kernel, x, None, targets, top2=top2)
        else:
            partial = _scratch_of(x)
            _launch(_stats_kernel, x, partial, None, top2=top2)
            _launch_merge(partial, targets, accumulator(x), top2)


def _backward(logits: Tensor, grads: Fields, top2: bool) -> Tensor:
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    given = {name: g.contiguous() for name, g in grads._asdict().items() if g is not None}
    for x, out, *parts in row_views(logits.shape[:-1], logits, dx, *given.values()):
        partial = _scratch_of(x)
        _launch(_stats_kernel, x, partial, None, top2=top2)
        own = Fields(**dict(zip(given, parts, strict=True)))
        _launch(_stats_backward_kernel, x, partial, own, out, top2=top2)
    return dx


def _empty_stats(lead: torch.Size, device: torch.device) -> Stats:
    h, lse, confidence, margin = (torch.empty(lead, dtype=torch.float32, device=device) for _ in range(4))
    return h, lse, confidence, torch.empty(lead, dtype=torch.int64, device=device), margin


def entropy(logits: Tensor) -> Tensor:
    result = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    _forward(logits, Fields(entropy=result), top2=False)
    return result


def entropy_backward(grad: Tensor, logits: Tensor) -> Tensor:
    return _backward(logits, Fields(entropy=grad), top2=False)


def token_stats(logits: Tensor) -> Stats:
    result = _empty_stats(logits.shape[:-1], logits.device)
    _forward(logits, Fields(*result), top2=True)
    return result


def token_stats_backward(
    grad_entropy: Tensor, grad_logsumexp: Tensor, grad_confidence: Tensor, grad_margin: Tensor, logits: Tensor
) -> Tensor:
    return _backward(logits, Fields(grad_entropy, grad_logsumexp, grad_confidence, None, grad_margin), top2=True)


def linear_token_stats(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Stats:
    (n_v, d), lead = weight.shape, hidden.shape[:-1]
    x = hidden.reshape(-1, d).contiguous()
    n_rows, n_parts = x.shape[0], triton.cdiv(n_v, _LINEAR_SPLIT)
    partial = _scratch(n_rows, n_parts, tl.float32, x.device)
    tile, operand = matrix_tile(x, weight)
    _common.launch(
        _linear_stats_kernel,
        triton.cdiv(n_rows, tile.rows) * n_parts,
        tile.tile,
        x,
        Matrix(weight, *weight.stride()),
        bias if bias is None else bias.float().contiguous(),
        partial,
        Sizes(varying(n_rows), None, varying(n_parts), n_v),
        D=d,
        OPERAND=operand,
        SPLIT=_LINEAR_SPLIT,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK_K=tile.k,
    )
    result = _empty_stats(lead, x.device)
    _launch_merge(partial, Fields(*result), tl.float32, top2=True)
    return result
