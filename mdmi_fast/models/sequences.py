"""What every network over token sequences shares: padding, batches, tokens that are never decoded.

A library that decodes has to give a sequence the same tokens in every batch. A network does not: its matrix products
add in another order when their shape changes, or even the place of a row in it, and logits move by some 1e-5
(`benchmarks/batch_invariance.py`). So a network here is run on one sequence at a time, cut out of its padding, unless
the caller gives that up for speed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Self

from mdmi_fast import checks as check
from mdmi_fast._moved import renamed
from mdmi_fast.models.base import MaskedOutput
from mdmi_fast.models.call import check_flag, check_tokens, evaluating, token_list


class SequenceModel(nn.Module):
    """A frozen network as a `MaskedModel`. A subclass says how the network is called (`run`).

    A network in training mode answers as in evaluation mode; the mode itself is left alone.

    Args:
        vocab_size: V.
        hidden_size: D.
        mask_token_id: may lie outside of the logits' vocabulary.
        pad_token_id: what padding is, or None. Without an attention mask every pad token counts as padding.
        pad_is_text: the pad token also has a meaning, such as the end of a text: then only an attention mask says what
            padding is.
        forbidden_tokens: tokens that are never decoded: their logit is -inf. The mask token always is one of them.
        max_length: most tokens of a sequence, None for no limit.
        batch_invariant: False runs a batch at once, padded on the right: faster for small networks and on GPUs, but
            an answer then depends on the batch by some 1e-5 of logits. Where a network's answer depends on the padding
            itself, sequences of one length are run at once.

    Raises:
        TypeError: for arguments of another kind.
        ValueError: for numbers out of range.
    """

    @renamed(never="forbidden_tokens")
    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        mask_token_id: int,
        pad_token_id: int | None = None,
        pad_is_text: bool = False,
        forbidden_tokens: Iterable[int] = (),
        max_length: int | None = None,
        batch_invariant: bool = True,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.vocab_size = check.whole(name, "vocab_size", vocab_size, 1)
        self.hidden_size = check.whole(name, "hidden_size", hidden_size, 1)
        self.mask_token_id = check.whole(name, "mask_token_id", mask_token_id, 0)
        self.pad_token_id = None if pad_token_id is None else check.whole(name, "pad_token_id", pad_token_id, -(2**63))
        self.max_length = None if max_length is None else check.whole(name, "max_length", max_length, 1)
        # No plain attributes: those tell models apart (`identity`), and labels of either way are of one model.
        self._batch_invariant = check_flag(name, "batch_invariant", batch_invariant)
        self._pad_is_text = check_flag(name, "pad_is_text", pad_is_text)
        unwanted = set(token_list(name, "forbidden_tokens", forbidden_tokens, vocab_size))
        unwanted |= {mask_token_id} if mask_token_id < vocab_size else set()
        # Under the name that is part of the fingerprints in saved estimators and labels.
        self.never: Tensor
        self.register_buffer("never", torch.tensor(sorted(unwanted), dtype=torch.int64, device="cpu"), persistent=False)

    @property
    def forbidden_tokens(self) -> Tensor:
        """[K] int64, the tokens whose logit is -inf."""
        return self.never

    @property
    def batch_invariant(self) -> bool:
        return self._batch_invariant

    def permitting(self, tokens: Iterable[int]) -> Self:
        """The same model, of the same network, that may write some of the `forbidden_tokens`.

        Raises:
            ValueError: for the mask token, and for what is no token.
        """
        name = type(self).__name__
        wanted = token_list(name, "tokens", tokens, self.vocab_size)
        if self.mask_token_id in wanted:
            raise ValueError(f"{name}: tokens must be others than the mask token {self.mask_token_id}, got {wanted}")
        other = copy.copy(self)
        left = ~torch.isin(self.never, torch.tensor(wanted, dtype=torch.int64, device=self.never.device))
        other._buffers = {**self._buffers, "never": self.never[left]}
        return other

    def visible(self, tokens: Tensor) -> Tensor:
        """Which positions of tokens [B, N] are not padding, as far as the tokens tell: [B, N] bool."""
        if self.pad_token_id is None or self.pad_token_id == self.mask_token_id or self._pad_is_text:
            return torch.ones_like(tokens, dtype=torch.bool)
        return tokens != self.pad_token_id

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
            attention_mask: [B, N] bool, False at padding, on either side or both; None: see `visible`.

        Returns:
            logits [B, N, V], -inf at tokens that are never decoded, and hidden [B, N, D]; both 0 at padding, and on
            the device of the tokens.

        Raises:
            TypeError: for what is no tensor.
            ValueError: for other shapes or dtypes, tokens outside of the vocabulary, a sequence that is too long, an
                attention mask with gaps, or a network that does not answer for every position.
        """

        def answer(part: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
            logits, hidden = self.run(part, visible)
            return logits.index_fill(-1, self.forbidden_tokens, -torch.inf), hidden

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
        visible = self._checked(tokens, attention_mask).to(self.never.device)
        asked, tokens = tokens.device, tokens.to(self.never.device)
        lengths = visible.sum(dim=1)
        first = visible.int().argmax(dim=1)
        fields: tuple[Tensor, ...] = ()
        with evaluating(self):
            for rows in self._batches(lengths):
                # A sequence of nothing but padding runs as one pad token, whose answer is not kept.
                places = torch.arange(max(int(lengths[rows].max()), 1), device=tokens.device)
                inside = places < lengths[rows, None]
                columns = (first[rows, None] + places).clamp(max=tokens.shape[1] - 1)
                part = tokens[rows[:, None], columns]
                if bool(inside.all()):
                    answers = answer(part, None)
                else:
                    answers = answer(part.masked_fill(~inside, self._filler), inside)
                self._check_answers(answers, part)
                if not fields:
                    fields = tuple(field.new_zeros(*tokens.shape, *field.shape[2:]) for field in answers)
                for whole, field in zip(fields, answers, strict=True):
                    whole[rows[:, None].expand_as(columns)[inside], columns[inside]] = field[inside]
        return tuple(field.to(asked) for field in fields)

    def _batches(self, lengths: Tensor) -> Sequence[Tensor]:
        """The rows that run together."""
        every = torch.arange(len(lengths), device=lengths.device)
        if self.batch_invariant:
            return [row.unsqueeze(0) for row in every]
        present = lengths.unique()
        if len(present) == 1 or self._ignores_padding:
            return (every,)
        return [every[lengths == length] for length in present]

    @property
    def _filler(self) -> int:
        """What stands at padding within a batch."""
        return self.pad_token_id if self.pad_token_id is not None and 0 <= self.pad_token_id < self.vocab_size else 0

    @functools.cached_property
    def _ignores_padding(self) -> bool:
        """Whether the network answers a sequence alike with padding behind it, up to rounding."""
        text = next(token for token in range(3) if token not in (self.mask_token_id, self._filler))
        tokens = torch.tensor([[text, self.mask_token_id] * 2], device=self.never.device)
        padded = torch.cat([tokens, torch.full_like(tokens, self._filler)], dim=1)
        try:
            alone, _ = self.run(tokens, None)
            beside, _ = self.run(padded, torch.arange(8, device=tokens.device).unsqueeze(0) < 4)
        except (TypeError, ValueError, RuntimeError, IndexError, AssertionError):  # a network that refuses the mask
            return False
        tolerance = 1e-4 if alone.dtype.itemsize >= 4 else 2e-2  # two orders of the same sums
        return bool((alone - beside[:, :4]).abs().max() <= tolerance * alone.abs().max())

    def _check_answers(self, answers: Sequence[Tensor], tokens: Tensor) -> None:
        for field in answers:
            if field.shape[:2] != tokens.shape:
                raise ValueError(
                    f"{type(self).__name__}: the network must answer for every position of tokens "
                    f"{tuple(tokens.shape)}, got {check.describe(field)}"
                )

    def _checked(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Which positions are visible: [B, N] bool."""
        name = type(self).__name__
        check_tokens(name, tokens, attention_mask)
        if not tokens.numel():
            raise ValueError(f"{name}: tokens must be [B, N] with B and N at least 1, got {check.describe(tokens)}")
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= max(self.vocab_size, self.mask_token_id + 1):
            raise ValueError(f"{name}: tokens must lie in 0..{self.vocab_size - 1}, got {least}..{most}")
        visible = self.visible(tokens) if attention_mask is None else attention_mask
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


def check_layers(owner: str, layers: int | Sequence[int]) -> tuple[int, ...]:
    """One or several numbers of layers as a tuple.

    Raises:
        TypeError: for what are no integers.
    """
    chosen = (layers,) if isinstance(layers, int | str) or not isinstance(layers, Iterable) else tuple(layers)
    for layer in chosen:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"{owner}: layers must be a number or several, got {check.describe(layer)}")
    return chosen
