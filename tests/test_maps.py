"""Maps of mutual information, their graphs and pictures."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import networkx
import numpy as np
import pytest
import torch
from matplotlib.image import imread
from matplotlib.patches import Arc, FancyArrowPatch
from torch import Tensor

from mdmi_fast import dependency_graph, mi_map, ops
from mdmi_fast.errors import UnsupportedError
from mdmi_fast.maps import (
    MIMap,
    Pair,
    compare_maps,
    compare_structure,
    draw_arcs,
    draw_board,
    draw_comparison,
    draw_map,
    find_surprises,
    roc_area,
    write_graph,
)
from mdmi_fast.models import MaskedOutput
from mdmi_fast.models.exact import JointTable


def two_coupled_pairs() -> JointTable:
    """Four bits: 0 and 1 agree 9 times in 10, 2 and 3 agree always, the pairs are independent of each other."""
    near = torch.tensor([[0.45, 0.05], [0.05, 0.45]])
    same = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
    return JointTable(torch.einsum("ab,cd->abcd", near, same))


ALL_MASKED = torch.tensor([2, 2, 2, 2])
NEAR = math.log(2) + 0.9 * math.log(0.9) + 0.1 * math.log(0.1)


def hand_made(mi: list[list[float]], entropy: list[float], masked: list[bool] | None = None) -> MIMap:
    n = len(mi)
    mask = torch.tensor(masked or [True] * n)
    tokens = torch.zeros(n, dtype=torch.int64)
    return MIMap(torch.tensor(mi), torch.tensor(entropy), tokens, mask, tuple("abcdefgh"[:n]), "by hand")


def test_probing_a_consistent_model_gives_the_exact_map() -> None:
    model = two_coupled_pairs()
    found = mi_map(model, ALL_MASKED)
    torch.testing.assert_close(found.mi, model.mutual_information(ALL_MASKED).float(), atol=1e-6, rtol=0)
    assert found.pairs(limit=2) == [
        Pair(2, 3, pytest.approx(math.log(2), abs=1e-6)),
        Pair(0, 1, pytest.approx(NEAR, abs=1e-6)),
    ]
    torch.testing.assert_close(found.entropy, torch.full((4,), math.log(2)), atol=1e-6, rtol=0)
    assert found.labels == ("0", "1", "2", "3")
    assert found.source == "probed, joint form"


def test_visible_positions_have_neither_pairs_nor_entropy() -> None:
    found = mi_map(two_coupled_pairs(), torch.tensor([2, 2, 1, 2]))
    assert found.mask.tolist() == [True, True, False, True]
    assert found.entropy[2] == 0
    assert [pair[:2] for pair in found.pairs()] == [(0, 1), (0, 3), (1, 3)]
    assert not found.mi[2].any()


def test_a_mask_hides_tokens_that_were_given() -> None:
    model = two_coupled_pairs()
    hidden = mi_map(model, torch.tensor([0, 0, 1, 1]), torch.tensor([True, True, False, False]))
    assert hidden.tokens.tolist() == [2, 2, 1, 1]
    assert torch.equal(hidden.mi, mi_map(model, torch.tensor([2, 2, 1, 1])).mi)


def test_an_estimator_predicts_the_map_in_one_pass() -> None:
    model = two_coupled_pairs()
    calls = 0

    def counted(tokens: Tensor) -> MaskedOutput:
        nonlocal calls
        calls += 1
        return model(tokens)

    for name in ("mask_token_id", "vocab_size", "hidden_size"):
        setattr(counted, name, getattr(model, name))
    predicted = torch.tensor([[0.0, 0.3, 0.0, 0.1]] * 4)

    def estimator(hidden: Tensor, mask: Tensor) -> Tensor:
        assert hidden.shape == (1, 4, model.hidden_size)
        return predicted.unsqueeze(0) * (mask.unsqueeze(-1) & mask.unsqueeze(-2))

    found = mi_map(counted, ALL_MASKED, estimator=estimator, labels="abcd")  # type: ignore[arg-type]
    assert calls == 1
    assert torch.equal(found.mi, predicted)
    assert found.source == "predicted"
    assert found.labels == ("a", "b", "c", "d")


def test_progress_counts_the_passes_of_probing() -> None:
    passes: list[int] = []
    mi_map(two_coupled_pairs(), ALL_MASKED, progress=passes.append)
    assert sum(passes) == 1 + 4 * 2


@pytest.mark.parametrize(
    ("tokens", "mask", "labels", "message"),
    [
        (torch.zeros(1, 4, dtype=torch.int64), None, None, r"tokens must be \[N\] int64, got shape \(1, 4\)"),
        (torch.zeros(4), None, None, r"tokens must be \[N\] int64, got shape \(4,\) torch.float32"),
        (ALL_MASKED, torch.ones(3, dtype=torch.bool), None, r"mask must be \(4,\) bool, got \(3,\)"),
        (ALL_MASKED, torch.ones(4), None, r"mask must be \(4,\) bool, got \(4,\) torch.float32"),
        (torch.tensor([0, 0, 1, 2]), None, None, "at least two positions must be masked, got 1"),
        (ALL_MASKED, None, ["a"], "labels must name 4 positions, got 1"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    tokens: Tensor, mask: Tensor | None, labels: list[str] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mi_map(two_coupled_pairs(), tokens, mask, labels=labels)


def test_an_estimator_that_answers_nan_is_an_error_that_names_the_position() -> None:
    def broken(hidden: Tensor, mask: Tensor) -> Tensor:
        mi = torch.zeros(1, 4, 4)
        mi[0, 2, 3] = math.nan
        return mi

    with pytest.raises(ValueError, match="answers NaN at position 2"):
        mi_map(two_coupled_pairs(), ALL_MASKED, estimator=broken)


def test_pairs_come_by_value_then_by_position_and_can_be_chosen() -> None:
    found = hand_made([[0, 0.2, 0.5], [0.2, 0, 0.2], [0.1, 0.2, 0]], [1, 1, 1])
    weak = torch.tensor([[False, True, False], [True, False, True], [False, True, False]])
    assert found.pairs() == [(0, 2, 0.5), (0, 1, pytest.approx(0.2)), (1, 2, pytest.approx(0.2))]
    assert [pair[:2] for pair in found.pairs(weak, limit=1)] == [(0, 1)]
    assert found.pairs(limit=0) == []


def test_a_saved_map_comes_back(tmp_path: Path) -> None:
    found = mi_map(two_coupled_pairs(), torch.tensor([2, 2, 1, 2]), labels=["\u03b1", "b", "c", "d"])
    path = tmp_path / "new" / "map.arrays"
    found.save(path)
    again = MIMap.load(path)
    for name in ("mi", "entropy", "tokens", "mask"):
        assert torch.equal(getattr(again, name), getattr(found, name))
    assert (again.labels, again.source) == (found.labels, found.source)
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["mi"].dtype == np.float32
    assert [entry.name for entry in path.parent.iterdir()] == ["map.arrays"]


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 truncated"])
def test_a_file_that_is_no_map_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "map.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"map\.npz: not a map of mutual information") as error:
        MIMap.load(path)
    assert "pickle" not in str(error.value)  # no advice to load what is no map in an unsafe way


def test_a_missing_map_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MIMap.load(tmp_path / "none.npz")


def test_edges_are_the_pairs_from_tau_on_whichever_direction_is_larger() -> None:
    mi = torch.tensor([[9.0, 0.1, 0.0], [0.3, 9.0, 0.2], [0.0, 0.1, 9.0]])
    graph = dependency_graph(mi, 0.2)
    assert sorted(graph.edges) == [(0, 1), (1, 2)]
    assert graph.edges[0, 1]["mi"] == pytest.approx(0.3)
    assert [graph.nodes[node] for node in graph] == [{"label": "0"}, {"label": "1"}, {"label": "2"}]
    assert graph.graph == {"tau": 0.2}
    assert dependency_graph(mi, 0.31).number_of_edges() == 0
    assert dependency_graph(mi, 0.0).number_of_edges() == 3


def test_colours_of_the_same_tau_are_proper_on_the_graph() -> None:
    mi = torch.rand(12, 12)
    group = ops.color(mi, tau=0.7)
    graph = dependency_graph(mi, 0.7)
    assert all(group[a] != group[b] for a, b in graph.edges)


def test_the_graph_of_a_map_has_its_masked_positions_labels_and_entropies(tmp_path: Path) -> None:
    found = mi_map(two_coupled_pairs(), torch.tensor([2, 2, 1, 2]), labels=["<a>", "b", "c", "d"])
    graph = dependency_graph(found, tau=0.01)
    assert graph.nodes[0] == {"label": "<a>", "entropy": pytest.approx(math.log(2))}
    assert list(graph.nodes) == [0, 1, 3]
    assert list(graph.edges) == [(0, 1)]
    networkx.write_graphml(graph, tmp_path / "g.graphml")
    again = networkx.read_graphml(tmp_path / "g.graphml", node_type=int)
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert list(again.edges(data=True)) == list(graph.edges(data=True))


def test_labels_and_mask_can_be_given_with_a_matrix() -> None:
    graph = dependency_graph(torch.ones(3, 3), 0.5, ["x", "y", "z"], mask=torch.tensor([True, False, True]))
    assert list(graph.edges) == [(0, 2)]
    assert graph.nodes[2]["label"] == "z"


@pytest.mark.parametrize(
    ("mi", "tau", "labels", "message"),
    [
        (torch.ones(2, 3), 0.1, None, r"mi must be \[N, N\], got shape \(2, 3\)"),
        (torch.ones(2, 2), -0.1, None, "tau must be at least 0 nats, got -0.1"),
        (torch.ones(2, 2), math.nan, None, "tau must be at least 0 nats, got nan"),
        (torch.ones(2, 2), 0.1, ["a"], r"labels and mask must be \[2\] like mi, got 1"),
    ],
)
def test_a_graph_of_nonsense_is_refused(mi: Tensor, tau: float, labels: list[str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dependency_graph(mi, tau, labels)


def test_structure_is_found_unexpected_missing_or_settled() -> None:
    found = hand_made(
        [
            [0.0, 0.5, 0.0, 0.0, 0.0],
            [0.5, 0.0, 0.3, 0.0, 0.0],
            [0.0, 0.3, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0],
        ],
        entropy=[1.0, 1.0, 1.0, 0.05, 0.0],
        masked=[True, True, True, True, False],
    )
    expected = torch.zeros(5, 5, dtype=torch.bool)
    for first, second in [(0, 1), (0, 2), (0, 3), (0, 4)]:  # one direction is enough
        expected[first, second] = True
    report = compare_structure(found, expected, tau=0.1)
    pairs = {name: [pair[:2] for pair in found.pairs(which)] for name, which in report._asdict().items()}
    assert pairs == {"found": [(0, 1)], "unexpected": [(1, 2)], "missing": [(0, 2)], "settled": [(0, 3)]}
    for which in report:
        assert torch.equal(which, which.T)


def test_an_expected_structure_of_another_shape_is_refused() -> None:
    found = hand_made([[0.0, 0.1], [0.1, 0.0]], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"expected must be \(2, 2\) bool like mi, got \(3, 3\)"):
        compare_structure(found, torch.ones(3, 3, dtype=torch.bool), tau=0.1)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        compare_structure(found, torch.ones(2, 2), tau=0.1)


def test_the_picture_says_nats_names_positions_and_counts_what_it_marks(tmp_path: Path) -> None:
    found = mi_map(two_coupled_pairs(), ALL_MASKED, labels=["one", "two", "three", "four"])
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[0, 1] = expected[0, 2] = True
    figure = draw_map(found, expected=expected, tau=0.1, expected_name="neighbours", title="A title", every=2)
    figure.savefig(tmp_path / "map.svg")
    figure.savefig(tmp_path / "map.png", dpi=50)
    texts = {text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))}
    assert {"A title", "one", "three", "Structure: neighbours"} <= texts
    assert "two" not in texts  # every second position is named
    assert any("nats" in text for text in texts)
    assert "unexpected: at least 0.1 nats (1 pairs)" in texts
    assert "missing: expected, but below 0.1 nats (1 pairs)" in texts
    picture = imread(tmp_path / "map.png")[..., :3].reshape(-1, 3)
    assert len(np.unique(picture, axis=0)) > 50
    assert figure.axes[0].images[0].get_array()[2, 3] == pytest.approx(math.log(2), abs=1e-6)


def test_a_picture_without_structure_is_the_heat_map_alone_and_labels_what_has_room() -> None:
    n = 100
    mi = torch.rand(n, n).triu(1)
    found = MIMap(
        mi + mi.T,
        torch.ones(n),
        torch.zeros(n, dtype=torch.int64),
        torch.ones(n, dtype=torch.bool),
        tuple(map(str, range(n))),
        "by hand",
    )
    figure = draw_map(found)
    assert len(figure.axes) == 2  # the matrix and its colour bar
    assert len(figure.axes[0].get_xticks()) <= 27
    figure.canvas.draw()


def test_a_map_of_nothing_but_zeros_can_be_drawn() -> None:
    draw_map(hand_made([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]), expected=torch.ones(2, 2).bool()).canvas.draw()


@pytest.mark.parametrize("package", ["networkx", "matplotlib"])
def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    found = hand_made([[0.0, 0.1], [0.1, 0.0]], [1.0, 1.0])
    with pytest.raises(UnsupportedError) as error:
        dependency_graph(found, 0.1) if package == "networkx" else draw_map(found)
    assert error.value.reasons == [f"{package} is not installed: pip install 'mdmi-fast[plot]'"]


@pytest.mark.parametrize("ending", ["graphml", "dot", "json"])
def test_every_graph_file_holds_the_graph(tmp_path: Path, ending: str) -> None:
    found = mi_map(two_coupled_pairs(), ALL_MASKED, labels=['say "a"', "b", "c", "d"])
    graph = dependency_graph(found, tau=0.01)
    path = tmp_path / f"g.{ending}"
    write_graph(graph, path)
    if ending == "graphml":
        again = networkx.read_graphml(path, node_type=int)
    elif ending == "json":
        again = networkx.node_link_graph(json.loads(path.read_text()), edges="links")
    else:
        text = path.read_text()
        assert text.startswith("graph dependencies {")
        assert '  0 [label="say \\"a\\""];' in text
        assert sorted(re.findall(r"(\d) -- (\d) \[mi=([\d.]+)", text)) == [
            ("0", "1", f"{found.mi[0, 1]:.6g}"),
            ("2", "3", f"{found.mi[2, 3]:.6g}"),
        ]
        return
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert list(again.edges(data=True)) == list(graph.edges(data=True))


def test_a_graph_file_of_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.graphml, \.dot or \.json, got g\.gif"):
        write_graph(networkx.Graph(), tmp_path / "g.gif")


def simulated(n: int, planted: int, seed: int, freedom: float | None = None) -> tuple[MIMap, Tensor, Tensor]:
    """A map, its structure and its surprises: log I normal or like Student's t, larger in a random structure.

    Of each kind of pairs, `planted` are set apart by hand.
    """
    luck = np.random.default_rng(seed)
    expected = torch.from_numpy(luck.random((n, n)) < 0.3).triu(1)
    noise = luck.standard_normal((n, n)) if freedom is None else luck.standard_t(freedom, (n, n))
    logs = torch.from_numpy(noise) + torch.where(expected, -2.0, -6.0)
    surprising = torch.zeros(n, n, dtype=torch.bool)
    for kind, distance in ((expected, -8.0), (~expected, 8.0)):
        where = kind.triu(1).nonzero()
        chosen = where[luck.permutation(len(where))[:planted]]
        surprising[chosen[:, 0], chosen[:, 1]] = True
        logs[chosen[:, 0], chosen[:, 1]] += distance
    values = logs.exp().triu(1)
    mask = torch.ones(n, dtype=torch.bool)
    mi = (values + values.T).float()
    found = MIMap(mi, torch.ones(n), torch.zeros(n, dtype=torch.int64), mask, tuple(map(str, range(n))), "simulated")
    return found, expected, surprising


@pytest.mark.parametrize(("freedom", "least"), [(None, 0.9), (10, 0.9), (5, 0.7), (3, 0.2)])
def test_surprises_are_found_and_no_more_false_ones_than_promised_whatever_the_tails(
    freedom: float | None, least: float
) -> None:
    false, found = [], []
    for seed in range(60):
        mi, expected, surprising = simulated(60, 20, seed, freedom)
        surprises = find_surprises(mi, expected, rate=0.1)
        named = surprises.unexpected | surprises.missing
        assert torch.equal(named, named.T)
        assert not bool((surprises.unexpected & (expected | expected.T)).any())
        assert not bool((surprises.missing & ~(expected | expected.T)).any())
        named = named.triu(1)
        false.append(float((named & ~surprising).sum() / named.sum().clamp(min=1)))
        found.append(float((named & surprising).sum() / surprising.sum()))
    assert np.mean(false) < 0.1 + 2 * np.std(false) / len(false) ** 0.5
    assert np.mean(found) > least


def test_without_surprises_hardly_any_are_reported() -> None:
    reports = [find_surprises(*simulated(40, 0, seed)[:2], rate=0.05) for seed in range(40)]
    alarmed = sum(bool((report.unexpected | report.missing).any()) for report in reports)
    assert alarmed <= 8  # 5% of the maps, for each kind: 4 on average


def test_too_few_to_be_told_from_chance_are_not_named() -> None:
    mi, expected, _ = simulated(40, 8, 0)
    few = find_surprises(mi, expected, rate=0.1)
    assert not bool((few.unexpected | few.missing).any())
    assert int(find_surprises(mi, expected, rate=0.2).unexpected.sum()) // 2 >= 8


def test_nonsense_rates_are_refused() -> None:
    found, expected, _ = simulated(5, 0, 0)
    with pytest.raises(ValueError, match=r"rate must be between 0 and 1, got 1\.5"):
        find_surprises(found, expected, rate=1.5)


def test_the_roc_area_is_the_share_of_pairs_in_order() -> None:
    found = hand_made([[0, 0.4, 0.1, 0.2], [0, 0, 0.2, 0.0], [0, 0, 0, 0.0], [0, 0, 0, 0]], [1, 1, 1, 1])
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[0, 1] = expected[3, 0] = True
    # .4 beats all four others; .2 beats .1, .0 and .0, and ties with .2
    assert roc_area(found, expected) == pytest.approx((4 + 3.5) / 8)
    assert math.isnan(roc_area(found, torch.zeros(4, 4, dtype=torch.bool)))


def test_two_maps_are_compared_where_both_are_masked() -> None:
    one = hand_made([[0, 0.4, 0.1], [0.4, 0, 0.2], [0.1, 0.2, 0]], [1, 1, 1])
    other = hand_made([[0, 0.1, 0.1], [0.1, 0, 0.3], [0.1, 0.3, 0]], [1, 1, 1])
    report = compare_maps(one, other, limit=2)
    assert report.correlation == pytest.approx(np.corrcoef([0.4, 0.1, 0.2], [0.1, 0.1, 0.3])[0, 1], abs=1e-6)
    assert report.mean_error == pytest.approx(0.4 / 3)
    assert report.pairs == [(0, 1, pytest.approx(0.3)), (1, 2, pytest.approx(-0.1))]
    with pytest.raises(ValueError, match="as many positions, got 3 and 2"):
        compare_maps(one, hand_made([[0, 1], [1, 0]], [1, 1]))
    with pytest.raises(ValueError, match="no pair is masked in both"):
        compare_maps(one, hand_made([[0.0] * 3] * 3, [1, 1, 1], [True, False, False]))


def test_arcs_stand_for_the_dependent_pairs(tmp_path: Path) -> None:
    found = hand_made([[0, 0.4, 0.1], [0.4, 0, 0.2], [0.1, 0.2, 0]], [1, 1, 1])
    expected = torch.tensor([[False, True, False]] + [[False] * 3] * 2)
    figure = draw_arcs(found, expected=expected, tau=0.15)
    arcs = [patch for patch in figure.axes[0].patches if isinstance(patch, Arc)]
    assert sorted(arc.center[0] for arc in arcs) == [0.5, 1.5]
    assert len({arc.get_edgecolor() for arc in arcs}) == 2
    figure.savefig(tmp_path / "arcs.svg")
    assert "2 pairs of at least 0.15 nats" in figure.axes[0].get_title()


def test_a_board_shows_its_givens_and_lines_between_dependent_cells(tmp_path: Path) -> None:
    mi = torch.zeros(81, 81)
    mi[0, 1] = mi[1, 0] = 0.5
    mi[0, 80] = mi[80, 0] = 0.2
    tokens = torch.zeros(81, dtype=torch.int64)
    tokens[40] = 7
    found = MIMap(mi, (tokens == 0).float(), tokens, tokens == 0, tuple(map(str, range(81))), "by hand")
    figure = draw_board(found, tau=0.1)
    axis = figure.axes[0]
    assert [text.get_text() for text in axis.texts] == ["7"]
    assert sum(isinstance(patch, FancyArrowPatch) for patch in axis.patches) == 2
    figure.savefig(tmp_path / "board.png", dpi=40)
    with pytest.raises(ValueError, match="must be the map of 81 cells, got 2"):
        draw_board(hand_made([[0, 1], [1, 0]], [1, 1]))


def test_a_comparison_shows_both_maps_and_how_far_they_agree() -> None:
    one = hand_made([[0, 0.4, 0.1], [0.4, 0, 0.2], [0.1, 0.2, 0]], [1, 1, 1])
    figure = draw_comparison(one, one, title="The same")
    shown = figure.axes[0].images[0].get_array()
    assert shown[0, 1] == shown[1, 0] == pytest.approx(0.4)
    assert "r = 1.000, mean difference 0.0000 nats" in figure.axes[1].get_title()
    figure.canvas.draw()
