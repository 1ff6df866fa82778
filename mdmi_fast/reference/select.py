"""Selection of positions to unmask, one Python step after the other; batch is exactly one dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mdmi_fast.reference.pairwise import pairwise_mlp

Matrix = list[list[float]]


def _times(weight: float, value: float) -> float:
    """Weight * value in which 0 * inf is 0: a weight of 0 switches its term off."""
    return 0.0 if weight == 0.0 else weight * value


def _check_entropy(op: str, batch: int, masked: list[int], h: list[float]) -> None:
    for i in masked:
        if h[i] != h[i]:
            raise ValueError(
                f"{op}: entropy must not be NaN at masked positions, got NaN at batch {batch}, position {i}"
            )


def _check_mi(op: str, batch: int, masked: list[int], m: Matrix) -> None:
    for i in masked:
        for j in masked:
            if i != j and m[i][j] != m[i][j]:
                raise ValueError(
                    f"{op}: mi must not be NaN between masked positions, "
                    f"got NaN at batch {batch}, positions {i} and {j}"
                )


def _masked(mask: Tensor | None, like: Tensor) -> list[list[int]]:
    mask = torch.ones(like.shape[:2], dtype=torch.bool, device=like.device) if mask is None else mask
    return [[i for i, m in enumerate(row) if m] for row in mask.tolist()]


def _selection(rows: list[tuple[list[int], float]], like: Tensor) -> tuple[Tensor, Tensor]:
    selected = torch.zeros(like.shape, dtype=torch.bool, device="cpu")
    for batch, (chosen, _) in enumerate(rows):
        selected[batch, chosen] = True
    spent = torch.tensor([spent for _, spent in rows], dtype=torch.float64, device="cpu")
    return selected.to(like.device), spent.to(like.device)


def _budget_row(
    masked: list[int],
    h: list[float],
    m: Matrix,
    gamma: float,
    lam: float,
    entropy_weight: float,
    order: str,
    limit: int | None,
) -> tuple[list[int], float]:
    chosen: list[int] = []

    def cost(i: int) -> float:
        acc = 0.0
        for j in chosen:
            acc += max(m[i][j], 0.0)
        return _times(entropy_weight, h[i]) + _times(lam, acc)

    remaining, spent = gamma, 0.0
    waiting = sorted(masked, key=lambda i: (h[i], i))
    while waiting and len(chosen) != limit:
        i = waiting[0] if order == "entropy" else min(waiting, key=lambda i: (cost(i), i))
        waiting.remove(i)
        price = cost(i)
        if not chosen or price <= remaining:
            chosen.append(i)
            remaining -= price
            spent += price
        elif order == "cheapest":
            break
    return chosen, spent


def select_budget(
    entropy: Tensor,
    mi: Tensor,
    gamma: Tensor,
    lam: float = 1.0,
    entropy_weight: float = 1.0,
    order: str = "entropy",
    mask: Tensor | None = None,
    limit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Positions whose costs, each counting its MI to those before, fit in gamma together."""
    rows = []
    inputs = zip(entropy.tolist(), mi.tolist(), gamma.tolist(), _masked(mask, entropy), strict=True)
    for batch, (h, m, budget, masked) in enumerate(inputs):
        _check_entropy("select_budget", batch, masked, h)
        _check_mi("select_budget", batch, masked, m)
        rows.append(_budget_row(masked, h, m, budget, lam, entropy_weight, order, limit))
    return _selection(rows, entropy)


def select_budget_band(
    entropy: Tensor,
    band: Tensor,
    gamma: Tensor,
    lam: float = 1.0,
    entropy_weight: float = 1.0,
    order: str = "entropy",
    mask: Tensor | None = None,
    limit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`select_budget` of the matrix that is 0 outside the band; band[b, i, window + d] is its entry (i, i + d)."""
    n, window = band.shape[1], band.shape[2] // 2
    mi = band.new_zeros(len(band), n, n)
    for i in range(n):
        for j in range(max(0, i - window), min(n, i + window + 1)):
            mi[:, i, j] = band[:, i, window + j - i]
    return select_budget(entropy, mi, gamma, lam, entropy_weight, order, mask, limit)


def _threshold_row(
    masked: list[int], h: list[float], m: Matrix, tau: float, limit: int | None
) -> tuple[list[int], float]:
    chosen: list[int] = []
    spent = 0.0
    for i in sorted(masked, key=lambda i: (h[i], i)):
        if len(chosen) != limit and all(max(m[i][j], m[j][i]) < tau for j in chosen):
            for j in chosen:
                spent += max(m[i][j], 0.0)
            chosen.append(i)
    return chosen, spent


def select_threshold(
    entropy: Tensor, mi: Tensor, tau: float, mask: Tensor | None = None, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Positions that are pairwise below tau, most certain first."""
    rows = []
    for batch, (h, m, masked) in enumerate(zip(entropy.tolist(), mi.tolist(), _masked(mask, entropy), strict=True)):
        _check_entropy("select_threshold", batch, masked, h)
        _check_mi("select_threshold", batch, masked, m)
        rows.append(_threshold_row(masked, h, m, tau, limit))
    return _selection(rows, entropy)


def _color_row(masked: list[int], m: Matrix, tau: float) -> dict[int, int]:
    neighbours = {i: [j for j in masked if j != i and max(m[i][j], m[j][i]) >= tau] for i in masked}
    group: dict[int, int] = {}
    for i in sorted(masked, key=lambda i: (-len(neighbours[i]), i)):
        taken = {group.get(j) for j in neighbours[i]}
        group[i] = next(c for c in range(len(masked)) if c not in taken)
    return group


def color(mi: Tensor, tau: float, mask: Tensor | None = None) -> Tensor:
    """Welsh-Powell colouring of the graph of pairs at or above tau; -1 at unmasked positions."""
    groups = torch.full(mi.shape[:2], -1, dtype=torch.int64, device="cpu")
    for batch, (m, masked) in enumerate(zip(mi.tolist(), _masked(mask, mi), strict=True)):
        _check_mi("color", batch, masked, m)
        for i, c in _color_row(masked, m, tau).items():
            groups[batch, i] = c
    return groups.to(mi.device)


def score_and_select(
    entropy: Tensor,
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    gamma: Tensor,
    lam: float = 1.0,
    entropy_weight: float = 1.0,
    shift: Tensor | None = None,
    relation: Tensor | None = None,
    mask: Tensor | None = None,
    combine: str = "add",
    symmetry: str = "mean",
    activation: str = "identity",
    limit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`pairwise_mlp`, then `select_budget` in the order of entropy."""
    mi = pairwise_mlp(
        u,
        v,
        weights,
        biases,
        w_out,
        b_out,
        shift=shift,
        relation=relation,
        mask=mask,
        combine=combine,
        symmetry=symmetry,
        activation=activation,
    )
    return select_budget(entropy, mi, gamma, lam, entropy_weight, "entropy", mask, limit)
