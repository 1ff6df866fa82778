"""Choosing a policy by measurement: every rule over settings that follow the data, and the best that meets a target.

A rule, such as "entropy-bound", is a policy without its value. Which values make sense depends on the model: a few of the
sequences are decoded one position at a time, and what the rule would have had to allow in order to take one more position is
noted on the way. Settings are quantiles of these prices. How many passes a setting takes is looked up on the same few
sequences; only those close to the target are measured on all, from both sides of it.
"""

from mdmi_fast.decoding.calibrate.results import (
    Measured,
    Target,
    Tried,
    Unit,
    choose,
    frontier,
    one_sided,
    read_choice,
    save_choice,
)
from mdmi_fast.decoding.calibrate.search import YARDSTICK, candidates, is_rule, tune
from mdmi_fast.decoding.quality import Quality, accuracy, log_likelihood
from mdmi_fast.statistics import Interval

__all__ = [
    "YARDSTICK",
    "Interval",
    "Measured",
    "Quality",
    "Target",
    "Tried",
    "Unit",
    "accuracy",
    "candidates",
    "choose",
    "frontier",
    "is_rule",
    "log_likelihood",
    "one_sided",
    "read_choice",
    "save_choice",
    "tune",
]
