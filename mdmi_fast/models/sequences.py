"""What every network over token sequences shares: padding, batches, tokens that are never decoded.

A library that decodes has to give a sequence the same tokens in every batch. A network does not: its matrix products
add in another order when their shape changes, or even the place of a row in it, and logits move by some 1e-5
(`benchmarks/batch_invariance.py`). So a network here is run on one sequence at a time, cut out of its padding, unless
the caller gives that up for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from mdmi_fast.models.base import MaskedOutput


class SequenceModel(nn.Module):
    """A frozen network as a `MaskedModel`. A subclass says how the network is called (`run`).

    Args:
        vocab_size: V.
        hidden_size: D.
        mask_token_id: may lie outside of the logits' vocabulary.
        pad_token_id: what padding is, or None. Without an attention mask every pad token counts as padding.
        never: tokens that are never decoded: their logit is -inf. The mask token always is one of them.
        max_length: most tokens of a sequence, None for no limit.
        batch_invariant: False runs a batch at once, padded on the right: faster for small networks and on GPUs, but
            an answer then depends on the batch by some 1e-5 of logits.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        mask_token_id: int,
        pad_token_id: int | None = None,
        never: Iterable[int] = (),
        max_length: int | None = None,
        batch_invariant: bool = True,
    ) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.mask_token_id, self.pad_token_id = mask_token_id, pad_token_id
        self.max_length = max_length
        # Not a plain attribute: those tell models apart (`identity`), and labels of either way are of one model.
        self._batch_invariant = batch_invariant
        unwanted = {token for token in (*never, mask_token_id) if 0 <= token < vocab_size}  # -1 is no pad token
        self.never: Tensor
        self.register_buffer("never", torch.tensor(sorted(unwanted), dtype=torch.int64), persistent=False)

    @property
    def batch_invariant(self) -> bool:
        return self._batch_invariant

    def run(self, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits [B, N, V] and hidden state [B, N, D] of the network itself.

        Args:
            tokens: [B, N] int64.
            attention_mask: [B, N] bool, False at padding, which is on the right; None: no padding.
        """
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        """Marginals and hidden states.

        Args:
            tokens: [B, N] int64, on any device.
            attention_mask: [B, N] bool, False at padding, on either side or both; None: padding is where the pad
                token is.

        Returns:
            logits [B, N, V], -inf at tokens that are never decoded, and hidden [B, N, D]; both 0 at padding, and on
            the device of the tokens.

        Raises:
            ValueError: for other shapes or dtypes, tokens outside of the vocabulary, a sequence that is too long, or
                an attention mask with gaps.
        """

        def answer(part: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
            logits, hidden = self.run(part, visible)
            return logits.index_fill(-1, self.never, -torch.inf), hidden

        return MaskedOutput(*self._put_together(answer, tokens, attention_mask))

    def check(self, tokens: Tensor, attention_mask: Tensor | None = None) -> None:
        """Refuse, without running the network, what `forward` refuses.

        Raises:
            ValueError: as `forward`.
        """
        self._checked(tokens, attention_mask)

    def _put_together(
        self,
        answer: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]],
        tokens: Tensor,
        attention_mask: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Call `answer` on sequences without padding around them; put its tensors together to [B, N, ...]."""
        asked = tokens.device
        visible = self._checked(tokens, attention_mask).to(self.never.device)
        tokens = tokens.to(self.never.device)
        lengths = visible.sum(dim=1)
        first = visible.int().argmax(dim=1)
        every = torch.arange(len(tokens), device=tokens.device)
        fields: tuple[Tensor, ...] = ()
        for rows in every.split(1 if self.batch_invariant else len(tokens)):
            # A sequence of nothing but padding runs as one pad token, whose answer is not kept.
            places = torch.arange(max(int(lengths[rows].max()), 1), device=tokens.device)
            inside = places < lengths[rows, None]
            columns = (first[rows, None] + places).clamp(max=tokens.shape[1] - 1)
            part = tokens[rows[:, None], columns]
            if bool(inside.all()):
                answers = answer(part, None)
            else:
                pad = 0 if self.pad_token_id is None else self.pad_token_id
                answers = answer(part.masked_fill(~inside, pad), inside)
            if not fields:
                fields = tuple(field.new_zeros(*tokens.shape, *field.shape[2:]) for field in answers)
            for whole, field in zip(fields, answers, strict=True):
                whole[rows[:, None].expand_as(columns)[inside], columns[inside]] = field[inside]
        return tuple(field.to(asked) for field in fields)

    def _checked(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Which positions are visible: [B, N] bool."""
        name = type(self).__name__
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or not tokens.numel():
            raise ValueError(f"{name}: tokens must be [B, N] int64, got shape {tuple(tokens.shape)} {tokens.dtype}")
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= max(self.vocab_size, self.mask_token_id + 1):
            raise ValueError(f"{name}: tokens must lie in 0..{self.vocab_size - 1}, got {least}..{most}")
        if attention_mask is None:
            if self.pad_token_id is None or self.pad_token_id == self.mask_token_id:
                visible = torch.ones_like(tokens, dtype=torch.bool)
            else:
                visible = tokens != self.pad_token_id
        elif attention_mask.shape != tokens.shape or attention_mask.dtype != torch.bool:
            raise ValueError(
                f"{name}: attention_mask must be {tuple(tokens.shape)} bool like tokens, "
                f"got shape {tuple(attention_mask.shape)} {attention_mask.dtype}"
            )
        else:
            visible = attention_mask
        longest = int(visible.sum(dim=1).max())
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(f"{name}: a sequence may have at most {self.max_length} tokens, got {longest}")
        starts = visible & ~torch.cat([visible.new_zeros(len(visible), 1), visible[:, :-1]], dim=1)
        if bool((starts.sum(dim=1) > 1).any()):
            row = int((starts.sum(dim=1) > 1).nonzero()[0])
            end = int((~visible[row] & (starts[row].cumsum(dim=0) == 1)).nonzero()[0])
            raise ValueError(
                f"{name}: padding must be at the ends of a sequence, got some in the middle"
                f"{f' of sequence {row}' if len(tokens) > 1 else ''}, at position {end}"
            )
        return visible
