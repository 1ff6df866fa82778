"""Selection of positions to unmask, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads
from mdmi_fast.native._memory import DTYPE, address_of, mask_of, single_or_double
from mdmi_fast.native.pairwise import Pairs, prepare_pairwise, scoring_refusals

NO_LIMIT = 2**62


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    return scoring_refusals(tensors[1:], precision) if op == "score_and_select" else []


def _at_most(limit: int | None) -> int:
    return NO_LIMIT if limit is None else min(limit, NO_LIMIT)


def _new_selection(like: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(like.shape, dtype=torch.bool), torch.empty(like.shape[0], dtype=torch.float64)


def select_budget(
    entropy: Tensor,
    mi: Tensor,
    gamma: Tensor,
    lam: float,
    entropy_weight: float,
    order: str,
    mask: Tensor | None,
    limit: int | None,
) -> tuple[Tensor, Tensor]:
    mi = single_or_double(mi)
    matrix = (mi.data_ptr(), DTYPE[mi.dtype], mi.stride(), _C.no_window)
    return _within_budget("select_budget", entropy, mask, matrix, gamma, lam, entropy_weight, order, limit)


def select_budget_band(
    entropy: Tensor,
    band: Tensor,
    gamma: Tensor,
    lam: float,
    entropy_weight: float,
    order: str,
    mask: Tensor | None,
    limit: int | None,
) -> tuple[Tensor, Tensor]:
    band = single_or_double(band)
    window, (batch, row, column) = band.shape[2] // 2, band.stride()
    # [i, j] of a matrix is band[i, window + j - i]: one step down is one back as well
    at_zero = address_of("band", band) + window * column * band.element_size()
    matrix = (at_zero, DTYPE[band.dtype], (batch, row - column, column), window)
    return _within_budget("select_budget_band", entropy, mask, matrix, gamma, lam, entropy_weight, order, limit)


def _within_budget(
    op: str,
    entropy: Tensor,
    mask: Tensor | None,
    matrix: tuple[int, int, tuple[int, ...], int],
    gamma: Tensor,
    lam: float,
    entropy_weight: float,
    order: str,
    limit: int | None,
) -> tuple[Tensor, Tensor]:
    address, dtype, strides, window = matrix
    entropy = single_or_double(entropy)
    selected, spent = _new_selection(entropy)
    _C.select_budget(
        op,
        entropy.shape,
        entropy.data_ptr(),
        DTYPE[entropy.dtype],
        entropy.stride(),
        *mask_of(mask),
        address,
        dtype,
        strides,
        window,
        gamma.data_ptr(),
        lam,
        entropy_weight,
        order == "cheapest",
        _at_most(limit),
        selected.data_ptr(),
        spent.data_ptr(),
        get_num_threads(),
    )
    return selected, spent


def select_threshold(
    entropy: Tensor, mi: Tensor, tau: float, mask: Tensor | None, limit: int | None
) -> tuple[Tensor, Tensor]:
    entropy, mi = single_or_double(entropy), single_or_double(mi)
    selected, spent = _new_selection(entropy)
    _C.select_threshold(
        entropy.shape,
        entropy.data_ptr(),
        DTYPE[entropy.dtype],
        entropy.stride(),
        *mask_of(mask),
        mi.data_ptr(),
        DTYPE[mi.dtype],
        mi.stride(),
        tau,
        _at_most(limit),
        selected.data_ptr(),
        spent.data_ptr(),
        get_num_threads(),
    )
    return selected, spent


def color(mi: Tensor, tau: float, mask: Tensor | None) -> Tensor:
    mi = single_or_double(mi)
    group = torch.empty(mi.shape[:2], dtype=torch.int64)
    _C.color(
        group.shape,
        *mask_of(mask),
        mi.data_ptr(),
        DTYPE[mi.dtype],
        mi.stride(),
        tau,
        group.data_ptr(),
        get_num_threads(),
    )
    return group


def score_and_select_counted(
    entropy: Tensor,
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    gamma: Tensor,
    lam: float,
    entropy_weight: float,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
    limit: int | None,
    prepared: _C.PackedNetwork | None = None,
) -> tuple[Tensor, Tensor, int]:
    """`score_and_select`, and how many pairs it scored."""
    network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
    pairs = Pairs(u, v, mask, combine, symmetry, activation)
    entropy = single_or_double(entropy)
    selected, spent = _new_selection(entropy)
    n_pairs = _C.score_and_select(
        network,
        pairs.halves,
        pairs.rule,
        entropy.data_ptr(),
        DTYPE[entropy.dtype],
        entropy.stride(),
        gamma.data_ptr(),
        lam,
        entropy_weight,
        _at_most(limit),
        selected.data_ptr(),
        spent.data_ptr(),
        get_num_threads(),
    )
    return selected, spent, n_pairs


def score_and_select(
    entropy: Tensor,
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    gamma: Tensor,
    lam: float,
    entropy_weight: float,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
    limit: int | None,
    prepared: _C.PackedNetwork | None = None,
) -> tuple[Tensor, Tensor]:
    selected, spent, _ = score_and_select_counted(
        entropy,
        u,
        v,
        weights,
        biases,
        w_out,
        b_out,
        gamma,
        lam,
        entropy_weight,
        mask,
        combine,
        symmetry,
        activation,
        precision,
        limit,
        prepared,
    )
    return selected, spent
