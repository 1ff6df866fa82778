"""What a decode may be told besides the policy, on models whose answers are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mdmi_fast import (
    EntropyBound,
    MIBudget,
    MIThreshold,
    PairwiseCoupling,
    PairwiseMIEstimator,
    Probing,
    Random,
    Sequential,
    TopK,
    decode,
)
from mdmi_fast.decoding import (
    AttentionGraph,
    Coloring,
    Policy,
    Schedule,
    Shuffled,
    Stability,
    receipt,
    replay,
    sample,
    vocabulary,
)
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable
from mdmi_fast.ops import Selection, TokenStats
from mdmi_fast.tasks.sudoku.estimator import SudokuMIEstimator
from mdmi_fast.tasks.sudoku.model import load_model
from mdmi_fast.tasks.sudoku.puzzles import validation_puzzles

V = MASK = 3
PAD = 1


class Attentive(NamedTuple):
    logits: Tensor
    hidden: Tensor
    attention: Tensor


@cache
def chain(length: int) -> JointTable:
    """A Markov chain of that length: neighbours depend on each other."""
    steps = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.1, 0.6]])
    joint = torch.tensor([0.5, 0.3, 0.2])
    for _ in range(length - 1):
        joint = joint.unsqueeze(-1) * steps
    return JointTable(joint)


class Chains:
    """Markov chains of every length at once: what padding hides is not there. Near positions attend to each other."""

    mask_token_id = vocab_size = V
    hidden_size = V + 1

    def __init__(self) -> None:
        self.passes = 0

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Attentive:
        self.passes += 1
        visible = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        logits = torch.full((*tokens.shape, V), math.nan, dtype=torch.float64)
        hidden = torch.full((*tokens.shape, V + 1), math.nan)
        attention = torch.full((*tokens.shape, tokens.shape[1]), math.nan)
        for row, shown in enumerate(visible):
            at = shown.nonzero().flatten()
            answer = chain(len(at))(tokens[row, at].unsqueeze(0)).logits[0]
            place = torch.arange(len(at)).float()
            logits[row, at] = answer
            hidden[row, at] = torch.cat([answer.exp().float(), place.unsqueeze(-1)], -1)
            attention[row, at.unsqueeze(-1), at] = 1 / (1 + (place - place.unsqueeze(-1)).abs())
        return Attentive(logits, hidden.nan_to_num(), attention)


class Fixed:
    """A model with the same marginals whatever it sees, mask token included in the vocabulary."""

    mask_token_id, hidden_size = 0, 1

    def __init__(self, probabilities: Tensor) -> None:
        self.logits = probabilities.log()
        self.vocab_size = probabilities.shape[-1]

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        return MaskedOutput(self.logits.expand(*tokens.shape, -1), torch.zeros(*tokens.shape, 1))


class All:
    """Takes everything at once."""

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        return Selection(mask, torch.zeros(len(mask), dtype=torch.float64))


def scorer() -> PairwiseMIEstimator:
    torch.manual_seed(3)
    estimator = PairwiseMIEstimator(V + 1, layers=(8,))
    torch.nn.init.normal_(estimator.last.weight, std=3.0)
    return estimator.eval()


def network() -> PairwiseCoupling:
    torch.manual_seed(3)
    coupling = PairwiseCoupling(V + 1, V, (8, 8), rank=3, distances=2)
    coupling.strength = 5.0
    return coupling.eval()


POLICIES: dict[str, Policy] = {
    "random": Random(2),
    "entropy bound": EntropyBound(1.5),
    "scheduled": EntropyBound(Schedule(3.0, 0.2)),
    "stability": Stability(0.1, 0.5),
    "attention": AttentionGraph(0.4),
    "budget": MIBudget(scorer(), 1.5),
    "lazy": MIBudget(scorer(), 1.5, mi_min_masked=4),
    "probing": MIBudget(Probing(), 0.05, entropy_weight=0.0),
    "shuffled": MIThreshold(Shuffled(scorer()), 0.3),
    "coloring": Coloring(scorer(), 0.3, replan=2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"temperature": 1.0},
    "gumbel": {"temperature": 0.8, "gumbel": True, "top_p": 0.9},
    "blocks": {"temperature": 1.0, "block_size": 2},
    "verified": {"temperature": 1.0, "verify": True, "revisions": 2},
    "remasked": {"remask_below": 0.6, "block_size": 3},
    "stopped": {"temperature": 1.0, "stop_tokens": [2]},
    "coupled": {"temperature": 1.0, "coupling": Probing()},
    "coupled by a network": {"temperature": 1.0, "coupling": network()},
}


def ragged(count: int = 8) -> list[Tensor]:
    """Sequences of 1 to 6 tokens, some of them visible."""
    generator = torch.Generator().manual_seed(4)
    sequences = []
    for number in range(count):
        length = 1 + number % 6
        tokens = torch.randint(V, (length,), generator=generator)
        sequences.append(tokens.masked_fill(torch.rand(length, generator=generator) < 0.75, MASK))
    return sequences


def padded(sequences: list[Tensor], width: int, side: str) -> tuple[Tensor, Tensor]:
    tokens = torch.full((len(sequences), width), PAD)
    visible = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        at = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        tokens[row, at], visible[row, at] = sequence, True
    return tokens, visible


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", POLICIES)
def test_padding_and_neighbours_change_nothing(name: str, options: str) -> None:
    sequences, policy = ragged(), POLICIES[name]
    seeds = torch.randint(-(2**62), 2**62, (len(sequences),))
    alone = [
        decode(Chains(), tokens.unsqueeze(0), policy, seeds=seeds[row : row + 1], trace=True, **OPTIONS[options])
        for row, tokens in enumerate(sequences)
    ]
    for side, width in (("right", 6), ("left", 8)):
        tokens, visible = padded(sequences, width, side)
        order = torch.randperm(len(sequences))
        result = decode(
            Chains(),
            tokens[order],
            policy,
            attention_mask=visible[order],
            seeds=seeds[order],
            trace=True,
            **OPTIONS[options],
        )
        for row, number in enumerate(order.tolist()):
            shown = visible[number]
            shift = 0 if side == "right" else width - len(sequences[number])
            assert result.tokens[row, shown].equal(alone[number].tokens[0])
            assert (result.tokens[row, ~shown] == PAD).all()
            assert result.passes[row] == alone[number].passes[0]
            assert result.trace is not None
            assert moved(receipt(result.trace, row), -shift) == receipt(alone[number].trace or [], 0)


def moved(passes: list[dict[str, Any]], by: int) -> list[dict[str, Any]]:
    """A receipt with other numbers for the same positions."""
    for entry in passes:
        entry["positions"] = [position + by for position in entry["positions"]]
        for name, change in (
            ("remasked", lambda p: p + by),
            ("order", lambda p: p + by),
            ("blocked", lambda p: [p[0] + by, p[1] + by]),
        ):
            if name in entry:
                entry[name] = [change(value) for value in entry[name]]
        if "ended" in entry:
            entry["ended"] = [[position + by, token] for position, token in entry["ended"]]
    return passes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_200_boards_decode_alike_alone_and_in_batches_of_every_size(temperature: float) -> None:
    solutions = torch.from_numpy(validation_puzzles().solutions[:200]).long()
    blank = torch.rand(200, 81).argsort(-1) < torch.randint(1, 30, (200, 1))
    tokens, seeds = solutions.masked_fill(blank, 0), torch.randint(2**62, (200,))
    model, estimator = load_model("weak"), SudokuMIEstimator(features=4, stem=8, layers=(8,)).eval()
    torch.nn.init.normal_(estimator.last.weight, std=2.0)
    policy = MIBudget(estimator, 1.5)
    whole = decode(model, tokens, policy, temperature=temperature, seeds=seeds, trace=True)
    story = [receipt(whole.trace or [], row) for row in range(200)]
    for size, order in (
        (1, torch.arange(200)),
        (2, torch.arange(200)),
        (7, torch.randperm(200)),
        (64, torch.randperm(200)),
    ):
        for rows in order.split(size):
            part = decode(model, tokens[rows], policy, temperature=temperature, seeds=seeds[rows], trace=True)
            assert part.tokens.equal(whole.tokens[rows])
            assert part.passes.equal(whole.passes[rows])
            for place, row in enumerate(rows.tolist()):
                assert receipt(part.trace or [], place) == story[row]


# --- what may be written


def test_the_mask_token_is_never_written() -> None:
    model = Fixed(torch.tensor([0.9, 0.06, 0.04]))  # which it would like best
    tokens = torch.zeros(50, 4, dtype=torch.int64)
    assert (decode(model, tokens, All()).tokens == 1).all()
    drawn = decode(model, tokens, All(), temperature=1.0, seeds=torch.arange(50)).tokens
    assert set(drawn.flatten().tolist()) == {1, 2}
    assert model.logits[0] > -1  # what belongs to the model is as it was


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_model_returns_is_not_written_to(temperature: float) -> None:
    class Keeping(Fixed):
        """Answers from memory, where the next decode finds its answer again."""

        kept = torch.tensor([0.6, 0.3, 0.06, 0.04]).log().repeat(4, 3, 1)

        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            return MaskedOutput(self.kept[: len(tokens)], torch.zeros(*tokens.shape, 1))

    model, tokens = Keeping(torch.ones(4)), torch.zeros(4, 3, dtype=torch.int64)
    before = model.kept.clone()
    allowed = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)
    written = decode(
        model,
        tokens,
        TopK(2),
        temperature=temperature,
        suppressed=[2],
        allowed=allowed,
        verify=True,
        remask_below=0.5,
        seeds=torch.arange(4),
    ).tokens
    assert (written[:, 0] == 3).all()
    assert (written[:, 2] == 1).all()
    assert model.kept.equal(before)


def test_restrictions_are_made_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = Fixed(torch.rand(9, generator=torch.Generator().manual_seed(1))), torch.zeros(6, 5).long()
    options: dict[str, Any] = {"seeds": torch.arange(6), "temperature": 1.0, "suppressed": [1, 7]}
    options["allowed"] = torch.rand(6, 5, 9, generator=torch.Generator().manual_seed(2)) < 0.7
    whole = decode(model, tokens, Random(2), **options, trace=True)
    monkeypatch.setattr(vocabulary, "_TILE", 30)  # three positions
    parts = decode(model, tokens, Random(2), **options, trace=True)
    assert parts.tokens.equal(whole.tokens)
    assert all(a.entropy.equal(b.entropy) for a, b in zip(parts.trace or [], whole.trace or [], strict=True))
    assert options["allowed"].gather(-1, whole.tokens.unsqueeze(-1)).all()


def test_tokens_that_a_model_rules_out_itself_are_left_to_it() -> None:
    model = Fixed(torch.tensor([0.5, 0.3, 0.2]))
    model.forbidden_tokens = torch.tensor([0])  # type: ignore[attr-defined] # which is a lie
    assert (decode(model, torch.zeros(1, 2, dtype=torch.int64), All()).tokens == 0).all()


def test_models_that_answer_in_inference_mode_are_decoded() -> None:
    class Inference(Fixed):
        @torch.inference_mode()
        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            logits, hidden = super().__call__(tokens)
            return MaskedOutput(logits.clone(), hidden)

    assert (
        decode(Inference(torch.tensor([0.9, 0.06, 0.04])), torch.zeros(2, 3, dtype=torch.int64), All()).tokens == 1
    ).all()


def test_policies_see_the_distribution_of_what_may_be_written() -> None:
    seen = []

    class Watching(All):
        def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
            seen.append(stats.confidence)
            return super().select(stats, hidden, mask, step)

    model = Fixed(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    decode(model, torch.zeros(1, 2, dtype=torch.int64), Watching(), suppressed=[3], temperature=5.0, top_p=0.1)
    torch.testing.assert_close(seen[0], torch.full((1, 2), 2 / 3))


def test_suppressed_and_allowed_tokens_hold_at_their_positions() -> None:
    model = Fixed(torch.tensor([0.0, 0.5, 0.3, 0.15, 0.05]))
    tokens = torch.zeros(40, 3, dtype=torch.int64)
    seeds = torch.arange(40)
    drawn = decode(model, tokens, All(), temperature=1.0, seeds=seeds, suppressed=[1, 4]).tokens
    assert set(drawn.flatten().tolist()) == {2, 3}
    sets = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 1, 1, 0]], dtype=torch.bool)
    drawn = decode(model, tokens, Random(1), temperature=1.0, seeds=seeds, allowed=sets).tokens
    assert (drawn[:, 1] == 4).all()
    assert set(drawn[:, 2].tolist()) == {2, 3}
    own = torch.zeros(40, 1, 5, dtype=torch.bool)
    own[torch.arange(40), 0, 1 + torch.arange(40) % 4] = True
    assert decode(model, tokens, Sequential(), allowed=own).tokens.equal(
        (1 + torch.arange(40) % 4).unsqueeze(-1).expand(-1, 3)
    )
    for shape in ((2, 3, 5), (4, 5), (1, 1, 4), (1, 40, 3, 5)):
        with pytest.raises(ValueError, match=r"allowed must broadcast to \[B, N, V\] = \(40, 3, 5\)"):
            decode(model, tokens, All(), allowed=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"must leave a token to write at sequence 0, position 1, got \[\]$"):
        decode(model, tokens, All(), allowed=sets & torch.tensor([[True], [False], [True]]))
    with pytest.raises(ValueError, match=r"suppressed must be tokens in 0\.\.4, got 5"):
        decode(model, tokens, All(), suppressed=[5])


def test_a_stop_token_ends_its_sequence() -> None:
    class Script(Fixed):
        """Wants 1, 2, 3, 4, 5 at the positions, surest at the end."""

        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            logits = torch.zeros(*tokens.shape, 6)
            for position in range(tokens.shape[1]):
                logits[:, position, position + 1] = 3.0 + position
            return MaskedOutput(logits, torch.zeros(*tokens.shape, 1))

    model = Script(torch.ones(6))
    tokens = torch.tensor([[0, 0, 0, 0, 0], [0, 3, 0, 0, 5]])
    # From the end on: 5, 4, 3 (which stops: two positions fewer to go, the later ones get the stop), 2, 1.
    result = decode(model, tokens[:1], Sequential(), stop_tokens=[3], trace=True)
    assert result.tokens.tolist() == [[1, 2, 3, 3, 3]]
    assert result.passes.tolist() == [5]
    assert receipt(result.trace or [], 0)[2]["ended"] == [[3, 3], [4, 3]]
    # A stop of the prompt ends nothing, and what was there stays.
    result = decode(model, tokens[1:], Sequential(), stop_tokens=[3, 4])
    assert result.tokens.tolist() == [[1, 3, 3, 3, 5]]
    assert result.passes.tolist() == [3]
    # Decoded in blocks from the front, nothing behind the stop costs a pass.
    result = decode(model, tokens[:1], Sequential(), stop_tokens=[2], block_size=1)
    assert result.tokens.tolist() == [[1, 2, 2, 2, 2]]
    assert result.passes.tolist() == [2]
    # Where a position may not hold the stop it is decoded as usual, whether the stop comes before or after it.
    allowed = torch.ones(5, 6, dtype=torch.bool)
    allowed[4, 3] = False
    for policy in (Sequential(), All()):
        result = decode(model, tokens[:1], policy, stop_tokens=[3], allowed=allowed)
        assert result.tokens.tolist() == [[1, 2, 3, 3, 5]]
    result = decode(model, tokens[:1], Sequential(), stop_tokens=[3], allowed=allowed, block_size=1)
    assert result.tokens.tolist() == [[1, 2, 3, 3, 5]]
    assert result.passes.tolist() == [4]
    # A mask token beyond the vocabulary, where nothing has stopped yet.
    model, tokens = chain(4), torch.full((2, 4), MASK)
    everything = torch.ones(4, V, dtype=torch.bool)
    for stop_tokens in ([1], [0, 2]):
        plain = decode(model, tokens, Sequential(), stop_tokens=stop_tokens)
        assert decode(model, tokens, Sequential(), stop_tokens=stop_tokens, allowed=everything).tokens.equal(
            plain.tokens
        )
    model, tokens = Script(torch.ones(6)), torch.tensor([[0, 0, 0, 0, 0]])
    with pytest.raises(ValueError, match=r"stop_tokens must be tokens in 0\.\.5, got 6"):
        decode(model, tokens, All(), stop_tokens=[6])


# --- blocks


def test_blocks_open_one_after_the_other_from_the_first_masked_position() -> None:
    tokens = torch.tensor([[0, 0, MASK, MASK, 1, MASK]])
    result = decode(Chains(), tokens, TopK(9), block_size=3, trace=True)
    assert [entry["positions"] for entry in receipt(result.trace or [], 0)] == [[2, 3], [5]]
    one_by_one = decode(Chains(), tokens, TopK(9), block_size=1, trace=True)
    assert [entry["positions"] for entry in receipt(one_by_one.trace or [], 0)] == [[2], [3], [5]]
    assert decode(Chains(), tokens, TopK(9), block_size=99).passes.tolist() == [1]


class Ruling(Fixed):
    """Never writes some tokens, and says so."""

    def __init__(self, probabilities: Tensor, forbidden_tokens: list[int]) -> None:
        super().__init__(probabilities)
        self.forbidden_tokens = forbidden_tokens
        self.logits[forbidden_tokens] = -torch.inf


class Permitting(Ruling):
    """Writes some of them when it is asked."""

    def __init__(self, probabilities: Tensor, forbidden_tokens: list[int]) -> None:
        super().__init__(probabilities, forbidden_tokens)
        self.probabilities = probabilities

    def permitting(self, tokens: Sequence[int]) -> Permitting:
        return Permitting(self.probabilities, [token for token in self.forbidden_tokens if token not in tokens])


def test_stop_tokens_that_a_model_never_writes_have_to_be_permitted() -> None:
    probabilities, tokens = torch.tensor([0.1, 0.2, 0.1, 0.6]), torch.zeros(1, 3, dtype=torch.int64)
    model = Permitting(probabilities, [0, 3])
    assert decode(model, tokens, TopK(1)).tokens.tolist() == [[1, 1, 1]]
    result = decode(model, tokens, TopK(1), stop_tokens=[3])
    assert (result.tokens.tolist(), result.passes.tolist()) == ([[3, 3, 3]], [1])
    assert decode(model, tokens, TopK(1), stop_tokens=[2]).tokens.tolist() == [[1, 1, 1]]  # 3 is none of them
    with pytest.raises(
        ValueError, match=r"stop_tokens must be .* got \[3\], which are in the attribute forbidden_tokens of Ruling"
    ):
        decode(Ruling(probabilities, [0, 3]), tokens, TopK(1), stop_tokens=[1, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_tokens": [1, 2], "suppressed": [2, 4]}, r"stop_tokens must not be suppressed, got \[2\] in both"),
        ({"stop_tokens": [0]}, r"stop_tokens must not hold the mask token 0, got \[0\]"),
        (
            {"allowed": torch.arange(5) == 3},
            r"allowed must leave .* sequence 0, position 1, got \[3\], of which forbidden_tokens of Permitting \[3\] cannot be written$",
        ),
        (
            {"allowed": torch.tensor([[1] * 5, [0, 0, 1, 1, 0], [1] * 5]) > 0, "suppressed": [2]},
            r"at sequence 0, position 1, got \[2, 3\], of which suppressed \[2\], forbidden_tokens of Permitting \[3\] cannot",
        ),
        ({"allowed": torch.arange(5) == 0}, r"got \[0\], of which .* the mask token \[0\] cannot be written"),
        ({"allowed": torch.zeros(5, dtype=torch.bool)}, r"got \[\]$"),
        ({"suppressed": [1, 2, 4]}, r"suppressed must leave a token to write at .*, got \[0, 1, 2, 3, 4\], of which"),
    ],
)
def test_arguments_that_contradict_each_other_or_the_model_are_named(options: dict[str, Any], message: str) -> None:
    model, tokens = Permitting(torch.ones(5) / 5, [0, 3]), torch.tensor([[1, 0, 1]])
    with pytest.raises(ValueError, match=message):
        decode(model, tokens, TopK(1), **options)
    assert decode(model, tokens[:, :1], TopK(1), suppressed=[1, 2, 4]).passes.tolist() == [0]  # nothing to write there


def test_a_set_may_demand_a_stop_token() -> None:
    model, tokens = Permitting(torch.ones(5) / 5, [0, 3]), torch.zeros(1, 2, dtype=torch.int64)
    allowed = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 1, 0]], dtype=torch.bool)
    assert decode(model, tokens, TopK(2), allowed=allowed, stop_tokens=[3]).tokens.tolist() == [[2, 3]]


def test_sets_are_searched_in_tiles_and_once_where_they_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = Permitting(torch.ones(5) / 5, [0, 3]), torch.zeros(4, 3, dtype=torch.int64)
    allowed = torch.ones(4, 3, 5, dtype=torch.bool)
    allowed[2, 1] = torch.arange(5) == 3
    monkeypatch.setattr(vocabulary, "_TILE", 20)
    with pytest.raises(ValueError, match=r"at sequence 2, position 1, got \[3\]"):
        decode(model, tokens, TopK(1), allowed=allowed)
    narrow = torch.ones(1, 1, 5, dtype=torch.bool).expand(4, 3, 5)
    assert decode(model, tokens, TopK(3), allowed=narrow).passes.tolist() == [1] * 4


@pytest.mark.parametrize("size", [2**31, 2**63, 2**70])
def test_numbers_larger_than_there_is_of_anything_mean_all_of_it(size: int) -> None:
    tokens, seeds = torch.full((2, 4), MASK), torch.arange(2)

    def found(policy: Policy, **options: Any) -> tuple[list[list[int]], list[int]]:
        result = decode(chain(4), tokens, policy, seeds=seeds, **options)
        return result.tokens.tolist(), result.passes.tolist()

    assert found(TopK(4), block_size=size) == found(TopK(4))
    assert found(TopK(2), temperature=1.0, top_k=size) == found(TopK(2), temperature=1.0)
    assert found(TopK(4), verify=True, revisions=size) == found(TopK(4), verify=True, revisions=99)
    size = min(size, 2**63 - 1)  # what a policy counts lies in tensors
    assert found(TopK(size)) == found(TopK(4))
    assert found(Random(size)) == found(Random(4))
    assert found(MIBudget(Probing(), 0.1, mi_min_masked=size, mi_max_masked=size)) == found(
        MIBudget(Probing(), 0.1, mi_min_masked=5)
    )
    assert found(Coloring(Probing(), 0.1, replan=size)) == found(Coloring(Probing(), 0.1))


# --- second thoughts


def twins() -> JointTable:
    """Two positions that must agree, unlike their likeliest tokens alone: argmax of each gives (0, 0), 30% likely."""
    return JointTable(torch.tensor([[0.30, 0.25, 0.05], [0.05, 0.0, 0.0], [0.0, 0.35, 0.0]]))


def test_verification_masks_again_what_lost_its_place() -> None:
    model = twins()
    tokens = torch.full((1, 2), 3)
    alone = decode(model, tokens, All())
    assert alone.tokens.tolist() == [[0, 1]]
    given_first = model.marginal(torch.tensor([0, 3]), (1,))
    assert given_first.argmax() == 0  # the second is no longer the best beside the first
    result = decode(model, tokens, All(), verify=True, trace=True)
    assert result.tokens.tolist() == [[0, 0]]
    assert result.passes.tolist() == [3]  # both, the check, the second again
    first, second = receipt(result.trace or [], 0)
    assert first["remasked"] == [1]
    assert second["positions"] == [1]
    assert decode(model, tokens, All(), verify=True, revisions=0).tokens.tolist() == [[0, 1]]


def test_verification_of_draws_comes_closer_to_the_joint() -> None:
    model = twins()
    tokens, seeds = torch.full((1500, 2), 3), torch.arange(1500)

    def distance(**options: Any) -> float:
        drawn = decode(model, tokens, All(), temperature=1.0, seeds=seeds, **options).tokens
        counts = torch.zeros(3, 3, dtype=torch.float64)
        counts.index_put_(tuple(drawn.t()), torch.ones(1500, dtype=torch.float64), accumulate=True)
        return float((counts / 1500 - model.joint).abs().sum() / 2)

    assert distance(verify=True) < 0.5 * distance()


def test_what_was_written_with_little_confidence_is_written_again() -> None:
    class Learning(Fixed):
        """Is unsure of an empty sequence and sure of another token beside anything."""

        def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
            seen = (tokens != 0).any(-1)
            unsure, sure = torch.tensor([0.0, 0.6, 0.4]).log(), torch.tensor([0.0, 0.05, 0.95]).log()
            logits = torch.where(seen.view(-1, 1, 1), sure, unsure).expand(*tokens.shape, 3).clone()
            logits[:, 0] = torch.tensor([0.0, 0.99, 0.01]).log()
            return MaskedOutput(logits, torch.zeros(*tokens.shape, 1))

    model = Learning(torch.ones(3))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    assert decode(model, tokens, All()).tokens.tolist() == [[1, 1, 1]]
    result = decode(model, tokens, All(), remask_below=0.7, trace=True)
    assert result.tokens.tolist() == [[1, 2, 2]]
    assert result.passes.tolist() == [2]
    assert receipt(result.trace or [], 0)[0]["remasked"] == [1, 2]
    # What stays unsure is given up after as many times as was said.
    stubborn = Fixed(torch.tensor([0.0, 0.6, 0.4]))
    assert decode(stubborn, tokens, All(), remask_below=0.7, revisions=4).passes.tolist() == [5]


# --- draws


def test_top_k_and_top_p_cut_the_least_probable() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(4000, 4)
    luck = (torch.arange(4000).double() + 0.5) / 4000
    counts = lambda **options: torch.bincount(sample(logits, luck, 1.0, **options), minlength=4).tolist()  # noqa: E731
    assert counts(top_k=2) == [0, round(4000 * 4 / 7), 0, 4000 - round(4000 * 4 / 7)]
    assert counts(top_k=1) == counts(top_p=0.4) == counts(top_p=1e-9) == [0, 4000, 0, 0]
    assert counts(top_p=0.41) == counts(top_k=2)
    assert counts(top_k=3, top_p=0.9) == counts(top_k=3)  # 9/9 of what is left, not of everything
    assert counts(top_k=9) == counts() == [400, 1600, 800, 1200]
    ties = sample(torch.zeros(100, 5), torch.rand(100).double(), 1.0, top_k=2)
    assert set(ties.tolist()) == {0, 1}


def test_gumbel_draws_from_the_same_distribution() -> None:
    logits = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.3]).log().expand(20_000, 5)
    luck = torch.rand(20_000, dtype=torch.float64)
    counts = torch.bincount(sample(logits, luck, 1.0, gumbel=True), minlength=5).double()
    assert counts[2] == 0
    expected = logits[0].exp() * 20_000
    kept = expected > 0
    assert ((counts - expected)[kept].square() / expected[kept]).sum() < 25  # far beyond 3 degrees of freedom
    # A token that gains stays, whatever happens to the others: what the cumulative sum cannot promise.
    other = logits + torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    before, after = sample(logits, luck, 1.0, gumbel=True), sample(other, luck, 1.0, gumbel=True)
    assert ((before == after) | (after == 1)).all()
    with_cut = sample(logits, luck, 0.7, gumbel=True, top_k=2)
    assert set(with_cut.tolist()) == {1, 4}


def test_large_draws_are_made_in_tiles() -> None:
    logits, luck = torch.randn(70, 40_000), torch.rand(70, dtype=torch.float64)
    whole = sample(logits, luck, 1.0, top_p=0.9)
    assert whole.equal(torch.cat([sample(logits[r : r + 1], luck[r : r + 1], 1.0, top_p=0.9) for r in range(70)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_p": math.nan}, r"top_p must lie in \(0, 1\]"),
        ({"block_size": 0}, "block_size must be"),
        ({"remask_below": 1.5}, "remask_below must be a probability"),
        ({"revisions": -1}, "revisions must be"),
        ({"temperature": 10**400}, "temperature must be a number that float64 can hold"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(chain(2), torch.full((1, 2), MASK), Sequential(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"gumbel": "no"}, "gumbel must be True or False, got 'no'"),
        ({"verify": 1}, "verify must be True or False, got 1"),
        ({"trace": None}, "trace must be True or False, got None"),
        ({"block_size": True}, "block_size must be an int, got True"),
        ({"stop_tokens": [True]}, "stop_tokens must be a sequence of tokens, which are integers"),
        ({"suppressed": "12"}, "suppressed must be a sequence of tokens, which are integers"),
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        decode(chain(2), torch.full((1, 2), MASK), Sequential(), **options)


# --- the receipt


@pytest.mark.parametrize("options", OPTIONS)
def test_a_receipt_gives_the_tokens_again(options: str) -> None:
    sequences = ragged()
    tokens, visible = padded(sequences, 6, "left")
    for policy in (Random(2), POLICIES["budget"]):
        result = decode(
            Chains(), tokens, policy, attention_mask=visible, seeds=torch.arange(8), trace=True, **OPTIONS[options]
        )
        for row in range(8):
            assert replay(tokens[row].tolist(), receipt(result.trace or [], row)) == result.tokens[row].tolist()
    with pytest.raises(ValueError, match=r"positions must lie in 0\.\.1, got 2"):
        replay([0, 0], [{"positions": [2], "tokens": [1]}])


def test_a_receipt_names_who_blocked_whom() -> None:
    pairs = torch.eye(2)[:, None, :, None] * torch.eye(2)[None, :, None, :]  # X1 = X3 and X2 = X4, fair bits
    policy = MIBudget(Probing(), 0.01, entropy_weight=0.0)
    result = decode(JointTable(pairs), torch.full((1, 4), 2), policy, temperature=1.0, trace=True)
    first, second = receipt(result.trace or [], 0)
    assert (first["positions"], first["blocked"]) == ([0, 1], [[2, 0], [3, 1]])
    assert second["positions"] == [2, 3]
    assert "blocked" not in second


def test_tracing_changes_no_choice_and_costs_nothing_when_off() -> None:
    asked = []

    class Counting:
        def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
            asked.append(mask)
            return torch.full((*mask.shape, mask.shape[1]), 0.3)

    tokens = torch.full((1, 5), MASK)
    policy = MIBudget(Counting(), 2.5, lam=0.5, mi_min_masked=5)
    plain = decode(Chains(), tokens, policy)
    assert len(asked) == 1  # only while five are masked
    traced = decode(Chains(), tokens, policy, trace=True)
    assert len(asked) == 1 + int(traced.passes)
    assert traced.tokens.equal(plain.tokens)
    assert traced.passes.equal(plain.passes)
