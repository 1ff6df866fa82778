from __future__ import annotations

import itertools
import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mdmi_fast import PairwiseMIEstimator, evaluate_estimator, train_estimator
from mdmi_fast.estimator.data import Example, examples, read_batch, split_states
from mdmi_fast.estimator.loss import PairLoss, Transform
from mdmi_fast.estimator.scorer import Output
from mdmi_fast.estimator.train import TrainingProgress, _order, _total
from mdmi_fast.labels import LabelSet, label_mi
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable
from mdmi_fast.models.identity import identity
from mdmi_fast.ops import token_stats

LENGTH = 5


def chain(*stay: float) -> JointTable:
    """Bits, each like the one before with the probability given."""
    sequences = torch.tensor([*itertools.product(range(2), repeat=LENGTH)])
    same = (sequences[:, 1:] == sequences[:, :-1]).double()
    likely = torch.tensor(stay, dtype=torch.float64)
    return JointTable((same * likely + (1 - same) * (1 - likely)).prod(1).view((2,) * LENGTH))


def labelled(model: JointTable) -> LabelSet:
    """Labels of all states of a chain with two masked bits or more."""
    states = torch.tensor([*itertools.product(range(3), repeat=LENGTH)])
    states = states[(states == 2).sum(1) >= 2]
    labels = label_mi(model, states)
    return LabelSet(states, states == 2, labels.mi, labels.entropy)


@pytest.fixture(scope="module")
def taught() -> tuple[JointTable, LabelSet]:
    model = chain(0.6, 0.72, 0.83, 0.95)
    return model, labelled(model)


class Blank:
    """A model that says nothing of its tokens."""

    mask_token_id, vocab_size, hidden_size = 2, 2, 1

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        return MaskedOutput(torch.zeros(*tokens.shape, 2), tokens.unsqueeze(-1).float())


class Remembering:
    """A model that answers known states from a table: tests train for many epochs on few states."""

    def __init__(self, model: JointTable, states: Tensor) -> None:
        self.mask_token_id, self.vocab_size, self.hidden_size = 2, 2, model.hidden_size
        self.joint = model.joint  # what models are told apart by
        output = model(states)
        self.known = {tuple(s): h for s, h in zip(states.tolist(), output.hidden, strict=True)}

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        return MaskedOutput(torch.zeros(*tokens.shape, 2), torch.stack([self.known[tuple(s)] for s in tokens.tolist()]))


class Reader:
    """A model whose answers are a product of torch; states of one length with labels of no meaning."""

    mask_token_id, vocab_size = 4, 5

    def __init__(self, length: int, width: int) -> None:
        self.length, self.hidden_size = length, width
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(5 * length, 96, generator=generator)
        self.layer = torch.randn(96, width, generator=generator) / 10

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        hidden = self.table[tokens + 5 * torch.arange(tokens.shape[1])] @ self.layer
        logits = hidden[..., :5].clone()
        logits[..., 4] = -torch.inf
        return MaskedOutput(logits, hidden)

    def labelled(self, seed: int) -> Example:
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randperm(self.length, generator=generator)[: 40 - seed].sort().values
        tokens = torch.randint(4, (self.length,), generator=generator).index_fill(0, positions, 4)
        pairs = torch.combinations(positions)
        return Example(tokens, positions, pairs, torch.rand(len(pairs), generator=generator).pow(3), None)


def student(model: JointTable | Remembering) -> PairwiseMIEstimator:
    torch.manual_seed(0)
    return PairwiseMIEstimator(model.hidden_size, layers=(32, 16), combine="interaction", rank=32)


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
    _, judge = split_states(examples(labels), 0.2, 0)
    assert repr(evaluate_estimator(estimator, quick, judge)) == repr(report)  # NaN where a bin is empty
    whole = evaluate_estimator(estimator, model, labels, all_states=True)
    assert whole.mean_absolute_error < before.mean_absolute_error / 2


def test_training_is_the_same_for_a_seed(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    runs = [train_estimator(student(quick), quick, labels, epochs=2, seed=seed) for seed in (1, 1, 2)]
    weights = [torch.cat([p.flatten() for p in estimator.parameters()]) for estimator, _ in runs]
    assert weights[0].equal(weights[1])
    assert repr(runs[0][1]) == repr(runs[1][1])  # NaN where a bin is empty
    assert not weights[0].equal(weights[2])


@pytest.mark.parametrize(("output", "alike"), [("softplus", True), ("identity", False)])
def test_negative_labels_count_as_nothing_where_the_output_is_not(
    taught: tuple[JointTable, LabelSet], output: Output, alike: bool
) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    negative = labels.mi - 0.2 * (labels.mi < 0.1)
    weights = []
    for mi in (negative, negative.clamp(min=0)):
        torch.manual_seed(0)
        fresh = PairwiseMIEstimator(model.hidden_size, layers=(8,), output=output)
        estimator, _ = train_estimator(fresh, quick, labels._replace(mi=mi), epochs=1, held_out=0.8)
        weights.append(estimator.last.weight)
    assert weights[0].equal(weights[1]) == alike


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
    kept, held = split_states(examples(labels), 0.25, seed=4)
    assert len(held) == round(0.25 * len(labels.tokens))
    everything = [tuple(state.tokens.tolist()) for state in (*kept, *held)]
    assert sorted(everything) == sorted(tuple(s) for s in labels.tokens.tolist())
    for state in (kept[0], held[0]):
        row = labels.tokens.tolist().index(state.tokens.tolist())
        assert state.positions.equal(labels.mask[row].nonzero().flatten())
        first, second = state.pairs.unbind(1)
        assert state.mi.equal(labels.mi[row, first, second])


def test_states_of_any_length_make_one_batch(taught: tuple[JointTable, LabelSet]) -> None:
    """A state's rows are the same next to a longer one; what has no label is no pair."""
    _, labels = taught
    long = examples(labels)[100]
    short = long._replace(tokens=long.tokens[:4], positions=torch.tensor([1, 3]), pairs=torch.tensor([[1, 3]]))
    short = short._replace(mi=torch.tensor([0.5]))

    class Padded(Blank):
        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            assert attention_mask is not None
            assert attention_mask.tolist() == [[True] * 5, [True] * 4 + [False]]
            return super().__call__(tokens, attention_mask)

    batch = read_batch([long, short], Padded(), torch.device("cpu"))
    assert batch.mask.tolist() == [[i in long.positions for i in range(5)], [False, True, False, True, False]]
    assert batch.pairs[1].nonzero().tolist() == [[1, 3], [3, 1]]
    assert batch.mi[1, 1, 3] == batch.mi[1, 3, 1] == 0.5
    assert batch.mi[0].equal(labels.mi[100])
    torch.testing.assert_close(batch.masked_share, torch.tensor([len(long.positions) / 5, 0.5]))


def test_hidden_states_that_were_kept_are_read_instead_of_the_model(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    states = examples(labels)[-3:]
    kept = [state._replace(hidden=model(state.tokens[None]).hidden[0, state.positions]) for state in states]
    asked = read_batch(states, model, torch.device("cpu"))
    read = read_batch(kept, Blank(), torch.device("cpu"), needs_stats=False)
    assert read.stats is None
    assert read.hidden.equal(asked.hidden.masked_fill(~asked.mask.unsqueeze(-1), 0.0))
    trained, _ = train_estimator(student(model), model, states, epochs=1, held_out=0.34)
    again, _ = train_estimator(student(model), model, kept, epochs=1, held_out=0.34)
    for a, b in zip(trained.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    "options",
    [
        {"layers": (96, 48)},
        {"layers": (64,), "combine": "interaction", "rank": 24, "marginals": "summary", "output": "bounded"},
        {"layers": (64,), "combine": "product", "weighted_layers": 2},
    ],
    ids=["concat", "interaction", "weighted layers"],
)
def test_training_gives_the_same_bits_with_any_number_of_threads(options: dict[str, Any]) -> None:
    """Sizes at which torch's own products and sums do depend on the number of threads."""
    model = Reader(length=300, width=512)
    states = [model.labelled(seed) for seed in range(6)]
    weights = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            estimator = PairwiseMIEstimator(512, **options)
            train_estimator(estimator, model, states, epochs=2, batch_size=4, held_out=0.2)
            assert torch.get_num_threads() == threads
            weights.append(torch.cat([weight.detach().flatten() for weight in estimator.parameters()]))
    finally:
        torch.set_num_threads(before)
    assert weights[0].equal(weights[1])
    assert weights[0].equal(weights[2])


def test_the_model_is_asked_once_about_a_state(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    asked: list[tuple[int, ...]] = []

    class Counted(JointTable):
        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            asked.extend(map(tuple, tokens.tolist()))
            return super().__call__(tokens, attention_mask)

    states = examples(labels)[-12:]
    train_estimator(student(model), Counted(model.joint), states, epochs=3, held_out=0.25)
    assert sorted(asked) == sorted(tuple(state.tokens.tolist()) for state in states)


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


@pytest.mark.parametrize("transform", ["root", "none", "log"])
@pytest.mark.parametrize("weights", [{}, {"underestimation": 4.0, "emphasis": 2.0}])
def test_the_constant_of_a_loss_is_its_least(transform: Transform, weights: dict[str, float]) -> None:
    mi = torch.rand(1, 40, 40, generator=torch.Generator().manual_seed(0)).pow(4)
    pairs, loss = torch.ones(1, 40, 40, dtype=torch.bool), PairLoss(transform, **weights)
    least = loss.constant(mi[pairs])
    losses = [float(loss.total(torch.full_like(mi, least * factor), mi, pairs)) for factor in (0.99, 1.0, 1.01)]
    assert losses[1] < min(losses[0], losses[2])


@pytest.mark.parametrize("output", ["softplus", "bounded", "identity"])
def test_a_fresh_network_begins_at_what_it_is_told(output: Output) -> None:
    torch.manual_seed(0)
    estimator = PairwiseMIEstimator(8, layers=(16,), output=output)
    for nats in (1e-4, 0.01, 0.3):
        estimator.begin_at(nats)
        stats = token_stats(torch.tensor([[[0.0, 2.9]]]).expand(1, 6, 2))  # the entropies do not matter here
        stats = stats._replace(entropy=torch.ones(1, 6))
        predicted = estimator(torch.zeros(1, 6, 8), torch.ones(1, 6, dtype=torch.bool), stats)[0, 0, 1]
        with torch.no_grad():
            alone = estimator.last.weight @ torch.relu(estimator.left[0].bias)
        if output == "identity":
            torch.testing.assert_close(predicted - alone[0], torch.tensor(nats))
        else:
            torch.testing.assert_close(predicted.log(), math.log(nats) + alone[0], atol=0.15, rtol=0)


def test_labels_near_nothing_do_not_end_in_nothing() -> None:
    """Most pairs share 0, the others 0.002 nats: begun above that, no training comes back from where it is pushed."""
    generator = torch.Generator().manual_seed(0)
    relation = torch.randn(16, 3, generator=generator) / 4
    pairs = torch.triu_indices(20, 20, offset=1).mT
    states = []
    for number in range(30):
        hidden = torch.randn(20, 16, generator=generator)
        features = hidden @ relation
        mi = (0.002 * ((features @ features.mT) - 1).clamp(min=0))[pairs[:, 0], pairs[:, 1]]
        states.append(Example(torch.full((20,), number), torch.arange(20), pairs, mi, hidden))

    class Kept(Blank):
        hidden_size = 16

        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            hidden = [states[number].hidden for number in tokens[:, 0].tolist()]
            return MaskedOutput(torch.zeros(*tokens.shape, 2), torch.stack(hidden))  # type: ignore[arg-type]

    torch.manual_seed(0)
    fresh = PairwiseMIEstimator(16, layers=(64,), combine="product")
    _, report = train_estimator(fresh, Kept(), states, epochs=6, batch_size=4, learning_rate=3e-3)
    assert report.pearson > 0.5


def test_a_loss_ignores_what_is_not_a_pair() -> None:
    predicted = torch.full((1, 2, 2), math.nan)
    total = PairLoss().total(predicted, torch.zeros(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.bool))
    assert float(total) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs and batch_size must be at least 1"),
        ({"batch_size": 0}, "epochs and batch_size must be at least 1"),
        ({"held_out": 0.0}, "held_out must be a share between 0 and 1, got 0.0"),
        ({"held_out": 0.999}, "leaves nothing"),
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
    mi[130, 0, 1] = torch.inf  # of the last state, all masked
    with pytest.raises(ValueError, match="labels must be finite, got another one in state 130"):
        train_estimator(student(model), model, labels._replace(mi=mi))


def test_labels_without_pairs_are_refused_before_the_first_epoch(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    single = examples(labels)[-1]
    single = single._replace(positions=single.positions[:1], pairs=single.pairs[:0], mi=single.mi[:0])
    alone = [single._replace(tokens=single.tokens + number) for number in range(4)]
    for states, reason in (
        (alone, "two in the states held out, got 0 in 3 states and 0 in 1"),
        (examples(labels)[-1:], "holding out 1 states leaves nothing of 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            train_estimator(student(model), model, states, on_epoch=lambda epoch: pytest.fail("an epoch was spent"))


def test_widths_that_differ_are_refused_with_both(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    with pytest.raises(
        ValueError, match=f"reads hidden states of width 3, got JointTable of width {model.hidden_size}"
    ):
        train_estimator(PairwiseMIEstimator(3, layers=(4,)), model, labels)
    old = [state._replace(hidden=torch.zeros(len(state.positions), 3)) for state in examples(labels)]
    with pytest.raises(
        ValueError, match=f"old must bring hidden states of width {model.hidden_size}.*got 3 in state 0"
    ):
        train_estimator(student(model), model, labels, old=old)


# --- interruption, several processes, refinement


class Interrupted(PairwiseMIEstimator):
    """Stops after some calls, as a killed process does."""

    left = 0

    def forward(self, hidden: Tensor, mask: Tensor, stats: Any = None) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().forward(hidden, mask, stats)


@pytest.mark.parametrize("epochs_before", [0.0, 1.5, 3.0])
def test_an_interrupted_training_ends_like_an_uninterrupted_one(
    taught: tuple[JointTable, LabelSet], tmp_path: Path, epochs_before: float
) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)

    def student(calls: int = 0) -> Interrupted:
        torch.manual_seed(0)
        estimator = Interrupted(quick.hidden_size, layers=(32, 16), combine="interaction", rank=32)
        estimator.left = calls
        return estimator

    options: dict[str, Any] = {"epochs": 4, "learning_rate": 1e-2, "checkpoint": tmp_path / "a" / "c.pt"}
    whole, report = train_estimator(student(), quick, labels, **options | {"checkpoint": None})
    an_epoch = (-whole.left - 1) // 4  # and one judgement more at the end
    with pytest.raises(KeyboardInterrupt):
        train_estimator(student(1 + int(epochs_before * an_epoch)), quick, labels, **options)
    assert options["checkpoint"].exists() == (epochs_before >= 1)
    epochs: list[TrainingProgress] = []
    resumed, again = train_estimator(student(), quick, labels, **options, on_epoch=epochs.append)
    assert [e.epoch for e in epochs] == [*range(int(epochs_before), 4)]
    assert repr(report) == repr(again)  # NaN where a bin is empty
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert a.equal(b)


def test_a_finished_training_is_not_repeated(taught: tuple[JointTable, LabelSet], tmp_path: Path) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    options: dict[str, Any] = {"epochs": 2, "checkpoint": tmp_path / "c.pt"}
    first, _ = train_estimator(student(quick), quick, labels, **options)
    epochs: list[TrainingProgress] = []
    second, _ = train_estimator(student(quick), quick, labels, **options, on_epoch=epochs.append)
    assert not epochs
    assert first.last.weight.equal(second.last.weight)


@pytest.mark.parametrize(
    ("options", "changed"),
    [({"seed": 1}, "seed"), ({"emphasis": 2.0}, "loss"), ({"epochs": 3, "batch_size": 5}, "epochs, batch_size")],
)
def test_a_checkpoint_of_another_training_is_refused(
    taught: tuple[JointTable, LabelSet], tmp_path: Path, options: dict[str, Any], changed: str
) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    train_estimator(student(quick), quick, labels, epochs=1, checkpoint=tmp_path / "c.pt")
    with pytest.raises(ValueError, match=f"is of a training with other {changed}; delete it"):
        train_estimator(student(quick), quick, labels, **{"epochs": 1, "checkpoint": tmp_path / "c.pt"} | options)


def test_a_checkpoint_knows_its_labels_on_every_processor() -> None:
    """Instruction sets add in their own orders, in all but one of which the 1 is lost beside 2^60."""
    for order in itertools.permutations([2.0**60, 1.0, -(2.0**60)]):
        state = Example(
            torch.full((3,), 2), torch.arange(3), torch.combinations(torch.arange(3)), torch.tensor(order), None
        )
        assert _total([state]) == 1.0


def one_of_two(rank: int, port: int, joint: Tensor, labels: LabelSet, folder: Path) -> None:
    """A process of a training whose processes share no folder."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    quick = Remembering(JointTable(joint), labels.tokens)
    own = folder / str(rank)
    estimator, _ = train_estimator(student(quick), quick, labels, epochs=3, checkpoint=own / "c.pt")
    torch.save(estimator.state_dict(), own / "weights.pt")
    dist.destroy_process_group()


def test_processes_that_share_no_folder_go_on_from_the_checkpoint_of_the_first(
    taught: tuple[JointTable, LabelSet], tmp_path: Path
) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    whole, _ = train_estimator(student(quick), quick, labels, epochs=3)

    def interrupt(_: TrainingProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_estimator(student(quick), quick, labels, epochs=3, checkpoint=tmp_path / "0" / "c.pt", on_epoch=interrupt)
    assert (tmp_path / "0" / "c.pt").exists()
    (tmp_path / "1").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(one_of_two, (port, model.joint, labels, tmp_path), nprocs=2)
    for rank in ("0", "1"):
        found = torch.load(tmp_path / rank / "weights.pt", weights_only=True)
        assert all(value.equal(found[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("content", [b"", b"nonsense", None], ids=["empty", "nonsense", "truncated"])
def test_a_damaged_checkpoint_is_refused(
    taught: tuple[JointTable, LabelSet], tmp_path: Path, content: bytes | None
) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    path = tmp_path / "c.pt"
    train_estimator(student(quick), quick, labels, epochs=1, checkpoint=path)
    path.write_bytes(path.read_bytes()[:-99] if content is None else content)
    with pytest.raises(ValueError, match="not the checkpoint of a training"):
        train_estimator(student(quick), quick, labels, epochs=1, checkpoint=path)


def test_a_checkpoint_that_began_with_other_weights_is_refused(
    taught: tuple[JointTable, LabelSet], tmp_path: Path
) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    other = student(quick)
    with torch.no_grad():
        other.last.weight.mul_(2)
    train_estimator(student(quick), quick, labels, epochs=1, checkpoint=tmp_path / "c.pt")
    with pytest.raises(ValueError, match="is of a training with other start; delete it"):
        train_estimator(other, quick, labels, epochs=1, checkpoint=tmp_path / "c.pt")


def test_what_a_process_killed_while_writing_left_is_removed(
    taught: tuple[JointTable, LabelSet], tmp_path: Path
) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    (tmp_path / ".c.pt.0123456789abcdef.pt").write_bytes(b"half a checkpoint")
    train_estimator(student(quick), quick, labels, epochs=1, checkpoint=tmp_path / "c.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def test_refinement_goes_on_from_the_weights_it_is_given(taught: tuple[JointTable, LabelSet]) -> None:
    model, labels = taught
    quick = Remembering(model, labels.tokens)
    estimator, _ = train_estimator(student(quick), quick, labels, epochs=1)
    before = estimator.last.bias.clone()
    train_estimator(estimator, quick, labels, epochs=1, learning_rate=0.0)
    assert estimator.last.bias.equal(before)


def test_refinement_follows_a_model_that_moved_and_remembers_the_old_one(taught: tuple[JointTable, LabelSet]) -> None:
    before, old = taught
    after = chain(0.95, 0.8, 0.7, 0.55)
    new = labelled(after)
    quick_before, quick_after = Remembering(before, old.tokens), Remembering(after, new.tokens)
    estimator, _ = train_estimator(student(before), quick_before, old, epochs=25, learning_rate=1e-2)
    assert estimator.trained_on == identity(quick_before)
    # The same states throughout, whose labels have changed: all are judged, whichever it was trained on.
    good = evaluate_estimator(estimator, quick_before, old, all_states=True).pearson
    lost = evaluate_estimator(estimator, quick_after, new, all_states=True).pearson
    assert lost < good - 0.1
    few, unseen = split_states(examples(new), 0.5, seed=1)
    refined, _ = train_estimator(estimator, quick_after, few, old=old, epochs=8, learning_rate=5e-3)
    assert refined.trained_on == identity(quick_after)
    assert evaluate_estimator(refined, quick_after, unseen, all_states=True).pearson > (good + lost) / 2


def test_old_states_are_mixed_in_one_to_one_and_drawn_anew() -> None:
    orders = [_order(6, 50, seed=3, epoch=epoch) for epoch in range(40)]
    for order in orders:
        assert sorted(order[order < 6].tolist()) == [*range(6)]
        assert len(order[order >= 6].unique()) == 6
        assert order.max() < 56
    assert len(torch.cat(orders)[torch.cat(orders) >= 6].unique()) == 50
    assert len(_order(6, 2, seed=3, epoch=0)) == 8  # no more than there are
    assert _order(6, 0, seed=3, epoch=0).equal(_order(6, 0, seed=3, epoch=0))
