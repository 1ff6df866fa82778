"""Selection over a sliding window: the same as of the whole matrix, in memory that does not grow with N^2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mdmi_fast import MIBudget, MIThreshold, PairwiseMIEstimator, ops, reference
from mdmi_fast.estimator import Windowed

pytestmark = pytest.mark.arithmetic

BAND = pytest.mark.op("select_budget_band")


def case(n: int, window: int, batch: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    entropy = torch.randint(0, 8, (batch, n)) / 8  # ties
    band = (torch.randint(-1, 8, (batch, n, 2 * window + 1)) / 16).float()
    mask = torch.rand(batch, n) < 0.7
    return entropy, band, mask


@BAND
@pytest.mark.parametrize("order", ["entropy", "cheapest"])
@pytest.mark.parametrize(("n", "window"), [(1, 0), (7, 0), (9, 2), (20, 5), (6, 10)])
def test_the_band_selects_as_the_matrix_that_is_0_outside(order: str, n: int, window: int, backend: str) -> None:
    entropy, band, mask = case(n, window)
    gamma = torch.tensor([0.0, 0.5, 2.0, 50.0], dtype=torch.float64)
    for lam, weight, limit in [(1.0, 1.0, None), (0.5, 0.0, None), (0.0, 1.0, 3), (2.0, 1.0, 5)]:
        expected = reference.select_budget_band(entropy, band, gamma, lam, weight, order, mask, limit)
        options: dict[str, Any] = {"lam": lam, "entropy_weight": weight, "order": order, "limit": limit}
        got = ops.select_budget_band(entropy, band, gamma=gamma, mask=mask, backend=backend, **options)
        assert torch.equal(got.selected, expected[0])
        assert torch.equal(got.spent, expected[1])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda band: band.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda band: band.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)[:, ::2, ::2],
    "one for the batch": lambda band: band[:1].expand_as(band),
    "float64": Tensor.double,
    "bfloat16": Tensor.bfloat16,
}


@BAND
@pytest.mark.parametrize("order", ["entropy", "cheapest"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_selection_does_not_depend_on_how_the_band_lies_in_memory(layout: str, order: str, backend: str) -> None:
    entropy, band, mask = case(40, 6)
    band[0, 3, 7] = band[2, 8, 2] = torch.inf
    laid = LAYOUTS[layout](band)
    expected = reference.select_budget_band(
        entropy, laid.contiguous(), torch.full((4,), 6.0, dtype=torch.float64), order=order, mask=mask
    )
    got = ops.select_budget_band(entropy, laid, gamma=6.0, order=order, mask=mask, backend=backend)
    assert torch.equal(got.selected, expected[0])
    assert torch.equal(got.spent, expected[1])


@BAND
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("order", ["entropy", "cheapest"])
def test_sums_of_many_terms_round_alike_on_every_backend(order: str, backend: str) -> None:
    n, window = 3_000, 64
    entropy, band = torch.rand(2, n), 0.01 * torch.rand(2, n, 2 * window + 1)
    options: dict[str, Any] = {"gamma": 30.0, "entropy_weight": 0.3, "order": order}
    got = ops.select_budget_band(entropy, band, backend=backend, **options)
    expected = ops.select_budget_band(entropy, band, backend="torch", **options)
    assert int(expected.selected.sum()) > 200
    assert torch.equal(got.selected, expected.selected)
    assert torch.equal(got.spent, expected.spent)


@BAND
def test_nan_is_named_only_between_masked_positions_of_the_sequence(backend: str) -> None:
    entropy, band, _ = case(6, 2, batch=2)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 3] = False
    expected = ops.select_budget_band(entropy, band.clone(), gamma=1.0, mask=mask, backend=backend)
    band[:, :, 2] = torch.nan  # the diagonal
    band[0, 0, 0] = band[0, 5, 4] = torch.nan  # outside the sequence
    band[1, 2, 3] = torch.nan  # 2 and 3, which is not masked
    got = ops.select_budget_band(entropy, band, gamma=1.0, mask=mask, backend=backend)
    assert torch.equal(got.selected, expected.selected)
    band[1, 5, 1] = torch.nan
    with pytest.raises(ValueError, match=r"select_budget_band: mi must not be NaN .* batch 1, positions 5 and 4"):
        ops.select_budget_band(entropy, band, gamma=1.0, mask=mask, backend=backend)
    entropy[0, 1] = torch.nan
    with pytest.raises(ValueError, match=r"select_budget_band: entropy must not be NaN .* batch 0, position 1"):
        ops.select_budget_band(entropy, band, gamma=1.0, mask=mask, backend=backend)


def test_shapes_that_do_not_fit_are_refused() -> None:
    for shape in [(2, 6, 4), (2, 5, 3), (6, 3)]:
        with pytest.raises(ValueError, match=r"band must be \[\.\.\., N, 2 \* window \+ 1\]"):
            ops.select_budget_band(torch.zeros(2, 6), torch.zeros(shape), gamma=1.0)


def test_it_is_an_operator_that_compiles() -> None:
    entropy, band, mask = case(9, 2)

    def run(entropy: Tensor, band: Tensor, mask: Tensor) -> Tensor:
        return ops.select_budget_band(entropy, band, gamma=1.0, mask=mask).selected

    assert torch.equal(
        torch.compile(run, fullgraph=True, backend="eager")(entropy, band, mask), run(entropy, band, mask)
    )
    operator = torch.ops.mdmi_fast.select_budget_band.default
    budget = torch.ones(4, dtype=torch.float64)
    torch.library.opcheck(operator, (entropy, band, mask, budget, 1.0, 1.0, "entropy", None, None))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_windowed_estimator_decides_as_its_whole_matrix_does(weight: float) -> None:
    estimator = PairwiseMIEstimator(hidden_size=6, layers=(16, 8)).eval()
    hidden, entropy, mask = torch.randn(3, 30, 6), torch.rand(3, 30), torch.rand(3, 30) < 0.6
    source = Windowed(estimator, 4)
    stats = ops.TokenStats(entropy, entropy, entropy, torch.zeros_like(mask, dtype=torch.int64), entropy)
    with torch.no_grad():
        whole = source(hidden, mask)
        assert torch.equal(whole, whole.transpose(1, 2))
        full = estimator(hidden, mask)
        near = (torch.arange(30) - torch.arange(30).unsqueeze(-1)).abs() <= 4
        torch.testing.assert_close(whole, full * near, atol=1e-6, rtol=1e-5)
        for gamma in (0.1, 1.0, torch.tensor([0.0, 0.3, 3.0], dtype=torch.float64)):
            got = source.score_and_select(entropy, hidden, mask, gamma=gamma, entropy_weight=weight)
            expected = ops.select_budget(entropy, whole, gamma=gamma, entropy_weight=weight, mask=mask)
            assert torch.equal(got.selected, expected.selected)
            assert torch.equal(got.spent, expected.spent)
        lazy = MIBudget(source, 1.0, entropy_weight=weight).select(stats, hidden, mask, 0)
        assert torch.equal(
            lazy.selected, ops.select_budget(entropy, whole, gamma=1.0, entropy_weight=weight, mask=mask).selected
        )
        assert MIThreshold(source, 0.05).select(stats, hidden, mask, 0).selected.any()
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        Windowed(estimator, 0)


def test_no_tensor_grows_with_the_square(largest_allocation: Callable[..., int]) -> None:
    n, window = 2_000, 8
    estimator = PairwiseMIEstimator(hidden_size=4, layers=(8,)).eval()
    source = Windowed(estimator, window)
    entropy, hidden, mask = torch.rand(1, n), torch.randn(1, n, 4), torch.ones(1, n, dtype=torch.bool)
    with torch.no_grad():
        largest = largest_allocation(lambda: source.score_and_select(entropy, hidden, mask, gamma=1.0))
    assert largest <= 4 * n * (2 * window + 1)
