"""The command line and its files: outputs are refused before the work, bad inputs are named, nothing ends in a traceback."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mdmi_fast import PairwiseMIEstimator, TopK, ops
from mdmi_fast.estimator import load_estimator, train_estimator
from mdmi_fast.estimator.data import read_examples
from mdmi_fast.labels import stream_labels, write_labels
from mdmi_fast.maps import MIMap, mi_map
from mdmi_fast.models.identity import identity
from mdmi_fast.models.sequences import SequenceModel
from mdmi_fast.watch.guard import Guard

Run = Callable[..., tuple[int, str, str]]
PAD, MASK = 0, 4


class Padded(SequenceModel):
    """Likes 1 best, knows padding and a longest length, and answers NaN to a sequence that begins with 3."""

    def __init__(self) -> None:
        super().__init__(
            vocab_size=5, hidden_size=3, mask_token_id=MASK, pad_token_id=PAD, forbidden_tokens=[PAD], max_length=6
        )
        self.calls: list[Tensor] = []

    def run(self, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        self.calls.append(tokens)
        logits = torch.tensor([0.1, 0.4, 0.3, 0.2, 0.0]).expand(*tokens.shape, 5).contiguous()
        place = torch.linspace(0, 1, tokens.shape[1]).expand(tokens.shape)
        hidden = torch.stack([place, tokens / 5, place.square()], dim=-1)
        return logits.masked_fill((tokens[:, :1] == 3).unsqueeze(-1), torch.nan), hidden


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Padded:
    found = Padded()
    monkeypatch.setattr("mdmi_fast.models.load_model", lambda name: found)
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"tokens": [1, 4, 4, 4]}\n' * 8)
    return path


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def process(*arguments: object, redirect: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of a shell, with the redirections that only a shell can write."""
    command = f'exec "$0" -m mdmi_fast "$@" {redirect}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


DECODE = ("decode", "--model", "any", "--policy", "topk:1")


# --- outputs


def commands(out: Path) -> dict[str, tuple[object, ...]]:
    """Every command that writes a file, whose inputs do not exist: what is said comes before they are looked at."""
    none = "no such input"
    return {
        "decode": (*DECODE, "--data", none, "--out", out),
        "decode --trace": (*DECODE, "--data", none, "--trace", out),
        "map": ("map", "--model", "any", "--data", none, "--out", out, "--formats", "npz"),
        "demo": ("demo", "--json", out),
        "evaluate": ("evaluate", "--model", "any", "--labels", none, "--plot", out),
        "tune": ("tune", "--model", "any", "--data", none, "--target", "2x", "--out", out),
    }


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("name", commands(Path()))
def test_a_folder_as_output_is_refused_before_the_work(run: Run, tmp_path: Path, name: str) -> None:
    there = tmp_path / ("out.npz" if name == "map" else "out.json")
    there.mkdir()
    code, out, err = run(*commands(tmp_path / "out" if name == "map" else there)[name])
    assert (code, out) == (1, "")
    assert err == f"mdmi-fast {name.split()[0]}: {there}: is a folder, and a file is to be written there\n"


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("name", commands(Path()))
def test_a_folder_that_cannot_be_made_is_said_before_the_work(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "out.json"
    code, out, err = run(*commands(below)[name])
    assert (code, out) == (1, "")
    assert err.startswith(f"mdmi-fast {name.split()[0]}: {below}")
    assert "Not a directory" in err


@pytest.mark.parametrize(
    "command",
    [
        ("label", "--model", "any", "--data", "no such input"),
        ("train", "--model", "any", "--labels", "no such input"),
        ("bench",),
        ("demo",),
    ],
)
def test_a_file_as_folder_of_the_output_is_refused_before_the_work(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    code, out, err = run(*command, "--out", tmp_path / "file")
    assert (code, out, err) == (1, "", f"mdmi-fast {command[0]}: {tmp_path / 'file'}: is no folder\n")


@pytest.mark.usefixtures("model")
def test_decode_and_map_write_into_pipes(run: Run, tmp_path: Path, data: Path) -> None:
    pipe = tmp_path / "pipe.npz"
    os.mkfifo(pipe)
    for command in ((*DECODE, "--out", pipe), ("map", "--model", "any", "--probe", "--formats", "npz", "--out")):
        found: list[bytes] = []
        reader = threading.Thread(target=lambda found=found: found.append(pipe.read_bytes()), daemon=True)
        reader.start()
        out = () if command[0] == "decode" else (tmp_path / "pipe",)
        assert run(*command, *out, "--data", data)[0] == 0
        reader.join(timeout=60)
        assert pipe.is_fifo()
        if command[0] == "decode":
            assert [json.loads(line)["tokens"] for line in found[0].splitlines()] == [[1, 1, 1, 1]] * 8
        else:
            (tmp_path / "copy.npz").write_bytes(found[0])
            assert int(MIMap.load(tmp_path / "copy.npz").mask.sum()) == 3


@pytest.mark.usefixtures("model")
def test_two_outputs_cannot_be_one_file(run: Run, tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    code, _, err = run(*DECODE, "--data", data, "--out", out, "--trace", out)
    assert (code, err) == (2, f"mdmi-fast decode: --out and --trace are both {out}: one of them would be lost\n")
    assert run(*DECODE, "--data", data, "--out", "/dev/null", "--trace", "/dev/null")[0] == 0


# --- standard streams


def test_closed_streams_and_full_disks_are_said_in_one_line(tmp_path: Path) -> None:
    puzzle = tmp_path / "puzzle.jsonl"
    lines(puzzle, {"tokens": [0] * 81})
    decode = ("decode", "--model", "sudoku", "--policy", "topk:81", "--data")
    closed = "mdmi-fast: standard output is closed; send it to a file or to /dev/null\n"
    full = "standard output: No space left on device\n"
    for command, redirect, code, told in (
        (("info",), ">&-", 1, closed),
        (("--help",), ">&-", 1, closed),
        ((*decode, puzzle), ">&-", 1, closed),
        (("info",), ">/dev/full", 1, f"mdmi-fast: {full}"),
        (("--help",), ">/dev/full", 1, f"mdmi-fast: {full}"),
        ((*decode, puzzle), ">/dev/full", 1, f"mdmi-fast decode: {full}"),
        ((*decode, "-"), "<&-", 2, "mdmi-fast decode: there is no standard input to read\n"),
    ):
        done = process(*command, redirect=redirect, PYTHONUNBUFFERED="")
        assert (done.returncode, done.stdout, done.stderr) == (code, "", told)
    unbuffered = process("info", redirect=">/dev/full", PYTHONUNBUFFERED="1")
    assert (unbuffered.returncode, unbuffered.stderr) == (1, f"mdmi-fast info: {full}")


def test_what_goes_to_a_closed_standard_error_stays_out_of_standard_output(tmp_path: Path) -> None:
    puzzle = lines(tmp_path / "puzzle.jsonl", {"tokens": [0] * 81})
    done = process("decode", "--model", "sudoku", "--policy", "topk:81", "--data", puzzle, redirect="2>&-")
    assert done.returncode == 0
    assert [json.loads(line)["passes"] for line in done.stdout.splitlines()] == [1]


@pytest.mark.usefixtures("model")
def test_a_full_disk_leaves_receipts_out_of_the_blame(run: Run, tmp_path: Path, data: Path) -> None:
    code, out, err = run(*DECODE, "--data", data, "--out", "/dev/full", "--trace", tmp_path / "trace")
    assert (code, out, err) == (1, "", "mdmi-fast decode: /dev/full: No space left on device\n")
    assert not (tmp_path / "trace").exists()


def test_a_path_that_is_no_text_does_not_fail_what_was_done(tmp_path: Path) -> None:
    states, out = lines(tmp_path / "states.jsonl", {"tokens": [1] * 79 + [0] * 2}), tmp_path / os.fsdecode(b"l\xe9")
    done = process("label", "--model", "sudoku", "--data", states, "--out", out, LC_ALL="C.UTF-8")
    assert (done.returncode, "l\\udce9, form joint" in done.stdout) == (0, True), done.stderr


# --- inputs


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"tokens": [4] * 7}, "Padded: a sequence may have at most 6 tokens, got 7"),
        (
            {"tokens": [4, 0, 0, 4]},
            "Padded: padding must be at the ends of a sequence, got some in the middle, at position 1",
        ),
    ],
)
def test_a_sequence_that_the_model_cannot_run_is_found_at_reading(
    run: Run, tmp_path: Path, model: Padded, record: Any, reason: str
) -> None:
    path = lines(tmp_path / "data.jsonl", {"tokens": [1, 4]}, record, {"tokens": [0, 1, 4, 0]})
    for command in (
        DECODE,
        ("label", "--model", "any", "--out", tmp_path / "labels"),
        ("map", "--model", "any", "--probe", "--out", tmp_path / "map"),
        ("tune", "--model", "any", "--target", "2x"),
    ):
        code, out, err = run(*command, "--data", path)
        assert (code, out, err) == (1, "", f"{path}:2: {reason}\n")
    assert model.calls == []


def test_a_board_of_another_size_is_found_at_reading(run: Run, tmp_path: Path) -> None:
    path = lines(tmp_path / "data.jsonl", {"tokens": [0] * 81}, {"tokens": [0] * 80})
    code, out, err = run("decode", "--model", "sudoku", "--policy", "topk:81", "--data", path)
    assert (code, out) == (1, "")
    assert err.startswith(f"{path}:2: SudokuModel: tokens must be [B, 81] int64, got shape (1, 80)")


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("batch_size", [1, 2, 256])
def test_what_was_decoded_before_a_line_that_fails_is_written(run: Run, tmp_path: Path, batch_size: int) -> None:
    good, bad = {"tokens": [1, 4, 4]}, {"tokens": [3, 4, 4]}
    path = lines(tmp_path / "data.jsonl", {"tokens": [2, 4]}, good, good, bad, good, {"tokens": [3, 4]})
    written, trace = tmp_path / "out.jsonl", tmp_path / "trace.jsonl"
    decode = (*DECODE, "--data", path, "--batch-size", batch_size)
    code, out, err = run(*decode, "--out", written, "--trace", trace)
    reason = "decode: the model's logits at sequence 0, position 1 give no distribution"
    assert (code, out) == (1, "")
    assert err.startswith(f"{path}:4: {reason}")
    assert f"\n{path}:6: {reason}" in err
    assert err.endswith("\nmdmi-fast decode: 3 sequences were decoded before\n")
    found = [json.loads(line) for line in written.read_text().splitlines()]
    assert [row["tokens"] for row in found] == [[2, 1], [1, 1, 1], [1, 1, 1]]
    assert [json.loads(line)["sequence"] for line in trace.read_text().splitlines()] == [0, 1, 1, 2, 2]
    assert run(*decode)[1] == written.read_text()


@pytest.mark.usefixtures("model")
def test_a_first_line_that_fails_leaves_the_output_as_it_was(run: Run, tmp_path: Path) -> None:
    path, written = lines(tmp_path / "data.jsonl", {"tokens": [3, 4]}, {"tokens": [1, 4]}), tmp_path / "out.jsonl"
    written.write_text("kept")
    code, _, err = run(*DECODE, "--data", path, "--out", written)
    assert code == 1
    assert err.startswith(f"{path}:1: ")
    assert written.read_text() == "kept"


@pytest.mark.usefixtures("model")
def test_only_the_first_twenty_lines_that_fail_are_named(run: Run, tmp_path: Path) -> None:
    path = lines(tmp_path / "data.jsonl", {"tokens": [1, 4]}, *([{"tokens": [3, 4]}] * 50))
    code, out, err = run(*DECODE, "--data", path, "--batch-size", 16)
    assert (code, len(out.splitlines()), len(err.splitlines())) == (1, 1, 21)


@pytest.mark.usefixtures("model")
def test_a_state_that_cannot_be_labelled_is_named_and_finished_shards_stay(run: Run, tmp_path: Path) -> None:
    good = [{"tokens": [1, 4, 4]}] * 3
    path, labels = lines(tmp_path / "data.jsonl", *good, {"tokens": [3, 4, 4]}), tmp_path / "labels"
    label = ("label", "--model", "any", "--data", path, "--out", labels, "--shard-size", 2)
    code, _, err = run(*label)
    assert code == 1
    assert err.startswith(f"{path}:4: ")
    assert sorted(file.name for file in labels.iterdir()) == ["labels-00000.safetensors", "labels.json"]


@pytest.mark.usefixtures("model")
def test_a_sequence_that_has_no_map_is_named(run: Run, tmp_path: Path, data: Path) -> None:
    path = lines(tmp_path / "short.jsonl", {"tokens": [1, 4, 4]}, {"tokens": [1, 1, 4]})
    to_map = ("map", "--model", "any", "--probe", "--formats", "npz", "--out", tmp_path / "map")
    code, _, err = run(*to_map, "--data", path, "--index", 1)
    assert (code, err) == (1, f"{path}:2: mi_map: at least two positions must be masked, got 1\n")
    assert run(*to_map, "--data", data)[0] == 0
    code, _, err = run(*to_map, "--data", path, "--compare", tmp_path / "map.npz")
    assert (code, err) == (1, f"{tmp_path / 'map.npz'}: is a map of 4 positions, {path}:1 has 3\n")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_text_in_utf_16_is_known_as_such(run: Run, tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "data"
    for text, command in (
        ('{"tokens": [1]}\n', ("decode", "--model", "sudoku", "--policy", "topk:1", "--data", path)),
        ("." * 81 + "\n", ("decode", "--model", "sudoku", "--policy", "topk:1", "--data", path)),
        ("." * 81 + "\n", ("sudoku", path)),
    ):
        path.write_text(text, encoding=encoding)
        assert run(*command) == (1, "", f"{path}: looks like UTF-16; save it as UTF-8\n")


@pytest.mark.usefixtures("model")
def test_fields_of_a_line_come_back_as_they_were(run: Run, tmp_path: Path) -> None:
    extra = '"a": 1e300, "b": [null, true, -0.5], "c": "\\ud83d\\ude00 \\ud800", "d": 123456789012345678901234567890'
    path = tmp_path / "data.jsonl"
    path.write_bytes(f'\ufeff{{"tokens": [1, 4], {extra}}}\r\n'.encode())
    code, out, _ = run(*DECODE, "--data", path)
    assert code == 0
    assert json.loads(out) == {**json.loads(f'{{"tokens": [1, 1], {extra}}}'), "passes": 1}


# --- what the library wrote, damaged


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 4)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def gone(path: Path) -> None:
    path.unlink()


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


def wide(path: Path) -> None:
    path.write_bytes(path.read_bytes().decode("latin-1").encode("utf-16"))


def other(path: Path) -> None:
    """A sound file of the same format that holds something else."""
    if path.suffix == ".json":
        path.write_text("[]")
    else:
        save_file({"x": torch.zeros(3)}, path)


DAMAGES = pytest.mark.parametrize("damage", [cut, empty, binary, folder, gone, nested, wide, other])
STILL_THERE = pytest.mark.parametrize("damage", [cut, empty, binary, folder, nested, wide, other])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labels, an estimator that reads the marginals, a chosen policy and a map, all of one model."""
    made, own = tmp_path_factory.mktemp("made"), Padded()
    write_labels(own, torch.tensor([[1, 4, 4, 4]] * 4), made / "labels", shard_size=2)
    estimator = PairwiseMIEstimator(3, layers=(4,), marginals="summary", output="bounded")
    estimator.trained_on = identity(own)
    estimator.save_pretrained(made / "estimator")
    (made / "choice.json").write_text('{"policy": "topk:2", "options": {"block_size": 2, "top_k": null}}')
    mi_map(own, torch.tensor([1, 4, 4, 4])).save(made / "map.npz")
    return made


@DAMAGES
@pytest.mark.parametrize("name", ["estimator.json", "estimator.safetensors"])
@pytest.mark.usefixtures("model")
def test_a_damaged_estimator_is_named(
    run: Run, tmp_path: Path, made: Path, data: Path, name: str, damage: Callable[[Path], None]
) -> None:
    there = shutil.copytree(made / "estimator", tmp_path / "estimator")
    decode = ("decode", "--model", "any", "--policy", "mi-budget:0.1", "--data", data, "--estimator", there)
    assert run(*decode)[0] == 0
    damage(there / name)
    code, out, err = run(*decode)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert str(there) in err


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    "change",
    [
        {"configuration": []},
        {"configuration": {"hidden_size": "3"}},
        {"configuration": {"hidden_size": 3, "layers": []}},
        {"configuration": {"hidden_size": 3, "layers": 4}},
        {"configuration": {"hidden_size": 3, "depth": 4}},
        {"architecture": ["general"]},
        {"architecture": "unheard-of"},
        {"trained_on": "a model"},
        {"trained_on": {}},
        {"provenance": 7},
    ],
)
def test_a_configuration_that_makes_no_estimator_is_refused(
    run: Run, tmp_path: Path, made: Path, data: Path, change: dict[str, Any]
) -> None:
    there = shutil.copytree(made / "estimator", tmp_path / "estimator")
    config = json.loads((there / "estimator.json").read_text())
    (there / "estimator.json").write_text(json.dumps({**config, **change}))
    code, _, err = run(*DECODE[:3], "--policy", "mi-budget:0.1", "--data", data, "--estimator", there)
    assert code == 1
    assert err.startswith("mdmi-fast decode: ")


@DAMAGES
@pytest.mark.parametrize("name", ["labels.json", "labels-00001.safetensors"])
@pytest.mark.usefixtures("model")
def test_damaged_labels_are_named(
    run: Run, tmp_path: Path, made: Path, name: str, damage: Callable[[Path], None]
) -> None:
    there = shutil.copytree(made / "labels", tmp_path / "labels")
    damage(there / name)
    train = ("train", "--model", "any", "--labels", there, "--out", tmp_path / "out", "--epochs", 1, "--held-out", 0.5)
    code, out, err = run(*train)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert str(there) in err


@pytest.mark.parametrize(
    "change",
    [
        {"forms": "joint"},
        {"forms": []},
        {"forms": [["joint"]]},
        {"window": "2"},
        {"window": -1},
        {"sequences": "4"},
        {"sequences": True},
        {"shard_size": 0},
        {"shard_size": 2.0},
    ],
)
def test_an_index_of_labels_that_makes_no_sense_is_damaged(tmp_path: Path, made: Path, change: dict[str, Any]) -> None:
    there = shutil.copytree(made / "labels", tmp_path / "labels")
    index = json.loads((there / "labels.json").read_text())
    (there / "labels.json").write_text(json.dumps({**index, **change}))
    with pytest.raises(ValueError, match=r"labels\.json: damaged"):
        list(stream_labels(there))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("positions", torch.tensor([1, 2, 9, 1, 2, 3], dtype=torch.int32)),
        ("positions", torch.tensor([-1, 2, 3, 1, 2, 3], dtype=torch.int32)),
        ("masked", torch.tensor([9, 9], dtype=torch.int32)),
        ("lengths", torch.tensor([[4, 4]], dtype=torch.int32)),
        ("mi.joint", torch.zeros(2)),
    ],
)
def test_a_shard_whose_parts_do_not_fit_is_damaged(tmp_path: Path, made: Path, name: str, value: Tensor) -> None:
    there = shutil.copytree(made / "labels", tmp_path / "labels")
    shard = there / "labels-00001.safetensors"
    save_file({**load_file(shard), name: value}, shard)
    with pytest.raises(ValueError, match=r"labels-00001\.safetensors: damaged"):
        list(stream_labels(there))


@DAMAGES
@pytest.mark.usefixtures("model")
def test_a_damaged_choice_of_a_policy_is_named(
    run: Run, tmp_path: Path, made: Path, data: Path, damage: Callable[[Path], None]
) -> None:
    choice = Path(shutil.copy(made / "choice.json", tmp_path))
    decode = ("decode", "--model", "any", "--data", data, "--policy", choice)
    assert run(*decode)[0] == 0
    damage(choice)
    code, out, err = run(*decode)
    assert (code, out) == (2, "")
    assert f"argument --policy: {choice}: " in err


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"policy": 3}, "policy must be a text, got 3"),
        ({"policy": None}, "policy must be a text, got None"),
        ({"policy": "topk:1", "estimator": 3}, "estimator must be a text, got 3"),
        ({"policy": "topk:1", "options": [1]}, r"options must be an object, got \[1\]"),
        ({"policy": "topk:1", "options": {"heat": 1}}, '"options" must be an object with some of temperature'),
        ({"policy": "topk:1", "options": {"top_k": "2"}}, "option 'top_k' cannot be '2'"),
    ],
)
def test_a_choice_that_makes_no_sense_says_why(tmp_path: Path, run: Run, choice: Any, reason: str) -> None:
    path = tmp_path / "choice.json"
    path.write_text(json.dumps(choice))
    code, _, err = run("decode", "--model", "any", "--policy", path)
    assert code == 2
    assert f"argument --policy: {path}: {reason}".replace("\\", "") in err


@DAMAGES
def test_a_damaged_map_is_named(tmp_path: Path, made: Path, damage: Callable[[Path], None]) -> None:
    path = Path(shutil.copy(made / "map.npz", tmp_path))
    damage(path)
    with pytest.raises((ValueError, OSError), match=r"map\.npz"):
        MIMap.load(path)


def test_a_map_whose_arrays_do_not_fit_is_refused(tmp_path: Path, made: Path) -> None:
    found, path = MIMap.load(made / "map.npz"), tmp_path / "map.npz"
    for change, reason in (
        ({"mi": found.mi[:2]}, r"mi must be \(4, 4\) torch.float32, got \(2, 4\)"),
        ({"mask": found.mask.int()}, "mask must be .* torch.bool"),
        ({"labels": ("a",)}, "labels must be 4 like tokens, got 1"),
        ({"mi": found.mi.fill_diagonal_(torch.nan)}, "holds NaN"),
    ):
        dataclasses.replace(found, **change).save(path)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"not a map of mutual information: .*{reason}"):
            MIMap.load(path)


@pytest.mark.usefixtures("model")
def test_map_takes_an_estimator_that_reads_the_marginals(run: Run, tmp_path: Path, made: Path, data: Path) -> None:
    to_map = ("map", "--model", "any", "--estimator", made / "estimator", "--data", data, "--out", tmp_path / "map")
    code, _, err = run(*to_map, "--formats", "npz")
    assert (code, err) == (0, "")
    found = MIMap.load(tmp_path / "map.npz")
    own, tokens = Padded(), torch.tensor([[1, 4, 4, 4]])
    output = own(tokens)
    estimator = load_estimator(made / "estimator")
    expected = estimator(output.hidden, tokens == MASK, ops.token_stats(output.logits))[0]
    assert torch.equal(found.mi, expected.detach())
    assert float(found.mi[1, 2]) > 0


@STILL_THERE
def test_a_damaged_checkpoint_of_a_training_is_named(
    tmp_path: Path, made: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save([1], path)
    damage(path)
    alike = read_examples(made / "labels", "joint")
    labels = [state._replace(tokens=torch.cat([state.tokens, state.tokens[:n]])) for n, state in enumerate(alike)]
    with pytest.raises(ValueError, match=r"checkpoint\.pt: not the checkpoint of a training"):
        train_estimator(PairwiseMIEstimator(3, layers=(4,)), Padded(), labels, epochs=1, held_out=0.5, checkpoint=path)


@STILL_THERE
def test_a_damaged_state_of_a_guard_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "state.json"
    Guard(TopK(1), state=path).save()
    damage(path)
    with pytest.raises((ValueError, OSError), match=r"state\.json"):
        Guard(TopK(1), state=path)


def test_a_guard_refuses_a_state_that_it_could_not_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="state"):
        Guard(TopK(1), state=tmp_path / "file" / "state.json")


@STILL_THERE
def test_damaged_choices_of_tiles_are_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "tiles.json"
    path.write_text('{"card: forward": [1, 2, 3, 4, 5, "6"]}')
    with pytest.raises(ValueError, match=r"tiles\.json: not the choices"), ops.tune_kernels(cache=path):
        pytest.fail("the work has begun")
    damage(path)
    with pytest.raises((ValueError, OSError), match=r"tiles\.json"), ops.tune_kernels(cache=path):
        pytest.fail("the work has begun")


def test_nothing_is_saved_where_a_file_stands_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    estimator = PairwiseMIEstimator(3, layers=(4,))
    with pytest.raises(NotADirectoryError, match="file"):
        estimator.save_pretrained(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="file"):
        write_labels(Padded(), torch.tensor([[1, 4, 4]]), tmp_path / "file")


def test_a_picture_in_no_known_format_is_refused_before_the_evaluation(run: Run, tmp_path: Path) -> None:
    for name in ("picture", "picture.txt"):
        code, _, err = run("evaluate", "--model", "none", "--labels", tmp_path / "none", "--plot", tmp_path / name)
        assert code == 1
        assert "path must end in one of" in err
        assert str(tmp_path / name) in err


@pytest.mark.parametrize("prefix", ["", ".", "..", "folder/"])
def test_a_map_without_a_name_is_refused_before_the_work(
    run: Run, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("map", "--model", "none", "--data", data, "--probe", "--out", prefix)
    assert code == 2
    assert "--out must end in a name" in err
    assert [path.name for path in tmp_path.iterdir()] == [data.name]


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a": ', "}")])
def test_a_line_nested_too_deeply_to_be_written_again_is_named(run: Run, tmp_path: Path, start: str, end: str) -> None:
    def record(depth: int) -> str:
        return f'{{"tokens": [1, 4], "x": {start * depth}1{end * depth}}}\n'

    path = tmp_path / "nested.jsonl"
    path.write_text(record(90))
    assert run("decode", "--model", "none", "--policy", "topk:1", "--data", path)[0] == 0
    path.write_text('{"tokens": [1, 4]}\n' + record(480))
    code, out, err = run("decode", "--model", "none", "--policy", "topk:1", "--data", path)
    assert (code, out) == (1, "")
    assert f"{path}:2: lists and objects may be nested 100 deep" in err


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("target", ["null", "[1]", "[1, 9]", "[1, -1]", f"[1, {10**30}]"])
def test_a_target_that_no_sequence_can_have_is_named_with_its_line(run: Run, tmp_path: Path, target: str) -> None:
    path = tmp_path / "targets.jsonl"
    path.write_text(f'{{"tokens": [1, 4], "target": [1, 1]}}\n{{"tokens": [1, 4], "target": {target}}}\n')
    asked = ("--policies", "topk:2", "--target", "at most 1% loss", "--quality", "accuracy")
    code, out, err = run("tune", "--model", "none", "--data", path, *asked)
    assert (code, out) == (1, "")
    assert f"{path}:2: " in err
    assert "target" in err


@pytest.mark.usefixtures("model")
def test_options_that_belong_to_sequences_are_refused_in_a_policy(run: Run, tmp_path: Path, data: Path) -> None:
    choice = tmp_path / "choice.json"
    for options in ({"seed": 5}, {"allowed": {"1": [1]}}):
        choice.write_text(json.dumps({"policy": "topk:1", "options": options}))
        code, _, err = run("decode", "--model", "none", "--data", data, "--policy", choice)
        assert (code, "belongs to one sequence, not to a policy" in err) == (2, True)


@pytest.mark.usefixtures("model")
def test_stop_tokens_that_cannot_be_written_are_the_fault_of_the_option_and_of_no_line(run: Run, data: Path) -> None:
    code, _, err = run("decode", "--model", "none", "--data", data, "--policy", "topk:1", "--stop", MASK)
    assert code == 2
    assert "stop_tokens must not hold the mask token" in err
    assert data.name not in err


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("text", ["train", "--text", "none.txt", "--out", "o"], "none.txt: No such file or directory"),
        ("text", ["train", "--text", "utf16.txt", "--out", "o"], "utf16.txt: looks like UTF-16"),
        ("sudoku.train_network", ["strong", "--out", "utf16.txt"], "utf16.txt: is no folder"),
        (
            "protein",
            ["fasta", "--model", "sudoku", "lines.jsonl"],
            'lines.jsonl:2: expected an object {"tokens": [...]}',
        ),
    ],
)
def test_programs_of_tasks_end_in_one_line(tmp_path: Path, module: str, arguments: list[str], said: str) -> None:
    (tmp_path / "utf16.txt").write_text("a text", encoding="utf-16")
    (tmp_path / "lines.jsonl").write_text('{"tokens": [1]}\n{"tokens": 5}\n')
    done = subprocess.run(
        [sys.executable, "-m", f"mdmi_fast.tasks.{module}", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
