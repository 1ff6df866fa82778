"""What may be written where: suppressed tokens and allowed sets, as logits of -inf."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import TokenStats

_TILE = 1 << 20
"""Logits that are copied at a time: memory does not grow with the model's answer."""


def checked_tokens(name: str, tokens: Sequence[int], size: int) -> list[int]:
    """An argument of `decode` that names tokens.

    Raises:
        TypeError: for what is no sequence of integers; a float is not cut to one.
        ValueError: for tokens outside of the vocabulary of that size.
    """
    try:
        found = [operator.index(token) for token in tokens]
    except TypeError:
        raise TypeError(f"decode: {name} must be a sequence of tokens, which are integers, got {tokens!r}") from None
    for token in found:
        if not 0 <= token < size:
            raise ValueError(f"decode: {name} must be tokens in 0..{size - 1}, got {token}")
    return found


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a decode may write. What the model returned is never written to: it may keep it.

    Attributes:
        suppressed: [S] int64, tokens of the vocabulary that are never written and that the model does not rule out itself.
        allowed: [B, N, V] bool, what may be written at a position; None: everything.
    """

    suppressed: Tensor
    allowed: Tensor | None

    @classmethod
    def of(cls, model: MaskedModel, tokens: Tensor, suppressed: Sequence[int], allowed: Tensor | None) -> Vocabulary:
        """The arguments of `decode`, of which `suppressed` has been checked; the mask token is suppressed with the rest.

        Raises:
            TypeError: for a set of another kind.
            ValueError: for a set that does not fit to tokens [B, N].
        """
        size = model.vocab_size
        ruled_out = {int(token) for token in getattr(model, "never", ())}
        left = {token for token in (model.mask_token_id, *suppressed) if token < size} - ruled_out
        if allowed is not None:
            check.of_kind("decode", "allowed", allowed, torch.bool)
            whole = (*tokens.shape, size)
            shape = (1,) * (3 - allowed.ndim) + tuple(allowed.shape)
            fits = len(shape) == 3 and all(a in (1, b) for a, b in zip(shape, whole, strict=True))
            if not fits or shape[-1] != size:
                raise ValueError(
                    f"decode: allowed must broadcast to [B, N, V] = {whole}, got shape {tuple(allowed.shape)}"
                )
            allowed = allowed.expand(whole)
        return cls(torch.tensor(sorted(left), dtype=torch.int64, device=tokens.device), allowed)

    @property
    def is_free(self) -> bool:
        """Whether logits need no change."""
        return not len(self.suppressed) and self.allowed is None

    def restrict(self, logits: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
        """Logits [K, V] with -inf where nothing may be written.

        Args:
            logits: of some positions; a copy, which is written to.
            sequence: [K] int64, the sequence of each.
            position: [K] int64.
        """
        if len(self.suppressed):
            logits.index_fill_(-1, self.suppressed, -torch.inf)
        if self.allowed is not None:
            logits.masked_fill_(~self.allowed[sequence, position], -torch.inf)
        return logits

    def stats(self, logits: Tensor, sequences: Tensor) -> TokenStats:
        """`ops.token_stats` [R, N] of what may be written.

        Args:
            logits: [R, N, V], as the model gave them.
            sequences: [R] int64, which sequences these are.
        """
        if self.is_free:
            return ops.token_stats(logits)
        shape, size = logits.shape[:2], max(1, _TILE // logits.shape[2])
        number = torch.arange(shape.numel(), device=logits.device)
        sequence, position = sequences[number // shape[1]], number % shape[1]
        parts = [
            ops.token_stats(self.restrict(part.clone(), *where))
            for part, *where in zip(
                logits.flatten(0, 1).split(size), sequence.split(size), position.split(size), strict=True
            )
        ]
        return TokenStats(*(torch.cat(field).view(shape) for field in zip(*parts, strict=True)))
