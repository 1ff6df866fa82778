"""The operators: entropies, divergences, pair scores and selections, on the fastest backend that can run each call."""

from mdmi_fast import _moved
from mdmi_fast._threads import get_num_threads, set_num_threads
from mdmi_fast.ops._dispatch import BACKENDS, backends
from mdmi_fast.ops._pairs import PreparedPairwise
from mdmi_fast.ops._selections import Selection
from mdmi_fast.ops.dense import mlp
from mdmi_fast.ops.kl import (
    MixtureStats,
    expected_entropy,
    expected_kl,
    kl_divergence,
    mixture_entropy,
    mixture_stats,
)
from mdmi_fast.ops.launches import StepShape, tune_kernels, warmup
from mdmi_fast.ops.pairwise import (
    pairwise_mlp,
    pairwise_mlp_band,
    pairwise_mlp_rows,
    prepare_pairwise,
)
from mdmi_fast.ops.select import (
    color,
    score_and_select,
    select_budget,
    select_budget_band,
    select_threshold,
)
from mdmi_fast.ops.stats import TokenStats, entropy, linear_token_stats, token_stats

__all__ = [
    "BACKENDS",
    "MixtureStats",
    "PreparedPairwise",
    "Selection",
    "StepShape",
    "TokenStats",
    "backends",
    "color",
    "entropy",
    "expected_entropy",
    "expected_kl",
    "get_num_threads",
    "kl_divergence",
    "linear_token_stats",
    "mixture_entropy",
    "mixture_stats",
    "mlp",
    "pairwise_mlp",
    "pairwise_mlp_band",
    "pairwise_mlp_rows",
    "prepare_pairwise",
    "score_and_select",
    "select_budget",
    "select_budget_band",
    "select_threshold",
    "set_num_threads",
    "token_stats",
    "tune_kernels",
    "warmup",
]

__getattr__ = _moved.names_of(__name__)
