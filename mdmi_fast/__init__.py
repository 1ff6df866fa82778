"""Who depends on whom among the masked positions of a masked model, and which of them can be unmasked together.

Importing this touches no driver, no Triton and no drawing library.
"""

from __future__ import annotations

__version__ = "0.1.0"

from mdmi_fast import _moved, ops
from mdmi_fast.coupling import PairwiseCoupling, draw_trajectories, evaluate_coupling, load_coupling, train_coupling
from mdmi_fast.decoding import (
    AttentionGraph,
    Coloring,
    Confidence,
    ConfidenceBudget,
    ConfidenceFactor,
    DecodeResult,
    EntropyBound,
    MIBudget,
    MIThreshold,
    Probing,
    Random,
    Schedule,
    Sequential,
    Stability,
    TopK,
    decode,
)
from mdmi_fast.errors import UnsupportedError
from mdmi_fast.estimator import DistanceTable, PairwiseMIEstimator, evaluate_estimator, load_estimator, train_estimator
from mdmi_fast.labels import MILabels, label_mi
from mdmi_fast.maps import dependency_graph, mi_map
from mdmi_fast.models import MaskedModel, MaskedOutput, load_model
from mdmi_fast.ops import Selection, StepShape, TokenStats, get_num_threads, set_num_threads, tune_kernels, warmup

__all__ = [
    "AttentionGraph",
    "Coloring",
    "Confidence",
    "ConfidenceBudget",
    "ConfidenceFactor",
    "DecodeResult",
    "DistanceTable",
    "EntropyBound",
    "MIBudget",
    "MILabels",
    "MIThreshold",
    "MaskedModel",
    "MaskedOutput",
    "PairwiseCoupling",
    "PairwiseMIEstimator",
    "Probing",
    "Random",
    "Schedule",
    "Selection",
    "Sequential",
    "Stability",
    "StepShape",
    "TokenStats",
    "TopK",
    "UnsupportedError",
    "decode",
    "dependency_graph",
    "draw_trajectories",
    "evaluate_coupling",
    "evaluate_estimator",
    "get_num_threads",
    "label_mi",
    "load_coupling",
    "load_estimator",
    "load_model",
    "mi_map",
    "ops",
    "set_num_threads",
    "train_coupling",
    "train_estimator",
    "tune_kernels",
    "warmup",
]

_moved.install()
__getattr__ = _moved.names_of(__name__)
