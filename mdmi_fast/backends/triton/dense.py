"""Rows through dense layers, one launch a layer. A tile has the same size whatever the number of rows, so a row's sums are
added in the same order in any batch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.triton import _common
from mdmi_fast.backends.triton._common import Lines, Matrix, matrix_product, matrix_tile, relu, rounded


@triton.jit(do_not_specialize=["n_rows"])
def _dense_kernel(
    x_ptr,
    w,
    b_ptr,
    gate_ptr,
    live_ptr,
    out_ptr,
    n_rows,
    D: tl.constexpr,
    N_OUT: tl.constexpr,
    RELU: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of x [n_rows, D] times w [D, N_OUT], as `dense` says."""
    N_TILES: tl.constexpr = (N_OUT + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = (program // N_TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (program % N_TILES).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    if live_ptr is not None:  # noqa: SIM102 - Triton evaluates both sides of an `and`
        if tl.max(tl.load(live_ptr + row, mask=row < n_rows, other=0).to(tl.int32)) == 0:
            return
    columns_of_w = Lines(w.ptr + columns * w.column, columns < N_OUT, w.row)
    acc = matrix_product(Lines(x_ptr + row * D, row < n_rows, 1), columns_of_w, D, OPERAND, PRECISION, BLOCK_K)
    inside = (row < n_rows)[:, None] & (columns < N_OUT)[None, :]
    place = row[:, None] * N_OUT + columns[None, :]
    if b_ptr is not None:
        acc += tl.load(b_ptr + columns, mask=columns < N_OUT, other=0.0)[None, :]
    if RELU:
        acc = relu(acc)
    if gate_ptr is not None:
        acc = tl.where(tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32) > 0, acc, 0.0)
    tl.store(out_ptr + place, rounded(acc, out_ptr.dtype.element_ty), mask=inside)


class Finish(NamedTuple):
    """What becomes of a product before it is written.

    Attributes:
        bias: [N] float32 that is added, or None.
        relu: whether max(., 0) is taken.
        gate: [R, N] contiguous, or None; the result is 0 where this is not above 0, which is the gradient of a relu that gave it.
        dtype: of the result.
    """

    bias: Tensor | None = None
    relu: bool = False
    gate: Tensor | None = None
    dtype: torch.dtype = torch.float32


def dense(x: Tensor, weight: Tensor, finish: Finish, *, live: Tensor | None = None, precision: str = "ieee") -> Tensor:
    """One layer, x W [R, N], finished.

    Args:
        x: [R, D] contiguous.
        weight: [D, N], any strides.
        finish: what is done to the product.
        live: [R] bool contiguous; a tile of rows that are all False is left 0.
        precision: of float32 products, "ieee" or "tf32".
    """
    n_rows, (d, n_out) = x.shape[0], weight.shape
    tile, operand = matrix_tile(x, weight)
    # zeros only where rows are left out: they cost a pass over the result
    out = (torch.empty if live is None else torch.zeros)((n_rows, n_out), dtype=finish.dtype, device=x.device)
    _common.launch(
        _dense_kernel,
        triton.cdiv(n_rows, tile.rows) * triton.cdiv(n_out, tile.columns),
        tile.tile,
        x,
        Matrix(weight, *weight.stride()),
        finish.bias,
        finish.gate,
        live,
        out,
        n_rows,
        D=d,
        N_OUT=n_out,
        RELU=finish.relu,
        OPERAND=operand,
        PRECISION=precision,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK_K=tile.k,
    )
    return out


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    return ["multiplies in float32, got float64"] if any(t.dtype == torch.float64 for t in tensors) else []


def mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        rows = dense(rows, weight, Finish(bias.float().contiguous(), relu=index + 1 < len(weights)))
    return rows.view(*x.shape[:-1], weights[-1].shape[1])
