"""How good decoded tokens are, by what is known of the answer or by the model itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.decoding.randomness import draw_seeds
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import call_model, visible_positions

Quality = Callable[[Tensor, Tensor, Tensor], Tensor]
"""How good decoded tokens [B, N] are, given what was asked for [B, N] bool and the sequences' numbers [B] in the data:
[B], more is better; at least 0 where a loss is a share of it."""

_IMPOSSIBLE = math.log(torch.finfo(torch.float32).tiny)
"""Nats that a token counts which the model holds for impossible, so that a mean stays finite."""


def accuracy(target: Tensor) -> Quality:
    """A quality for data whose answer is known: the share of decoded positions that are as in target [S, N] int64.

    Raises:
        TypeError: for a target of another kind.
    """
    check.of_kind("accuracy", "target", target, torch.int64)

    def quality(tokens: Tensor, asked: Tensor, sequences: Tensor) -> Tensor:
        right = (tokens == target[sequences].to(tokens.device)) & asked
        return right.sum(dim=-1).float() / asked.sum(dim=-1)

    return quality


def log_likelihood(
    model: MaskedModel,
    *,
    attention_mask: Tensor | None = None,
    positions: int = 16,
    seed: int = 0,
    batch_size: int = 256,
) -> Quality:
    """A quality without a task, in nats a token: mean_i log p(x_i | all others) over decoded positions, by the model itself.

    Each position is masked alone. A token that the model holds for impossible counts log of the least float32, about -87.

    Args:
        model: the judge; its own taste is all that is measured. See `pseudo_likelihood` for stop tokens.
        attention_mask: [S, N] bool of the data, False at padding.
        positions: at most so many of a sequence, drawn at random, are looked at: a pass each.
        seed: of that draw.
        batch_size: sequences of a pass.
    """

    def quality(tokens: Tensor, asked: Tensor, sequences: Tensor) -> Tensor:
        visible = None if attention_mask is None else attention_mask[sequences]
        places = _some(asked, positions, torch.Generator().manual_seed(seed))
        return _mean_log_p("log_likelihood", model, tokens, places, visible, batch_size, least=_IMPOSSIBLE)

    return quality


def pseudo_likelihood(
    model: MaskedModel,
    tokens: Tensor,
    decoded: Tensor,
    *,
    attention_mask: Tensor | None = None,
    positions: int = 8,
    generator: torch.Generator | None = None,
    batch_size: int = 256,
) -> Tensor:
    """How well each sequence fits the model itself: exp(mean log p(x_i | all others)), over a few decoded positions.

    A quality where the task has no score of its own, such as for `Guard.finish`. Each position is masked alone: one forward
    pass a position.

    Args:
        model: the masked model. One that ends sequences by stop tokens which it never writes by itself must permit them
            here as well, `model.permitting(stop_tokens)`, or it holds them for impossible.
        tokens: [B, N] int64, decoded.
        decoded: [B, N] bool, the positions that were masked at first.
        attention_mask: [B, N] bool, False at padding; None: as for `decode`, of these tokens.
        positions: at most so many of each sequence are looked at, drawn without replacement.
        generator: of the draw; None: torch's own.
        batch_size: sequences of a pass.

    Returns:
        [B] float64 from 0 to 1; 1 where nothing was decoded.
    """
    visible = visible_positions("pseudo_likelihood", model, tokens, attention_mask)
    (seed,) = draw_seeds(1, generator, tokens.device).tolist()
    places = _some(decoded, positions, torch.Generator().manual_seed(seed))
    return _mean_log_p("pseudo_likelihood", model, tokens, places, visible, batch_size).exp()


def _some(asked: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[B, N] bool: of each sequence at most `count` of the positions asked for, drawn at random."""
    uniforms = torch.rand(asked.shape, generator=generator, dtype=torch.float32, device="cpu").to(asked.device)
    order = uniforms.masked_fill(~asked, 2.0).argsort(dim=-1)[:, :count]
    return torch.zeros_like(asked).scatter_(-1, order, value=True) & asked


@torch.no_grad()
def _mean_log_p(
    owner: str,
    model: MaskedModel,
    tokens: Tensor,
    places: Tensor,
    visible: Tensor | None,
    batch_size: int,
    least: float = -math.inf,
) -> Tensor:
    """[B] float64, nats: the mean of log p(x_i | all others), not below `least`, over places [B, N] bool; 0 over none."""
    row, place = places.nonzero(as_tuple=True)
    total = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
    for rows, at in zip(row.split(batch_size), place.split(batch_size), strict=True):
        number = torch.arange(len(rows), device=tokens.device)
        states = tokens[rows]
        truth = states[number, at].clone()
        states[number, at] = model.mask_token_id
        logits = call_model(owner, model, states, None if visible is None else visible[rows]).logits[number, at]
        log_p = logits.gather(-1, truth.unsqueeze(-1)).squeeze(-1).double() - ops.token_stats(logits).logsumexp
        total.index_add_(0, rows, log_p.clamp(min=least))
    return total / places.sum(dim=-1).clamp(min=1)
