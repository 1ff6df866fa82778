"""The specification: the obvious torch version of every op, in the dtype it is given (float64 in, float64 out).

Nothing here is lean or fast. A backend is right when it agrees with this; the tests compare in float64.
"""

from mdmi_fast.reference.dense import mlp
from mdmi_fast.reference.kl import expected_entropy, expected_kl, kl_divergence, mixture_entropy, mixture_stats
from mdmi_fast.reference.pairwise import pairwise_mlp, pairwise_mlp_band, pairwise_mlp_rows
from mdmi_fast.reference.select import color, score_and_select, select_budget, select_budget_band, select_threshold
from mdmi_fast.reference.stats import entropy, linear_token_stats, token_stats

__all__ = [
    "color",
    "entropy",
    "expected_entropy",
    "expected_kl",
    "kl_divergence",
    "linear_token_stats",
    "mixture_entropy",
    "mixture_stats",
    "mlp",
    "pairwise_mlp",
    "pairwise_mlp_band",
    "pairwise_mlp_rows",
    "score_and_select",
    "select_budget",
    "select_budget_band",
    "select_threshold",
    "token_stats",
]
