"""The receipt of a decode: what every pass wrote, why, and what had to wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PassRecord(NamedTuple):
    """One pass of a trace.

    Attributes:
        step: number of the pass.
        sequences: [R] int64, the sequences still being decoded.
        selected: [R, N] bool, what was unmasked.
        tokens: [R, N] int64, the state after the pass.
        entropy: [R, N] float32, nats, before the pass; 0 where the policy had no choice.
        spent: [R] float64, as the policy counted it.
        blocker: [R, N] int64, of a position that waits: the chosen one that shares most mutual information with it;
            -1 where there is none, or the policy reads no mutual information.
        remasked: [R, N] bool, what was masked again after the pass.
        ended: [R, N] bool, what was filled because a stop token stands before it.
        order: [R, K] int64, the positions of a coupled pass in the order in which they were drawn, -1 where a sequence drew
            fewer; None: not coupled.
    """

    step: int
    sequences: Tensor
    selected: Tensor
    tokens: Tensor
    entropy: Tensor
    spent: Tensor
    blocker: Tensor
    remasked: Tensor
    ended: Tensor
    order: Tensor | None = None


def blocking(mi: Tensor | None, selected: Tensor, waiting: Tensor) -> Tensor:
    """[R, N] int64 for `PassRecord.blocker`.

    Args:
        mi: [R, N, N], nats; None: not known.
        selected: [R, N] bool.
        waiting: [R, N] bool, masked and not selected.
    """
    nobody = torch.full(selected.shape, -1, dtype=torch.int64, device=selected.device)
    if mi is None or selected.shape[1] == 0:
        return nobody
    shared = torch.maximum(mi, mi.transpose(-1, -2)).masked_fill(~selected.unsqueeze(-2), 0.0)
    most, which = shared.max(dim=-1)
    return torch.where(waiting & (most > 0), which, nobody)


def receipt(trace: Iterable[PassRecord], sequence: int) -> list[dict[str, Any]]:
    """One sequence's passes as JSON objects, from which `replay` makes its tokens again.

    Args:
        trace: of `decode`.
        sequence: its number in the batch.

    Returns:
        A pass each: "pass", "positions", "tokens" and "entropy" of what was chosen (the mask token where it was
        masked again), "spent", and where there is any
        "blocked" (pairs of a waiting position and the chosen one it shares most with), "remasked" (positions),
        "ended" (pairs of a position and the stop token it was filled with) and "order" (the positions that were drawn
        one after the other, each corrected by those before it).
    """
    passes = []
    for record in trace:
        at = (record.sequences == sequence).nonzero()
        if not len(at):
            continue
        row = int(at[0])
        chosen = record.selected[row].nonzero().squeeze(-1)
        written = record.tokens[row]
        entry: dict[str, Any] = {
            "pass": record.step,
            "positions": chosen.tolist(),
            "tokens": written[chosen].tolist(),
            "entropy": record.entropy[row, chosen].tolist(),
            "spent": float(record.spent[row]),
        }
        waiting = (record.blocker[row] >= 0).nonzero().squeeze(-1)
        ended = record.ended[row].nonzero().squeeze(-1)
        order = [] if record.order is None or len(chosen) < 2 else record.order[row, : len(chosen)].tolist()
        extra = {
            "blocked": torch.stack([waiting, record.blocker[row, waiting]], dim=-1).tolist(),
            "remasked": record.remasked[row].nonzero().squeeze(-1).tolist(),
            "ended": torch.stack([ended, written[ended]], dim=-1).tolist(),
            "order": order,
        }
        passes.append(entry | {name: value for name, value in extra.items() if value})
    return passes


def replay(tokens: list[int], passes: Iterable[dict[str, Any]]) -> list[int]:
    """The tokens that a sequence was decoded to, from its receipt alone.

    Args:
        tokens: the sequence as it was before.
        passes: of `receipt`, in their order.

    Raises:
        ValueError: if a pass names a position that the sequence does not have.

    Example:
        >>> replay([7, 9, 9], [{"positions": [2], "tokens": [5]}, {"positions": [1], "tokens": [4]}])
        [7, 4, 5]
    """
    tokens = list(tokens)
    for entry in passes:
        pairs = [*zip(entry["positions"], entry["tokens"], strict=True), *entry.get("ended", ())]
        for position, token in pairs:
            if not 0 <= position < len(tokens):
                raise ValueError(f"replay: positions must lie in 0..{len(tokens) - 1}, got {position}")
            tokens[position] = token
    return tokens
