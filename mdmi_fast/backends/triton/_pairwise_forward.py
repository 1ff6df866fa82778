"""Scores of a network of up to two dense layers in one launch.

A program scores a tile of pairs: it forms the activations of the first layer in registers from a few rows of u and v, as the
left operand of the products of the dense layers, and writes one number a pair. Activations never reach memory.

Every layout is a list of left positions, a list of right positions, and linear places of the pairs in the result:
    all pairs   i n + j                 a list holds the masked positions, then -1
    rows        r n + j                 the left list holds the rows
    band        i 2w + j + w            pairs with |i - j| <= w only; this is entry [i, w + j - i] of [n, 2w + 1]
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.calls import PairCall, PairNetwork
from mdmi_fast.backends.triton import _common
from mdmi_fast.backends.triton._common import INTERPRETED, dot, relu, rounded
from mdmi_fast.backends.triton.tiles import PairTile
from mdmi_fast.backends.triton.tuner import tuner

MOST_LAYERS = 2

# --- what kernels take


class Half(NamedTuple):
    """u or v, of one sequence inside a kernel: where its first row is, and how far its rows are apart."""

    ptr: Any
    row: Any


class Layers(NamedTuple):
    """Weights and biases of the dense layers, None where there is no such layer, and of the output layer."""

    w1: Any
    b1: Any
    w2: Any
    b2: Any
    w_out: Any
    b_out: Any


@dataclass(frozen=True)
class Net:
    """What a kernel is compiled for: the network, and how many inputs and outputs of its layers are taken at a time.

    Kernels name what they use of it in a shape or hand on as a string, because Triton 3.6 takes neither from a field.
    """

    ADD: bool
    """Whether halves are added (and go through a relu), else multiplied."""
    SOFTPLUS: bool
    PRECISION: str
    """Of float32 products."""
    H1: int
    H2: int
    H3: int
    """Widths; 0 where there is no such layer."""
    BLOCK_I: int
    BLOCK_J: int
    """Positions of a tile of pairs."""
    BLOCK_K: int
    """Inputs of the first layer."""
    BLOCK_N: int
    """Its outputs."""
    BLOCK_L: int
    """Outputs of the second layer."""


# --- lists of positions


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


# --- the network on a tile of pairs, positions left [I] and right [J]


@triton.jit
def load_half(half, position, columns, n_columns):
    """Rows of a half at positions, 0 where the position is -1."""
    inside = (position >= 0)[:, None] & (columns < n_columns)[None, :]
    return tl.load(half.ptr + position.to(tl.int64)[:, None] * half.row + columns[None, :], mask=inside, other=0.0)


@triton.jit
def combined(left, right, OPERAND: tl.constexpr, ADD: tl.constexpr):
    """Activations [I * J, K] of the combined halves [I, K] and [J, K], in the dtype of the products."""
    if INTERPRETED or left.dtype != OPERAND:  # the interpreter adds the raw bits of bfloat16
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    if ADD:
        z = relu(left[:, None, :] + right[None, :, :])
    else:
        z = left[:, None, :] * right[None, :, :]
    return rounded(tl.reshape(z, (left.shape[0] * right.shape[0], left.shape[1])), OPERAND)


@triton.jit
def load_weights(w_ptr, rows, columns, N_IN: tl.constexpr, N_OUT: tl.constexpr):
    """A tile of a matrix [N_IN, N_OUT], 0 outside."""
    inside = (rows < N_IN)[:, None] & (columns < N_OUT)[None, :]
    return tl.load(w_ptr + rows[:, None] * N_OUT + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_vector(x_ptr, columns, N: tl.constexpr):
    return tl.load(x_ptr + columns, mask=columns < N, other=0.0)


@triton.jit
def first_layer(x, y, left, right, layers, columns, NET: tl.constexpr):
    """relu(z W + b) [I * J, columns] in float32, of halves x and y. Columns behind H2 are 0: so are their weights and biases."""
    PRECISION: tl.constexpr = NET.PRECISION
    acc = tl.zeros((left.shape[0] * right.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, NET.H1, NET.BLOCK_K):
        k = start + tl.arange(0, NET.BLOCK_K)
        w = load_weights(layers.w1, k, columns, NET.H1, NET.H2)
        z = combined(load_half(x, left, k, NET.H1), load_half(y, right, k, NET.H1), w.dtype, NET.ADD)
        acc = dot(z, w, acc, PRECISION)
    return relu(acc + load_vector(layers.b1, columns, NET.H2)[None, :])


@triton.jit
def _score(x, y, left, right, layers, NET: tl.constexpr):
    """f [I, J] of halves x and y."""
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
            z = first_layer(x, y, left, right, layers, columns, NET)
            f += tl.sum(z * load_vector(layers.w_out, columns, NET.H2)[None, :], 1)
    else:
        for start in range(0, NET.H3, NET.BLOCK_L):
            last = start + tl.arange(0, NET.BLOCK_L)
            acc = tl.zeros((N_PAIRS, LAST), tl.float32)
            for middle in range(0, NET.H2, NET.BLOCK_N):
                columns = middle + tl.arange(0, NET.BLOCK_N)
                z = first_layer(x, y, left, right, layers, columns, NET)
                w = load_weights(layers.w2, columns, last, NET.H2, NET.H3)
                acc = dot(rounded(z, w.dtype), w, acc, PRECISION)
            z = relu(acc + load_vector(layers.b2, last, NET.H3)[None, :])
            f += tl.sum(z * load_vector(layers.w_out, last, NET.H3)[None, :], 1)
    f += tl.load(layers.b_out)
    if NET.SOFTPLUS:
        f = tl.maximum(f, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(f)))
    return tl.reshape(f, (left.shape[0], right.shape[0]))


# --- scores


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


@triton.jit(
    do_not_specialize=[
        "n",
        "n_left",
        "n_programs",
        "tiles_j",
        "window",
        "u_batch",
        "v_batch",
        "out_batch",
        "out_i",
        "out_first",
    ]
)
def _pairwise_mlp_fwd_kernel(
    u,
    v,
    layers,
    rows_ptr,
    positions_ptr,
    out_ptr,
    n,
    n_left,
    n_programs,
    tiles_j,
    window,
    u_batch,
    v_batch,
    out_batch,
    out_i,
    out_first,
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
    x = Half(u.ptr + b * u_batch, u.row)
    y = Half(v.ptr + b * v_batch, v.row)
    f = _score(x, y, left, right, layers, NET)
    if MEAN or UPPER:
        f_back = _score(y, x, left, right, layers, NET)
        f = (f + f_back) / 2 if MEAN else tl.where(left[:, None] < right[None, :], f, f_back)
    out_ptr += b * out_batch + out_first
    out_column = right.to(tl.int64)
    tl.store(out_ptr + out_row[:, None] * out_i + out_column[None, :], f, mask=keep)
    if MIRROR:
        tl.store(out_ptr + out_column[None, :] * out_i + out_row[:, None], f, mask=keep)


# --- launching

_MASK_BLOCK = 1024
_OPERAND = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Network:
    """The weights in the dtype of the products, the vectors in float32, all contiguous."""

    weights: list[Tensor]
    biases: list[Tensor]
    w_out: Tensor
    b_out: Tensor
    precision: str

    @property
    def operand(self) -> torch.dtype:
        return _OPERAND[self.precision]

    @property
    def widths(self) -> tuple[int, ...]:
        """H1 and those of the dense layers; at least three, 0 where there is no such layer."""
        h1 = self.weights[0].shape[0] if self.weights else self.w_out.shape[0]
        return h1, *(w.shape[1] for w in self.weights), *[0] * (MOST_LAYERS - len(self.weights))

    @property
    def layers(self) -> Layers:
        """Of a network that kernels hold in registers."""
        layers = [t for layer in zip(self.weights, self.biases, strict=True) for t in layer]
        return Layers(*layers, *[None] * (2 * MOST_LAYERS - len(layers)), self.w_out, self.b_out)

    @property
    def input_precision(self) -> str:
        return "tf32" if self.precision == "tf32" else "ieee"

    def net(self, tile: PairTile, combine: str, activation: str = "identity") -> Net:
        h1, h2, h3 = self.widths
        return Net(
            ADD=combine == "add",
            SOFTPLUS=activation == "softplus",
            PRECISION=self.input_precision,
            H1=h1,
            H2=h2,
            H3=h3,
            BLOCK_I=tile.i,
            BLOCK_J=tile.j,
            BLOCK_K=block(h1, tile.k),
            BLOCK_N=block(h2, tile.n),
            BLOCK_L=block(h3, tile.last),
        )


def prepare_pairwise(network: PairNetwork, precision: str) -> Network:
    operand = _OPERAND[precision]
    return Network(
        [w.to(operand).contiguous() for w in network.weights],
        [b.float().contiguous() for b in network.biases],
        network.w_out.float().contiguous(),
        network.b_out.float(),
        precision,
    )


@dataclass(frozen=True)
class Halves:
    """u and v of one dtype with rows in one piece."""

    u: Tensor
    v: Tensor
    same: bool


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def halves_of(call: PairCall) -> Halves:
    u, v, same = call.u, call.v, call.halves_are_same
    if u.dtype != v.dtype:
        u, v = u.float(), v.float()
    u = _in_rows(u)
    return Halves(u, u if same else _in_rows(v), same)


def masked_positions(mask: Tensor | None) -> Tensor | None:
    """The masked positions of every sequence [B, N] int32, ascending, then -1; None if all are."""
    if mask is None:
        return None
    positions = torch.empty(mask.shape, dtype=torch.int32, device=mask.device)
    batch, n = mask.shape
    args = (mask, positions, n, *mask.stride())
    _common.launch(_positions_kernel, batch if n else 0, _common.Tile(warps=4), *args, BLOCK=_MASK_BLOCK)
    return positions


def block(size: int, most: int) -> int:
    """Of a dimension of a product: a power of two, at least 16."""
    return min(most, max(16, triton.next_power_of_2(size)))


def score(call: PairCall, network: Network) -> Tensor:
    """The scores of a call that asks for some; its rows are int32, those that are not scored -1."""
    halves, (combine, symmetry, activation, _), window = halves_of(call), call.rule, call.window
    u, v = halves.u, halves.v
    batch, n_left, n_columns = call.shape
    n = u.shape[1]
    result = torch.zeros((batch, n_left, n_columns), dtype=torch.float32, device=u.device)
    positions = masked_positions(call.mask)
    mirror = call.rows is None and (symmetry != "none" or halves.same)

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
            Half(u, u.stride(1)),
            Half(v, v.stride(1)),
            network.layers,
            call.rows,
            positions,
            result,
            n,
            n_left,
            n_programs,
            tiles_j,
            window or 0,
            u.stride(0),
            v.stride(0),
            result.stride(0),
            n if window is None else 2 * window,
            window or 0,
            NET=network.net(tile, combine, activation),
            MEAN=symmetry == "mean" and not halves.same,
            UPPER=symmetry == "upper" and not halves.same and not mirror,
            MIRROR=mirror,
            BAND=window is not None,
        )

    run(tuner.tile("forward", u.device, network.precision, network.widths, run))
    return result
