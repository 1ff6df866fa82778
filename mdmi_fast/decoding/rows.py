"""The sequences of a decode that are not finished, and what a pass of the model shows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.randomness import places
from mdmi_fast.decoding.vocabulary import Vocabulary
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import call_model, call_token_stats
from mdmi_fast.ops import TokenStats


@dataclass(frozen=True)
class Active:
    """The sequences still being decoded, every field with one row for each.

    Attributes:
        sequence: [R] int64, their numbers in the batch.
        tokens: [R, N] int64.
        asked: [R, N] bool, what was masked at the start.
        masked: [R, N] bool, what is masked now.
        place: [R, N] int64, the number of a position in its own sequence.
        seeds: [R] int64.
        visible: [R, N] bool, False at padding; None: no padding.
        passes: [R] int64, so far.
        confidence: [R, N] float32, of what was written, when it was written.
        revised: [R, N] int32, how often a position was masked again.
    """

    sequence: Tensor
    tokens: Tensor
    asked: Tensor
    masked: Tensor
    place: Tensor
    seeds: Tensor
    visible: Tensor | None
    passes: Tensor
    confidence: Tensor
    revised: Tensor

    @classmethod
    def at_start(cls, tokens: Tensor, asked: Tensor, visible: Tensor | None, seeds: Tensor) -> Active:
        """All sequences of a batch, of which nothing has been decoded."""
        return cls(
            sequence=torch.arange(len(tokens), device=tokens.device),
            tokens=tokens.clone(),
            asked=asked,
            masked=asked,
            place=places(tokens, visible).expand_as(tokens),
            seeds=seeds,
            visible=visible,
            passes=torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device),
            confidence=torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device),
            revised=torch.zeros(tokens.shape, dtype=torch.int32, device=tokens.device),
        )

    def of(self, rows: Tensor) -> Active:
        """Some of the sequences."""
        fields: dict[str, Any] = {name: None if x is None else x[rows] for name, x in vars(self).items()}
        return Active(**fields)

    def first_block(self, size: int | None) -> Tensor:
        """[R, N] bool: what is masked in the first block that has something masked; without a size, all that is."""
        if size is None:
            return self.masked
        beyond = torch.iinfo(torch.int64).max
        start = self.place.masked_fill(~self.asked, beyond).amin(dim=-1, keepdim=True)
        block = (self.place - start) // size
        return self.masked & (block == block.masked_fill(~self.masked, beyond).amin(dim=-1, keepdim=True))


class PassOutput(NamedTuple):
    """What a pass shows.

    Attributes:
        logits: [R, N, V], as the model gave them; None if it was asked for statistics.
        stats: every field [R, N], of what may be written.
        hidden: [R, N, D].
        attention: [R, N, N], or None.
    """

    logits: Tensor | None
    stats: TokenStats
    hidden: Tensor
    attention: Tensor | None


class Forward(NamedTuple):
    """The model, with what may be written, and its way to statistics without logits where that is gone."""

    model: MaskedModel
    vocabulary: Vocabulary
    has_stats: bool

    def __call__(self, active: Active, tokens: Tensor, mask: Tensor) -> PassOutput:
        """Run the model on tokens [R, N].

        Raises:
            TypeError: as `call_model`.
            ValueError: likewise, or for logits that give no distribution where mask [R, N] is True.
        """
        if self.has_stats:
            output: Any = call_token_stats("decode", self.model, tokens, active.visible)
            logits, stats = None, output.stats
            foreign = ((stats.token < 0) | (stats.token >= self.model.vocab_size)) & mask
            if bool(foreign.any()):
                raise ValueError(
                    f"decode: token of {type(self.model).__name__} must lie in 0..{self.model.vocab_size - 1}, "
                    f"got {int(stats.token[foreign][0])}"
                )
        else:
            output = call_model("decode", self.model, tokens, active.visible)
            logits, stats = output.logits, self.vocabulary.stats(output.logits, active.sequence)
        broken = stats.entropy.isnan() & mask
        if bool(broken.any()):
            row, position = broken.nonzero()[0].tolist()
            raise ValueError(
                f"decode: the model's logits at sequence {int(active.sequence[row])}, position {position} give no "
                "distribution (NaN, +inf, or -inf for every token that may be written)"
            )
        return PassOutput(logits, stats, output.hidden, check.attribute(output, "attention"))
