"""The command line: what goes in, what comes out, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file
from torch import Tensor

import mdmi_fast
from mdmi_fast.cli import COMMANDS, _options, _progress, main
from mdmi_fast.decoding import policy_forms
from mdmi_fast.estimator import PairScorer, load_estimator
from mdmi_fast.labels import FORMS
from mdmi_fast.maps import MIMap
from mdmi_fast.models import MaskedOutput, load_model
from mdmi_fast.models.identity import identity
from mdmi_fast.tasks.sudoku.puzzles import format_line, is_valid_board, random_boards, random_clues, test_puzzles

PUZZLES = test_puzzles()
EASY = [format_line(board) for board in random_clues(random_boards(3, seed=5), 70, seed=5)]
"""Eleven blanks each: many solutions are unlikely, a few passes are enough, probing is cheap."""
EMPTY = "." * 81

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """--threads is meant for a process; here many commands share one."""
    before, ours = torch.get_num_threads(), mdmi_fast._threads._threads
    yield
    torch.set_num_threads(before)
    mdmi_fast._threads._threads = ours


@pytest.fixture
def easy(tmp_path: Path) -> Path:
    path = tmp_path / "easy.txt"
    path.write_text("\n".join(EASY) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with labels/ and estimator/, both made by the commands."""
    folder = tmp_path_factory.mktemp("trained")
    data = folder / "states.txt"
    states = random_clues(random_boards(12, seed=9), 60, seed=9)
    data.write_text("".join(format_line(state) + "\n" for state in states))
    made = ["label", "--model", "sudoku", "--data", data, "--out", folder / "labels", "--shard-size", 5]
    assert main([str(argument) for argument in made]) == 0
    fitted = ["train", "--labels", folder / "labels", "--model", "sudoku", "--out", folder / "estimator", "--epochs", 2]
    assert main([str(argument) for argument in fitted]) == 0
    return folder


def process(*arguments: object, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mdmi_fast", *map(str, arguments)],
        input=stdin,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


class TwoTokens:
    """A masked model of sequences of any length: the token of a masked position is 0 or 1, never 2; 3 masks."""

    mask_token_id, vocab_size, hidden_size = 3, 3, 2

    def __init__(self, answer: float = 0.0) -> None:
        self.answer = answer

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        logits = torch.tensor([self.answer, 0.5, -torch.inf]).expand(*tokens.shape, 3)
        return MaskedOutput(logits, torch.zeros(*tokens.shape, 2))


@pytest.fixture
def two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdmi_fast.models.load_model", lambda name: TwoTokens())


# --- help and usage


def test_help_lists_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in COMMANDS:
        assert f"    {command}" in out
    assert run("--version")[:2] == (0, f"mdmi-fast {mdmi_fast.__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"usage: mdmi-fast {command}" in out


def test_help_names_the_policies_and_forms_that_exist() -> None:
    forms = [line.split()[0] for line in _options.policies_text().splitlines()[1:] if not line.startswith("   ")]
    assert forms == policy_forms()
    assert _options.FORM_NAMES == FORMS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["solve"], "invalid choice: 'solve'"),
        (["sudoku", "--policy", "topk"], "policy 'topk': needs a value, topk:K"),
        (["sudoku", "--policy", "best:1"], "there are sequential, topk:K"),
        (["sudoku", "--threads", "0"], "must be at least 1, got 0"),
        (["sudoku", "--seed", "-1"], "must be at least 0, got -1"),
        (["sudoku", "--temperature", "inf"], "must be a finite number of at least 0, got inf"),
        (["sudoku", "--json", "--grid"], "not allowed with argument"),
        (["label", "--model", "sudoku", "--out", "x"], "one of the arguments --data --states is required"),
        (
            ["label", "--model", "hf:x", "--out", "x", "--states", "5"],
            "--states makes states for sapiens:heavy, sudoku, not for hf:x: give your own with --data",
        ),
        (["label", "--model", "sapiens:light", "--out", "x", "--states", "5"], "not for sapiens:light"),
        (["train", "--labels", "x", "--model", "sudoku?a=1"], "--out is needed: an estimator ships for sudoku?a=1"),
        (["label", "--model", "sudoku", "--out", "x", "--states", "5", "--limit", "2"], "takes no --limit"),
        (["label", "--model", "sudoku", "--out", "x", "--states", "5", "--mask", "uniform"], "and no --mask"),
        (["label", "--model", "sudoku", "--out", "x", "--data", "y", "--keep", "1"], "--keep belongs to --mask"),
        (["label", "--model", "sudoku", "--out", "x", "--data", "y", "--samples", "1"], "must be at least 2"),
        (["label", "--model", "sudoku", "--out", "x", "--data", "y", "--mask", "half"], "expected uniform, share:S"),
        (["label", "--model", "sudoku", "--out", "x", "--data", "y", "--mask", "share:2"], "share must lie in"),
        (["train", "--labels", "x", "--model", "sudoku", "--out", "y", "--held-out", "1"], "must lie between 0 and 1"),
        (["train", "--labels", "x", "--model", "sudoku", "--out", "y", "--layers", "4,x"], "--layers"),
        (
            ["train", "--labels", "x", "--model", "sudoku", "--out", "y", "--combine", "product"],
            "--combine belongs to --architecture general",
        ),
        (
            ["train", "--labels", "x", "--model", "sudoku", "--out", "y", "--weighted-layers", "2"],
            "--weighted-layers belongs to --architecture general",
        ),
        (
            ["train", "--labels", "x", "--model", "sudoku", "--out", "y", "--from", "z", "--layers", "4"],
            "--from brings its own architecture",
        ),
        (
            ["train", "--labels", "x", "--model", "sudoku", "--out", "y", "--old-labels", "z"],
            "--old-labels belongs to --from",
        ),
        (["map", "--model", "sudoku", "--data", "x", "--out", "y", "--form", "kl"], "--form belongs to --probe"),
        (
            ["map", "--model", "sudoku", "--data", "x", "--out", "y", "--formats", "gif"],
            "no format 'gif', there are npz",
        ),
        (["map", "--model", "sudoku", "--data", "x", "--out", "y", "--probe", "--estimator", "z"], "not allowed with"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_reason(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


# --- sudoku


def test_sudoku_prints_puzzle_solution_validity_and_passes(run: Run, easy: Path) -> None:
    code, out, err = run("sudoku", easy, "--policy", "sequential")
    header, *rows = out.splitlines()
    assert code == 0
    assert header.split() == ["puzzle", "solved", "valid", "passes"]
    for puzzle, row in zip(EASY, rows, strict=True):
        given, solved, valid, passes = row.split()
        assert (given, valid, passes) == (puzzle, "yes", "11")
        assert all(a in (".", b) for a, b in zip(given, solved, strict=True))
        assert bool(is_valid_board(np.array([int(digit) for digit in solved])))
    assert "3 of 3 valid, 11.0 passes a puzzle" in err


def test_sudoku_reads_standard_input_and_prints_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"# mine\n{EASY[0]}\n"))
    code, out, _ = run("sudoku", "-", "--json", "--policy", "topk:4")
    report = json.loads(out)
    assert code == 0
    assert (report["model"], report["policy"], report["solved"]) == ("strong", "topk:4", 1)
    (row,) = report["puzzles"]
    assert (row["puzzle"], row["valid"], row["passes"]) == (EASY[0], True, 3)
    assert len(row["solution"]) == 81


def test_sudoku_decodes_as_the_policy_of_a_file_was_chosen(run: Run, easy: Path, tmp_path: Path) -> None:
    choice = tmp_path / "choice.json"
    choice.write_text(json.dumps({"policy": "topk:81", "options": {"temperature": 0.0, "block_size": 27}}))

    def passes(*more: object) -> list[int]:
        report = json.loads(run("sudoku", easy, "--json", "--policy", choice, *more)[1])
        assert report.get("block_size") == (None if more else 27)
        return [row["passes"] for row in report["puzzles"]]

    assert min(passes()) > 1
    assert passes("--temperature", "0.5") == [1] * len(EASY)  # what is said here wins over the file


def test_sudoku_draws_grids(run: Run, easy: Path) -> None:
    code, out, _ = run("sudoku", easy, "--grid")
    assert code == 0
    assert out.count("------+-------+------    ------+-------+------") == 2 * len(EASY)
    assert out.startswith("puzzle 1: solved, ")


def test_sudoku_says_when_the_network_is_wrong(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "hard.txt"
    path.write_text(f"{EASY[0]}\n{format_line(PUZZLES.givens[0])}\n")
    everything_at_once = ("--policy", "topk:81", "--model", "weak")
    code, out, err = run("sudoku", path, *everything_at_once)
    assert code == 1
    assert [row.split()[2] for row in out.splitlines()[1:]] == ["yes", "NO"]
    assert "1 of 2 valid" in err
    assert "puzzle 2: NOT VALID" in run("sudoku", path, *everything_at_once, "--grid")[1]


def test_sudoku_samples_where_several_solutions_are_accepted(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(f"{EMPTY}\n{EMPTY}\n")
    code, _, err = run("sudoku", path)
    assert code == 1
    assert f"{path}:1: several solutions" in err
    sampled = ["sudoku", path, "--any-solution", "--temperature", 1, "--policy", "random:9", "--json"]
    boards = [
        [row["solution"] for row in json.loads(run(*sampled, "--seed", seed)[1])["puzzles"]] for seed in (1, 1, 2)
    ]
    assert boards[0] == boards[1]
    assert len({*boards[0], *boards[2]}) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"123\n", ":1: 81 cells expected, got 3"),
        (b"# good\n\xff\xfe\x00\n", ":2: "),
        (b"11" + b"." * 79 + b"\n", ":1: "),
        (b"", ": holds no puzzles"),
        (b"# nothing but a comment\n", ": holds no puzzles"),
    ],
)
def test_sudoku_names_file_line_and_reason(run: Run, tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    code, out, err = run("sudoku", path)
    assert (code, out) == (1, "")
    assert err.startswith(f"{path}{message}")
    assert err.count("\n") == 1


def test_sudoku_names_every_bad_line_of_standard_input() -> None:
    done = process("sudoku", stdin="12\n" + EASY[0] + "\nabc\n")
    assert done.returncode == 1
    assert [line.split(": ")[0] for line in done.stderr.splitlines()] == ["<stdin>:1", "<stdin>:3"]


# --- label, train, evaluate


def test_labels_are_those_of_the_library_and_a_second_run_finds_them(run: Run, tmp_path: Path, easy: Path) -> None:
    label = ("label", "--model", "sudoku", "--data", easy, "--out", tmp_path / "labels", "--shard-size", 2)
    code, out, _ = run(*label)
    assert code == 0
    assert out.startswith(f"3 states in {tmp_path / 'labels'}, form joint: ")
    assert ": 0 passes in this run" not in out
    model = mdmi_fast.load_model("sudoku")
    found = mdmi_fast.labels.read_labels(tmp_path / "labels", mask_token_id=0)
    assert [format_line(board) for board in found.tokens.numpy()] == EASY
    torch.testing.assert_close(found.mi, mdmi_fast.label_mi(model, found.tokens).mi, atol=1e-6, rtol=0)
    (tmp_path / "labels" / "labels-00001.safetensors").unlink()
    kept = load_file(tmp_path / "labels" / "labels-00000.safetensors")
    code, out, _ = run(*label)
    assert code == 0
    assert " passes in this run" in out
    assert torch.equal(load_file(tmp_path / "labels" / "labels-00000.safetensors")["mi.joint"], kept["mi.joint"])
    assert ": 0 passes in this run" in run(*label)[1]
    code, _, err = run(*label, "--form", "kl")
    assert code == 1
    assert "holds labels made with another forms" in err
    assert err.count("\n") == 1


def test_epsilon_saves_passes_and_limit_takes_the_first_states(run: Run, tmp_path: Path, easy: Path) -> None:
    def passes(name: str, *more: object) -> int:
        out = run("label", "--model", "sudoku", "--data", easy, "--out", tmp_path / name, *more)[1]
        return int(out.split(": ")[1].split()[0])

    exact = passes("exact")
    assert passes("rough", "--epsilon", 0.05) < exact
    assert 0 < passes("first", "--limit", 1) < exact


def test_states_as_met_while_decoding_are_made_from_the_seed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mdmi_fast.tasks.sudoku.states.training_boards", lambda: random_boards(20, seed=0))
    states = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        made = ("label", "--model", "sudoku", "--states", 2, "--out", tmp_path / name, "--epsilon", 3, "--seed", seed)
        assert run(*made)[0] == 0
        states.append(load_file(tmp_path / name / "labels-00000.safetensors")["tokens"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.usefixtures("two_tokens")
def test_label_takes_states_of_unequal_lengths_and_masks_sequences(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "states.jsonl"
    data.write_text('{"tokens": [3, 3]}\n{"tokens": [1, 3, 3]}\n')
    label = ("label", "--model", "any", "--data", data, "--out")
    assert run(*label, tmp_path / "states", "--form", "joint", "kl")[0] == 0
    states = list(mdmi_fast.labels.stream_labels(tmp_path / "states"))
    assert [state.tokens.tolist() for state in states] == [[3, 3], [1, 3, 3]]
    assert [state.pairs.tolist() for state in states] == [[[0, 1]], [[1, 2]]]
    assert set(states[0].mi) == {"joint", "kl"}
    code, _, err = run(*label, tmp_path / "masked", "--mask", "uniform")
    assert (code, err) == (1, f"{data}:1: --mask takes no mask token 3\n{data}:2: --mask takes no mask token 3\n")
    data.write_text('{"tokens": [0, 2]}\n{"tokens": [1, 0, 2]}\n')
    for mask in ("uniform", "share:0.5", "trajectory:entropy", "trajectory:random"):
        folder = tmp_path / mask.replace(":", "-")
        assert run(*label, folder, "--mask", mask, "--keep", 1, "--hidden", "--window", 1, "--samples", 2)[0] == 0
        states = list(mdmi_fast.labels.stream_labels(folder))
        assert int(states[1].tokens[0]) == 1
        assert all(len(state.positions) and state.hidden is not None for state in states)
    code, _, err = run("train", "--labels", tmp_path / "states", "--model", "any", "--out", tmp_path / "estimator")
    assert code == 1
    assert "labels must hold a masked pair to train on and two in the states held out, got 1" in err


def test_train_reports_every_epoch_and_evaluate_reads_what_it_saved(run: Run, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "estimator"
    train = ("train", "--labels", trained / "labels", "--model", "sudoku", "--out", out, "--seed", 4)
    code, text, _ = run(
        *train, "--architecture", "general", "--layers", "8,4", "--combine", "interaction", "--rank", 4, "--epochs", 2
    )
    assert code == 0
    epochs = [line.split()[0] for line in text.splitlines()[2:4]]
    assert epochs == ["0", "1"]
    config = json.loads((out / "estimator.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert "parameters (below the usual 50,000 to 500,000); 12 states" in text
    assert {"layers": [8, 4], "combine": "interaction", "rank": 4}.items() <= config["configuration"].items()
    assert config["trained_on"] == identity(load_model("sudoku"))
    assert config["provenance"].items() >= {"model": "sudoku", "form": "joint", "states": 12}.items()
    assert sorted(path.name for path in out.iterdir()) == ["estimator.json", "estimator.safetensors"]
    evaluate = ("evaluate", "--labels", trained / "labels", "--model", "sudoku", "--estimator", out, "--tau", 0.05)
    evaluate = (*evaluate, "--built", 2, "--all")
    code, text, _ = run(*evaluate, "--plot", tmp_path / "page.png")
    assert code == 0
    assert "Pearson r" in text
    assert "independent at 0.05 nats, precision" in text
    assert text.splitlines()[-1].startswith("retrain: Pearson r = ")
    assert imread(tmp_path / "page.png").std() > 0.05
    told = json.loads(run(*evaluate, "--json")[1])
    assert [*told["splits"]] == ["in distribution", "shifted", "adversarial"]
    assert told["verdict"] == text.splitlines()[-1]
    report = told["splits"]["in distribution"]["estimator"]
    assert report["tau"] == 0.05
    assert report["pairs"] == 12 * 21 * 20 // 2
    assert f"{report['pearson']:.3f}" in text


def test_a_table_of_distances_is_made_and_decodes_by_command(
    run: Run, trained: Path, tmp_path: Path, easy: Path
) -> None:
    out, model = tmp_path / "table", ("--model", "sudoku")
    train = ("train", "--labels", trained / "labels", *model, "--out", out, "--architecture", "table")
    code, text, _ = run(*train)
    assert code == 0
    assert f"{out}, on held-out states:" in text
    assert isinstance(mdmi_fast.load_estimator(out), mdmi_fast.DistanceTable)
    code, text, _ = run("decode", *model, "--data", easy, "--policy", "mi-budget:0.5", "--estimator", out)
    assert code == 0
    assert run(*train, "--distances", 4)[0] == 2
    assert run(*train, "--layers", 4)[0] == 2
    assert run(*train[:-2], "--from", out)[0] == 2


def test_evaluate_leaves_out_the_states_that_the_estimator_was_trained_on(
    run: Run, trained: Path, tmp_path: Path
) -> None:
    out, labels, model = tmp_path / "estimator", ("--labels", trained / "labels"), ("--model", "sudoku")
    train = ("train", *labels, *model, "--out", out, "--layers", "8,4", "--held-out", 0.4, "--epochs", 2)
    assert run(*train)[0] == 0
    reached = json.loads((out / "estimator.json").read_text())["provenance"]["held_out"]
    evaluate = ("evaluate", *model, "--estimator", out, "--built", 0)
    text = run(*evaluate, *labels)[1]
    assert text.splitlines()[:4] == [
        "in distribution, joint form",
        "  5 states",
        "  7 more left out: the estimator was trained on them",
        "  5 of them were held out in training and chose the epoch, which favours it a little",
    ]
    assert "masked pairs" in text.splitlines()[6]
    told = json.loads(run(*evaluate, *labels, "--json")[1])["splits"]["in distribution"]["estimator"]
    assert told["states"] == {"judged": 5, "left_out": 7, "trained_on": 0, "held_out": 5, "complete": True}
    assert told["pearson"] == pytest.approx(reached["pearson"], abs=1e-9)  # in another order
    everything = run(*evaluate, *labels, "--all")[1]
    assert "  12 states\n  the estimator was trained on 7 of them: its figures are too good\n" in everything
    assert everything.splitlines()[-1].endswith("; trained on 7 of the 12 states judged")

    refined = ("train", *model, "--from", out, "--old-labels", trained / "labels", "--epochs", 1, "--held-out", 0.5)
    data, other = tmp_path / "states.txt", tmp_path / "other"
    data.write_text("".join(format_line(state) + "\n" for state in random_clues(random_boards(4, seed=9), 70, seed=9)))
    assert run("label", *model, "--data", data, "--out", other)[0] == 0
    assert run(*refined, "--labels", other, "--out", tmp_path / "refined")[0] == 0
    again = ("evaluate", *model, "--estimator", tmp_path / "refined", "--built", 0)
    code, _, err = run(*again, *labels)
    assert code == 2
    assert f"{trained / 'labels'}: the estimator was trained on all 12 states; label others, or judge" in err
    code, _, err = run(*again, "--labels", other, "--shifted", trained / "labels")
    assert code == 2
    assert f"{trained / 'labels'}: the estimator was trained on all 12 states" in err
    assert "  2 states\n  2 more left out" in run(*again, "--labels", other)[1]
    # Of what is left the other splits are built.
    assert "shifted, joint form\n  2 states\n" in run(*again[:-1], 24, "--labels", other)[1]


def test_evaluate_says_so_where_a_file_has_no_record(run: Run, trained: Path) -> None:
    shipped = ("evaluate", "--model", "sudoku", "--estimator", "sudoku", "--built", 0, "--labels", trained / "labels")
    assert "  12 states\n  its file does not record all it was trained on: " in run(*shipped)[1]
    assert json.loads(run(*shipped, "--json")[1])["splits"]["in distribution"]["estimator"]["states"] == {
        "judged": 12,
        "left_out": 0,
        "trained_on": 0,
        "held_out": 0,
        "complete": False,
    }


def test_evaluate_takes_a_shifted_set_and_can_do_without_built_ones(run: Run, trained: Path) -> None:
    evaluate = ("evaluate", "--labels", trained / "labels", "--model", "sudoku", "--estimator", "sudoku", "--json")
    alone = json.loads(run(*evaluate, "--built", 0)[1])
    assert [*alone["splits"]] == ["in distribution"]
    assert alone["form"] == "joint"
    assert "holds the forms joint, got form='kl'" in run(*evaluate, "--form", "kl")[2]
    given = json.loads(run(*evaluate, "--built", 2, "--shifted", trained / "labels")[1])
    assert [*given["splits"]] == ["in distribution", "shifted", "adversarial"]
    both = (given["splits"]["shifted"]["estimator"], alone["splits"]["in distribution"]["estimator"])
    assert both[0]["pearson"] == both[1]["pearson"]
    assert both[0]["by_tau"] == both[1]["by_tau"]


def test_labels_and_estimators_of_another_model_are_refused(run: Run, trained: Path, tmp_path: Path) -> None:
    data = tmp_path / "states.txt"
    data.write_text("".join(format_line(state) + "\n" for state in random_clues(random_boards(2, seed=9), 70, seed=9)))
    weak = tmp_path / "weak"
    assert run("label", "--model", "sudoku:weak", "--data", data, "--out", weak)[0] == 0
    weights = [identity(load_model(name))["weights"] for name in ("sudoku", "sudoku:weak")]
    evaluate = ("evaluate", "--model", "sudoku:weak", "--built", 0, "--estimator", trained / "estimator", "--labels")
    for labels, reason in ((trained / "labels", "holds labels of another model"), (weak, "was trained on a model of")):
        code, _, err = run(*evaluate, labels)
        assert code == 1
        assert reason in err
        assert all(digest in err for digest in weights)
    assert run(*evaluate, weak, "--moved-model")[0] == 0
    train = ("train", "--labels", trained / "labels", "--model", "sudoku:weak", "--out", tmp_path / "x")
    assert "holds labels of another model" in run(*train)[2]


def test_train_refines_with_old_labels_mixed_in(run: Run, trained: Path, tmp_path: Path) -> None:
    train = ("train", "--labels", trained / "labels", "--model", "sudoku", "--out", tmp_path / "refined")
    code, text, _ = run(*train, "--from", "sudoku:weak", "--old-labels", trained / "labels", "--epochs", 1)
    assert code == 0
    assert "features 10" in text  # of the shipped one
    config = json.loads((tmp_path / "refined" / "estimator.json").read_text())
    assert config["trained_on"] == identity(load_model("sudoku"))
    assert config["provenance"]["refined_from"] == "sudoku:weak"


def test_an_estimator_is_judged_by_the_form_it_was_trained_on(
    run: Run, tmp_path: Path, trained: Path, easy: Path
) -> None:
    both, only = tmp_path / "both", tmp_path / "only"
    for folder, forms in ((both, ("entropy", "joint")), (only, ("entropy",))):
        assert run("label", "--model", "sudoku", "--data", easy, "--out", folder, "--form", *forms)[0] == 0
    evaluate = ("evaluate", "--model", "sudoku", "--estimator", trained / "estimator", "--built", 0, "--labels")
    assert run(*evaluate, both)[1].startswith("in distribution, joint form\n")
    train = ("train", "--model", "sudoku", "--from", trained / "estimator", "--out", tmp_path / "x", "--labels")
    for command in (evaluate, train):
        code, _, err = run(*command, only)
        assert code == 2
        assert f"{only} holds the forms entropy, the estimator was trained on joint: name one with --form" in err
    text = run(*evaluate, only, "--form", "entropy")[1]
    assert text.startswith("in distribution, entropy form (the estimator was trained on the joint form)\n")
    told = json.loads(run(*evaluate, only, "--form", "entropy", "--json")[1])
    assert (told["form"], told["trained_form"]) == ("entropy", "joint")


def test_train_finds_out_early_where_it_cannot_run_or_write(run: Run, trained: Path, tmp_path: Path) -> None:
    train = ("train", "--labels", trained / "labels", "--model", "sudoku")
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "folder"):
        code, text, err = run(*train, "--out", out)
        assert (code, text) == (1, "")
        assert err.startswith(f"mdmi-fast train: {out}: ")
    for device in ("nonsense", "cuda:99"):
        code, _, err = run(*train, "--out", tmp_path / "x", "--device", device)
        assert code == 2
        assert err.startswith(f"mdmi-fast train: --device {device}: ")
        assert err.count("\n") == 1


@pytest.mark.usefixtures("two_tokens")
def test_an_estimator_trained_without_a_folder_is_found_by_the_name_of_its_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDMI_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "states.jsonl"
    data.write_text('{"tokens": [3, 0, 3, 3]}\n{"tokens": [3, 1, 3, 3]}\n' * 4)
    labels, model = tmp_path / "labels", ("--model", "hf:some/thing?batch_invariant=false")
    assert run("label", *model, "--data", data, "--out", labels)[0] == 0
    (tmp_path / "cache" / "estimators" / "hf%3Asome%2Fthing").mkdir(parents=True)  # of a training that has not ended
    assert "none was trained here" in run("evaluate", *model, "--labels", labels)[2]
    code, out, err = run("train", *model, "--labels", labels, "--epochs", 1, "--held-out", 0.5, "--layers", 4)
    assert code == 0, err
    assert str(tmp_path / "cache" / "estimators" / "hf%3Asome%2Fthing") in out
    decode = ("decode", "--model", "hf:some/thing", "--data", data, "--policy", "mi-budget:1")
    assert run(*decode)[0] == 0
    assert load_estimator("hf:some/thing").trained_on is not None


@pytest.mark.arithmetic
def test_a_killed_training_goes_on_when_the_command_is_given_again(run: Run, trained: Path, tmp_path: Path) -> None:
    train = ("train", "--labels", trained / "labels", "--model", "sudoku", "--epochs", 9, "--patience", 9)
    killed = subprocess.Popen(
        [sys.executable, "-m", "mdmi_fast", *map(str, train), "--out", str(tmp_path / "a")], stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while not (tmp_path / "a" / "checkpoint.pt").exists() and killed.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    code, text, _ = run(*train, "--out", tmp_path / "a")
    assert code == 0
    assert "going on from" in text
    assert run(*train, "--out", tmp_path / "b")[0] == 0
    for name in ("estimator.json", "estimator.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_seed_decides_what_is_trained(run: Run, trained: Path, tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train = ("train", "--labels", trained / "labels", "--model", "sudoku", "--out", tmp_path / name)
        assert run(*train, "--epochs", 1, "--seed", seed)[0] == 0
        weights.append(load_file(tmp_path / name / "estimator.safetensors")["same_unit"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_missing_labels_are_named(run: Run, tmp_path: Path, command: str) -> None:
    more = ("--out", tmp_path / "x") if command == "train" else ()
    code, _, err = run(command, "--labels", tmp_path / "none", "--model", "sudoku", *more)
    assert code == 1
    assert err == f"mdmi-fast {command}: {tmp_path / 'none'}: holds no labels (labels.json is missing)\n"


@pytest.mark.arithmetic
def test_two_processes_train_what_one_trains(
    run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under torchrun, which sets these variables. Of 11 states in batches of 3 every batch leaves one process idle."""
    train = ("train", "--labels", trained / "labels", "--model", "sudoku", "--epochs", 2, "--batch-size", 3, "--out")
    assert run(*train, tmp_path / "alone")[0] == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    second = subprocess.Popen(
        [sys.executable, "-m", "mdmi_fast", *map(str, train), str(tmp_path / "both")],
        env={**os.environ, **group, "RANK": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    for name, value in {**group, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    code, text, _ = run(*train, tmp_path / "both")
    out, _ = second.communicate(timeout=60)
    assert (code, second.returncode) == (0, 0)
    assert text.splitlines()[2].split()[0] == "0"
    assert out == b""  # one process speaks
    for name in ("estimator.json", "estimator.safetensors"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "both" / name).read_bytes()


# --- decode


@pytest.mark.parametrize(
    "policy",
    ["sequential", "topk:4", "random:4", "confidence:0.9", "confidence-budget:0.1", "entropy-bound:0.2"],
)
def test_decode_fills_what_is_masked_with_every_baseline(run: Run, easy: Path, policy: str) -> None:
    code, out, err = run("decode", "--model", "sudoku", "--data", easy, "--policy", policy)
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["puzzle"] for row in rows] == EASY
    assert all(bool(is_valid_board(torch.tensor(row["tokens"]))) for row in rows)
    assert all(1 <= row["passes"] <= 11 for row in rows)
    assert "3 sequences" in err


@pytest.mark.parametrize(
    ("policy", "source"),
    [
        ("mi-budget:0.3", "FOLDER"),
        ("mi-budget:0.02,entropy_weight=0,order=cheapest,limit=3", "FOLDER"),
        ("mi-threshold:0.05", "FOLDER"),
        ("mi-budget:0.3", "probe"),
        ("mi-threshold:0.05", "probe:kl"),
    ],
)
def test_decode_takes_mutual_information_from_an_estimator_or_by_probing(
    run: Run, easy: Path, trained: Path, policy: str, source: str
) -> None:
    named = source.replace("FOLDER", str(trained / "estimator"))
    code, out, err = run("decode", "--model", "sudoku", "--data", easy, "--policy", policy, "--estimator", named)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert all(bool(is_valid_board(torch.tensor(row["tokens"]))) for row in rows)
    if "limit" in policy:
        assert all(row["passes"] >= 4 for row in rows)


def test_the_estimator_shipped_for_the_model_is_used_unless_told(
    run: Run, easy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def remember(name: str) -> PairScorer:
        asked.append(name)
        return load_estimator(name)

    with monkeypatch.context() as patched:
        patched.setattr("mdmi_fast.estimator.load_estimator", remember)
        budget = ("--policy", "mi-budget:0.3")
        for model in ("sudoku", "sudoku:weak"):
            assert run("decode", "--model", model, "--data", easy, *budget)[0] == 0
        assert run("sudoku", easy, "--model", "weak", *budget)[0] == 0
        assert run("decode", "--model", "sudoku", "--data", easy, "--policy", "topk:4")[0] == 0
    assert asked == ["sudoku", "sudoku:weak", "sudoku:weak"]
    assert run("decode", "--model", "sudoku", "--data", easy, *budget)[0] == 0


def test_a_source_that_does_not_exist_is_named(run: Run, easy: Path) -> None:
    decode = ("decode", "--model", "sudoku", "--data", easy, "--policy", "mi-budget:1", "--estimator")
    code, _, err = run(*decode, "probe:best")
    assert (code, err) == (2, "mdmi-fast decode: --estimator probe:best: the forms are joint, entropy, kl\n")
    code, _, err = run(*decode, "./none")
    assert code == 1
    assert "none" in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("two_tokens")
def test_decode_keeps_records_and_order_whatever_the_lengths(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "mixed.jsonl"
    records = [
        {"id": "a", "tokens": [3, 0, 3]},
        {"id": "b", "tokens": [3]},
        {"id": "c", "tokens": [2, 2]},
        {"id": "d", "tokens": [0, 3, 3], "note": {"x": [1]}},
    ]
    data.write_text("\n\n".join(map(json.dumps, records)))
    code, out, _ = run("decode", "--model", "any", "--data", data, "--policy", "topk:1")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {"id": "a", "tokens": [1, 0, 1], "passes": 2},
        {"id": "b", "tokens": [1], "passes": 1},
        {"id": "c", "tokens": [2, 2], "passes": 0},
        {"id": "d", "tokens": [0, 1, 1], "passes": 2, "note": {"x": [1]}},
    ]


@pytest.mark.usefixtures("two_tokens")
def test_what_is_drawn_depends_on_the_seed_and_not_on_the_batch(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "mixed.jsonl"
    data.write_text("".join(json.dumps({"tokens": [3] * (2 + n % 3)}) + "\n" for n in range(20)))
    decode = ("decode", "--model", "any", "--data", data, "--policy", "topk:1", "--temperature", 1)
    drawn = run(*decode, "--seed", 3)[1]
    assert run(*decode, "--seed", 3, "--batch-size", 2)[1] == drawn
    assert run(*decode, "--seed", 3, "--limit", 5)[1] == "".join(drawn.splitlines(keepends=True)[:5])
    assert run(*decode, "--seed", 4)[1] != drawn


def test_a_trace_replays_to_the_result(run: Run, tmp_path: Path, easy: Path) -> None:
    out, trace = tmp_path / "new" / "out.jsonl", tmp_path / "trace.jsonl"
    code, printed, _ = run(
        *("decode", "--model", "sudoku", "--data", easy, "--policy", "confidence-budget:0.01"),
        *("--batch-size", 2, "--out", out, "--trace", trace),
    )
    assert (code, printed) == (0, "")
    results = [json.loads(line) for line in out.read_text().splitlines()]
    boards = [[int(cell) for cell in puzzle.replace(".", "0")] for puzzle in EASY]
    passes = [0, 0, 0]
    for line in trace.read_text().splitlines():
        record = json.loads(line)
        board = boards[record["sequence"]]
        assert record["pass"] == passes[record["sequence"]]
        assert record["spent"] <= 0.01 or len(record["positions"]) == 1
        assert len(record["entropy"]) == len(record["positions"])
        for position, token in zip(record["positions"], record["tokens"], strict=True):
            assert board[position] == 0
            board[position] = token
        passes[record["sequence"]] += 1
    assert boards == [row["tokens"] for row in results]
    assert passes == [row["passes"] for row in results]


def test_a_run_that_fails_leaves_no_output_behind(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdmi_fast.models.load_model", lambda name: TwoTokens(answer=torch.nan))
    data, out = tmp_path / "data.jsonl", tmp_path / "results" / "out.jsonl"
    data.write_text('{"tokens": [3, 3]}\n')
    code, _, err = run("decode", "--model", "any", "--data", data, "--policy", "topk:1", "--out", out)
    assert code == 1
    assert err.startswith(f"{data}:1: decode: the model's logits at sequence 0, position 0 give no distribution")
    assert list(out.parent.iterdir()) == []


@pytest.mark.usefixtures("two_tokens")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[3, 3]", 'expected an object {"tokens": [...]} with at least one integer'),
        ("{}", 'expected an object {"tokens"'),
        ('{"tokens": []}', "at least one integer"),
        ('{"tokens": "12"}', "at least one integer"),
        ('{"tokens": [1, true]}', "true at position 1 is no token, which is an integer"),
        ('{"tokens": [1.0]}', "1.0 at position 0 is no token, which is an integer"),
        ('{"tokens": [1, "2"]}', '"2" at position 1 is no token, which is an integer'),
        ('{"tokens": [0, 4]}', "token 4 at position 1 is neither in 0..2 nor the mask token 3"),
        ('{"tokens": [-1]}', "token -1 at position 0"),
        ('{"tokens": [99999999999999999999999]}', "token 99999999999999999999999 at position 0"),
        ('{"tokens": [1', "not JSON: Expecting ',' delimiter (character 14)"),
        ("[" * 100_000, "not JSON: "),
        ("\udcff", "not UTF-8: byte 1 is 0xff"),
        ('{"tokens": [1], "name": "caf\udce9"}', "not UTF-8: byte 29 is 0xe9"),
        ('{"tokens": [1], "score": NaN}', "NaN is no number of JSON"),
        ('{"tokens": [1], "score": [-Infinity]}', "-Infinity is no number of JSON"),
        ('{"tokens": [1], "score": 1e999}', "the number 1e999 is too large"),
        ('{"tokens": [1], "tokens": [2]}', "the key 'tokens' stands twice in one object"),
        ('{"tokens": [1], "note": {"a": 1, "b": 2, "a": 3}}', "the key 'a' stands twice in one object"),
    ],
)
def test_lines_that_hold_no_sequence_are_named(run: Run, tmp_path: Path, line: str, message: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(b'{"tokens": [3]}\n' + line.encode(errors="surrogateescape") + b"\n")
    code, out, err = run("decode", "--model", "any", "--data", data, "--policy", "topk:1")
    assert (code, out) == (1, "")
    assert err.startswith(f"{data}:2: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("two_tokens")
def test_a_file_of_nothing_but_errors_is_cut_short(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("x\n" * 50)
    assert run("decode", "--model", "any", "--data", data, "--policy", "topk:1")[2].count("\n") == 20
    data.write_text("\n")
    assert run("decode", "--model", "any", "--data", data, "--policy", "topk:1")[2] == f"{data}: holds no sequences\n"


def test_sudoku_models_take_json_lines_too(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"tokens": [int(cell) for cell in EASY[0].replace(".", "0")]}))
    code, out, _ = run("decode", "--model", "sudoku:weak", "--data", data, "--policy", "sequential")
    assert code == 0
    assert bool(is_valid_board(torch.tensor(json.loads(out)["tokens"])))


# --- map


def test_map_writes_arrays_graph_and_picture_that_agree(run: Run, tmp_path: Path, easy: Path) -> None:
    prefix = tmp_path / "maps" / "b.1"
    probe = ("map", "--model", "sudoku", "--data", easy, "--index", 1, "--probe", "--form", "kl", "--tau", 0.05)
    code, out, _ = run(*probe, "--out", prefix, "--top", 3)
    assert code == 0
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["b.1.graphml", "b.1.npz", "b.1.png"]
    found = MIMap.load(f"{prefix}.npz")
    assert format_line(found.tokens.numpy()) == EASY[1]
    assert found.source == "probed, kl form"
    assert found.labels[:10] == (*(f"r1c{column}" for column in range(1, 10)), "r2c1")
    model = mdmi_fast.load_model("sudoku")
    torch.testing.assert_close(found.mi, mdmi_fast.label_mi(model, found.tokens, form="kl").mi, atol=1e-6, rtol=0)
    graph = networkx.read_graphml(f"{prefix}.graphml", node_type=int)
    assert sorted(graph.nodes) == found.mask.nonzero().squeeze(-1).tolist()
    dependent = {(pair.first, pair.second) for pair in found.pairs() if pair.mi >= 0.05}
    assert {tuple(sorted(edge)) for edge in graph.edges} == dependent
    assert imread(f"{prefix}.png").ndim == 3
    header, *rows = out.splitlines()
    assert header.split() == ["pair", "nats", "sharing", "a", "row,", "column", "or", "box"]
    assert rows[0].split()[0] == found.labels[found.pairs(limit=1)[0].first]
    assert rows[3] == ""
    assert f"{len(dependent)} dependent pairs at 0.05 nats" in out
    assert "structure: " in out


def test_map_of_an_estimator_in_the_formats_asked_for(run: Run, tmp_path: Path, easy: Path, trained: Path) -> None:
    predicted = ("map", "--model", "sudoku", "--data", easy, "--estimator", trained / "estimator")
    code, out, _ = run(*predicted, "--out", tmp_path / "p", "--formats", "npz", "--top", 0)
    assert code == 0
    assert [path.name for path in tmp_path.glob("p.*")] == ["p.npz"]
    assert "(predicted)" in out


@pytest.mark.usefixtures("two_tokens")
def test_map_of_a_model_without_a_known_structure(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"tokens": [3, 0, 3, 3]}\n')
    code, out, _ = run("map", "--model", "any", "--data", data, "--probe", "--out", tmp_path / "p")
    assert code == 0
    assert "structure" not in out
    assert "3 masked positions, 0 dependent pairs" in out
    code, _, err = run("map", "--model", "any", "--data", data, "--out", tmp_path / "p")
    assert code == 2
    assert err.startswith("mdmi-fast map: no estimator ships for any, and none was trained here: name one with --est")
    assert "`mdmi-fast label --model any` and `mdmi-fast train --model any`" in err


def test_map_writes_every_format_and_compares_with_another_map(
    run: Run, tmp_path: Path, easy: Path, trained: Path
) -> None:
    predicted = ("map", "--model", "sudoku", "--data", easy, "--estimator", trained / "estimator", "--top", 3)
    formats = "npz,graphml,dot,json,png,svg,html"
    code, out, _ = run(*predicted, "--out", tmp_path / "p", "--formats", formats, "--picture", "board", "--rate", 0.1)
    assert code == 0
    assert {path.suffix[1:] for path in tmp_path.glob("p.*")} == set(formats.split(","))
    assert "surprises at a false discovery rate of 0.1: " in out
    assert 0 < float(re.search(r"area under the ROC curve .*: (0\.\d+)", out)[1]) < 1
    code, out, _ = run(*predicted, "--out", tmp_path / "c", "--formats", "png", "--compare", tmp_path / "p.npz")
    assert code == 0
    assert "compared with p.npz (predicted): r = 1.0000, mean difference 0.0000 nats" in out
    code, _, err = run(*predicted[:2], "any", *predicted[3:], "--out", tmp_path / "c", "--picture", "board")
    assert (code, err) == (
        2,
        "mdmi-fast map: --picture board belongs to models of a task with a board, such as Sudoku\n",
    )


def test_map_names_an_index_that_is_not_there(run: Run, tmp_path: Path, easy: Path) -> None:
    code, _, err = run("map", "--model", "sudoku", "--data", easy, "--index", 3, "--probe", "--out", tmp_path / "p")
    assert (code, err) == (1, f"{easy}: holds 3 sequences, there is none of index 3\n")


@pytest.mark.parametrize("package", ["matplotlib", "networkx"])
def test_map_says_before_the_work_what_is_missing(
    run: Run, tmp_path: Path, easy: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = run("map", "--model", "sudoku", "--data", easy, "--probe", "--out", tmp_path / "p")
    assert code == 2
    assert f"needs {package}: pip install 'mdmi-fast[plot]'" in err
    assert (
        run("map", "--model", "sudoku", "--data", easy, "--probe", "--out", tmp_path / "p", "--formats", "npz")[0] == 0
    )


# --- info


def test_info_says_versions_instructions_threads_and_backends(run: Run) -> None:
    code, out, _ = run("info", "--threads", 1)
    assert code == 0
    for word in (mdmi_fast.__version__, torch.__version__, "processor", "1 torch, 1 C++", "ops on cpu"):
        assert word in out
    report = json.loads(run("info", "--json")[1])
    assert report["versions"]["torch"] == torch.__version__
    assert report["backends"]["cpu"]["entropy"]["torch"] == []
    assert report["backends"]["cpu"]["entropy"]["triton"]


def test_info_works_without_the_extension() -> None:
    code = "import sys; sys.modules['mdmi_fast._C'] = None\nfrom mdmi_fast.cli import main\nsys.exit(main(['info']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "not usable" in done.stdout
    assert "cpp: cannot be imported" in done.stdout


# --- what goes wrong


def test_library_errors_are_one_line_and_a_traceback_only_on_request(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = ("decode", "--model", "sudoku", "--data", tmp_path / "none", "--policy", "topk:1")
    assert run(*missing) == (1, "", f"mdmi-fast decode: {tmp_path / 'none'}: No such file or directory\n")
    assert run("sudoku", tmp_path) == (1, "", f"mdmi-fast sudoku: {tmp_path}: Is a directory\n")
    code, _, err = run("decode", "--model", "none", "--data", "x", "--policy", "topk:1")
    assert code == 1
    assert "nothing is registered as 'none'; known: " in err
    monkeypatch.setenv("MDMI_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        main([str(argument) for argument in missing])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            mdmi_fast.UnsupportedError(["cpp: no", "torch: no"], "entropy"),
            "entropy is not supported: cpp: no; torch: no",
        ),
        (ValueError("two\n  lines"), "two; lines"),
        (OSError("no disk"), "no disk"),
        (ImportError("pictures need matplotlib"), "pictures need matplotlib"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_errors_that_a_user_can_act_on_are_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    def fail(options: Any) -> int:
        raise error

    monkeypatch.setattr(import_module("mdmi_fast.cli.info"), "run", fail)
    assert run("info") == (1, "", f"mdmi-fast info: {line}\n")


def test_a_fault_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: Any) -> int:
        raise TypeError("a bug")

    monkeypatch.setattr(import_module("mdmi_fast.cli.info"), "run", fail)
    with pytest.raises(TypeError, match="a bug"):
        main(["info"])


def test_warnings_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(options: Any) -> int:
        warnings.simplefilter("always")
        warnings.warn("it is slower without the extension", stacklevel=1)
        return 0

    monkeypatch.setattr(import_module("mdmi_fast.cli.info"), "run", warn)
    assert run("info") == (0, "", "mdmi-fast: warning: it is slower without the extension\n")


def test_an_interrupt_ends_a_command_with_130_and_without_a_traceback(tmp_path: Path) -> None:
    data = tmp_path / "states.txt"
    data.write_text(f"{format_line(PUZZLES.givens[0])}\n" * 200)
    # A background job of a shell starts with interrupts ignored, and so would these tests.
    heeded = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heeded}; from mdmi_fast.cli import main; sys.exit(main())"]
    label = ["label", "--model", "sudoku", "--data", data, "--out", tmp_path / "l", "--shard-size", "1"]
    with subprocess.Popen([*command, *label], stderr=subprocess.PIPE, text=True) as labelling:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "l").glob("labels-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        labelling.send_signal(signal.SIGINT)
        _, err = labelling.communicate(timeout=60)
    assert labelling.returncode == 130
    assert err == "mdmi-fast label: interrupted\n"
    assert not list((tmp_path / "l").glob(".*")), "an unfinished file was left behind"


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    data = tmp_path / "many.txt"
    data.write_text(f"{EASY[0]}\n" * 500)
    decode = [sys.executable, "-m", "mdmi_fast", "decode", "--model", "sudoku", "--data", data, "--policy", "topk:11"]
    with subprocess.Popen(decode, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as decoding:
        assert decoding.stdout is not None
        assert decoding.stderr is not None
        assert json.loads(decoding.stdout.readline())["passes"] == 1
        decoding.stdout.close()
        err = decoding.stderr.read()
        assert decoding.wait(timeout=60) == 1
    assert err == ""


def test_threads_are_those_of_torch_and_of_the_extension(run: Run) -> None:
    assert run("info", "--threads", 1)[0] == 0
    assert (torch.get_num_threads(), mdmi_fast.get_num_threads()) == (1, 1)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(_Terminal(), True), (io.StringIO(), False)])
def test_progress_shows_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with _progress.bar(total=3, unit="state", description="labelling") as progress:
        progress.update(3)
    assert ("labelling" in stream.getvalue()) == shown
