"""Spans for OpenTelemetry."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdmi_fast.decoding.policies import Policy
from mdmi_fast.errors import require
from mdmi_fast.ops import Selection, TokenStats


class Traced:
    """A policy whose every choice is a span "mdmi.select" with what it looked at and what it took.

    Args:
        policy: the policy.
        tracer: an OpenTelemetry tracer; None: the application's, named "mdmi_fast".

    Raises:
        UnsupportedError: opentelemetry-api is not installed.
    """

    def __init__(self, policy: Policy, tracer: Any = None) -> None:
        trace = require("opentelemetry.trace", "tracing", "Traced")
        self.policy = policy
        self._tracer = trace.get_tracer("mdmi_fast") if tracer is None else tracer

    def __repr__(self) -> str:
        return f"Traced({self.policy!r})"

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        with self._tracer.start_as_current_span("mdmi.select") as span:
            selection = self.policy.select(stats, hidden, mask, step)
            if span.is_recording():  # else nobody looks, and counting would cost more than the span
                span.set_attribute("mdmi.step", int(step))
                span.set_attribute("mdmi.sequences", len(mask))
                span.set_attribute("mdmi.masked", int(mask.sum()))
                span.set_attribute("mdmi.selected", int(selection.selected.sum()))
            return selection
