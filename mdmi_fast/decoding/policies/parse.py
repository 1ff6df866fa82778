"""Policies as text, for command lines, configuration files and requests: "topk:4", "mi-budget:0.02,entropy_weight=0"."""

from __future__ import annotations

from typing import Any

from mdmi_fast import _moved
from mdmi_fast.decoding.policies.registry import Reader, Registered, policy_forms, registered
from mdmi_fast.decoding.policies.rule import Policy
from mdmi_fast.decoding.policies.sources import MISource


def needs_mi(spec: str) -> bool:
    """Whether the policy of a spec reads mutual information, so that `parse_policy` needs a source of it.

    Raises:
        ValueError: no policy of that name.
    """
    return find_policy(spec).needs_mi


def parse_policy(spec: str, mi: MISource | None = None) -> Policy:
    """The policy that a text describes: a name, its value behind a colon, options behind commas.

    Args:
        spec: "sequential", "topk:4", "random:4", "confidence:0.9", "confidence-factor:0.5", "confidence-budget:0.1",
            "entropy-bound:0.2", "stability:0.01,confidence=0.9", "attention-graph:0.05,limit=8",
            "mi-budget:0.02,lam=1,entropy_weight=0,order=cheapest,limit=8,mi_min_masked=5,mi_max_masked=200", "mi-threshold:0.05,limit=8"
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
    rule = find_policy(spec)
    head, *pairs = spec.split(",")
    _, colon, value = head.partition(":")
    arguments: dict[str, Any] = {}
    if rule.value is None and colon:
        raise ValueError(f"policy {spec!r}: takes no value, it is written {rule.form}")
    if rule.value is not None:
        if not value.strip():
            raise ValueError(f"policy {spec!r}: needs a value, {rule.form}")
        arguments[rule.value[0]] = _read(spec, *rule.value, value)
    for pair in pairs:
        written, _, text = (part.strip() for part in pair.partition("="))
        option = _moved.field_name(rule.make, written)
        if option not in rule.options:
            known = ", ".join(rule.options) or "no options"
            raise ValueError(f"policy {spec!r}: no option {option!r}, it takes {known}")
        if option in arguments:
            raise ValueError(f"policy {spec!r}: {option} is given twice")
        arguments.update([_moved.field(rule.make, written, _read(spec, written, rule.options[option], text))])
    if rule.needs_mi:
        if mi is None:
            raise ValueError(f"policy {spec!r}: needs a source of mutual information, got none")
        arguments["mi"] = mi
    try:
        made: Policy = rule.make(**arguments)
    except ValueError as error:
        raise ValueError(f"policy {spec!r}: {error}") from error
    return made


def find_policy(spec: str) -> Registered:
    """What is registered under the name in a spec.

    Raises:
        ValueError: no policy of that name.
    """
    found = registered().get(spec.split(",")[0].partition(":")[0].strip())
    if found is None:
        raise ValueError(f"policy {spec!r}: no policy of that name, there are {', '.join(policy_forms())}")
    return found


def _read(spec: str, name: str, reader: Reader, text: str) -> Any:
    try:
        return reader.read(text.strip())
    except ValueError:
        raise ValueError(f"policy {spec!r}: {name} must be {reader.expected}, got {text.strip()!r}") from None
