"""A small network on pairs of positions.

A program scores a tile of pairs: it forms the activations of the first layer in registers from a few rows of u and v, as the
left operand of the products of the dense layers, and writes one number a pair. Activations never reach memory.

Every layout is a list of left positions, a list of right positions, and linear places of the pairs in the result:
    all pairs   i n + j                 a list holds the masked positions, then -1
    rows        r n + j                 the left list holds the rows
    band        i 2w + j + w            pairs with |i - j| <= w only; this is entry [i, w + j - i] of [n, 2w + 1]
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.kernels import _common, _launches
from mdmi_fast.kernels._common import INTERPRETED, dot, relu, rounded
from mdmi_fast.kernels._launches import PairTile

Gradients = tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor, Tensor]


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
def _listed(list_ptr, place, n_list):
    """Positions at some places of a list, -1 at places outside; no list: the places themselves."""
    inside = (place >= 0) & (place < n_list)
    if list_ptr is None:
        position = tl.where(inside, place, -1)
    else:
        position = tl.load(list_ptr + place, mask=inside, other=-1)
    return position


# --- the network on a tile of pairs


@triton.jit
def _load_half(x_ptr, stride, position, columns, n_columns):
    """Rows of u or v at positions, 0 where the position is -1."""
    inside = (position >= 0)[:, None] & (columns < n_columns)[None, :]
    return tl.load(x_ptr + position.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _combined(left, right, OPERAND: tl.constexpr, ADD: tl.constexpr):
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
def _load_weights(w_ptr, rows, columns, N_IN: tl.constexpr, N_OUT: tl.constexpr):
    """A tile of a matrix [N_IN, N_OUT], 0 outside."""
    inside = (rows < N_IN)[:, None] & (columns < N_OUT)[None, :]
    return tl.load(w_ptr + rows[:, None] * N_OUT + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _load_vector(x_ptr, columns, N: tl.constexpr):
    return tl.load(x_ptr + columns, mask=columns < N, other=0.0)


@triton.jit
def _first_layer(
    left_ptr,
    right_ptr,
    left_row,
    right_row,
    left,
    right,
    w_ptr,
    b_ptr,
    columns,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """relu(z W + b) [I * J, columns] in float32. Columns behind H2 are 0: so are their weights and biases."""
    acc = tl.zeros((left.shape[0] * right.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, H1, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = _load_weights(w_ptr, k, columns, H1, H2)
        z = _combined(
            _load_half(left_ptr, left_row, left, k, H1), _load_half(right_ptr, right_row, right, k, H1), w.dtype, ADD
        )
        acc = dot(z, w, acc, PRECISION)
    return relu(acc + _load_vector(b_ptr, columns, H2)[None, :])


@triton.jit
def _score(
    left_ptr,
    right_ptr,
    left_row,
    right_row,
    left,
    right,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    w_out_ptr,
    b_out_ptr,
    ADD: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PRECISION: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    H3: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """f [I, J] of positions left [I] and right [J]. H2 and H3 are 0 where the network has no such layer."""
    N_PAIRS: tl.constexpr = left.shape[0] * right.shape[0]
    f = tl.zeros((N_PAIRS,), tl.float32)
    if H2 == 0:
        for start in range(0, H1, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            z = _combined(
                _load_half(left_ptr, left_row, left, k, H1),
                _load_half(right_ptr, right_row, right, k, H1),
                tl.float32,
                ADD,
            )
            f += tl.sum(z * _load_vector(w_out_ptr, k, H1)[None, :], 1)
    elif H3 == 0:
        for start in range(0, H2, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            z = _first_layer(
                left_ptr,
                right_ptr,
                left_row,
                right_row,
                left,
                right,
                w1_ptr,
                b1_ptr,
                columns,
                ADD,
                PRECISION,
                H1,
                H2,
                BLOCK_K,
            )
            f += tl.sum(z * _load_vector(w_out_ptr, columns, H2)[None, :], 1)
    else:
        for start in range(0, H3, BLOCK_L):
            last = start + tl.arange(0, BLOCK_L)
            acc = tl.zeros((N_PAIRS, BLOCK_L), tl.float32)
            for middle in range(0, H2, BLOCK_N):
                columns = middle + tl.arange(0, BLOCK_N)
                z = _first_layer(
                    left_ptr,
                    right_ptr,
                    left_row,
                    right_row,
                    left,
                    right,
                    w1_ptr,
                    b1_ptr,
                    columns,
                    ADD,
                    PRECISION,
                    H1,
                    H2,
                    BLOCK_K,
                )
                w = _load_weights(w2_ptr, columns, last, H2, H3)
                acc = dot(rounded(z, w.dtype), w, acc, PRECISION)
            z = relu(acc + _load_vector(b2_ptr, last, H3)[None, :])
            f += tl.sum(z * _load_vector(w_out_ptr, last, H3)[None, :], 1)
    f += tl.load(b_out_ptr)
    if SOFTPLUS:
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
    u_ptr,
    v_ptr,
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    w_out_ptr,
    b_out_ptr,
    rows_ptr,
    positions_ptr,
    out_ptr,
    n,
    n_left,
    n_programs,
    tiles_j,
    window,
    u_batch,
    u_row,
    v_batch,
    v_row,
    out_batch,
    out_i,
    out_first,
    ADD: tl.constexpr,
    MEAN: tl.constexpr,
    UPPER: tl.constexpr,
    MIRROR: tl.constexpr,
    BAND: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PRECISION: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    H3: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """One tile of pairs of one sequence; n_programs a sequence. MEAN and UPPER: the symmetry, where it takes both directions;
    MIRROR: only pairs i < j are scored, and written twice.
    """
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
        left = _listed(positions_ptr, place, n)
        out_row = left.to(tl.int64)
    else:
        left = _listed(rows_ptr + b * n_left, place, n_left)
        out_row = place.to(tl.int64)
    right = _listed(positions_ptr, first_j + tl.arange(0, BLOCK_J), n)
    keep = (left >= 0)[:, None] & (right >= 0)[None, :]
    if MIRROR:
        keep &= left[:, None] < right[None, :]
    else:
        keep &= left[:, None] != right[None, :]
    if BAND:
        keep &= tl.abs(left[:, None] - right[None, :]) <= window
    if tl.max(keep.to(tl.int32)) == 0:  # behind the last masked position
        return
    u_ptr += b * u_batch
    v_ptr += b * v_batch
    f = _score(
        u_ptr,
        v_ptr,
        u_row,
        v_row,
        left,
        right,
        w1_ptr,
        b1_ptr,
        w2_ptr,
        b2_ptr,
        w_out_ptr,
        b_out_ptr,
        ADD,
        SOFTPLUS,
        PRECISION,
        H1,
        H2,
        H3,
        BLOCK_K,
        BLOCK_N,
        BLOCK_L,
    )
    if MEAN or UPPER:
        f_back = _score(
            v_ptr,
            u_ptr,
            v_row,
            u_row,
            left,
            right,
            w1_ptr,
            b1_ptr,
            w2_ptr,
            b2_ptr,
            w_out_ptr,
            b_out_ptr,
            ADD,
            SOFTPLUS,
            PRECISION,
            H1,
            H2,
            H3,
            BLOCK_K,
            BLOCK_N,
            BLOCK_L,
        )
        f = (f + f_back) / 2 if MEAN else tl.where(left[:, None] < right[None, :], f, f_back)
    out_ptr += b * out_batch + out_first
    out_column = right.to(tl.int64)
    tl.store(out_ptr + out_row[:, None] * out_i + out_column[None, :], f, mask=keep)
    if MIRROR:
        tl.store(out_ptr + out_column[None, :] * out_i + out_row[:, None], f, mask=keep)


# --- gradients.  e_ij: the gradient at f_ij before activation and symmetry, 0 where there is no pair.


@triton.jit
def _load_e(e_ptr, left, right, e_i, e_j, window, BAND: tl.constexpr):
    """e [I, J] of positions left and right."""
    keep = (left >= 0)[:, None] & (right >= 0)[None, :]
    if BAND:
        keep &= tl.abs(left[:, None] - right[None, :]) <= window
    return tl.load(e_ptr + left.to(tl.int64)[:, None] * e_i + right.to(tl.int64)[None, :] * e_j, mask=keep, other=0.0)


@triton.jit
def _through_halves(dz, left, right, ADD: tl.constexpr):
    """The gradient [I, K] of the left half [I, K] from that of the combined halves [I * J, K], summed over the right."""
    left = left.to(tl.float32)[:, None, :]
    right = right.to(tl.float32)[None, :, :]
    dz = tl.reshape(dz, (left.shape[0], right.shape[1], left.shape[2]))
    return tl.sum(tl.where(left + right > 0, dz, 0.0) if ADD else dz * right, 1)


_BACKWARD_VARYING = ["n_left", "n_right", "window", "x_batch", "y_batch", "e_batch", "e_i", "e_j"]


@triton.jit(do_not_specialize=[*_BACKWARD_VARYING, "n_batch", "tiles_i", "tiles_j", "tiles_each"])
def _pairwise_mlp_bwd_half_kernel(
    x_ptr,
    y_ptr,
    w1_ptr,
    b1_ptr,
    w_out_ptr,
    left_ptr,
    right_ptr,
    e_ptr,
    dx_ptr,
    n_batch,
    n_left,
    n_right,
    tiles_i,
    tiles_j,
    tiles_each,
    window,
    x_batch,
    x_row,
    y_batch,
    y_row,
    e_batch,
    e_i,
    e_j,
    ADD: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    N_CHUNKS: tl.constexpr,
):
    """dx [part, b, position, H1] of BLOCK_I left positions, from the part's tiles_each tiles of right positions.

    It is held in registers as N_CHUNKS chunks of BLOCK_K.
    """
    program = tl.program_id(0)
    part = program // (n_batch * tiles_i)
    b = (program // tiles_i % n_batch).to(tl.int64)
    place = program % tiles_i * BLOCK_I + tl.arange(0, BLOCK_I)
    if left_ptr is not None:
        left_ptr += b * n_left
    if right_ptr is not None:
        right_ptr += b * n_right
    left = _listed(left_ptr, place, n_left)
    x_ptr += b * x_batch
    y_ptr += b * y_batch
    e_ptr += b * e_batch
    chunks = tl.arange(0, N_CHUNKS)
    dx = tl.zeros((BLOCK_I, N_CHUNKS, BLOCK_K), tl.float32)
    first_tile = part * tiles_each
    for tile in range(first_tile, tl.minimum(first_tile + tiles_each, tiles_j)):
        right = _listed(right_ptr, tile * BLOCK_J + tl.arange(0, BLOCK_J), n_right)
        e = _load_e(e_ptr, left, right, e_i, e_j, window, BAND)
        if tl.max((e != 0).to(tl.int32)) > 0:
            e_pairs = tl.reshape(e, (BLOCK_I * BLOCK_J,))[:, None]
            # without a dense layer: one round, with the gradient of the output layer itself
            for start in range(0, H2 if H2 > 0 else 1, BLOCK_N):
                columns = start + tl.arange(0, BLOCK_N)
                if H2 > 0:
                    z = _first_layer(
                        x_ptr,
                        y_ptr,
                        x_row,
                        y_row,
                        left,
                        right,
                        w1_ptr,
                        b1_ptr,
                        columns,
                        ADD,
                        PRECISION,
                        H1,
                        H2,
                        BLOCK_K,
                    )
                    dz = tl.where(z > 0, e_pairs * _load_vector(w_out_ptr, columns, H2)[None, :], 0.0)
                    dz = rounded(dz, w1_ptr.dtype.element_ty)
                for first_k in range(0, H1, BLOCK_K):
                    k = first_k + tl.arange(0, BLOCK_K)
                    if H2 > 0:
                        w = _load_weights(w1_ptr, k, columns, H1, H2)
                        dz0 = dot(dz, tl.trans(w), tl.zeros((BLOCK_I * BLOCK_J, BLOCK_K), tl.float32), PRECISION)
                    else:
                        dz0 = e_pairs * _load_vector(w_out_ptr, k, H1)[None, :]
                    x = _load_half(x_ptr, x_row, left, k, H1)
                    y = _load_half(y_ptr, y_row, right, k, H1)
                    d_chunk = _through_halves(dz0, x, y, ADD)[:, None, :]
                    dx += tl.where((chunks == first_k // BLOCK_K)[None, :, None], d_chunk, 0.0)
    every_k = (chunks * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    dx_ptrs = dx_ptr + (part.to(tl.int64) * n_batch + b) * n_left * H1 + left.to(tl.int64)[:, None, None] * H1
    tl.store(dx_ptrs + every_k[None, :, :], dx, mask=(left >= 0)[:, None, None] & (every_k < H1)[None, :, :])


@triton.jit(do_not_specialize=[*_BACKWARD_VARYING, "n_tiles", "tiles_i", "tiles_j", "n_parts"])
def _pairwise_mlp_bwd_weights_kernel(
    x_ptr,
    y_ptr,
    w1_ptr,
    b1_ptr,
    w_out_ptr,
    left_ptr,
    right_ptr,
    e_ptr,
    dw1_ptr,
    db1_ptr,
    dw_out_ptr,
    n_tiles,
    n_left,
    n_right,
    tiles_i,
    tiles_j,
    n_parts,
    window,
    x_batch,
    x_row,
    y_batch,
    y_row,
    e_batch,
    e_i,
    e_j,
    ADD: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Program (tile of the matrix, part): dW1 [part, H1, H2], db1 and dw_out from every n_parts-th tile of pairs.

    BLOCK_M inputs and BLOCK_N outputs of the layer are the program's; without a layer, BLOCK_M entries of w_out.
    """
    part = tl.program_id(0) % n_parts
    block = tl.program_id(0) // n_parts
    N_BLOCKS: tl.constexpr = (H1 + BLOCK_M - 1) // BLOCK_M
    rows = block % N_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block // N_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    dw1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db1 = tl.zeros((BLOCK_N,), tl.float32)
    dw_out = tl.zeros((BLOCK_N if H2 > 0 else BLOCK_M,), tl.float32)
    for tile in range(part, n_tiles, n_parts):
        b = tl.cast(tile // (tiles_i * tiles_j), tl.int64)
        place_i = tile // tiles_j % tiles_i * BLOCK_I + tl.arange(0, BLOCK_I)
        place_j = tile % tiles_j * BLOCK_J + tl.arange(0, BLOCK_J)
        left = _listed(left_ptr if left_ptr is None else left_ptr + b * n_left, place_i, n_left)
        right = _listed(right_ptr if right_ptr is None else right_ptr + b * n_right, place_j, n_right)
        e = _load_e(e_ptr + b * e_batch, left, right, e_i, e_j, window, BAND)
        if tl.max((e != 0).to(tl.int32)) > 0:
            e_pairs = tl.reshape(e, (BLOCK_I * BLOCK_J,))[:, None]
            x_b, y_b = x_ptr + b * x_batch, y_ptr + b * y_batch
            x = _load_half(x_b, x_row, left, rows, H1)
            y = _load_half(y_b, y_row, right, rows, H1)
            if H2 > 0:
                z0 = _combined(x, y, w1_ptr.dtype.element_ty, ADD)
                z = _first_layer(
                    x_b,
                    y_b,
                    x_row,
                    y_row,
                    left,
                    right,
                    w1_ptr,
                    b1_ptr,
                    columns,
                    ADD,
                    PRECISION,
                    H1,
                    H2,
                    BLOCK_K,
                )
                dz = tl.where(z > 0, e_pairs * _load_vector(w_out_ptr, columns, H2)[None, :], 0.0)
                dw1 = dot(tl.trans(z0), rounded(dz, z0.dtype), dw1, PRECISION)
                db1 += tl.sum(dz, 0)
                dw_out += tl.sum(z * e_pairs, 0)
            else:
                dw_out += tl.sum(_combined(x, y, tl.float32, ADD) * e_pairs, 0)
    part = part.to(tl.int64)
    if H2 > 0:
        inside = (rows < H1)[:, None] & (columns < H2)[None, :]
        tl.store(dw1_ptr + part * H1 * H2 + rows[:, None] * H2 + columns[None, :], dw1, mask=inside)
        if block % N_BLOCKS == 0:
            tl.store(db1_ptr + part * H2 + columns, db1, mask=columns < H2)
            tl.store(dw_out_ptr + part * H2 + columns, dw_out, mask=columns < H2)
    else:
        tl.store(dw_out_ptr + part * H1 + rows, dw_out, mask=rows < H1)


# --- launching

MAX_LAYERS = 2
_MASK_BLOCK = 1024
_OPERAND = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    reasons = []
    if any(x.dtype == torch.float64 for x in tensors):
        reasons.append("scores pairs in float32, got float64")
    n_layers, most = sum(x.ndim == 2 for x in tensors), 1 if op.endswith("_backward") else MAX_LAYERS
    if n_layers > most:
        reasons.append(f"{op} has at most {most} dense layers, got {n_layers}")
    return reasons


@dataclass(frozen=True)
class Network:
    """The weights in the dtype of the products, the vectors in float32, all contiguous."""

    weights: list[Tensor]
    biases: list[Tensor]
    w_out: Tensor
    b_out: Tensor
    precision: str

    @property
    def widths(self) -> tuple[int, int, int]:
        """H1, H2 and H3; 0 where there is no such layer."""
        outs = [w.shape[1] for w in self.weights] + [0, 0]
        return (self.weights[0].shape[0] if self.weights else self.w_out.shape[0]), outs[0], outs[1]

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        """What kernels take: the weights and biases of two layers, w_out and b_out."""
        layers = [t for layer in zip(self.weights, self.biases, strict=True) for t in layer]
        return (*layers, *[None] * (4 - len(layers)), self.w_out, self.b_out)

    @property
    def input_precision(self) -> str:
        return "tf32" if self.precision == "tf32" else "ieee"


def prepare_pairwise(
    weights: list[Tensor], biases: list[Tensor], w_out: Tensor, b_out: Tensor, precision: str
) -> Network:
    operand = _OPERAND[precision]
    return Network(
        [w.to(operand).contiguous() for w in weights],
        [b.float().contiguous() for b in biases],
        w_out.float().contiguous(),
        b_out.float(),
        precision,
    )


@dataclass(frozen=True)
class _Halves:
    """u and v of one dtype with rows in one piece."""

    u: Tensor
    v: Tensor
    same: bool

    @property
    def strides(self) -> tuple[int, int, int, int]:
        return self.u.stride(0), self.u.stride(1), self.v.stride(0), self.v.stride(1)


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _halves(u: Tensor, v: Tensor) -> _Halves:
    same = u.data_ptr() == v.data_ptr() and u.stride() == v.stride() and u.dtype == v.dtype
    if u.dtype != v.dtype:
        u, v = u.float(), v.float()
    u = _in_rows(u)
    return _Halves(u, u if same else _in_rows(v), same)


def _positions(mask: Tensor | None) -> Tensor | None:
    """The masked positions of every sequence [B, N] int32, ascending, then -1; None if all are."""
    if mask is None:
        return None
    positions = torch.empty(mask.shape, dtype=torch.int32, device=mask.device)
    batch, n = mask.shape
    args = (mask, positions, n, *mask.stride())
    _common.launch(_positions_kernel, batch if n else 0, _common.Tile(warps=4), *args, BLOCK=_MASK_BLOCK)
    return positions


def _block(size: int, most: int) -> int:
    """Of a dimension of a product: a power of two, at least 16."""
    return min(most, max(16, triton.next_power_of_2(size)))


def _score_pairs(
    halves: _Halves,
    network: Network,
    rows: Tensor | None,
    window: int | None,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
) -> Tensor:
    """[B, N, N], [B, R, N] if rows [B, R] int32 are given, or [B, N, 2 * window + 1] if a window is."""
    batch, n, _ = halves.u.shape
    n_left = n if rows is None else rows.shape[1]
    result = torch.zeros(
        (batch, n_left, n if window is None else 2 * window + 1), dtype=torch.float32, device=halves.u.device
    )
    if not result.numel() or window == 0:
        return result
    positions = _positions(mask)
    mirror = rows is None and (symmetry != "none" or halves.same)
    h1, h2, h3 = network.widths

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
            halves.u,
            halves.v,
            *network.pointers,
            rows,
            positions,
            result,
            n,
            n_left,
            n_programs,
            tiles_j,
            window or 0,
            *halves.strides,
            result.stride(0),
            n if window is None else 2 * window,
            window or 0,
            ADD=combine == "add",
            MEAN=symmetry == "mean" and not halves.same,
            UPPER=symmetry == "upper" and not halves.same and not mirror,
            MIRROR=mirror,
            BAND=window is not None,
            SOFTPLUS=activation == "softplus",
            PRECISION=network.input_precision,
            H1=h1,
            H2=h2,
            H3=h3,
            BLOCK_I=tile.i,
            BLOCK_J=tile.j,
            BLOCK_K=_block(h1, tile.k),
            BLOCK_N=_block(h2, tile.n),
            BLOCK_L=_block(h3, tile.last),
        )

    run(_launches.pair_tile("forward", halves.u.device, network.precision, network.widths, run))
    return result


def _masked_rows(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Rows as int32, those at unmasked positions -1."""
    if mask is not None and mask.shape[1]:
        rows = torch.where(mask.gather(1, rows.clamp_min(0)), rows, -1)
    return rows.to(torch.int32).contiguous()


def pairwise_mlp(
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
    prepared: Network | None = None,
) -> Tensor:
    network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
    return _score_pairs(_halves(u, v), network, None, None, mask, combine, symmetry, activation)


def pairwise_mlp_rows(
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
    prepared: Network | None = None,
) -> Tensor:
    network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
    return _score_pairs(_halves(u, v), network, _masked_rows(rows, mask), None, mask, combine, symmetry, activation)


def pairwise_mlp_band(
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    window: int,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
    prepared: Network | None = None,
) -> Tensor:
    network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
    return _score_pairs(_halves(u, v), network, None, window, mask, combine, symmetry, activation)


# Programs that share the rows of one block, and those that share the pairs of one tile of a weight's gradient: their
# parts are added up afterwards, in order.
_TILES_A_PART = 16
_MOST_PARTS = 4
_WEIGHT_PARTS = 32


class _Sums:
    """The gradients of a network, added up in float32 over directions."""

    def __init__(self, network: Network) -> None:
        self.weights = [torch.zeros_like(w, dtype=torch.float32) for w in network.weights]
        self.biases = [torch.zeros_like(b) for b in network.biases]
        self.w_out, self.b_out = torch.zeros_like(network.w_out), torch.zeros_like(network.b_out)

    def add(
        self,
        network: Network,
        halves: _Halves,
        left: Tensor | None,
        right: Tensor | None,
        e: Tensor,
        window: int | None,
        combine: str,
    ) -> tuple[Tensor, Tensor]:
        """Adds the gradients of one direction, f_ij of halves.u at left and halves.v at right; returns those of the halves.

        left and right are lists of positions or None; e is [B, left, right], or [B, N, 2 * window + 1].
        """
        n_left, n_right = halves.u.shape[1], halves.v.shape[1]
        e_i, places = (e.stride(1), e) if window is None else (2 * window, e.view(-1)[window:])
        u, v = (halves.u, left, n_left), (halves.v, right, n_right)
        du = _half_gradient(network, u, v, places, (e.stride(0), e_i, 1), window, combine)
        dv = _half_gradient(network, v, u, places, (e.stride(0), 1, e_i), window, combine)
        parts = _weight_gradients(network, u, v, places, (e.stride(0), e_i, 1), window, combine)
        for total, part in zip([*self.weights, *self.biases, self.w_out], parts, strict=True):
            total += part.sum(0)
        self.b_out += e.sum()
        return du, dv


_Side = tuple[Tensor, Tensor | None, int]
"""Half of the pairs: the tensor, the list of positions and its length."""


def _half_gradient(
    network: Network,
    own: _Side,
    other: _Side,
    e: Tensor,
    e_strides: tuple[int, int, int],
    window: int | None,
    combine: str,
) -> Tensor:
    """The gradient of own[0], summed over the other side."""
    (x, x_list, n_x), (y, y_list, n_y) = own, other
    batch, _, h1 = x.shape
    _, h2, _ = network.widths
    w1, b1, _, _, w_out, _ = network.pointers

    def run(tile: PairTile) -> Tensor:
        tiles_i, tiles_j = triton.cdiv(n_x, tile.i), triton.cdiv(n_y, tile.j)
        n_parts = min(_MOST_PARTS, triton.cdiv(tiles_j, _TILES_A_PART))
        dx = torch.zeros((n_parts, *x.shape), dtype=torch.float32, device=x.device)
        _common.launch(
            _pairwise_mlp_bwd_half_kernel,
            n_parts * batch * tiles_i,
            tile.tile,
            x,
            y,
            w1,
            b1,
            w_out,
            x_list,
            y_list,
            e,
            dx,
            batch,
            n_x,
            n_y,
            tiles_i,
            tiles_j,
            triton.cdiv(tiles_j, n_parts),
            window or 0,
            *x.stride()[:2],
            *y.stride()[:2],
            *e_strides,
            ADD=combine == "add",
            BAND=window is not None,
            PRECISION=network.input_precision,
            H1=h1,
            H2=h2,
            BLOCK_I=tile.i,
            BLOCK_J=tile.j,
            BLOCK_K=_block(h1, tile.k),
            BLOCK_N=_block(h2, tile.n),
            N_CHUNKS=triton.next_power_of_2(triton.cdiv(h1, _block(h1, tile.k))),
        )
        return dx.sum(0)

    return run(_launches.pair_tile("backward", x.device, network.precision, network.widths, run))


def _weight_gradients(
    network: Network,
    left: _Side,
    right: _Side,
    e: Tensor,
    e_strides: tuple[int, int, int],
    window: int | None,
    combine: str,
) -> list[Tensor]:
    """Parts [part, ...] of the gradients of the layer's weights and bias, if there is one, and of w_out."""
    (x, x_list, n_x), (y, y_list, n_y) = left, right
    h1, h2, _ = network.widths
    w1, b1, _, _, w_out, _ = network.pointers
    results: list[Tensor] = []

    def run(tile: PairTile) -> None:
        tiles_i, tiles_j = triton.cdiv(n_x, tile.i), triton.cdiv(n_y, tile.j)
        n_tiles = x.shape[0] * tiles_i * tiles_j
        n_parts = min(_WEIGHT_PARTS, n_tiles)
        block_m, block_n = _block(h1, _launches.GRADIENT_INPUTS), _block(h2, tile.n)
        parts = [None if t is None else torch.empty((n_parts, *t.shape), device=x.device) for t in (w1, b1, w_out)]
        _common.launch(
            _pairwise_mlp_bwd_weights_kernel,
            triton.cdiv(h1, block_m) * triton.cdiv(max(h2, 1), block_n) * n_parts,
            tile.tile,
            x,
            y,
            w1,
            b1,
            w_out,
            x_list,
            y_list,
            e,
            *parts,
            n_tiles,
            n_x,
            n_y,
            tiles_i,
            tiles_j,
            n_parts,
            window or 0,
            *x.stride()[:2],
            *y.stride()[:2],
            *e_strides,
            ADD=combine == "add",
            BAND=window is not None,
            PRECISION=network.input_precision,
            H1=h1,
            H2=h2,
            BLOCK_I=tile.i,
            BLOCK_J=tile.j,
            BLOCK_K=_block(h1, tile.k),
            BLOCK_N=block_n,
            BLOCK_M=block_m,
        )
        results[:] = [part for part in parts if part is not None]

    run(_launches.pair_tile("weights", x.device, network.precision, network.widths, run))
    return results


def _kept(mask: Tensor | None, batch: int, rows: Tensor, columns: Tensor, n: int) -> Tensor:
    """Where a pair of positions rows and columns, -1 .. n or beyond, is scored."""
    keep = (rows != columns) & (rows >= 0) & (columns >= 0) & (columns < n)
    if mask is None:
        return keep.expand(batch, *keep.shape[-2:])
    masked = torch.nn.functional.pad(mask, (0, 1))
    b = torch.arange(batch, device=mask.device).view(-1, 1, 1)
    return keep & masked[b, rows.clamp(-1, n)] & masked[b, columns.clamp(-1, n)]


def _through_activation(
    e: Tensor,
    halves: _Halves,
    network: Network,
    rows: Tensor | None,
    window: int | None,
    mask: Tensor | None,
    combine: str,
    activation: str,
) -> Tensor:
    """e, times the slope of the activation at f."""
    if activation == "softplus":
        e = e * _score_pairs(halves, network, rows, window, mask, combine, "none", "identity").sigmoid()
    return e.contiguous()


def _finish(du: Tensor, dv: Tensor, sums: _Sums, u: Tensor, v: Tensor, like: list[Tensor]) -> Gradients:
    """In the dtypes of the operands; like: the weights, biases, w_out and b_out."""
    totals = [*sums.weights, *sums.biases, sums.w_out, sums.b_out]
    *layers, d_w_out, d_b_out = (g.to(t.dtype) for g, t in zip(totals, like, strict=True))
    n_layers = len(sums.weights)
    return du.to(u.dtype), dv.to(v.dtype), layers[:n_layers], layers[n_layers:], d_w_out, d_b_out


def _square_backward(
    grad: Tensor,
    u: Tensor,
    v: Tensor,
    network: Network,
    like: list[Tensor],
    window: int | None,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
) -> Gradients:
    """Of all pairs, or of a band."""
    batch, n, _ = u.shape
    sums = _Sums(network)
    if not grad.numel() or window == 0:
        return _finish(torch.zeros_like(u), torch.zeros_like(v), sums, u, v, like)
    own = torch.arange(n, device=u.device).unsqueeze(1)
    if window is None:
        other = own.T
        transposed = grad.mT
    else:
        other = own + torch.arange(-window, window + 1, device=u.device)
        transposed = grad[:, other.clamp(0, n - 1), window + own - other]
    if symmetry == "mean":
        grad = (grad + transposed) / 2
    elif symmetry == "upper":
        grad = torch.where(own < other, grad + transposed, 0.0)
    e = torch.where(_kept(mask, batch, own, other, n), grad, 0.0)
    halves, positions = _halves(u, v), _positions(mask)
    e = _through_activation(e, halves, network, None, window, mask, combine, activation)
    du, dv = sums.add(network, halves, positions, positions, e, window, combine)
    return _finish(du, dv, sums, u, v, like)


def pairwise_mlp_backward(
    grad: Tensor,
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
) -> Gradients:
    network = prepare_pairwise(weights, biases, w_out, b_out, precision)
    like = [*weights, *biases, w_out, b_out]
    return _square_backward(grad, u, v, network, like, None, mask, combine, symmetry, activation)


def pairwise_mlp_band_backward(
    grad: Tensor,
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    window: int,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
) -> Gradients:
    network = prepare_pairwise(weights, biases, w_out, b_out, precision)
    like = [*weights, *biases, w_out, b_out]
    return _square_backward(grad, u, v, network, like, window, mask, combine, symmetry, activation)


def pairwise_mlp_rows_backward(
    grad: Tensor,
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
) -> Gradients:
    network = prepare_pairwise(weights, biases, w_out, b_out, precision)
    like, sums = [*weights, *biases, w_out, b_out], _Sums(network)
    du, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (u, v))
    batch, n, _ = u.shape
    if not grad.numel():
        return _finish(du, dv, sums, u, v, like)
    own = rows.unsqueeze(2)
    other = torch.arange(n, device=u.device)
    grad = torch.where(_kept(mask, batch, own, other, n), grad, 0.0)
    # f of (row, j), and f of (j, row)
    shares = {
        "none": (grad, None),
        "mean": (grad / 2, grad / 2),
        "upper": (torch.where(own < other, grad, 0.0), torch.where(own > other, grad, 0.0)),
    }[symmetry]
    scored, positions = _masked_rows(rows, mask), _positions(mask)
    places = (torch.arange(batch, device=u.device).unsqueeze(1), rows.clamp_min(0))
    for e, x, y, dx, dy in ((shares[0], u, v, du, dv), (shares[1], v, u, dv, du)):
        if e is not None:
            e = _through_activation(e, _halves(x, y), network, scored, None, mask, combine, activation)
            # a row that is not scored may hold NaN; its gradient is 0, and so must it be
            x_rows = torch.where((scored >= 0).unsqueeze(2), x[places], 0.0)
            d_rows, d_all = sums.add(network, _halves(x_rows, y), None, positions, e, None, combine)
            dx.index_put_(places, d_rows, accumulate=True)
            dy += d_all
    return _finish(du, dv, sums, u, v, like)
