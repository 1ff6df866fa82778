from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mdmi_fast import (
    DistanceTable,
    MIBudget,
    MIThreshold,
    PairwiseMIEstimator,
    decode,
    label_mi,
    load_estimator,
    ops,
    train_estimator,
)
from mdmi_fast.estimator import Windowed
from mdmi_fast.estimator.data import Example
from mdmi_fast.labels import LabelSet
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable


def labels_of(values: Tensor, noise: float = 0.0, states: int = 40) -> LabelSet:
    """Labels that are a value by distance and noise."""
    n = len(values) + 1
    place = torch.arange(n)
    distance = (place - place.unsqueeze(-1)).abs()
    exact = values[distance.clamp(1, n - 1) - 1]
    spread = noise * torch.randn(states, n, n, generator=torch.Generator().manual_seed(0)).triu()
    mask = torch.ones(states, n, dtype=torch.bool)
    return LabelSet(torch.full((states, n), 2), mask, exact + spread + spread.mT, torch.ones(states, n))


def test_without_noise_a_table_holds_the_labels() -> None:
    values = torch.tensor([1.0, 0.3, 0.2, 0.05])
    torch.testing.assert_close(DistanceTable.fit(labels_of(values)).values.data, values)


def test_labels_that_are_all_alike_make_a_table() -> None:
    for level in (0.0, 0.3):
        values = torch.full((6,), level)
        torch.testing.assert_close(DistanceTable.fit(labels_of(values), distances=9).values[:6].data, values)


def test_thin_distances_follow_their_neighbours() -> None:
    values = 1 / torch.arange(1.0, 41.0).square()
    fitted = DistanceTable.fit(labels_of(values, noise=0.1, states=2)).values.data
    n = len(values) + 1
    labels = labels_of(values, noise=0.1, states=2)
    means = torch.stack([labels.mi.diagonal(d, 1, 2).mean() for d in range(1, n)])
    assert (fitted - values).square().mean() < 0.5 * (means - values).square().mean()
    assert abs(float(fitted[0]) - 1.0) < 0.05


def test_distances_without_a_label_lie_between_those_around() -> None:
    pairs = torch.tensor([[0, 1], [0, 4]])
    state = Example(torch.zeros(5), torch.tensor([0, 1, 4]), pairs, torch.tensor([1.0, 0.2]), None)
    values = DistanceTable.fit([state, state], distances=6).values.data
    assert torch.allclose(values[[0, 3, 4, 5]], torch.tensor([1.0, 0.2, 0.2, 0.2]), atol=1e-3)
    assert 0.2 < float(values[2]) < float(values[1]) < 1.0


def test_the_last_value_stands_for_all_beyond() -> None:
    table = DistanceTable([0.5, 0.25])
    mask = torch.tensor([[True, True, False, True, True, True]])
    mi = table(torch.zeros(1, 6, 3), mask)
    assert mi[0, 0].tolist() == [0.0, 0.5, 0.0, 0.25, 0.25, 0.25]
    assert mi.equal(mi.mT)
    windowed = Windowed(table, 1)(torch.zeros(1, 6, 3), mask)
    assert windowed[0, 3].tolist() == [0.0, 0.0, 0.0, 0.0, 0.5, 0.0]
    assert windowed[0, 0].tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_a_table_is_saved_and_loaded_like_an_estimator_and_refuses_other_models(tmp_path: Path) -> None:
    model = JointTable(torch.rand(2, 2, 2, generator=torch.Generator().manual_seed(1)))
    other = JointTable(torch.rand(2, 2, 2, generator=torch.Generator().manual_seed(2)))
    table = DistanceTable.fit(labels_of(torch.tensor([0.4, 0.1])), model=model)
    table.save_pretrained(tmp_path / "table")
    loaded = load_estimator(tmp_path / "table")
    assert isinstance(loaded, DistanceTable)
    assert loaded.values.equal(table.values)
    assert loaded.trained_on == table.trained_on
    assert loaded.seen is not None
    assert len(loaded.seen.trained) == 1  # all of its states are alike
    loaded.check_model(model)
    with pytest.raises(ValueError, match="DistanceTable: was trained on a model of weights"):
        loaded.check_model(other)
    loaded.check_model(other, moved=True)


@pytest.mark.parametrize("rule", [MIBudget, MIThreshold])
def test_a_table_decodes(rule: Any) -> None:
    model = JointTable(torch.rand(2, 2, 2, 2, generator=torch.Generator().manual_seed(0)))
    prompts = torch.full((1, 4), model.mask_token_id)
    far, near = DistanceTable([0.0]), DistanceTable([9.0])
    options = {"entropy_weight": 0.0, "gamma": 0.5} if rule is MIBudget else {"tau": 0.5}
    assert decode(model, prompts, rule(far, **options)).passes.tolist() == [1]
    assert decode(model, prompts, rule(near, **options)).passes.tolist() == [4]


@pytest.mark.parametrize("values", [[], [0.1, float("nan")], [[0.1]]])
def test_values_that_are_no_table_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="DistanceTable: values must be at least one finite number of nats, got"):
        DistanceTable(values)


def test_labels_that_no_table_can_be_fitted_to_are_refused() -> None:
    with pytest.raises(ValueError, match=r"DistanceTable\.fit: labels must hold a masked pair and be finite, got 0"):
        DistanceTable.fit([])
    with pytest.raises(ValueError, match="got 80 pairs, 0 finite"):
        DistanceTable.fit(labels_of(torch.full((1,), float("inf")), states=80))
    with pytest.raises(ValueError, match="distances must be at least 1, got 0"):
        DistanceTable.fit(labels_of(torch.ones(2)), distances=0)


# --- networks that know the distance


class Chain(JointTable):
    """Eight spins whose couplings depend on their distance only, and hidden states that say nothing of a position."""

    def __init__(self) -> None:
        spins, couplings = (
            torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 8),
            [0.6, 0.1, 0.4, 0.02, 0.25, 0.02, 0.15],
        )
        pairs = [(i, j) for j in range(8) for i in range(j)]
        energy = sum(couplings[j - i - 1] * spins[:, i] * spins[:, j] for i, j in pairs)
        super().__init__((0.2 * energy).exp().view([2] * 8))
        self.hidden_size = 1

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        return MaskedOutput(super().__call__(tokens, attention_mask).logits, torch.ones(*tokens.shape, 1))


@pytest.mark.parametrize("output", ["softplus", "identity"])
@pytest.mark.parametrize("combine", ["concat", "product", "interaction"])
def test_a_fresh_network_with_distances_begins_at_the_table(combine: Any, output: Any) -> None:
    estimator = PairwiseMIEstimator(3, (8, 4), combine, rank=4, output=output, distances=3)
    values = torch.tensor([1.5, 0.3, 0.01])
    estimator.begin_at(0.1, values)
    hidden, mask = torch.randn(2, 6, 3), torch.rand(2, 6) < 0.7
    torch.testing.assert_close(estimator(hidden, mask), DistanceTable(values)(hidden, mask))


@pytest.mark.parametrize("combine", ["concat", "interaction"])
@pytest.mark.parametrize(
    "where", [{"distances": 3}, {"relation": torch.arange(49).view(7, 7) % 5}], ids=["distances", "relation"]
)
def test_every_path_of_a_network_that_knows_where_tells_the_same(
    combine: Any, where: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    estimator = PairwiseMIEstimator(3, (8, 4), combine, rank=4, **where)
    torch.nn.init.normal_(estimator.shift)
    hidden, mask, entropy = torch.randn(3, 7, 3), torch.rand(3, 7) < 0.7, torch.rand(3, 7)
    with torch.no_grad():
        mi = estimator(hidden, mask)
        assert mi.equal(mi.mT)
        assert estimator(hidden[1:2], mask[1:2]).equal(mi[1:2])
        torch.testing.assert_close(Windowed(estimator, 7)(hidden, mask), mi)
        selection = estimator.score_and_select(entropy, hidden, mask, gamma=1.5)
        assert selection.selected.equal(ops.select_budget(entropy, mi, gamma=1.5, mask=mask).selected)
    estimator.save_pretrained(tmp_path)
    assert load_estimator(tmp_path)(hidden, mask).equal(mi)
    hidden[~mask] = torch.nan
    assert estimator(hidden, mask).isfinite().all()


def test_a_network_with_a_relation_begins_at_its_mean_labels_and_learns_them() -> None:
    place = torch.arange(8)
    relation = (place // 2 == place.unsqueeze(-1) // 2).int() + 2 * (place % 2 == place.unsqueeze(-1) % 2).int()
    mi = torch.tensor([0.01, 0.5, 0.1, 0.0])[relation]
    tokens = torch.randint(0, 2, (40, 8)).masked_fill(torch.rand(40, 8) < 0.6, 2)
    labels = LabelSet(tokens, tokens == 2, mi.expand(40, 8, 8), torch.ones(40, 8))
    estimator = PairwiseMIEstimator(1, (4,), relation=relation, output="identity")
    trained, report = train_estimator(estimator, Chain(), labels, epochs=1, held_out=0.2)
    assert report.pearson > 0.999
    hidden, mask = torch.randn(1, 8, 1), torch.ones(1, 8, dtype=torch.bool)
    torch.testing.assert_close(trained(hidden, mask)[0], mi.fill_diagonal_(0.0), atol=0.02, rtol=0.0)
    with pytest.raises(ValueError, match=r"relation must be \[N, N\]"):
        trained(torch.randn(1, 5, 1), mask[:, :5])


@pytest.mark.parametrize(
    ("relation", "error"),
    [
        (torch.zeros(3, 3), TypeError),
        ([[0]], TypeError),
        (torch.zeros(3, 4, dtype=torch.int64), ValueError),
        (torch.zeros(0, 0, dtype=torch.int64), ValueError),
        (torch.full((3, 3), -1), ValueError),
        (torch.full((3, 3), 2**40), ValueError),
    ],
)
def test_relations_that_are_none_are_refused(relation: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="relation must be"):
        PairwiseMIEstimator(3, (4,), relation=relation)
    with pytest.raises(ValueError, match="distances must be 0 where there is a relation, got 2"):
        PairwiseMIEstimator(3, (4,), distances=2, relation=torch.zeros(3, 3, dtype=torch.int64))


def test_a_chain_whose_couplings_depend_on_the_distance_only_is_learned() -> None:
    model, generator = Chain(), torch.Generator().manual_seed(0)
    tokens = torch.full((16, 8), model.mask_token_id)
    for row in tokens:
        row[torch.randperm(8, generator=generator)[:2]] = torch.randint(0, 2, (2,), generator=generator)
    found = label_mi(model, tokens)
    labels = LabelSet(tokens, tokens == model.mask_token_id, found.mi, found.entropy)
    options = {"epochs": 10, "held_out": 0.4, "learning_rate": 0.003}
    torch.manual_seed(0)
    _, report = train_estimator(PairwiseMIEstimator(1, (8,), distances=7), model, labels, **options)
    assert report.pearson >= 0.99
    _, blind = train_estimator(PairwiseMIEstimator(1, (8,)), model, labels, **options)
    assert not blind.pearson > 0.5


def test_distances_that_are_none_change_nothing_and_others_are_refused() -> None:
    torch.manual_seed(0)
    plain = PairwiseMIEstimator(3, (8, 4))
    assert "shift" not in plain.state_dict()
    with pytest.raises(ValueError, match="PairwiseMIEstimator: distances must be at least 0, got -1"):
        PairwiseMIEstimator(3, (8,), distances=-1)
    with pytest.raises(TypeError, match="train_estimator: estimator must be a network, got a DistanceTable"):
        train_estimator(DistanceTable([0.1]), Chain(), [])
