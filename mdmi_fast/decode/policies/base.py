"""What a policy is: one method that looks at a pass and names the positions to unmask."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mdmi_fast.decode.randomness import uniform
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import Selection, TokenStats


class Step(int):
    """The number of a pass, with what a few policies want to know besides. A plain int will do for most.

    Attributes:
        model: the model being decoded (for probing).
        tokens: [B, N] int64, the state of the pass.
        seeds: [B] int64, one a sequence (for randomness that does not depend on the batch).
        attention_mask: [B, N] bool, False at padding; None: no padding.
    """

    model: MaskedModel | None
    tokens: Tensor | None
    seeds: Tensor | None
    attention_mask: Tensor | None

    def __new__(
        cls,
        index: int,
        *,
        model: MaskedModel | None = None,
        tokens: Tensor | None = None,
        seeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Step:
        step = super().__new__(cls, index)
        step.model, step.tokens, step.seeds, step.attention_mask = model, tokens, seeds, attention_mask
        return step


class Policy(Protocol):
    """Chooses which masked positions to unmask in a pass: all that a decoding loop has to call."""

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        """Name the positions to unmask.

        Args:
            stats: of the pass's logits, every field [B, N]; values at unmasked positions are ignored.
            hidden: [B, N, D], the model's hidden states.
            mask: [B, N] bool, True = still masked.
            step: the number of the pass, or a `Step`.

        Returns:
            Selection(selected [B, N] bool, spent [B] float64 in the policy's own currency). At least one masked
            position of every sequence that has one.

        Raises:
            ValueError: if what the rule looks at is NaN at a masked position.
        """
        ...


def random_numbers(step: int, mask: Tensor, *, stream: int, length: int | None = None) -> Tensor:
    """[B, length] in [0, 1) for a pass: from each sequence's seed, or, without seeds, the same for all sequences."""
    seeds = getattr(step, "seeds", None)
    if seeds is None:
        seeds = torch.zeros(mask.shape[0], dtype=torch.int64, device=mask.device)
    return uniform(seeds, int(step), stream, mask.shape[1] if length is None else length)


def take_lowest(key: Tensor, mask: Tensor, count: Tensor | int) -> Tensor:
    """[B, N] bool: per sequence the `count` masked positions of lowest key; ties go to the lower index.

    Raises:
        ValueError: if a key is NaN at a masked position; the first is named.
    """
    undefined = key.isnan() & mask
    if bool(undefined.any()):
        batch, position = undefined.nonzero()[0].tolist()
        raise ValueError(
            f"policy: stats must not be NaN at masked positions, got NaN at batch {batch}, position {position}"
        )
    # An infinite key still comes before every unmasked position.
    order = key.clamp(max=torch.finfo(key.dtype).max).masked_fill(~mask, torch.inf).argsort(dim=-1, stable=True)
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, places)
    limit = count.unsqueeze(-1) if isinstance(count, Tensor) else count
    return (rank < limit) & mask


def longest_prefix(cost: Tensor, mask: Tensor, budget: float, *, free_last: bool = False) -> tuple[Tensor, Tensor]:
    """The most positions of lowest cost whose costs sum to at most `budget`, but one at least.

    The sum is taken in float64, in ascending order.

    Args:
        cost: [B, N], >= 0 at masked positions.
        mask: [B, N] bool.
        budget: of the sum.
        free_last: leave the largest cost out of the sum.

    Returns:
        (selected [B, N] bool, spent [B] float64).
    """
    ordered = cost.double().masked_fill(~mask, torch.inf).sort(dim=-1, stable=True).values
    total = ordered.cumsum(dim=-1)
    if free_last:
        total = F.pad(total[:, :-1], (1, 0))
    count = (total <= budget).sum(dim=-1).clamp(min=1).minimum(mask.sum(dim=-1))
    spent = total.gather(-1, (count - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return take_lowest(cost, mask, count), spent.masked_fill(count == 0, 0.0)


def at_least(owner: str, name: str, value: float, low: float) -> float:
    """The value, if it is a number not below `low` (infinity allowed).

    Raises:
        ValueError: naming the policy and the argument.
    """
    if not value >= low:
        raise ValueError(f"{owner}: {name} must be at least {low}, got {value}")
    return value
