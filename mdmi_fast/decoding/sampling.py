"""Drawing tokens from logits, each by its own number: what is drawn does not depend on what is drawn beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast._moved import renamed
from mdmi_fast.decoding.randomness import uniform
from mdmi_fast.labels.plan import invert_cumulative

_TILE = 1 << 20
"""Numbers drawn from at a time: temporaries in float64 do not grow with the batch."""


@renamed(luck="uniforms")
def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: float,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    gumbel: bool = False,
) -> Tensor:
    """Draw tokens from softmax(logits / temperature), cut to its most probable tokens, in float64.

    Args:
        logits: [R, V] float, not all -inf.
        uniforms: [R] float64 in [0, 1).
        temperature: above 0.
        top_k: keep only this many of the most probable tokens, ties to the lower index; None: all.
        top_p: keep the fewest of the most probable tokens that hold this much of what top_k left.
        gumbel: take argmax_v(log p(v) + G_v), G_v = -log(-log(u_v)) with u_v from `uniforms`, instead of the token at
            which the cumulative sum passes it. The distribution is the same, the tokens are not.

    Returns:
        [R] int64, never a token of probability 0.
    """
    rows = max(1, _TILE // logits.shape[-1])
    drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for start in range(0, len(logits), rows):
        part, own = logits[start : start + rows].double(), uniforms[start : start + rows]
        weight = ((part - part.amax(dim=-1, keepdim=True)) / temperature).exp()
        if top_k is not None or top_p < 1:
            weight = _most_probable(weight, top_k, top_p)
        drawn[start : start + rows] = (
            _by_gumbel(weight, own) if gumbel else invert_cumulative(weight, own.unsqueeze(-1)).squeeze(-1)
        )
    return drawn


def log_probability(logits: Tensor, token: Tensor, temperature: float) -> Tensor:
    """[R] float64: log softmax(logits / temperature) of one token a row."""
    rows = max(1, _TILE // logits.shape[-1])
    parts = [
        (part.double() / temperature).log_softmax(dim=-1).gather(-1, own.unsqueeze(-1)).squeeze(-1)
        for part, own in zip(logits.split(rows), token.split(rows), strict=True)
    ]
    return torch.cat(parts)


def _most_probable(weight: Tensor, top_k: int | None, top_p: float) -> Tensor:
    ordered, order = weight.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[:, min(top_k, ordered.shape[-1]) :] = 0.0
    before = ordered.cumsum(dim=-1) - ordered
    ordered.masked_fill_(before >= top_p * ordered.sum(dim=-1, keepdim=True), 0.0)
    return torch.zeros_like(weight).scatter(-1, order, ordered)


def _by_gumbel(weight: Tensor, uniforms: Tensor) -> Tensor:
    seeds = (uniforms * 2.0**53).long()
    u = uniform(seeds, 0, 0, torch.arange(weight.shape[-1], device=weight.device)) + 2.0**-54
    return (weight.log() - (-u.log()).log()).argmax(dim=-1)
