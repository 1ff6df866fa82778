"""What a task of another package gets from the commands, and decoding many sequences."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mdmi_fast import Probing, TopK, decode
from mdmi_fast.decoding import Asked, DecodeError, MIBudget, decode_batch, decode_many, receipt
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable
from mdmi_fast.tasks.base import task_of

ROOT = Path(__file__).resolve().parent.parent
MASK = 2

BITS = """
import torch
from mdmi_fast.models.exact import JointTable
from mdmi_fast.tasks.base import Structure, Task

def load():
    return JointTable(torch.tensor([[[0.4, 0.0], [0.0, 0.1]], [[0.0, 0.1], [0.4, 0.0]]]))  # an even number of ones

def read_lines(lines):
    return [([2 if c == "?" else int(c) for c in line.strip()], {"bits": line.strip()}) for line in lines if line.strip()]

def even(tokens):
    return tokens.sum(dim=-1) % 2 == 0

def structure():
    return Structure("all three", ~torch.eye(3, dtype=torch.bool), ["a", "b", "c"])

TASK = Task(unit="word", read_lines=read_lines, quality=even, structure=structure)
"""


@pytest.fixture
def bits(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which a package with the task "bits" is installed."""
    (tmp_path / "bits.py").write_text(BITS)
    about = tmp_path / "bits-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bits\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[mdmi_fast.models]\nbits = bits:load\n[mdmi_fast.tasks]\nbits = bits:TASK\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def command(environment: dict[str, str], *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mdmi_fast", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_task_of_another_package_is_read_judged_and_mapped(bits: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "words.txt"
    data.write_text("???\n1??\n")
    out = command(bits, "decode", "--model", "bits", "--policy", "topk:1", "--data", data).splitlines()
    assert out[0] == '{"bits": "???", "tokens": [0, 0, 0], "passes": 3}'
    assert out[1] == '{"bits": "1??", "tokens": [1, 1, 0], "passes": 3}'.replace('"passes": 3', '"passes": 2')
    tuned = command(bits, "tune", "--model", "bits", "--data", data, "--target", "1x", "--policies", "topk:2")
    assert "1.0000" in tuned.splitlines()[1]  # every word decoded one by one has an even number of ones
    mapped = command(
        bits, "map", "--model", "bits", "--data", data, "--probe", "--out", tmp_path / "map", "--formats", "npz"
    )
    assert "pair" in mapped
    assert "all three" in mapped
    assert "a b" in mapped


def test_a_model_without_a_task_has_none() -> None:
    task = task_of("hf:somewhere")
    assert task.read_lines is task.quality is task.structure is None
    assert task_of("sudoku:weak").unit == "puzzle"


# --- many sequences


MODEL = JointTable(torch.tensor([[[0.4, 0.0], [0.0, 0.1]], [[0.0, 0.1], [0.4, 0.0]]]))


def test_each_sequence_is_decoded_as_alone_whatever_it_is_decoded_with() -> None:
    asked = [
        Asked([MASK, MASK, MASK], options={"seed": 7, "temperature": 1.0}),
        Asked([1, MASK, MASK], options={"seed": 8}),
        Asked([MASK, MASK, MASK], options={"seed": 9, "temperature": 1.0}),
        Asked([MASK, 0, MASK], options={"suppressed": [0], "seed": 1}),
        Asked([MASK, MASK, MASK], options={"allowed": {"0": [1]}, "seed": 3}),
        Asked([0, 1, 1]),
    ]
    policy = MIBudget(Probing(), gamma=0.1, entropy_weight=0.0)
    finished: list[int] = []
    together = [*decode_many(MODEL, asked, policy, batch_size=2, trace=True, progress=finished.append)]
    alone = [next(decode_many(MODEL, [each], policy, trace=True)) for each in asked]
    assert together == alone
    assert sum(finished) == len(asked)
    first = decode(MODEL, torch.tensor([[MASK] * 3]), policy, temperature=1.0, seeds=torch.tensor([7]), trace=True)
    assert together[0].tokens == first.tokens[0].tolist()
    assert together[0].trace == receipt(first.trace or [], 0)
    assert together[3].tokens[1] == 0
    assert 0 not in (together[3].tokens[0], together[3].tokens[2])
    assert together[4].tokens[0] == 1
    assert (together[5].tokens, together[5].passes) == ([0, 1, 1], 0)


def test_seeds_come_from_the_generator_by_number_and_defaults_hold_for_what_is_left_open() -> None:
    asked = [Asked([MASK] * 3)] * 40

    def drawn(**options: object) -> list[list[int]]:
        generator = torch.Generator().manual_seed(5)
        return [each.tokens for each in decode_many(MODEL, asked, TopK(1), generator=generator, **options)]

    assert drawn(temperature=1.0) == drawn(temperature=1.0, batch_size=7)
    assert len({tuple(tokens) for tokens in drawn(temperature=1.0)}) > 1
    assert len({tuple(tokens) for tokens in drawn()}) == 1


class Picky(JointTable):
    """Refuses sequences that begin with 1."""

    def __call__(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> MaskedOutput:
        if bool((tokens[:, 0] == 1).any()):
            raise ValueError("no 1 at the beginning")
        return super().__call__(tokens, attention_mask)


def test_what_cannot_be_decoded_is_named_after_what_comes_before() -> None:
    model = Picky(torch.ones(2, 2, 2))
    asked = [Asked([0, MASK, MASK]), Asked([0, 0, MASK]), Asked([1, MASK, 0]), Asked([0, MASK, 0]), Asked([1, 1, MASK])]
    found = decode_many(model, asked, TopK(1))
    assert [next(found).passes for _ in range(2)] == [2, 1]
    with pytest.raises(DecodeError, match="sequence 2: no 1 at the beginning; sequence 4: no 1") as error:
        next(found)
    assert [*error.value.failures] == [2, 4]
    many = [Asked([1, MASK, 0])] * 30 + [Asked([0, MASK, MASK])]
    with pytest.raises(DecodeError) as error:
        next(decode_many(model, many, TopK(1)))
    assert [*error.value.failures] == [*range(20)]  # of the rest nothing is said
    every = decode_batch(model, many, TopK(1), every=True)
    assert [isinstance(each, ValueError) for each in every] == [True] * 30 + [False]
    with pytest.raises(ValueError, match="decode_many: batch_size must be at least 1, got 0"):
        next(decode_many(model, asked, TopK(1), batch_size=0))


def test_lengths_are_padded_where_the_model_can_without_a_change() -> None:
    asked = [
        Asked([0, MASK, MASK], options={"seed": 1}),
        Asked([MASK, 0], options={"seed": 2}),
        Asked([MASK], options={"seed": 3}),
    ]
    model = Letters()
    apart, padded = (decode_batch(model, asked, TopK(1), pad=pad, temperature=1.0) for pad in (False, True))
    assert apart == padded
    assert (len(model.shapes), model.shapes[-1]) == (2 + 1 + 1 + 2, (1, 3))


class Letters:
    """Every position by itself, of any length; notes what it was asked."""

    mask_token_id, vocab_size, hidden_size = MASK, 2, 1

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> MaskedOutput:
        self.shapes.append(tuple(tokens.shape))
        logits = torch.tensor([0.3, 0.7]).log().expand(*tokens.shape, 2)
        return MaskedOutput(logits, torch.zeros(*tokens.shape, 1))
