"""The compiled forward pass of the Sudoku task's network."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads


def sudoku_forward(tokens: Tensor, weights: Tensor, iterations: int, codes: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, 81, 10] and hidden [B, 81, D] of boards [B, 81] int64 within 0..9; weights packed by the model."""
    if weights.numel() != _C.sudoku_weights:
        raise ValueError(f"sudoku_forward: weights must hold {_C.sudoku_weights} numbers, got {weights.numel()}")
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
