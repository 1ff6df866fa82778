"""An estimator remembers the states it was trained on, and is judged on others."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mdmi_fast import PairwiseMIEstimator, evaluate_estimator, load_estimator, train_estimator
from mdmi_fast.estimator import JudgedStates, SeenStates, Windowed, evaluate_splits
from mdmi_fast.estimator.data import Example, examples, split_states
from mdmi_fast.estimator.evaluate import judged_states, verdict
from mdmi_fast.estimator.seen import fingerprints
from mdmi_fast.labels import LabelSet, label_mi
from mdmi_fast.models.exact import JointTable

LENGTH, MASK = 4, 2


@pytest.fixture(scope="module")
def model() -> JointTable:
    return JointTable(torch.rand((2,) * LENGTH, generator=torch.Generator().manual_seed(0)) ** 4)


@pytest.fixture(scope="module")
def states(model: JointTable) -> list[Example]:
    """All 33 states with two masked bits or more, in an order of no meaning."""
    tokens = torch.tensor([*itertools.product(range(3), repeat=LENGTH)])
    tokens = tokens[(tokens == MASK).sum(1) >= 2]
    tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))]
    labels = label_mi(model, tokens)
    return [*examples(LabelSet(tokens, tokens == MASK, labels.mi, labels.entropy))]


def marks(states: list[Example]) -> set[int]:
    return set(fingerprints(states, None).tolist())


def trained(
    model: JointTable,
    states: list[Example],
    *,
    start: PairwiseMIEstimator | None = None,
    old: list[Example] | None = None,
    held_out: float = 0.25,
) -> PairwiseMIEstimator:
    torch.manual_seed(0)
    estimator = PairwiseMIEstimator(model.hidden_size, layers=(16,)) if start is None else start
    return train_estimator(
        estimator, model, states, old=old, epochs=2, batch_size=4, learning_rate=1e-2, held_out=held_out
    )[0]


def state(tokens: list[int], positions: list[int], dtype: torch.dtype = torch.int64) -> Example:
    empty = torch.empty(0, 2, dtype=torch.int64)
    return Example(
        torch.tensor(tokens, dtype=dtype), torch.tensor(positions, dtype=torch.int64), empty, torch.empty(0), None
    )


def test_a_fingerprint_is_of_tokens_and_masked_positions_alone() -> None:
    same = [state([7, 9, 3, 9], [1, 3]), state([7, 9, 3, 9], [3, 1]), state([7, 9, 3, 9], [1, 3], torch.int32)]
    assert len(fingerprints(same, None).unique()) == 1
    # The number itself is in files, so it may never change.
    assert fingerprints(same[:1], None).tolist() == [-3251635472277346963]
    others = [state([7, 9, 3, 9], [1]), state([8, 9, 3, 9], [1, 3]), state([9, 7, 3, 9], [1, 3]), state([7, 9, 3], [1])]
    assert len(fingerprints([*same, *others], None).unique()) == 5
    assert fingerprints([], None).shape == (0,)


def test_padding_does_not_count_where_the_model_names_it() -> None:
    bare, left, right = state([7, 9], [1]), state([0, 0, 7, 9], [3]), state([7, 9, 0], [1])
    assert len(fingerprints([bare, left, right], 0).unique()) == 1
    assert len(fingerprints([bare, left, right], None).unique()) == 3
    masked, inside = state([7, 9, 0], [1, 2]), state([7, 0, 9], [2])  # a masked position is no padding
    assert len(fingerprints([bare, masked, inside, state([0], [])], 0).unique()) == 4


def test_training_records_what_it_fitted_and_what_chose_the_epoch(model: JointTable, states: list[Example]) -> None:
    estimator = trained(model, states[:20])
    fitted, judge = split_states(states[:20], 0.25, 0)
    assert estimator.seen is not None
    assert set(estimator.seen.trained.tolist()) == marks([*fitted])
    assert set(estimator.seen.held_out.tolist()) == marks([*judge])
    assert (len(estimator.seen.trained), len(estimator.seen.held_out), estimator.seen.complete) == (15, 5, True)


def test_it_is_judged_on_what_it_was_not_trained_on(model: JointTable, states: list[Example]) -> None:
    torch.manual_seed(0)
    estimator, held_out = train_estimator(
        PairwiseMIEstimator(model.hidden_size, layers=(16,)), model, states[:20], epochs=2, held_out=0.25
    )
    same = evaluate_estimator(estimator, model, states[:20])
    assert same.states == JudgedStates(judged=5, left_out=15, trained_on=0, held_out=5, complete=True)
    assert same.pearson == pytest.approx(held_out.pearson, abs=1e-12)  # the order of the states differs
    assert held_out.states == JudgedStates(5, 0, 0, 5, True)
    everything = evaluate_estimator(estimator, model, states)
    assert everything.states == JudgedStates(len(states) - 15, 15, 0, 5, True)
    told = evaluate_estimator(estimator, model, states, all_states=True)
    assert told.states == JudgedStates(len(states), 0, 15, 5, True)
    assert told.pairs > everything.pairs
    assert verdict(told).endswith(f"; trained on 15 of the {len(states)} states judged")
    assert "trained on" not in verdict(everything)
    assert evaluate_estimator(Windowed(estimator, LENGTH), model, states).states == everything.states
    fitted, _ = split_states(states[:20], 0.25, 0)
    with pytest.raises(ValueError, match=r"not trained on, got 15 that it was trained on; all_states=True"):
        evaluate_estimator(estimator, model, fitted)
    with pytest.raises(ValueError, match="got 15 that it was trained on"):
        evaluate_splits(estimator, model, {"new": states[20:], "old": fitted})
    reports = evaluate_splits(estimator, model, {"new": states[20:], "old": fitted}, all_states=True).reports
    assert [one["estimator"].states.trained_on for one in reports.values()] == [0, 15]
    assert reports["old"]["table"].states == reports["old"]["estimator"].states


def test_refinement_adds_to_the_record_and_never_holds_out_what_was_trained_on(
    model: JointTable, states: list[Example]
) -> None:
    estimator = trained(model, states[:16])
    first = estimator.seen
    assert first is not None
    fitted = set(first.trained.tolist())
    refined = trained(model, states[8:28], start=estimator, old=states[:16])
    assert refined.seen is not None
    now, judge = set(refined.seen.trained.tolist()), set(refined.seen.held_out.tolist())
    assert now | judge == marks(states[:28])
    assert fitted < now
    assert not judge & now
    assert refined.seen.complete
    # A quarter of 20, out of those that neither training was fitted to; old labels of them were left out.
    chose = judge - set(first.held_out.tolist())
    assert marks([*split_states(states[8:28], 0.25, 0, trained=first.trained)[1]]) <= judge
    assert chose <= marks(states[8:28]) - fitted


def test_training_on_the_same_states_again_holds_the_same_ones_out(model: JointTable, states: list[Example]) -> None:
    estimator = trained(model, states[:20])
    before = estimator.seen
    again = trained(model, states[:20], start=estimator)
    assert before is not None
    assert again.seen is not None
    assert again.seen.held_out.equal(before.held_out)
    fitted, _ = split_states(states[:20], 0.25, 0)
    with pytest.raises(
        ValueError, match="not trained on before, some of which are held out, got 15 that it was trained"
    ):
        trained(model, [*fitted], start=again)


def test_equal_states_stay_on_one_side_of_the_split(states: list[Example]) -> None:
    several = [states[number % 4] for number in range(40)]
    train, judge = split_states(several, 0.25, 0)
    assert not marks([*train]) & marks([*judge])
    assert (len(train), len(judge)) == (30, 10)
    with pytest.raises(ValueError, match=r"holding out 40 states leaves nothing of 40 to train on \(1 of them"):
        split_states([states[0]] * 40, 0.25, 0)


def test_the_record_is_in_the_file(model: JointTable, states: list[Example], tmp_path: Path) -> None:
    estimator = trained(model, states[:20])
    estimator.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["estimator.json", "estimator.safetensors"]
    assert json.loads((tmp_path / "estimator.json").read_text())["seen"] == {
        "trained": 15,
        "held_out": 5,
        "complete": True,
    }
    found = load_estimator(tmp_path)
    assert evaluate_estimator(found, model, states).states == evaluate_estimator(estimator, model, states).states
    many = estimator.seen
    assert many is not None
    before = (tmp_path / "estimator.safetensors").stat().st_size
    estimator.seen = many.after(torch.arange(100_000), torch.arange(0))
    estimator.save_pretrained(tmp_path)
    assert (tmp_path / "estimator.safetensors").stat().st_size - before <= 8 * 100_000 + 64  # and the header


def test_a_file_without_a_record_loads_and_leaves_everything_open(
    model: JointTable, states: list[Example], tmp_path: Path
) -> None:
    estimator = trained(model, states[:20])
    estimator.seen = None
    estimator.save_pretrained(tmp_path)
    assert "seen" not in json.loads((tmp_path / "estimator.json").read_text())
    found = load_estimator(tmp_path)
    assert evaluate_estimator(found, model, states).states == JudgedStates(len(states), 0, 0, 0, complete=False)
    refined = train_estimator(found, model, states[:20], epochs=1, held_out=0.25)[0]
    assert refined.seen is not None
    assert (len(refined.seen.trained), refined.seen.complete) == (15, False)
    refined.save_pretrained(tmp_path)
    assert judged_states(load_estimator(tmp_path), model, states)[1] == JudgedStates(len(states) - 15, 15, 0, 5, False)
    # Nor is anything known of a function, or of weights that no training here made.
    assert not evaluate_estimator(lambda hidden, mask: estimator(hidden, mask), model, states).states.complete
    assert not evaluate_estimator(PairwiseMIEstimator(model.hidden_size, layers=(4,)), model, states).states.complete


@pytest.mark.parametrize("damage", ["no tensor", "another tensor", "another summary", "no mapping"])
def test_a_record_that_does_not_belong_to_its_file_is_refused(
    model: JointTable, states: list[Example], tmp_path: Path, damage: str
) -> None:
    trained(model, states[:20]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "estimator.safetensors")
    config = json.loads((tmp_path / "estimator.json").read_text())
    if damage == "no tensor":
        del weights["seen.held_out"]
    elif damage == "another tensor":
        weights["seen.trained"] = weights["seen.trained"][1:]
    else:
        config["seen"] = {"trained": 3} if damage == "another summary" else [15, 5, True]
    save_file(weights, tmp_path / "estimator.safetensors")
    (tmp_path / "estimator.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{tmp_path}: weights and configuration do not make an estimator: .*seen"):
        load_estimator(tmp_path)


def test_an_interrupted_training_leaves_a_record(model: JointTable, states: list[Example]) -> None:
    estimator = PairwiseMIEstimator(model.hidden_size, layers=(16,))

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_estimator(estimator, model, states[:20], epochs=3, held_out=0.25, on_epoch=stop)
    assert isinstance(estimator.seen, SeenStates)
    assert len(estimator.seen.trained) == 15
