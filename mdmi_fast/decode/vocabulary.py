"""What may be written where: suppressed tokens and allowed sets, as logits of -inf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import _checks as check


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a decode may write.

    Attributes:
        suppressed: [S] int64, tokens of the vocabulary that are never written.
        forbidden: [1 or B, 1 or N, V] bool, what must not be written at a position; None: nothing.
    """

    suppressed: Tensor
    forbidden: Tensor | None

    @classmethod
    def of(cls, model: MaskedModel, tokens: Tensor, suppressed: Sequence[int], allowed: Tensor | None) -> Vocabulary:
        """The arguments of `decode`, checked; the mask token is suppressed with the rest.

        Raises:
            ValueError: for tokens outside of the vocabulary, or a set that does not fit to tokens [B, N].
        """
        size = model.vocab_size
        for token in suppressed:
            if not 0 <= token < size:
                raise ValueError(f"decode: suppressed must be tokens in 0..{size - 1}, got {token}")
        never = {token for token in (model.mask_token_id, *suppressed) if token < size}
        forbidden = None
        if allowed is not None:
            check.of_kind("decode", "allowed", allowed, torch.bool)
            whole = (*tokens.shape, size)
            shape = (1,) * (3 - allowed.ndim) + tuple(allowed.shape)
            fits = len(shape) == 3 and all(a in (1, b) for a, b in zip(shape, whole, strict=True))
            if not fits or shape[-1] != size:
                raise ValueError(
                    f"decode: allowed must broadcast to [B, N, V] = {whole}, got shape {tuple(allowed.shape)}"
                )
            forbidden = ~allowed.reshape(shape)
        return cls(torch.tensor(sorted(never), dtype=torch.int64, device=tokens.device), forbidden)

    def restrict(self, logits: Tensor, sequences: Tensor) -> Tensor:
        """The logits [R, N, V] with -inf where nothing may be written: the same memory wherever that can be written to.

        Args:
            logits: as the model gave them.
            sequences: [R] int64, which sequences these are.
        """
        if not len(self.suppressed) and self.forbidden is None:
            return logits
        if logits.is_inference() or any(
            stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)
        ):
            logits = logits.clone()
        logits[..., self.suppressed] = -torch.inf
        if self.forbidden is not None:
            one_for_all = len(self.forbidden) == 1
            logits.masked_fill_(self.forbidden if one_for_all else self.forbidden[sequences], -torch.inf)
        return logits
