from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from mdmi_fast import DistanceTable, PairwiseMIEstimator, evaluate_estimator, load_estimator, load_model
from mdmi_fast.estimator import SeenStates, evaluate_splits
from mdmi_fast.estimator.baselines import BASELINES
from mdmi_fast.estimator.data import examples
from mdmi_fast.estimator.evaluate import verdict
from mdmi_fast.estimator.plots import plot_evaluation
from mdmi_fast.estimator.report import TAUS
from mdmi_fast.estimator.seen import fingerprints
from mdmi_fast.estimator.splits import BUILT, adversarial_states, build_split, shifted_states
from mdmi_fast.labels import LabelSet, label_mi
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable
from mdmi_fast.tasks.sudoku.puzzles import random_boards


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


def test_labels_that_are_not_finite_are_refused() -> None:
    mi = symmetric(2, 4, 4)
    mi[1, 0, 1] = mi[1, 1, 0] = math.inf
    with pytest.raises(ValueError, match="labels must be finite, got 1 that are not"):
        report_of(torch.zeros_like(mi), mi)


def test_a_report_by_threshold_mask_share_and_partner_agrees_with_numpy() -> None:
    mi = symmetric(9, 6, 6).square() / 8
    predicted = ((mi + 0.1 * symmetric(9, 6, 6)) * 10).round() / 10  # with ties
    mask = torch.rand(9, 6) < 0.7
    report = report_of(predicted, mi, mask, tau=0.3, batch_size=4)
    pairs = mask.unsqueeze(-1) & mask.unsqueeze(-2) & ~torch.eye(6, dtype=torch.bool)
    p, a = predicted[pairs.triu()].double().numpy(), mi[pairs.triu()].double().numpy()
    for at, tau in zip(report.by_tau, TAUS, strict=True):
        called, independent = p < tau, a < tau
        right = (called & independent).sum()
        assert at.tau == tau
        assert at.precision == pytest.approx(right / called.sum() if called.any() else math.nan, nan_ok=True)
        assert at.recall == pytest.approx(right / independent.sum() if independent.any() else math.nan, nan_ok=True)
    ratio = mask.float().mean(1)[:, None, None].expand_as(mi)[pairs.triu()].numpy()
    assert sum(part.pairs for part in report.by_mask_ratio) == len(p)
    for part in report.by_mask_ratio:
        inside = (ratio >= part.low) & ((ratio < part.high) | (part.high == 1.0))
        assert part.pairs == inside.sum()
        if part.pairs > 2:
            assert part.pearson == pytest.approx(np.corrcoef(p[inside], a[inside])[0, 1])
    ranks, found = [], []
    for row, i in mask.nonzero().tolist():
        own, true = (x[row, i][pairs[row, i]].numpy() for x in (predicted, mi))
        if len(own) > 1 and len(set(own.tolist())) > 1:
            ranks.append(np.corrcoef(mean_ranks(own), mean_ranks(true))[0, 1])
        if len(own) > 1 and true.max() >= 0.3:
            found.append(own.argmax() == true.argmax())
    assert report.partner_rank == pytest.approx(np.mean(ranks))
    assert report.top_partner == pytest.approx(np.mean(found))


def reported(**fields: Any) -> Any:
    mi = symmetric(2, 4, 4)
    return report_of(mi, mi)._replace(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"pearson": 0.9, "false_independence": 0.04},
            "usable: Pearson r = 0.900; 4.0% false independence at 0.01 nats",
        ),
        (
            {"pearson": 0.8, "false_independence": 0.05},
            "usable: Pearson r = 0.800, below the goal of 0.85; 5.0% false independence at 0.01 nats",
        ),
        (
            {"pearson": 0.9, "false_independence": 0.06, "safe_tau": 0.02},
            "usable: Pearson r = 0.900; as a budget, and as a threshold from 0.02 nats (6.0% false independence at 0.01)",
        ),
        (
            {"pearson": 0.9, "false_independence": 0.06, "safe_tau": math.nan},
            "retrain: Pearson r = 0.900, but more than 5% false independence at every threshold",
        ),
        (
            {"pearson": 0.9, "false_independence": math.nan, "safe_tau": 0.1},
            (
                "usable: Pearson r = 0.900; as a budget, and as a threshold from 0.1 nats "
                "(no pair is predicted independent at 0.01)"
            ),
        ),
        ({"pearson": 0.74}, "retrain: Pearson r = 0.740, below 0.75"),
        ({"pearson": math.nan}, "retrain: Pearson r = nan, below 0.75"),
    ],
)
def test_the_verdict_follows_the_limits(fields: dict[str, Any], text: str) -> None:
    assert verdict(reported(**fields)) == text


def test_the_safe_threshold_is_safe_from_there_on() -> None:
    mi = torch.zeros(1, 22, 22)
    predicted = torch.full_like(mi, 1.0)
    mi[0, 0, 1:], predicted[0, 0, 1:] = 0.0005, 0.0  # right at .001
    mi[0, 1, 2:4], predicted[0, 1, 2:4] = 0.03, 0.015  # at .02, two of 23 called independent are not
    report = report_of(predicted, mi)
    assert [at.tau for at in report.by_tau if at.false_independence > 0.05] == [0.02]
    assert report.safe_tau == 0.05


# --- splits and baselines


@pytest.fixture(scope="module")
def evaluation() -> Any:
    model = load_model("sudoku:weak")
    states = sudoku_states(4)
    splits = {"in distribution": labelled(model, states)}
    splits |= {name: build_split(name, model, [*states]) for name in BUILT}
    return evaluate_splits(load_estimator("sudoku:weak"), model, splits)


def labelled(model: Any, tokens: Tensor) -> LabelSet:
    labels = label_mi(model, tokens)
    return LabelSet(tokens, tokens == model.mask_token_id, labels.mi, labels.entropy)


def sudoku_states(count: int) -> Tensor:
    boards = torch.from_numpy(random_boards(count, seed=2)).long()
    return boards.masked_fill(torch.rand(boards.shape) < 0.4, 0)


def test_every_split_is_judged_beside_the_baselines(evaluation: Any) -> None:
    assert [*evaluation.reports] == ["in distribution", "shifted", "adversarial"]
    for reports in evaluation.reports.values():
        assert [*reports] == ["estimator", *BASELINES]
        assert len({report.pairs for report in reports.values()}) == 1
        assert math.isnan(reports["constant"].pearson)
    here = evaluation.reports["in distribution"]
    assert all(here["estimator"].mean_absolute_error < here[name].mean_absolute_error for name in [*here][1:])
    assert evaluation.verdict == verdict(here["estimator"], here["table"], evaluation.leads["table"])
    assert evaluation.leads["table"].low > 0
    for name, sample in evaluation.samples.items():
        assert sample.shape == (evaluation.reports[name]["estimator"].pairs, 2)


def test_baselines_are_scaled_by_the_best_rising_line() -> None:
    table = torch.rand(3, 3, 3, 3)
    model = JointTable(table)
    tokens = torch.full((1, 4), 3)
    labels = labelled(model, tokens)
    reports = evaluate_splits(PairwiseMIEstimator(model.hidden_size, layers=(4,)), model, {"only": labels}).reports
    upper = torch.ones(4, 4).triu(1).bool()
    mi = labels.mi[0][upper].double().numpy()
    least = torch.minimum(labels.entropy[0].unsqueeze(0), labels.entropy[0].unsqueeze(1))[upper].double().numpy()
    for name, x in (("min(H_i, H_j)", least), ("constant", np.zeros(6))):
        slope = 0.0 if name == "constant" else np.polyfit(x, mi, 1)[0]
        line = mi.mean() + max(slope, 0.0) * (x - x.mean())
        assert reports["only"][name].mean_absolute_error == pytest.approx(np.abs(line - mi).mean(), abs=1e-7)
        expected = np.corrcoef(x, mi)[0, 1] if slope > 0 else math.nan
        assert reports["only"][name].pearson == pytest.approx(expected, abs=1e-5, nan_ok=True)


class Chained:
    """A model whose hidden state is the number of the state, which is its first token."""

    mask_token_id, vocab_size, hidden_size = 99, 98, 1

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        return MaskedOutput(torch.zeros(*tokens.shape, 98), tokens[:, :1].expand(tokens.shape).unsqueeze(-1).float())


class Answers(PairwiseMIEstimator):
    """Says what it was given for each state."""

    def __init__(self, answers: Tensor) -> None:
        super().__init__(1, (2,))
        self.answers = answers

    def forward(self, hidden: Tensor, mask: Tensor, stats: Any = None) -> Tensor:
        return self.answers[hidden[:, 0, 0].long()]


def by_distance(noise: float) -> tuple[LabelSet, Tensor]:
    """Labels of 20 states that fall with the distance, and something else on top of it."""
    generator = torch.Generator().manual_seed(7)
    place = torch.arange(9)
    decay = 1 / (1 + (place - place.unsqueeze(-1)).abs().float())
    extra = noise * torch.rand(20, 9, 9, generator=generator)
    mi = decay + extra + extra.mT
    tokens = torch.full((20, 9), 99)
    tokens[:, 0] = torch.arange(20)
    return LabelSet(tokens, tokens == 99, mi, torch.zeros(20, 9)), decay


def test_an_estimator_that_knows_no_more_than_the_distance_is_told_to_give_way_to_the_table() -> None:
    labels, decay = by_distance(0.05)
    unsure = Answers(decay + 0.1 * symmetric(20, 9, 9))
    evaluation = evaluate_splits(unsure, Chained(), {"only": labels})
    assert evaluation.verdict.startswith("use the table, by mdmi-fast train --architecture table: Pearson r = 0.9")
    oracle = evaluate_splits(Answers(labels.mi), Chained(), {"only": labels})
    assert oracle.verdict.startswith("usable: Pearson r = 1.000")
    assert oracle.leads["table"].low > 0
    reports = oracle.reports["only"]
    assert reports["table"].interval[0] < reports["table"].pearson < reports["table"].interval[1]
    assert abs(reports["shuffled"].pearson) < 0.3


def test_the_table_is_fitted_to_states_the_estimator_was_trained_on_and_judged_on_others() -> None:
    labels, _ = by_distance(0.5)
    states = examples(labels)
    estimator = Answers(labels.mi)
    estimator.seen = SeenStates.none(complete=True).after(fingerprints(states[:12], None), fingerprints([], None))
    judged = evaluate_splits(estimator, Chained(), {"only": labels}).reports["only"]["table"]
    expected = evaluate_estimator(DistanceTable.fit(states[:12]), Chained(), states[12:])
    assert judged.pearson == pytest.approx(expected.pearson, abs=1e-6)
    assert judged.states.judged == 8


def test_the_interval_of_a_correlation_is_that_of_resampled_states() -> None:
    mi = symmetric(30, 5, 5)
    predicted = mi + 0.8 * symmetric(30, 5, 5)
    report = report_of(predicted, mi)
    p, a = (x[:, torch.ones(5, 5).triu(1).bool()].double().numpy() for x in (predicted, mi))
    drawn = np.random.default_rng(1).integers(0, 30, (2000, 30))
    found = [np.corrcoef(p[some].ravel(), a[some].ravel())[0, 1] for some in drawn]
    # The ends of 400 draws stray by about a tenth of the width.
    width = np.quantile(found, 0.975) - np.quantile(found, 0.025)
    assert report.interval == pytest.approx((np.quantile(found, 0.025), np.quantile(found, 0.975)), abs=0.25 * width)
    alone = report_of(predicted[:1], mi[:1])
    assert all(math.isnan(end) for end in alone.interval)


def test_no_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one set of labels, got none"):
        evaluate_splits(load_estimator("sudoku"), load_model("sudoku"), {})


def test_shifted_states_mask_one_run() -> None:
    model, states = load_model("sudoku:weak"), sudoku_states(20)
    shifted = shifted_states(model, states)
    for before, after in zip(states, shifted, strict=True):
        places = (after == 0).nonzero().flatten()
        assert len(places) >= 8  # a tenth
        assert places.equal(torch.arange(places[0], places[-1] + 1))
        seen = (before > 0) & (after > 0)
        assert before[seen].equal(after[seen])
    assert shifted.equal(shifted_states(model, states))
    assert not shifted.equal(shifted_states(model, states, seed=1))


def test_adversarial_states_are_of_four_kinds() -> None:
    model, states = load_model("sudoku:weak"), sudoku_states(8)
    built = adversarial_states(model, states)
    for row in (0, 4):  # the same permutation in both
        assert (built[row] == 0).sum() == (states[row] == 0).sum()
        assert not built[row].equal(states[row])
    for row in (1, 5):
        visible = (built[row] > 0).nonzero().flatten()
        motif = {int(place) % 10: int(built[row, place]) for place in visible}
        assert all(motif[int(place) % 10] == int(built[row, place]) for place in visible)
        assert (built[row] == 0).equal(states[row] == 0)
    for row in (2, 6):
        assert len(built[row].unique()) == 2
    for row in (3, 7):
        assert built[row, :40].equal(built[row, 40:80])
        assert (built[row, :40] == 0).any()


class Framed:
    """A model that never writes tokens 0 and 1: they begin, end and pad its sequences of tokens 2 to 4; 5 is the mask."""

    mask_token_id, vocab_size, hidden_size, pad_token_id = 5, 6, 1, 1

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        logits = torch.zeros(*tokens.shape, 6)
        logits[..., [0, 1, 5]] = -torch.inf
        logits[tokens == 1] = 0.0  # as models answer padding
        return MaskedOutput(logits, tokens.unsqueeze(-1).float())


@pytest.mark.parametrize("build", [shifted_states, adversarial_states])
def test_start_end_and_padding_stay_where_they_are(build: Any) -> None:
    tokens = torch.randint(2, 6, (8, 12))
    tokens[:, 0], tokens[:, 10], tokens[3, 11] = 0, 0, 1
    built = build(Framed(), tokens)
    for place in (0, 10, 11):
        assert built[:, place].equal(tokens[:, place])
    inside = built[:, 1:10]
    assert ((inside >= 2) & (inside <= 5)).all()
    assert ((built == 5).sum(1) >= 2).all()
    with pytest.raises(ValueError, match="at least four positions that are free in all, got 3"):
        build(Framed(), tokens[:, :4])


class Counting:
    """A model of bits, any number of them: a bit is as likely as there are such bits, and one more, in sight."""

    mask_token_id, vocab_size, hidden_size = 2, 2, 2

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        seen = torch.stack([(tokens == bit).sum(1) + 1.0 for bit in range(2)], dim=1)
        logits = seen.log().unsqueeze(1).expand(*tokens.shape, 2)
        return MaskedOutput(logits, logits.exp())


def test_a_split_is_built_of_states_of_any_length() -> None:
    model = Counting()
    states = [torch.randint(0, 3, (length,)) for length in (6, 5, 6, 5, 5, 6)]
    for state in states:
        state[[1, 3]] = 2
    for name in BUILT:
        found = build_split(name, model, states)
        assert [len(state.tokens) for state in found] == [5, 5, 5, 6, 6, 6]
        for state in found:
            expected = label_mi(model, state.tokens[None]).mi[0]
            assert state.mi.equal(expected[state.pairs[:, 0], state.pairs[:, 1]])
            assert len(state.positions) >= 2
            assert state.mi.max() > 0
    assert build_split("adversarial", model, states[:1], seed=2)[0].tokens.unique().numel() == 2  # all equal but masked


def test_an_evaluation_is_drawn_on_one_page(evaluation: Any, tmp_path: Path) -> None:
    plot_evaluation(evaluation, tmp_path / "page.png")
    assert imread(tmp_path / "page.png").std() > 0.05
    assert [path.name for path in tmp_path.iterdir()] == ["page.png"]
