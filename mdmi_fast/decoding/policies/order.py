"""Positions in order: by a key, by cost within a budget, or by chance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mdmi_fast.decoding.policies.step import Step
from mdmi_fast.decoding.randomness import places, uniform


def random_numbers(step: Step, mask: Tensor, *, stream: int, index: Tensor | None = None) -> Tensor:
    """[B, K] in [0, 1) for a pass: from each sequence's seed, or, without seeds, the same for all sequences.

    Args:
        step: of the pass.
        mask: [B, N].
        stream: separates uses within a pass.
        index: [K] or [B, K] int64, what the numbers belong to; None: the positions.
    """
    seeds = step.seeds
    if seeds is None:
        seeds = torch.zeros(mask.shape[0], dtype=torch.int64, device=mask.device)
    if index is None:
        index = places(mask, step.attention_mask)
    return uniform(seeds, step.index, stream, index)


def take_lowest(key: Tensor, mask: Tensor, count: Tensor | int) -> Tensor:
    """[B, N] bool: per sequence the `count` masked positions of lowest key; ties go to the lower index.

    Raises:
        ValueError: if a key is NaN at a masked position; the first is named.
    """
    return _first_of(ascending(key, mask), count) & mask


def longest_prefix(
    cost: Tensor, mask: Tensor, budget: float | Tensor, *, free_last: bool = False
) -> tuple[Tensor, Tensor]:
    """The most positions of lowest cost whose costs sum to at most `budget`, but one at least.

    The sum is taken in float64, in ascending order.

    Args:
        cost: [B, N], >= 0 at masked positions.
        mask: [B, N] bool.
        budget: of the sum; a number or [B].
        free_last: leave the largest cost out of the sum.

    Returns:
        (selected [B, N] bool, spent [B] float64).

    Raises:
        ValueError: as `take_lowest`.
    """
    order = ascending(cost, mask)
    total = cost.double().masked_fill(~mask, torch.inf).gather(-1, order).cumsum(dim=-1)
    if free_last:
        total = F.pad(total[:, :-1], (1, 0))
    within = total <= (budget.unsqueeze(-1) if isinstance(budget, Tensor) else budget)
    count = within.sum(dim=-1).clamp(min=1).minimum(mask.sum(dim=-1))
    spent = total.gather(-1, (count - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return _first_of(order, count) & mask, spent.masked_fill(count == 0, 0.0)


def ascending(key: Tensor, mask: Tensor) -> Tensor:
    """[B, N] int64: masked positions by key, ties by index; then the others."""
    undefined = key.isnan() & mask
    if bool(undefined.any()):
        batch, position = undefined.nonzero()[0].tolist()
        raise ValueError(
            f"policy: stats must not be NaN at masked positions, got NaN at batch {batch}, position {position}"
        )
    # An infinite key still comes before every unmasked position.
    return key.clamp(max=torch.finfo(key.dtype).max).masked_fill(~mask, torch.inf).argsort(dim=-1, stable=True)


def _first_of(order: Tensor, count: Tensor | int) -> Tensor:
    """[B, N] bool: the first `count` positions of an order."""
    limit = count.unsqueeze(-1) if isinstance(count, Tensor) else min(count, order.shape[1])
    taken = torch.arange(order.shape[1], device=order.device) < limit
    return torch.zeros(order.shape, dtype=torch.bool, device=order.device).scatter_(-1, order, taken.expand_as(order))
