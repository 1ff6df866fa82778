from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from mdmi_fast import label_mi
from mdmi_fast.labels import FORMS, Form, masked_pairs, probe_mi, read_labels, write_labels
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable, xor_triple
from mdmi_fast.tasks.sudoku.model import SudokuModel, load_model
from mdmi_fast.tasks.sudoku.puzzles import validation_puzzles

LN2 = math.log(2)


class Scripted:
    """A model of two bits that answers what it is told, consistent or not: state -> probabilities of each position."""

    mask_token_id, vocab_size, hidden_size = 2, 2, 1

    def __init__(self, answers: dict[tuple[int, int], list[list[float]]]) -> None:
        self.answers = answers

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        p = torch.tensor([self.answers[a, b] for a, b in tokens.tolist()], dtype=torch.float64)
        return MaskedOutput(p.log(), torch.zeros(*tokens.shape, 1))


FIRST, SECOND = [1.0, 0.0], [0.0, 1.0]
INCONSISTENT = {
    (2, 2): [[0.5, 0.5], [0.95, 0.05]],
    (0, 2): [FIRST, [0.9, 0.1]],
    (1, 2): [SECOND, [0.7, 0.3]],
    (2, 0): [[0.5, 0.5], FIRST],
    (2, 1): [[0.5, 0.5], SECOND],
}


def random_table(length: int, vocabulary: int, *, peaked: float = 2.0, seed: int = 0) -> JointTable:
    weights = torch.randn((vocabulary,) * length, generator=torch.Generator().manual_seed(seed)).double()
    return JointTable((peaked * weights).exp())


@pytest.fixture(scope="module")
def sudoku() -> SudokuModel:
    return load_model("strong")


@pytest.fixture(scope="module")
def puzzles() -> Tensor:
    return torch.from_numpy(validation_puzzles().givens[:3]).long()


def nearly_solved(puzzles: Tensor, blanks: int) -> Tensor:
    """The puzzles with only their first blanks left open."""
    solutions = torch.from_numpy(validation_puzzles().solutions[: len(puzzles)]).long()
    masked = puzzles == 0
    return solutions.masked_fill(masked & (masked.cumsum(1) <= blanks), 0)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_information_of_an_enumerated_joint(form: Form) -> None:
    model = random_table(4, 3)
    tokens = torch.tensor([[3, 3, 3, 3], [3, 1, 3, 3], [3, 1, 0, 3], [2, 1, 0, 3], [2, 1, 0, 2]])
    labels = label_mi(model, tokens, form=form)
    for row, sequence in enumerate(tokens):
        # float32 results; sums of a few terms below ln 3
        torch.testing.assert_close(labels.mi[row].double(), model.mutual_information(sequence), rtol=0, atol=1e-6)
        for i, token in enumerate(sequence.tolist()):
            expected = model.entropy(sequence, (i,)) if token == 3 else 0.0
            assert float(labels.entropy[row, i]) == pytest.approx(expected, abs=1e-6)
    assert labels.mi.dtype == labels.entropy.dtype == labels.bound.dtype == torch.float32
    assert labels.bound.abs().max() == 0
    assert labels.asymmetry.max() < 1e-6
    assert labels.passes.tolist() == [1 + 4 * 3, 1 + 3 * 3, 1 + 2 * 3, 1 + 3, 1]


@pytest.mark.parametrize("form", FORMS)
def test_two_bits_by_hand(form: Form) -> None:
    # H(.5, .5) + H(.6, .4) - H(.4, .1, .2, .3) = 0.693147 + 0.673012 - 1.279854
    model = JointTable(torch.tensor([[0.4, 0.1], [0.2, 0.3]]))
    labels = label_mi(model, torch.tensor([2, 2]), form=form)
    torch.testing.assert_close(labels.mi, torch.tensor([[0, 0.086305], [0.086305, 0]]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_no_pair_of_an_xor_triple_shows_its_total_correlation(form: Form) -> None:
    model, tokens = xor_triple(), torch.tensor([2, 2, 2])
    assert label_mi(model, tokens, form=form).mi.abs().max() < 1e-6
    assert model.total_correlation(tokens, (0, 1, 2)) == pytest.approx(LN2)
    given = label_mi(model, torch.tensor([2, 2, 0]), form=form).mi
    torch.testing.assert_close(given[:2, :2], LN2 * (1 - torch.eye(2)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "forward"),
    [
        # H(.8, .2) - (H(.9, .1) + H(.7, .3)) / 2 = 0.500402 - 0.467974
        ("joint", 0.032429),
        # H(.95, .05) - 0.467974 = 0.198515 - 0.467974: the model grows less sure
        ("entropy", -0.269459),
        # (KL(.9 .1 | .95 .05) + KL(.7 .3 | .95 .05)) / 2 = (0.020654 + 0.323757) / 2
        ("kl", 0.172206),
    ],
)
def test_the_forms_of_an_inconsistent_model_by_hand(form: Form, forward: float) -> None:
    labels = label_mi(Scripted(INCONSISTENT), torch.tensor([[2, 2]]), form=form)
    # The first bit moves the second and not the other way round.
    torch.testing.assert_close(labels.mi[0, 0, 1], torch.tensor(forward / 2), rtol=0, atol=2e-6)
    assert labels.mi.equal(labels.mi.mT)
    assert float(labels.asymmetry) == pytest.approx(abs(forward), abs=2e-6)


def test_one_probing_run_tells_all_forms() -> None:
    probe = probe_mi(Scripted(INCONSISTENT), torch.tensor([[2, 2]]))
    assert tuple(probe.directed) == FORMS == get_args(Form)
    for form in FORMS:
        assert probe.directed[form][0, 1, 0] == pytest.approx(0, abs=1e-6)
        assert probe.labels(form).mi.equal(label_mi(Scripted(INCONSISTENT), torch.tensor([[2, 2]]), form=form).mi)


def test_a_value_that_only_a_probe_makes_possible_costs_infinitely_many_nats_in_kl_form() -> None:
    answers = INCONSISTENT | {(2, 2): [[0.5, 0.5], [1.0, 0.0]]}
    labels = label_mi(Scripted(answers), torch.tensor([2, 2]), form="kl")
    assert labels.mi.tolist() == [[0, math.inf], [math.inf, 0]]


def test_passes_are_counted_and_impossible_values_not_probed() -> None:
    model = JointTable(torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    finished: list[int] = []
    labels = label_mi(model, torch.tensor([[3, 3], [0, 3], [0, 2]]), batch_size=2, progress=finished.append)
    assert labels.passes.tolist() == [1 + 1 + 2, 1 + 2, 1]
    assert sum(finished) == int(labels.passes.sum())


def test_a_certain_position_is_probed_for_the_forms_that_see_a_drift() -> None:
    answers = INCONSISTENT | {(2, 2): [FIRST, [0.5, 0.5]]}
    # H(.5, .5) - H(.9, .1) = KL(.9 .1 | .5 .5) = 0.368064 one way; H(1, 0) - H(.5, .5) = -ln 2 the other
    assert label_mi(Scripted(answers), torch.tensor([2, 2]), form="joint").mi.abs().max() < 1e-6
    entropy = label_mi(Scripted(answers), torch.tensor([2, 2]), form="entropy").mi
    assert float(entropy[0, 1]) == pytest.approx((0.368064 - LN2) / 2, abs=1e-6)


@pytest.mark.parametrize("epsilon", [1e-4, 0.01, 0.05, 0.2, 0.7])
def test_what_is_left_out_errs_within_its_bound_on_exact_models(epsilon: float) -> None:
    saved = 0
    for seed in range(4):
        model = random_table(3, 6, peaked=3.0, seed=seed)
        tokens = torch.tensor([[6, 6, 6], [6, 6, 1], [6, 0, 6]])
        full, part = label_mi(model, tokens), label_mi(model, tokens, epsilon=epsilon)
        assert part.bound.max() <= epsilon
        assert ((part.mi - full.mi).abs() <= part.bound + 1e-6).all()  # 1e-6: float32 sums
        assert (part.passes <= full.passes).all()
        saved += int((full.passes - part.passes).sum())
    assert saved > 0 or epsilon < 0.05


def test_what_is_left_out_errs_within_its_bound_on_a_trained_model(sudoku: SudokuModel, puzzles: Tensor) -> None:
    tokens = nearly_solved(puzzles, 30)
    full = label_mi(sudoku, tokens)
    for epsilon in (0.005, 0.1):
        part = label_mi(sudoku, tokens, epsilon=epsilon)
        assert part.bound.max() <= epsilon
        assert ((part.mi - full.mi).abs() <= part.bound + 1e-6).all()
        assert part.entropy.equal(full.entropy)
        assert (part.passes < full.passes).all()


def test_labels_of_a_trained_model_are_symmetric_bounded_and_zero_elsewhere(
    sudoku: SudokuModel, puzzles: Tensor
) -> None:
    tokens = nearly_solved(puzzles, 12)
    probe = probe_mi(sudoku, tokens)
    pairs = masked_pairs(tokens == 0)
    for form in FORMS:
        labels = probe.labels(form)
        assert labels.mi.equal(labels.mi.mT)
        assert not labels.mi[~pairs].any()
        assert (labels.asymmetry > 0).all()
    assert (probe.directed["joint"] >= 0).all()
    assert (probe.directed["kl"] >= 0).all()
    # I(X_i; X_j) <= H(X_i), of the row's own marginal
    assert (probe.directed["joint"] <= probe.entropy.unsqueeze(-1) + 1e-6).all()


@pytest.mark.parametrize("form", FORMS)
def test_labels_do_not_depend_on_batches_or_mates(sudoku: SudokuModel, puzzles: Tensor, form: Form) -> None:
    tokens = nearly_solved(puzzles, 6)
    tokens[1] = nearly_solved(puzzles, 11)[1]
    together = label_mi(sudoku, tokens, form=form)
    for batch_size in (1, 7):
        for whole, part in zip(together, label_mi(sudoku, tokens, form=form, batch_size=batch_size), strict=True):
            assert whole.equal(part)
    for row, sequence in enumerate(tokens):
        for whole, alone in zip(together, label_mi(sudoku, sequence, form=form), strict=True):
            assert whole[row].equal(alone)


def test_a_mask_hides_what_stands_there() -> None:
    model, tokens = random_table(3, 3), torch.tensor([[0, 1, 2], [0, 1, 2]])
    mask = torch.tensor([[True, False, True], [False, True, True]])
    before = tokens.clone()
    given, placed = label_mi(model, tokens, mask), label_mi(model, tokens.masked_fill(mask, 3))
    for a, b in zip(given, placed, strict=True):
        assert a.equal(b)
    alone = label_mi(model, tokens[1], mask[1])
    assert alone.mi.equal(given.mi[1])
    assert alone.passes.shape == ()
    assert tokens.equal(before)


def test_masked_pairs_need_two_masked_ends() -> None:
    pairs = masked_pairs(torch.tensor([True, False, True]))
    assert pairs.nonzero().tolist() == [[0, 2], [2, 0]]


def test_padding_is_neither_probed_nor_labelled() -> None:
    model = random_table(3, 3)
    short = JointTable(model.joint.sum(1))
    visible = torch.tensor([True, False, True])
    for padding in range(4):
        padded = label_mi(model, torch.tensor([3, padding, 3]), attention_mask=visible)
        expected = label_mi(short, torch.tensor([3, 3]))
        torch.testing.assert_close(padded.mi[::2, ::2], expected.mi)
        assert not padded.mi[1].any()
        assert padded.passes == expected.passes


def test_no_sequences_give_no_labels() -> None:
    labels = label_mi(random_table(3, 2), torch.zeros(0, 3, dtype=torch.int64))
    assert [tuple(field.shape) for field in labels] == [(0, 3, 3), (0, 3), (0, 3, 3), (0,), (0,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "total"}, "form must be one of joint, entropy, kl"),
        ({"epsilon": 0.1, "form": "kl"}, "epsilon > 0 needs form='joint'"),
        ({"epsilon": -0.1}, "epsilon must be >= 0"),
        ({"epsilon": math.nan}, "epsilon must be >= 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"tokens": torch.full((1, 1, 3), 2)}, "tokens must be .B, N. int64, got shape .1, 1, 3."),
        ({"tokens": torch.full((1, 3), 2.0)}, "tokens must be"),
        ({"tokens": torch.full((1, 3), 2, dtype=torch.int32)}, "tokens must be"),
        ({"mask": torch.ones(1, 2, dtype=torch.bool)}, "mask must be .1, 3. bool"),
        ({"mask": torch.ones(1, 3)}, "mask must be"),
        ({"attention_mask": torch.ones(1, 3, dtype=torch.int64)}, "attention_mask must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"tokens": torch.full((1, 3), 2), "mask": None} | change
    with pytest.raises(ValueError, match=message):
        label_mi(random_table(3, 2), arguments.pop("tokens"), arguments.pop("mask"), **arguments)


@pytest.mark.parametrize("state", [(2, 2), (1, 2)], ids=["unprobed", "probed"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_answers_nan_is_refused(state: tuple[int, int], form: Form) -> None:
    answers = INCONSISTENT | {state: [[0.5, 0.5], [math.nan, 0.5]]}
    with pytest.raises(ValueError, match=r"give no distribution .* sequence 1, position \d"):
        label_mi(Scripted(answers | {(0, 1): [FIRST, SECOND]}), torch.tensor([[0, 1], [2, 2]]), form=form)


def test_nan_at_a_visible_position_is_no_error() -> None:
    answers = {(2, 0): [[0.5, 0.5], [math.nan, math.nan]]}
    answers |= {(token, 0): [[0.5, 0.5], [math.nan, math.nan]] for token in (0, 1)}
    for form in FORMS:
        labels = label_mi(Scripted(answers), torch.tensor([2, 0]), form=form)
        assert not labels.mi.any()


# --- on disk


def table_and_states() -> tuple[JointTable, Tensor]:
    model = random_table(3, 2)
    return model, torch.randint(0, 3, (10, 3), generator=torch.Generator().manual_seed(0))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_labels_come_back_as_they_were_made(tmp_path: Path) -> None:
    model, states = table_and_states()
    finished: list[int] = []
    passes = write_labels(model, states, tmp_path, form="kl", shard_size=4, progress=finished.append)
    expected = label_mi(model, states, form="kl")
    assert passes == int(expected.passes.sum())
    assert finished == [4, 4, 2]
    labels = read_labels(tmp_path, mask_token_id=2)
    assert labels.tokens.equal(states)
    assert labels.mask.equal(states == 2)
    assert labels.mi.equal(expected.mi)
    assert labels.entropy.equal(expected.entropy)


def test_a_finished_folder_costs_no_pass(tmp_path: Path) -> None:
    model, states = table_and_states()
    write_labels(model, states, tmp_path, shard_size=4, provenance={"sizes": (1, 2)})
    before, finished = contents(tmp_path), []
    again = write_labels(model, states, tmp_path, shard_size=4, provenance={"sizes": (1, 2)}, progress=finished.append)
    assert again == 0
    assert sum(finished) == len(states)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"form": "kl"}, "form"),
        ({"epsilon": 0.1}, "epsilon"),
        ({"shard_size": 5}, "shard_size"),
        ({"provenance": {"seed": 1}}, "provenance"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], name: str) -> None:
    model, states = table_and_states()
    write_labels(model, states, tmp_path, shard_size=4)
    with pytest.raises(ValueError, match=f"made with another {name};"):
        write_labels(model, states, tmp_path, **({"shard_size": 4} | change))


def test_other_states_are_refused(tmp_path: Path) -> None:
    model, states = table_and_states()
    write_labels(model, states, tmp_path, shard_size=4)
    for other in (states[:9], states.flip(0), states.where(torch.arange(3) != 1, 2)):
        with pytest.raises(ValueError, match=r"made with another (states|fingerprint)"):
            write_labels(model, other, tmp_path, shard_size=4)


def test_a_missing_shard_is_named_and_made_again(tmp_path: Path) -> None:
    model, states = table_and_states()
    write_labels(model, states, tmp_path, shard_size=4)
    before = contents(tmp_path)
    (tmp_path / "labels-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"labels-00001\.safetensors of 3 shards is missing"):
        read_labels(tmp_path, mask_token_id=2)
    assert write_labels(model, states, tmp_path, shard_size=4) == int(label_mi(model, states[4:8]).passes.sum())
    assert contents(tmp_path) == before


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    model, states = table_and_states()
    write_labels(model, states, tmp_path, shard_size=4)
    shard = tmp_path / "labels-00002.safetensors"
    whole = shard.read_bytes()
    for bad in (whole[:-5], b"", b"nonsense" * 10):
        shard.write_bytes(bad)
        with pytest.raises(ValueError, match=r"labels-00002\.safetensors: damaged"):
            read_labels(tmp_path, mask_token_id=2)


def test_shards_of_another_run_are_noticed(tmp_path: Path) -> None:
    model, states = table_and_states()
    write_labels(model, states, tmp_path / "a", shard_size=5)
    write_labels(model, states.flip(1), tmp_path / "b", shard_size=5)
    name = "labels-00001.safetensors"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(ValueError, match="other states"):
        read_labels(tmp_path / "a", mask_token_id=2)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"form": "joint"}', "\udcff"])
def test_a_damaged_index_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"labels\.json: damaged"):
        read_labels(tmp_path, mask_token_id=2)


def test_a_folder_without_labels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no labels"):
        read_labels(tmp_path, mask_token_id=2)


@pytest.mark.parametrize(
    "states", [torch.zeros(0, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3)]
)
def test_states_that_cannot_be_labelled_leave_no_folder(tmp_path: Path, states: Tensor) -> None:
    with pytest.raises(ValueError, match="tokens must be"):
        write_labels(random_table(3, 2), states, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_run_that_fails_leaves_whole_shards_only(tmp_path: Path) -> None:
    _, states = table_and_states()
    answers = {(a, b): [[0.5, 0.5], [0.5, 0.5]] for a in range(3) for b in range(3)}
    states = torch.tensor([[2, 2], [2, 0], [0, 2]])
    broken = Scripted(answers | {(0, 2): [[0.5, 0.5], [math.nan, 0.5]]})
    with pytest.raises(ValueError, match="no distribution"):
        write_labels(broken, states[1:], tmp_path, shard_size=1)
    assert sorted(contents(tmp_path)) == ["labels-00000.safetensors", "labels.json"]


_SLOW_RUN = """
import sys, time, torch
from mdmi_fast.labels import write_labels
from mdmi_fast.models.exact import JointTable

class Slow(JointTable):
    def __call__(self, tokens, attention_mask=None):
        time.sleep(0.02)
        return super().__call__(tokens, attention_mask)

states = torch.tensor({states})
write_labels(Slow(torch.tensor({joint})), states, sys.argv[1], shard_size=1, batch_size=2)
"""


def test_a_killed_run_is_finished_by_the_next_one_with_the_same_files(tmp_path: Path) -> None:
    weights = torch.arange(1, 9).view(2, 2, 2)
    states = torch.tensor([[2, 2, 2], [0, 2, 2], [2, 2, 1]]).repeat(20, 1)
    script = _SLOW_RUN.format(states=states.tolist(), joint=weights.tolist())
    root = str(Path(__file__).parents[1])
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, "-c", script, str(killed)], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (killed / "labels-00002.safetensors").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    done = len(list(killed.glob("labels-*.safetensors")))
    assert 3 <= done < len(states)
    (killed / ".labels-00004.safetensors.0123456789abcdef.safetensors").write_bytes(b"half")  # what a kill may leave

    model = JointTable(weights)
    rest = write_labels(model, states, killed, shard_size=1, batch_size=2)
    everything = write_labels(model, states, whole, shard_size=1, batch_size=2)
    assert 0 < rest < everything
    assert contents(killed) == contents(whole)
    assert json.loads((whole / "labels.json").read_text())["states"] == [60, 3]
