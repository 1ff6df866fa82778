"""Decoding with a masked model: policies and the loop that runs them."""

from mdmi_fast import _moved
from mdmi_fast.decoding.arrays import as_tensor
from mdmi_fast.decoding.loop import DecodeResult, decode
from mdmi_fast.decoding.many import Asked, Decoded, DecodeError, decode_batch, decode_many
from mdmi_fast.decoding.policies import (
    AttentionGraph,
    Coloring,
    Confidence,
    ConfidenceBudget,
    ConfidenceFactor,
    EntropyBound,
    Memory,
    MIBudget,
    MISource,
    MIThreshold,
    Policy,
    Probing,
    Random,
    Rule,
    Schedule,
    Sequential,
    Shuffled,
    Stability,
    Step,
    TimeLimited,
    TopK,
    needs_mi,
    parse_policy,
    policy,
    policy_forms,
)
from mdmi_fast.decoding.quality import pseudo_likelihood
from mdmi_fast.decoding.sampling import sample
from mdmi_fast.decoding.trace import PassRecord, receipt, replay

__all__ = [
    "Asked",
    "AttentionGraph",
    "Coloring",
    "Confidence",
    "ConfidenceBudget",
    "ConfidenceFactor",
    "DecodeError",
    "DecodeResult",
    "Decoded",
    "EntropyBound",
    "MIBudget",
    "MISource",
    "MIThreshold",
    "Memory",
    "PassRecord",
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
    "as_tensor",
    "decode",
    "decode_batch",
    "decode_many",
    "needs_mi",
    "parse_policy",
    "policy",
    "policy_forms",
    "pseudo_likelihood",
    "receipt",
    "replay",
    "sample",
]

__getattr__ = _moved.names_of(__name__)
