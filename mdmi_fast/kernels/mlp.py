"""Rows through dense layers, one launch a layer. A tile has the same size whatever the number of rows, so a row's sums are
added in the same order in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.kernels import _common
from mdmi_fast.kernels._common import matrix_product, matrix_tile, relu


@triton.jit(do_not_specialize=["n_rows"])
def _dense_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    out_ptr,
    n_rows,
    w_k,
    w_column,
    D: tl.constexpr,
    N_OUT: tl.constexpr,
    RELU: tl.constexpr,
    OPERAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of x [n_rows, D] times w [D, N_OUT], plus b."""
    N_TILES: tl.constexpr = (N_OUT + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = (program // N_TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (program % N_TILES).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    acc = matrix_product(
        x_ptr + row[:, None] * D,
        row < n_rows,
        w_ptr + columns[None, :] * w_column,
        columns < N_OUT,
        1,
        w_k,
        D,
        OPERAND,
        ROWS,
        COLUMNS,
        BLOCK_K,
    )
    acc += tl.load(b_ptr + columns, mask=columns < N_OUT, other=0.0)[None, :]
    if RELU:
        acc = relu(acc)
    inside = (row < n_rows)[:, None] & (columns < N_OUT)[None, :]
    tl.store(out_ptr + row[:, None] * N_OUT + columns[None, :], acc, mask=inside)


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    return ["multiplies in float32, got float64"] if any(t.dtype == torch.float64 for t in tensors) else []


def mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        n_rows, (d, n_out) = rows.shape[0], weight.shape
        tile, operand = matrix_tile(rows, weight)
        out = torch.empty((n_rows, n_out), dtype=torch.float32, device=x.device)
        _common.launch(
            _dense_kernel,
            triton.cdiv(n_rows, tile.rows) * triton.cdiv(n_out, tile.columns),
            tile.tile,
            rows,
            weight,
            bias.float().contiguous(),
            out,
            n_rows,
            *weight.stride(),
            D=d,
            N_OUT=n_out,
            RELU=index + 1 < len(weights),
            OPERAND=operand,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            BLOCK_K=tile.k,
        )
        rows = out
    return rows.view(*x.shape[:-1], weights[-1].shape[1])
