"""Statistics of rows of logits, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads
from mdmi_fast.backends.cpp._memory import DTYPE, rows_of

Stats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

# Columns of a tile of logits that only exists as long as it is read, and elements of the whole tile: 4 MiB.
TILE_COLUMNS = 4096
TILE_ELEMENTS = 1 << 20


def _new_stats(lead: torch.Size) -> Stats:
    h, lse, confidence, margin = (torch.empty(lead, dtype=torch.float32, device="cpu") for _ in range(4))
    return h, lse, confidence, torch.empty(lead, dtype=torch.int64, device="cpu"), margin


def _addresses(stats: Stats) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in stats)


def entropy(logits: Tensor) -> Tensor:
    result = torch.empty(logits.shape[:-1], dtype=torch.float32, device="cpu")
    logits, rows = rows_of(logits)
    _C.row_stats(rows, result.numel(), logits.shape[-1], (result.data_ptr(), 0, 0, 0, 0), get_num_threads())
    return result


def token_stats(logits: Tensor) -> Stats:
    result = _new_stats(logits.shape[:-1])
    logits, rows = rows_of(logits)
    _C.row_stats(rows, result[0].numel(), logits.shape[-1], _addresses(result), get_num_threads())
    return result


def _backward(grads: tuple[Tensor | None, ...], logits: Tensor) -> Tensor:
    result = torch.empty(logits.shape, dtype=logits.dtype, device="cpu")
    logits, rows = rows_of(logits)
    doubles = [None if g is None else g.double().contiguous() for g in grads]
    addresses = tuple(0 if g is None else g.data_ptr() for g in doubles)
    n_rows = logits.shape[:-1].numel()
    _C.stats_backward(
        rows, n_rows, logits.shape[-1], addresses, (result.data_ptr(), DTYPE[result.dtype]), get_num_threads()
    )
    return result


def entropy_backward(grad: Tensor, logits: Tensor) -> Tensor:
    return _backward((grad, None, None, None), logits)


def token_stats_backward(
    grad_entropy: Tensor, grad_logsumexp: Tensor, grad_confidence: Tensor, grad_margin: Tensor, logits: Tensor
) -> Tensor:
    return _backward((grad_entropy, grad_logsumexp, grad_confidence, grad_margin), logits)


def linear_token_stats(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Stats:
    lead, n_vocabulary, threads = hidden.shape[:-1], weight.shape[0], get_num_threads()
    wide = any(x is not None and x.dtype == torch.float64 for x in (hidden, weight, bias))
    dtype = torch.float64 if wide else torch.float32
    result = _new_stats(lead)
    x = hidden.reshape(lead.numel(), hidden.shape[-1])
    n_rows = x.shape[0]
    states = torch.empty(n_rows * _C.ROW_STATE_BYTES, dtype=torch.uint8, device="cpu")
    _C.new_states(states.data_ptr(), n_rows)
    n_columns = min(n_vocabulary, TILE_COLUMNS)
    n_together = max(1, min(n_rows, TILE_ELEMENTS // n_columns))
    tile = torch.empty(n_together, n_columns, dtype=dtype, device="cpu")
    for column in range(0, n_vocabulary, n_columns):
        head = weight[column : column + n_columns].to(dtype).T
        shift = None if bias is None else bias[column : column + n_columns].to(dtype)
        width = head.shape[1]
        for row in range(0, n_rows, n_together):
            some = x[row : row + n_together].to(dtype)
            logits = tile[: some.shape[0], :width]
            if shift is None:
                torch.mm(some, head, out=logits)
            else:
                torch.addmm(shift, some, head, out=logits)
            _C.absorb_tile(
                (logits.data_ptr(), DTYPE[dtype], (1, n_columns, 0)),
                some.shape[0],
                width,
                column,
                states.data_ptr() + row * _C.ROW_STATE_BYTES,
                threads,
            )
    _C.finish_rows(states.data_ptr(), n_rows, _addresses(result))
    return result
