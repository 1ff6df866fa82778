"""Kernels of select under the interpreter: the same bits as on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.backends.calls import Budget
from mdmi_fast.backends.triton import select

INF = torch.inf


def case(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three sequences with ties, infinities and negative MI; what is never read is NaN."""
    torch.manual_seed(seed)
    dtype = torch.float64 if seed % 2 else torch.float32
    h, mi = torch.rand(3, n, dtype=dtype) * 2, torch.randn(3, n, n, dtype=dtype) * 0.2
    if seed % 3 == 0:
        h, mi = (h * 4).round() / 4, (mi * 8).round() / 8
    if seed % 4 == 0:
        h[0, 0], mi[0, :, n // 2] = INF, INF
    mask = torch.rand(3, n) < 0.7
    mask[2] = seed % 2 == 0
    mi.diagonal(dim1=1, dim2=2).fill_(torch.nan)
    return h.masked_fill(~mask, torch.nan), mi.mT.contiguous().mT, mask


def same(a: ops.Selection, b: ops.Selection) -> None:
    assert torch.equal(a.selected, b.selected)
    torch.testing.assert_close(a.spent, b.spent, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(3))
def test_budgets(seed: int) -> None:
    h, mi, mask = case(seed, [1, 17, 33][seed])
    settings = [
        {"gamma": 2.0, "lam": 0.7},
        {"gamma": torch.tensor([0.3, 1.7, INF], dtype=torch.float64), "lam": 1 / 3, "entropy_weight": 0.0, "limit": 5},
        {"gamma": 3.0, "order": "cheapest", "lam": 1.3, "entropy_weight": 0.3},
        {"gamma": INF, "order": "cheapest", "lam": 0.0, "limit": 3},
    ]
    for options in settings:
        got, expected = (ops.select_budget(h, mi, mask=mask, backend=b, **options) for b in ("triton", "torch"))
        same(got, expected)


@pytest.mark.parametrize("seed", range(2))
def test_thresholds_and_colours(seed: int) -> None:
    h, mi, mask = case(seed, [5, 20][seed])
    for tau, limit in ((0.1, None), (-1.0, 4)):
        options = {"tau": tau, "mask": mask}
        same(
            ops.select_threshold(h, mi, limit=limit, backend="triton", **options),
            ops.select_threshold(h, mi, limit=limit, backend="torch", **options),
        )
        assert torch.equal(ops.color(mi, backend="triton", **options), ops.color(mi, backend="torch", **options))


def test_more_colours_than_bits_in_a_word() -> None:
    mi = torch.ones(1, 40, 40)
    assert ops.color(mi, tau=0.5, backend="triton").tolist() == [list(range(40))]


def test_nan_marks_the_sequence_instead_of_selecting() -> None:
    h, mi, mask = case(1, 9)
    mask[:] = True
    h = torch.rand(3, 9)
    h[1, 3] = torch.nan
    mi[2, 4, 5] = torch.nan
    for got in (
        ops.select_budget(h, mi, gamma=1.0, backend="triton"),
        ops.select_threshold(h, mi, tau=0.1, backend="triton"),
    ):
        assert got.selected.any(1).tolist() == [True, False, False]
        assert got.spent.isnan().tolist() == [False, True, True]
    groups = ops.color(mi, tau=0.1, backend="triton")
    assert (groups[:2] >= 0).all()
    assert (groups[2] == -1).all()


def test_a_bad_budget_marks_its_sequence_where_it_cannot_raise() -> None:
    h, mi = torch.rand(4, 9), torch.rand(4, 9, 9)
    gamma = torch.tensor([1.0, torch.nan, -0.5, INF], dtype=torch.float64)
    with pytest.raises(ValueError, match="gamma must be at least 0, got nan at batch 1"):
        ops.select_budget(h, mi, gamma=gamma, backend="triton")
    for order in ("entropy", "cheapest"):  # as a budget on a GPU reaches the kernel
        selected, spent = select.select_budget(h, mi, None, Budget(gamma, 1.0, 1.0, order))
        assert selected.any(1).tolist() == [True, False, False, True]
        assert spent.isnan().tolist() == [False, True, True, False]


def test_scoring_and_selecting_is_both_in_turn() -> None:
    u, v, h = torch.randn(2, 9, 8), torch.randn(2, 9, 8), torch.rand(2, 9)
    network = ([torch.randn(8, 16) / 3], [torch.randn(16)], torch.randn(16) / 4, 0.1)
    options = {"mask": torch.rand(2, 9) < 0.8, "backend": "triton"}
    mi = ops.pairwise_mlp(u, v, *network, **options)
    same(ops.score_and_select(h, u, v, *network, gamma=1.5, **options), ops.select_budget(h, mi, gamma=1.5, **options))


def test_a_sequence_too_long_for_one_program_is_refused() -> None:
    n = 8193
    with pytest.raises(ops._dispatch.UnsupportedError, match="triton: selects among at most 8192 positions, got 8193"):
        ops.color(torch.empty(1, 1, 1).expand(1, n, n), tau=0.1, backend="triton")
