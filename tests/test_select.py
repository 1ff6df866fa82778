"""Selections: every backend against the definition, bit for bit, and the definition against brute force."""

from __future__ import annotations

import itertools
import math
import os
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mdmi_fast import ops, reference

pytestmark = pytest.mark.arithmetic

INF = torch.inf
SELECT = pytest.mark.op("select_budget", "select_threshold", "color", "score_and_select")
ORDERS = ["entropy", "cheapest"]


def case(n: int, batch: int = 4, ties: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(entropy, mi, mask), asymmetric and partly negative MI; few distinct values if there shall be ties."""
    entropy, mi = torch.rand(batch, n), 0.3 * torch.randn(batch, n, n)
    if ties:
        entropy, mi = (entropy * 4).round() / 4, (mi * 4).round() / 4
    return entropy, mi, torch.rand(batch, n) < 0.8


def gamma_of(batch: int) -> Tensor:
    return torch.linspace(0, 3, batch, dtype=torch.float64)


def same(got: Any, expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], expected[0])
    assert got[1].dtype == torch.float64
    assert torch.equal(got[1], expected[1])


@SELECT
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("n", [1, 2, 12, 67])
def test_select_budget_follows_the_definition_bit_for_bit(order: str, ties: bool, n: int, backend: str) -> None:
    entropy, mi, mask = case(n, ties=ties)
    for lam, weight, limit in itertools.product((0.0, 1.0, 0.7), (0.0, 1.0, 0.3), (None, 1, 3)):
        gamma = gamma_of(4)
        expected = reference.select_budget(entropy, mi, gamma, lam, weight, order, mask, limit)
        got = ops.select_budget(
            entropy,
            mi,
            gamma=gamma,
            lam=lam,
            entropy_weight=weight,
            order=order,
            mask=mask,
            limit=limit,
            backend=backend,
        )
        same(got, expected)


@SELECT
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("n", [1, 2, 12, 67])
@pytest.mark.parametrize("tau", [-0.1, 0.0, 0.25, 0.5, INF])
def test_select_threshold_and_color_follow_the_definition(ties: bool, n: int, tau: float, backend: str) -> None:
    entropy, mi, mask = case(n, ties=ties)
    for limit in (None, 2):
        expected = reference.select_threshold(entropy, mi, tau, mask, limit)
        same(ops.select_threshold(entropy, mi, tau=tau, mask=mask, limit=limit, backend=backend), expected)
    assert torch.equal(ops.color(mi, tau=tau, mask=mask, backend=backend), reference.color(mi, tau, mask))


def subset_price(members: tuple[int, ...], h: np.ndarray, m: np.ndarray) -> float:
    """What a set costs if it is taken in the order of its members."""
    return sum(h[i] + sum(max(m[i, j], 0) for j in members[:k]) for k, i in enumerate(members))


@SELECT
@pytest.mark.parametrize("n", range(1, 13))
def test_select_budget_is_the_lexicographically_first_set_that_fits(n: int, backend: str) -> None:
    # Greedy in a fixed order takes whatever still fits, so of all sets with the first position in which every prefix fits it
    # is the first one in dictionary order; eighths make every sum exact.
    generator = np.random.default_rng(n)
    h = np.sort(generator.integers(0, 8, n)) / 8
    m = generator.integers(-4, 5, (n, n)) / 8
    for gamma in (0.0, 0.5, 1.25, 3.0, INF):
        best: tuple[int, ...] = (0,)
        for members in itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(1, n + 1)):
            fits = all(subset_price(members[: k + 1], h, m) <= gamma for k in range(1, len(members)))
            # "takes more at the first difference" is "is smaller where absent members count as infinite"
            if members[0] == 0 and fits and (*members, INF) < (*best, INF):
                best = members
        if gamma < h[0]:
            best = (0,)
        got = ops.select_budget(torch.tensor(h), torch.tensor(m), gamma=gamma, backend=backend)
        assert got.selected.nonzero().flatten().tolist() == list(best)
        assert float(got.spent) == subset_price(best, h, m)


@SELECT
@pytest.mark.parametrize("n", range(1, 8))
def test_cheapest_takes_the_least_cost_at_every_step(n: int, backend: str) -> None:
    generator = np.random.default_rng(n)
    h, m = generator.integers(0, 8, n) / 8, generator.integers(-4, 5, (n, n)) / 8
    for gamma in (0.0, 0.5, 1.25, 3.0):
        got = ops.select_budget(torch.tensor(h), torch.tensor(m), gamma=gamma, order="cheapest", backend=backend)
        chosen = set(got.selected.nonzero().flatten().tolist())
        # of all orders of the chosen, exactly the one of least costs at every step explains the result
        explained = 0
        for members in itertools.permutations(chosen):
            steps = [
                subset_price(members[: k + 1], h, m) - subset_price(members[:k], h, m) for k in range(len(members))
            ]
            least = True
            for k, i in enumerate(members):
                costs = {
                    j: subset_price((*members[:k], j), h, m) - subset_price(members[:k], h, m)
                    for j in range(n)
                    if j not in members[:k]
                }
                least &= i == min(costs, key=lambda j, costs=costs: (costs[j], j))
            if least:
                explained += 1
                assert float(got.spent) == sum(steps)
                assert sum(steps) <= gamma or len(members) == 1
        assert explained == 1


@SELECT
def test_an_example_by_hand(backend: str) -> None:
    entropy = torch.tensor([0.5, 0.25, 0.75, 0.25])
    mi = torch.tensor([[9.0, 0.5, 0.0, 0.0], [0.0, 9.0, 0.0, 0.25], [0.0, -1.0, 9.0, 0.125], [0.0, 0.5, 0.0, 9.0]])
    # order 1, 3, 0, 2: 1 costs 0.25; 3 costs 0.25 + mi[3, 1] = 0.75, left 0.5 of 1.5; 0 costs 0.5 + mi[0, 1] = 1: skipped;
    # 2 costs 0.75 + 0 + 0.125: skipped
    got = ops.select_budget(entropy, mi, gamma=1.5, backend=backend)
    assert (got.selected.tolist(), got.spent.item()) == ([False, True, False, True], 1.0)
    # cheapest: 1 at 0.25; then 0: 1.0, 2: 0.75, 3: 0.75 -> 2 (lower index); then 3: 0.75 > 0.5 left -> end
    got = ops.select_budget(entropy, mi, gamma=1.5, order="cheapest", backend=backend)
    assert (got.selected.tolist(), got.spent.item()) == ([False, True, True, False], 1.0)
    # only dependence costs: 1 free, 3 pays mi[3, 1] = 0.5, 0 pays mi[0, 1] = 0.5, 2 pays mi[2, 3] = 0.125
    got = ops.select_budget(entropy, mi, gamma=0.6, entropy_weight=0.0, backend=backend)
    assert (got.selected.tolist(), got.spent.item()) == ([False, True, False, True], 0.5)
    # 1 first; 3: max(0.5, 0.25) >= 0.3; 0: max(0.5, 0) >= 0.3; 2: max(-1, 0) < 0.3
    got = ops.select_threshold(entropy, mi, tau=0.3, backend=backend)
    assert (got.selected.tolist(), got.spent.item()) == ([False, True, True, False], 0.0)
    # edges 0-1 and 1-3: 1 has degree 2 and colour 0, then 0, 3 and 2
    assert ops.color(mi, tau=0.3, backend=backend).tolist() == [1, 0, 0, 1]


@SELECT
@pytest.mark.parametrize("order", ORDERS)
def test_one_position_is_always_taken_and_nothing_where_nothing_is_masked(order: str, backend: str) -> None:
    entropy, mi, _ = case(5)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    got = ops.select_budget(entropy + 1, mi, gamma=0.0, order=order, mask=mask, backend=backend)
    assert got.selected.sum(1).tolist() == [1, 1, 0, 1]
    assert got.spent[2] == 0
    assert (got.spent[[0, 1, 3]] >= 1).all()
    assert not (got.selected & ~mask).any()


@SELECT
@pytest.mark.parametrize("order", ORDERS)
def test_infinite_costs_never_fit_unless_first_and_a_weight_of_0_hides_them(order: str, backend: str) -> None:
    entropy = torch.tensor([[INF, 0.1, 0.2], [INF, INF, INF]])
    mi = torch.zeros(2, 3, 3)
    mi[0, 2, 1] = INF
    got = ops.select_budget(entropy, mi, gamma=9.0, order=order, backend=backend)
    assert got.selected.tolist() == [[False, True, False], [True, False, False]]
    assert got.spent[1] == INF
    got = ops.select_budget(entropy, mi, gamma=9.0, lam=0.0, entropy_weight=0.0, order=order, backend=backend)
    assert got.selected.all()
    assert got.spent.tolist() == [0.0, 0.0]


@SELECT
@pytest.mark.parametrize("order", ORDERS)
def test_an_infinite_budget_takes_everything_finite(order: str, backend: str) -> None:
    entropy, mi, mask = case(9)
    got = ops.select_budget(entropy, mi, gamma=INF, order=order, mask=mask, backend=backend)
    assert torch.equal(got.selected, mask)


@SELECT
def test_shapes_dtypes_and_strides(backend: str) -> None:
    entropy, mi, mask = case(7, batch=6)
    gamma = gamma_of(6)
    expected = ops.select_budget(entropy, mi, gamma=gamma, mask=mask, backend=backend)
    nested = ops.select_budget(
        entropy.view(2, 3, 7), mi.view(2, 3, 7, 7), gamma=gamma.view(2, 3), mask=mask.view(2, 3, 7), backend=backend
    )
    assert torch.equal(nested.selected.view(6, 7), expected.selected)
    assert torch.equal(nested.spent.view(6), expected.spent)
    strided = ops.select_budget(
        torch.stack([entropy, entropy], -1)[..., 0],
        mi.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        gamma=gamma,
        mask=mask.T.contiguous().T,
        backend=backend,
    )
    same(strided, expected)
    for b in range(6):
        alone = ops.select_budget(entropy[b], mi[b], gamma=float(gamma[b]), mask=mask[b], backend=backend)
        same(alone, (expected.selected[b], expected.spent[b]))
    same(ops.select_budget(entropy.double(), mi, gamma=gamma, mask=mask, backend=backend), expected)
    low = ops.select_budget(entropy.bfloat16(), mi.half(), gamma=gamma, mask=mask, backend=backend)
    rounded = ops.select_budget(entropy.bfloat16().float(), mi.half().float(), gamma=gamma, mask=mask, backend=backend)
    same(low, rounded)
    for batch, n in [(0, 3), (2, 0), (0, 0)]:
        got = ops.select_budget(torch.zeros(batch, n), torch.zeros(batch, n, n), gamma=1.0, backend=backend)
        same(got, (torch.zeros(batch, n, dtype=torch.bool), torch.zeros(batch, dtype=torch.float64)))
        got = ops.select_threshold(torch.zeros(batch, n), torch.zeros(batch, n, n), tau=1.0, backend=backend)
        assert got.selected.shape == (batch, n)
        assert ops.color(torch.zeros(batch, n, n), tau=1.0, backend=backend).shape == (batch, n)
    same(
        ops.select_budget(entropy[:1].expand(6, 7), mi[:1].expand(6, 7, 7), gamma=1.0, backend=backend),
        tuple(x.expand(6, *x.shape[1:]) for x in ops.select_budget(entropy[:1], mi[:1], gamma=1.0, backend=backend)),
    )


@SELECT
def test_nan_is_an_error_that_names_the_first_and_only_where_it_counts(backend: str) -> None:
    entropy, mi, _ = case(6)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1, 3] = False
    entropy[1, 3] = mi[1, 3, 0] = mi[1, 0, 3] = mi[0, 2, 2] = torch.nan  # unmasked, or on the diagonal
    for call in (
        lambda: ops.select_budget(entropy, mi, gamma=1.0, mask=mask, backend=backend),
        lambda: ops.select_threshold(entropy, mi, tau=1.0, mask=mask, backend=backend),
        lambda: ops.color(mi, tau=1.0, mask=mask, backend=backend),
    ):
        call()
    mi[2, 4, 1] = mi[2, 1, 4] = torch.nan
    said = "mi must not be NaN between masked positions, got NaN at batch 2, positions 1 and 4"
    with pytest.raises(ValueError, match=f"select_budget: {said}"):
        ops.select_budget(entropy, mi, gamma=1.0, mask=mask, backend=backend)
    with pytest.raises(ValueError, match=f"color: {said}"):
        ops.color(mi, tau=1.0, mask=mask, backend=backend)
    entropy[3, 0] = torch.nan
    with pytest.raises(ValueError, match=f"select_threshold: {said}"):
        ops.select_threshold(entropy, mi, tau=1.0, mask=mask, backend=backend)
    entropy[2, 5] = torch.nan
    said = "entropy must not be NaN at masked positions, got NaN at batch 2, position 5"
    for order in ORDERS:
        with pytest.raises(ValueError, match=f"select_budget: {said}"):
            ops.select_budget(entropy, mi, gamma=1.0, mask=mask, order=order, backend=backend)
    with pytest.raises(ValueError, match=f"select_threshold: {said}"):
        ops.select_threshold(entropy, mi, tau=1.0, mask=mask, backend=backend)


@SELECT
@given(st.data())
def test_properties_of_a_selection(backend: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    values = st.floats(-2, 4, width=32) | st.sampled_from([0.0, 0.5, INF])
    entropy = torch.tensor(data.draw(st.lists(st.floats(0, 4, width=32), min_size=n, max_size=n)))
    mi = torch.tensor(data.draw(st.lists(values, min_size=n * n, max_size=n * n))).view(n, n)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    gamma = data.draw(st.floats(0, 10))
    order = data.draw(st.sampled_from(ORDERS))
    got = ops.select_budget(entropy, mi, gamma=gamma, order=order, mask=mask, backend=backend)
    budget = torch.tensor([gamma], dtype=torch.float64)
    expected = reference.select_budget(entropy[None], mi[None], budget, order=order, mask=mask[None])
    same(got, (expected[0][0], expected[1][0]))
    assert not (got.selected & ~mask).any()
    assert got.selected.any() == mask.any()
    # each cost fits in what the subtractions before it left, and spent adds the same costs: the rounding of nine sums below 100
    assert float(got.spent) <= gamma + 1e-12 or got.selected.sum() == 1
    groups = ops.color(mi, tau=0.5, mask=mask, backend=backend)
    assert torch.equal(groups >= 0, mask)
    clash = (
        (torch.maximum(mi, mi.T) >= 0.5) & (groups[:, None] == groups) & (groups >= 0) & ~torch.eye(n, dtype=torch.bool)
    )
    assert not clash.any()


def scored(n: int, batch: int = 3) -> tuple[Tensor, tuple[Any, ...], Tensor]:
    entropy = torch.rand(batch, n)
    weights = [torch.randn(6, 5), torch.randn(5, 4)]
    head = (torch.randn(batch, n, 6), torch.randn(batch, n, 6), weights, [torch.randn(5), torch.randn(4)])
    return entropy, (*head, torch.rand(4) * 0.1, -0.1), torch.rand(batch, n) < 0.7


@SELECT
@pytest.mark.op("pairwise_mlp")
@pytest.mark.parametrize("symmetry", ["none", "mean", "upper"])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_score_and_select_is_pairwise_mlp_then_select_budget(symmetry: str, n: int, backend: str) -> None:
    entropy, head, mask = scored(n)
    mi = ops.pairwise_mlp(*head, mask=mask, symmetry=symmetry, backend=backend)
    prepared = ops.prepare_pairwise(*head[2:], backend=backend)
    for gamma, lam, weight, limit in itertools.product((0.5, 4.0, INF), (0.7,), (0.0, 1.0), (None, 2)):
        options = {"gamma": gamma, "lam": lam, "entropy_weight": weight, "mask": mask, "limit": limit}
        expected = ops.select_budget(entropy, mi, **options, backend=backend)
        for extra in ({"backend": backend}, {"prepared": prepared}):
            same(ops.score_and_select(entropy, *head, **options, symmetry=symmetry, **extra), expected)


@SELECT
def test_score_and_select_names_itself_and_ignores_what_is_not_masked(backend: str) -> None:
    entropy, head, mask = scored(8)
    expected = ops.score_and_select(entropy, *head, gamma=1.0, mask=mask, backend=backend)
    head[0][~mask] = head[1][~mask] = torch.nan
    entropy[~mask] = torch.nan
    same(ops.score_and_select(entropy, *head, gamma=1.0, mask=mask, backend=backend), expected)
    entropy[1] = torch.nan
    with pytest.raises(
        ValueError, match="score_and_select: entropy must not be NaN at masked positions, got NaN at batch"
    ):
        ops.score_and_select(entropy, *head, gamma=1.0, mask=mask, backend=backend)


def test_selections_carry_no_gradient() -> None:
    entropy, head, _ = scored(5)
    got = ops.score_and_select(entropy.requires_grad_(), head[0].requires_grad_(), *head[1:], gamma=1.0)
    assert not got.spent.requires_grad
    assert not ops.select_budget(entropy, torch.zeros(3, 5, 5), gamma=1.0).spent.requires_grad


def test_the_registrations_are_sound() -> None:
    entropy, mi, mask = case(5)
    library, gamma = torch.ops.mdmi_fast, gamma_of(4)
    budget = (entropy, mi, mask, gamma, 1.0, 1.0, "entropy", None, None)
    torch.library.opcheck(library.select_budget.default, budget)
    torch.library.opcheck(library.select_threshold.default, (entropy, mi, mask, 0.1, 2, None))
    torch.library.opcheck(library.color.default, (mi, mask, 0.1, None))
    entropy, (*head, b_out), mask = scored(5, 4)
    options = (None, None, None, None, mask, "add", "mean", "identity", "fp32", gamma, 1.0, 1.0, "entropy", None, None)
    torch.library.opcheck(library.score_and_select.default, (entropy, *head, torch.tensor(b_out), *options))


def test_compiles_in_one_graph() -> None:
    entropy, head, mask = scored(6)

    def select(entropy: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
        mi = ops.pairwise_mlp(*head, mask=mask)
        budget = ops.select_budget(entropy, mi, gamma=gamma, mask=mask)
        threshold = ops.select_threshold(entropy, mi, tau=0.1)
        lazy = ops.score_and_select(entropy, *head, gamma=0.5)
        return *budget, *threshold, *lazy, ops.color(mi, tau=0.1)

    got = torch.compile(select, fullgraph=True, backend="aot_eager")(entropy, gamma_of(3))
    for a, b in zip(got, select(entropy, gamma_of(3)), strict=True):
        assert torch.equal(a, b)


H, M = torch.zeros(2, 3), torch.zeros(2, 3, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ops.select_budget(H, torch.zeros(2, 3, 4), gamma=1.0),
            ValueError,
            r"select_budget: mi must be \[\.\.\., N, N\] with \[\.\.\., N\] = \(2, 3\), that of entropy, got shape \(2, 3, 4\)",
        ),
        (lambda: ops.select_budget(H[0], M, gamma=1.0), ValueError, "select_budget: mi must be"),
        (lambda: ops.select_budget(H.int(), M, gamma=1.0), TypeError, "select_budget: entropy must be float64"),
        (lambda: ops.select_budget(H, M, gamma=-1.0), ValueError, "gamma must be at least 0, got -1.0"),
        (lambda: ops.select_budget(H, M, gamma=math.nan), ValueError, "gamma must not be NaN"),
        (
            lambda: ops.select_budget(H, M, gamma=torch.tensor([1.0, -2.0])),
            ValueError,
            "gamma must be at least 0, got -2.0 at batch 1",
        ),
        (lambda: ops.select_budget(H, M, gamma=torch.tensor([1.0, torch.nan])), ValueError, "got nan at batch 1"),
        (
            lambda: ops.select_budget(H, M, gamma=torch.tensor([1.0])),
            ValueError,
            r"gamma must be \[\.\.\.\], one a sequence, = \(2,\)",
        ),
        (lambda: ops.select_budget(H, M, gamma="1"), TypeError, "gamma must be a number"),
        (lambda: ops.select_budget(H, M, gamma=1.0, lam=-1.0), ValueError, "lam must be finite and at least 0"),
        (lambda: ops.select_budget(H, M, gamma=1.0, entropy_weight=INF), ValueError, "entropy_weight must be finite"),
        (
            lambda: ops.select_budget(H, M, gamma=1.0, order="best"),
            ValueError,
            "order must be one of 'entropy', 'cheapest'",
        ),
        (lambda: ops.select_budget(H, M, gamma=1.0, limit=0), ValueError, "limit must be at least 1, got 0"),
        (lambda: ops.select_budget(H, M, gamma=1.0, mask=H), TypeError, "mask must be bool"),
        (lambda: ops.select_threshold(H, M, tau=1.0, mask=[True]), TypeError, "mask must be a tensor, got list"),
        (lambda: ops.select_budget(H, M.to("meta"), gamma=1.0), ValueError, "got entropy on cpu and mi on meta"),
        (lambda: ops.select_threshold(H, M, tau=math.nan), ValueError, "tau must not be NaN"),
        (
            lambda: ops.color(torch.zeros(3), tau=1.0),
            ValueError,
            r"color: mi must be \[\.\.\., N, N\], got shape \(3,\)",
        ),
        (
            lambda: ops.score_and_select(
                H[0], torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), [], [], torch.zeros(4), 0.0, gamma=1.0
            ),
            ValueError,
            r"score_and_select: u must be \[\.\.\., N, H1\] with \[\.\.\., N\] that of entropy",
        ),
        (
            lambda: ops.score_and_select(
                H,
                torch.zeros(2, 3, 4),
                torch.zeros(2, 3, 4),
                [],
                [],
                torch.zeros(4),
                0.0,
                gamma=torch.tensor([1.0, -1.0]),
            ),
            ValueError,
            "score_and_select: gamma must be at least 0, got -1.0 at batch 1",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def odd_numbers(generator: np.random.Generator, *shape: int) -> Tensor:
    """Ties, denormals, zeros of both signs, infinities and huge numbers, in strides of one's own."""
    few = np.array([0.0, -0.0, 1e-45, 1e-310, 0.25, 0.5, 0.5, 1.0, -0.3, 3e38, np.inf])
    drawn = np.where(generator.random(shape) < 0.5, generator.choice(few, shape), generator.random(shape))
    x = torch.from_numpy(drawn).to(torch.float64 if generator.random() < 0.5 else torch.float32)
    return torch.stack([x, x], -1)[..., 0] if generator.random() < 0.5 else x


@SELECT
def test_random_selections_follow_the_definition(backend: str) -> None:
    # MDMI_FUZZ_SECONDS=60 looks longer
    generator, end = np.random.default_rng(0), time.monotonic() + float(os.environ.get("MDMI_FUZZ_SECONDS", "0.5"))
    while time.monotonic() < end:
        batch, n = (int(x) for x in generator.integers(0, (4, 40)))
        entropy, mi = odd_numbers(generator, batch, n), odd_numbers(generator, batch, n, n)
        mask = None if generator.random() < 0.3 else torch.from_numpy(generator.random((batch, n)) < 0.7)
        gamma = torch.from_numpy(generator.choice([0.0, 0.3, 2.0, 30.0, np.inf], batch))
        lam, weight = (float(x) for x in generator.choice([0.0, 0.3, 1.0], 2))
        order, limit = (
            str(generator.choice(ORDERS)),
            None if generator.random() < 0.5 else int(generator.integers(1, 9)),
        )
        options = {"lam": lam, "entropy_weight": weight, "order": order, "mask": mask, "limit": limit}
        same(
            ops.select_budget(entropy, mi, gamma=gamma, **options, backend=backend),
            reference.select_budget(entropy, mi, gamma, lam, weight, order, mask, limit),
        )
        tau = float(generator.choice([0.0, 0.25, 0.5, np.inf]))
        same(
            ops.select_threshold(entropy, mi, tau=tau, mask=mask, limit=limit, backend=backend),
            reference.select_threshold(entropy, mi, tau, mask, limit),
        )
        assert torch.equal(ops.color(mi, tau=tau, mask=mask, backend=backend), reference.color(mi, tau, mask))


@pytest.mark.op("select_budget")
def test_costs_beyond_float64_are_inf_without_a_warning(backend: str) -> None:
    entropy, mi = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.full((3, 3), 10.0)
    for weights in ({"lam": 1e308}, {"entropy_weight": 1e308}):
        got = ops.select_budget(entropy, mi, gamma=5.0, backend=backend, **weights)
        assert got.selected.tolist() == [True, False, False]
