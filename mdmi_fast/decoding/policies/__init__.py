"""Which positions to unmask together: every rule as an object with one method, `select`."""

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
from mdmi_fast.decoding.policies.limits import Schedule
from mdmi_fast.decoding.policies.pairs import Coloring, MIBudget, MIThreshold
from mdmi_fast.decoding.policies.parse import needs_mi, parse_policy
from mdmi_fast.decoding.policies.registry import policy, policy_forms
from mdmi_fast.decoding.policies.rule import Policy, Rule
from mdmi_fast.decoding.policies.sources import MISource, Probing, Shuffled, TimeLimited
from mdmi_fast.decoding.policies.step import Memory, Step

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
    "TimeLimited",
    "TopK",
    "needs_mi",
    "parse_policy",
    "policy",
    "policy_forms",
]
