"""Selection on the CPU: an order, and a vector of sums that every chosen position adds its column to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mdmi_fast.backends.calls import Budget, PairCall
from mdmi_fast.backends.torch.pairwise import pairwise_mlp

Array = npt.NDArray[np.float64]


def _masked(mask: Tensor | None, batch: int, n: int) -> npt.NDArray[np.int64]:
    return np.arange(n) if mask is None else np.flatnonzero(mask[batch].cpu().numpy())


def _entropy_row(op: str, entropy: Tensor, batch: int, masked: npt.NDArray[np.int64]) -> Array:
    """Entropies of the masked positions of one batch row, without NaN."""
    h: Array = entropy[batch].cpu().numpy().astype(np.float64)[masked]
    bad = np.isnan(h)
    if bad.any():
        position = masked[bad.argmax()]
        raise ValueError(
            f"{op}: entropy must not be NaN at masked positions, got NaN at batch {batch}, position {position}"
        )
    return h


def _mi_row(op: str, mi: Tensor, batch: int, masked: npt.NDArray[np.int64]) -> Array:
    """MI between the masked positions of one batch row, without NaN outside the diagonal, in float64."""
    m: Array = mi[batch].cpu().numpy().astype(np.float64)[np.ix_(masked, masked)]
    np.fill_diagonal(m, 0.0)
    bad = np.isnan(m)
    if bad.any():
        i, j = (masked[k] for k in np.unravel_index(bad.argmax(), bad.shape))
        raise ValueError(
            f"{op}: mi must not be NaN between masked positions, got NaN at batch {batch}, positions {i} and {j}"
        )
    return m


def _band_row(op: str, band: Tensor, batch: int, masked: npt.NDArray[np.int64]) -> Array:
    """The band of one batch row, without NaN between masked positions."""
    values: Array = band[batch].cpu().numpy()
    bad = np.isnan(values)
    if bad.any():
        window, n = values.shape[1] // 2, len(values)
        is_masked = np.zeros(n + 2 * window, dtype=bool)
        is_masked[masked + window] = True
        bad &= is_masked[window : window + n, None] & np.lib.stride_tricks.sliding_window_view(
            is_masked, 2 * window + 1
        )
        bad[:, window] = False
        if bad.any():
            i, k = (int(x) for x in np.unravel_index(bad.argmax(), bad.shape))
            raise ValueError(
                f"{op}: mi must not be NaN between masked positions, "
                f"got NaN at batch {batch}, positions {i} and {i + k - window}"
            )
    return values


@np.errstate(over="ignore", invalid="ignore")  # a cost of inf is one, and no reason for a warning
def _budget_row(h: Array, pay: Callable[[Array, int], None], gamma: float, budget: Budget) -> tuple[list[int], float]:
    """The chosen, as indices into h; pay(acc, i) adds the MI of every position with the chosen i to acc."""
    lam, entropy_weight, order, limit = budget[1:]
    # a weight of 0 switches its term off, also where the term is inf
    own = entropy_weight * h if entropy_weight else np.zeros_like(h)
    acc = np.zeros_like(h)
    waiting = np.argsort(h, kind="stable") if order == "entropy" else np.arange(len(h))
    chosen: list[int] = []
    remaining, spent = gamma, 0.0
    while len(waiting) and len(chosen) != limit:
        cost = own[waiting] + lam * acc[waiting] if lam else own[waiting]
        if order == "cheapest":
            k = int(cost.argmin())
            fits = not chosen or bool(cost[k] <= remaining)
        else:
            # those ahead of the next that fits are skipped for good
            fitting = np.flatnonzero(cost <= remaining) if chosen else [0]
            fits = len(fitting) > 0
            k = int(fitting[0]) if fits else 0
        if not fits:
            break
        i = int(waiting[k])
        chosen.append(i)
        remaining -= float(cost[k])
        spent += float(cost[k])
        pay(acc, i)
        waiting = waiting[k + 1 :] if order == "entropy" else np.delete(waiting, k)
    return chosen, spent


def _threshold_row(h: Array, m: Array, tau: float, limit: int | None) -> tuple[list[int], float]:
    tied = np.maximum(m, m.T) >= tau
    free = np.ones(len(h), dtype=bool)
    chosen: list[int] = []
    spent = 0.0
    for i in np.argsort(h, kind="stable").tolist():
        if len(chosen) != limit and free[i]:
            for value in m[i, chosen].tolist():
                spent += max(value, 0.0)
            chosen.append(i)
            free &= ~tied[i]
    return chosen, spent


def _color_row(m: Array, tau: float) -> npt.NDArray[np.int64]:
    edge = np.maximum(m, m.T) >= tau
    np.fill_diagonal(edge, False)
    group = np.full(len(m), -1)
    for i in np.argsort(-edge.sum(1), kind="stable"):
        taken = np.zeros(len(m) + 1, dtype=bool)
        taken[group[edge[i]]] = True  # -1, the uncoloured, lands on the spare last entry
        group[i] = taken.argmin()
    return group


def _selection(rows: list[tuple[npt.NDArray[np.int64], float]], like: Tensor) -> tuple[Tensor, Tensor]:
    selected = torch.zeros(like.shape, dtype=torch.bool, device="cpu")
    for batch, (positions, _) in enumerate(rows):
        selected[batch, torch.from_numpy(positions)] = True
    spent = torch.tensor([spent for _, spent in rows], dtype=torch.float64, device="cpu")
    return selected.to(like.device), spent.to(like.device)


def _within_budget(op: str, entropy: Tensor, mi: Tensor, mask: Tensor | None, budget: Budget) -> tuple[Tensor, Tensor]:
    rows = []
    for batch, gamma in enumerate(budget.gamma.tolist()):
        masked = _masked(mask, batch, entropy.shape[1])
        h, m = _entropy_row(op, entropy, batch, masked), _mi_row(op, mi, batch, masked)

        def pay(acc: Array, i: int, m: Array = m) -> None:
            acc += np.maximum(m[:, i], 0.0)

        chosen, spent = _budget_row(h, pay, gamma, budget)
        rows.append((masked[chosen], spent))
    return _selection(rows, entropy)


def select_budget_band(entropy: Tensor, band: Tensor, mask: Tensor | None, budget: Budget) -> tuple[Tensor, Tensor]:
    window = band.shape[2] // 2
    rows = []
    for batch, gamma in enumerate(budget.gamma.tolist()):
        masked = _masked(mask, batch, entropy.shape[1])
        h = _entropy_row("select_budget_band", entropy, batch, masked)
        values = _band_row("select_budget_band", band, batch, masked)

        def pay(acc: Array, i: int, values: Array = values, masked: npt.NDArray[np.int64] = masked) -> None:
            first, last = np.searchsorted(masked, [masked[i] - window, masked[i] + window + 1])
            near = masked[first:last]
            acc[first:last] += np.maximum(values[near, window + masked[i] - near], 0.0)

        chosen, spent = _budget_row(h, pay, gamma, budget)
        rows.append((masked[chosen], spent))
    return _selection(rows, entropy)


def select_budget(entropy: Tensor, mi: Tensor, mask: Tensor | None, budget: Budget) -> tuple[Tensor, Tensor]:
    return _within_budget("select_budget", entropy, mi, mask, budget)


def select_threshold(
    entropy: Tensor, mi: Tensor, mask: Tensor | None, tau: float, limit: int | None
) -> tuple[Tensor, Tensor]:
    rows = []
    for batch in range(entropy.shape[0]):
        masked = _masked(mask, batch, entropy.shape[1])
        h = _entropy_row("select_threshold", entropy, batch, masked)
        chosen, spent = _threshold_row(h, _mi_row("select_threshold", mi, batch, masked), tau, limit)
        rows.append((masked[chosen], spent))
    return _selection(rows, entropy)


def color(mi: Tensor, mask: Tensor | None, tau: float) -> Tensor:
    groups = torch.full(mi.shape[:2], -1, dtype=torch.int64, device="cpu")
    for batch in range(mi.shape[0]):
        masked = _masked(mask, batch, mi.shape[1])
        group = _color_row(_mi_row("color", mi, batch, masked), tau)
        groups[batch, torch.from_numpy(masked)] = torch.from_numpy(group)
    return groups.to(mi.device)


def score_and_select(entropy: Tensor, call: PairCall, budget: Budget) -> tuple[Tensor, Tensor]:
    return _within_budget("score_and_select", entropy, pairwise_mlp(call), call.mask, budget)
