"""What a program knows of its rows: sums and the two largest logits, of the part it has read, of tiles and of parts merged."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mdmi_fast.backends.triton._common import (
    actual,
    defined,
    entropy_of,
    load_logits,
    merge_sums,
    part_ptrs,
    tile_sums,
)


class Partial(NamedTuple):
    """Partial states, of every field [part, row]: four fields of sums, two of columns."""

    sums: Any
    columns: Any


class Fields(NamedTuple):
    """The statistics, or their gradients, of rows in one piece; None = not asked for."""

    entropy: Any = None
    logsumexp: Any = None
    confidence: Any = None
    token: Any = None
    margin: Any = None


class State(NamedTuple):
    """Of rows [R] as far as they are read: the sums of `tile_sums`, and columns of the two largest logits and the second."""

    top: Any
    total: Any
    weighted: Any
    token: Any
    second: Any
    runner_up: Any


@triton.jit
def empty_state(ROWS: tl.constexpr, ACC: tl.constexpr):
    nothing = tl.full((ROWS,), -float("inf"), ACC)
    zero, column = tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), tl.int32)
    return State(nothing, zero, zero, column, nothing, column)


@triton.jit
def _tile_top2(x, columns, top):
    """Column of top, the second largest and its column, of a tile [R, C]; lowest columns at ties."""
    token = tl.min(tl.where(x == top[:, None], columns[None, :], 2147483647), 1)
    others = tl.where(columns[None, :] == token[:, None], -float("inf"), x)
    second = tl.max(others, 1)
    runner_up = tl.min(tl.where(others == second[:, None], columns[None, :], 2147483647), 1)
    return token, second, runner_up


@triton.jit
def _merge_top2(a, b):
    """Column of the largest, the second and its column, of two parts of a row, a before b."""
    b_first = b.top > a.top
    rest_a = tl.where(b_first, a.top, a.second)
    rest_b = tl.where(b_first, b.second, b.top)
    column_a = tl.where(b_first, a.token, a.runner_up)
    column_b = tl.where(b_first, b.runner_up, b.token)
    token = tl.where(b_first, b.token, a.token)
    return token, tl.maximum(rest_a, rest_b), tl.where(rest_a >= rest_b, column_a, column_b)


@triton.jit
def _merge(a, b, TOP2: tl.constexpr):
    """The state of two parts of a row, a before b."""
    if TOP2:
        token, second, runner_up = _merge_top2(a, b)
    else:
        token, second, runner_up = a.token, a.second, a.runner_up
    top, total, weighted = merge_sums(a.top, a.total, a.weighted, b.top, b.total, b.weighted)
    return State(top, total, weighted, token, second, runner_up)


@triton.jit
def add_tile(state, x, columns, TOP2: tl.constexpr):
    """The state of rows with one more tile [R, C] of their logits."""
    top, total, weighted = tile_sums(x)
    if TOP2:
        token, second, runner_up = _tile_top2(x, columns, top)
    else:
        token, second, runner_up = state.token, state.second, state.runner_up
    return _merge(state, State(top, total, weighted, token, second, runner_up), TOP2)


@triton.jit
def store_partial(partial, state, part, rows, sizes, TOP2: tl.constexpr):
    row, inside = rows
    tl.store(part_ptrs(partial.sums, 0, part, row, sizes), state.top, mask=inside)
    tl.store(part_ptrs(partial.sums, 1, part, row, sizes), state.total, mask=inside)
    tl.store(part_ptrs(partial.sums, 2, part, row, sizes), state.weighted, mask=inside)
    if TOP2:
        tl.store(part_ptrs(partial.sums, 3, part, row, sizes), state.second, mask=inside)
        tl.store(part_ptrs(partial.columns, 0, part, row, sizes), state.token, mask=inside)
        tl.store(part_ptrs(partial.columns, 1, part, row, sizes), state.runner_up, mask=inside)


@triton.jit
def _load_partial(partial, part, rows, sizes, ACC: tl.constexpr, TOP2: tl.constexpr):
    row, inside = rows
    top = load_logits(part_ptrs(partial.sums, 0, part, row, sizes), inside, ACC)
    total = tl.load(part_ptrs(partial.sums, 1, part, row, sizes), mask=inside, other=0.0)
    weighted = tl.load(part_ptrs(partial.sums, 2, part, row, sizes), mask=inside, other=0.0)
    token, second, runner_up = tl.zeros(row.shape, tl.int32), top, tl.zeros(row.shape, tl.int32)
    if TOP2:
        second = load_logits(part_ptrs(partial.sums, 3, part, row, sizes), inside, ACC)
        token = tl.load(part_ptrs(partial.columns, 0, part, row, sizes), mask=inside, other=0)
        runner_up = tl.load(part_ptrs(partial.columns, 1, part, row, sizes), mask=inside, other=0)
    return State(top, total, weighted, token, second, runner_up)


@triton.jit
def merged(partial, row, inside, sizes, ACC: tl.constexpr, TOP2: tl.constexpr):
    """The state of whole rows from partial ones."""
    state = empty_state(row.shape[0], ACC)
    for part in range(actual(sizes.n_parts)):
        state = _merge(state, _load_partial(partial, part, (row, inside), sizes, ACC, TOP2), TOP2)
    return state


@triton.jit
def store_stats(out, state, row, inside, TOP2: tl.constexpr):
    tl.store(out.entropy + row, entropy_of(state.total, state.weighted).to(tl.float32), mask=inside)
    if TOP2:
        total = defined(state.total)
        margin = (1.0 - tl.exp(state.second - state.top)) / total
        tl.store(out.logsumexp + row, (state.top + tl.log(total)).to(tl.float32), mask=inside)
        tl.store(out.confidence + row, (1.0 / total).to(tl.float32), mask=inside)
        tl.store(out.token + row, tl.where(total != total, 0, state.token).to(tl.int64), mask=inside)
        tl.store(out.margin + row, margin.to(tl.float32), mask=inside)
