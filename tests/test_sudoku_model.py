"""The Sudoku network, its training, and the states its estimator is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mdmi_fast.models import MaskedModel
from mdmi_fast.tasks.sudoku import model as model_module
from mdmi_fast.tasks.sudoku import states as states_module
from mdmi_fast.tasks.sudoku import train_network
from mdmi_fast.tasks.sudoku.model import DIGIT_STATE, HIDDEN_WIDTH, ITERATIONS, SudokuModel, load_model, position_codes
from mdmi_fast.tasks.sudoku.puzzles import random_boards, validation_puzzles

pytestmark = pytest.mark.arithmetic

STRENGTHS = sorted(ITERATIONS)


@pytest.fixture(scope="module")
def boards() -> Tensor:
    """70 boards, more than two chunks: puzzles, a full one, an empty one, and one that breaks the rules."""
    puzzles = validation_puzzles()
    tokens = torch.from_numpy(puzzles.givens[:70]).long()
    tokens[1] = torch.from_numpy(puzzles.solutions[1]).long()
    tokens[2] = 0
    tokens[3] = 7
    return tokens


@pytest.fixture(params=["compiled", "eager"])
def forward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two forwards that can run here."""
    if request.param == "eager":
        monkeypatch.setattr(model_module, "sudoku_forward", None)
    elif model_module.sudoku_forward is None:
        pytest.skip("the extension was not built")


@pytest.mark.parametrize("strength", STRENGTHS)
def test_the_compiled_forward_answers_like_the_eager_one(
    boards: Tensor, strength: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model_module.sudoku_forward is None:
        pytest.skip("the extension was not built")
    model = load_model(strength)
    compiled = model(boards)
    monkeypatch.setattr(model_module, "sudoku_forward", None)
    plain = model(boards)
    torch.testing.assert_close(compiled.logits.exp(), plain.logits.exp(), rtol=0, atol=1e-5)
    # A dozen iterations of float32 sums; both are this far from float64 where a board breaks the rules.
    torch.testing.assert_close(compiled.logits, plain.logits, rtol=5e-5, atol=5e-5)
    torch.testing.assert_close(compiled.hidden, plain.hidden, rtol=5e-5, atol=5e-5)


def test_boards_inside_a_transform_are_not_read_from_memory(boards: Tensor) -> None:
    # their address is 0; the eager network says that its steps know no transforms
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.functionalize(lambda tokens: tuple(load_model("weak")(tokens)))(boards)


@pytest.mark.usefixtures("forward")
@pytest.mark.parametrize("strength", STRENGTHS)
def test_answers_are_distributions_over_the_digits(boards: Tensor, strength: str) -> None:
    model = load_model(strength)
    assert isinstance(model, MaskedModel)
    logits, hidden = model(boards)
    assert logits.shape == (70, 81, model.vocab_size)
    assert hidden.shape == (70, 81, model.hidden_size) == (70, 81, HIDDEN_WIDTH)
    assert logits.dtype == hidden.dtype == torch.float32
    assert (logits[..., 0] == -torch.inf).all()
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(70, 81))
    digits, codes = hidden.split([9 * DIGIT_STATE, 27], dim=-1)
    assert codes.equal(position_codes().expand(70, 81, 27))
    digits = digits.unflatten(-1, (9, DIGIT_STATE))
    p = logits[..., 1:].exp()
    torch.testing.assert_close(digits[..., -3], p, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(digits[..., -2], torch.special.entr(p), rtol=1e-4, atol=1e-6)
    entropy = torch.special.entr(p).sum(-1, keepdim=True).expand_as(p)
    torch.testing.assert_close(digits[..., -1], entropy, rtol=1e-4, atol=1e-6)


def test_positions_know_their_row_column_and_box() -> None:
    codes = position_codes()
    for cell in range(81):
        row, column = divmod(cell, 9)
        expected = {row, 9 + column, 18 + 3 * (row // 3) + column // 3}
        assert set(codes[cell].nonzero().flatten().tolist()) == expected
        assert codes[cell].sum() == 3


@pytest.mark.usefixtures("forward")
@pytest.mark.parametrize("strength", STRENGTHS)
def test_a_board_is_answered_alike_in_every_batch(boards: Tensor, strength: str) -> None:
    model = load_model(strength)
    together = model(boards)
    for rows in ([0], [5, 2], [*range(69, 62, -1)], [*range(40)], torch.randperm(70).tolist()):
        for whole, part in zip(together, model(boards[rows]), strict=True):
            assert part.equal(whole[rows])
    strided = model(boards.repeat_interleave(2, dim=0)[::2])
    assert strided.logits.equal(together.logits)


@pytest.mark.usefixtures("two_threads")
def test_threads_change_nothing(boards: Tensor) -> None:
    model = load_model("weak")
    two = model(boards)
    torch.set_num_threads(1)
    assert model(boards).logits.equal(two.logits)


@pytest.mark.usefixtures("forward")
def test_renaming_the_digits_renames_the_answer(boards: Tensor) -> None:
    model = load_model("strong")
    names = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(9)])
    logits, renamed = model(boards).logits.double(), model(names[boards]).logits.double()
    torch.testing.assert_close(renamed[..., names].exp(), logits.exp(), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("forward")
def test_turning_the_board_turns_the_answer(boards: Tensor) -> None:
    model = load_model("strong")
    turned = boards.view(-1, 9, 9).mT.reshape(-1, 81)
    logits = model(boards).logits.view(-1, 9, 9, 10).transpose(1, 2).reshape(-1, 81, 10)
    torch.testing.assert_close(model(turned).logits.exp(), logits.exp(), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("forward")
def test_no_boards_have_no_answers() -> None:
    logits, hidden = load_model("weak")(torch.zeros(0, 81, dtype=torch.int64))
    assert logits.shape == (0, 81, 10)
    assert hidden.shape == (0, 81, HIDDEN_WIDTH)


@pytest.mark.usefixtures("forward")
def test_other_weights_are_read_at_every_call(boards: Tensor) -> None:
    model, other = SudokuModel(3), SudokuModel(3)
    before = model(boards).logits
    model.load_state_dict(other.state_dict())
    assert not model(boards).logits.equal(before)
    assert model(boards).logits.equal(other(boards).logits)
    torch.testing.assert_close(other.double()(boards).logits.float(), model(boards).logits, rtol=1e-4, atol=1e-4)


def test_training_sees_what_the_forward_says(boards: Tensor) -> None:
    model = SudokuModel(3)
    scores = model.logits_of_every_iteration(boards)
    assert scores.shape == (3, 70, 81, 9)
    torch.testing.assert_close(scores[-1].log_softmax(-1).detach(), model(boards).logits[..., 1:], rtol=1e-4, atol=1e-4)
    one = SudokuModel(1)
    one.load_state_dict(model.state_dict())
    torch.testing.assert_close(one.logits_of_every_iteration(boards)[0], scores[0])


def test_gradients_agree_with_finite_differences(boards: Tensor) -> None:
    model = SudokuModel(2).double()
    tokens = boards[:2]

    def loss() -> Tensor:
        return model.logits_of_every_iteration(tokens).square().sum()

    loss().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        direction = torch.randn_like(parameter)
        step = 1e-6
        with torch.no_grad():
            parameter += step * direction
            above = loss()
            parameter -= 2 * step * direction
            below = loss()
            parameter += step * direction
        slope = float(above - below) / (2 * step)
        assert float((parameter.grad * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(81, dtype=torch.int64), r"tokens must be \[B, 81\] int64, got shape \(81,\)"),
        (torch.zeros(2, 80, dtype=torch.int64), r"tokens must be \[B, 81\] int64"),
        (torch.zeros(2, 81), r"tokens must be \[B, 81\] int64, got shape \(2, 81\) torch.float32"),
        (torch.full((1, 81), 10), r"tokens must lie in 0..9, got 10..10"),
        (torch.full((1, 81), -1), r"tokens must lie in 0..9, got -1..-1"),
    ],
)
def test_what_is_no_board_is_refused(tokens: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SudokuModel(1)(tokens)


def test_padding_and_unknown_strengths_are_refused(boards: Tensor) -> None:
    model = SudokuModel(1)
    visible = torch.ones(70, 81, dtype=torch.bool)
    assert model(boards, visible).logits.equal(model(boards).logits)
    visible[0, 80] = False
    with pytest.raises(ValueError, match="a board has no padding"):
        model(boards, visible)
    with pytest.raises(ValueError, match="iterations must be at least 1"):
        SudokuModel(0)
    with pytest.raises(ValueError, match="the shipped models are strong, weak, got 'medium'"):
        load_model("medium")


def test_weights_come_back_from_their_file(tmp_path: Path, boards: Tensor) -> None:
    from safetensors.torch import load_file

    model, other = SudokuModel(2), SudokuModel(2)
    model.save(tmp_path / "new" / "weights.safetensors")
    other.load_state_dict(load_file(tmp_path / "new" / "weights.safetensors"))
    assert other(boards).logits.equal(model(boards).logits)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["weights.safetensors"]


def test_the_weak_network_is_weaker(boards: Tensor) -> None:
    solutions = torch.from_numpy(validation_puzzles().solutions[4:70]).long()
    open_cells = boards[4:] == 0
    right = {
        strength: float((load_model(strength)(boards[4:]).logits.argmax(-1) == solutions)[open_cells].float().mean())
        for strength in STRENGTHS
    }
    assert right["strong"] > right["weak"] > 0.3


# --- training


@pytest.fixture
def quick_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_network, "training_boards", lambda: random_boards(60, seed=1))
    monkeypatch.setattr(train_network, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(train_network, "BATCH", 4)


class InterruptionError(Exception):
    pass


@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_an_interrupted_training_ends_with_the_same_weights(
    tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_network.train("weak", tmp_path / "whole", steps=6, seed=3).read_bytes()
    calls: list[int] = []
    loss_of = train_network.loss_of

    def interrupted(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == stop + 1:
            raise InterruptionError
        return loss_of(*args)

    monkeypatch.setattr(train_network, "loss_of", interrupted)
    with pytest.raises(InterruptionError):
        train_network.train("weak", tmp_path / "cut", steps=6, seed=3)
    resumed = train_network.train("weak", tmp_path / "cut", steps=6, seed=3)
    assert len(calls) == stop + 1 + 6 - stop // 2 * 2  # what came after the last checkpoint is done again
    assert resumed.read_bytes() == whole
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["network_weak.safetensors"]


@pytest.mark.usefixtures("quick_training")
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any) -> Path:
        raise InterruptionError

    monkeypatch.setattr(SudokuModel, "save", stop)
    with pytest.raises(InterruptionError):
        train_network.train("weak", tmp_path, steps=2)
    for steps, seed in ((4, 0), (2, 1)):
        with pytest.raises(ValueError, match="of a run of 2 steps with seed 0"):
            train_network.train("weak", tmp_path, steps=steps, seed=seed)


def test_training_lowers_the_loss() -> None:
    boards = torch.from_numpy(random_boards(32, seed=2)).long()
    given = train_network.random_masks(32, np.random.default_rng(0))
    model = SudokuModel(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(30):
        loss = train_network.loss_of(model, boards, given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3


def test_loss_weighs_boards_alike_and_later_iterations_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SudokuModel(2)
    scores = torch.zeros(2, 2, 81, 9)
    scores[1] = 5.0 * torch.nn.functional.one_hot(torch.arange(81) % 9, 9)
    monkeypatch.setattr(model, "logits_of_every_iteration", lambda tokens: scores)
    boards = 1 + (torch.arange(81) % 9).expand(2, 81)
    given = torch.ones(2, 81, dtype=torch.bool)
    given[0, 0] = False  # one blank, answered right by the second iteration
    given[1, :80] = False
    sure = -5.0 + np.log(np.exp(5.0) + 8)
    expected = (0.3 * np.log(9) + 1.0 * sure) / 1.3
    assert float(train_network.loss_of(model, boards, given)) == pytest.approx(expected, abs=1e-5)


def test_masks_are_of_all_tasks() -> None:
    counts = train_network.random_masks(2000, np.random.default_rng(0)).sum(1)
    assert counts.min() < 3
    assert 75 < counts.max() < 81  # something is always left to predict
    assert ((counts >= 17) & (counts <= 50)).float().mean() > 0.6


# --- states to label


def test_states_reach_from_empty_to_nearly_full_and_follow_their_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "training_boards", lambda: random_boards(60, seed=1))
    model = load_model("weak")
    states = states_module.decoding_states(model, 60, seed=4)
    filled = (states != 0).sum(1)
    assert states.shape == (60, 81)
    assert states.dtype == torch.int64
    assert filled.min() < 15
    assert 65 < filled.max() < 81
    assert states_module.decoding_states(model, 60, seed=4).equal(states)
    assert not states_module.decoding_states(model, 60, seed=5).equal(states)
