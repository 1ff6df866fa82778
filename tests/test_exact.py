from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from mdmi_fast.models import MaskedModel
from mdmi_fast.models.exact import ExactModel, JointTable, MarkovChain, PottsModel, xor_triple

LENGTH, VOCABULARY = 4, 3
MASK = VOCABULARY


def random_table() -> JointTable:
    weights = torch.rand((VOCABULARY,) * LENGTH, generator=torch.Generator().manual_seed(1)) ** 3
    weights[0, :, 1] = 0.0  # some sequences are impossible
    return JointTable(weights)


def enumerate_sequences(model: JointTable, visible: list[int]) -> dict[tuple[int, ...], float]:
    """Every sequence that agrees with what is visible, with its probability given that."""
    weights = {
        sequence: float(model.joint[sequence])
        for sequence in itertools.product(range(model.vocab_size), repeat=model.length)
        if all(seen in (model.mask_token_id, token) for seen, token in zip(visible, sequence, strict=True))
    }
    total = sum(weights.values())
    return {sequence: weight / total for sequence, weight in weights.items()}


def enumerate_entropy(model: JointTable, visible: list[int], positions: tuple[int, ...]) -> float:
    mass: dict[tuple[int, ...], float] = {}
    for sequence, p in enumerate_sequences(model, visible).items():
        key = tuple(sequence[i] for i in positions)
        mass[key] = mass.get(key, 0.0) + p
    return -sum(p * math.log(p) for p in mass.values() if p > 0)


VISIBLE = [[MASK] * 4, [MASK, 1, MASK, MASK], [1, MASK, MASK, 0], [2, 2, MASK, 1]]


@pytest.mark.parametrize("visible", VISIBLE)
def test_marginals_are_those_of_the_enumerated_joint(visible: list[int]) -> None:
    model = random_table()
    logits, hidden = model(torch.tensor([visible]))
    expected = torch.zeros(LENGTH, VOCABULARY, dtype=torch.float64)
    for sequence, p in enumerate_sequences(model, visible).items():
        for i, token in enumerate(sequence):
            expected[i, token] += p
    torch.testing.assert_close(logits[0].exp(), expected, rtol=0, atol=1e-12)
    assert (logits[0] == -torch.inf).equal(expected == 0)
    assert hidden.shape == (1, LENGTH, model.hidden_size)
    torch.testing.assert_close(hidden[0], torch.cat([expected.float(), torch.eye(LENGTH)], dim=1))


@pytest.mark.parametrize("visible", VISIBLE)
def test_entropies_and_information_are_those_of_the_enumerated_joint(visible: list[int]) -> None:
    model, tokens = random_table(), torch.tensor(visible)
    masked = tuple(i for i, token in enumerate(visible) if token == MASK)
    mi = model.mutual_information(tokens)
    for i, j in itertools.product(range(LENGTH), repeat=2):
        expected = 0.0
        if i != j and {i, j} <= set(masked):
            single = enumerate_entropy(model, visible, (i,)) + enumerate_entropy(model, visible, (j,))
            expected = single - enumerate_entropy(model, visible, (i, j))
        assert float(mi[i, j]) == pytest.approx(expected, abs=1e-12)
    singles = sum(enumerate_entropy(model, visible, (i,)) for i in masked)
    together = enumerate_entropy(model, visible, masked)
    assert model.entropy(tokens, masked) == pytest.approx(together, abs=1e-12)
    assert model.total_correlation(tokens, masked) == pytest.approx(singles - together, abs=1e-12)


def enumerated_chain() -> tuple[MarkovChain, JointTable]:
    """A chain with an impossible step, and its joint table by the definition."""
    generator = torch.Generator().manual_seed(2)
    initial, transition = (
        torch.rand(VOCABULARY, generator=generator),
        torch.rand(VOCABULARY, VOCABULARY, generator=generator),
    )
    transition[0, 1] = 0.0
    joint = torch.zeros((VOCABULARY,) * LENGTH, dtype=torch.float64)
    rows = transition.double() / transition.double().sum(-1, keepdim=True)
    for sequence in itertools.product(range(VOCABULARY), repeat=LENGTH):
        joint[sequence] = float(initial[sequence[0]]) * math.prod(
            float(rows[a, b]) for a, b in itertools.pairwise(sequence)
        )
    return MarkovChain(initial, transition, length=LENGTH), JointTable(joint)


def enumerated_potts() -> tuple[PottsModel, JointTable]:
    generator = torch.Generator().manual_seed(3)
    fields = torch.randn(LENGTH, VOCABULARY, generator=generator)
    couplings = torch.randn(LENGTH, LENGTH, VOCABULARY, VOCABULARY, generator=generator)
    joint = torch.zeros((VOCABULARY,) * LENGTH, dtype=torch.float64)
    for sequence in itertools.product(range(VOCABULARY), repeat=LENGTH):
        energy = sum(float(fields[i, token]) for i, token in enumerate(sequence))
        for (i, a), (j, b) in itertools.combinations(enumerate(sequence), 2):
            energy += float(couplings[i, j, a, b])
        joint[sequence] = math.exp(energy)
    return PottsModel(fields, couplings), JointTable(joint)


@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("pair", [enumerated_chain(), enumerated_potts()], ids=["chain", "potts"])
def test_every_model_answers_as_its_enumerated_joint(pair: tuple[ExactModel, JointTable], visible: list[int]) -> None:
    model, table = pair
    tokens = torch.tensor(visible)
    masked = tuple(i for i, token in enumerate(visible) if token == MASK)
    # float64; sums of at most 81 terms
    torch.testing.assert_close(
        model(tokens.unsqueeze(0)).logits.exp(), table(tokens.unsqueeze(0)).logits.exp(), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(model.mutual_information(tokens), table.mutual_information(tokens), rtol=0, atol=1e-12)
    for size in range(1, len(masked) + 1):
        for positions in itertools.combinations(masked, size):
            assert model.entropy(tokens, positions) == pytest.approx(
                enumerate_entropy(table, visible, positions), abs=1e-12
            )
            expected = table.total_correlation(tokens, positions)
            assert model.total_correlation(tokens, positions) == pytest.approx(expected, abs=1e-12)


def test_a_long_chain_needs_no_enumeration_and_loses_information_with_distance() -> None:
    model = MarkovChain(torch.ones(4), torch.eye(4) + 0.05, length=300)
    tokens = torch.full((300,), 4)
    tokens[150] = 2
    output = model(tokens.unsqueeze(0))
    assert output.logits.isfinite().any(dim=-1).all()
    assert float(output.logits[0, 149].exp()[2]) > 0.7
    # Of a uniform chain H(X_t | X_{t-1}) is the same at every step: the total correlation of a run is the sum of its steps.
    free = torch.full((300,), 4)
    step = model.total_correlation(free, (0, 1))
    assert model.total_correlation(free, tuple(range(300))) == pytest.approx(299 * step, rel=1e-9)
    assert model.total_correlation(free, (0, 9)) < model.total_correlation(free, (0, 3)) < step


def test_a_chain_takes_shorter_sequences() -> None:
    model, _ = enumerated_chain()
    whole = model(torch.tensor([[1, MASK, MASK, MASK]]))
    short = model(torch.tensor([[1, MASK]]))
    torch.testing.assert_close(short.logits, whole.logits[:, :2], rtol=0, atol=1e-12)
    assert short.hidden.equal(whole.hidden[:, :2])


@pytest.mark.parametrize("model", [random_table(), enumerated_chain()[0], enumerated_potts()[0]])
def test_an_answer_does_not_depend_on_the_batch(model: ExactModel) -> None:
    tokens = torch.tensor([*VISIBLE, *VISIBLE[::-1]])
    together = model(tokens)
    for size in (1, 3):
        parts = [model(part) for part in tokens.split(size)]
        assert torch.cat([part.logits for part in parts]).equal(together.logits)
        assert torch.cat([part.hidden for part in parts]).equal(together.hidden)


def test_marginal_has_its_axes_in_the_order_asked_for() -> None:
    model, tokens = random_table(), torch.full((LENGTH,), MASK)
    assert model.marginal(tokens, (2, 0)).equal(model.marginal(tokens, (0, 2)).t())
    torch.testing.assert_close(model.marginal(tokens, (3, 1, 0, 2)).permute(2, 1, 3, 0), model.joint)


def test_two_bits_by_hand() -> None:
    # H(X1) = ln 2, H(X2) = H(.6, .4) = 0.673012, H = H(.4, .1, .2, .3) = 1.279854
    model = JointTable(torch.tensor([[0.4, 0.1], [0.2, 0.3]], dtype=torch.float64))
    tokens = torch.tensor([2, 2])
    assert model.entropy(tokens, (0, 1)) == pytest.approx(1.279854, abs=1e-6)
    assert float(model.mutual_information(tokens)[0, 1]) == pytest.approx(0.086305, abs=1e-6)
    assert model(torch.tensor([[0, 2]])).logits[0, 1].exp().tolist() == pytest.approx([0.8, 0.2])


def test_xor_has_no_pairwise_information_and_ln_2_of_total_correlation() -> None:
    model, tokens = xor_triple(), torch.tensor([2, 2, 2])
    assert model.mutual_information(tokens).abs().max() < 1e-12
    assert model.total_correlation(tokens, (0, 1, 2)) == pytest.approx(math.log(2), abs=1e-12)
    given = model.mutual_information(torch.tensor([2, 2, 1]))
    assert float(given[0, 1]) == pytest.approx(math.log(2), abs=1e-12)


def test_one_position_and_one_token() -> None:
    assert JointTable(torch.tensor([1.0, 3.0]))(torch.tensor([[2]])).logits.exp().tolist() == [[[0.25, 0.75]]]
    assert JointTable(torch.ones(1, 1))(torch.tensor([[1, 0]])).logits.tolist() == [[[0.0], [0.0]]]


def test_padding_is_summed_out_whatever_stands_there() -> None:
    model = random_table()
    visible = torch.tensor([[True, True, True, False]])
    expected = model(torch.tensor([[1, MASK, MASK, MASK]]))
    for token in range(MASK + 1):
        output = model(torch.tensor([[1, MASK, MASK, token]]), visible)
        assert output.logits.equal(expected.logits)


def test_exact_models_are_masked_models() -> None:
    for model in (xor_triple(), enumerated_chain()[0], enumerated_potts()[0]):
        assert isinstance(model, MaskedModel)


@pytest.mark.parametrize(
    "joint",
    [
        torch.ones(2, 3),
        torch.tensor(1.0),
        torch.zeros(2, 2),
        torch.tensor([1.0, -0.5]),
        torch.tensor([1.0, torch.nan]),
        torch.tensor([1.0, torch.inf]),
    ],
)
def test_a_table_that_is_no_distribution_is_refused(joint: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="JointTable: joint must"):
        JointTable(joint)


@pytest.mark.parametrize(
    ("tokens", "message"), [([0, 1, 1], "probability 0"), ([5, 2, 2], "probability 0"), ([2], "must be")]
)
def test_the_impossible_and_other_lengths_are_refused(tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JointTable(torch.eye(2)[:, :, None] * torch.tensor([1.0, 0.0]))(torch.tensor([tokens]))


@pytest.mark.parametrize("positions", [(), (0, 0), (3,), (-1,), (5,)])
def test_positions_that_are_none_of_the_sequence_or_not_distinct_are_refused(positions: tuple[int, ...]) -> None:
    models: list[ExactModel] = [xor_triple(), MarkovChain(torch.ones(2), torch.ones(2, 2), length=7)]
    for model in models:
        with pytest.raises(ValueError, match=r"positions must be distinct and of 0\.\.2, at least one, got \("):
            model.entropy(torch.tensor([2, 2, 2]), positions)
    with pytest.raises(ValueError, match="JointTable: positions must be distinct"):
        xor_triple().marginal(torch.tensor([2, 2, 2]), positions)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MarkovChain(torch.ones(2), torch.ones(2, 3), length=2), r"must be \[V\] and transition \[V, V\]"),
        (lambda: MarkovChain(torch.ones(2), torch.eye(2), length=0), "length must be at least 1"),
        (lambda: MarkovChain(torch.ones(2), torch.diag(torch.tensor([1.0, 0.0])), length=2), "rows that sum above 0"),
        (lambda: MarkovChain(torch.tensor([1.0, -0.1]), torch.eye(2), length=2), "finite weights >= 0"),
        (
            lambda: MarkovChain(torch.ones(2), torch.eye(2), length=2)(torch.tensor([[2, 2, 2]])),
            r"1 to 2\], got length 3",
        ),
        (lambda: MarkovChain(torch.ones(2), torch.eye(2), length=2)(torch.tensor([[0, 1]])), "have probability 0"),
        (
            lambda: MarkovChain(torch.ones(2), torch.eye(2), length=2).entropy(torch.tensor([0, 1]), (0,)),
            "probability 0",
        ),
        (lambda: PottsModel(torch.ones(2, 3), torch.ones(2, 2, 3, 2)), "couplings must|must be .N, V. and couplings"),
        (lambda: PottsModel(torch.ones(1, 2) / 0, torch.ones(1, 1, 2, 2)), "must be finite"),
        (lambda: PottsModel(torch.ones(25, 2), torch.ones(25, 25, 2, 2)), r"can be enumerated, got 2\^25"),
    ],
)
def test_chains_and_potts_models_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
