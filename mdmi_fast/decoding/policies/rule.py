"""What a policy is: one method that looks at a pass and names the positions to unmask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.policies.step import Step, tensor_of
from mdmi_fast.ops import Selection, TokenStats


class Policy(Protocol):
    """Chooses which masked positions to unmask in a pass: all that a decoding loop has to call."""

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: Any) -> Selection:
        """Name the positions to unmask.

        Args:
            stats: of the pass's logits, every field [B, N]; values at unmasked positions are ignored.
            hidden: [B, N, D], the model's hidden states.
            mask: [B, N] bool, True = still masked.
            step: the number of the pass, or a `Step`, which can be treated as its number.

        Returns:
            Selection(selected [B, N] bool, spent [B] float64 in the policy's own currency). At least one masked
            position of every sequence that has one.

        Raises:
            ValueError: if what the rule looks at is NaN at a masked position.
        """
        ...


@runtime_checkable
class StatsReader(Protocol):
    """The optional ability of a policy to say what it can do without."""

    @property
    def reads_stats_only(self) -> bool:
        """Whether statistics and hidden states are all it reads of a pass: the model then need not make logits."""
        ...


class Rule(ABC):
    """A policy of this package. Its `select` takes tensors of any device, numpy arrays and DLPack objects."""

    @property
    def reads_stats_only(self) -> bool:
        """Whether statistics and hidden states are all it reads of a pass: the model then need not make logits."""
        return True

    def select(self, stats: TokenStats, hidden: Any, mask: Any, step: SupportsIndex) -> Selection:
        """Name the positions to unmask; as `Policy.select`.

        Args:
            stats: every field [B, N], tensors, numpy arrays or DLPack objects like the rest.
            hidden: [B, N, D]; None will do for rules that do not read it.
            mask: [B, N] bool, True = still masked.
            step: the number of the pass, or a `Step`.

        Returns:
            Selection of tensors on the device of `mask`; numpy and DLPack read CPU tensors as they are.

        Raises:
            TypeError: for what is no array.
            ValueError: for shapes that do not fit, or if what the rule looks at is NaN at a masked position.
        """
        return self._choose(*checked_pass(type(self).__name__, stats, hidden, mask), Step.of(step))

    @abstractmethod
    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        """The rule itself, on checked tensors."""


def checked_policy(owner: str, policy: Any) -> None:
    """Reject non-policies; passing a spec string or a class by mistake is common.

    Raises:
        TypeError: it has no method `select` to call.
    """
    if isinstance(policy, type) or not callable(check.attribute(policy, "select")):
        raise TypeError(
            f"{owner}: policy must be an object with a method select, such as TopK(4) or parse_policy('topk:4'), "
            f"got {policy!r}"
        )


def checked_pass(owner: str, stats: Any, hidden: Any, mask: Any) -> tuple[TokenStats, Tensor | None, Tensor]:
    """What `Policy.select` is handed, as tensors: (stats, hidden, mask).

    Raises:
        TypeError: for what is no array, naming it.
        ValueError: for shapes that do not fit.
    """
    mask = tensor_of(owner, "mask", mask)
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(f"{owner}: mask must be [B, N] bool, got shape {tuple(mask.shape)} {mask.dtype}")
    if not hasattr(stats, "_asdict"):
        raise TypeError(f"{owner}: stats must be TokenStats, got {type(stats).__name__}")
    fields = {name: tensor_of(owner, f"stats.{name}", field) for name, field in stats._asdict().items()}
    for name, field in fields.items():
        if name != "token":
            check.floating(owner, f"stats.{name}", field)
        if field.shape != mask.shape:
            raise ValueError(f"{owner}: stats.{name} must be {tuple(mask.shape)} like mask, got {tuple(field.shape)}")
    return TokenStats(**fields), None if hidden is None else tensor_of(owner, "hidden", hidden), mask


def checked_selection(policy: Policy, selected: Tensor, mask: Tensor, step: Step) -> Tensor:
    """The selection of a pass without what is not masked.

    Raises:
        ValueError: if it is of another kind, or takes nothing of a sequence that has something masked.
    """
    if selected.shape != mask.shape or selected.dtype != torch.bool:
        raise ValueError(
            f"decode: the policy {policy!r} must select {tuple(mask.shape)} bool, "
            f"got shape {tuple(selected.shape)} {selected.dtype}"
        )
    selected = selected & mask
    stuck = mask.any(dim=-1) & ~selected.any(dim=-1)
    if bool(stuck.any()):
        row = int(stuck.nonzero()[0])
        number = row if step.sequences is None else int(step.sequences[row])
        raise ValueError(f"decode: the policy {policy!r} took no position of sequence {number} in pass {step.index}")
    return selected


def nothing_spent(selected: Tensor) -> Selection:
    """The selection of a rule that keeps no account: spent is 0."""
    return Selection(selected, torch.zeros(selected.shape[0], dtype=torch.float64, device=selected.device))
