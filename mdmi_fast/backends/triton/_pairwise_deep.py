"""Pair networks of any depth, layer by layer: what the fused kernels of `pairwise` do not hold in registers.

Rectangles of pairs are taken in turn. The activations of a rectangle lie in memory, at most SCRATCH of them (or those of one row)
however many pairs there are; the backward pass computes them again. Pairs come as u [B, L, H1], v [B, N, H1] and something [B, L, N] that is 0 or
False where no pair is; with a window, [B, N, 2 * window + 1], entry [i, window + j - i]. Halves must be finite where no pair is.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.calls import PairNetwork
from mdmi_fast.backends.triton import _common
from mdmi_fast.backends.triton._common import dot
from mdmi_fast.backends.triton._pairwise_network import Network
from mdmi_fast.backends.triton.dense import Finish, dense

SCRATCH = 1 << 25
"""Activations, of all layers together, that are held at a time; 64 MiB of them in half precision."""

_TILE = _common.Tile(warps=4)
_OUTPUT_ROWS, _OUTPUT_COLUMNS = 32, 64
_GRADIENT_BLOCK, _GRADIENT_ROWS = 64, 32
_MOST_PARTS = 32
"""Programs that share the rows of one tile of a weight's gradient; their parts are added up afterwards, in order."""


@triton.jit(do_not_specialize=["n_rows"])
def _output_kernel(z_ptr, w_ptr, f_ptr, n_rows, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """f [n_rows], the products of rows z [n_rows, D] with w [D]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f = tl.zeros((ROWS,), tl.float32)
    for start in range(0, D, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (row < n_rows)[:, None] & (columns < D)[None, :]
        z = tl.load(z_ptr + row[:, None] * D + columns[None, :], mask=inside, other=0.0)
        f += tl.sum(z * tl.load(w_ptr + columns, mask=columns < D, other=0.0)[None, :], 1)
    tl.store(f_ptr + row, f, mask=row < n_rows)


@triton.jit(do_not_specialize=["n_rows", "n_parts"])
def _weight_gradient_kernel(
    z_ptr,
    dz_ptr,
    live_ptr,
    dw_ptr,
    n_rows,
    n_parts,
    D: tl.constexpr,
    N_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A tile of dw [part, D, N_OUT]: z^T dz over every n_parts-th ROWS of the rows."""
    N_TILES: tl.constexpr = (N_OUT + BLOCK - 1) // BLOCK
    part = tl.program_id(0) % n_parts
    tile = tl.program_id(0) // n_parts
    k = tile // N_TILES * BLOCK + tl.arange(0, BLOCK)
    columns = tile % N_TILES * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(part * ROWS, n_rows, n_parts * ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        live = tl.load(live_ptr + row, mask=row < n_rows, other=0) != 0
        if tl.max(live.to(tl.int32)) > 0:
            z = tl.load(z_ptr + row[None, :] * D + k[:, None], mask=live[None, :] & (k < D)[:, None], other=0.0)
            here = live[:, None] & (columns < N_OUT)[None, :]
            dw = dot(z, tl.load(dz_ptr + row[:, None] * N_OUT + columns[None, :], mask=here, other=0.0), dw, PRECISION)
    inside = (k < D)[:, None] & (columns < N_OUT)[None, :]
    tl.store(dw_ptr + part.to(tl.int64) * D * N_OUT + k[:, None] * N_OUT + columns[None, :], dw, mask=inside)


def _output(z: Tensor, w: Tensor) -> Tensor:
    n_rows, d = z.shape
    f = torch.empty(n_rows, dtype=torch.float32, device=z.device)
    sizes = {"D": d, "ROWS": _OUTPUT_ROWS, "COLUMNS": _OUTPUT_COLUMNS}
    _common.launch(_output_kernel, triton.cdiv(n_rows, _OUTPUT_ROWS), _TILE, z, w, f, n_rows, **sizes)
    return f


def _weight_gradient(z: Tensor, dz: Tensor, live: Tensor, precision: str) -> Tensor:
    """z^T dz of rows z [R, D] and dz [R, N] of one dtype."""
    (n_rows, d), n_out = z.shape, dz.shape[1]
    n_parts = min(_MOST_PARTS, triton.cdiv(n_rows, _GRADIENT_ROWS))
    dw = torch.empty((n_parts, d, n_out), dtype=torch.float32, device=z.device)
    n_tiles = triton.cdiv(d, _GRADIENT_BLOCK) * triton.cdiv(n_out, _GRADIENT_BLOCK)
    sizes = {"D": d, "N_OUT": n_out, "PRECISION": precision, "BLOCK": _GRADIENT_BLOCK, "ROWS": _GRADIENT_ROWS}
    _common.launch(_weight_gradient_kernel, n_tiles * n_parts, _TILE, z, dz, live, dw, n_rows, n_parts, **sizes)
    return dw.sum(0)


class _Rectangle(NamedTuple):
    """Slices of sequences, left and right positions; with a window, pairs that far apart are all in one."""

    b: slice
    i: slice
    j: slice


def _rectangles(network: Network, shape: torch.Size, n_right: int, window: int | None) -> Iterator[_Rectangle]:
    """Those that cover pairs of a shape [B, L, ...]."""
    batch, n_left = shape[:2]
    most = max(1, SCRATCH // sum(network.widths))
    n_rows, n_columns = n_left, n_right
    if window is not None:
        # of as many rows as columns beside them: at most half of the rectangle is outside the band
        n_rows = min(n_left, max(2 * window, 16))
        n_columns = min(n_right, n_rows + 2 * window)
    n_rows = max(1, min(n_rows, most // n_columns))
    n_sequences = max(1, most // (n_rows * n_columns))
    for b in range(0, batch, n_sequences):
        for i in range(0, n_left, n_rows):
            first, end = (0, n_right) if window is None else (max(0, i - window), min(n_right, i + n_rows + window))
            yield _Rectangle(slice(b, b + n_sequences), slice(i, min(i + n_rows, n_left)), slice(first, end))


def _inside(x: Tensor, at: _Rectangle, window: int | None) -> Tensor:
    """x [B, L, N] or [B, N, 2 * window + 1] at the pairs of a rectangle [b, I, J], 0 where it has none."""
    x = x[at.b, at.i]
    if window is None:
        return x[..., at.j].contiguous()
    i, j = (torch.arange(s.start, s.stop, device=x.device) for s in (at.i, at.j))
    place = window + j - i.unsqueeze(1)
    near = (place >= 0) & (place <= 2 * window)
    return x.gather(2, place.clamp(0, 2 * window).expand(x.shape[0], -1, -1)).masked_fill_(~near, 0)


def _put(result: Tensor, f: Tensor, at: _Rectangle, window: int | None) -> None:
    """Writes f [b, I, J] to its places."""
    if window is None:
        result[at.b, at.i, at.j] = f
        return
    i = torch.arange(at.i.start, at.i.stop, device=f.device).unsqueeze(1)
    column = i + torch.arange(-window, window + 1, device=f.device) - at.j.start
    result[at.b, at.i] = f.gather(2, column.clamp(0, f.shape[2] - 1).expand(f.shape[0], -1, -1))


def _activations(network: Network, u: Tensor, v: Tensor, live: Tensor, combine: str) -> list[Tensor]:
    """z [pairs, H] of every layer, the combined halves first; in the dtype of the products, the last in float32."""
    if u.dtype != network.operand:
        u, v = u.float(), v.float()
    left, right = u.unsqueeze(2), v.unsqueeze(1)
    z0 = (left + right).relu_() if combine == "add" else left * right
    z = [z0.to(network.operand).flatten(0, 2)]
    for layer, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True), 1):
        dtype = torch.float32 if layer == len(network.weights) else network.operand
        finish = Finish(bias, relu=True, dtype=dtype)
        z.append(dense(z[-1], weight, finish, live=live, precision=network.input_precision))
    return z


def score(network: Network, u: Tensor, v: Tensor, keep: Tensor, window: int | None, combine: str) -> Tensor:
    """f before activation and symmetry, float32 like keep (bool), 0 where that is False."""
    result = torch.zeros(keep.shape, dtype=torch.float32, device=u.device)
    for at in _rectangles(network, keep.shape, v.shape[1], window):
        live = _inside(keep, at, window)
        z = _activations(network, u[at.b, at.i], v[at.b, at.j], live, combine)
        _put(result, _output(z[-1], network.w_out).view(live.shape) + network.b_out, at, window)
    return torch.where(keep, result, 0.0)


def gradients(
    network: Network, u: Tensor, v: Tensor, e: Tensor, window: int | None, combine: str
) -> tuple[Tensor, Tensor, PairNetwork]:
    """From e at f, those of u, of v, and of the network; all float32."""
    d_weights = [torch.zeros_like(w, dtype=torch.float32) for w in network.weights]
    d_biases, d_w_out = [torch.zeros_like(b) for b in network.biases], torch.zeros_like(network.w_out)
    du, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (u, v))
    for at in _rectangles(network, e.shape, v.shape[1], window):
        e_here = _inside(e, at, window)
        live = e_here != 0
        u_here, v_here = u[at.b, at.i], v[at.b, at.j]
        *inputs, last = _activations(network, u_here, v_here, live, combine)
        e_pairs = e_here.view(-1, 1)
        d_w_out += (last * e_pairs).sum(0)
        dz = torch.where(last > 0, e_pairs * network.w_out, 0.0)
        for layer in range(len(inputs) - 1, -1, -1):
            d_biases[layer] += dz.sum(0)
            z, weight = inputs[layer], network.weights[layer]
            dz = dz.to(network.operand)
            d_weights[layer] += _weight_gradient(z, dz, live, network.input_precision)
            gate = None if layer == 0 and combine == "mul" else z  # every other input went through a relu
            dz = dense(dz, weight.T, Finish(gate=gate), live=live, precision=network.input_precision)
        dz = dz.view(*live.shape, -1)
        if combine == "add":
            du[at.b, at.i] += dz.sum(2)
            dv[at.b, at.j] += dz.sum(1)
        else:
            du[at.b, at.i] += (dz * v_here.unsqueeze(1)).sum(2)
            dv[at.b, at.j] += (dz * u_here.unsqueeze(2)).sum(1)
    return du, dv, PairNetwork(d_weights, d_biases, d_w_out, e.sum())
