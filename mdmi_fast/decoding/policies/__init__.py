"""Which positions to unmask together: every rule as an object with one method, `select`."""

from mdmi_fast.decoding.policies.base import Memory, Policy, Rule, Schedule, Step
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
from mdmi_fast.decoding.policies.mutual_information import (
    Coloring,
    MIBudget,
    MISource,
    MIThreshold,
    Probing,
    Shuffled,
    Within,
)
from mdmi_fast.decoding.policies.parse import needs_mi, parse_policy, policy_forms

__all__ = [
    "AttentionGraph",
    "Coloring",
    "Confidence",
    "ConfidenceBudget",
    "ConfidenceFactor",
    "EntropyBound",
    "MIBudget",
    "MISource",
    "MIThreshold",
    "Memory",
    "Policy",
    "Probing",
    "Random",
    "Rule",
    "Schedule",
    "Sequential",
    "Shuffled",
    "Stability",
    "Step",
    "TopK",
    "Within",
    "needs_mi",
    "parse_policy",
    "policy_forms",
]
