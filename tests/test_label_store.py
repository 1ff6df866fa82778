"""Labels on disk, how sequences are masked for them, and what is made of many contexts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mdmi_fast import label_mi
from mdmi_fast.cli import main
from mdmi_fast.labels import (
    FORMS,
    FixedShare,
    Trajectory,
    UniformShare,
    aggregate_mi,
    read_labels,
    stream_labels,
    write_labels,
)
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable, MarkovChain

ROOT = str(Path(__file__).parents[1])


def random_table(length: int, vocabulary: int, *, seed: int = 0) -> JointTable:
    weights = torch.randn((vocabulary,) * length, generator=torch.Generator().manual_seed(seed)).double()
    return JointTable((2 * weights).exp())


def chain(length: int = 6) -> MarkovChain:
    return MarkovChain(torch.tensor([1.0, 2.0, 3.0]), torch.eye(3) + 0.2, length=length)


def table_and_states() -> tuple[JointTable, Tensor]:
    model = random_table(3, 2)
    return model, torch.randint(0, 3, (10, 3), generator=torch.Generator().manual_seed(0))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_labels_come_back_as_they_were_made(tmp_path: Path) -> None:
    model, states = table_and_states()
    finished: list[int] = []
    passes = write_labels(model, states, tmp_path, forms=["kl"], shard_size=4, progress=finished.append)
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
        ({"forms": ["joint", "kl"]}, "forms"),
        ({"epsilon": 0.1}, "epsilon"),
        ({"directions": "one"}, "directions"),
        ({"window": 1}, "window"),
        ({"samples": 2}, "samples"),
        ({"seed": 1}, "seed"),
        ({"hidden": True}, "hidden"),
        ({"precision": "bf16"}, "precision"),
        ({"shard_size": 5}, "shard_size"),
        ({"provenance": {"seed": 1}}, "provenance"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], name: str) -> None:
    model, states = table_and_states()
    write_labels(model, states, tmp_path, shard_size=4)
    with pytest.raises(ValueError, match=f"made with another {name};"):
        write_labels(model, states, tmp_path, **({"shard_size": 4} | change))
    with pytest.raises(ValueError, match="made with another model;"):
        write_labels(random_table(3, 2, seed=1), states, tmp_path, shard_size=4)


def test_other_states_are_refused(tmp_path: Path) -> None:
    model, states = table_and_states()
    write_labels(model, states, tmp_path, shard_size=4)
    for other in (states[:9], states.flip(0), states.where(torch.arange(3) != 1, 2)):
        with pytest.raises(ValueError, match=r"made with another (sequences, )?fingerprint"):
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


def test_a_shard_of_another_size_is_noticed(tmp_path: Path) -> None:
    model, states = table_and_states()
    write_labels(model, states, tmp_path / "a", shard_size=4)
    write_labels(model, states[:9], tmp_path / "b", shard_size=3)
    name = "labels-00001.safetensors"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(ValueError, match=r"labels-00001\.safetensors: holds 3 states, other than labels\.json says"):
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
    "states",
    [
        torch.zeros(0, 3, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(2, 3),
        [torch.zeros(0, dtype=torch.int64)],
    ],
)
def test_states_that_cannot_be_labelled_leave_no_folder(tmp_path: Path, states: Tensor) -> None:
    with pytest.raises(ValueError, match="tokens must be"):
        write_labels(random_table(3, 2), states, tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Broken(JointTable):
    """Answers NaN to a sequence that begins with 0."""

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        logits, hidden = super().__call__(tokens, attention_mask)
        return MaskedOutput(logits.where((tokens[:, 0] != 0).view(-1, 1, 1), torch.nan), hidden)


def test_a_run_that_fails_leaves_whole_shards_only(tmp_path: Path) -> None:
    states = torch.tensor([[1, 2, 2], [0, 2, 2]])
    with pytest.raises(ValueError, match="no distribution"):
        write_labels(Broken(random_table(3, 2).joint), states, tmp_path, shard_size=1)
    assert sorted(contents(tmp_path)) == ["labels-00000.safetensors", "labels.json"]


_SLOW_RUN = """
import sys, time, torch
from mdmi_fast.labels import write_labels
from mdmi_fast.models.exact import JointTable

answer = JointTable.__call__

def slowly(self, tokens, attention_mask=None):
    time.sleep(0.02)
    return answer(self, tokens, attention_mask)

JointTable.__call__ = slowly
states = torch.tensor({states})
write_labels(JointTable(torch.tensor({joint})), states, sys.argv[1], shard_size=1, batch_tokens=6)
"""


def test_a_killed_run_is_finished_by_the_next_one_with_the_same_files(tmp_path: Path) -> None:
    weights = torch.arange(1, 9).view(2, 2, 2)
    states = torch.tensor([[2, 2, 2], [0, 2, 2], [2, 2, 1]]).repeat(20, 1)
    script = _SLOW_RUN.format(states=states.tolist(), joint=weights.tolist())
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
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
    rest = write_labels(model, states, killed, shard_size=1, batch_tokens=6)
    everything = write_labels(model, states, whole, shard_size=1, batch_tokens=6)
    assert 0 < rest < everything
    assert contents(killed) == contents(whole)
    assert json.loads((whole / "labels.json").read_text())["sequences"] == 60


_WORKER = """
import os, signal, sys
from pathlib import Path
from mdmi_fast.cli import main
from mdmi_fast.labels import store

marker, whole = Path(sys.argv[1]), store.replace_file

def replace_file(path):
    if os.environ["RANK"] == "1" and path.name == "labels-00003.safetensors" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(path)

store.replace_file = replace_file
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_two_processes_and_a_lost_worker_make_the_files_of_one_run(tmp_path: Path) -> None:
    data = tmp_path / "states.jsonl"
    solved = [(3 * (row % 3) + row // 3 + column) % 9 + 1 for row in range(9) for column in range(9)]
    with data.open("w") as file:
        for blanks in range(2, 8):
            file.write(json.dumps({"tokens": [0] * blanks + solved[blanks:]}) + "\n")
    worker, marker = tmp_path / "worker.py", tmp_path / "lost"
    worker.write_text(_WORKER)
    label = ["label", "--model", "sudoku", "--data", str(data), "--shard-size", "1", "--threads", "1", "--out"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, str(worker), str(marker), *label, str(tmp_path / "two")],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert marker.exists()
    assert done.stdout.count("3 states in ") >= 2
    assert main([*label, str(tmp_path / "one")]) == 0
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


# --- contents


def test_states_of_unequal_lengths_are_kept_packed_with_all_that_was_asked_for(tmp_path: Path) -> None:
    model, forms = chain(), ["joint", "entropy"]
    states = [torch.tensor([3, 3, 0, 3]), torch.tensor([3, 1]), torch.full((6,), 3), torch.tensor([3, 3, 3, 1])]
    write_labels(model, states, tmp_path, forms=forms, epsilon=0.3, window=2, hidden=True, shard_size=3)
    found = list(stream_labels(tmp_path, model=model))
    assert [state.tokens.tolist() for state in found] == [state.tolist() for state in states]
    for state, tokens in zip(found, states, strict=True):
        masked = (tokens == 3).nonzero().squeeze(-1)
        assert state.positions.equal(masked)
        pairs = [[i, j] for i in masked.tolist() for j in masked.tolist() if i < j <= i + 2]
        assert state.pairs.tolist() == pairs
        assert state.hidden is not None
        assert state.hidden.equal(model(tokens.unsqueeze(0)).hidden[0, masked])
        for form in FORMS[:2]:
            labels = label_mi(model, tokens, form=form, epsilon=0.3, window=2)
            both = label_mi(model, tokens, form=form)
            assert set(state.mi) == set(forms)
            first, second = state.pairs.t()
            assert ((state.mi[form] - both.mi[first, second]).abs() <= state.bound[form] + 1e-6).all()
            assert (state.bound[form] <= labels.bound[first, second]).all()
            assert state.dense(form).equal(state.dense(form).t())
        assert not state.standard_error["joint"].any()
    with pytest.raises(ValueError, match="holds lengths 2 to 6; read them with stream_labels"):
        read_labels(tmp_path, mask_token_id=3)


def test_each_form_of_a_folder_can_be_read(tmp_path: Path) -> None:
    model, states = table_and_states()
    write_labels(model, states, tmp_path, forms=["kl", "joint"])
    for form in ("joint", "kl"):
        expected = label_mi(model, states, form=form)
        assert read_labels(tmp_path, mask_token_id=2, form=form).mi.equal(expected.mi)
    assert read_labels(tmp_path, mask_token_id=2).mi.equal(label_mi(model, states).mi)
    with pytest.raises(ValueError, match=r"holds the forms joint, kl, got form='entropy'"):
        read_labels(tmp_path, mask_token_id=2, form="entropy")


def test_labels_of_another_model_or_layer_are_refused_by_name(tmp_path: Path) -> None:
    model, states = table_and_states()
    model.layers = (2,)
    write_labels(model, states, tmp_path)
    assert len(list(stream_labels(tmp_path, model=model))) == len(states)
    with pytest.raises(ValueError, match=r"labels of another model: .*'weights': '[0-9a-f]{64}'.*, got .*'JointTable'"):
        read_labels(tmp_path, mask_token_id=2, model=random_table(3, 2, seed=1))
    model.layers = (3,)
    with pytest.raises(ValueError, match=r"labels of another layer: \[2\], got \[3\]"):
        read_labels(tmp_path, mask_token_id=2, model=model)


def test_several_processes_share_the_shards(tmp_path: Path) -> None:
    model, states = random_table(3, 2), torch.zeros(10, 3, dtype=torch.int64)
    masking = {"masking": Trajectory(), "seed": 3, "samples": 2, "shard_size": 3}
    passes = [write_labels(model, states, tmp_path / "three", **masking, rank=rank, world_size=3) for rank in (2, 0)]
    with pytest.raises(ValueError, match=r"labels-00001\.safetensors of 4 shards is missing"):
        read_labels(tmp_path / "three", mask_token_id=2)
    passes.append(write_labels(model, states, tmp_path / "three", **masking, rank=1, world_size=3))
    assert write_labels(model, states, tmp_path / "one", **masking) == sum(passes)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    with pytest.raises(ValueError, match="rank below world_size"):
        write_labels(model, states, tmp_path / "four", rank=3, world_size=3)


def test_memory_that_runs_out_while_writing_halves_the_batch(tmp_path: Path) -> None:
    class Small(JointTable):
        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            if len(tokens) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory, say")
            return super().__call__(tokens, attention_mask)

    states = torch.zeros(9, 3, dtype=torch.int64)
    table = random_table(3, 2).joint
    for number, masking in enumerate((Trajectory(), UniformShare())):
        write_labels(Small(table), states, tmp_path / f"{number}", masking=masking)
        write_labels(JointTable(table), states, tmp_path / f"{number}-whole", masking=masking)
        small, whole = (read_labels(tmp_path / name, mask_token_id=2) for name in (f"{number}", f"{number}-whole"))
        for a, b in zip(small, whole, strict=True):
            torch.testing.assert_close(a, b)


# --- masking


@pytest.mark.parametrize(
    "masking", [FixedShare(0.3, keep=(0,)), UniformShare((0,)), Trajectory(keep=(0,)), Trajectory("random", 2, (0,))]
)
def test_a_mask_depends_on_the_sequence_and_its_seed_only(masking: Any) -> None:
    model, seeds = chain(8), list(range(20))
    tokens = torch.randint(1, 3, (20, 8), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 0
    before = tokens.clone()
    states = masking(model, tokens, seeds)
    assert tokens.equal(before)
    assert (states[:, 0] == 0).all()
    assert ((states == 3).sum(-1) >= 1).all()
    for row in (0, 7, 19):
        assert masking(model, tokens[row : row + 1], seeds[row : row + 1])[0].equal(states[row])
    assert not masking(model, tokens, [seed + 100 for seed in seeds]).equal(states)
    assert eval(repr(masking)) == masking
    with pytest.raises(ValueError, match="sequence 1 holds nothing but tokens to keep"):
        masking(model, torch.tensor([[1, 1], [0, 0]]), [0, 1])


def test_shares_are_as_said() -> None:
    model, tokens, seeds = chain(10), torch.zeros(600, 10, dtype=torch.int64), list(range(600))
    assert (FixedShare(0.34)(model, tokens, seeds) == 3).sum(-1).unique().tolist() == [3]
    assert (FixedShare(0.01)(model, tokens, seeds) == 3).sum(-1).unique().tolist() == [1]
    drawn = UniformShare()(model, tokens, seeds) == 3
    # Counts 1 to 10 are equally likely, and so is every position: 600 draws, 5 standard deviations.
    assert (drawn.sum(-1).bincount(minlength=11)[1:] - 60).abs().max() < 5 * (600 * 0.09) ** 0.5
    assert (drawn.sum(0) - 330).abs().max() < 5 * (600 * 0.25) ** 0.5
    states = Trajectory()(model, tokens[:100], seeds[:100])
    assert ((states == 3).sum(-1).bincount(minlength=11)[1:] - 10).abs().max() < 5 * 3


def test_a_trajectory_draws_from_the_model() -> None:
    # Twins: whatever the first is, the second is the same.
    twins = JointTable(torch.eye(2))
    for order in ("entropy", "random"):
        states = Trajectory(order)(twins, torch.zeros(400, 2, dtype=torch.int64), list(range(400)))
        masked = (states == 2).sum(-1)
        assert set(masked.tolist()) == {1, 2}
        drawn = states[masked == 1].amin(-1)
        assert abs(float(drawn.float().mean()) - 0.5) < 5 * 0.5 / len(drawn) ** 0.5
    assert (states[:, 0] == 2).any()
    assert ((states[:, 0] != 2) & (states[:, 1] == 2)).any()


def test_a_trajectory_never_draws_the_mask_token() -> None:
    class Masked:
        """Likes the mask token, which is one of its vocabulary, better than anything else."""

        def __init__(self, joint: Tensor) -> None:
            self.table = JointTable(joint)
            self.mask_token_id, self.hidden_size = self.table.mask_token_id, self.table.hidden_size
            self.vocab_size = self.table.vocab_size + 1

        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            logits, hidden = self.table(tokens, attention_mask)
            return MaskedOutput(torch.nn.functional.pad(logits, (0, 1), value=10.0), hidden)

    for order in ("entropy", "random"):
        mine, plain = Masked(torch.eye(2) + 0.1), JointTable(torch.eye(2) + 0.1)
        tokens, seeds = torch.zeros(50, 2, dtype=torch.int64), list(range(50))
        assert Trajectory(order)(mine, tokens, seeds).equal(Trajectory(order)(plain, tokens, seeds))


def test_sequences_to_be_masked_hold_no_mask_token(tmp_path: Path) -> None:
    model, tokens = random_table(3, 2), torch.tensor([[0, 1, 0], [0, 2, 1]])
    with pytest.raises(ValueError, match=r"no mask token 2 where masking is given, got one in sequence 1"):
        write_labels(model, tokens, tmp_path, masking=UniformShare())
    assert not list(tmp_path.iterdir())
    write_labels(model, tokens[:1], tmp_path, masking=UniformShare())
    with pytest.raises(ValueError, match="made with another masking;"):
        write_labels(model, tokens[:1], tmp_path, masking=FixedShare(0.5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedShare(0.0), "share must lie in"),
        (lambda: FixedShare(1.5), "share must lie in"),
        (lambda: Trajectory("best"), "order must be entropy or random"),
        (lambda: Trajectory(at_once=0), "at_once at least 1"),
    ],
)
def test_maskings_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- many contexts


def test_contexts_are_aggregated_over_those_that_mask_both_ends() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [True, True, False], [False, True, True]])
    mi = torch.zeros(4, 3, 3)
    mi[:, 0, 1] = mi[:, 1, 0] = torch.tensor([0.1, 0.2, 0.6, 9.0])
    mi[:, 1, 2] = mi[:, 2, 1] = torch.tensor([9.0, 0.4, 9.0, 0.8])
    for statistic, near, far in (("mean", 0.3, 0.6), ("median", 0.2, 0.6), (0, 0.1, 0.4), (100.0, 0.6, 0.8)):
        found = aggregate_mi(mi, mask, statistic)
        assert float(found[0, 1]) == float(found[1, 0]) == pytest.approx(near)
        assert float(found[1, 2]) == pytest.approx(far)
        assert found[0, 2] == 0  # masked together once
        assert found.diagonal().isnan().all()
    assert aggregate_mi(mi[:1], mask[:1])[0, 2].isnan()


@pytest.mark.parametrize("statistic", ["mode", -1, 101.0, float("nan")])
def test_unknown_statistics_are_refused(statistic: Any) -> None:
    with pytest.raises(ValueError, match="statistic must be mean, median or a percentile"):
        aggregate_mi(torch.zeros(1, 2, 2), torch.ones(1, 2, dtype=torch.bool), statistic)
    with pytest.raises(ValueError, match="mi must be"):
        aggregate_mi(torch.zeros(2, 2), torch.ones(2, dtype=torch.bool))
