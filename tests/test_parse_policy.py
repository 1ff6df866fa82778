"""Policies as text."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

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
    policy,
    policy_forms,
)

ROOT = Path(__file__).resolve().parent.parent


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
        ("mi-budget:0.2..0.02,mi_min_masked=5", MIBudget(no_mi, Schedule(0.2, 0.02), mi_min_masked=5)),
        ("stability:0.01", Stability(0.01)),
        ("stability:0.01,confidence=0.8", Stability(0.01, 0.8)),
        ("attention-graph:0.05,limit=3", AttentionGraph(0.05, limit=3)),
        ("coloring:0.05,replan=3", Coloring(no_mi, 0.05, replan=3)),
        (
            "mi-threshold:0.1,mi_min_masked=3,mi_max_masked=40",
            MIThreshold(no_mi, 0.1, mi_min_masked=3, mi_max_masked=40),
        ),
        ("mi-threshold:1..0,limit=2,mi_min_masked=0", MIThreshold(no_mi, Schedule(1.0, 0.0), limit=2)),
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
        ("mi-budget:1,mi_max_masked=0", "mi_max_masked must be an integer of at least 1"),
        ("mi-budget:1,mi_min_masked=-1", "mi_min_masked must be an integer of at least 0"),
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


# --- policies from elsewhere

HALF = """
from dataclasses import dataclass
from mdmi_fast.decoding.policies.order import take_lowest
from mdmi_fast.decoding.policies.registry import NUMBER, policy
from mdmi_fast.decoding.policies.rule import Rule, nothing_spent

@policy(
    "surest-share",
    unmasks="the most confident share of what is masked",
    value=("share", NUMBER),
    prices=lambda seen, options: seen.doubt,
    tried=("",),
)
@dataclass(frozen=True)
class SurestShare(Rule):
    share: float

    def _choose(self, stats, hidden, mask, step):
        count = (mask.sum(dim=-1) * self.share).ceil().long().clamp(min=1)
        return nothing_spent(take_lowest(-stats.confidence, mask, count.minimum(mask.sum(dim=-1))))
"""


def test_a_policy_of_another_package_gets_its_text_its_help_and_its_settings(tmp_path: Path) -> None:
    (tmp_path / "shares.py").write_text(HALF)
    about = tmp_path / "shares-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shares\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[mdmi_fast.policies]\nsurest-share = shares:SurestShare\n")
    code = """
        import torch
        from mdmi_fast.cli import main
        from mdmi_fast.decoding import decode, parse_policy
        from mdmi_fast.decoding.calibrate import Target, accuracy, candidates, tune
        from mdmi_fast.models.exact import JointTable
        print(parse_policy("surest-share:0.5"), "surest-share" in candidates(mi=False, sampling=False))
        model = JointTable(torch.rand(2, 2, 2, 2))
        tokens = torch.full((4, 4), 2)
        print(decode(model, tokens, parse_policy("surest-share:0.5")).passes.tolist())
        tried = [*tune(model, tokens, accuracy(tokens), Target.of("2x"), policies=["surest-share"])]
        print(len(tried) > 1, {one.rule for one in tried[1:]})
        main(["decode", "--help"])
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told, passes, tuned, *help_text = done.stdout.splitlines()
    assert told == "SurestShare(share=0.5) True"
    assert passes == "[3, 3, 3, 3]"
    assert tuned == "True {'surest-share'}"
    assert "  surest-share:SHARE           the most confident share of what is masked" in help_text


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="policy: name must be new, got 'topk', which is TopK"):
        policy("topk", unmasks="nothing")(Sequential)


def test_old_names_of_options_are_read_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="MIBudget: lazy is now called mi_min_masked"):
        assert parse_policy("mi-budget:1,lazy=4", no_mi) == MIBudget(no_mi, 1.0, mi_min_masked=5)
    with pytest.warns(DeprecationWarning, match="MIThreshold: most is now called mi_max_masked"):
        assert MIThreshold(no_mi, 1.0, most=9) == MIThreshold(no_mi, 1.0, mi_max_masked=9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="most is the old name of mi_max_masked; give one of them"):
        MIThreshold(no_mi, 1.0, most=9, mi_max_masked=9)  # type: ignore[call-arg]
    with (
        pytest.raises(ValueError, match="mi_min_masked is given twice"),
        pytest.warns(DeprecationWarning, match="lazy"),
    ):
        parse_policy("mi-budget:1,lazy=4,mi_min_masked=5", no_mi)
