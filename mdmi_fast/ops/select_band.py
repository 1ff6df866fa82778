"""Which masked positions of a long sequence can be unmasked together, from the pairs of a sliding window."""

from __future__ import annotations

from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.ops._dispatch import call
from mdmi_fast.ops._register import registered
from mdmi_fast.ops.select import (
    Selection,
    _budgets,
    _check_entropy,
    _check_gamma,
    _check_limit,
    _check_mask,
    _empty_selection,
    _selection,
    _values,
)


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
    """`select_budget` where pairs farther apart than a window count as independent, in memory N * window (row S18).

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
    h, values = _check_entropy(op, entropy), _values(op, "band", band)
    if band.shape[:-1] != entropy.shape or band.shape[-1] % 2 == 0:
        raise ValueError(
            f"{op}: band must be [..., N, 2 * window + 1] with [..., N] = {tuple(entropy.shape)}, that of entropy, "
            f"got {check.describe(band)}"
        )
    masked = _check_mask(op, mask, entropy.shape)
    check.same_device(op, entropy=entropy, band=band, mask=mask)
    check.one_of(op, "order", order, ("entropy", "cheapest"))
    _check_limit(op, limit)
    budget = _check_gamma(op, gamma, entropy.shape[:-1], entropy.device)
    lam, entropy_weight = check.weight(op, "lam", lam), check.weight(op, "entropy_weight", entropy_weight)
    flat = values.reshape(*h.shape, band.shape[-1])
    return _selection(
        _select_budget_band(h, flat, budget, lam, entropy_weight, order, masked, limit, backend), entropy.shape
    )


@registered("select_budget_band")
def _select_budget_band(
    entropy: Tensor,
    band: Tensor,
    gamma: Tensor,
    lam: float,
    entropy_weight: float,
    order: str,
    mask: Tensor | None,
    limit: int | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    gamma = _budgets("select_budget_band", gamma, backend, [entropy, band], None)
    args = (entropy, band, gamma, lam, entropy_weight, order, mask, limit)
    return call("select", "select_budget_band", backend, [entropy, band], None, *args)  # type: ignore[no-any-return]


@_select_budget_band.register_fake
def _(
    entropy: Tensor,
    band: Tensor,
    gamma: Tensor,
    lam: float,
    entropy_weight: float,
    order: str,
    mask: Tensor | None,
    limit: int | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    return _empty_selection(entropy)
