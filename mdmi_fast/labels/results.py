"""What probing found: directed readings of one run, and the symmetric labels made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast.labels.options import Form
from mdmi_fast.labels.plan import times


class _Labels(NamedTuple):
    mi: Tensor
    entropy: Tensor
    bound: Tensor
    passes: Tensor
    asymmetry: Tensor


class MILabels(_Labels):
    """Pairwise mutual information of masked positions, in nats: a tuple of five, and one attribute.

    Attributes:
        mi: [B, N, N] float32, symmetric, the mean of both directions; 0 on the diagonal and where an end is not masked.
        entropy: [B, N] float32, H(X_i | visible) of masked positions, 0 elsewhere.
        bound: [B, N, N] float32, no entry of `mi` is further than this from what full probing gives.
        passes: [B] int64, forward passes spent on each sequence.
        asymmetry: [B] float32, the mean over pairs known from both ends of |one direction - the other|.
        standard_error: [B, N, N] float32, of entries that rest on values drawn at random; 0 elsewhere. Not of the tuple.
    """

    standard_error: Tensor

    def __new__(cls, *labels: Tensor, standard_error: Tensor) -> MILabels:
        self = super().__new__(cls, *labels)
        self.standard_error = standard_error
        return self


class Probe(NamedTuple):
    """What one probing run found; row i of a directed matrix is what writing X_i tells of every x_j.

    Attributes:
        directed: form -> [B, N, N] float32, of the forms asked for.
        error: form -> [B, N, N] float32, the most that an entry differs from full probing in the same direction.
        standard_error: form -> [B, N, N] float32, of rows whose values were drawn.
        mask: [B, N] bool.
        pairs: [B, N, N] bool, the pairs asked for.
        known: [B, N] bool, False for ends that were left out because the other end tells.
        entropy: [B, N] float32, 0 where not masked.
        passes: [B] int64.
        hidden: [B, N, D], the hidden states of the base pass.
    """

    directed: dict[Form, Tensor]
    error: dict[Form, Tensor]
    standard_error: dict[Form, Tensor]
    mask: Tensor
    pairs: Tensor
    known: Tensor
    entropy: Tensor
    passes: Tensor
    hidden: Tensor

    def labels(self, form: Form) -> MILabels:
        """The symmetric labels of one form.

        Raises:
            ValueError: if the run did not read this form.
        """
        if form not in self.directed:
            raise ValueError(f"Probe: this run read only {', '.join(self.directed)}, got form={form!r}")
        one_way = self.directed[form]
        other_way = one_way.transpose(-1, -2)
        twice = self.known.unsqueeze(-1) & self.known.unsqueeze(-2) & masked_pairs(self.mask)
        # 1/2 where both ends tell, 1 where only this one does. Pairs that were not asked for may have two ends left out:
        # their label of 0 is as far from full probing as both directions together.
        counts = self.known.unsqueeze(-1) | ~self.known.unsqueeze(-2)
        share = counts * (1 - 0.5 * counts.transpose(-1, -2).float()) * masked_pairs(self.mask)
        mi = times(share, one_way)
        bound = times(share, self.error[form])
        spread = times(share, self.standard_error[form])
        gap = (one_way - other_way).abs().masked_fill(~twice | (one_way == other_way), 0.0)  # inf - inf is no gap
        return MILabels(
            mi + mi.transpose(-1, -2),
            self.entropy,
            bound + bound.transpose(-1, -2),
            self.passes,
            gap.sum(dim=(-1, -2)) / twice.sum(dim=(-1, -2)).clamp(min=1),
            standard_error=torch.hypot(spread, spread.transpose(-1, -2)),
        )


def masked_pairs(mask: Tensor) -> Tensor:
    """[..., N] -> [..., N, N] bool: True where both ends are masked and differ."""
    pairs = mask.unsqueeze(-1) & mask.unsqueeze(-2)
    return pairs & ~torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)


def join(parts: Sequence[Probe]) -> Probe:
    """Probes of one batch after the other as one."""

    def together(field: str) -> Tensor:
        return torch.cat([getattr(part, field) for part in parts])

    def per_form(field: str) -> dict[Form, Tensor]:
        return {form: torch.cat([getattr(part, field)[form] for part in parts]) for form in parts[0].directed}

    return Probe(
        per_form("directed"),
        per_form("error"),
        per_form("standard_error"),
        *(together(field) for field in ("mask", "pairs", "known", "entropy", "passes", "hidden")),
    )
