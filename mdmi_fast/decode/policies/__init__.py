"""Which positions to unmask together: every rule as an object with one method, `select`."""

from mdmi_fast.decode.policies.base import Policy, Step
from mdmi_fast.decode.policies.baselines import (
    Confidence,
    ConfidenceBudget,
    EntropyBound,
    Random,
    Sequential,
    TopK,
)
from mdmi_fast.decode.policies.mutual_information import MIBudget, MISource, MIThreshold, Probing, Shuffled
from mdmi_fast.decode.policies.parse import needs_mi, parse_policy, policy_forms

__all__ = [
    "Confidence",
    "ConfidenceBudget",
    "EntropyBound",
    "MIBudget",
    "MISource",
    "MIThreshold",
    "Policy",
    "Probing",
    "Random",
    "Sequential",
    "Shuffled",
    "Step",
    "TopK",
    "needs_mi",
    "parse_policy",
    "policy_forms",
]
