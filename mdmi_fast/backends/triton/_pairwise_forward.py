"""Scores of a network of up to two dense layers in one launch.

A program scores a tile of pairs: it forms the activations of the first layer in registers from a few rows of u and v, as the
left operand of the products of the dense layers, and writes one number a pair. Activations never reach memory.

Every layout is a list of left positions, a list of right positions, and linear places of the pairs in the result:
    all pairs   i n + j                 a list holds the masked positions, then -1
    rows        r n + j                 the left list holds the rows
    band        i 2w + j + w            pairs with |i - j| <= w only; this is entry [i, w + j - i] of [n, 2w + 1]
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.calls import PairCall
from mdmi_fast.backends.triton import _common
from mdmi_fast.backends.triton._common import actual, dot, relu, rounded, varying
from mdmi_fast.backends.triton._pairwise_network import (
    Network,
    combined,
    first_layer,
    half_of,
    halves_of,
    load_half,
    load_vector,
    load_weights,
    of_sequence,
    within,
)
from mdmi_fast.backends.triton._pairwise_positions import listed, masked_positions
from mdmi_fast.backends.triton.tiles import PairTile
from mdmi_fast.backends.triton.tuner import tuner


class Layout(NamedTuple):
    """Positions, left ones, programs of a sequence, tiles in a row of them, and the window; all `varying`."""

    n: Any
    n_left: Any
    n_programs: Any
    tiles_j: Any
    window: Any


class Shift(NamedTuple):
    """What is added to scores by the relation of a pair: [R], or None; the relation [N, N] int32, or None: by distance; strides of its
    sequences and rows, and R. The last three are `varying`.
    """

    ptr: Any
    relation: Any
    batch: Any
    row: Any
    count: Any


class Places(NamedTuple):
    """Where the pairs are in the result: its first element, strides of sequences and left positions, and the place of pair
    (0, 0); strides and place are `varying`.
    """

    ptr: Any
    batch: Any
    row: Any
    first: Any


@triton.jit
def _shift_of(shift, b, i, j):
    """[I, J] float32: what is added to the scores of positions i and j, which broadcast, of sequence b; None: nothing."""
    if shift.ptr is None:
        more = None
    else:
        if shift.relation is None:
            r = tl.minimum(tl.maximum(tl.abs(i - j), 1), actual(shift.count)) - 1
        else:
            place = b * actual(shift.batch) + i.to(tl.int64) * actual(shift.row) + j.to(tl.int64)
            r = tl.load(shift.relation + place)
        more = tl.load(shift.ptr + r)
    return more


@triton.jit
def _score(x, y, left, right, layers, more, NET: tl.constexpr):
    """f [I, J] of halves x and y, more [I, J] added before the activation, or None."""
    N_PAIRS: tl.constexpr = left.shape[0] * right.shape[0]
    LAST: tl.constexpr = NET.BLOCK_L
    PRECISION: tl.constexpr = NET.PRECISION
    f = tl.zeros((N_PAIRS,), tl.float32)
    if NET.H2 == 0:
        for start in range(0, NET.H1, NET.BLOCK_K):
            k = start + tl.arange(0, NET.BLOCK_K)
            z = combined(load_half(x, left, k, NET.H1), load_half(y, right, k, NET.H1), tl.float32, NET.ADD)
            f += tl.sum(z * load_vector(layers.w_out, k, NET.H1)[None, :], 1)
    elif NET.H3 == 0:
        for start in range(0, NET.H2, NET.BLOCK_N):
            columns = start + tl.arange(0, NET.BLOCK_N)
            z = first_layer((x, y), (left, right), layers, columns, NET)
            f += tl.sum(z * load_vector(layers.w_out, columns, NET.H2)[None, :], 1)
    else:
        for start in range(0, NET.H3, NET.BLOCK_L):
            last = start + tl.arange(0, NET.BLOCK_L)
            acc = tl.zeros((N_PAIRS, LAST), tl.float32)
            for middle in range(0, NET.H2, NET.BLOCK_N):
                columns = middle + tl.arange(0, NET.BLOCK_N)
                z = first_layer((x, y), (left, right), layers, columns, NET)
                w = load_weights(layers.w2, columns, last, NET.H2, NET.H3)
                acc = dot(rounded(z, w.dtype), w, acc, PRECISION)
            z = within(relu(acc + load_vector(layers.b2, last, NET.H3)[None, :]), last, NET.H3, NET.BLOCK_L)
            f += tl.sum(z * load_vector(layers.w_out, last, NET.H3)[None, :], 1)
    f += tl.load(layers.b_out)
    if more is not None:
        f += tl.reshape(more, (N_PAIRS,))
    if NET.SOFTPLUS:
        f = tl.maximum(f, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(f)))
    return tl.reshape(f, (left.shape[0], right.shape[0]))


@triton.jit
def _triangle_tile(program, n_tiles):
    """Row and column >= row of tile number `program` of the upper triangle of n_tiles x n_tiles tiles.

    Row a and row n - a of the triangle of an odd n have n tiles together and are one line of a rectangle; an even n is the
    odd n + 1 without its diagonal.
    """
    even = 1 - n_tiles % 2
    width = n_tiles + even
    a, b = program // width + even, program % width
    below = b < a
    row = tl.where(below, n_tiles - a, a - even)
    return row, tl.where(below, n_tiles - a + b, b - even)


@triton.jit
def _pairwise_mlp_fwd_kernel(
    u,
    v,
    layers,
    shift,
    rows_ptr,
    positions_ptr,
    out,
    layout,
    NET: tl.constexpr,
    MEAN: tl.constexpr,
    UPPER: tl.constexpr,
    MIRROR: tl.constexpr,
    BAND: tl.constexpr,
):
    """One tile of pairs of one sequence; n_programs a sequence. MEAN and UPPER: the symmetry, where it takes both directions;
    MIRROR: only pairs i < j are scored, and written twice.
    """
    BLOCK_I: tl.constexpr = NET.BLOCK_I
    BLOCK_J: tl.constexpr = NET.BLOCK_J
    n, n_left, window = actual(layout.n), actual(layout.n_left), actual(layout.window)
    n_programs, tiles_j = actual(layout.n_programs), actual(layout.tiles_j)
    b = (tl.program_id(0) // n_programs).to(tl.int64)
    program = tl.program_id(0) % n_programs
    if BAND:
        first_i = program // tiles_j * BLOCK_I
        first_j = first_i + program % tiles_j * BLOCK_J
        if not MIRROR:
            first_j -= window
    elif MIRROR:
        SIDE: tl.constexpr = BLOCK_I if BLOCK_I > BLOCK_J else BLOCK_J
        IN_SIDE: tl.constexpr = (SIDE // BLOCK_I) * (SIDE // BLOCK_J)
        row, column = _triangle_tile(program // IN_SIDE, tiles_j)
        inner = program % IN_SIDE
        first_i = row * SIDE + inner // (SIDE // BLOCK_J) * BLOCK_I
        first_j = column * SIDE + inner % (SIDE // BLOCK_J) * BLOCK_J
    else:
        first_i = program // tiles_j * BLOCK_I
        first_j = program % tiles_j * BLOCK_J
    place = first_i + tl.arange(0, BLOCK_I)
    if positions_ptr is not None:
        positions_ptr += b * n
    if rows_ptr is None:
        left = listed(positions_ptr, place, n)
        out_row = left.to(tl.int64)
    else:
        left = listed(rows_ptr + b * n_left, place, n_left)
        out_row = place.to(tl.int64)
    right = listed(positions_ptr, first_j + tl.arange(0, BLOCK_J), n)
    keep = (left >= 0)[:, None] & (right >= 0)[None, :]
    if MIRROR:
        keep &= left[:, None] < right[None, :]
    else:
        keep &= left[:, None] != right[None, :]
    if BAND:
        keep &= tl.abs(left[:, None] - right[None, :]) <= window
    if tl.max(keep.to(tl.int32)) == 0:  # behind the last masked position
        return
    x, y = of_sequence(u, b), of_sequence(v, b)
    i, j = tl.maximum(left, 0)[:, None], tl.maximum(right, 0)[None, :]
    f = _score(x, y, left, right, layers, _shift_of(shift, b, i, j), NET)
    if MEAN or UPPER:
        f_back = _score(y, x, left, right, layers, _shift_of(shift, b, j, i), NET)
        f = (f + f_back) / 2 if MEAN else tl.where(left[:, None] < right[None, :], f, f_back)
    out_ptr = out.ptr + b * actual(out.batch) + actual(out.first)
    out_column = right.to(tl.int64)
    tl.store(out_ptr + out_row[:, None] * actual(out.row) + out_column[None, :], f, mask=keep)
    if MIRROR:
        tl.store(out_ptr + out_column[None, :] * actual(out.row) + out_row[:, None], f, mask=keep)


# --- launching


def shift_of(call: PairCall) -> Shift:
    shift, relation = call.shift, call.relation
    if shift is None:
        return Shift(None, None, *map(varying, (0, 0, 1)))
    shift = shift.float().contiguous()
    batch = 0 if relation is None or len(relation) == 1 else relation.stride(0)
    return Shift(shift, relation, *map(varying, (batch, call.u.shape[1], len(shift))))


def score(call: PairCall, network: Network) -> Tensor:
    """The scores of a call that asks for some; its rows are int32, those that are not scored -1."""
    halves, (combine, symmetry, activation, _), window = halves_of(call), call.rule, call.window
    u, v, symmetric = halves.u, halves.v, call.is_symmetric
    batch, n_left, n_columns = call.shape
    n = u.shape[1]
    result = torch.zeros((batch, n_left, n_columns), dtype=torch.float32, device=u.device)
    places = (result.stride(0), n if window is None else 2 * window, window or 0)
    places = Places(result, *map(varying, places))
    positions = masked_positions(call.mask)
    mirror = call.rows is None and (symmetry != "none" or symmetric)

    def run(tile: PairTile) -> None:
        tiles_i, tiles_j = triton.cdiv(n_left, tile.i), triton.cdiv(n, tile.j)
        n_programs = tiles_i * tiles_j
        if window is not None:
            tiles_j = triton.cdiv(tile.i + (window if mirror else 2 * window), tile.j)
            n_programs = tiles_i * tiles_j
        elif mirror:
            side = max(tile.i, tile.j)
            tiles_j = triton.cdiv(n, side)
            n_programs = tiles_j * (tiles_j + 1) // 2 * (side // tile.i) * (side // tile.j)
        _common.launch(
            _pairwise_mlp_fwd_kernel,
            batch * n_programs,
            tile.tile,
            half_of(u),
            half_of(v),
            network.layers,
            shift_of(call),
            call.rows,
            positions,
            places,
            Layout(*map(varying, (n, n_left, n_programs, tiles_j, window or 0))),
            NET=network.net(tile, combine, activation),
            MEAN=symmetry == "mean" and not symmetric,
            UPPER=symmetry == "upper" and not symmetric and not mirror,
            MIRROR=mirror,
            BAND=window is not None,
        )

    run(tuner.tile("forward", u.device, network.precision, network.widths, run))
    return result
