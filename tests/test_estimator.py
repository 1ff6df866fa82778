from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mdmi_fast import PairwiseMIEstimator, evaluate_estimator, load_estimator, ops, train_estimator
from mdmi_fast.estimator import PairScorer
from mdmi_fast.estimator.data import split_states
from mdmi_fast.estimator.network import CONFIG_FILE, WEIGHTS_FILE, Combine
from mdmi_fast.estimator.train import PairLoss, TrainingProgress
from mdmi_fast.labels import LabelSet, label_mi
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable
from mdmi_fast.tasks.sudoku.estimator import SudokuMIEstimator
from mdmi_fast.tasks.sudoku.model import DIGIT_STATE, HIDDEN_WIDTH, load_model
from mdmi_fast.tasks.sudoku.puzzles import validation_puzzles

COMBINES: tuple[Combine, ...] = ("concat", "product", "interaction")
WIDTH = 7


def make(combine: Combine, layers: tuple[int, ...] = (6, 5)) -> PairwiseMIEstimator:
    torch.manual_seed(3)
    return PairwiseMIEstimator(WIDTH, layers=layers, combine=combine).eval()


def batch(rows: int = 3, length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, length, WIDTH, generator=generator)
    return hidden, torch.rand(rows, length, generator=generator) < 0.7


def predict(estimator: PairScorer, hidden: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        return estimator(hidden, mask)


def concatenating(estimator: PairwiseMIEstimator, hidden: Tensor, mask: Tensor) -> Tensor:
    """The network of every combination as a person would write it: two states in, one number out."""

    def double(module: Any, x: Tensor) -> Tensor:
        module = module[0] if isinstance(module, torch.nn.Sequential) else module
        bias = 0.0 if module.bias is None else module.bias.double()
        return x @ module.weight.double().t() + bias

    def one_way(a: Tensor, b: Tensor) -> Tensor:
        if estimator.kind == "concat":
            joined = torch.cat([estimator.left[0].weight, estimator.right[0].weight], dim=1).double()  # type: ignore[list-item]
            z = torch.relu(joined @ torch.cat([a, b]) + estimator.left[0].bias.double())  # type: ignore[operator]
        else:
            z = double(estimator.project, a) * double(estimator.project, b)
        for depth, layer in enumerate(estimator.dense):
            after = double(layer, z)
            if estimator.kind == "interaction" and depth == 0:
                alone = torch.relu(double(estimator.alone, a)) + torch.relu(double(estimator.alone, b))
                after = after + double(estimator.alone_in, alone)
            z = torch.relu(after)
        return torch.nn.functional.softplus(double(estimator.last, z)).squeeze()

    hidden = hidden.double()
    result = torch.zeros(*mask.shape, mask.shape[1], dtype=torch.float64)
    for row, (i, j) in itertools.product(range(len(mask)), itertools.permutations(range(mask.shape[1]), 2)):
        if mask[row, i] and mask[row, j]:
            a, b = hidden[row, i], hidden[row, j]
            result[row, i, j] = (one_way(a, b) + one_way(b, a)) / 2
    return result


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("layers", [(4,), (6, 5), (6, 5, 3)])
def test_scores_are_those_of_the_written_out_network(combine: Combine, layers: tuple[int, ...]) -> None:
    estimator, (hidden, mask) = make(combine, layers), batch(2, 5)
    scores = predict(estimator, hidden, mask)
    with torch.no_grad():
        expected = concatenating(estimator, hidden, mask)
    # float32 sums of at most 18 terms of size 1
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("combine", COMBINES)
def test_every_combination_is_scored_by_the_op(combine: Combine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    scored = ops.pairwise_mlp

    def spy(*args: Any, **options: Any) -> Tensor:
        calls.append(options["combine"])
        return scored(*args, **options)

    monkeypatch.setattr(ops, "pairwise_mlp", spy)
    predict(make(combine), *batch())
    assert calls == ["add" if combine == "concat" else "mul"]


@pytest.mark.parametrize("combine", COMBINES)
def test_scores_are_symmetric_positive_and_zero_elsewhere(combine: Combine) -> None:
    hidden, mask = batch()
    scores = predict(make(combine), hidden, mask)
    pairs = mask.unsqueeze(-1) & mask.unsqueeze(-2) & ~torch.eye(9, dtype=torch.bool)
    assert scores.dtype == torch.float32
    assert scores.equal(scores.mT)
    assert (scores[pairs] > 0).all()
    assert not scores[~pairs].any()


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("length", [2, 3, 5, 9])
def test_scores_of_a_sequence_do_not_depend_on_the_batch(combine: Combine, length: int) -> None:
    estimator = PairwiseMIEstimator(40, layers=(24, 16), combine=combine).eval()
    hidden, mask = torch.randn(70, length, 40), torch.rand(70, length) < 0.8
    together = predict(estimator, hidden, mask)
    for rows in ([0], [3, 1], [*range(69, 62, -1)], [*range(64)]):
        assert predict(estimator, hidden[rows], mask[rows]).equal(together[rows])


def test_training_and_inference_score_alike() -> None:
    estimator, (hidden, mask) = make("interaction"), batch()
    torch.testing.assert_close(estimator(hidden, mask).detach(), predict(estimator, hidden, mask), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("combine", COMBINES)
def test_every_parameter_has_a_gradient(combine: Combine) -> None:
    estimator, (hidden, mask) = make(combine), batch()
    estimator(hidden, mask).sum().backward()
    for name, parameter in estimator.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_half_precision_states_are_read() -> None:
    estimator, (hidden, mask) = make("concat"), batch()
    torch.testing.assert_close(
        predict(estimator, hidden.bfloat16(), mask), predict(estimator, hidden.bfloat16().float(), mask)
    )


@pytest.mark.parametrize("gamma", [0.0, 0.3, 2.0, math.inf])
@pytest.mark.parametrize("combine", COMBINES)
def test_score_and_select_is_scoring_and_then_selecting(combine: Combine, gamma: float) -> None:
    estimator, (hidden, mask) = make(combine), batch(6)
    entropy = torch.rand(mask.shape)
    with torch.no_grad():
        lazy = estimator.score_and_select(entropy, hidden, mask, gamma=gamma, lam=1.5, entropy_weight=0.5, limit=4)
        mi = estimator(hidden, mask)
    full = ops.select_budget(entropy, mi, gamma=gamma, lam=1.5, entropy_weight=0.5, mask=mask, limit=4)
    assert lazy.selected.equal(full.selected)
    torch.testing.assert_close(lazy.spent, full.spent)


# --- weights that were packed


@pytest.mark.parametrize("combine", COMBINES)
def test_packed_weights_follow_every_change(combine: Combine) -> None:
    estimator, (hidden, mask) = make(combine), batch()
    before = predict(estimator, hidden, mask)
    with torch.no_grad():
        estimator.last.bias.add_(1.0)
    biased = predict(estimator, hidden, mask)
    assert (biased > before)[before > 0].all()
    optimizer = torch.optim.SGD(estimator.parameters(), lr=0.1)
    estimator(hidden, mask).sum().backward()
    optimizer.step()
    fresh = make(combine)
    fresh.load_state_dict(estimator.state_dict())
    stepped = predict(estimator, hidden, mask)
    assert not stepped.equal(biased)
    assert stepped.equal(predict(fresh, hidden, mask))
    estimator.load_state_dict(make(combine).state_dict())
    assert predict(estimator, hidden, mask).equal(before)
    estimator.last.bias = torch.nn.Parameter(estimator.last.bias.detach() + 1.0)
    assert predict(estimator, hidden, mask).equal(biased)


def test_weights_are_packed_once_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    prepare = ops.prepare_pairwise
    monkeypatch.setattr(ops, "prepare_pairwise", lambda *args: packed.append(1) or prepare(*args))
    estimator, (hidden, mask) = make("interaction"), batch()
    for _ in range(3):
        predict(estimator, hidden, mask)
    assert len(packed) == 1


def test_copies_and_pickles_score_alike_and_are_independent() -> None:
    estimator, (hidden, mask) = make("interaction"), batch()
    before = predict(estimator, hidden, mask)
    copies = [copy.deepcopy(estimator), pickle.loads(pickle.dumps(estimator))]
    with torch.no_grad():
        estimator.last.bias.add_(1.0)
    for twin in copies:
        assert predict(twin, hidden, mask).equal(before)
    assert not predict(estimator, hidden, mask).equal(before)


def test_inference_mode_and_no_grad_share_an_estimator() -> None:
    hidden, mask = batch()
    for combine in COMBINES:
        estimator = make(combine)
        with torch.inference_mode():
            first = estimator(hidden, mask)
        assert predict(estimator, hidden, mask).equal(first)
        estimator(hidden, mask).sum().backward()


# --- files


@pytest.mark.parametrize("combine", COMBINES)
def test_an_estimator_comes_back_from_its_folder(combine: Combine, tmp_path: Path) -> None:
    estimator, (hidden, mask) = make(combine, (6, 5, 4)), batch()
    estimator.provenance = {"model": "none", "form": "joint"}
    estimator.save_pretrained(tmp_path / "a" / "b")
    for loaded in (
        PairwiseMIEstimator.from_pretrained(tmp_path / "a" / "b"),
        load_estimator(str(tmp_path / "a" / "b")),
    ):
        assert isinstance(loaded, PairwiseMIEstimator)
        assert not loaded.training
        assert loaded.provenance == estimator.provenance
        assert loaded.configuration() == estimator.configuration()
        assert predict(loaded, hidden, mask).equal(predict(estimator, hidden, mask))
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


def test_a_sudoku_estimator_comes_back_from_its_folder(tmp_path: Path) -> None:
    estimator = SudokuMIEstimator(features=3, stem=4, layers=(5,))
    estimator.save_pretrained(tmp_path)
    loaded = SudokuMIEstimator.from_pretrained(tmp_path)
    hidden, mask = torch.randn(2, 81, HIDDEN_WIDTH), torch.rand(2, 81) < 0.5
    assert predict(loaded, hidden, mask).equal(predict(estimator.eval(), hidden, mask))
    with pytest.raises(ValueError, match="holds a 'sudoku' estimator, PairwiseMIEstimator reads 'general'"):
        PairwiseMIEstimator.from_pretrained(tmp_path)


@pytest.mark.parametrize("bad", [b"", b"x" * 100, None], ids=["empty", "nonsense", "truncated"])
def test_damaged_weights_are_an_error(tmp_path: Path, bad: bytes | None) -> None:
    make("concat").save_pretrained(tmp_path)
    weights = tmp_path / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-9] if bad is None else bad)
    with pytest.raises(ValueError, match="do not make an estimator"):
        load_estimator(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"architecture": "general"}', "\udcff"])
def test_a_damaged_configuration_is_an_error(tmp_path: Path, text: str) -> None:
    make("concat").save_pretrained(tmp_path)
    (tmp_path / CONFIG_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="not the configuration of an estimator"):
        load_estimator(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": [6, 4]}, "do not make an estimator"),
        ({"combine": "product"}, "do not make an estimator"),
        ({"colour": "red"}, "do not make an estimator"),
        ({"layers": []}, "layers must be 1 to 3 widths"),
    ],
)
def test_files_that_do_not_belong_together_are_an_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    make("concat").save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    config["configuration"] |= change
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_estimator(tmp_path)


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    make("concat").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    tensors.pop("last.bias")
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"last\.bias"):
        load_estimator(tmp_path)


def test_unknown_names_folders_and_architectures_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is registered as 'nosuch'"):
        load_estimator("nosuch")
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_estimator(tmp_path / "nosuch")
    with pytest.raises(FileNotFoundError):
        load_estimator(tmp_path)
    make("concat").save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {"architecture": "nosuch"}))
    with pytest.raises(ValueError, match="nothing is registered as 'nosuch'"):
        load_estimator(tmp_path)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(FileNotFoundError):
        load_estimator(tmp_path)


def test_what_json_cannot_hold_leaves_the_files_as_they_were(tmp_path: Path) -> None:
    estimator = make("concat")
    estimator.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    estimator.provenance = {"model": object()}
    with torch.no_grad():
        estimator.last.bias.add_(1.0)
    with pytest.raises(TypeError):
        estimator.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "build",
    [
        lambda: PairwiseMIEstimator(0),
        lambda: PairwiseMIEstimator(4, layers=()),
        lambda: PairwiseMIEstimator(4, layers=(4, 0)),
        lambda: PairwiseMIEstimator(4, layers=(4, 4, 4, 4)),
        lambda: PairwiseMIEstimator(4, combine="sum"),  # type: ignore[arg-type]
        lambda: SudokuMIEstimator(layers=()),
        lambda: SudokuMIEstimator(features=0),
    ],
)
def test_sizes_that_make_no_network_are_refused(build: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        build()


def test_the_wrong_width_is_an_error_that_names_both() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    message = r"PairwiseMIEstimator: hidden must be \[B, N, 7\], as the estimator was trained, got shape \(1, 4, 8\)"
    with pytest.raises(ValueError, match=message):
        make("concat")(torch.zeros(1, 4, 8), mask)
    with pytest.raises(ValueError, match=rf"hidden must be \[B, N, {HIDDEN_WIDTH}\]"):
        SudokuMIEstimator().score_and_select(torch.zeros(1, 4), torch.zeros(1, 4, 8), mask, gamma=0.1)


# --- the estimator of the Sudoku task


@pytest.fixture(scope="module")
def sudoku_states() -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(validation_puzzles().givens[:3]).long()
    return load_model("strong")(tokens).hidden, tokens == 0


def test_the_sudoku_estimator_compares_cells_digit_by_digit(sudoku_states: tuple[Tensor, Tensor]) -> None:
    hidden, mask = sudoku_states
    estimator = SudokuMIEstimator(features=3, stem=5, layers=(6, 4)).eval()
    scores = predict(estimator, hidden, mask)
    digits, codes = hidden[0].split([9 * DIGIT_STATE, 27], dim=-1)
    digits = digits.view(81, 9, DIGIT_STATE)
    masked = mask[0].nonzero().flatten().tolist()
    with torch.no_grad():
        phi = torch.nn.Sequential(*estimator.stem)(digits)
        for i, j in itertools.combinations(masked[::7], 2):
            z = estimator.same_digit.bias.clone()
            for digit in range(9):
                z += estimator.same_digit.weight @ (phi[i, digit] * phi[j, digit])
            for unit in range(3):
                shared = codes[i, 9 * unit : 9 * unit + 9] @ codes[j, 9 * unit : 9 * unit + 9]
                z += shared * estimator.same_unit[unit]
            z = torch.relu(estimator.dense[0](torch.relu(z)))
            expected = torch.nn.functional.softplus(estimator.last(z))
            assert float(scores[0, i, j]) == pytest.approx(float(expected), abs=1e-5)


def test_the_sudoku_estimator_does_not_care_what_a_digit_is_called(sudoku_states: tuple[Tensor, Tensor]) -> None:
    hidden, mask = sudoku_states
    estimator = SudokuMIEstimator().eval()
    digits, codes = hidden.split([9 * DIGIT_STATE, 27], dim=-1)
    digits = digits.unflatten(-1, (9, DIGIT_STATE))[..., torch.randperm(9), :]
    renamed = torch.cat([digits.flatten(-2), codes], dim=-1)
    torch.testing.assert_close(predict(estimator, renamed, mask), predict(estimator, hidden, mask))


def test_the_sudoku_estimator_scores_a_board_alike_in_every_batch(sudoku_states: tuple[Tensor, Tensor]) -> None:
    hidden, mask = sudoku_states
    estimator = SudokuMIEstimator().eval()
    together = predict(estimator, hidden, mask)
    for row in range(3):
        assert predict(estimator, hidden[row : row + 1], mask[row : row + 1])[0].equal(together[row])


@pytest.mark.parametrize("strength", ["strong", "weak"])
def test_the_shipped_sudoku_estimators_load_and_predict_information(strength: str) -> None:
    mask = torch.from_numpy(validation_puzzles().givens[:3]) == 0
    estimator = SudokuMIEstimator.shipped(strength)
    solutions = torch.from_numpy(validation_puzzles().solutions[:3]).long()
    model = load_model(strength)
    tokens = solutions.masked_fill(mask & (mask.cumsum(1) <= 25), 0)
    hidden, mask = model(tokens).hidden, tokens == 0
    scores, labels = predict(estimator, hidden, mask), label_mi(model, tokens).mi
    pairs = (mask.unsqueeze(-1) & mask.unsqueeze(-2)).triu(1)
    r = np.corrcoef(scores[pairs].sqrt().numpy(), labels[pairs].sqrt().numpy())[0, 1]
    assert r > 0.5


# --- training


@pytest.fixture(scope="module")
def taught() -> tuple[JointTable, LabelSet]:
    """A chain of bits, each like the one before, and labels of all of its states."""
    length = 5
    sequences = torch.tensor([*itertools.product(range(2), repeat=length)])
    same = (sequences[:, 1:] == sequences[:, :-1]).double()
    stay = torch.linspace(0.6, 0.95, length - 1, dtype=torch.float64)
    model = JointTable((same * stay + (1 - same) * (1 - stay)).prod(1).view((2,) * length))
    states = torch.tensor([*itertools.product(range(3), repeat=length)])
    states = states[(states == 2).sum(1) >= 2]
    labels = label_mi(model, states)
    return model, LabelSet(states, states == 2, labels.mi, labels.entropy)


class Remembering:
    """A model that answers known states from a table: tests train for many epochs on few states."""

    def __init__(self, model: JointTable, states: Tensor) -> None:
        self.mask_token_id, self.vocab_size, self.hidden_size = 2, 2, model.hidden_size
        output = model(states)
        self.known = {tuple(s): h for s, h in zip(states.tolist(), output.hidden, strict=True)}

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        return MaskedOutput(torch.zeros(*tokens.shape, 2), torch.stack([self.known[tuple(s)] for s in tokens.tolist()]))


def student(model: JointTable | Remembering) -> PairwiseMIEstimator:
    torch.manual_seed(0)
    return PairwiseMIEstimator(model.hidden_size, layers=(32, 16), combine="interaction")


def test_training_improves_and_keeps_the_best_epoch(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    epochs: list[TrainingProgress] = []
    before = evaluate_estimator(student(quick), quick, labels)
    estimator, report = train_estimator(
        student(quick), quick, labels, epochs=25, learning_rate=1e-2, held_out=0.2, on_epoch=epochs.append
    )
    assert not estimator.training
    assert [e.epoch for e in epochs] == [*range(len(epochs))]
    assert epochs[-1].loss < epochs[0].loss / 2
    assert report.pearson == max(e.held_out.pearson for e in epochs)
    assert report.pearson > 0.9
    _, judge = split_states(labels, 0.2, 0)
    assert repr(evaluate_estimator(estimator, quick, judge)) == repr(report)  # NaN where a bin is empty
    assert evaluate_estimator(estimator, model, labels).mean_absolute_error < before.mean_absolute_error / 2


def test_training_is_the_same_for_a_seed(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    runs = [train_estimator(student(quick), quick, labels, epochs=2, seed=seed) for seed in (1, 1, 2)]
    weights = [torch.cat([p.flatten() for p in estimator.parameters()]) for estimator, _ in runs]
    assert weights[0].equal(weights[1])
    assert repr(runs[0][1]) == repr(runs[1][1])  # NaN where a bin is empty
    assert not weights[0].equal(weights[2])


def test_training_stops_when_it_no_longer_improves(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    epochs: list[TrainingProgress] = []
    train_estimator(student(quick), quick, labels, epochs=50, learning_rate=0.0, patience=2, on_epoch=epochs.append)
    assert len(epochs) == 3  # the first, and two that are no better


def test_equal_predictions_at_first_do_not_end_the_training(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    estimator = student(quick)
    with torch.no_grad():
        for parameter in estimator.parameters():
            parameter.zero_()
        estimator.last.bias.fill_(-3.0)
    epochs: list[TrainingProgress] = []

    def wake(progress: TrainingProgress) -> None:
        epochs.append(progress)
        if progress.epoch == 0:
            estimator.load_state_dict(student(quick).state_dict())

    _, report = train_estimator(estimator, quick, labels, epochs=6, learning_rate=1e-2, patience=2, on_epoch=wake)
    assert math.isnan(epochs[0].held_out.pearson)
    assert report.pearson == max(e.held_out.pearson for e in epochs[1:])


def test_states_are_parted_whole(taught: tuple[JointTable, LabelSet]) -> None:
    _, labels = taught
    kept, held = split_states(labels, 0.25, seed=4)
    assert len(held.tokens) == round(0.25 * len(labels.tokens))
    everything = [tuple(s) for part in (kept, held) for s in part.tokens.tolist()]
    assert sorted(everything) == sorted(tuple(s) for s in labels.tokens.tolist())
    for part in (kept, held):
        row = labels.tokens.tolist().index(part.tokens[0].tolist())
        assert part.mi[0].equal(labels.mi[row])
        assert part.mask[0].equal(labels.mask[row])


def test_loss_by_hand() -> None:
    pairs = torch.tensor([[[False, True, False], [True, False, False], [False, False, False]]])
    mi = torch.tensor([[[0, 0.25, 9.0], [0.25, 0, 9], [9, 9, 0]]])
    predicted = torch.full((1, 3, 3), 0.01)

    def loss(labels: Tensor, **options: Any) -> float:
        return float(PairLoss(**options).total(predicted, labels, pairs)) / 2

    # (sqrt(.01) - sqrt(.25))^2, up to the 1e-6 under the roots
    assert loss(mi) == pytest.approx(0.16, abs=1e-5)
    assert loss(-mi) == pytest.approx(0.36, abs=1e-5)
    assert loss(mi, underestimation=4.0) == pytest.approx(4 * 0.16, abs=4e-5)
    assert loss(-mi, underestimation=4.0) == pytest.approx(0.36, abs=1e-5)  # too high, not too low
    assert loss(mi, emphasis=2.0) == pytest.approx(1.5 * 0.16, abs=1e-5)
    assert loss(mi, transform="none") == pytest.approx(0.24**2)
    assert loss(mi, transform="log") == pytest.approx(math.log(0.26 / 0.02) ** 2, rel=1e-5)


def test_a_loss_ignores_what_is_not_a_pair() -> None:
    predicted = torch.full((1, 2, 2), math.nan)
    total = PairLoss().total(predicted, torch.zeros(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.bool))
    assert float(total) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs and batch_size must be at least 1"),
        ({"batch_size": 0}, "epochs and batch_size must be at least 1"),
        ({"held_out": 1.0}, "leaves nothing"),
        ({"learning_rate": 1e30}, "lower learning_rate"),
        ({"underestimation": 0.0}, "underestimation must be a positive number, got 0.0"),
        ({"emphasis": -1.0}, "emphasis must be a number of at least 0, got -1.0"),
        ({"transform": "square"}, "transform must be one of root, none, log, got 'square'"),
    ],
)
def test_trainings_that_cannot_be_are_refused(
    taught: tuple[JointTable, LabelSet], options: dict[str, Any], message: str
) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    with pytest.raises(ValueError, match=message):
        train_estimator(student(quick), quick, labels, **({"epochs": 2} | options))


def test_labels_that_are_not_finite_are_refused(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    mi = labels.mi.clone()
    mi[7, 0, 1] = torch.inf
    with pytest.raises(ValueError, match="labels must be finite, got another one in state 7"):
        train_estimator(student(model), model, labels._replace(mi=mi))


# --- evaluation


class Blank:
    mask_token_id, vocab_size, hidden_size = 0, 2, 1

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        return MaskedOutput(torch.zeros(*tokens.shape, 2), tokens.unsqueeze(-1).float())


def symmetric(*shape: int) -> Tensor:
    x = torch.rand(shape)
    return x + x.mT


def report_of(predicted: Tensor, mi: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """The report of given predictions: the model's hidden state is the number of the state."""
    states, length = mi.shape[:2]
    mask = torch.ones(states, length, dtype=torch.bool) if mask is None else mask
    tokens = torch.arange(states).unsqueeze(-1).expand(states, length)
    labels = LabelSet(tokens, mask, mi, torch.zeros(states, length))
    return evaluate_estimator(lambda hidden, _: predicted[hidden[:, 0, 0].long()], Blank(), labels, **options)


def mean_ranks(x: np.ndarray) -> np.ndarray:
    return np.array([(x < value).sum() + ((x == value).sum() + 1) / 2 for value in x])


def test_a_report_agrees_with_numpy() -> None:
    mi = symmetric(9, 6, 6).square() / 2
    predicted = ((mi + 0.3 * symmetric(9, 6, 6)) / 1.3 * 10).round() / 10  # with ties
    mask = torch.rand(9, 6) < 0.8
    report = report_of(predicted, mi, mask, tau=0.5, batch_size=4)
    pairs = (mask.unsqueeze(-1) & mask.unsqueeze(-2)).triu(1)
    p, a = predicted[pairs].double().numpy(), mi[pairs].double().numpy()
    assert report.pairs == len(p)
    assert report.pearson == pytest.approx(np.corrcoef(p, a)[0, 1], abs=1e-12)
    assert report.spearman == pytest.approx(np.corrcoef(mean_ranks(p), mean_ranks(a))[0, 1], abs=1e-12)
    assert report.mean_absolute_error == pytest.approx(np.abs(p - a).mean(), abs=1e-12)
    for value, low, high in zip(report.calibration, (-9, 0.1, 0.5, 1), (0.1, 0.5, 1, 9), strict=True):
        inside = (a >= low) & (a < high)
        assert value == pytest.approx(np.abs(p - a)[inside].mean(), abs=1e-12)
    called, independent = p < 0.5, a < 0.5
    assert report.precision == pytest.approx((called & independent).sum() / called.sum())
    assert report.recall == pytest.approx((called & independent).sum() / independent.sum())
    assert report.false_independence == pytest.approx((called & ~independent).sum() / called.sum())


def test_a_report_by_hand() -> None:
    mi = torch.zeros(1, 3, 3)
    mi[0, 0, 1], mi[0, 0, 2], mi[0, 1, 2] = -0.2, 0.1, 2.0  # the lower triangle is not read
    predicted = torch.zeros(1, 3, 3)
    predicted[0, 0, 1], predicted[0, 0, 2], predicted[0, 1, 2] = 0.0, 0.3, 1.0
    report = report_of(predicted, mi)
    assert report.pairs == 3
    assert report.mean_absolute_error == pytest.approx(1.4 / 3)
    assert report.calibration[:2] == pytest.approx([0.2, 0.2])
    assert math.isnan(report.calibration[2])
    assert report.calibration[3] == pytest.approx(1.0)
    assert report.spearman == pytest.approx(1.0)
    assert (report.precision, report.recall, report.false_independence) == (1.0, 1.0, 0.0)


def test_what_does_not_exist_is_nan() -> None:
    mi = symmetric(2, 4, 4) + 1.0
    report = report_of(torch.full_like(mi, 0.1), mi)
    assert math.isnan(report.pearson)
    assert math.isnan(report.spearman)
    assert math.isnan(report.precision)
    assert math.isnan(report.recall)
    assert math.isnan(report.false_independence)
    assert all(math.isnan(value) for value in report.calibration[:3])
    assert report.calibration[3] > 0


@pytest.mark.parametrize("states", [0, 2])
def test_fewer_than_two_pairs_are_refused(states: int) -> None:
    mask = torch.zeros(states, 4, dtype=torch.bool)
    mask[:1, :2] = True
    with pytest.raises(ValueError, match=f"at least two masked pairs, got {min(states, 1)}"):
        report_of(torch.zeros(states, 4, 4), torch.zeros(states, 4, 4), mask)
