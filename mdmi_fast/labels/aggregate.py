"""One matrix of many contexts: what pairs of positions share over all the states they were masked in."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast.labels.results import masked_pairs


def aggregate_mi(mi: Tensor, mask: Tensor, statistic: str | float = "mean") -> Tensor:
    """Aggregate the mutual information of S contexts, pair by pair, over those in which both ends are masked.

    Args:
        mi: [S, N, N] float, nats.
        mask: [S, N] bool, True = masked.
        statistic: "mean", "median", or a percentile, 0 to 100 (linear between the two nearest values).

    Returns:
        [N, N] of mi's dtype; NaN for pairs that no context masks, and on the diagonal.

    Raises:
        ValueError: for shapes that do not fit or another statistic.

    Example:
        >>> import torch
        >>> mi = torch.tensor([0.1, 0.2, 0.6]).view(3, 1, 1).expand(3, 2, 2)
        >>> mask = torch.ones(3, 2, dtype=torch.bool)
        >>> [round(float(aggregate_mi(mi, mask, how)[0, 1]), 4) for how in ("mean", "median", 100)]
        [0.3, 0.2, 0.6]
    """
    if mi.ndim != 3 or mask.dtype != torch.bool or mi.shape != (*mask.shape, mask.shape[-1]) or not len(mi):
        raise ValueError(
            f"aggregate_mi: mi must be [S, N, N] and mask [S, N] bool, S >= 1, got shapes {tuple(mi.shape)} and "
            f"{tuple(mask.shape)} {mask.dtype}"
        )
    values = mi.where(masked_pairs(mask), torch.nan)
    if statistic == "mean":
        return values.nanmean(dim=0)
    percentile = 50.0 if statistic == "median" else statistic
    if isinstance(percentile, str) or not 0 <= percentile <= 100:
        raise ValueError(f"aggregate_mi: statistic must be mean, median or a percentile 0 to 100, got {statistic!r}")
    return values.nanquantile(percentile / 100, dim=0)
