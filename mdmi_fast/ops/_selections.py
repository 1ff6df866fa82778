"""What all selections share: the checks of their arguments, and budgets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.backends.calls import Budget
from mdmi_fast.ops._dispatch import choose, run


class Selection(NamedTuple):
    """Positions chosen in every sequence."""

    selected: Tensor
    """[..., N] bool."""
    spent: Tensor
    """[...] float64, what they cost together, nats."""


def values_of(op: str, name: str, value: Tensor) -> Tensor:
    """The value without its gradient, in a dtype that selections take; the conversion is exact."""
    tensor = check.floating(op, name, value).detach()
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def check_entropy(op: str, entropy: Tensor) -> Tensor:
    """As [B, N]."""
    entropy = values_of(op, "entropy", entropy)
    if entropy.ndim == 0:
        raise ValueError(f"{op}: entropy must be [..., N], got {check.describe(entropy)}")
    return check.one_batch(entropy, 1)


def check_mi(op: str, mi: Tensor, lead: torch.Size | None = None) -> Tensor:
    """As [B, N, N]; lead is that of the entropies, if there are any."""
    mi = values_of(op, "mi", mi)
    if mi.ndim < 2 or mi.shape[-1] != mi.shape[-2] or (lead is not None and mi.shape[:-1] != lead):
        of = "" if lead is None else f" with [..., N] = {tuple(lead)}, that of entropy"
        raise ValueError(f"{op}: mi must be [..., N, N]{of}, got {check.describe(mi)}")
    return check.one_batch(mi, 2)


def check_mask(op: str, mask: Tensor | None, lead: torch.Size) -> Tensor | None:
    """As [B, N]; lead is [..., N]."""
    if mask is None:
        return None
    check.of_kind(op, "mask", mask, torch.bool)
    check.shape(op, "mask", mask, lead, "[..., N]")
    return check.one_batch(mask, 1)


def check_gamma(op: str, gamma: float | Tensor, lead: torch.Size, device: torch.device) -> Tensor:
    """As contiguous float64 [B], on the device of the sequences if it is there already, else on the CPU; lead is [...]."""
    if isinstance(gamma, Tensor):
        check.floating(op, "gamma", gamma)
        check.shape(op, "gamma", gamma, lead, "[...], one a sequence,")
        if gamma.is_meta and device.type != "meta":
            raise ValueError(f"{op}: gamma must have values, got {check.describe(gamma)}")
        place = device if gamma.device == device else "cpu"
        return gamma.detach().to(device=place, dtype=torch.float64).reshape(-1).contiguous()
    budget = check.at_least(op, "gamma", gamma, 0.0)
    return torch.full((lead.numel(),), budget, dtype=torch.float64, device="cpu")


def checked_budget(
    op: str, gamma: float | Tensor, weights: tuple[float, float], order: str, limit: int | None, entropy: Tensor
) -> Budget:
    """Checked, for entropies [..., N]; weights are lam and entropy_weight."""
    check.one_of(op, "order", order, ("entropy", "cheapest"))
    check_limit(op, limit)
    budgets = check_gamma(op, gamma, entropy.shape[:-1], entropy.device)
    lam, entropy_weight = check.weight(op, "lam", weights[0]), check.weight(op, "entropy_weight", weights[1])
    return Budget(budgets, lam, entropy_weight, order, limit)


def with_budget(
    op: str, budget: Budget, backend: str | None, tensors: list[Tensor], precision: str | None = None
) -> Any:
    """The function of the backend chosen, and the budget with its gamma checked and on the CPU. Those on a GPU stay there for
    its kernels, which mark a bad one: looking here would stop the queue.
    """
    function, gamma = run("select", op, backend, tensors, precision), budget.gamma
    if gamma.device.type != "cpu":
        if choose("select", op, backend, tensors, precision)[0] == "triton":
            return function, budget
        gamma = gamma.cpu()
    for batch, value in enumerate(gamma.tolist()):
        if not value >= 0:
            raise ValueError(f"{op}: gamma must be at least 0, got {value} at batch {batch}")
    return function, budget._replace(gamma=gamma)


def check_limit(op: str, limit: int | None) -> None:
    if limit is not None:
        check.whole(op, "limit", limit, 1)


def empty_selection(entropy: Tensor) -> tuple[Tensor, Tensor]:
    return entropy.new_empty(entropy.shape, dtype=torch.bool), entropy.new_empty(entropy.shape[:1], dtype=torch.float64)


def selection_of(flat: tuple[Tensor, Tensor], lead: torch.Size) -> Selection:
    selected, spent = flat
    return Selection(selected, spent) if len(lead) == 2 else Selection(selected.reshape(lead), spent.reshape(lead[:-1]))
