"""A small network on every pair of positions, all pairs at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pairwise_mlp(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    *,
    shift: Tensor | None = None,
    relation: Tensor | None = None,
    mask: Tensor | None = None,
    combine: str = "add",
    symmetry: str = "mean",
    activation: str = "identity",
) -> Tensor:
    """F of every pair [..., N, N]; the diagonal and pairs with an unmasked end are 0."""
    n = u.shape[-2]
    if mask is None:
        mask = torch.ones(u.shape[:-1], dtype=torch.bool, device=u.device)
    u, v = u.masked_fill(~mask.unsqueeze(-1), 0.0), v.masked_fill(~mask.unsqueeze(-1), 0.0)
    left, right = u.unsqueeze(-2), v.unsqueeze(-3)
    z = torch.relu(left + right) if combine == "add" else left * right
    for weight, bias in zip(weights, biases, strict=True):
        z = torch.relu(z @ weight + bias)
    f = z @ w_out + b_out
    if shift is not None:
        place = torch.arange(n, device=u.device)
        if relation is None:
            relation = (place - place.unsqueeze(-1)).abs().clamp(1, len(shift)) - 1
        f = f + shift[relation.long()]
    if activation == "softplus":
        f = torch.nn.functional.softplus(f)
    if symmetry == "mean":
        f = (f + f.mT) / 2
    if symmetry == "upper":
        f = f.triu(1) + f.triu(1).mT
    kept = mask.unsqueeze(-1) & mask.unsqueeze(-2) & ~torch.eye(n, dtype=torch.bool, device=u.device)
    return torch.where(kept, f, 0.0)


def pairwise_mlp_rows(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    rows: Tensor,
    *,
    shift: Tensor | None = None,
    relation: Tensor | None = None,
    mask: Tensor | None = None,
    combine: str = "add",
    symmetry: str = "mean",
    activation: str = "identity",
) -> Tensor:
    """Rows of `pairwise_mlp` [..., R, N]; -1 is a row of zeros."""
    full = pairwise_mlp(
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
    index = rows.clamp_min(0).unsqueeze(-1).expand(*rows.shape, u.shape[-2])
    return torch.where((rows >= 0).unsqueeze(-1), full.gather(-2, index), 0.0)


def pairwise_mlp_band(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    window: int,
    *,
    shift: Tensor | None = None,
    relation: Tensor | None = None,
    mask: Tensor | None = None,
    combine: str = "add",
    symmetry: str = "mean",
    activation: str = "identity",
) -> Tensor:
    """The band of `pairwise_mlp`: entry [..., i, window + d] is that of the pair (i, i + d)."""
    full = pairwise_mlp(
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
    n = u.shape[-2]
    columns = torch.arange(n, device=u.device)[:, None] + torch.arange(-window, window + 1, device=u.device)
    inside = (columns >= 0) & (columns < n)
    index = columns.clamp(0, max(n - 1, 0)).expand(*full.shape[:-1], 2 * window + 1)
    return torch.where(inside, full.gather(-1, index), 0.0)
