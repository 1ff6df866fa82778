"""What a policy is told of a pass, and what it may keep for the next."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, SupportsIndex, TypeVar

from torch import Tensor

from mdmi_fast.decoding.arrays import as_tensor
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import TokenStats

Given = TypeVar("Given")

_ARRAYS = ("tokens", "logits", "attention", "seeds", "sequences", "attention_mask")


class Memory(dict[Hashable, tuple[Tensor, ...]]):
    """What policies remember of each sequence from one pass to the next: tensors with one row a sequence."""

    def keep(self, rows: Tensor) -> None:
        """Forget all sequences but `rows`, a bool or index tensor: those that are still being decoded."""
        for policy, tensors in self.items():
            self[policy] = tuple(tensor[rows] for tensor in tensors)


def _as_number(operation: Callable[..., Any]) -> Callable[..., Any]:
    def of_index(self: Step, *others: Any) -> Any:
        return operation(self.index, *(other.index if isinstance(other, Step) else other for other in others))

    return of_index


@dataclass(frozen=True, eq=False)
class Step:
    """A pass index with optional context that some policies need; most accept a plain int.

    Takes tensors, numpy arrays and DLPack objects, and holds tensors. A policy written for a plain int can count and
    compare with a `Step` as with its index.

    Attributes:
        index: the number of the pass, from 0.
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

    index: int
    _: KW_ONLY
    model: MaskedModel | None = None
    tokens: Tensor | None = None
    logits: Tensor | None = None
    stats: TokenStats | None = None
    sampled: bool = False
    attention: Tensor | None = None
    seeds: Tensor | None = None
    sequences: Tensor | None = None
    count: int | None = None
    attention_mask: Tensor | None = None
    memory: Memory | None = None
    notes: dict[str, Tensor] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", operator.index(self.index))
        for name in _ARRAYS:
            array = vars(self)[name]
            if array is not None and not isinstance(array, Tensor):
                object.__setattr__(self, name, tensor_of("Step", name, array))

    @classmethod
    def of(cls, step: SupportsIndex | Step) -> Step:
        """A step itself; of a bare number, one without context."""
        return step if isinstance(step, Step) else cls(operator.index(step))

    def with_stats(self, stats: TokenStats) -> Step:
        """The same step with the statistics of its pass."""
        return self if self.stats is stats else replace(self, stats=stats)

    def __index__(self) -> int:
        return self.index

    def __str__(self) -> str:
        return str(self.index)

    def __format__(self, spec: str) -> str:
        return format(self.index, spec)

    # A policy of somebody's own may be written for the bare number.
    __hash__ = _as_number(hash)
    __bool__ = _as_number(bool)
    __eq__, __ne__ = _as_number(operator.eq), _as_number(operator.ne)
    __lt__, __le__ = _as_number(operator.lt), _as_number(operator.le)
    __gt__, __ge__ = _as_number(operator.gt), _as_number(operator.ge)
    __add__ = __radd__ = _as_number(operator.add)
    __mul__ = __rmul__ = _as_number(operator.mul)
    __sub__, __rsub__ = _as_number(operator.sub), _as_number(lambda index, other: other - index)
    __mod__, __rmod__ = _as_number(operator.mod), _as_number(lambda index, other: other % index)
    __floordiv__, __rfloordiv__ = _as_number(operator.floordiv), _as_number(lambda index, other: other // index)
    __truediv__, __rtruediv__ = _as_number(operator.truediv), _as_number(lambda index, other: other / index)
    __pow__, __rpow__ = _as_number(operator.pow), _as_number(lambda index, other: other**index)
    __neg__, __and__ = _as_number(operator.neg), _as_number(operator.and_)


def required(owner: str, name: str, value: Given | None) -> Given:
    """What a rule needs of a `Step`.

    Raises:
        ValueError: if the step does not have it.
    """
    if value is None:
        raise ValueError(f"{owner}: step must be a Step with {name}, got one without or a bare number")
    return value


def tensor_of(owner: str, name: str, array: Any) -> Tensor:
    """`as_tensor`, naming the argument in its error."""
    try:
        return as_tensor(array)
    except TypeError as error:
        raise TypeError(f"{owner}: {name}: {error}") from None
