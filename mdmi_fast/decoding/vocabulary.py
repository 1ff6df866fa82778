"""What may be written where: suppressed tokens and allowed sets, as logits of -inf."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.models import MaskedModel, PermittingModel
from mdmi_fast.models.call import forbidden_tokens_of
from mdmi_fast.ops import TokenStats

_TILE = 1 << 20
"""Logits that are copied at a time: memory does not grow with the model's answer."""


def with_stops(model: MaskedModel, stop_tokens: Sequence[int], suppressed: Sequence[int]) -> MaskedModel:
    """The model that a decode runs: it may write the tokens that end a sequence, also those it never writes by itself.

    Raises:
        ValueError: for stop tokens that cannot be written.
    """
    contradicted = sorted({*stop_tokens}.intersection(suppressed))
    if contradicted:
        raise ValueError(f"decode: stop_tokens must not be suppressed, got {contradicted} in both")
    if model.mask_token_id in stop_tokens:
        raise ValueError(
            f"decode: stop_tokens must not hold the mask token {model.mask_token_id}, got {[*stop_tokens]}"
        )
    ruled_out = sorted(forbidden_tokens_of("decode", model).intersection(stop_tokens))
    if not ruled_out:
        return model
    if isinstance(model, PermittingModel):
        return model.permitting(ruled_out)
    raise ValueError(
        f"decode: stop_tokens must be tokens that the model can write, got {ruled_out}, which are in the attribute "
        f"forbidden_tokens of {type(model).__name__}; give it a method permitting(tokens), see mdmi_fast.models.PermittingModel"
    )


def _any_besides(sets: Tensor, tokens: Collection[int]) -> Tensor:
    """[b, n] bool: whether a set of sets [b, n, V] bool holds any other than these tokens."""
    for axis in (0, 1):
        if sets.stride(axis) == 0:  # all alike
            sets = sets.narrow(axis, 0, 1)
    besides = torch.ones(sets.shape[-1], dtype=torch.bool, device=sets.device)
    besides[[*tokens]] = False
    parts = sets.split(max(1, _TILE // max(1, sets.shape[1] * sets.shape[2])))
    return torch.cat([(part & besides).any(dim=-1) for part in parts])


def _few(tokens: Sequence[int]) -> str:
    return f"{tokens}" if len(tokens) <= 5 else f"[{', '.join(map(str, tokens[:5]))}, ...]"


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
    def of(cls, model: MaskedModel, asked: Tensor, suppressed: Sequence[int], allowed: Tensor | None) -> Vocabulary:
        """The arguments of `decode`, of which `suppressed` has been checked; the mask token is suppressed with the rest.

        Args:
            model: decodes.
            asked: [B, N] bool, the positions that will be written.
            suppressed: tokens.
            allowed: as given.

        Raises:
            TypeError: for a set of another kind.
            ValueError: for a set that does not fit to `asked`, or positions where nothing may be written.
        """
        size, ruled_out = model.vocab_size, forbidden_tokens_of("decode", model)
        left = {token for token in (model.mask_token_id, *suppressed) if token < size} - ruled_out
        whole = (*asked.shape, size)
        sets = torch.ones(size, dtype=torch.bool, device=asked.device) if allowed is None else allowed
        check.of_kind("decode", "allowed", sets, torch.bool)
        shape = (1,) * (3 - sets.ndim) + tuple(sets.shape)
        fits = len(shape) == 3 and all(a in (1, b) for a, b in zip(shape, whole, strict=True))
        if not fits or shape[-1] != size:
            raise ValueError(f"decode: allowed must broadcast to [B, N, V] = {whole}, got shape {tuple(sets.shape)}")
        check.same_device("decode", tokens=asked, allowed=sets)
        sets = sets.view(shape)
        forbidden = {token for token in (*ruled_out, *left) if 0 <= token < size}
        stuck = asked & ~_any_besides(sets, forbidden)
        if bool(stuck.any()):
            row, position = stuck.nonzero()[0].tolist()
            demanded = sets.expand(whole)[row, position].nonzero().flatten().tolist()
            reasons = {"suppressed": suppressed, f"forbidden_tokens of {type(model).__name__}": ruled_out}
            reasons["the mask token"] = {model.mask_token_id}
            found = {name: sorted({*demanded}.intersection(tokens)) for name, tokens in reasons.items()}
            told = ", ".join(f"{name} {_few(tokens)}" for name, tokens in found.items() if tokens)
            raise ValueError(
                f"decode: {'suppressed' if allowed is None else 'allowed'} must leave a token to write at sequence {row}, "
                f"position {position}, got {_few(demanded)}" + (f", of which {told} cannot be written" if told else "")
            )
        restricting = None if allowed is None else sets.expand(whole)
        return cls(torch.tensor(sorted(left), dtype=torch.int64, device=asked.device), restricting)

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
