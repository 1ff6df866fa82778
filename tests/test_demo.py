"""The demo's statistics, its boards, and the command itself on a few of them."""

import json
from pathlib import Path

import pytest
import torch

from mdmi_fast.cli import main
from mdmi_fast.estimator import load_estimator
from mdmi_fast.statistics import paired_bootstrap, wilson
from mdmi_fast.tasks.sudoku import demo
from mdmi_fast.tasks.sudoku.model import load_model
from mdmi_fast.tasks.sudoku.pictures import family


def test_wilson_interval_by_hand() -> None:
    # 8 of 10, z = 1.96: (0.8 + 0.192) / 1.384 +- 1.96 / 1.384 * sqrt(0.016 + 0.0096)
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    for trials in range(1, 40):  # 0 and 1 never fall out of their own interval
        assert wilson(0, trials)[0] == 0.0
        assert wilson(trials, trials)[1] == 1.0
    with pytest.raises(ValueError, match="at least 1, got 0"):
        wilson(0, 0)


def test_bootstrap_pairs_the_boards() -> None:
    ours = torch.tensor([True] * 50 + [False] * 50)
    assert paired_bootstrap(ours, ours) == (0.0, 0.0, 0.0)
    theirs = ours.clone()
    theirs[:10] = False
    mean, low, high = paired_bootstrap(ours, theirs)
    # ten differences of 1 among 100: binomial, standard error .03
    assert mean == pytest.approx(0.1)
    assert 0.03 < low < 0.06
    assert 0.14 < high < 0.18


def test_validation_and_test_boards_are_others() -> None:
    for name in ("solve", "complete"):
        test, validation = (demo.make_task(name, 20, split=split) for split in ("test", "validation"))
        assert not (test.tokens.unsqueeze(1) == validation.tokens).all(-1).any()
        assert not (test.seeds.unsqueeze(1) == validation.seeds).any()
    with pytest.raises(ValueError, match="1000 test puzzles ship, got boards=1001"):
        demo.make_task("solve", 1001)


def test_the_strong_network_keeps_its_promise_on_a_sample() -> None:
    """Sampling from an empty grid: an MI budget holds where an entropy bound of as many passes has nothing left."""
    mi = load_estimator("sudoku")
    chosen = {
        name: policy
        for name, policy in demo.sampling_policies(mi).items()
        if name in ("entropy bound 2.3", "MI budget 0.02, no entropy")
    }
    bound, budget = demo.measure(load_model("strong"), "strong", demo.make_task("generate", 40), chosen)
    assert budget.passes < bound.passes + 1
    # measured on 500 boards: 88% and 0%; 40 boards at 88% fall below 65% once in ten thousand draws
    assert budget.solved > 0.65
    assert bound.solved < 0.1


def test_family_drops_the_settings() -> None:
    assert family("MI budget 0.02, no entropy") == "MI budget, no entropy"
    assert family("top-4") == "top"
    assert family("control: shuffled MI budget 0.3") == "control: shuffled MI budget"


def test_command_writes_rows_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_file = tmp_path / "rows.json"
    assert (
        main(["demo", "--puzzles", "3", "--boards", "2", "--json", str(rows_file), "--out", str(tmp_path / "p")]) == 0
    )
    rows = json.loads(rows_file.read_text())["rows"]
    assert {(row["task"], row["regime"]) for row in rows} == {
        ("solve", "strong"),
        ("solve", "weak"),
        ("generate", "strong"),
        ("complete", "strong"),
    }
    for row in rows:
        assert {"task", "regime", "policy", "passes", "solved", "low", "high", "seconds"} <= row.keys()
        assert 0 <= row["low"] <= row["solved"] <= row["high"] <= 1
        assert row["passes"] >= 1
    text = capsys.readouterr().out
    assert text.count("sequential ") >= 4
    for name in ("frontier_solve.png", "frontier_sampling.png", "mi_map.png"):
        assert (tmp_path / "p" / name).read_bytes().startswith(b"\x89PNG")
