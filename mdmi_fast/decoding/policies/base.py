"""What a policy is: one method that looks at a pass and names the positions to unmask."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.arrays import as_tensor
from mdmi_fast.decoding.randomness import places, uniform
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import Selection, TokenStats


class Memory(dict[Hashable, tuple[Tensor, ...]]):
    """What policies remember of each sequence from one pass to the next: tensors with one row a sequence."""

    def keep(self, rows: Tensor) -> None:
        """Forget all sequences but `rows`, a bool or index tensor: those that are still being decoded."""
        for policy, tensors in self.items():
            self[policy] = tuple(tensor[rows] for tensor in tensors)


class Step(int):
    """The number of a pass, with what a few policies want to know besides. A plain int will do for most.

    Takes tensors, numpy arrays and DLPack objects, and holds tensors.

    Attributes:
        model: the model being decoded (for probing).
        tokens: [B, N] int64, the state of the pass (for probing).
        logits: [B, N, V], what the model said (for `Stability`); None where `reads_stats_only`, if the model can do without.
        stats: of the logits, every field [B, N] (for estimators that read the marginals).
        attention: [B, N, N], attention between positions (for `AttentionGraph`).
        sampled: whether tokens are drawn from softmax(logits) as it is: temperature 1, no top_k, no top_p, and nothing
            suppressed or left out of an allowed set.
        seeds: [B] int64, one a sequence (for randomness that does not depend on the batch).
        sequences: [B] int64, which sequences of a decode these are (for limits given per sequence).
        count: how many sequences the decode has.
        attention_mask: [B, N] bool, False at padding; None: no padding.
        memory: of policies that plan ahead or compare passes; one for a whole decode.
        notes: given as a dict, asks a policy for its reasons: those that read mutual information put "mi" [B, N, N]
            there, of all masked pairs, also where the choice could do without.
    """

    model: MaskedModel | None
    tokens: Tensor | None
    logits: Tensor | None
    stats: TokenStats | None
    sampled: bool
    attention: Tensor | None
    seeds: Tensor | None
    sequences: Tensor | None
    count: int | None
    attention_mask: Tensor | None
    memory: Memory | None
    notes: dict[str, Tensor] | None

    def __new__(
        cls,
        index: int,
        *,
        model: MaskedModel | None = None,
        tokens: Any = None,
        logits: Any = None,
        stats: TokenStats | None = None,
        sampled: bool = False,
        attention: Any = None,
        seeds: Any = None,
        sequences: Any = None,
        count: int | None = None,
        attention_mask: Any = None,
        memory: Memory | None = None,
        notes: dict[str, Tensor] | None = None,
    ) -> Step:
        step = super().__new__(cls, index)
        step.model, step.stats, step.sampled, step.count = model, stats, sampled, count
        step.memory, step.notes = memory, notes
        arrays = {
            "tokens": tokens,
            "logits": logits,
            "attention": attention,
            "seeds": seeds,
            "sequences": sequences,
            "attention_mask": attention_mask,
        }
        for name, array in arrays.items():
            setattr(step, name, None if array is None else _tensor("Step", name, array))
        return step

    @classmethod
    def with_stats(cls, step: int, stats: TokenStats) -> Step:
        """The same step, which may be a bare number, with the statistics of its pass."""
        if isinstance(step, Step) and step.stats is stats:
            return step
        known = vars(step) if isinstance(step, Step) else {}
        return cls(int(step), **{**known, "stats": stats})


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


class Rule(ABC):
    """A policy of this package. Its `select` takes tensors of any device, numpy arrays and DLPack objects."""

    @property
    def reads_stats_only(self) -> bool:
        """Whether statistics and hidden states are all it reads of a pass: the model then need not make logits."""
        return True

    def select(self, stats: TokenStats, hidden: Any, mask: Any, step: int) -> Selection:
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
        return self._choose(*checked_pass(self._name, stats, hidden, mask), step)

    @abstractmethod
    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: int) -> Selection:
        """The rule itself, on checked tensors."""

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _of_step(self, step: int, name: str) -> Any:
        """What the rule needs of a `Step`.

        Raises:
            ValueError: if the step does not have it.
        """
        value = getattr(step, name, None)
        if value is None:
            raise ValueError(f"{self._name}: step must be a Step with {name}, got {step!r} without")
        return value


def checked_policy(owner: str, policy: Any) -> None:
    """Reject non-policies; passing a spec string or a class by mistake is common.

    Raises:
        TypeError: it has no method `select` to call.
    """
    if isinstance(policy, type) or not callable(getattr(policy, "select", None)):
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
    mask = _tensor(owner, "mask", mask)
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(f"{owner}: mask must be [B, N] bool, got shape {tuple(mask.shape)} {mask.dtype}")
    if not hasattr(stats, "_asdict"):
        raise TypeError(f"{owner}: stats must be TokenStats, got {type(stats).__name__}")
    fields = {name: _tensor(owner, f"stats.{name}", field) for name, field in stats._asdict().items()}
    for name, field in fields.items():
        if name != "token":
            check.floating(owner, f"stats.{name}", field)
        if field.shape != mask.shape:
            raise ValueError(f"{owner}: stats.{name} must be {tuple(mask.shape)} like mask, got {tuple(field.shape)}")
    return TokenStats(**fields), None if hidden is None else _tensor(owner, "hidden", hidden), mask


def checked_selection(policy: Policy, selected: Tensor, mask: Tensor, step: int) -> Tensor:
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
        sequences = getattr(step, "sequences", None)
        number = row if sequences is None else int(sequences[row])
        raise ValueError(f"decode: the policy {policy!r} took no position of sequence {number} in pass {int(step)}")
    return selected


def _tensor(owner: str, name: str, array: Any) -> Tensor:
    """`as_tensor`, naming the argument in its error."""
    try:
        return as_tensor(array)
    except TypeError as error:
        raise TypeError(f"{owner}: {name}: {error}") from None


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

    def at(self, mask: Tensor, step: int) -> Tensor:
        """[B] float64, the limit of every sequence; padding is no position."""
        visible = getattr(step, "attention_mask", None)
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


def limit_of(limit: Limit, mask: Tensor, step: int) -> float | Tensor:
    """The number of a pass: one for all sequences, or [B] float64.

    Raises:
        ValueError: if there are numbers for more or fewer sequences than there are.
    """
    if isinstance(limit, Schedule):
        return limit.at(mask, step)
    if isinstance(limit, Tensor):
        sequences, count = getattr(step, "sequences", None), getattr(step, "count", None)
        count = len(mask) if count is None else count
        if len(limit) != count:
            raise ValueError(f"policy: a limit must hold a number for each of {count} sequences, got {len(limit)}")
        return (limit if sequences is None else limit[sequences.to(limit.device)]).to(mask.device, torch.float64)
    return float(limit)


def random_numbers(step: int, mask: Tensor, *, stream: int, index: Tensor | None = None) -> Tensor:
    """[B, K] in [0, 1) for a pass: from each sequence's seed, or, without seeds, the same for all sequences.

    Args:
        step: a `Step` with seeds, or a number.
        mask: [B, N].
        stream: separates uses within a pass.
        index: [K] or [B, K] int64, what the numbers belong to; None: the positions.
    """
    seeds = getattr(step, "seeds", None)
    if seeds is None:
        seeds = torch.zeros(mask.shape[0], dtype=torch.int64, device=mask.device)
    if index is None:
        index = places(mask, getattr(step, "attention_mask", None))
    return uniform(seeds, int(step), stream, index)


def take_lowest(key: Tensor, mask: Tensor, count: Tensor | int) -> Tensor:
    """[B, N] bool: per sequence the `count` masked positions of lowest key; ties go to the lower index.

    Raises:
        ValueError: if a key is NaN at a masked position; the first is named.
    """
    return _first_of(_ascending(key, mask), count) & mask


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
    order = _ascending(cost, mask)
    total = cost.double().masked_fill(~mask, torch.inf).gather(-1, order).cumsum(dim=-1)
    if free_last:
        total = F.pad(total[:, :-1], (1, 0))
    within = total <= (budget.unsqueeze(-1) if isinstance(budget, Tensor) else budget)
    count = within.sum(dim=-1).clamp(min=1).minimum(mask.sum(dim=-1))
    spent = total.gather(-1, (count - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return _first_of(order, count) & mask, spent.masked_fill(count == 0, 0.0)


def _ascending(key: Tensor, mask: Tensor) -> Tensor:
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


def nothing_spent(selected: Tensor) -> Selection:
    """The selection of a rule that keeps no account: spent is 0."""
    return Selection(selected, torch.zeros(selected.shape[0], dtype=torch.float64, device=selected.device))
