"""How tokens of one pass depend on each other, asked of the model itself: a call for every position that is drawn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.decoding.policies.step import Step, required
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import call_model

_IMPOSSIBLE = -50.0
"""Nats of a token that another rules out. Such a token is never drawn beside a possible one (numbers in [0, 1) have steps
of e^-37); yet where the tokens drawn before rule out every one, the one that fewest of them object to is left."""


class _State(NamedTuple):
    """The pass as it was: tokens, attention_mask [R, N] and who answers."""

    model: MaskedModel
    tokens: Tensor
    attention_mask: Tensor | None


class ProbedPass:
    """A pass whose corrections are theta_aj(v, w) = log p(x_j = w | X_a = v) - log p(x_j = w), all of them the model's own.

    Args:
        step: of the decoding loop.
        order: [R, K] int64, as for `Coupling.begin`.
        strength: what corrections are multiplied by.
        batch_size: sequences in one forward pass.

    Raises:
        ValueError: if the step does not have the model, its tokens or its logits.
    """

    def __init__(self, step: Step, order: Tensor, *, strength: float, batch_size: int) -> None:
        needed = "model, tokens and logits"
        model, logits = required("Probing", needed, step.model), required("Probing", needed, step.logits)
        self._state = _State(model, required("Probing", needed, step.tokens), step.attention_mask)
        self._order, self._strength, self._batch_size = order, strength, batch_size
        every = torch.arange(len(order), device=order.device)
        # The model may answer into the same memory again: what is kept is a copy.
        self._marginal = _log_p(logits, every, order)
        self._shift = torch.zeros_like(self._marginal)

    def correction(self, k: int) -> Tensor:
        return self._strength * self._shift[:, k]

    def tell(self, k: int, tokens: Tensor) -> None:
        if k + 1 >= self._order.shape[1]:
            return
        own, later = self._order[:, k], self._order[:, k + 1 :]
        asked = ((own >= 0) & (later[:, 0] >= 0)).nonzero().squeeze(-1)
        for rows in asked.split(self._batch_size):
            filled = self._state.tokens[rows].scatter(1, own[rows].unsqueeze(-1), tokens[rows].unsqueeze(-1))
            shown = self._state.attention_mask
            output = call_model("Probing", self._state.model, filled, None if shown is None else shown[rows])
            there = torch.arange(len(rows), device=rows.device)
            marginal = self._marginal[rows, k + 1 :]
            theta = (_log_p(output.logits, there, later[rows]) - marginal).clamp(min=_IMPOSSIBLE)
            self._shift[rows, k + 1 :] += theta.masked_fill(marginal == -torch.inf, 0.0)


def _log_p(logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """[R, K, V] nats, float32 at least: the log-probabilities at positions [R, K] of the rows [R] of logits."""
    found = logits[rows.unsqueeze(-1), positions.clamp(min=0)]
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    return found - ops.token_stats(found).logsumexp.unsqueeze(-1)
