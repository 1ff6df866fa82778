from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mdmi_fast import (
    Confidence,
    ConfidenceBudget,
    EntropyBound,
    MIBudget,
    MIThreshold,
    PairwiseMIEstimator,
    Probing,
    Random,
    Sequential,
    TokenStats,
    TopK,
    label_mi,
    ops,
    reference,
)
from mdmi_fast.decoding import (
    AttentionGraph,
    Coloring,
    ConfidenceFactor,
    Memory,
    Policy,
    Schedule,
    Shuffled,
    Stability,
    Step,
    TimeLimited,
)
from mdmi_fast.decoding.randomness import draw_seeds, uniform
from mdmi_fast.models.exact import JointTable

pytestmark = pytest.mark.arithmetic

ROWS, LENGTH, WIDTH = 40, 7, 5


def symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2


class Given:
    """A source of mutual information that says what it was told."""

    def __init__(self, mi: Tensor) -> None:
        self.mi = mi

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.mi


class Pass:
    """Random statistics of a pass. Values come in steps of 1/8, so there are ties and sums are exact."""

    def __init__(self, rows: int = ROWS, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(7)

        def steps(*shape: int) -> Tensor:
            return torch.randint(0, 9, shape, generator=generator) / 8

        self.mask = torch.rand(rows, length, generator=generator) < 0.7
        self.mask[0], self.mask[1] = True, False
        self.mask[2] = torch.arange(length) == length // 2
        nonsense = torch.full((rows, length), torch.nan).where(~self.mask, 0.0)  # what is unmasked is not looked at
        self.entropy, self.confidence = steps(rows, length) + nonsense, steps(rows, length) + nonsense
        self.hidden = torch.randn(rows, length, WIDTH, generator=generator)
        self.mi = symmetric(steps(rows, length, length) / 4) * (1 - torch.eye(length))
        margin, token = torch.zeros(rows, length), torch.zeros(rows, length, dtype=torch.int64)
        self.stats = TokenStats(self.entropy, self.entropy, self.confidence, token, margin)

    def select(self, policy: Policy, step: int = 0) -> tuple[list[set[int]], list[float]]:
        selection = policy.select(self.stats, self.hidden, self.mask, step)
        assert selection.selected.shape == self.mask.shape
        assert selection.selected.dtype == torch.bool
        assert selection.spent.shape == self.mask.shape[:1]
        assert selection.spent.dtype == torch.float64
        assert not (selection.selected & ~self.mask).any()
        return [set(row.nonzero().flatten().tolist()) for row in selection.selected], selection.spent.tolist()

    def sequences(self) -> list[tuple[list[int], list[float], list[float], list[list[float]]]]:
        """Masked positions, entropies, confidences and mutual information of every sequence."""
        masked = [[i for i, m in enumerate(row) if m] for row in self.mask.tolist()]
        return list(zip(masked, self.entropy.tolist(), self.confidence.tolist(), self.mi.tolist(), strict=True))


@pytest.fixture(scope="module")
def numbers() -> Pass:
    return Pass()


def largest_prefix(order: list[int], fits: Any) -> set[int]:
    """The most of the first positions that fit, one at least."""
    best = set(order[:1])
    for count in range(1, len(order) + 1):
        if fits(order[:count]):
            best = set(order[:count])
    return best


def test_sequential_takes_the_position_of_lowest_entropy(numbers: Pass) -> None:
    selected, spent = numbers.select(Sequential())
    for (masked, h, _, _), chosen in zip(numbers.sequences(), selected, strict=True):
        assert chosen == ({min(masked, key=lambda i: (h[i], i))} if masked else set())
    assert set(spent) == {0.0}


@pytest.mark.parametrize("k", [1, 2, 3, LENGTH, 100])
def test_topk_takes_the_most_confident(numbers: Pass, k: int) -> None:
    selected, _ = numbers.select(TopK(k))
    for (masked, _, c, _), chosen in zip(numbers.sequences(), selected, strict=True):
        assert chosen == set(sorted(masked, key=lambda i: (-c[i], i))[:k])


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 1.0, 1.1, math.inf])
def test_confidence_takes_all_that_reach_the_threshold_or_the_best(numbers: Pass, threshold: float) -> None:
    selected, _ = numbers.select(Confidence(threshold))
    for (masked, _, c, _), chosen in zip(numbers.sequences(), selected, strict=True):
        sure = {i for i in masked if c[i] >= threshold}
        assert chosen == (sure or set(sorted(masked, key=lambda i: (-c[i], i))[:1]))


@pytest.mark.parametrize("epsilon", [0.0, 0.125, 0.5, 1.0, 2.5, math.inf])
def test_confidence_budget_takes_the_most_whose_risk_fits(numbers: Pass, epsilon: float) -> None:
    selected, spent = numbers.select(ConfidenceBudget(epsilon))
    for (masked, _, c, _), chosen, cost in zip(numbers.sequences(), selected, spent, strict=True):
        order = sorted(masked, key=lambda i: (1 - c[i], i))
        assert chosen == largest_prefix(order, lambda some, c=c: sum(1 - c[i] for i in some) <= epsilon)
        assert cost == sum(1 - c[i] for i in chosen)


@pytest.mark.parametrize("gamma", [0.0, 0.125, 0.5, 1.0, 2.5, math.inf])
def test_entropy_bound_leaves_the_largest_entropy_out_of_the_sum(numbers: Pass, gamma: float) -> None:
    selected, spent = numbers.select(EntropyBound(gamma))
    for (masked, h, _, _), chosen, cost in zip(numbers.sequences(), selected, spent, strict=True):

        def price(some: Any, h: list[float] = h) -> float:
            return sum(h[i] for i in some) - max((h[i] for i in some), default=0.0)

        order = sorted(masked, key=lambda i: (h[i], i))
        assert chosen == largest_prefix(order, lambda some, price=price: price(some) <= gamma)
        assert cost == price(chosen)


def test_entropy_bound_does_not_lose_small_entropies_beside_large_ones() -> None:
    entropy = torch.tensor([[1e-20, 1.0, 2.0]])
    stats = TokenStats(entropy, entropy, entropy, entropy.long(), entropy)
    selected = EntropyBound(0.0).select(stats, entropy, torch.ones(1, 3, dtype=torch.bool), 0).selected
    assert selected.tolist() == [[True, False, False]]


@pytest.mark.parametrize("gamma", [0.0, 0.25, 1.0, math.inf])
@pytest.mark.parametrize("order", ["entropy", "cheapest"])
@pytest.mark.parametrize(("lam", "entropy_weight", "limit"), [(1.0, 1.0, None), (2.0, 0.0, None), (0.0, 1.0, 2)])
def test_mi_budget_is_the_reference_rule(
    numbers: Pass, gamma: float, order: Any, lam: float, entropy_weight: float, limit: int | None
) -> None:
    policy = MIBudget(Given(numbers.mi), gamma, lam=lam, entropy_weight=entropy_weight, order=order, limit=limit)
    selected, spent = numbers.select(policy)
    budget = torch.full((ROWS,), gamma, dtype=torch.float64)
    args = (numbers.entropy, numbers.mi, budget, lam, entropy_weight, order, numbers.mask, limit)
    expected, cost = reference.select_budget(*args)
    assert selected == [set(row.nonzero().flatten().tolist()) for row in expected]
    assert spent == cost.tolist()


@pytest.mark.parametrize("tau", [0.0, 0.05, 0.125, 0.2, math.inf])
@pytest.mark.parametrize("limit", [None, 2])
def test_mi_threshold_takes_a_maximal_independent_set(numbers: Pass, tau: float, limit: int | None) -> None:
    selected, _ = numbers.select(MIThreshold(Given(numbers.mi), tau, limit))
    for (masked, h, _, mi), chosen in zip(numbers.sequences(), selected, strict=True):
        expected: list[int] = []
        for i in sorted(masked, key=lambda i: (h[i], i)):
            if all(mi[i][j] < tau for j in expected) and (limit is None or len(expected) < limit):
                expected.append(i)
        assert chosen == set(expected)


@pytest.mark.parametrize("order", ["entropy", "cheapest"])
def test_mi_budget_asks_an_estimator_and_agrees_with_its_predictions(numbers: Pass, order: Any) -> None:
    estimator = PairwiseMIEstimator(WIDTH, layers=(8,)).eval()
    with torch.no_grad():
        mi = estimator(numbers.hidden, numbers.mask)
        for gamma in (0.1, 0.5, 1.5):
            asked = numbers.select(MIBudget(estimator, gamma, order=order))
            told = numbers.select(MIBudget(Given(mi), gamma, order=order))
            assert asked[0] == told[0]
            assert asked[1] == pytest.approx(told[1])


def test_estimators_that_read_the_marginals_are_handed_them(numbers: Pass) -> None:
    estimator = PairwiseMIEstimator(WIDTH, layers=(4,), marginals="summary", output="bounded").eval()
    with torch.no_grad():
        mi = estimator(numbers.hidden, numbers.mask, numbers.stats)
    rules: list[Any] = [
        lambda source: MIBudget(source, 0.5),
        lambda source: MIBudget(source, 0.5, order="cheapest"),
        lambda source: MIThreshold(source, 0.05),
        lambda source: Coloring(source, 0.05),
        lambda source: MIThreshold(Shuffled(source), 0.05),
    ]
    for rule in rules:
        for step in (
            Step(2, memory=Memory(), seeds=torch.arange(ROWS)),
            *(() if "Coloring" in repr(rule(0)) else (2,)),
        ):
            selection = rule(estimator).select(numbers.stats, numbers.hidden, numbers.mask, step)
            known = Step(2, memory=Memory(), seeds=getattr(step, "seeds", None))
            expected = rule(Given(mi)).select(numbers.stats, numbers.hidden, numbers.mask, known)
            assert selection.selected.equal(expected.selected)


def test_random_takes_k_at_random(numbers: Pass) -> None:
    counts = torch.zeros(LENGTH)
    for index in range(300):
        seeds = torch.arange(ROWS) + 1000 * index
        selected, _ = numbers.select(Random(2), Step(3, seeds=seeds))
        for (masked, *_), chosen in zip(numbers.sequences(), selected, strict=True):
            assert len(chosen) == min(2, len(masked))
        for i in selected[0]:
            counts[i] += 1
    # 600 draws over 7 positions: 86 each, 4 standard deviations are 34
    assert (counts - 600 / LENGTH).abs().max() < 34


def test_random_depends_on_the_seed_and_the_pass_only(numbers: Pass) -> None:
    seeds = torch.arange(ROWS)
    first, _ = numbers.select(Random(2), Step(3, seeds=seeds))
    assert numbers.select(Random(2), Step(3, seeds=seeds))[0] == first
    assert numbers.select(Random(2), Step(4, seeds=seeds))[0] != first
    assert numbers.select(Random(2), Step(3, seeds=seeds + 100))[0] != first
    rows = [5, 0, 17]
    stats = TokenStats(*(field[rows] for field in numbers.stats))
    alone = Random(2).select(stats, numbers.hidden[rows], numbers.mask[rows], Step(3, seeds=seeds[rows])).selected
    assert [set(row.nonzero().flatten().tolist()) for row in alone] == [first[row] for row in rows]


def every_policy(mi: Any) -> list[Policy]:
    return [
        Sequential(),
        TopK(2),
        Random(2),
        Confidence(0.6),
        ConfidenceFactor(0.8),
        ConfidenceBudget(0.4),
        ConfidenceBudget(Schedule(0.4, 0.1)),
        EntropyBound(0.4),
        MIBudget(mi, 0.5),
        MIBudget(mi, Schedule(1.0, 0.1), mi_min_masked=4),
        MIBudget(mi, 0.1, entropy_weight=0.0, order="cheapest"),
        MIBudget(Shuffled(mi), 0.5),
        MIThreshold(mi, 0.1),
        MIThreshold(mi, Schedule(0.2, 0.1), mi_min_masked=4),
    ]


def test_a_bare_number_is_a_step(numbers: Pass) -> None:
    for policy in every_policy(Given(numbers.mi)):
        seeds = torch.zeros(ROWS, dtype=torch.int64)
        assert numbers.select(policy, 2) == numbers.select(policy, Step(2, seeds=seeds))
        for (masked, *_), chosen in zip(numbers.sequences(), numbers.select(policy, 2)[0], strict=True):
            assert bool(chosen) == bool(masked)


def test_nothing_masked_selects_nothing() -> None:
    empty = Pass()
    empty.mask[:] = False
    for policy in every_policy(Given(empty.mi)):
        selected, spent = empty.select(policy)
        assert selected == [set()] * ROWS
        assert spent == [0.0] * ROWS


def test_nothing_is_changed_in_place(numbers: Pass) -> None:
    tensors = (*numbers.stats, numbers.hidden, numbers.mask, numbers.mi)
    before = [tensor.clone() for tensor in tensors]
    for policy in every_policy(Given(numbers.mi)):
        numbers.select(policy)
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


def test_nan_at_a_masked_position_is_refused_by_every_rule_that_looks_at_it() -> None:
    broken = Pass()
    row, position = 3, int(broken.mask[3].nonzero()[0])
    broken.entropy[row, position] = broken.confidence[row, position] = torch.nan
    for policy in every_policy(Given(broken.mi)):
        if not isinstance(policy, Random):
            with pytest.raises(ValueError, match=rf"must not be NaN .* batch {row}, position {position}"):
                broken.select(policy)


def test_infinite_entropies_come_last_but_are_taken() -> None:
    some = Pass()
    some.entropy[:] = torch.inf
    for policy in (Sequential(), EntropyBound(0.5), EntropyBound(math.inf), MIBudget(Given(some.mi), 0.5)):
        for (masked, *_), chosen in zip(some.sequences(), some.select(policy)[0], strict=True):
            assert bool(chosen) == bool(masked)
            assert masked[:1] == sorted(chosen)[:1]


@pytest.mark.parametrize("value", [-0.1, math.nan, -math.inf])
@pytest.mark.parametrize(
    "make",
    [
        Confidence,
        ConfidenceBudget,
        ConfidenceFactor,
        EntropyBound,
        Stability,
        AttentionGraph,
        lambda confidence: Stability(0.1, confidence),
        lambda start: Schedule(start, 0.1),
        lambda end: Schedule(0.1, end),
        lambda epsilon: ConfidenceBudget(torch.tensor([0.1, epsilon])),
        lambda tau: Coloring(Given(torch.zeros(0)), tau),
        lambda gamma: MIBudget(Given(torch.zeros(0)), gamma),
        lambda lam: MIBudget(Given(torch.zeros(0)), 1.0, lam=lam),
        lambda weight: MIBudget(Given(torch.zeros(0)), 1.0, entropy_weight=weight),
        lambda tau: MIThreshold(Given(torch.zeros(0)), tau),
        lambda epsilon: Probing(epsilon=epsilon),
    ],
)
def test_negative_and_undefined_settings_are_refused(make: Any, value: float) -> None:
    with pytest.raises(ValueError, match=r"must (be|not be)"):
        make(value)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: TopK(0), ValueError, "TopK: k must be at least 1, got 0"),
        (lambda: TopK(1.5), TypeError, "TopK: k must be an int"),
        (lambda: EntropyBound("0.1"), TypeError, "EntropyBound: gamma must be a number, got '0.1'"),
        (
            lambda: Coloring(Given(torch.zeros(0)), torch.ones(2)),
            TypeError,
            "Coloring: tau must be a number, got shape",
        ),
        (lambda: Random(-1), ValueError, "Random: k must be at least 1, got -1"),
        (lambda: MIBudget(Given(torch.zeros(0)), 1.0, limit=0), ValueError, "limit must be at least 1"),
        (lambda: MIBudget(Given(torch.zeros(0)), 1.0, lam=math.inf), ValueError, "lam must be finite"),
        (lambda: MIBudget(Given(torch.zeros(0)), 1.0, order="best"), ValueError, "order must be one of"),
        (lambda: MIThreshold(Given(torch.zeros(0)), 1.0, limit=0), ValueError, "limit must be at least 1"),
        (
            lambda: MIBudget(Given(torch.zeros(0)), 1.0, mi_min_masked=-1),
            ValueError,
            "mi_min_masked must be at least 0",
        ),
        (
            lambda: MIThreshold(Given(torch.zeros(0)), 1.0, mi_max_masked=0),
            ValueError,
            "mi_max_masked must be at least 1",
        ),
        (lambda: TimeLimited(Given(torch.zeros(0)), -1.0), ValueError, "TimeLimited: seconds must be at least 0"),
        (lambda: Coloring(Given(torch.zeros(0)), 1.0, replan=0), ValueError, "replan must be at least 1"),
        (lambda: AttentionGraph(1.0, limit=0), ValueError, "limit must be at least 1"),
        (lambda: Schedule(math.inf, 0.0), ValueError, "start must be a finite number"),
        (lambda: EntropyBound(torch.ones(2, 2)), ValueError, r"gamma must be a float, or a tensor \[B\] with a number"),
        (lambda: MIThreshold(Given(torch.zeros(0)), torch.tensor(0.5)), ValueError, r"tau must be .*, got shape \(\)"),
        (lambda: EntropyBound(-torch.ones(2)), ValueError, "gamma must be numbers of at least 0, one a sequence"),
        (lambda: EntropyBound(True), TypeError, "gamma must be a number, got True"),
        (lambda: Schedule("0.2", 0.0), TypeError, "Schedule: start must be a number, got '0.2'"),
        (lambda: Probing("total"), ValueError, "form must be one of"),
        (lambda: Probing(batch_size=0), ValueError, "batch_size must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_an_estimator_of_another_width_is_an_error_of_the_pass(numbers: Pass) -> None:
    estimator = PairwiseMIEstimator(WIDTH + 1)
    for policy in (
        MIBudget(estimator, 0.1),
        MIThreshold(estimator, 0.1),
        MIBudget(Shuffled(estimator), 0.5),
        Coloring(estimator, 0.1),
    ):
        with pytest.raises(ValueError, match=r"hidden must be \[B, N, 6\]"):
            numbers.select(policy, Step(0, memory=Memory()))


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.8, 2.0, math.inf])
def test_confidence_factor_asks_for_more_the_more_it_takes(numbers: Pass, factor: float) -> None:
    selected, _ = numbers.select(ConfidenceFactor(factor))
    for (masked, _, c, _), chosen in zip(numbers.sequences(), selected, strict=True):
        order = sorted(masked, key=lambda i: (-c[i], i))
        assert chosen == largest_prefix(order, lambda first, c=c: (len(first) + 1) * (1 - c[first[-1]]) < factor)


def test_a_schedule_is_the_limit_of_the_share_still_masked(numbers: Pass) -> None:
    visible = torch.ones_like(numbers.mask)
    visible[:, 0] = False
    numbers_masked = numbers.mask & visible
    share = numbers_masked.sum(1) / (LENGTH - 1)
    limits = 0.1 + 0.9 * share
    for moving, fixed in (
        (EntropyBound(Schedule(1.0, 0.1)), EntropyBound),
        (ConfidenceBudget(Schedule(1.0, 0.1)), ConfidenceBudget),
        (MIBudget(Given(numbers.mi), Schedule(1.0, 0.1)), lambda gamma: MIBudget(Given(numbers.mi), gamma)),
        (MIThreshold(Given(numbers.mi), Schedule(1.0, 0.1)), lambda tau: MIThreshold(Given(numbers.mi), tau)),
    ):
        step = Step(0, attention_mask=visible)
        selection = moving.select(numbers.stats, numbers.hidden, numbers_masked, step)
        for row, limit in enumerate(limits.double().tolist()):
            policy = fixed(round(limit, 9))
            expected = policy.select(numbers.stats, numbers.hidden, numbers_masked, step)
            assert selection.selected[row].equal(expected.selected[row])


def test_limits_may_be_given_one_a_sequence(numbers: Pass) -> None:
    limits = torch.linspace(0, 2, ROWS)
    for make in (
        EntropyBound,
        ConfidenceBudget,
        lambda gamma: MIBudget(Given(numbers.mi), gamma),
        lambda tau: MIThreshold(Given(numbers.mi), tau),
    ):
        selected, spent = numbers.select(make(limits))
        for row in range(0, ROWS, 3):
            alone, cost = numbers.select(make(float(limits[row])))
            assert (selected[row], spent[row]) == (alone[row], cost[row])
        # Where sequences are numbered, theirs counts.
        turned, _ = numbers.select(make(limits.flip(0)), Step(0, sequences=torch.arange(ROWS).flip(0)))
        assert turned == selected
        for wrong in (limits[:1], torch.cat([limits, limits[:1]])):
            with pytest.raises(ValueError, match=f"a number for each of {ROWS} sequences, got {len(wrong)}"):
                numbers.select(make(wrong))
        # Of a decode all sequences count, whether they are still there or not.
        step = Step(3, sequences=torch.arange(ROWS), count=ROWS + 1)
        with pytest.raises(ValueError, match=f"a number for each of {ROWS + 1} sequences, got {ROWS}"):
            numbers.select(make(limits), step)
        assert numbers.select(make(torch.cat([limits, limits[:1]])), step)[0] == selected


# --- rules that look at more than one pass


def test_stability_waits_until_a_distribution_has_settled() -> None:
    before = torch.tensor([[[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.5, 0.5]]])
    after = torch.tensor([[[0.9, 0.1], [0.95, 0.05], [0.6, 0.4], [0.97, 0.03]]])
    policy, memory = Stability(0.05, 0.85), Memory()
    mask = torch.tensor([[True, True, True, False]])
    first = policy.select(ops.token_stats(before.log()), None, mask, Step(0, logits=before.log(), memory=memory))
    assert first.selected.tolist() == [[True, False, False, False]]  # nothing is known to be stable: the surest
    second = policy.select(ops.token_stats(after.log()), None, mask, Step(1, logits=after.log(), memory=memory))
    # 0 has settled and is sure; 1 is surest but moved by KL .09; 2 has settled but is unsure; 3 is not masked
    assert second.selected.tolist() == [[True, True, False, False]]
    with pytest.raises(ValueError, match="Stability: step must be a Step with logits"):
        policy.select(ops.token_stats(after.log()), None, mask, 1)
    with pytest.raises(ValueError, match="Stability: step must be a Step with memory"):
        policy.select(ops.token_stats(after.log()), None, mask, Step(1, logits=after.log()))


def test_stability_remembers_logits_that_the_model_writes_over() -> None:
    buffer = torch.tensor([[[0.0, 3.0], [0.0, 5.0]]])
    policy, memory, mask = Stability(0.01, 0.5), Memory(), torch.ones(1, 2, dtype=torch.bool)
    policy.select(ops.token_stats(buffer), None, mask, Step(0, logits=buffer, memory=memory))
    buffer[0, 0] = torch.tensor([3.0, 0.0])
    selected = policy.select(ops.token_stats(buffer), None, mask, Step(1, logits=buffer, memory=memory)).selected
    assert selected.tolist() == [[False, True]]


def test_attention_graph_takes_an_independent_set_by_degree_and_confidence(numbers: Pass) -> None:
    generator = torch.Generator().manual_seed(2)
    attention = torch.randint(0, 9, (ROWS, LENGTH, LENGTH), generator=generator) / 8
    attention = attention + attention.mT  # in sixteenths: the mean of both directions is exact
    for tau, limit in ((0.9, None), (1.2, None), (1.2, 2), (9.0, None), (0.0, None)):
        policy = AttentionGraph(tau, limit=limit)
        selected, _ = numbers.select(policy, Step(0, attention=attention))
        for row, (masked, _, c, _) in enumerate(numbers.sequences()):
            edge = {(i, j) for i in masked for j in masked if i != j and float(attention[row, i, j]) >= tau}
            degree = {i: sum((i, j) in edge for j in masked) for i in masked}
            expected: set[int] = set()
            for i in sorted(masked, key=lambda i: (-degree[i] * c[i], i)):
                if len(expected) < (limit or LENGTH) and not any((i, j) in edge for j in expected):
                    expected.add(i)
            assert selected[row] == expected
    with pytest.raises(ValueError, match="AttentionGraph: step must be a Step with attention"):
        numbers.select(AttentionGraph(0.1), 0)


class Asked(Given):
    """Counts how often it is asked about each sequence."""

    def __init__(self, mi: Tensor) -> None:
        super().__init__(mi)
        self.asked = torch.zeros(len(mi), dtype=torch.int64)

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        self.asked += mask.any(-1)
        return self.mi * (mask.unsqueeze(-1) & mask.unsqueeze(-2))


@pytest.mark.parametrize("replan", [None, 1, 2])
def test_coloring_plans_once_and_takes_a_group_a_pass(numbers: Pass, replan: int | None) -> None:
    source, memory = Asked(numbers.mi), Memory()
    policy, left, passes = Coloring(source, 0.1, replan=replan), numbers.mask.clone(), 0
    groups = ops.color(numbers.mi, tau=0.1, mask=left)
    while left.any():
        selected = policy.select(numbers.stats, numbers.hidden, left, Step(passes, memory=memory)).selected
        assert not (selected & ~left).any()
        for row, (masked, h, _, mi) in enumerate(numbers.sequences()):
            chosen = selected[row].nonzero().flatten().tolist()
            waiting = [i for i in masked if left[row, i]]
            assert bool(chosen) == bool(waiting)
            assert not waiting or min(waiting, key=lambda i: (h[i], i)) in chosen
            assert all(mi[i][j] < 0.1 for i, j in itertools.combinations(chosen, 2))
            if replan is None and chosen:
                assert chosen == (groups[row] == groups[row, chosen[0]]).nonzero().flatten().tolist()
        left &= ~selected
        passes += 1
    if replan is None:
        assert source.asked.equal(numbers.mask.any(-1).long())
        assert passes == int(groups.max()) + 1
    if replan == 1:
        assert int(source.asked.max()) == passes
    with pytest.raises(ValueError, match="Coloring: step must be a Step with memory"):
        numbers.select(policy, 0)


def test_coloring_plans_again_for_what_is_masked_again() -> None:
    source, memory, some = Asked(torch.zeros(1, 3, 3)), Memory(), Pass(rows=3, length=3)
    stats = TokenStats(*(field[:1] for field in some.stats))
    policy, everything = Coloring(source, 0.1), torch.ones(1, 3, dtype=torch.bool)
    for step in range(2):
        selection = policy.select(stats, some.hidden[:1], everything, Step(step, memory=memory))
        assert selection.selected.all()
    assert source.asked.tolist() == [2]


def test_memory_keeps_the_rows_of_those_that_stay() -> None:
    memory = Memory(a=(torch.arange(4), torch.eye(4)))
    memory.keep(torch.tensor([True, False, False, True]))
    assert memory["a"][0].tolist() == [0, 3]
    assert memory["a"][1].equal(torch.eye(4)[[0, 3]])


# --- where mutual information is not asked for


@pytest.mark.parametrize("make", [lambda mi, **o: MIBudget(mi, 1.2, **o), lambda mi, **o: MIThreshold(mi, 0.3, **o)])
@pytest.mark.parametrize(("least", "most"), [(5, None), (0, 5), (4, 5), (1, 1)])
def test_a_rule_may_ask_about_some_lengths_only(numbers: Pass, make: Any, least: int, most: int | None) -> None:
    source = Asked(numbers.mi)
    selected, spent = numbers.select(make(source, mi_min_masked=least, mi_max_masked=most))
    bound = torch.minimum(numbers.entropy.unsqueeze(-1), numbers.entropy.unsqueeze(-2))
    count = numbers.mask.sum(-1)
    without = (count < least) | (count > (LENGTH if most is None else most))
    exact, bounded = numbers.select(make(Given(numbers.mi))), numbers.select(make(Given(bound)))
    for row in range(ROWS):
        expected = bounded if without[row] else exact
        assert (selected[row], spent[row]) == (expected[0][row], expected[1][row])
    assert not source.asked[without].any()
    assert source.asked[~without].any() or most == 1


@pytest.mark.parametrize("scores", [False, True])
def test_a_source_is_asked_while_it_is_fast_enough(
    numbers: Pass, scores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator = PairwiseMIEstimator(WIDTH, layers=(4,)).eval()
    clock = iter([0.0, 9.0, 10.0, 10.5, 20.0, 20.0])  # an answer of 9 s, of .5 s and of none
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    source = TimeLimited(estimator if scores else lambda hidden, mask: estimator(hidden, mask), 4.0)
    bound = torch.minimum(numbers.entropy.unsqueeze(-1), numbers.entropy.unsqueeze(-2))
    asked, without = (numbers.select(MIBudget(mi, 1.0)) for mi in (estimator, Given(bound)))
    assert asked != without
    policy = MIBudget(source, 1.0)
    assert numbers.select(policy) == asked
    # 9 s are expected, and each time a tenth less: after 8 passes it is tried again.
    assert [numbers.select(policy) == without for _ in range(9)] == [True] * 8 + [False]
    assert numbers.select(policy) == asked
    with pytest.raises(ValueError, match="TimeLimited: step must be a Step with stats"):
        source(numbers.hidden, numbers.mask, 3)


def test_nobody_is_asked_where_the_budget_cannot_use_the_answer(numbers: Pass) -> None:
    several = numbers.mask.sum(-1) > 1
    for policy, useless in (
        (lambda mi: MIBudget(mi, 0.0, lam=1.0), None),
        (lambda mi: MIBudget(mi, 1.0, lam=0.0), torch.ones(ROWS, dtype=torch.bool)),
        (lambda mi: MIBudget(mi, 1.0, limit=1), torch.ones(ROWS, dtype=torch.bool)),
        (lambda mi: MIThreshold(mi, 1.0, limit=1), torch.ones(ROWS, dtype=torch.bool)),
        (lambda mi: MIBudget(mi, 1.0, entropy_weight=0.0), ~several),
        (lambda mi: MIThreshold(mi, 1.0), ~several),
    ):
        source = Asked(numbers.mi)
        assert numbers.select(policy(source)) == numbers.select(policy(Given(numbers.mi)))
        if useless is None:  # a second one fits only if both have no entropy
            two = numbers.entropy.where(numbers.mask, torch.inf).sort(-1).values[:, 1]
            useless = ~(two == 0)
        assert not source.asked[useless].any()
        assert source.asked[~useless].all()


def test_notes_force_the_question(numbers: Pass) -> None:
    for policy in (
        MIBudget(Given(numbers.mi), 0.0, mi_min_masked=100),
        MIThreshold(Given(numbers.mi), 1.0, limit=1),
        Coloring(Given(numbers.mi), 0.1),
    ):
        notes: dict[str, Tensor] = {}
        plain = numbers.select(policy, Step(0, memory=Memory()))
        assert numbers.select(policy, Step(0, memory=Memory(), notes=notes)) == plain
        assert notes["mi"].equal(numbers.mi)


# --- other people's arrays


class Capsule:
    """Speaks DLPack and nothing else."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def read_only(tensor: Tensor) -> Any:
    array = tensor.numpy().copy()
    array.flags.writeable = False
    return array


def backwards(tensor: Tensor) -> Any:
    return tensor.flip(0).contiguous().numpy()[::-1]


@pytest.mark.parametrize("foreign", [Tensor.numpy, read_only, backwards, Capsule])
def test_numpy_and_dlpack_arrays_are_taken_as_they_are(numbers: Pass, foreign: Any) -> None:
    for policy in [*every_policy(Given(numbers.mi)), MIBudget(PairwiseMIEstimator(WIDTH, layers=(4,)).eval(), 0.3)]:
        stats = TokenStats(*map(foreign, numbers.stats))
        with torch.no_grad():
            theirs = policy.select(stats, foreign(numbers.hidden), foreign(numbers.mask), 0)
            ours = policy.select(numbers.stats, numbers.hidden, numbers.mask, 0)
        assert theirs.selected.equal(ours.selected)
        assert np.asarray(theirs.spent).tolist() == ours.spent.tolist()


@pytest.mark.parametrize("foreign", [Tensor.numpy, backwards, Capsule])
def test_a_step_takes_foreign_arrays_too(numbers: Pass, foreign: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    arrays = {
        "logits": torch.randn(ROWS, LENGTH, 5, generator=generator),
        "attention": torch.rand(ROWS, LENGTH, LENGTH, generator=generator),
        "seeds": torch.arange(ROWS),
        "sequences": torch.arange(ROWS),
        "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.bool),
    }
    limits = torch.rand(ROWS, generator=generator)
    for policy in (
        Random(2),
        EntropyBound(limits),
        EntropyBound(Schedule(1.0, 0.1)),
        MIThreshold(Shuffled(Given(numbers.mi)), limits),
        Coloring(Given(numbers.mi), 0.05),
        Stability(0.1, 0.2),
        AttentionGraph(0.5),
    ):
        ours, theirs = Memory(), Memory()
        for number in range(2):  # in the second pass they remember the first
            step = Step(number, memory=theirs, count=ROWS, **{name: foreign(array) for name, array in arrays.items()})
            known = Step(number, memory=ours, count=ROWS, **arrays)
            assert numbers.select(policy, step) == numbers.select(policy, known)


def test_what_a_step_holds_has_to_fit(numbers: Pass) -> None:
    with pytest.raises(TypeError, match=r"Step: seeds: expected a tensor, .*, got list"):
        Step(0, seeds=[1, 2])
    of_heads = torch.zeros(ROWS, 3, LENGTH, LENGTH)
    with pytest.raises(
        ValueError, match=r"AttentionGraph: step.attention must be \[B, N, N\] = \(40, 7, 7\), averaged"
    ):
        numbers.select(AttentionGraph(0.1), Step(0, attention=of_heads))
    with pytest.raises(ValueError, match=r"Stability: step.logits must be \[B, N, V\] with \[B, N\] = \(40, 7\)"):
        numbers.select(Stability(0.1), Step(0, logits=torch.zeros(ROWS, LENGTH), memory=Memory()))


def test_what_is_no_pass_is_refused(numbers: Pass) -> None:
    stats, hidden, mask = numbers.stats, numbers.hidden, numbers.mask
    with pytest.raises(TypeError, match=r"TopK: mask: expected a tensor, a numpy array or an .*, got list"):
        TopK(1).select(stats, hidden, mask.tolist(), 0)
    with pytest.raises(TypeError, match="TopK: stats must be TokenStats, got tuple"):
        TopK(1).select(tuple(stats), hidden, mask, 0)  # type: ignore[arg-type]
    for wrong in (mask.long(), mask[0]):
        with pytest.raises(ValueError, match=r"TopK: mask must be \[B, N\] bool"):
            TopK(1).select(stats, hidden, wrong, 0)
    with pytest.raises(ValueError, match=r"TopK: stats.confidence must be \(40, 7\) like mask, got \(40, 6\)"):
        TopK(1).select(stats._replace(confidence=stats.confidence[:, 1:]), hidden, mask, 0)
    assert TopK(1).select(stats, None, mask, 0).selected.any()
    for source in (None, "sudoku", Probing):
        with pytest.raises(TypeError, match=r"policy: mi must be an estimator, Probing\(\) or another callable, got "):
            MIThreshold(source, 0.5).select(stats, hidden, mask, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hidden must be \[B, N, D\] for mutual information, got None"):
        MIBudget(Given(numbers.mi), 0.5).select(stats, None, mask, 0)


# --- sources of mutual information


def test_probing_asks_the_model_of_the_step() -> None:
    weights = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(0))
    model, tokens = JointTable(weights), torch.tensor([[3, 3, 3], [3, 1, 3]])
    step = Step(0, model=model, tokens=tokens)
    for form in ("joint", "entropy", "kl"):
        mi = Probing(form)(torch.zeros(2, 3, 6), tokens == 3, step)
        assert mi.equal(label_mi(model, tokens, form=form).mi)
    visible = torch.tensor([[True, True, False], [True, True, True]])
    padded = Step(0, model=model, tokens=tokens, attention_mask=visible)
    assert Probing()(torch.zeros(2, 3, 6), tokens == 3, padded).equal(
        label_mi(model, tokens, attention_mask=visible).mi
    )


def test_probing_without_a_model_is_an_error(numbers: Pass) -> None:
    for step in (0, Step(0), Step(0, model=JointTable(torch.ones(2)))):
        with pytest.raises(ValueError, match="Probing: step must be a Step with model and tokens"):
            numbers.select(MIBudget(Probing(), 0.1), step)


def test_shuffling_keeps_the_values_and_moves_them(numbers: Pass) -> None:
    seeds = torch.arange(ROWS)
    shuffled = Shuffled(Given(numbers.mi))(numbers.hidden, numbers.mask, Step(2, seeds=seeds))
    assert shuffled.equal(shuffled.mT)
    pairs = (numbers.mask.unsqueeze(-1) & numbers.mask.unsqueeze(-2)).triu(1)
    assert not shuffled.triu(1)[~pairs].any()
    assert not shuffled.diagonal(dim1=-2, dim2=-1).any()
    for row in range(ROWS):
        before, after = numbers.mi[row][pairs[row]], shuffled[row][pairs[row]]
        assert before.sort().values.equal(after.sort().values)
    assert not shuffled[0].equal(numbers.mi[0])
    again = Shuffled(Given(numbers.mi))(numbers.hidden, numbers.mask, Step(2, seeds=seeds))
    assert shuffled.equal(again)
    rows = [5, 0, 17]
    alone = Shuffled(Given(numbers.mi[rows]))(numbers.hidden[rows], numbers.mask[rows], Step(2, seeds=seeds[rows]))
    assert alone.equal(shuffled[rows])


def test_shuffling_deals_every_value_everywhere() -> None:
    mi = torch.zeros(1, 4, 4)
    mi[0, 0, 1] = mi[0, 1, 0] = 1.0
    mask, seen = torch.ones(1, 4, dtype=torch.bool), torch.zeros(4, 4)
    for seed in range(600):
        seen += Shuffled(Given(mi))(mi, mask, Step(0, seeds=torch.tensor([seed])))[0]
    # 600 deals to 6 pairs: 100 each, 4 standard deviations are 37
    assert (seen[torch.triu(torch.ones(4, 4), 1).bool()] - 100).abs().max() < 37


def test_a_policy_written_for_a_number_can_count_with_a_step() -> None:
    step = Step(5, seeds=torch.tensor([1]))
    assert step.model is step.tokens is step.attention_mask is None
    assert (step == 5, step != 5, step < 6, step <= 4, step > 4, step >= 6) == (True, False, True, False, True, False)
    assert (step + 1, 1 + step, step - 1, 7 - step, 2 * step, step * 2) == (6, 6, 4, 2, 10, 10)
    assert (step % 2, 7 % step, step // 2, 11 // step, step / 2, 10 / step, -step, step**2, 2**step) == (
        *(1, 2, 2, 2, 2.5, 2.0, -5, 25, 32),
    )
    assert (int(step), float(step), f"{step:03d}", str(step), bool(step), bool(Step(0))) == (
        *(5, 5.0, "005", "5", True, False),
    )
    assert ([*range(9)][step], {5: "five"}[step], step + Step(1), step == Step(5), hash(step)) == (
        5,
        "five",
        6,
        True,
        5,
    )  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.index = 6  # type: ignore[misc]
    with pytest.raises(TypeError):
        Step(1.5)  # type: ignore[arg-type]


def test_a_step_is_made_once_at_the_border() -> None:
    step = Step(2, tokens=np.zeros((1, 3), dtype=np.int64))
    assert isinstance(step.tokens, torch.Tensor)
    assert Step.of(step) is step
    assert (Step.of(3).index, Step.of(np.int64(4)).index) == (3, 4)
    stats = ops.token_stats(torch.zeros(1, 3, 2))
    assert step.with_stats(stats).stats is stats
    assert step.with_stats(stats).with_stats(stats).tokens is step.tokens


# --- random numbers


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    seeds = torch.arange(2000)
    x = uniform(seeds, 3, 0, torch.arange(50))
    assert x.dtype == torch.float64
    assert x.min() >= 0
    assert x.max() < 1
    n = x.numel()
    # 5 standard deviations of a mean, and the Kolmogorov-Smirnov bound of a false alarm in 10^6
    assert abs(float(x.mean()) - 0.5) < 5 / math.sqrt(12 * n)
    distance = (x.flatten().sort().values - (torch.arange(n) + 0.5) / n).abs().max()
    assert distance < math.sqrt(-math.log(1e-6 / 2) / 2 / n)
    neighbours = [
        x[:, 1:] * x[:, :-1],  # positions
        x[1:] * x[:-1],  # seeds
        x * uniform(seeds, 4, 0, torch.arange(50)),  # passes
        x * uniform(seeds, 3, 1, torch.arange(50)),  # streams
    ]
    for product in neighbours:
        # E[xy] = 1/4 of independent numbers, variance 7/144
        assert abs(float(product.mean()) - 0.25) < 5 * math.sqrt(7 / 144 / product.numel())


def test_uniform_numbers_never_repeat_between_seeds_passes_and_streams() -> None:
    seeds = torch.tensor([0, 1, -1, 2**62, -(2**63), 2**63 - 1])
    drawn = torch.cat(
        [uniform(seeds, step, stream, torch.arange(100)).flatten() for step in range(20) for stream in (0, 1)]
    )
    assert len(drawn.unique()) == drawn.numel()


def test_a_uniform_number_depends_on_its_seed_pass_stream_and_position_only() -> None:
    seeds = draw_seeds(8, torch.Generator().manual_seed(1), torch.device("cpu"))
    x = uniform(seeds, 2, 1, torch.arange(20))
    assert uniform(seeds.flip(0), 2, 1, torch.arange(20)).flip(0).equal(x)
    assert uniform(seeds[3:4], 2, 1, torch.arange(9)).equal(x[3:4, :9])


def test_seeds_follow_their_generator() -> None:
    first, again, other = (
        draw_seeds(5, torch.Generator().manual_seed(seed), torch.device("cpu")) for seed in (1, 1, 2)
    )
    assert first.equal(again)
    assert not first.equal(other)
    assert len(first.unique()) == 5
    wide = draw_seeds(1000, None, torch.device("cpu"))
    assert (wide > 2**62).any()
    assert (wide < -(2**62)).any()


def test_known_random_numbers() -> None:
    """What a seed means must not change between versions."""

    def mix(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    for seed, step, stream in itertools.product((0, 7, -5), (0, 3), (0, 1)):
        key = mix((seed + golden * (1 + 2 * step + stream)) % 2**64)
        expected = [(mix((key + golden * i) % 2**64) >> 11) / 2**53 for i in (1, 2, 3)]
        assert uniform(torch.tensor([seed]), step, stream, torch.arange(3)).tolist() == [expected]


def test_selections_are_ops_selections(numbers: Pass) -> None:
    for policy in every_policy(Given(numbers.mi)):
        assert isinstance(policy.select(numbers.stats, numbers.hidden, numbers.mask, 0), ops.Selection)
