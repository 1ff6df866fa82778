from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mdmi_fast import (
    Confidence,
    ConfidenceBudget,
    EntropyBound,
    MIBudget,
    MIThreshold,
    Probing,
    Random,
    Sequential,
    TopK,
    decode,
)
from mdmi_fast.decoding import (
    Coloring,
    ConfidenceFactor,
    PassRecord,
    Policy,
    Schedule,
    Shuffled,
    Stability,
    sample,
)
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable, xor_triple
from mdmi_fast.ops import Selection, TokenStats
from mdmi_fast.tasks.sudoku.estimator import SudokuMIEstimator
from mdmi_fast.tasks.sudoku.model import SudokuModel, load_model
from mdmi_fast.tasks.sudoku.puzzles import is_valid_board, validation_puzzles

pytestmark = pytest.mark.arithmetic

VOCABULARY = MASK = 3


def random_table(length: int = 3, vocabulary: int = VOCABULARY) -> JointTable:
    weights = torch.rand((vocabulary,) * length, generator=torch.Generator().manual_seed(2)) ** 2
    return JointTable(weights)


@pytest.fixture(scope="module")
def table() -> JointTable:
    return random_table()


@pytest.fixture(scope="module")
def sudoku() -> SudokuModel:
    return load_model("strong")


@pytest.fixture(scope="module")
def puzzles() -> Tensor:
    """64 boards with 0 to 25 blanks, an empty one, and one with nothing to do."""
    boards = validation_puzzles()
    solutions = torch.from_numpy(boards.solutions[:64]).long()
    masked = torch.from_numpy(boards.givens[:64]) == 0
    tokens = solutions.masked_fill(masked & (masked.cumsum(1) <= torch.arange(64).unsqueeze(-1) % 26), 0)
    tokens[1] = 0
    return tokens


def untrained_estimator() -> SudokuMIEstimator:
    """Spread wide, so that selections hang on its numbers."""
    torch.manual_seed(11)
    estimator = SudokuMIEstimator(features=4, stem=8, layers=(8,))
    torch.nn.init.normal_(estimator.last.weight, std=2.0)
    return estimator.eval()


class Take:
    """A policy that takes what a function of the mask says."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        return Selection(self.choose(mask), torch.zeros(len(mask), dtype=torch.float64))


TAKE_ALL = Take(lambda mask: mask)


class Constant:
    """A model that gives the same logits everywhere."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.mask_token_id = self.vocab_size = len(logits)
        self.hidden_size = 1

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        return MaskedOutput(self.logits.expand(*tokens.shape, -1), torch.zeros(*tokens.shape, 1))


def policies(mi: Any) -> dict[str, Policy]:
    return {
        "sequential": Sequential(),
        "topk": TopK(5),
        "random": Random(7),
        "confidence": Confidence(0.8),
        "confidence factor": ConfidenceFactor(0.5),
        "confidence budget": ConfidenceBudget(0.3),
        "stability": Stability(0.05, 0.6),
        "entropy bound": EntropyBound(0.5),
        "mi budget": MIBudget(mi, 1.5),
        "mi budget for sampling": MIBudget(mi, 0.5, entropy_weight=0.0),
        "cheapest": MIBudget(mi, 1.5, order="cheapest", limit=9),
        "scheduled": MIBudget(mi, Schedule(2.0, 0.1)),
        "lazy": MIBudget(mi, 1.5, mi_min_masked=21),
        "mi threshold": MIThreshold(mi, 0.1),
        "scheduled threshold": MIThreshold(mi, Schedule(0.4, 0.0), mi_min_masked=11),
        "coloring": Coloring(mi, 0.1),
        "coloring again": Coloring(mi, 0.1, replan=2),
        "shuffled": MIBudget(Shuffled(mi), 1.5),
    }


# --- a sequence does not depend on its batch


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", policies(None))
def test_a_sequence_decodes_alike_alone_and_in_every_batch(
    sudoku: SudokuModel, puzzles: Tensor, name: str, temperature: float
) -> None:
    policy = policies(untrained_estimator())[name]
    seeds = torch.randint(-(2**62), 2**62, (64,))
    # The slow rules are tried on fewer boards.
    count = 16 if name in ("sequential", "topk", "shuffled", "stability") else 32
    puzzles, seeds = puzzles[:count], seeds[:count]
    whole = decode(sudoku, puzzles, policy, temperature=temperature, seeds=seeds, trace=True)
    assert whole.trace is not None

    def check(rows: Tensor) -> None:
        part = decode(sudoku, puzzles[rows], policy, temperature=temperature, seeds=seeds[rows], trace=True)
        assert part.tokens.equal(whole.tokens[rows])
        assert part.passes.equal(whole.passes[rows])
        for place, row in enumerate(rows.tolist()):
            assert history(part.trace, place) == history(whole.trace, row)

    for row in (1, 5, 9):
        check(torch.tensor([row]))
    for row in (0, 8):
        check(torch.tensor([row, row + 1]))
    check(torch.arange(7))
    check(torch.randperm(count))


def history(trace: list[PassRecord] | None, sequence: int) -> list[tuple[Any, ...]]:
    """What happened to one sequence, pass by pass."""
    assert trace is not None
    return [
        (record.step, record.selected[row].tolist(), record.entropy[row].tolist(), float(record.spent[row]))
        for record in trace
        for row in (record.sequences == sequence).nonzero().flatten().tolist()
    ]


@pytest.mark.parametrize("form", ["joint", "entropy", "kl"])
def test_probing_does_not_depend_on_the_batch(table: JointTable, form: Any) -> None:
    tokens = torch.tensor([[MASK] * 3, [MASK, 1, MASK], [0, MASK, MASK], [2, 1, MASK], [0, 1, 2]])
    seeds = torch.arange(5)
    policy = MIBudget(Probing(form, batch_size=5), 0.05, entropy_weight=0.0)
    whole = decode(table, tokens, policy, temperature=1.0, seeds=seeds, trace=True)
    for row in range(5):
        alone = decode(table, tokens[row : row + 1], policy, temperature=1.0, seeds=seeds[row : row + 1], trace=True)
        assert alone.tokens[0].equal(whole.tokens[row])
        assert alone.passes[0] == whole.passes[row]
        assert history(alone.trace, 0) == history(whole.trace, row)


def test_a_seed_decides_a_sequence(table: JointTable) -> None:
    tokens = torch.full((200, 3), MASK)
    seeds = torch.arange(100).repeat(2)
    drawn = decode(table, tokens, Sequential(), temperature=1.0, seeds=seeds).tokens
    assert drawn[:100].equal(drawn[100:])
    assert len(drawn.unique(dim=0)) > 10
    for generator_seed in (1, 2):
        runs = [
            decode(
                table, tokens, Sequential(), temperature=1.0, generator=torch.Generator().manual_seed(generator_seed)
            )
            for _ in range(2)
        ]
        assert runs[0].tokens.equal(runs[1].tokens)
    torch.manual_seed(5)
    first = decode(table, tokens, Sequential(), temperature=1.0).tokens
    assert not decode(table, tokens, Sequential(), temperature=1.0).tokens.equal(first)
    torch.manual_seed(5)
    assert decode(table, tokens, Sequential(), temperature=1.0).tokens.equal(first)


# --- what comes out is what the model says


def chi_square(drawn: Tensor, expected: Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; sequences [S, N] against a joint [V, ..., V]."""
    counts = torch.zeros_like(expected)
    counts.index_put_(tuple(drawn.t()), torch.ones(len(drawn), dtype=expected.dtype), accumulate=True)
    assert not counts[expected == 0].any()
    possible = expected > 0
    mean = expected[possible] * len(drawn)
    return float(((counts[possible] - mean).square() / mean).sum()), int(possible.sum()) - 1


def within_chance(statistic: float, freedom: int) -> bool:
    """Below the upper 10^-4 point of chi-square (Wilson and Hilferty's approximation)."""
    z = 3.719
    return statistic < freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("policy", [Sequential(), Random(1), MIBudget(Probing(), 0.0)], ids=["entropy", "random", "mi"])
def test_one_position_a_pass_at_temperature_1_draws_from_the_joint(policy: Policy) -> None:
    joint = torch.tensor([[[4, 1], [0, 2]], [[1, 6], [3, 3]]])
    model = JointTable(joint)
    draws = 300 if isinstance(policy, MIBudget) else 2000
    result = decode(model, torch.full((draws, 3), 2), policy, temperature=1.0, seeds=torch.arange(draws))
    assert within_chance(*chi_square(result.tokens, model.joint))
    if not isinstance(policy, MIBudget):
        assert (result.passes == 3).all()


def test_a_condition_is_kept(table: JointTable) -> None:
    tokens = torch.tensor([[MASK, 2, MASK]]).repeat(2000, 1)
    drawn = decode(table, tokens, Sequential(), temperature=1.0, seeds=torch.arange(2000)).tokens
    assert (drawn[:, 1] == 2).all()
    assert within_chance(*chi_square(drawn[:, ::2], table.marginal(tokens[0], (0, 2))))


def test_temperature_sharpens_as_it_says() -> None:
    model = Constant(torch.tensor([1.0, 2.0, 4.0]).log())
    tokens = torch.full((3000, 1), 3)
    drawn = decode(model, tokens, TAKE_ALL, temperature=0.5, seeds=torch.arange(3000)).tokens
    assert within_chance(*chi_square(drawn, torch.tensor([1.0, 4.0, 16.0]).double() / 21))


def test_positions_drawn_together_are_independent_so_xor_comes_out_wrong_half_of_the_time() -> None:
    tokens = torch.full((400, 3), 2)
    policy = MIBudget(Probing(), 0.01, entropy_weight=0.0)  # no pair shows the dependence of the three
    result = decode(xor_triple(), tokens, policy, temperature=1.0, seeds=torch.arange(400))
    assert (result.passes == 1).all()
    assert within_chance(*chi_square(result.tokens, torch.full((2, 2, 2), 0.125).double()))
    one_by_one = decode(xor_triple(), tokens, Sequential(), temperature=1.0, seeds=torch.arange(400)).tokens
    assert (one_by_one.sum(1) % 2 == 0).all()


def test_a_budget_on_information_keeps_dependent_positions_apart() -> None:
    twins = torch.eye(2)[:, None, :, None] * torch.eye(2)[None, :, None, :]  # X1 = X3 and X2 = X4, fair bits
    tokens = torch.full((60, 4), 2)
    policy = MIBudget(Probing(), 0.01, entropy_weight=0.0)
    result = decode(JointTable(twins), tokens, policy, temperature=1.0, seeds=torch.arange(60))
    assert (result.passes == 2).all()
    assert result.tokens[:, :2].equal(result.tokens[:, 2:])


def test_temperature_0_takes_the_most_probable_token_step_by_step(table: JointTable) -> None:
    expected = torch.full((3,), MASK)
    while (expected == MASK).any():
        p = table(expected.unsqueeze(0)).logits[0].exp()
        entropy = torch.special.entr(p).sum(-1).masked_fill(expected != MASK, torch.inf)
        expected[entropy.argmin()] = p[entropy.argmin()].argmax()
    result = decode(table, torch.full((1, 3), MASK), Sequential())
    assert result.tokens[0].equal(expected)
    assert result.passes.tolist() == [3]


def test_hard_puzzles_are_solved(sudoku: SudokuModel) -> None:
    boards = validation_puzzles()
    tokens = torch.from_numpy(boards.givens[:40]).long()
    result = decode(sudoku, tokens, Sequential())
    assert result.passes.equal((tokens == 0).sum(1))
    assert result.tokens.where(tokens > 0, 0).equal(tokens)
    assert is_valid_board(result.tokens).float().mean() > 0.8
    together = decode(sudoku, tokens, ConfidenceBudget(0.1))
    assert together.passes.sum() * 3 < result.passes.sum()


# --- sampling


def test_sample_matches_the_distribution() -> None:
    logits = torch.tensor([1.0, 2.0, 0.0, 3.0, 4.0, 0.0]).log().expand(60_000, 6)
    luck = (torch.arange(60_000).double() + 0.5) / 60_000  # every quantile once
    counts = torch.bincount(sample(logits, luck, 1.0), minlength=6)
    assert counts.tolist() == [6000, 12000, 0, 18000, 24000, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-300, 0.1, 1.0, 1e30])
def test_sample_never_draws_what_has_no_probability(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, -3.0, -torch.inf]).to(dtype)
    luck = torch.tensor([0.0, 5e-324, 1e-17, 0.5, 1 - 2.0**-53])
    drawn = sample(logits.expand(5, 5), luck.double(), temperature)
    assert set(drawn.tolist()) <= {1, 3}
    if temperature < 1e-9:
        assert drawn.tolist() == [1] * 5
    everything = sample(torch.full((1, 4), -torch.inf).index_fill(1, torch.tensor([2]), 0.0), luck[-1:].double(), 1.0)
    assert everything.tolist() == [2]


def test_sample_of_one_token_and_of_none() -> None:
    assert (
        sample(torch.zeros(3, 1), torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64), 1.0).tolist() == [0] * 3
    )
    assert sample(torch.zeros(0, 4), torch.zeros(0, dtype=torch.float64), 1.0).shape == (0,)


def test_sample_rounds_no_half_precision_logits() -> None:
    # 20 - 1.0078125 is no bfloat16: taken there, the second weight would be 6% too large
    logits = torch.tensor([20.0, 1.0078125]).bfloat16()
    weight = math.exp(float(logits[1]) - float(logits[0]))
    border = 1 / (1 + weight)
    luck = torch.tensor([border - 0.02 * weight, border + 0.02 * weight], dtype=torch.float64)
    assert sample(logits.expand(2, 2), luck, 1.0).tolist() == [0, 1]


# --- the loop


@pytest.mark.parametrize("name", policies(None))
def test_limit_cases_end(table: JointTable, name: str) -> None:
    policy = policies(Probing())[name]
    tokens = torch.tensor([[MASK] * 3, [0, 1, 2], [MASK, 0, MASK]])
    before = tokens.clone()
    result = decode(table, tokens, policy, temperature=1.0, seeds=torch.arange(3))
    assert tokens.equal(before)
    assert (result.tokens != MASK).all()
    assert result.tokens[1].tolist() == [0, 1, 2]
    assert result.passes[1] == 0
    assert (result.passes[::2] >= 1).all()
    assert (result.passes <= torch.tensor([3, 0, 2])).all()
    assert result.trace is None
    complete = decode(table, torch.tensor([[0, 1, 2]]), policy, trace=True)
    assert complete.trace == []
    empty = decode(table, torch.zeros(0, 3, dtype=torch.int64), policy)
    assert empty.tokens.shape == (0, 3)
    assert empty.passes.shape == (0,)


def test_budgets_of_0_take_one_at_a_time_and_infinite_ones_everything(table: JointTable) -> None:
    tokens = torch.full((2, 3), MASK)
    for make in (EntropyBound, ConfidenceBudget, lambda gamma: MIBudget(Probing(), gamma)):
        assert decode(table, tokens, make(0.0)).passes.tolist() == [3, 3]
        assert decode(table, tokens, make(math.inf)).passes.tolist() == [1, 1]


def test_one_token_is_no_choice() -> None:
    model = JointTable(torch.ones(1, 1, 1))
    for policy in policies(Probing()).values():
        result = decode(model, torch.full((2, 3), 1), policy, temperature=1.0)
        assert not result.tokens.any()


def test_finished_sequences_leave_the_batch(table: JointTable) -> None:
    sizes = []

    class Counting(JointTable):
        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            sizes.append(len(tokens))
            return super().__call__(tokens, attention_mask)

    tokens = torch.tensor([[0, 1, 2], [0, MASK, 2], [MASK] * 3, [0, MASK, MASK]])
    finished: list[int] = []
    result = decode(Counting(table.joint), tokens, Sequential(), progress=finished.append)
    assert sizes == [3, 2, 1]
    assert finished == [1, 1, 1]
    assert result.passes.tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trace_tells_the_whole_story(sudoku: SudokuModel, puzzles: Tensor, temperature: float) -> None:
    tokens = puzzles[:6]
    policy = MIBudget(untrained_estimator(), 1.0)
    result = decode(sudoku, tokens, policy, temperature=temperature, seeds=torch.arange(6), trace=True)
    assert result.trace is not None
    state, passes = tokens.clone(), torch.zeros(6, dtype=torch.int64)
    for index, record in enumerate(result.trace):
        assert record.step == index
        before = state[record.sequences]
        assert (before == 0).any(1).all()
        assert (record.selected & (before != 0)).sum() == 0
        assert record.selected.any(1).all()
        assert record.tokens.where(record.selected, before).equal(record.tokens)
        stats = sudoku(before).logits
        entropy = torch.special.entr(stats.exp()).sum(-1).masked_fill(before != 0, 0.0)
        torch.testing.assert_close(record.entropy, entropy, rtol=0, atol=1e-5)
        chosen = policy.select(
            TokenStats(record.entropy, entropy, entropy, before, entropy), sudoku(before).hidden, before == 0, index
        )
        assert chosen.selected.equal(record.selected)
        assert chosen.spent.equal(record.spent)
        state[record.sequences] = record.tokens
        passes[record.sequences] += 1
    assert state.equal(result.tokens)
    assert passes.equal(result.passes)


def test_padding_is_seen_by_nobody(table: JointTable) -> None:
    short = JointTable(table.joint.sum(1))
    visible = torch.tensor([[True, False, True]] * 4)
    tokens = torch.tensor([[MASK, MASK, MASK], [MASK, 0, MASK], [0, 1, MASK], [2, MASK, 2]])
    seeds = torch.arange(4)
    for policy in (Sequential(), MIBudget(Probing(), 0.02), MIThreshold(Probing("kl"), 0.01)):
        padded = decode(table, tokens, policy, attention_mask=visible, seeds=seeds)
        expected = decode(short, tokens[:, ::2], policy, seeds=seeds)
        assert padded.tokens[:, ::2].equal(expected.tokens)
        assert padded.passes.equal(expected.passes)
        assert padded.tokens[:, 1].equal(tokens[:, 1])


@pytest.mark.parametrize(
    "choose",
    [
        torch.zeros_like,
        lambda mask: ~mask,
        lambda mask: mask & (torch.arange(len(mask)) == 0).unsqueeze(-1),
    ],
)
def test_a_policy_that_takes_nothing_is_an_error(table: JointTable, choose: Any) -> None:
    tokens = torch.tensor([[0, 1, 2], [0, MASK, 2], [0, MASK, MASK]])
    with pytest.raises(ValueError, match=r"the policy .* took no position of sequence [12] in pass 0"):
        decode(table, tokens, Take(choose))


@pytest.mark.parametrize("choose", [lambda mask: mask.long(), lambda mask: mask[:, :2], lambda mask: mask[0]])
def test_a_selection_of_another_kind_is_an_error(table: JointTable, choose: Any) -> None:
    with pytest.raises(ValueError, match=r"must select \(2, 3\) bool, got shape"):
        decode(table, torch.full((2, 3), MASK), Take(choose))


def test_positions_that_are_not_masked_are_not_written(table: JointTable) -> None:
    result = decode(table, torch.tensor([[MASK, 1, MASK]]), Take(torch.ones_like))
    assert result.tokens[0, 1] == 1
    assert result.passes.tolist() == [1]


@pytest.mark.parametrize("bad", [[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_logits_that_give_no_distribution_are_an_error_that_names_the_place(bad: list[float]) -> None:
    class Broken(Constant):
        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            logits, hidden = super().__call__(tokens)
            logits = logits.clone()
            logits[tokens[:, 0] == 1, 2] = torch.tensor(bad)
            return MaskedOutput(logits, hidden)

    model = Broken(torch.zeros(2))
    tokens = torch.tensor([[0, 1, 0], [0, 2, 2], [1, 2, 2]])
    for policy in (Sequential(), Random(1), TAKE_ALL):
        with pytest.raises(ValueError, match="logits at sequence 2, position 2 give no distribution"):
            decode(model, tokens, policy, temperature=1.0)
    visible = torch.tensor([[1, 2, 0]])
    assert decode(model, visible, Sequential()).tokens.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.full((3,), MASK)}, "tokens must be .B, N. int64"),
        ({"tokens": torch.full((1, 3), MASK, dtype=torch.int32)}, "tokens must be .B, N. int64"),
        ({"temperature": -1.0}, "temperature must be a finite number"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": math.inf}, "temperature must be a finite number"),
        ({"attention_mask": torch.ones(1, 2, dtype=torch.bool)}, "attention_mask must be"),
        ({"attention_mask": torch.ones(1, 3, dtype=torch.int64)}, "attention_mask must be"),
        ({"seeds": torch.zeros(2, dtype=torch.int64)}, "either a generator or seeds"),
        ({"seeds": torch.zeros(1)}, "either a generator or seeds"),
        ({"seeds": torch.zeros(1, dtype=torch.int64), "generator": torch.Generator()}, "either a generator or seeds"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(table: JointTable, change: dict[str, Any], message: str) -> None:
    arguments = {"tokens": torch.full((1, 3), MASK)} | change
    with pytest.raises(ValueError, match=message):
        decode(table, arguments.pop("tokens"), Sequential(), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "topk:4"}, "decode: policy must be an object with a method select, .*, got 'topk:4'"),
        ({"policy": Sequential}, "decode: policy must be an object with a method select"),
        ({"temperature": "hot"}, "decode: temperature must be a number, got 'hot'"),
        ({"top_p": None}, "decode: top_p must be a number, got None"),
        ({"remask_below": "0.5"}, "decode: remask_below must be a number, got '0.5'"),
        ({"seeds": [1]}, "decode: seeds must be a torch.Tensor, got .1."),
        ({"generator": 3}, "decode: generator must be a torch.Generator, got 3"),
        ({"suppressed": [0.5]}, "decode: suppressed must be a sequence of tokens, which are integers, got .0.5."),
        ({"suppressed": 1}, "decode: suppressed must be a sequence of tokens"),
        ({"stop_tokens": ["a"]}, "decode: stop_tokens must be a sequence of tokens"),
    ],
)
def test_arguments_of_another_kind_are_named(table: JointTable, change: dict[str, Any], message: str) -> None:
    arguments = {"policy": Sequential()} | change
    with pytest.raises(TypeError, match=message):
        decode(table, torch.full((1, 3), MASK), arguments.pop("policy"), **arguments)


def test_every_order_of_a_batch_is_the_same(table: JointTable) -> None:
    tokens = torch.tensor([[MASK] * 3, [MASK, 1, MASK], [0, MASK, MASK], [2, 1, MASK]])
    policy = MIThreshold(Probing(), 0.02)
    expected = decode(table, tokens, policy).tokens
    for order in itertools.permutations(range(4)):
        assert decode(table, tokens[list(order)], policy).tokens.equal(expected[list(order)])
