"""Limits of policies: a number, one for each sequence, or one that moves with what is left."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.policies.step import Step


@dataclass(frozen=True)
class Schedule:
    """A limit that moves with the share r of the positions that is still masked: end + (start - end) r.

    Written "start..end" in text. Where decoding is block-wise only the open block counts as masked.

    Args:
        start: while everything is masked; finite, at least 0.
        end: when nothing is; finite, at least 0.

    Raises:
        TypeError: for an end that is no number; it is named.
        ValueError: naming the end that is out of range.

    Example:
        >>> mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
        >>> Schedule(0.4, 0.0).at(mask, 0)
        tensor([0.4000, 0.1000], dtype=torch.float64)
    """

    start: float
    end: float

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("end", self.end)):
            if check.at_least("Schedule", name, value, 0.0) == math.inf:
                raise ValueError(f"Schedule: {name} must be a finite number, got {value}")

    def at(self, mask: Tensor, step: SupportsIndex) -> Tensor:
        """[B] float64, the limit of every sequence; padding is no position."""
        visible = Step.of(step).attention_mask
        length = mask.shape[1] if visible is None else visible.sum(dim=-1)
        # Above 0: where there is no position nothing is masked either.
        share = mask.sum(dim=-1).double() / torch.as_tensor(length, device=mask.device).clamp(min=1)
        return self.end + (self.start - self.end) * share


_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))

Limit = float | Tensor | Schedule
"""A number; a tensor with one number for each sequence of a decode; or a `Schedule`."""


def checked_limit(owner: str, name: str, limit: Limit) -> None:
    """Refuse a limit below 0 or NaN.

    Raises:
        TypeError: for what is no number, naming the policy and the argument like the rest.
        ValueError: for numbers out of range, or a tensor that does not hold one for each sequence.
    """
    if isinstance(limit, Tensor):
        check.floating(owner, name, limit.double() if limit.dtype in _INTEGERS else limit)
        if limit.ndim != 1:
            raise ValueError(
                f"{owner}: {name} must be a float, or a tensor [B] with a number for each sequence, "
                f"got {check.describe(limit)}"
            )
        if not bool((limit >= 0).all()):
            raise ValueError(f"{owner}: {name} must be numbers of at least 0, one a sequence, got {limit}")
    elif not isinstance(limit, Schedule):
        check.at_least(owner, name, limit, 0.0)


def limit_of(limit: Limit, mask: Tensor, step: Step) -> float | Tensor:
    """The number of a pass: one for all sequences, or [B] float64.

    Raises:
        ValueError: if there are numbers for more or fewer sequences than there are.
    """
    if isinstance(limit, Schedule):
        return limit.at(mask, step)
    if isinstance(limit, Tensor):
        count = len(mask) if step.count is None else step.count
        if len(limit) != count:
            raise ValueError(f"policy: a limit must hold a number for each of {count} sequences, got {len(limit)}")
        own = limit if step.sequences is None else limit[step.sequences.to(limit.device)]
        return own.to(mask.device, torch.float64)
    return float(limit)
