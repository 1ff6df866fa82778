"""Decoding with a masked model: policies and the loop that runs them."""

from mdmi_fast.decode.loop import DecodeResult, PassRecord, decode, sample
from mdmi_fast.decode.policies import (
    Confidence,
    ConfidenceBudget,
    EntropyBound,
    MIBudget,
    MISource,
    MIThreshold,
    Policy,
    Probing,
    Random,
    Sequential,
    Shuffled,
    Step,
    TopK,
    needs_mi,
    parse_policy,
    policy_forms,
)

__all__ = [
    "Confidence",
    "ConfidenceBudget",
    "DecodeResult",
    "EntropyBound",
    "MIBudget",
    "MISource",
    "MIThreshold",
    "PassRecord",
    "Policy",
    "Probing",
    "Random",
    "Sequential",
    "Shuffled",
    "Step",
    "TopK",
    "decode",
    "needs_mi",
    "parse_policy",
    "policy_forms",
    "sample",
]
