"""The compiled forward pass of the Sudoku task's network."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads


def sudoku_forward(tokens: Tensor, weights: Tensor, iterations: int, codes: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, 81, 10] and hidden [B, 81, D] of boards [B, 81] int64 within 0..9; weights packed by the model."""
    n_weights, n_codes = _C.sudoku_weights, _C.sudoku_codes
    for name, x, shape, dtype in (
        ("tokens", tokens, (*tokens.shape[:1], 81), torch.int64),
        ("weights", weights, (n_weights,), torch.float32),
        ("codes", codes, (81, n_codes), torch.float32),
    ):
        if x.shape != shape or x.dtype != dtype:
            raise ValueError(
                f"sudoku_forward: {name} must be {shape} {dtype}, got shape {tuple(x.shape)} {x.dtype} on {x.device}"
            )
    tokens, weights, codes = tokens.contiguous(), weights.contiguous(), codes.contiguous()
    boards, cells = tokens.shape
    logits = torch.empty(boards, cells, 10, dtype=torch.float32, device="cpu")
    hidden = torch.empty(boards, cells, _C.sudoku_hidden, dtype=torch.float32, device="cpu")
    _C.sudoku_forward(
        tokens.data_ptr(),
        boards,
        weights.data_ptr(),
        iterations,
        codes.data_ptr(),
        logits.data_ptr(),
        hidden.data_ptr(),
        get_num_threads(),
    )
    return logits, hidden
