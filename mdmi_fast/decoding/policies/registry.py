"""How policies are written as text, explained and tuned. A policy says so once, where its class is."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mdmi_fast.decoding.policies.limits import Schedule

Made = TypeVar("Made", bound=type)
GROUP = "mdmi_fast.policies"
"""Entry points of policies from elsewhere: NAME = "module:Class", where the module registers the class as NAME."""


class Seen(NamedTuple):
    """What a pass shows of the M >= 2 masked positions of a sequence, float64; None where that was not asked for.

    Attributes:
        entropy: [M], nats.
        doubt: [M], 1 - confidence.
        kl: [M], nats, how far the distributions moved in the last pass.
        mi: [M, M], nats, at least 0.
        attention: [M, M], the mean of both directions.
    """

    entropy: Tensor
    doubt: Tensor
    kl: Tensor | None
    mi: Tensor | None
    attention: Tensor | None


Prices = Callable[[Seen, Mapping[str, str]], Tensor | None]
"""What a rule with these options has to allow before it takes one more position, for any number of positions, in any order;
None where the pass does not show it. Settings are quantiles of these."""


class Reader(NamedTuple):
    """How a value is read from text, what it has to be, and how it is shown."""

    read: Callable[[str], Any]
    expected: str
    shape: str


def _integer(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError(text)
        return value

    return read


def _limit(text: str) -> float | Schedule:
    start, dots, end = text.partition("..")
    return Schedule(float(start), float(end)) if dots else float(start)


def one_of(*choices: str) -> Reader:
    """One of a few words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return Reader(read, " or ".join(choices), "|".join(choices))


COUNT = Reader(_integer(1), "an integer of at least 1", "N")
WHOLE = Reader(_integer(0), "an integer of at least 0", "N")
NUMBER = Reader(float, "a number", "X")
LIMIT = Reader(_limit, "a number, or two finite ones as START..END", "X")


def above_diagonal(pairs: Tensor) -> Tensor:
    """[M (M - 1) / 2]: every pair of pairs [M, M] once."""
    return pairs[torch.ones_like(pairs, dtype=torch.bool).triu(1)]


def threshold(doubt: float) -> str:
    """The confidence that leaves so much doubt, to the last digit that float32 tells apart."""
    return f"{max(0.0, 1.0 - doubt):.8g}"


@dataclass(frozen=True)
class Registered:
    """A policy as text.

    Attributes:
        name: as it is written.
        make: the class.
        unmasks: what it unmasks in a pass, for people.
        value: the argument behind the colon and its reader; None: the policy has none.
        options: the arguments that may follow.
        needs_mi: whether it takes a source of mutual information.
        prices: for tuning; None where the value is a count, or cannot be searched for.
        setting: a price as the text of the value.
        along: options that move with the value unless they are given: their prices and how they are written.
        tried: options with which `tune` tries it unless told, "" for none.
        tried_sampling: likewise where tokens are drawn.
    """

    name: str
    make: type
    unmasks: str
    value: tuple[str, Reader] | None = None
    options: Mapping[str, Reader] = field(default_factory=dict)
    needs_mi: bool = False
    prices: Prices | None = None
    setting: Callable[[float], str] = "{:.3g}".format
    along: Mapping[str, tuple[Prices, Callable[[float], str]]] = field(default_factory=dict)
    tried: Sequence[str] = ()
    tried_sampling: Sequence[str] = ()

    @property
    def form(self) -> str:
        """How it is written, options in brackets."""
        value = f":{self.value[0].upper()}" if self.value else ""
        return self.name + value + "".join(f"[,{option}={reader.shape}]" for option, reader in self.options.items())

    @property
    def is_count(self) -> bool:
        """Whether the value is a number of positions."""
        return self.value is not None and self.value[1] is COUNT


_POLICIES: dict[str, Registered] = {}


def policy(name: str, **about: Any) -> Callable[[Made], Made]:
    """Register the class below under a name.

    Args:
        name: as it is written in text.
        **about: the other fields of `Registered`.

    Raises:
        ValueError: for a name that is taken.
    """

    def register(made: Made) -> Made:
        if name in _POLICIES and _POLICIES[name].make.__qualname__ != made.__qualname__:
            raise ValueError(f"policy: name must be new, got {name!r}, which is {_POLICIES[name].make.__qualname__}")
        _POLICIES[name] = Registered(name, made, **about)
        return made

    return register


def registered() -> Mapping[str, Registered]:
    """Every policy by name, also those of other packages."""
    _load_others()
    return _POLICIES


@functools.cache
def _load_others() -> None:
    for entry in entry_points(group=GROUP):
        entry.load()


def policy_forms() -> list[str]:
    """Every policy as it is written, options in brackets.

    Example:
        >>> policy_forms()[0]
        'sequential'
    """
    return [each.form for each in registered().values()]


def policy_help() -> str:
    """All policies for the help of a command: how each is written and what it unmasks."""
    lines = []
    for each in registered().values():
        told = textwrap.wrap(each.unmasks, 60)
        head = f"  {each.form}"
        if len(head) < 30:
            head = f"{head:<31}{told.pop(0)}"
        lines += [head, *(f"{'':<31}{line}" for line in told)]
    return "\n".join(lines)
