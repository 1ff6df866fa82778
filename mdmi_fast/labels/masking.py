"""Which positions of a sequence to mask, to make of sequences the states that an estimator is trained on.

Every policy depends on a sequence and its own seed only. At least one position is masked, and none that the model knows
for padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.labels.plan import invert_cumulative
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import call_model, check_tokens, visible_positions


class Masking(Protocol):
    """Makes states of sequences; its repr says how, and is kept with the labels."""

    def __call__(self, model: MaskedModel, tokens: Tensor, seeds: Sequence[int]) -> Tensor:
        """Tokens [B, N] int64 of one length, with a seed each, to states [B, N] with the mask token where masked."""
        ...


@dataclass(frozen=True)
class FixedShare:
    """Masks a fixed share of the positions, drawn at random.

    Args:
        share: in (0, 1], rounded to whole positions.
        keep: tokens that are never masked, such as those of start and end.

    Example:
        >>> import torch
        >>> from mdmi_fast.models.exact import JointTable
        >>> states = FixedShare(0.5)(JointTable(torch.ones(2, 2, 2, 2)), torch.zeros(3, 4, dtype=torch.int64), [0, 1, 2])
        >>> (states == 2).sum(-1).tolist()
        [2, 2, 2]
    """

    share: float
    keep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"FixedShare: share must lie in (0, 1], got {self.share}")

    def __call__(self, model: MaskedModel, tokens: Tensor, seeds: Sequence[int]) -> Tensor:
        return _mask(model, tokens, seeds, self.share, self.keep)


@dataclass(frozen=True)
class UniformShare:
    """Masks a share t of the positions, drawn at random, with t ~ U[0, 1] for each sequence (arXiv 2605.20187).

    Args:
        keep: tokens that are never masked.
    """

    keep: tuple[int, ...] = ()

    def __call__(self, model: MaskedModel, tokens: Tensor, seeds: Sequence[int]) -> Tensor:
        return _mask(model, tokens, seeds, None, self.keep)


@dataclass(frozen=True)
class Trajectory:
    """What the model itself met on the way: it fills a sequence from nothing at temperature 1 up to a uniform share.

    The mask token is never drawn. Of the sequences given, only their lengths and the tokens kept matter.

    Args:
        order: of the positions: "entropy", lowest first, or "random".
        at_once: positions filled in one pass.
        keep: tokens that stand from the beginning.
    """

    order: Literal["entropy", "random"] = "entropy"
    at_once: int = 1
    keep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.order not in ("entropy", "random") or self.at_once < 1:
            raise ValueError(
                f"Trajectory: order must be entropy or random and at_once at least 1, got {self.order!r}, {self.at_once}"
            )

    @torch.no_grad()
    def __call__(self, model: MaskedModel, tokens: Tensor, seeds: Sequence[int]) -> Tensor:
        free, visible = _maskable(model, tokens, seeds, self.keep)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        states = tokens.masked_fill(free, model.mask_token_id)
        goal = (free.sum(-1) * (1 - _uniforms(generators, 1, tokens.device)[:, 0])).ceil().long()  # that stay masked
        while True:
            masked = free & (states == model.mask_token_id)
            active = (masked.sum(-1) > goal).nonzero().squeeze(-1)
            if not len(active):
                return states
            running = [generators[row] for row in active.tolist()]
            uniforms = _uniforms(running, 2 * tokens.shape[1], tokens.device).view(len(active), 2, -1)
            shown = None if visible is None else visible[active]
            logits = call_model("Trajectory", model, states[active], shown).logits
            if model.mask_token_id < logits.shape[-1]:  # a position filled with it would be masked for ever
                mask_token = torch.tensor([model.mask_token_id], device=logits.device)
                logits = logits.index_fill(-1, mask_token, -torch.inf)
            entropy = ops.entropy(logits)
            broken = entropy.isnan() & masked[active]
            if bool(broken.any()):
                row, position = broken.nonzero()[0].tolist()
                raise ValueError(
                    f"Trajectory: the model's logits at sequence {int(active[row])}, position {position} give no "
                    "distribution (NaN, +inf, or -inf for every token but the mask token)"
                )
            drawn = invert_cumulative(logits.double().softmax(dim=-1), uniforms[:, 1].unsqueeze(-1)).squeeze(-1)
            key = entropy.double() if self.order == "entropy" else uniforms[:, 0]
            key = key.masked_fill(~masked[active], torch.inf)
            count = (masked.sum(-1) - goal)[active].clamp(max=self.at_once)
            rank = key.argsort(dim=-1, stable=True).argsort(dim=-1)
            chosen = rank < count.unsqueeze(-1)
            states[active] = states[active].where(~chosen, drawn)


def _maskable(
    model: MaskedModel, tokens: Tensor, seeds: Sequence[int], keep: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Which positions may be masked, and which are not padding; None for a model that knows no padding."""
    check_tokens("masking", tokens)
    for seed in seeds:
        check.whole("masking", "each of seeds", seed, -(2**63), 2**64 - 1)
    if not len(tokens) or len(seeds) != len(tokens):
        raise ValueError(f"masking: there must be sequences, and a seed for each, got {len(tokens)} and {len(seeds)}")
    visible = visible_positions("masking", model, tokens, None)
    free = ~torch.isin(tokens, torch.tensor(keep, dtype=tokens.dtype, device=tokens.device))
    free &= True if visible is None else visible
    if not bool(free.any(dim=-1).all()):
        raise ValueError(f"masking: sequence {int((~free.any(dim=-1)).nonzero()[0])} holds nothing but tokens to keep")
    return free, visible


def _mask(model: MaskedModel, tokens: Tensor, seeds: Sequence[int], share: float | None, keep: Sequence[int]) -> Tensor:
    """Mask a share of the maskable positions, at least one; None: a uniform share."""
    free, _ = _maskable(model, tokens, seeds, keep)
    uniforms = _uniforms([torch.Generator().manual_seed(seed) for seed in seeds], 1 + tokens.shape[1], tokens.device)
    size = free.sum(dim=-1)
    wanted = (size * (1 - uniforms[:, 0])).ceil() if share is None else (size * share).round().clamp(min=1)
    rank = uniforms[:, 1:].masked_fill(~free, math.inf).argsort(dim=-1).argsort(dim=-1)
    return tokens.masked_fill(rank < wanted.unsqueeze(-1), model.mask_token_id)


def _uniforms(generators: Sequence[torch.Generator], count: int, device: torch.device) -> Tensor:
    """[B, count] float64 in [0, 1), of each sequence's own generator."""
    return torch.stack(
        [torch.rand(count, dtype=torch.float64, generator=each, device="cpu") for each in generators]
    ).to(device)
