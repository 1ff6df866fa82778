"""Gradients of a network of at most one dense layer. Activations are computed again; sums are split and added up afterwards, in
order, without atomics.

e_ij is the gradient at f_ij before activation and symmetry, 0 where there is no pair.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.calls import PairNetwork
from mdmi_fast.backends.triton import _common
from mdmi_fast.backends.triton._common import actual, dot, rounded, varying
from mdmi_fast.backends.triton._pairwise_network import (
    Layers,
    Network,
    block,
    combined,
    first_layer,
    half_of,
    load_half,
    load_vector,
    load_weights,
    of_sequence,
)
from mdmi_fast.backends.triton._pairwise_positions import listed
from mdmi_fast.backends.triton.tiles import GRADIENT_INPUTS, PairTile
from mdmi_fast.backends.triton.tuner import tuner

MOST_LAYERS = 1

# Programs that share the rows of one block, and those that share the pairs of one tile of a weight's gradient.
_TILES_A_PART = 16
_MOST_PARTS = 4
_WEIGHT_PARTS = 32


# --- what kernels take


class Lists(NamedTuple):
    """Lists of left and of right positions [B, n], None for all, how many there are, and in how many tiles.

    The numbers are `varying`.
    """

    left: Any
    right: Any
    n_left: Any
    n_right: Any
    tiles_i: Any
    tiles_j: Any


class Slopes(NamedTuple):
    """e, from the place of pair (0, 0) on: strides of sequences, left and right positions, and the window, 0 if there is none.

    All but the tensor are `varying`.
    """

    ptr: Any
    batch: Any
    i: Any
    j: Any
    window: Any


@triton.jit
def _listed(list_ptr, b, place, n_list):
    """Positions of sequence b at some places of its list."""
    return listed(list_ptr if list_ptr is None else list_ptr + b * n_list, place, n_list)


@triton.jit
def _load_e(e, b, left, right, BAND: tl.constexpr):
    """e [I, J] of positions left and right of sequence b."""
    keep = (left >= 0)[:, None] & (right >= 0)[None, :]
    if BAND:
        keep &= tl.abs(left[:, None] - right[None, :]) <= actual(e.window)
    place = left.to(tl.int64)[:, None] * actual(e.i) + right.to(tl.int64)[None, :] * actual(e.j)
    return tl.load(e.ptr + b * actual(e.batch) + place, mask=keep, other=0.0)


@triton.jit
def _through_output(z, e_pairs, layers, columns, NET: tl.constexpr):
    """The gradient [I * J, columns] before the relu of the layer that gave z, from that of the scores [I * J, 1]."""
    return tl.where(z > 0, e_pairs * load_vector(layers.w_out, columns, NET.H2)[None, :], 0.0)


@triton.jit
def _through_halves(dz, left, right, ADD: tl.constexpr):
    """The gradient [I, K] of the left half [I, K] from that of the combined halves [I * J, K], summed over the right."""
    left = left.to(tl.float32)[:, None, :]
    right = right.to(tl.float32)[None, :, :]
    dz = tl.reshape(dz, (left.shape[0], right.shape[1], left.shape[2]))
    return tl.sum(tl.where(left + right > 0, dz, 0.0) if ADD else dz * right, 1)


# --- kernels


@triton.jit(do_not_specialize=["n_batch", "tiles_each"])
def _pairwise_mlp_bwd_half_kernel(
    x, y, layers, lists, e, dx_ptr, n_batch, tiles_each, NET: tl.constexpr, BAND: tl.constexpr
):
    """dx [part, b, position, H1] of BLOCK_I left positions, from the part's tiles_each tiles of right positions."""
    BLOCK_I: tl.constexpr = NET.BLOCK_I
    BLOCK_J: tl.constexpr = NET.BLOCK_J
    BLOCK_K: tl.constexpr = NET.BLOCK_K
    PRECISION: tl.constexpr = NET.PRECISION
    N_CHUNKS: tl.constexpr = triton.next_power_of_2((NET.H1 + BLOCK_K - 1) // BLOCK_K)
    n_left, n_right = actual(lists.n_left), actual(lists.n_right)
    tiles_i, tiles_j = actual(lists.tiles_i), actual(lists.tiles_j)
    program = tl.program_id(0)
    part = program // (n_batch * tiles_i)
    b = (program // tiles_i % n_batch).to(tl.int64)
    place = program % tiles_i * BLOCK_I + tl.arange(0, BLOCK_I)
    left = _listed(lists.left, b, place, n_left)
    x_b, y_b = of_sequence(x, b), of_sequence(y, b)
    chunks = tl.arange(0, N_CHUNKS)
    dx = tl.zeros((BLOCK_I, N_CHUNKS, BLOCK_K), tl.float32)  # held in registers, the chunks of H1 side by side
    first_tile = part * tiles_each
    for tile in range(first_tile, tl.minimum(first_tile + tiles_each, tiles_j)):
        right = _listed(lists.right, b, tile * BLOCK_J + tl.arange(0, BLOCK_J), n_right)
        e_here = _load_e(e, b, left, right, BAND)
        if tl.max((e_here != 0).to(tl.int32)) > 0:
            e_pairs = tl.reshape(e_here, (BLOCK_I * BLOCK_J,))[:, None]
            # without a dense layer: one round, with the gradient of the output layer itself
            for start in range(0, NET.H2 if NET.H2 > 0 else 1, NET.BLOCK_N):
                columns = start + tl.arange(0, NET.BLOCK_N)
                if NET.H2 > 0:
                    z = first_layer((x_b, y_b), (left, right), layers, columns, NET)
                    dz = rounded(_through_output(z, e_pairs, layers, columns, NET), layers.w1.dtype.element_ty)
                for first_k in range(0, NET.H1, BLOCK_K):
                    k = first_k + tl.arange(0, BLOCK_K)
                    if NET.H2 > 0:
                        w = load_weights(layers.w1, k, columns, NET.H1, NET.H2)
                        dz0 = dot(dz, tl.trans(w), tl.zeros((BLOCK_I * BLOCK_J, BLOCK_K), tl.float32), PRECISION)
                    else:
                        dz0 = e_pairs * load_vector(layers.w_out, k, NET.H1)[None, :]
                    left_half, right_half = load_half(x_b, left, k, NET.H1), load_half(y_b, right, k, NET.H1)
                    d_chunk = _through_halves(dz0, left_half, right_half, NET.ADD)[:, None, :]
                    dx += tl.where((chunks == first_k // BLOCK_K)[None, :, None], d_chunk, 0.0)
    every_k = (chunks * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    dx_ptrs = dx_ptr + ((part.to(tl.int64) * n_batch + b) * n_left + left.to(tl.int64)[:, None, None]) * NET.H1
    tl.store(dx_ptrs + every_k[None, :, :], dx, mask=(left >= 0)[:, None, None] & (every_k < NET.H1)[None, :, :])


@triton.jit(do_not_specialize=["n_tiles", "n_parts"])
def _pairwise_mlp_bwd_weights_kernel(
    x,
    y,
    layers,
    lists,
    e,
    d_layers,
    n_tiles,
    n_parts,
    NET: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Program (tile of the matrix, part): dW1 [part, H1, H2], db1 and dw_out from every n_parts-th tile of pairs.

    BLOCK_M inputs and BLOCK_N outputs of the layer are the program's; without a layer, BLOCK_M entries of w_out.
    """
    BLOCK_I: tl.constexpr = NET.BLOCK_I
    BLOCK_J: tl.constexpr = NET.BLOCK_J
    BLOCK_N: tl.constexpr = NET.BLOCK_N
    PRECISION: tl.constexpr = NET.PRECISION
    N_BLOCKS: tl.constexpr = (NET.H1 + BLOCK_M - 1) // BLOCK_M
    tiles_i, tiles_j = actual(lists.tiles_i), actual(lists.tiles_j)
    part = tl.program_id(0) % n_parts
    tile_of_matrix = tl.program_id(0) // n_parts
    rows = tile_of_matrix % N_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_of_matrix // N_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    dw1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db1 = tl.zeros((BLOCK_N,), tl.float32)
    dw_out = tl.zeros((BLOCK_N if NET.H2 > 0 else BLOCK_M,), tl.float32)
    for tile in range(part, n_tiles, n_parts):
        b = tl.cast(tile // (tiles_i * tiles_j), tl.int64)
        place_i = tile // tiles_j % tiles_i * BLOCK_I + tl.arange(0, BLOCK_I)
        place_j = tile % tiles_j * BLOCK_J + tl.arange(0, BLOCK_J)
        left = _listed(lists.left, b, place_i, actual(lists.n_left))
        right = _listed(lists.right, b, place_j, actual(lists.n_right))
        e_here = _load_e(e, b, left, right, BAND)
        if tl.max((e_here != 0).to(tl.int32)) > 0:
            e_pairs = tl.reshape(e_here, (BLOCK_I * BLOCK_J,))[:, None]
            x_b, y_b = of_sequence(x, b), of_sequence(y, b)
            left_half, right_half = load_half(x_b, left, rows, NET.H1), load_half(y_b, right, rows, NET.H1)
            if NET.H2 > 0:
                z0 = combined(left_half, right_half, layers.w1.dtype.element_ty, NET.ADD)
                z = first_layer((x_b, y_b), (left, right), layers, columns, NET)
                dz = _through_output(z, e_pairs, layers, columns, NET)
                dw1 = dot(tl.trans(z0), rounded(dz, z0.dtype), dw1, PRECISION)
                db1 += tl.sum(dz, 0)
                dw_out += tl.sum(z * e_pairs, 0)
            else:
                dw_out += tl.sum(combined(left_half, right_half, tl.float32, NET.ADD) * e_pairs, 0)
    part = part.to(tl.int64)
    if NET.H2 > 0:
        inside = (rows < NET.H1)[:, None] & (columns < NET.H2)[None, :]
        tl.store(d_layers.w1 + (part * NET.H1 + rows[:, None]) * NET.H2 + columns[None, :], dw1, mask=inside)
        if tile_of_matrix % N_BLOCKS == 0:
            tl.store(d_layers.b1 + part * NET.H2 + columns, db1, mask=columns < NET.H2)
            tl.store(d_layers.w_out + part * NET.H2 + columns, dw_out, mask=columns < NET.H2)
    else:
        tl.store(d_layers.w_out + part * NET.H1 + rows, dw_out, mask=rows < NET.H1)


# --- launching


class Side(NamedTuple):
    """Half of the pairs [B, n, H1], and its list of positions [B, n] or None for all."""

    x: Tensor
    positions: Tensor | None


class _Task(NamedTuple):
    """What is asked of both kernels.

    Attributes:
        network: whose gradients.
        e: [B, left, right], or [B, N, 2 * window + 1], contiguous.
        window: the farthest distance, None = any.
        combine: how halves are.
    """

    network: Network
    e: Tensor
    window: int | None
    combine: str

    @property
    def slopes(self) -> Slopes:
        batch, row, _ = self.e.stride()
        if self.window is None:
            return Slopes(self.e, *map(varying, (batch, row, 1, 0)))
        return Slopes(self.e.view(-1)[self.window :], *map(varying, (batch, 2 * self.window, 1, self.window)))

    def options(self, tile: PairTile) -> dict[str, object]:
        return {"NET": self.network.net(tile, self.combine), "BAND": self.window is not None}


def _lists_of(left: Side, right: Side, tile: PairTile) -> Lists:
    n_left, n_right = left.x.shape[1], right.x.shape[1]
    numbers = (n_left, n_right, triton.cdiv(n_left, tile.i), triton.cdiv(n_right, tile.j))
    return Lists(left.positions, right.positions, *map(varying, numbers))


def _half_gradient(task: _Task, own: Side, other: Side, slopes: Slopes) -> Tensor:
    """The gradient of own.x, summed over the other side."""
    network, x, y = task.network, own.x, other.x

    def run(tile: PairTile) -> Tensor:
        tiles_i, tiles_j = triton.cdiv(x.shape[1], tile.i), triton.cdiv(y.shape[1], tile.j)
        n_parts = min(_MOST_PARTS, triton.cdiv(tiles_j, _TILES_A_PART))
        dx = torch.zeros((n_parts, *x.shape), dtype=torch.float32, device=x.device)
        _common.launch(
            _pairwise_mlp_bwd_half_kernel,
            n_parts * x.shape[0] * tiles_i,
            tile.tile,
            half_of(x),
            half_of(y),
            network.layers,
            _lists_of(own, other, tile),
            slopes,
            dx,
            x.shape[0],
            triton.cdiv(tiles_j, n_parts),
            **task.options(tile),
        )
        return dx.sum(0)

    return run(tuner.tile("backward", x.device, network.precision, network.widths, run))


def _weight_gradients(task: _Task, left: Side, right: Side) -> Layers:
    """The gradients of the layer's weights and bias, if there is one, and of w_out."""
    network, x, y = task.network, left.x, right.x
    h1, h2, _ = network.widths

    def run(tile: PairTile) -> Layers:
        n_tiles = x.shape[0] * triton.cdiv(x.shape[1], tile.i) * triton.cdiv(y.shape[1], tile.j)
        n_parts = min(_WEIGHT_PARTS, n_tiles)
        options, block_m = task.options(tile), block(h1, GRADIENT_INPUTS)
        layers = network.layers._replace(b_out=None)
        d_layers = Layers(
            *(
                None if t is None else torch.empty((n_parts, *t.shape), dtype=torch.float32, device=x.device)
                for t in layers
            )
        )
        _common.launch(
            _pairwise_mlp_bwd_weights_kernel,
            triton.cdiv(h1, block_m) * triton.cdiv(max(h2, 1), options["NET"].BLOCK_N) * n_parts,
            tile.tile,
            half_of(x),
            half_of(y),
            network.layers,
            _lists_of(left, right, tile),
            task.slopes,
            d_layers,
            n_tiles,
            n_parts,
            **options,
            BLOCK_M=block_m,
        )
        return Layers(*(None if parts is None else parts.sum(0) for parts in d_layers))

    return run(tuner.tile("weights", x.device, network.precision, network.widths, run))


def gradients(
    network: Network, left: Side, right: Side, e: Tensor, window: int | None, combine: str
) -> tuple[Tensor, Tensor, PairNetwork]:
    """Those of left.x, of right.x, and of the network, all float32.

    e is [B, left, right], or [B, N, 2 * window + 1], contiguous.
    """
    task = _Task(network, e, window, combine)
    there = task.slopes
    back = there._replace(i=there.j, j=there.i)
    du, dv = _half_gradient(task, left, right, there), _half_gradient(task, right, left, back)
    d = _weight_gradients(task, left, right)
    weights, biases = ([], []) if d.w1 is None else ([d.w1], [d.b1])
    return du, dv, PairNetwork(weights, biases, d.w_out, e.sum())
