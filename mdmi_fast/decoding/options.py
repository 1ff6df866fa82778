"""How tokens are drawn and written: the options of `decode`, which check themselves.

The command line and records of JSON have the same options: a field's `told` is its help, its `word` what a command calls it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.sampling import sample
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import check_flag, token_list


def _option(default: Any, told: str, word: str | None = None) -> Any:
    return field(default=default, metadata={"told": told, "word": word})


def _real(name: str, value: object) -> float:
    """A real number of any kind as float64."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"decode: {name} must be a number, got {check.describe(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"decode: {name} must be a number that float64 can hold") from None


def _count(name: str, value: Any, least: int) -> None:
    if value is not None:
        check.whole("decode", name, value, least, math.inf)  # more than there is means all of it


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits.

    Attributes:
        temperature: 0 takes the most probable token; above, tokens are drawn from softmax(logits / temperature).
        top_k: sample only from the k most probable tokens; None: from all.
        top_p: draw from the fewest tokens that hold this much probability only, in (0, 1].
        gumbel: draw by the Gumbel-max rule, see `sample`.

    Raises:
        TypeError: for values of another kind, naming the option.
        ValueError: for numbers out of range.
    """

    temperature: float = _option(0.0, "0 takes the most probable tokens")
    top_k: int | None = _option(None, "sample only from the N most probable tokens")
    top_p: float = _option(1.0, "sample from the fewest tokens that hold this probability")
    gumbel: bool = _option(False, "draw by the Gumbel-max rule")

    def __post_init__(self) -> None:
        temperature, top_p = _real("temperature", self.temperature), _real("top_p", self.top_p)
        if not 0 <= temperature < math.inf:
            raise ValueError(f"decode: temperature must be a finite number >= 0, got {temperature}")
        if not 0 < top_p <= 1:
            raise ValueError(f"decode: top_p must lie in (0, 1], got {top_p}")
        _count("top_k", self.top_k, 1)
        check_flag("decode", "gumbel", self.gumbel)
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "top_p", top_p)

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from softmax(logits) as it is."""
        return self.temperature == 1 and self.top_k is None and self.top_p == 1

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """[R] int64 from logits [R, V], by numbers [R] float64 in [0, 1); at a temperature above 0."""
        return sample(logits, uniforms, self.temperature, top_k=self.top_k, top_p=self.top_p, gumbel=self.gumbel)


@dataclass(frozen=True)
class Writing:
    """What may be written, where first, and what is looked at again.

    Attributes:
        suppressed: tokens that are never written.
        stop_tokens: tokens that end a sequence.
        block_size: decode in blocks of this many positions, left to right; None: all at once.
        verify: look at jointly written positions once more, see `decode`.
        remask_below: mask again what was written with less confidence than this.
        revisions: how often a position may be masked again.

    Raises:
        TypeError: for values of another kind, naming the option.
        ValueError: for numbers out of range.
    """

    suppressed: Sequence[int] = _option((), "never write these", "suppress")
    stop_tokens: Sequence[int] = _option((), "tokens that end a sequence", "stop")
    block_size: int | None = _option(None, "decode in blocks of this many positions, left to right")
    verify: bool = _option(False, "check what was written together with one more pass, mask again what lost")
    remask_below: float = _option(0.0, "when all is written, mask again what was less probable than this")
    revisions: int = _option(1, "how often a position may be masked again")

    def __post_init__(self) -> None:
        _count("block_size", self.block_size, 1)
        _count("revisions", self.revisions, 0)
        check_flag("decode", "verify", self.verify)
        remask_below = _real("remask_below", self.remask_below)
        if not 0 <= remask_below <= 1:
            raise ValueError(f"decode: remask_below must be a probability, got {remask_below}")
        object.__setattr__(self, "remask_below", remask_below)

    @property
    def revises(self) -> bool:
        """Whether anything may be masked again."""
        return self.verify or self.remask_below > 0

    def fitted(self, model: MaskedModel, length: int) -> Writing:
        """The same for a model and sequences of this length: tokens as lists, counts that int32 holds.

        Raises:
            TypeError: for what are no tokens.
            ValueError: for tokens that the model does not have.
        """
        size = model.vocab_size
        stops = token_list("decode", "stop_tokens", self.stop_tokens, size)
        suppressed = token_list("decode", "suppressed", self.suppressed, size)
        block = None if self.block_size is None else min(self.block_size, max(1, length))
        revisions = min(self.revisions, torch.iinfo(torch.int32).max)
        return Writing(suppressed, stops, block, self.verify, self.remask_below, revisions)


OPTIONS: dict[str, Field[Any]] = {each.name: each for kind in (Sampling, Writing) for each in fields(kind)}
"""The options by name."""


def check_option(name: str, value: Any) -> None:
    """Refuse a value that an option of `decode` cannot have, whatever the model.

    Raises:
        TypeError: for another kind.
        ValueError: out of range.
    """
    kind = Sampling if name in {each.name for each in fields(Sampling)} else Writing
    made: Any = kind(**{name: value})
    if name in ("suppressed", "stop_tokens"):
        token_list("decode", name, vars(made)[name], 2**63)
