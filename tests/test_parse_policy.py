"""Policies as text."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from mdmi_fast.decoding import (
    AttentionGraph,
    Coloring,
    Confidence,
    ConfidenceBudget,
    ConfidenceFactor,
    EntropyBound,
    MIBudget,
    MIThreshold,
    Policy,
    Random,
    Schedule,
    Sequential,
    Stability,
    TopK,
    needs_mi,
    parse_policy,
    policy_forms,
)


def no_mi(hidden: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(*mask.shape, mask.shape[-1])


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("sequential", Sequential()),
        ("topk:4", TopK(4)),
        ("random:3", Random(3)),
        ("confidence:0.9", Confidence(0.9)),
        ("confidence-factor:0.5", ConfidenceFactor(0.5)),
        ("confidence-budget:.1", ConfidenceBudget(0.1)),
        ("confidence-budget:.1 .. .2", ConfidenceBudget(Schedule(0.1, 0.2))),
        ("entropy-bound:2e-1", EntropyBound(0.2)),
        ("mi-budget:0.02", MIBudget(no_mi, 0.02)),
        (
            "mi-budget:0.02,lam=2,entropy_weight=0,order=cheapest,limit=8",
            MIBudget(no_mi, 0.02, lam=2.0, entropy_weight=0.0, order="cheapest", limit=8),
        ),
        ("mi-budget:0.2..0.02,lazy=4", MIBudget(no_mi, Schedule(0.2, 0.02), lazy=4)),
        ("stability:0.01", Stability(0.01)),
        ("stability:0.01,confidence=0.8", Stability(0.01, 0.8)),
        ("attention-graph:0.05,limit=3", AttentionGraph(0.05, limit=3)),
        ("coloring:0.05,replan=3", Coloring(no_mi, 0.05, replan=3)),
        ("mi-threshold:0.1,lazy=2,most=40", MIThreshold(no_mi, 0.1, lazy=2, most=40)),
        ("mi-threshold:1..0,limit=2,lazy=0", MIThreshold(no_mi, Schedule(1.0, 0.0), limit=2)),
        ("mi-budget:inf", MIBudget(no_mi, math.inf)),
        ("mi-threshold:0.05", MIThreshold(no_mi, 0.05)),
        (" mi-threshold : 0.05 , limit = 2 ", MIThreshold(no_mi, 0.05, limit=2)),
    ],
)
def test_a_spec_gives_the_policy_that_its_class_would(spec: str, policy: Policy) -> None:
    assert parse_policy(spec, no_mi) == policy
    assert needs_mi(spec) == isinstance(policy, (MIBudget, MIThreshold, Coloring))


def test_every_form_that_is_offered_can_be_parsed() -> None:
    forms = policy_forms()
    assert len(forms) == 12
    for form in forms:
        required = form.split("[")[0]
        parse_policy(re.sub("[A-Z]+", "1", required), no_mi)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "no policy of that name, there are sequential, topk:K"),
        ("mibudget:1", "no policy of that name"),
        ("Sequential", "no policy of that name"),
        ("sequential:1", "takes no value, it is written sequential"),
        ("sequential:", "takes no value"),
        ("sequential,limit=1", "no option 'limit', it takes no options"),
        ("topk", "needs a value, topk:K"),
        ("topk:", "needs a value, topk:K"),
        ("topk:2.5", "k must be an integer of at least 1, got '2.5'"),
        ("topk:0", "k must be an integer of at least 1, got '0'"),
        ("entropy-bound:x", "gamma must be a number, or two finite ones as START..END, got 'x'"),
        ("entropy-bound:1..inf", "gamma must be a number, or two finite ones as START..END, got '1..inf'"),
        ("entropy-bound:1..", "gamma must be a number"),
        ("confidence:1..2", "threshold must be a number, got '1..2'"),
        ("mi-budget:1,most=0", "most must be an integer of at least 1"),
        ("mi-budget:1,lazy=-1", "lazy must be an integer of at least 0"),
        ("entropy-bound:-1", "gamma must be at least 0"),
        ("entropy-bound:nan", "gamma must not be NaN"),
        ("mi-budget:1,lambda=2", "no option 'lambda', it takes lam, entropy_weight, order, limit"),
        ("mi-budget:1,lam=1,lam=2", "lam is given twice"),
        ("mi-budget:1,lam", "lam must be a number, got ''"),
        ("mi-budget:1,order=best", "order must be entropy or cheapest, got 'best'"),
        ("mi-budget:1,limit=0", "limit must be an integer of at least 1"),
        ("mi-budget:1,", "no option ''"),
    ],
)
def test_what_cannot_be_parsed_is_named_with_what_exists(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"policy {spec!r}: ") + ".*" + re.escape(message)):
        parse_policy(spec, no_mi)


def test_a_policy_that_reads_mutual_information_needs_a_source() -> None:
    with pytest.raises(ValueError, match=r"'mi-budget:1': needs a source of mutual information, got none"):
        parse_policy("mi-budget:1")
    assert parse_policy("topk:2") == TopK(2)
