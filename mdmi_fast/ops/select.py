"""Which masked positions can be unmasked together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.backends.calls import BUDGET, PAIR_CALL, Budget, PairCall
from mdmi_fast.ops._dispatch import run
from mdmi_fast.ops._pairs import PreparedPairwise, check_pairs, in_range
from mdmi_fast.ops._register import registered
from mdmi_fast.ops._selections import (
    Selection,
    check_entropy,
    check_limit,
    check_mask,
    check_mi,
    checked_budget,
    empty_selection,
    selection_of,
    values_of,
    with_budget,
)


def select_budget(
    entropy: Tensor,
    mi: Tensor,
    *,
    gamma: float | Tensor,
    lam: float = 1.0,
    entropy_weight: float = 1.0,
    order: str = "entropy",
    mask: Tensor | None = None,
    limit: int | None = None,
    backend: str | None = None,
) -> Selection:
    """Positions whose costs fit in a budget together, each counting its dependence on those chosen before.

    cost_i = entropy_weight * H_i + lam * sum_{j chosen before i} max(mi[i, j], 0)

    In the order of entropy (or of current cost), a position whose cost fits in what is left of gamma is taken. The first is taken
    whatever it costs, so a decoding loop always ends.

    Args:
        entropy: [..., N] floating, nats.
        mi: [..., N, N] floating, nats; row i is what position i pays. The diagonal is not read.
        gamma: the budget, nats: a number or a tensor [...], one a sequence. May be inf. Beside sequences on a GPU it stays there.
        lam: weight of the MI, finite, at least 0.
        entropy_weight: weight of the entropy, finite, at least 0. 1 where the most likely token is taken (an uncertain one may
            be wrong); 0 where tokens are sampled (only dependence is an error).
        order: "entropy", ascending, those that do not fit are skipped; "cheapest", always the one of least current cost, until it does not fit.
        mask: [..., N] bool, True = masked (may be chosen); None = all.
        limit: the most positions chosen per sequence, at least 1.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        Selection(selected [..., N] bool, spent [...] float64). Nothing is selected where nothing is masked.

    Raises:
        TypeError: a tensor is not floating, mask is not bool.
        ValueError: shapes do not match, an option is out of range, tensors are on several devices, gamma is NaN or negative, or an
            entropy or MI of masked positions is NaN; the first is named.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Costs in float64, MI added in the order chosen, no fused multiply-add: the same selection bit for bit on every backend.
        Ties go to the lower index. inf is a cost that never fits; a weight of 0 makes its term 0, also for inf.
        On a GPU a NaN, or a budget there that is NaN or negative, cannot raise without stopping the queue: nothing of that
        sequence is selected, and its `spent` is NaN.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> entropy = torch.tensor([0.1, 0.2, 0.3])
        >>> mi = torch.tensor([[0.0, 0.5, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> ops.select_budget(entropy, mi, gamma=0.5).selected
        tensor([ True, False,  True])
    """
    op = "select_budget"
    h, m, masked = check_entropy(op, entropy), check_mi(op, mi, entropy.shape), check_mask(op, mask, entropy.shape)
    check.same_device(op, entropy=entropy, mi=mi, mask=mask)
    budget = checked_budget(op, gamma, (lam, entropy_weight), order, limit, entropy)
    return selection_of(_select_budget(h, m, masked, *budget, backend), entropy.shape)


@registered("select_budget", f"(Tensor entropy, Tensor mi, Tensor? mask, {BUDGET}, str? backend) -> (Tensor, Tensor)")
def _select_budget(entropy: Tensor, mi: Tensor, mask: Tensor | None, *flat: Any) -> tuple[Tensor, Tensor]:
    *budget, backend = flat
    select, checked = with_budget("select_budget", Budget(*budget), backend, [entropy, mi])
    return select(entropy, mi, mask, checked)  # type: ignore[no-any-return]


@_select_budget.register_fake
def _(entropy: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_selection(entropy)


def select_budget_band(
    entropy: Tensor,
    band: Tensor,
    *,
    gamma: float | Tensor,
    lam: float = 1.0,
    entropy_weight: float = 1.0,
    order: str = "entropy",
    mask: Tensor | None = None,
    limit: int | None = None,
    backend: str | None = None,
) -> Selection:
    """`select_budget` where pairs farther apart than a window count as independent, in memory N * window.

    cost_i = entropy_weight * H_i + lam * sum_{j chosen before i, |i - j| <= window} max(band[i, window + j - i], 0)

    Args:
        entropy: [..., N] floating, nats.
        band: [..., N, 2 * window + 1] floating, nats, as `pairwise_mlp_band` gives it.
        gamma: as in `select_budget`, like the rest.
        lam: weight of the MI.
        entropy_weight: weight of the entropy.
        order: "entropy" or "cheapest".
        mask: [..., N] bool or None.
        limit: most positions a sequence.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        Selection(selected [..., N] bool, spent [...] float64).

    Raises:
        TypeError: as `select_budget`.
        ValueError: as `select_budget`; the last dimension of band is even.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        As `select_budget`: the same selection bit for bit as of the matrix that is 0 outside the band.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> band = torch.tensor([[0.0, 0.0, 0.5], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])  # 0 and 1 depend on each other
        >>> ops.select_budget_band(torch.tensor([0.1, 0.2, 0.3]), band, gamma=0.5).selected
        tensor([ True, False,  True])
    """
    op = "select_budget_band"
    h, values = check_entropy(op, entropy), values_of(op, "band", band)
    if band.shape[:-1] != entropy.shape or band.shape[-1] % 2 == 0:
        raise ValueError(
            f"{op}: band must be [..., N, 2 * window + 1] with [..., N] = {tuple(entropy.shape)}, that of entropy, "
            f"got {check.describe(band)}"
        )
    masked = check_mask(op, mask, entropy.shape)
    check.same_device(op, entropy=entropy, band=band, mask=mask)
    budget = checked_budget(op, gamma, (lam, entropy_weight), order, limit, entropy)
    flat = values.reshape(*h.shape, band.shape[-1])
    return selection_of(_select_budget_band(h, flat, masked, *budget, backend), entropy.shape)


@registered(
    "select_budget_band", f"(Tensor entropy, Tensor band, Tensor? mask, {BUDGET}, str? backend) -> (Tensor, Tensor)"
)
def _select_budget_band(entropy: Tensor, band: Tensor, mask: Tensor | None, *flat: Any) -> tuple[Tensor, Tensor]:
    *budget, backend = flat
    select, checked = with_budget("select_budget_band", Budget(*budget), backend, [entropy, band])
    return select(entropy, band, mask, checked)  # type: ignore[no-any-return]


@_select_budget_band.register_fake
def _(entropy: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_selection(entropy)


def select_threshold(
    entropy: Tensor,
    mi: Tensor,
    *,
    tau: float,
    mask: Tensor | None = None,
    limit: int | None = None,
    backend: str | None = None,
) -> Selection:
    """Positions that are pairwise nearly independent, most certain first.

    i joins if max(mi[i, j], mi[j, i]) < tau for every j chosen before

    Args:
        entropy: [..., N] floating, nats; gives the order, ascending.
        mi: [..., N, N] floating, nats. The diagonal is not read.
        tau: the threshold, nats, not NaN.
        mask: [..., N] bool, True = masked (may be chosen); None = all.
        limit: the most positions chosen per sequence, at least 1.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        Selection(selected [..., N] bool, spent [...] float64): spent is the MI, max(mi[i, j], 0), of each chosen i with those chosen before it.

    Raises:
        TypeError: a tensor is not floating, mask is not bool.
        ValueError: shapes do not match, an option is out of range, tensors are on several devices, or an entropy or MI of masked
            positions is NaN; the first is named.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Compared as they are, summed in float64; ties go to the lower index. The first is always taken. On a GPU a NaN cannot
        raise without stopping the queue: nothing of that sequence is selected, and its `spent` is NaN.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> mi = torch.tensor([[0.0, 0.5, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> ops.select_threshold(torch.tensor([0.1, 0.2, 0.3]), mi, tau=0.1).selected
        tensor([ True, False,  True])
    """
    op = "select_threshold"
    h, m, masked = check_entropy(op, entropy), check_mi(op, mi, entropy.shape), check_mask(op, mask, entropy.shape)
    check.same_device(op, entropy=entropy, mi=mi, mask=mask)
    check_limit(op, limit)
    tau = check.number(op, "tau", tau)
    return selection_of(_select_threshold(h, m, masked, tau, limit, backend), entropy.shape)


@registered("select_threshold")
def _select_threshold(
    entropy: Tensor, mi: Tensor, mask: Tensor | None, tau: float, limit: int | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    select = run("select", "select_threshold", backend, [entropy, mi])
    return select(entropy, mi, mask, tau, limit)  # type: ignore[no-any-return]


@_select_threshold.register_fake
def _(entropy: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_selection(entropy)


def color(mi: Tensor, *, tau: float, mask: Tensor | None = None, backend: str | None = None) -> Tensor:
    """Groups of positions without strong pairs inside: a colouring of the graph of strong pairs.

    edge where max(mi[i, j], mi[j, i]) >= tau; Welsh-Powell: by degree descending, each takes the smallest free colour

    Args:
        mi: [..., N, N] floating, nats. The diagonal is not read.
        tau: the threshold, nats, not NaN.
        mask: [..., N] bool, True = masked (is coloured); None = all.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [..., N] int64, the group of every position from 0, -1 at unmasked ones.

    Raises:
        TypeError: mi is not floating, mask is not bool.
        ValueError: shapes do not match, tau is NaN, tensors are on several devices, or an MI of masked positions is NaN; the first is
            named.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Compared as they are; ties in degree go to the lower index. On a GPU a NaN cannot raise without stopping the queue: all
        groups of that sequence are -1.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> mi = torch.tensor([[0.0, 0.5, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> ops.color(mi, tau=0.1)
        tensor([0, 1, 0])
    """
    op = "color"
    m, masked = check_mi(op, mi), check_mask(op, mask, mi.shape[:-1])
    check.same_device(op, mi=mi, mask=mask)
    return _color(m, masked, check.number(op, "tau", tau), backend).reshape(mi.shape[:-1])


@registered("color")
def _color(mi: Tensor, mask: Tensor | None, tau: float, backend: str | None) -> Tensor:
    return run("select", "color", backend, [mi])(mi, mask, tau)  # type: ignore[no-any-return]


@_color.register_fake
def _(mi: Tensor, *others: Any) -> Tensor:
    return mi.new_empty(mi.shape[:2], dtype=torch.int64)


def score_and_select(
    entropy: Tensor,
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    *,
    gamma: float | Tensor,
    lam: float = 1.0,
    entropy_weight: float = 1.0,
    shift: Tensor | None = None,
    relation: Tensor | None = None,
    mask: Tensor | None = None,
    combine: str = "add",
    symmetry: str = "mean",
    activation: str = "identity",
    precision: str | None = None,
    limit: int | None = None,
    prepared: PreparedPairwise | None = None,
    backend: str | None = None,
) -> Selection:
    """`pairwise_mlp` and then `select_budget` in the order of entropy, scoring only pairs that can matter.

    A position with entropy_weight * H_i > gamma can never join after the first, and rows are needed of chosen positions only.

    Args:
        entropy: [..., N] floating, nats.
        u: [..., N, H1], as in `pairwise_mlp`, like the network and its options.
        v: [..., N, H1].
        weights: the dense layers.
        biases: their biases.
        w_out: the output layer.
        b_out: its bias.
        shift: as in `pairwise_mlp`, like relation.
        relation: [N, N], [..., N, N] or None.
        gamma: as in `select_budget`, like lam, entropy_weight and limit.
        lam: weight of the MI.
        entropy_weight: weight of the entropy.
        mask: [..., N] bool, True = masked; None = all.
        combine: "add" or "mul".
        symmetry: "none", "mean" or "upper".
        activation: "identity" or "softplus".
        precision: of the dense layers, or None.
        limit: the most positions chosen per sequence.
        prepared: of `prepare_pairwise`, or None.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        Selection(selected [..., N] bool, spent [...] float64).

    Raises:
        TypeError: as `pairwise_mlp` and `select_budget`.
        ValueError: as `pairwise_mlp` and `select_budget`; a NaN score is an error where it is needed.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Scores as `pairwise_mlp` on the same backend, costs as `select_budget`: the same answer as both in turn. No gradient.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> h = torch.tensor([[1.0], [2.0], [0.0]])
        >>> entropy = torch.tensor([0.1, 0.2, 0.3])
        >>> ops.score_and_select(entropy, h, h, [], [], torch.ones(1), 0.0, gamma=0.5, combine="mul").selected
        tensor([ True, False,  True])
    """
    op = "score_and_select"
    h = check_entropy(op, entropy)
    network, rule = (weights, biases, w_out, b_out), (combine, symmetry, activation, precision)
    with torch.no_grad():
        call, backend = check_pairs(op, (u, v), network, rule, (shift, relation), mask, prepared, backend)
    if u.shape[:-1] != entropy.shape:
        raise ValueError(f"{op}: u must be [..., N, H1] with [..., N] that of entropy, got {check.describe(u)}")
    check.same_device(op, entropy=entropy, u=u)
    budget = checked_budget(op, gamma, (lam, entropy_weight), "entropy", limit, entropy)
    with torch.no_grad():
        args = (h, *call.flat(), *budget, backend)
        if call.packed is None or _score_and_select.seen(args):
            flat = _score_and_select(*args)
        else:
            flat = _run_score_and_select(h, call, budget, backend)
    return selection_of(flat, entropy.shape)


@registered("score_and_select", f"(Tensor entropy, {PAIR_CALL}, {BUDGET}, str? backend) -> (Tensor, Tensor)")
def _score_and_select(entropy: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    n = len(Budget._fields) + 1
    *budget, backend = flat[-n:]
    return _run_score_and_select(entropy, PairCall.of(*flat[:-n]), Budget(*budget), backend)


@_score_and_select.register_fake
def _(entropy: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_selection(entropy)


def _run_score_and_select(
    entropy: Tensor, call: PairCall, budget: Budget, backend: str | None
) -> tuple[Tensor, Tensor]:
    tensors = [entropy, *call.tensors]
    select, checked = with_budget("score_and_select", budget, backend, tensors, call.rule.precision)
    return select(entropy, in_range("score_and_select", call), checked)  # type: ignore[no-any-return]
