"""`mdmi-fast decode` and `mdmi-fast tune` at work: options of single lines, streams, interruptions, chosen policies."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mdmi_fast.cli import main
from mdmi_fast.models import MaskedOutput, load_model
from mdmi_fast.tasks.sudoku.puzzles import format_line, validation_puzzles

Run = Callable[..., tuple[int, str, str]]


class FourTokens:
    """Likes 1 best, then 2, 3, 0; 4 is the mask, and is liked most."""

    mask_token_id, vocab_size, hidden_size = 4, 5, 1

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        logits = torch.tensor([0.05, 0.4, 0.1, 0.07, 0.38]).log().expand(*tokens.shape, 5)
        return MaskedOutput(logits, torch.zeros(*tokens.shape, 1))


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command with that model where --model says "any"."""
    known = load_model
    monkeypatch.setattr("mdmi_fast.models.load_model", lambda name: FourTokens() if name == "any" else known(name))
    return run


def lines_of(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


DECODE = ("decode", "--model", "any", "--policy", "topk:1")


def test_a_line_may_set_options_for_itself(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    records = [
        {"tokens": [4, 4, 4]},
        {"tokens": [4, 4, 4], "options": {"suppressed": [1]}},
        {"tokens": [4, 4, 4], "options": {"allowed": {"1": [0], "2": [2, 3]}}},
        {"tokens": [4, 4, 4], "options": {"stop_tokens": [1]}},
        {"tokens": [4] * 30, "options": {"temperature": 1.0, "seed": 7, "gumbel": True}},
        {"tokens": [4] * 30, "options": {"temperature": 1, "top_k": 2, "top_p": 0.9}},
        {"tokens": [4] * 30, "options": {"seed": 7, "temperature": 1.0, "gumbel": True}},
        {"tokens": [4, 4], "options": {"block_size": 1, "verify": True, "remask_below": 0.9, "revisions": 2}},
    ]
    data.write_text(lines_of(*records))
    code, out, err = run(*DECODE, "--data", data, "--batch-size", 3)
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["tokens"] for row in found[:4]] == [[1, 1, 1], [2, 2, 2], [1, 0, 2], [1, 1, 1]]
    assert [row["passes"] for row in found[:4]] == [3, 3, 3, 1]
    assert found[4]["tokens"] == found[6]["tokens"]
    assert len(set(found[4]["tokens"])) > 1
    assert set(found[5]["tokens"]) == {1, 2}
    assert found[7]["passes"] == 6  # 2 each time, and all of it again twice
    assert [row.get("options") for row in found] == [record.get("options") for record in records]


def test_options_hold_for_lines_that_do_not_set_them(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(lines_of({"tokens": [4, 4]}, {"tokens": [4, 4], "options": {"suppressed": [2]}}))
    out = run(*DECODE, "--data", data, "--suppress", 1, 0)[1]
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == [[2, 2], [1, 1]]
    assert json.loads(run(*DECODE, "--data", data, "--stop", 1)[1].splitlines()[0])["passes"] == 1
    for option, value, told in (
        ("--top-p", 2, "must lie in (0, 1], got 2.0"),
        ("--top-p", 0, "must lie in (0, 1], got 0.0"),
        ("--remask-below", "nan", "must be a probability, got nan"),
        ("--seed", 2**63, "must be below 2^63"),
        ("--threads", 2**31, "must be below 2^31"),
        ("--stop", 5, "--stop must name tokens in 0..4, which any has, got 5"),
        ("--suppress", -1, "--suppress must name tokens in 0..4, which any has, got -1"),
    ):
        code, _, err = run(*DECODE, "--data", tmp_path / "not read", option, value)
        assert (code, told in err) == (2, True), err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (3, '"options" must be an object with some of temperature, top_k'),
        ({"heat": 1}, '"options" must be an object with some of temperature, top_k'),
        ({"temperature": "hot"}, "option 'temperature' cannot be 'hot'"),
        ({"top_k": True}, "option 'top_k' cannot be True"),
        ({"temperature": -1}, "option 'temperature' cannot be -1"),
        ({"block_size": 0}, "option 'block_size' cannot be 0"),
        ({"stop_tokens": [5]}, "option 'stop_tokens' must name tokens below 5"),
        ({"seed": 2**63}, "option 'seed' cannot be"),
        ({"allowed": {"x": [1]}}, "option 'allowed' cannot be"),
        ({"allowed": {"2": [1]}}, "option 'allowed' must name positions below 2 and tokens below 5"),
        ({"allowed": {"1": [5]}}, "option 'allowed' must name positions below 2"),
        ({"allowed": {"01": [1]}}, "option 'allowed' cannot be"),
        ({"allowed": {"1": []}}, "option 'allowed' leaves nothing to write at position 1"),
        ({"allowed": {"1": [4]}}, "option 'allowed' leaves nothing to write at position 1"),
        ({"allowed": {"0": [1]}, "suppressed": [1]}, "option 'allowed' leaves nothing to write at position 0"),
    ],
)
def test_options_that_make_no_sense_are_named_with_their_line(
    run: Run, tmp_path: Path, options: Any, message: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(lines_of({"tokens": [4]}, {"tokens": [4, 4], "options": options}))
    code, out, err = run(*DECODE, "--data", data)
    assert (code, out) == (1, "")
    assert err.startswith(f"{data}:2: {message}")


def test_a_chosen_policy_brings_its_options_unless_others_are_given(run: Run, tmp_path: Path) -> None:
    data, choice = tmp_path / "data.jsonl", tmp_path / "choice.json"
    data.write_text(lines_of({"tokens": [4]}))
    choice.write_text(json.dumps({"policy": "topk:1", "options": {"suppressed": [1]}}))
    decode = ("decode", "--model", "any", "--policy", choice, "--data", data)
    assert json.loads(run(*decode)[1])["tokens"] == [2]
    assert json.loads(run(*decode, "--suppress", 2)[1])["tokens"] == [1]


def hear_interruptions() -> None:
    """For a child whose parents a shell may have started in the background, deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_standard_input_is_decoded_as_it_comes() -> None:
    command = [
        sys.executable,
        "-m",
        "mdmi_fast",
        "decode",
        "--model",
        "sudoku",
        "--policy",
        "topk:81",
        "--batch-size",
        "1",
    ]
    line = json.dumps({"tokens": [0] * 81})
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interruptions,
    ) as decoding:
        assert decoding.stdin is not None
        assert decoding.stdout is not None
        for _ in range(3):  # an answer to each before the next is asked
            decoding.stdin.write(line + "\n")
            decoding.stdin.flush()
            assert json.loads(decoding.stdout.readline())["passes"] == 1
        decoding.send_signal(signal.SIGINT)
        out, err = decoding.communicate(timeout=60)
    assert (decoding.returncode, out, err) == (130, "", "mdmi-fast decode: interrupted\n")


def test_an_interruption_leaves_whole_lines_only() -> None:
    command = [
        sys.executable,
        "-m",
        "mdmi_fast",
        "decode",
        "--model",
        "sudoku",
        "--policy",
        "topk:9",
        "--batch-size",
        "1",
    ]
    source = "while True: print('{\"tokens\": [' + '0, ' * 80 + '0]}')"
    with (
        subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as endless,
        subprocess.Popen(
            command,
            stdin=endless.stdout,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_interruptions,
        ) as decoding,
    ):
        assert decoding.stdout is not None
        first = decoding.stdout.readline()
        decoding.send_signal(signal.SIGINT)
        rest, _ = decoding.communicate(timeout=60)
        endless.kill()
    assert decoding.returncode == 130
    for line in (first + rest).splitlines(keepends=True):
        assert line.endswith("\n")
        assert json.loads(line)["passes"] == 9


def test_streams_and_files_decode_alike(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = lines_of(*({"tokens": [4] * (1 + number % 3)} for number in range(7)), {"tokens": [1]})
    data, trace = tmp_path / "data.jsonl", tmp_path / "trace.jsonl"
    data.write_text(text)
    drawn = (*DECODE, "--temperature", 1, "--seed", 3, "--trace", trace)
    whole = run(*drawn, "--data", data)[1]
    story = trace.read_text()
    for size in (1, 2, 100):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert run(*drawn, "--batch-size", size)[1] == whole
        assert trace.read_text() == story
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert run(*drawn, "--batch-size", 2, "--limit", 3)[1] == "".join(whole.splitlines(keepends=True)[:3])
    monkeypatch.setattr(sys, "stdin", io.StringIO(text + "x\n"))
    code, out, err = run(*drawn, "--batch-size", 4)
    assert (code, out) == (1, whole)
    assert err.startswith("<stdin>:9: not JSON")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert run(*drawn)[2] == "<stdin>: holds no sequences\n"


# --- padding, and stop tokens, of a model as users have it

PAD, SEP = 0, 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT whose pad token also ends texts. It knows tokens 0 to 9, and likes 3 best."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    roles = {"pad_token_id": PAD, "eos_token_id": PAD, "cls_token_id": 2, "sep_token_id": SEP, "mask_token_id": 4}
    network = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **roles, vocab_size=10))
    with torch.no_grad():
        network.cls.predictions.bias[SEP] = 50.0
        network.cls.predictions.bias[PAD] = 3.0
    network.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_a_stop_token_ends_what_a_model_cannot_end_by_itself(run: Run, folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(lines_of({"tokens": [2, 5, 4, 4, 4, 4]}))
    decode = ("decode", "--model", f"hf:{folder}", "--policy", "topk:1", "--data", data)
    found = json.loads(run(*decode, "--stop", SEP)[1])
    assert (found["tokens"], found["passes"]) == ([2, 5, 3, 3, 3, 3], 1)
    assert SEP not in json.loads(run(*decode)[1])["tokens"]
    tune = ("tune", "--model", f"hf:{folder}", "--data", data, "--target", "2x", "--policies", "topk:2")
    code, out, err = run(*tune, "--stop", SEP)
    assert code == 0, err
    assert "0.0000 (0.0000..0.0000)" in out.splitlines()[1]  # it does like what it was permitted


def test_a_line_says_where_its_padding_is(run: Run, folder: Path, tmp_path: Path) -> None:
    data, bare = tmp_path / "data.jsonl", tmp_path / "bare.jsonl"
    text = [2, 5, 4, 4, 4, 7]
    ended = [*text, PAD]
    data.write_text(
        lines_of(
            {"tokens": [PAD, PAD, *text], "attention_mask": [0, 0, 1, 1, 1, 1, 1, 1]},
            {"tokens": [*text, PAD, PAD], "attention_mask": [True] * 6 + [False] * 2, "options": {"seed": 1}},
            {"tokens": ended, "attention_mask": [1] * 7},
            {"tokens": ended},
            {"tokens": text, "attention_mask": None},
        )
    )
    bare.write_text(
        lines_of({"tokens": text}, {"tokens": text, "options": {"seed": 1}}, {"tokens": ended}, {"tokens": ended})
    )
    decode = ("decode", "--model", f"hf:{folder}?forbidden_tokens=4", "--policy", "topk:1", "--temperature", 40)
    found = [json.loads(line) for line in run(*decode, "--data", data)[1].splitlines()]
    expected = [json.loads(line)["tokens"] for line in run(*decode, "--data", bare)[1].splitlines()]
    assert [row["tokens"] for row in found[:4]] == [
        [PAD, PAD, *expected[0]],
        [*expected[1], PAD, PAD],
        expected[2],
        expected[3],
    ]
    assert found[0]["attention_mask"] == [0, 0, 1, 1, 1, 1, 1, 1]  # a line keeps what it held


def test_every_command_that_reads_sequences_leaves_padding_out(folder: Path, tmp_path: Path) -> None:
    from mdmi_fast.labels import stream_labels
    from mdmi_fast.maps import MIMap

    data, bare = tmp_path / "data.jsonl", tmp_path / "bare.jsonl"
    text = [2, 5, 4, 4, 4, 7]
    data.write_text(lines_of({"tokens": [PAD, *text, PAD], "attention_mask": [0] + [1] * 6 + [0]}))
    bare.write_text(lines_of({"tokens": text}))
    model = ("--model", f"hf:{folder}")
    for source in (data, bare):
        assert main(["label", *model, "--data", str(source), "--out", str(tmp_path / source.stem)]) == 0
        chart = ["map", *model, "--data", str(source), "--probe", "--formats", "npz"]
        assert main([*chart, "--out", str(tmp_path / f"map-{source.stem}")]) == 0
    (here,), (there,) = (list(stream_labels(tmp_path / name)) for name in ("data", "bare"))
    assert here.tokens.tolist() == text
    assert here.mi["joint"].equal(there.mi["joint"])
    padded, plain = (MIMap.load(tmp_path / f"map-{name}.npz").mi for name in ("data", "bare"))
    assert padded[1:7, 1:7].equal(plain)
    assert not padded[0].any()
    assert not padded[7].any()


def test_tune_hides_the_padding_of_lines(run: Run, folder: Path, tmp_path: Path) -> None:
    data, bare = tmp_path / "data.jsonl", tmp_path / "bare.jsonl"
    texts = [[2, 5, 4, 4, 4, 7], [2, 4, 4, 7]]
    data.write_text(lines_of(*({"tokens": [*text, PAD], "attention_mask": [1] * len(text) + [0]} for text in texts)))
    bare.write_text(lines_of(*({"tokens": text} for text in texts)))
    tune = ("tune", "--model", f"hf:{folder}", "--target", "2x", "--policies", "topk:2", "--temperature", 1)
    rows = [
        [line.rpartition(" ")[0] for line in run(*tune, "--data", source)[1].splitlines()[1:3]]
        for source in (data, bare)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1], '"attention_mask" must be as long as "tokens", 3, got 1'),
        ([1, 1, 2], '"attention_mask" must be a list of 0 (padding) and 1, or of false and true'),
        ([1, 1, 1.0], '"attention_mask" must be a list of 0 (padding) and 1'),
        ("110", '"attention_mask" must be a list of 0 (padding) and 1'),
        (1, '"attention_mask" must be a list of 0 (padding) and 1'),
        ([1, 0, 1], '"attention_mask" must hide positions at the ends only, and not all of them'),
        ([0, 0, 0], '"attention_mask" must hide positions at the ends only, and not all of them'),
    ],
)
def test_an_attention_mask_that_no_line_can_have_is_named_with_it(
    run: Run, tmp_path: Path, mask: Any, message: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(lines_of({"tokens": [4]}, {"tokens": [4, 4, 1], "attention_mask": mask}))
    for command in ("decode", "tune", "label"):
        options = {"decode": (), "tune": ("--target", "2x"), "label": ("--out", tmp_path / "out")}[command]
        policy = ("--policy", "topk:1") if command == "decode" else ()
        code, out, err = run(command, "--model", "any", "--data", data, *policy, *options)
        assert (code, out) == (1, "")
        assert err.startswith(f"{data}:2: {message}")


# --- tune


def test_tune_saves_what_decode_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, choice = tmp_path / "puzzles.txt", tmp_path / "choice.json"
    boards = validation_puzzles()
    data.write_text(
        "".join(format_line(board) + "\n" for board in boards.solutions[:8] * (torch.rand(8, 81) > 0.2).numpy())
    )
    tune = [
        "tune",
        "--model",
        "sudoku",
        "--data",
        str(data),
        "--batch-size",
        "4",
        "--policies",
        "topk:4",
        "mi-budget:0.3",
    ]
    assert main([*tune, "--target", "at most 5% loss", "--out", str(choice)]) == 0
    out = capsys.readouterr().out
    for text in ("sequential ", "topk:4 ", "mi-budget:0.3 ", "frontier, ", "chosen: mi-budget:0.3", " loss (95%) "):
        assert text in out
    saved = json.loads(choice.read_text())
    assert saved["policy"] == "mi-budget:0.3"
    assert (saved["model"], saved["quality"], saved["target"]) == (
        "sudoku",
        "valid",
        {"speedup": None, "loss": 0.05, "unit": "share"},
    )
    decode = ["decode", "--model", "sudoku", "--data", str(data)]
    assert main([*decode, "--policy", str(choice)]) == 0
    by_file = capsys.readouterr().out
    assert main([*decode, "--policy", "mi-budget:0.3"]) == 0
    assert capsys.readouterr().out == by_file
    assert main([*tune, "--target", "81x"]) == 1
    assert "no policy meets the target" in capsys.readouterr().out


def test_tune_judges_by_the_model_or_by_known_answers(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(lines_of({"tokens": [4, 4, 0], "target": [1, 1, 0]}, {"tokens": [4, 0], "target": [3, 0]}))
    tune = ("tune", "--model", "any", "--data", data, "--target", "1.4x", "--policies", "topk:2")
    code, out, err = run(*tune)
    assert code == 0, err
    assert " nats a token (95%) " in out
    assert " loss, nats a token (95%) " in out
    assert f"{math.log(0.4):.4f}" in out.splitlines()[1]
    assert "0.5000" in run(*tune, "--quality", "accuracy")[1].splitlines()[1]
    right = {"tokens": [4, 4], "target": [1, 1]}
    for target in ([1], [1, 2.5], [1, True], "12"):
        data.write_text(lines_of(right, {"tokens": [4, 4], "target": target}))
        assert (
            run(*tune, "--quality", "accuracy")[2]
            == f'{data}:2: accuracy needs "target": [...] of integers, as many as "tokens", in every record\n'
        )
    for token in (-1, 5, 2**70):  # what cannot be written would be a mistake of every policy
        data.write_text(lines_of(right, {"tokens": [4, 4], "target": [1, token]}))
        code, out, err = run(*tune, "--quality", "accuracy")
        assert (code, out) == (1, "")
        assert err == f'{data}:2: "target" must hold tokens from 0 to 4 where "tokens" is masked, got {token}\n'
    unread = {"tokens": [0, 4, 4], "target": [2**70, 1, -100], "attention_mask": [1, 1, 0]}
    data.write_text(lines_of(right, unread))
    assert run(*tune, "--quality", "accuracy")[0] == 0
    data.write_text(lines_of({"tokens": [1, 1]}))
    assert run(*tune)[2] == f"{data}: holds no sequence with a masked position\n"


def test_tune_looks_for_settings_of_a_rule_and_names_those_on_one_side_only(run: Run, tmp_path: Path) -> None:
    """Every position has the same distribution, with confidence .4: a threshold takes one position or all of them."""
    data, choice = tmp_path / "data.jsonl", tmp_path / "choice.json"
    data.write_text(lines_of(*[{"tokens": [4] * 6}] * 4))
    tune = ("tune", "--model", "any", "--data", data, "--out", choice, "--policies", "topk", "confidence", "topk:2")
    code, out, err = run(*tune, "--target", "2x")
    assert code == 0, err
    rows = [line.split()[0] for line in out.split("\n\n")[0].splitlines()[2:]]
    assert rows[-1] == "topk:2"
    assert {"topk:1", "topk:2"} <= set(rows)
    assert sum(row.startswith("confidence:") for row in rows) == 2
    assert "on one side of the target only" not in out
    assert "warning" not in out
    assert json.loads(choice.read_text())["surely_meets_target"] is True
    code, out, _ = run(*tune, "--target", "7x")
    assert code == 1
    told = "topk: no setting reaches the target, the boldest takes 6.00 times fewer passes"
    assert told in out.split("on one side of the target only:\n")[1]
    for rule, reason in (("entropy-limit", "no policy of that name"), ("topk,limit=2", "no option 'limit'")):
        code, _, err = run(*tune[:-3], rule, "--target", "2x")
        assert code == 2
        assert reason in err


def test_a_choice_that_may_miss_the_target_is_given_with_a_warning(run: Run, tmp_path: Path) -> None:
    data, choice = tmp_path / "data.jsonl", tmp_path / "choice.json"
    data.write_text(lines_of({"tokens": [4] * 8}, {"tokens": [4] * 2}))
    tune = ("tune", "--model", "any", "--data", data, "--out", choice, "--policies", "topk:4", "--target")
    out = run(*tune, "3x")[1]
    assert (
        "chosen: topk:4\nwarning: it may take only 2.00 times fewer passes, not 3 (95% interval); none of those" in out
    )
    assert json.loads(choice.read_text())["surely_meets_target"] is False
    # All of the first sequence in one pass, one at a time of the second; two of either are as fast as was asked for.
    data.write_text(lines_of({"tokens": [4] * 8}, {"tokens": [4, 4] + [0] * 30}))
    out = run(*tune[:-2], "entropy-bound:8..0", "topk:2", "--target", "2x")[1]
    assert "chosen: entropy-bound:8..0\nwarning: it may take only 1.00 times fewer passes, not 2 " in out
    assert "; topk:2 meets it for sure" in out
    records = [{"tokens": [4, 4], "target": [1, 1]}, {"tokens": [4, 4], "target": [2, 1]}]
    data.write_text(lines_of(*records * 4))
    drawn = ("--quality", "accuracy", "--temperature", 1)
    out = run(*tune, "100%", *drawn)[1]
    assert "warning" not in out
    data.write_text(lines_of({"tokens": [4, 4]}))
    assert "warning: it was measured on one sequence" in run(*tune, "5 nats")[1]
    for target, quality, unit in (("1%", (), "nats a token"), ("1 nats", drawn, "share")):
        code, _, err = run(*tune, target, *quality)
        assert code == 2
        assert f"is in {unit}: write such as 'at most " in err


def test_what_tune_and_decode_cannot_use_is_said(run: Run, tmp_path: Path) -> None:
    tune = ("tune", "--model", "any", "--data", tmp_path / "x", "--policies", "topk:2")
    assert "target must be such as" in run(*tune, "--target", "fast")[2]
    code, _, err = run(*tune, "--target", "4x", "--out", tmp_path / "choice.txt")
    assert code == 2
    assert "must end in .json" in err
    bad = tmp_path / "choice.json"
    assert f"argument --policy: {bad}: No such file or directory" in run("decode", "--model", "any", "--policy", bad)[2]
    bad.write_text('{"policy": "topk:0"}')
    assert "k must be an integer of at least 1" in run("decode", "--model", "any", "--policy", bad)[2]
    bad.write_text("{}")
    assert 'expected an object with a "policy"' in run("decode", "--model", "any", "--policy", bad)[2]
