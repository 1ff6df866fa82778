"""Selection of positions to unmask, in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads
from mdmi_fast.backends.calls import Budget, PairCall
from mdmi_fast.backends.cpp._memory import DTYPE, address_of, mask_of, single_or_double
from mdmi_fast.backends.cpp.pairwise import Pairs, packed_network, scoring_refusals

NO_LIMIT = 2**62


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    return scoring_refusals(tensors[1:], precision) if op == "score_and_select" else []


def _view(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), DTYPE[x.dtype], x.stride()


def _new_selection(like: Tensor) -> tuple[Tensor, Tensor]:
    selected = torch.empty_like(like, dtype=torch.bool, memory_format=torch.contiguous_format)
    return selected, torch.empty(like.shape[0], dtype=torch.float64, device="cpu")


def select_budget(entropy: Tensor, mi: Tensor, mask: Tensor | None, budget: Budget) -> tuple[Tensor, Tensor]:
    mi = single_or_double(mi)
    return _within_budget("select_budget", entropy, mask, (*_view(mi), _C.no_window), budget)


def select_budget_band(entropy: Tensor, band: Tensor, mask: Tensor | None, budget: Budget) -> tuple[Tensor, Tensor]:
    band = single_or_double(band)
    window, (batch, row, column) = band.shape[2] // 2, band.stride()
    # [i, j] of a matrix is band[i, window + j - i]: one step down is one back as well
    at_zero = address_of("band", band) + window * column * band.element_size()
    matrix = (at_zero, DTYPE[band.dtype], (batch, row - column, column), window)
    return _within_budget("select_budget_band", entropy, mask, matrix, budget)


def _results(selected: Tensor, spent: Tensor) -> tuple[Any, ...]:
    return selected.data_ptr(), spent.data_ptr(), get_num_threads()


def _weights(budget: Budget) -> tuple[Any, ...]:
    return budget.gamma.data_ptr(), budget.lam, budget.entropy_weight


def _limit(limit: int | None) -> int:
    return NO_LIMIT if limit is None else min(limit, NO_LIMIT)


def _within_budget(
    op: str, entropy: Tensor, mask: Tensor | None, matrix: tuple[Any, ...], budget: Budget
) -> tuple[Tensor, Tensor]:
    """`matrix`: address, dtype, strides and window of the mutual information."""
    entropy = single_or_double(entropy)
    selected, spent = _new_selection(entropy)
    what = (entropy.shape, *_view(entropy), *mask_of(mask), *matrix)
    how = (*_weights(budget), budget.order == "cheapest", _limit(budget.limit))
    _C.select_budget(op, *what, *how, *_results(selected, spent))
    return selected, spent


def select_threshold(
    entropy: Tensor, mi: Tensor, mask: Tensor | None, tau: float, limit: int | None
) -> tuple[Tensor, Tensor]:
    entropy, mi = single_or_double(entropy), single_or_double(mi)
    selected, spent = _new_selection(entropy)
    what = (entropy.shape, *_view(entropy), *mask_of(mask), *_view(mi), tau, _limit(limit))
    _C.select_threshold(*what, *_results(selected, spent))
    return selected, spent


def color(mi: Tensor, mask: Tensor | None, tau: float) -> Tensor:
    mi = single_or_double(mi)
    group = torch.empty(mi.shape[:2], dtype=torch.int64, device="cpu")
    what = (group.shape, *mask_of(mask), *_view(mi), tau, group.data_ptr(), get_num_threads())
    _C.color(*what)
    return group


def score_and_select_counted(entropy: Tensor, call: PairCall, budget: Budget) -> tuple[Tensor, Tensor, int]:
    """`score_and_select`, and how many pairs it scored."""
    network, pairs = packed_network(call), Pairs(call)
    entropy = single_or_double(entropy)
    selected, spent = _new_selection(entropy)
    how = (*_view(entropy), *_weights(budget), _limit(budget.limit))
    n_pairs = _C.score_and_select(network, pairs.halves, pairs.rule, *how, *_results(selected, spent))
    return selected, spent, n_pairs


def score_and_select(entropy: Tensor, call: PairCall, budget: Budget) -> tuple[Tensor, Tensor]:
    selected, spent, _ = score_and_select_counted(entropy, call, budget)
    return selected, spent
