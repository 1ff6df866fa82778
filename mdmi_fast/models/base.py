"""What this library asks of a masked model, and nothing more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from mdmi_fast.ops import TokenStats


class MaskedOutput(NamedTuple):
    """What a masked model says about a batch.

    Attributes:
        logits: [B, N, V] float; a token that can never stand there has the logit -inf.
        hidden: [B, N, D] float; the state an estimator reads. It must tell positions apart: a network that treats
            all positions alike has to join what it knows of the position to the state.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


class AttentiveOutput(MaskedOutput):
    """A `MaskedOutput` that also carries the attention between positions.

    Attributes:
        attention: [B, N, N] float, how much position i looks at j, averaged over heads and late layers; 0 at padding.
    """

    attention: torch.Tensor

    def __new__(cls, logits: torch.Tensor, hidden: torch.Tensor, attention: torch.Tensor) -> AttentiveOutput:
        output = super().__new__(cls, logits, hidden)
        output.attention = attention
        return output


@runtime_checkable
class MaskedModel(Protocol):
    """A frozen network that gives a marginal for every position, given the visible ones.

    Attributes:
        mask_token_id: the token that stands where nothing is known yet.
        vocab_size: V, the last dimension of the logits.
        hidden_size: D, the last dimension of the hidden state.
    """

    mask_token_id: int
    vocab_size: int
    hidden_size: int

    def __call__(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> MaskedOutput:
        """Run the network on tokens [B, N] int64; attention_mask [B, N] bool is False at padding."""
        ...


class StatsOutput(NamedTuple):
    """What a policy needs of a pass, made without the logits.

    Attributes:
        stats: every field [B, N].
        hidden: [B, N, D].
    """

    stats: TokenStats
    hidden: torch.Tensor


@runtime_checkable
class StatsModel(Protocol):
    """The optional ability of a `MaskedModel` to give the statistics of logits without holding these."""

    def token_stats(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> StatsOutput:
        """What `ops.token_stats` says of the logits of the call with the same arguments."""
        ...


@runtime_checkable
class InterchangeableModel(Protocol):
    """A `MaskedModel` some of whose tokens mean the same: relabelling them in its input relabels its answer.

    Attributes:
        interchangeable_tokens: those; labelling probes one of them for all that do not stand in the sequence yet.
    """

    @property
    def interchangeable_tokens(self) -> Iterable[int]: ...


@runtime_checkable
class PaddedModel(Protocol):
    """The optional ability of a `MaskedModel` to know its padding."""

    def visible(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where tokens [B, N] int64 without an attention mask are not padding: [B, N] bool."""
        ...


@runtime_checkable
class RestrictedModel(Protocol):
    """A `MaskedModel` that says which tokens it never writes.

    Attributes:
        forbidden_tokens: tokens whose logits are -inf.
    """

    @property
    def forbidden_tokens(self) -> Iterable[int]: ...


@runtime_checkable
class PermittingModel(Protocol):
    """The optional ability of a `RestrictedModel` to write some of its forbidden tokens when asked."""

    def permitting(self, tokens: Iterable[int]) -> MaskedModel:
        """The same model, of the same weights, whose logits of these tokens are the network's own."""
        ...


@runtime_checkable
class CheckingModel(Protocol):
    """The optional ability of a `MaskedModel` to tell beforehand what it cannot run."""

    def check(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> None:
        """Raise the ValueError of the call on tokens [B, N] int64 and attention_mask [B, N] bool, without running it."""
        ...
