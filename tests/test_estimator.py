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

from mdmi_fast import PairwiseMIEstimator, load_estimator, ops
from mdmi_fast.decoding import Step
from mdmi_fast.estimator import PairScorer
from mdmi_fast.estimator.configuration import CONFIG_FILE, WEIGHTS_FILE
from mdmi_fast.estimator.general import Combine, Marginals
from mdmi_fast.estimator.scorer import Output
from mdmi_fast.labels import label_mi, masked_pairs
from mdmi_fast.models.exact import JointTable
from mdmi_fast.models.identity import identity
from mdmi_fast.ops import TokenStats
from mdmi_fast.tasks.sudoku.estimator import SudokuMIEstimator
from mdmi_fast.tasks.sudoku.model import DIGIT_STATE, HIDDEN_WIDTH, load_model
from mdmi_fast.tasks.sudoku.puzzles import validation_puzzles

pytestmark = pytest.mark.arithmetic

COMBINES: tuple[Combine, ...] = ("concat", "product", "interaction")
WIDTH = 7


def make(combine: Combine, layers: tuple[int, ...] = (6, 5), **options: Any) -> PairwiseMIEstimator:
    torch.manual_seed(3)
    return PairwiseMIEstimator(WIDTH, layers=layers, combine=combine, rank=4, **options).eval()


def batch(rows: int = 3, length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, length, WIDTH, generator=generator)
    return hidden, torch.rand(rows, length, generator=generator) < 0.7


def predict(estimator: PairScorer, hidden: Tensor, mask: Tensor, stats: Any = None) -> Tensor:
    with torch.no_grad():
        return estimator(hidden, mask, stats)


def stats_of(entropy: Tensor) -> TokenStats:
    """Marginals of which only the entropy matters."""
    nothing = torch.zeros_like(entropy)
    return TokenStats(entropy, nothing, nothing, nothing.long(), nothing)


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


@pytest.mark.parametrize("combine", COMBINES)
def test_gradients_in_bfloat16_are_those_of_float32_up_to_its_rounding(combine: Combine) -> None:
    """What a training on a GPU does: bfloat16 products of the dense layers, weights and their gradients in float32."""
    torch.manual_seed(0)
    estimator = PairwiseMIEstimator(16, layers=(32, 16), combine=combine, rank=8)
    hidden, mask = torch.randn(2, 12, 16), torch.rand(2, 12) < 0.8
    gradients = []
    for precision in (None, "bf16"):
        estimator.precision = precision
        gradients.append(torch.autograd.grad(estimator(hidden, mask).sum(), list(estimator.parameters())))
    for exact, rounded in zip(*gradients, strict=True):
        assert rounded.dtype == torch.float32
        assert not rounded.equal(exact) or exact.numel() == 1
        assert (rounded - exact).norm() < 0.1 * exact.norm()  # products round by 2^-9, and units near 0 flip


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


@pytest.mark.parametrize("combine", COMBINES)
def test_outputs_are_functions_of_the_same_network(combine: Combine) -> None:
    hidden, mask = batch()
    entropy = torch.rand(mask.shape) * 2
    stats = stats_of(entropy)
    raw, soft, bounded = (
        make(combine, output=output)(hidden, mask, stats).detach() for output in ("identity", "softplus", "bounded")
    )
    pairs = masked_pairs(mask)
    raw = raw - 3.0 * pairs  # the other outputs begin with a bias of -3
    if combine != "concat":  # there the mean of both orders is taken after softplus
        torch.testing.assert_close(soft, torch.nn.functional.softplus(raw) * pairs, rtol=1e-5, atol=1e-6)
    least = torch.minimum(entropy.unsqueeze(2), entropy.unsqueeze(1))
    torch.testing.assert_close(bounded, least * raw.sigmoid() * pairs, rtol=1e-5, atol=1e-6)
    assert (bounded <= least)[pairs].all()


@pytest.mark.parametrize("combine", COMBINES)
def test_bounded_outputs_are_symmetric_and_do_not_depend_on_the_batch(combine: Combine) -> None:
    estimator, (hidden, mask) = make(combine, output="bounded"), batch(8, 11)
    stats = stats_of(torch.rand(mask.shape))
    mi = predict(estimator, hidden, mask, stats)
    assert mi.equal(mi.mT)
    for row in range(8):
        own = slice(row, row + 1)
        alone = predict(estimator, hidden[own], mask[own], TokenStats(*(field[own] for field in stats)))
        assert alone.equal(mi[own])


def test_a_bounded_output_far_below_zero_has_a_gradient() -> None:
    estimator, (hidden, mask) = make("concat", output="bounded"), batch()
    torch.nn.init.constant_(estimator.last.bias, -1000.0)
    estimator(hidden, mask, stats_of(torch.rand(mask.shape))).sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in estimator.parameters())  # type: ignore[union-attr]


def test_what_is_unmasked_may_have_any_entropy() -> None:
    hidden, mask = batch()
    entropy = torch.rand(mask.shape).masked_fill(~mask, torch.nan)
    assert predict(make("concat", output="bounded"), hidden, mask, stats_of(entropy)).isfinite().all()


@pytest.mark.parametrize("output", ["softplus", "bounded"])
def test_selection_with_marginals_is_scoring_and_then_selecting(output: Output) -> None:
    estimator, (hidden, mask) = make("concat", output=output, marginals="entropy"), batch(6)
    entropy = torch.rand(mask.shape)
    stats = stats_of(entropy)
    with torch.no_grad():
        lazy = estimator.score_and_select(entropy, hidden, mask, gamma=0.7, stats=stats)
        full = ops.select_budget(entropy, estimator(hidden, mask, stats), gamma=0.7, mask=mask)
    assert lazy.selected.equal(full.selected)


@pytest.mark.parametrize(("marginals", "fields"), [("entropy", 1), ("summary", 3)])
def test_marginals_join_the_state(marginals: Marginals, fields: int) -> None:
    estimator, (hidden, mask) = make("concat", marginals=marginals), batch()
    stats = ops.token_stats(torch.randn(*mask.shape, 5))
    plain = PairwiseMIEstimator(WIDTH + fields, layers=(6, 5)).eval()
    plain.load_state_dict(estimator.state_dict())
    seen = torch.stack([stats.entropy, stats.confidence, stats.margin][:fields], -1)
    expected = predict(plain, torch.cat([hidden, seen], -1), mask)
    assert predict(estimator, hidden, mask, stats).equal(expected)


def test_a_step_with_statistics_gives_the_marginals() -> None:
    estimator, (hidden, mask) = make("concat", marginals="summary"), batch()
    stats = ops.token_stats(torch.randn(*mask.shape, 5))
    step = Step(3, stats=stats)
    assert estimator.needs_step
    assert not make("concat").needs_step
    assert predict(estimator, hidden, mask, step).equal(predict(estimator, hidden, mask, stats))
    for nothing in (None, 3):
        with pytest.raises(TypeError, match=r"stats must be ops\.token_stats\(logits\) or a Step with stats, got"):
            predict(estimator, hidden, mask, nothing)


def test_several_layers_are_weighed_by_learned_shares() -> None:
    estimator = PairwiseMIEstimator(3 * WIDTH, layers=(6, 5), weighted_layers=3).eval()
    hidden, mask = torch.randn(2, 4, 3 * WIDTH), torch.ones(2, 4, dtype=torch.bool)
    with torch.no_grad():
        estimator.layer_weights.copy_(torch.tensor([0.5, -1.0, 0.2]))
    shares = estimator.layer_weights.detach().softmax(0)
    mixed = sum(share * hidden[..., k * WIDTH : (k + 1) * WIDTH] for k, share in enumerate(shares))
    plain = PairwiseMIEstimator(WIDTH, layers=(6, 5)).eval()
    plain.load_state_dict({k: v for k, v in estimator.state_dict().items() if k != "layer_weights"})
    torch.testing.assert_close(predict(estimator, hidden, mask), predict(plain, mixed, mask))
    estimator(hidden, mask).sum().backward()
    assert estimator.layer_weights.grad is not None
    assert estimator.layer_weights.grad.any()


def test_a_summary_counts_parameters_beside_the_usual_range() -> None:
    # 2 * 20 * 8 + 8 of the halves, 8 * 4 + 4, 4 + 1
    small = PairwiseMIEstimator(20, layers=(8, 4))
    assert "369 parameters (below the usual 50,000 to 500,000)" in small.summary()
    assert "general: hidden_size 20, layers [8, 4], combine concat" in small.summary()
    assert "(within the usual" in PairwiseMIEstimator(128, layers=(256, 128)).summary()
    assert "(above the usual" in PairwiseMIEstimator(960).summary()


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
    estimator, (hidden, mask) = make(combine, (6, 5, 4), output="identity"), batch()
    estimator.provenance, estimator.trained_on = {"model": "none", "form": "joint"}, {"weights": "0123"}
    estimator.save_pretrained(tmp_path / "a" / "b")
    for loaded in (
        PairwiseMIEstimator.from_pretrained(tmp_path / "a" / "b"),
        load_estimator(str(tmp_path / "a" / "b")),
    ):
        assert isinstance(loaded, PairwiseMIEstimator)
        assert not loaded.training
        assert loaded.provenance == estimator.provenance
        assert loaded.trained_on == {"weights": "0123"}
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
        lambda: PairwiseMIEstimator(4, output="relu"),  # type: ignore[arg-type]
        lambda: PairwiseMIEstimator(4, marginals="all"),  # type: ignore[arg-type]
        lambda: PairwiseMIEstimator(4, rank=0),
        lambda: PairwiseMIEstimator(4, weighted_layers=3),
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


def test_the_wrong_model_is_an_error_that_names_both() -> None:
    fair, loaded = JointTable(torch.ones(2, 2)), JointTable(torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    estimator = PairwiseMIEstimator(fair.hidden_size, layers=(4,))
    estimator.check_model(loaded)  # of unknown origin
    estimator.trained_on = identity(fair)
    estimator.check_model(JointTable(torch.ones(2, 2)))
    weights = [identity(model)["weights"] for model in (fair, loaded)]
    with pytest.raises(ValueError, match=f"on a model of weights {weights[0]}, got one of weights {weights[1]}; if"):
        estimator.check_model(loaded)
    estimator.trained_on["layer"] = [8]
    with pytest.raises(ValueError, match=r"on a model of layer \[8\], got one of layer None; if"):
        estimator.check_model(fair)
    with pytest.raises(ValueError, match=r"reads hidden states of width 4, got JointTable of width 6"):
        estimator.check_model(JointTable(torch.ones(2, 2, 2, 2)))


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
    estimator.check_model(load_model(strength))
    assert estimator.trained_on is not None
    solutions = torch.from_numpy(validation_puzzles().solutions[:3]).long()
    model = load_model(strength)
    tokens = solutions.masked_fill(mask & (mask.cumsum(1) <= 25), 0)
    hidden, mask = model(tokens).hidden, tokens == 0
    scores, labels = predict(estimator, hidden, mask), label_mi(model, tokens).mi
    pairs = (mask.unsqueeze(-1) & mask.unsqueeze(-2)).triu(1)
    r = np.corrcoef(scores[pairs].sqrt().numpy(), labels[pairs].sqrt().numpy())[0, 1]
    assert r > 0.5
