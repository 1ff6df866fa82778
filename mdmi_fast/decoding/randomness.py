"""Random numbers that depend on a sequence's seed, its step and the position, and on nothing else in the batch."""

from __future__ import annotations

import torch
from torch import Tensor


def _i64(value: int) -> int:
    """The low 64 bits as a signed number, the way tensors hold them."""
    low = value & ((1 << 64) - 1)
    return low - (1 << 64) if low >= 1 << 63 else low


_GOLDEN, _MIX_1, _MIX_2 = _i64(0x9E3779B97F4A7C15), _i64(0xBF58476D1CE4E5B9), _i64(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def uniform(seeds: Tensor, step: int, stream: int, index: Tensor) -> Tensor:
    """Numbers in [0, 1): float64 [B, K], entry (b, k) from seeds[b], step, stream and index[b, k] alone.

    Args:
        seeds: [B] int64.
        step: the pass.
        stream: 0 or 1, separates uses within a pass.
        index: [K] or [B, K] int64, what a number belongs to, from 0.
    """
    key = _mix(seeds + _i64(_GOLDEN * (1 + 2 * step + stream)))
    return _shift(_mix(key.unsqueeze(-1) + _GOLDEN * (index + 1)), 11).double() * 2.0**-53


def places(like: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The number of every position within its own sequence, wherever the padding stands: [N] or [B, N] int64.

    Args:
        like: [B, N], of any kind.
        attention_mask: [B, N] bool, False at padding; None: no padding.
    """
    if attention_mask is None:
        return torch.arange(like.shape[1], device=like.device)
    return attention_mask.cumsum(dim=-1) - 1


def draw_seeds(count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """[count] int64 seeds, one a sequence, from a generator (None: torch's own)."""
    source = torch.device("cpu") if generator is None else generator.device
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device=source).to(device)
