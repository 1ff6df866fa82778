"""Numbers by the distance of two positions, laid out for pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def of_pairs(values: Tensor, n: int) -> Tensor:
    """[K] for the distances 1 to K, the last one beyond, to [n, n]; what stands on the diagonal means nothing."""
    place = torch.arange(n, device=values.device)
    distance = (place - place.unsqueeze(-1)).abs()
    return values[distance.clamp(1, len(values)) - 1]


def of_band(values: Tensor, window: int) -> Tensor:
    """As `of_pairs`, for the offsets -window to window: [2 * window + 1]."""
    return of_pairs(values, 2 * window + 1)[window]


def masked_band(mask: Tensor, window: int) -> Tensor:
    """[B, N] to [B, N, 2 * window + 1] bool: entry (i, window + d) is True where i and i + d are masked and differ."""
    both = pad(mask, (window, window)).unfold(1, 2 * window + 1, 1) & mask.unsqueeze(-1)
    both[..., window] = False
    return both


def before_output(output: str, nats: Tensor) -> Tensor:
    """What the last layer has to say for so many nats, inside the range in which the output still has a slope."""
    if output == "identity":
        return nats
    nats = nats.clamp(1e-6, 0.5 if output == "bounded" else 50.0)
    return nats.expm1().log() if output == "softplus" else (nats / (1 - nats)).log()
