"""Choosing a policy by measurement."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mdmi_fast.decoding import Probing
from mdmi_fast.decoding.calibrate import (
    Interval,
    Target,
    Tried,
    accuracy,
    candidates,
    choose,
    frontier,
    pseudo_likelihood,
    read_choice,
    save_choice,
    tune,
)
from mdmi_fast.models.exact import JointTable

MASK = 2


def agreeing() -> JointTable:
    """Two pairs of fair bits that agree (nothing is quite impossible), each pair independent of the other."""
    pair = torch.eye(2, dtype=torch.float64) + 1e-9
    return JointTable(pair[:, :, None, None] * pair[None, None])


def agree(tokens: Tensor, asked: Tensor, sequences: Tensor) -> Tensor:
    return ((tokens[:, 0] == tokens[:, 1]) & (tokens[:, 2] == tokens[:, 3])).double()


def run(target: str, policies: list[str], *, sequences: int = 64, **options: Any) -> dict[str, Tried]:
    model, tokens = agreeing(), torch.full((sequences, 4), MASK)
    found = tune(
        *(model, tokens, agree, Target.of(target)),
        **{"policies": policies, "mi": Probing(), "temperature": 1.0, "batch_size": 32} | options,
    )
    return {one.policy: one for one in found}


def test_speed_and_loss_are_measured_beside_one_position_at_a_time() -> None:
    tried = run("at most 1% loss", ["mi-budget:0.01,entropy_weight=0", "topk:4"])
    yardstick, careful = tried["sequential"], tried["mi-budget:0.01,entropy_weight=0"]
    assert (yardstick.passes, yardstick.quality, yardstick.sequences) == (4.0, Interval(1.0, 1.0, 1.0), 64)
    assert yardstick.speedup == Interval(1.0, 1.0, 1.0)
    assert yardstick.loss == Interval(0.0, 0.0, 0.0)
    assert (careful.passes, careful.quality.value) == (2.0, 1.0)
    assert careful.speedup == Interval(2.0, 2.0, 2.0)
    assert careful.seconds > 0
    # All four at once agree by chance only, a quarter of the time: given up after the first batch of 32.
    assert tried["topk:4"].given_up
    assert tried["topk:4"].sequences == 32
    assert tried["topk:4"].quality.low < 0.25 < tried["topk:4"].quality.high
    assert tried["topk:4"].loss.low < 0.75 < tried["topk:4"].loss.high
    assert choose(tried.values(), Target.of("1%")) == careful
    assert [one.policy for one in frontier(tried.values())] == ["mi-budget:0.01,entropy_weight=0"]


def test_speed_as_the_target_gives_up_what_is_slow_and_keeps_the_least_loss() -> None:
    tried = run("2x", ["topk:2", "random:2", "topk:4", "topk:1", "mi-budget:0.01,entropy_weight=0"])
    assert tried["topk:1"].given_up
    assert not tried["topk:4"].given_up
    best = choose(tried.values(), Target.of("2x"))
    assert best is not None
    assert best.policy == "mi-budget:0.01,entropy_weight=0"
    assert choose(tried.values(), Target.of("5x")) is None


def test_policies_decode_the_same_sequences_with_the_same_seeds() -> None:
    first, second = (run("1%", ["random:2"], seed=4) for _ in range(2))
    assert first["random:2"]._replace(seconds=0.0) == second["random:2"]._replace(seconds=0.0)
    assert run("1%", ["random:2"], seed=5)["random:2"].quality != first["random:2"].quality


def test_candidates_are_of_use() -> None:
    plain, with_mi, drawn = (
        candidates(mi=False, sampling=True),
        candidates(mi=True, sampling=False),
        candidates(mi=True, sampling=True),
    )
    assert not any("mi" in spec or "coloring" in spec for spec in plain)
    assert set(plain) < set(with_mi) < set(drawn)
    assert all("entropy_weight=0" in spec for spec in set(drawn) - set(with_mi))
    named = run("1%", policies=None, mi=None, sequences=2)  # type: ignore[arg-type]
    assert list(named) == ["sequential", *plain]


def test_pseudo_likelihood_is_the_probability_of_each_given_all_others() -> None:
    weights = torch.rand(2, 2, 2, generator=torch.Generator().manual_seed(1)) + 0.1
    model = JointTable(weights)
    tokens, asked = torch.tensor([[0, 1, 1], [1, 1, 0]]), torch.tensor([[True, True, True], [False, True, False]])

    def given_others(row: int, position: int) -> float:
        masked = tokens[row].clone()
        masked[position] = MASK
        return float(model(masked.unsqueeze(0)).logits[0, position, tokens[row, position]].exp())

    expected = [math.prod(given_others(0, i) for i in range(3)) ** (1 / 3), given_others(1, 1)]
    found = pseudo_likelihood(model, batch_size=2)(tokens, asked, torch.arange(2))
    assert found.tolist() == pytest.approx(expected)
    one = pseudo_likelihood(model, positions=1)(tokens, asked, torch.arange(2))
    assert min(abs(float(one[0]) - given_others(0, i)) for i in range(3)) < 1e-9
    visible = torch.tensor([[True, True, True], [True, True, False]])
    short = JointTable(weights.sum(2))
    padded = pseudo_likelihood(model, attention_mask=visible)(tokens, asked, torch.arange(2))[1]
    assert float(padded) == pytest.approx(float(short(torch.tensor([[1, MASK]])).logits[0, 1, 1].exp()))


def test_accuracy_counts_what_was_asked_for() -> None:
    target = torch.tensor([[0, 0, 0], [1, 1, 1], [0, 1, 0]])
    asked = torch.tensor([[True, True, False], [False, True, True]])
    tokens = torch.tensor([[1, 1, 0], [1, 1, 0]])
    assert accuracy(target)(tokens, asked, torch.tensor([1, 2])).tolist() == [1.0, 1.0]
    assert accuracy(target)(tokens, asked, torch.tensor([0, 1])).tolist() == [0.0, 0.5]
    with pytest.raises(TypeError, match="accuracy: target must be int64, got shape"):
        accuracy(target.float())


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("4x", Target(4.0, None)),
        (" 2.5x fewer passes", Target(2.5, None)),
        ("1%", Target(None, 0.01)),
        ("at most 0.5% loss", Target(None, 0.005)),
        ("0%", Target(None, 0.0)),
    ],
)
def test_targets_are_read(text: str, target: Target) -> None:
    assert Target.of(text) == target


@pytest.mark.parametrize("text", ["", "4", "0.5x", "101%", "-1%", "nan%", "4x loss"])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="target must be such as"):
        Target.of(text)


def test_data_without_work_is_refused() -> None:
    model = agreeing()
    for tokens in (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="every one a masked position"):
            next(tune(model, tokens, agree, Target.of("1%")))


def test_a_choice_is_read_back(tmp_path: Path) -> None:
    chosen = run("2x", ["topk:2"], sequences=4)["topk:2"]
    path = tmp_path / "new" / "choice.json"
    save_choice(path, chosen, model="any", estimator=None)
    choice = read_choice(path)
    assert (choice["policy"], choice["model"], choice["estimator"]) == ("topk:2", "any", None)
    assert choice["measured"]["speedup"]["value"] == 2.0
    for text, message in (("[1]", "expected an object"), ("{}", "expected an object"), ("{", "not JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_choice(path)
    with pytest.raises(FileNotFoundError):
        read_choice(tmp_path / "none.json")
