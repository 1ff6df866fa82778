"""Policies as text, for command lines, configuration files and requests: "topk:4", "mi-budget:0.02,entropy_weight=0"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mdmi_fast.decoding.policies.base import Policy, Schedule
from mdmi_fast.decoding.policies.baselines import (
    Confidence,
    ConfidenceBudget,
    ConfidenceFactor,
    EntropyBound,
    Random,
    Sequential,
    TopK,
)
from mdmi_fast.decoding.policies.internals import AttentionGraph, Stability
from mdmi_fast.decoding.policies.mutual_information import Coloring, MIBudget, MISource, MIThreshold


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _limit(text: str) -> float | Schedule:
    """A number, or "start..end"."""
    start, dots, end = text.partition("..")
    return Schedule(float(start), float(end)) if dots else float(start)


def _order(text: str) -> str:
    if text not in ("entropy", "cheapest"):
        raise ValueError(text)
    return text


_KINDS: Mapping[Callable[[str], Any], str] = {
    _count: "an integer of at least 1",
    _whole: "an integer of at least 0",
    _limit: "a number, or two finite ones as START..END",
    _order: "entropy or cheapest",
    float: "a number",
}


class _Rule(NamedTuple):
    """How a policy is written: its class, the values it must have and those it may have, with their readers."""

    make: Callable[..., Policy]
    value: tuple[str, Callable[[str], Any]] | None = None
    options: Mapping[str, Callable[[str], Any]] = {}
    needs_mi: bool = False


_RULES: Mapping[str, _Rule] = {
    "sequential": _Rule(Sequential),
    "topk": _Rule(TopK, ("k", _count)),
    "random": _Rule(Random, ("k", _count)),
    "confidence": _Rule(Confidence, ("threshold", float)),
    "confidence-factor": _Rule(ConfidenceFactor, ("factor", float)),
    "confidence-budget": _Rule(ConfidenceBudget, ("epsilon", _limit)),
    "entropy-bound": _Rule(EntropyBound, ("gamma", _limit)),
    "stability": _Rule(Stability, ("kl", float), {"confidence": float}),
    "attention-graph": _Rule(AttentionGraph, ("tau", float), {"limit": _count}),
    "mi-budget": _Rule(
        MIBudget,
        ("gamma", _limit),
        {"lam": float, "entropy_weight": float, "order": _order, "limit": _count, "lazy": _whole, "most": _count},
        needs_mi=True,
    ),
    "mi-threshold": _Rule(
        MIThreshold, ("tau", _limit), {"limit": _count, "lazy": _whole, "most": _count}, needs_mi=True
    ),
    "coloring": _Rule(Coloring, ("tau", float), {"replan": _count}, needs_mi=True),
}


def policy_forms() -> list[str]:
    """Every policy as it is written, options in brackets.

    Example:
        >>> policy_forms()[-1]
        'coloring:TAU[,replan=N]'
    """
    return [_written(name) for name in _RULES]


def needs_mi(spec: str) -> bool:
    """Whether the policy of a spec reads mutual information, so that `parse_policy` needs a source of it.

    Raises:
        ValueError: no policy of that name.
    """
    return _rule(spec).needs_mi


def parse_policy(spec: str, mi: MISource | None = None) -> Policy:
    """The policy that a text describes: a name, its value behind a colon, options behind commas.

    Args:
        spec: "sequential", "topk:4", "random:4", "confidence:0.9", "confidence-factor:0.5", "confidence-budget:0.1",
            "entropy-bound:0.2", "stability:0.01,confidence=0.9", "attention-graph:0.05,limit=8",
            "mi-budget:0.02,lam=1,entropy_weight=0,order=cheapest,limit=8,lazy=4,most=200", "mi-threshold:0.05,limit=8"
            or "coloring:0.05,replan=4". A budget or the threshold of mi-threshold may move with the share still
            masked: "mi-budget:0.2..0.02" (see `Schedule`).
        mi: an estimator or another source of mutual information, for the policies that read it.

    Raises:
        ValueError: an unknown name or option, a value that is missing, superfluous, no number or out of range, or no
            source of mutual information where one is needed. The message says what exists.

    Example:
        >>> parse_policy("topk:4")
        TopK(k=4)
        >>> parse_policy("topk")
        Traceback (most recent call last):
        ValueError: policy 'topk': needs a value, topk:K
    """
    rule = _rule(spec)
    head, *pairs = spec.split(",")
    name, colon, value = head.partition(":")
    arguments: dict[str, Any] = {}
    if rule.value is None and colon:
        raise ValueError(f"policy {spec!r}: takes no value, it is written {_written(name.strip())}")
    if rule.value is not None:
        if not value.strip():
            raise ValueError(f"policy {spec!r}: needs a value, {_written(name.strip())}")
        arguments[rule.value[0]] = _read(spec, *rule.value, value)
    for pair in pairs:
        option, _, text = (part.strip() for part in pair.partition("="))
        if option not in rule.options:
            known = ", ".join(rule.options) or "no options"
            raise ValueError(f"policy {spec!r}: no option {option!r}, it takes {known}")
        if option in arguments:
            raise ValueError(f"policy {spec!r}: {option} is given twice")
        arguments[option] = _read(spec, option, rule.options[option], text)
    if rule.needs_mi:
        if mi is None:
            raise ValueError(f"policy {spec!r}: needs a source of mutual information, got none")
        arguments["mi"] = mi
    try:
        return rule.make(**arguments)
    except ValueError as error:
        raise ValueError(f"policy {spec!r}: {error}") from error


def _rule(spec: str) -> _Rule:
    name = spec.split(",")[0].partition(":")[0].strip()
    if name not in _RULES:
        raise ValueError(f"policy {spec!r}: no policy of that name, there are {', '.join(policy_forms())}")
    return _RULES[name]


def _written(name: str) -> str:
    rule = _RULES[name]
    value = f":{rule.value[0].upper()}" if rule.value else ""
    shapes = {_count: "N", _whole: "N", _order: "entropy|cheapest", float: "X"}
    return name + value + "".join(f"[,{option}={shapes[read]}]" for option, read in rule.options.items())


def _read(spec: str, name: str, read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text.strip())
    except ValueError:
        raise ValueError(f"policy {spec!r}: {name} must be {_KINDS[read]}, got {text.strip()!r}") from None
