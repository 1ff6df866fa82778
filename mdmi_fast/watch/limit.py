"""A policy with a tighter limit."""

from __future__ import annotations

import dataclasses
from typing import Any

from mdmi_fast.decoding.policies import Policy

_LIMITS = ("gamma", "tau", "epsilon")
"""What a policy calls its limit, if it has one."""


def with_limit(policy: Policy, scale: float) -> Policy:
    """A policy with its limit times `scale`; itself where it has none, or scale is 1."""
    given: Any = policy
    name = next((name for name in _LIMITS if hasattr(given, name)), None)
    if name is None or scale == 1:
        return policy
    tighter: Policy = dataclasses.replace(given, **{name: _scaled(getattr(given, name), scale)})
    return tighter


def _scaled(limit: Any, scale: float) -> Any:
    """A limit times a number: itself a number or a tensor, or a schedule of numbers."""
    if dataclasses.is_dataclass(limit) and not isinstance(limit, type):
        fields = {field.name: scale * getattr(limit, field.name) for field in dataclasses.fields(limit)}
        return dataclasses.replace(limit, **fields)
    return scale * limit
