"""Which states an estimator has seen: a fingerprint of each goes into its file, so that it can be judged on others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mdmi_fast import checks as check

_TRAINED, _HELD_OUT = "seen.trained", "seen.held_out"


class State(Protocol):
    """What a fingerprint is taken of."""

    @property
    def tokens(self) -> Tensor:
        """[N] int64, the mask token where masked."""
        ...

    @property
    def positions(self) -> Tensor:
        """[M] int64, the masked positions."""
        ...


class SeenStates(NamedTuple):
    """Fingerprints of the states that an estimator has met in training.

    Attributes:
        trained: [T] int64, ascending, of states whose labels it was fitted to.
        held_out: [H] int64, ascending, of states it was never fitted to, but which chose the epoch that was kept.
        complete: whether these are all; False after a training from which nothing was recorded.
    """

    trained: Tensor
    held_out: Tensor
    complete: bool

    @classmethod
    def none(cls, *, complete: bool) -> SeenStates:
        """No state on record."""
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        return cls(nothing, nothing, complete)

    def after(self, trained: Tensor, held_out: Tensor) -> SeenStates:
        """The record after one more training, on states of these fingerprints."""
        fitted = torch.cat([self.trained, trained]).unique()
        chose = torch.cat([self.held_out, held_out]).unique()
        return SeenStates(fitted, chose[~torch.isin(chose, fitted)], self.complete)

    def tensors(self) -> dict[str, Tensor]:
        """What goes into a file beside the weights, 8 bytes a state."""
        return {_TRAINED: self.trained, _HELD_OUT: self.held_out}

    def summary(self) -> dict[str, Any]:
        """What goes into the configuration."""
        return {"trained": len(self.trained), "held_out": len(self.held_out), "complete": self.complete}

    @classmethod
    def taken_from(cls, tensors: dict[str, Tensor], summary: Mapping[str, Any] | None) -> SeenStates:
        """Take the record out of the tensors of a file; an incomplete one without states where there is none.

        Raises:
            ValueError: if tensors and summary do not belong together.
        """
        if summary is None:
            return cls.none(complete=False)
        trained, held_out = (tensors.pop(name, None) for name in (_TRAINED, _HELD_OUT))
        if trained is None or held_out is None or not isinstance(summary, Mapping):
            raise ValueError(f"the record of the states seen is damaged: {summary!r}")
        seen = cls(trained, held_out, complete=bool(summary.get("complete")))
        if seen.summary() != summary:
            raise ValueError(f"the weights record as states seen {seen.summary()}, the configuration {summary}")
        return seen


def fingerprints(states: Iterable[State], pad: int | None) -> Tensor:
    """A number for each state: the same for the same tokens and masked positions, on any machine.

    Args:
        states: of any lengths, dtypes and order of positions.
        pad: the model's padding token, which does not count at either end; None: it has none.

    Returns:
        [S] int64, the first 8 bytes of BLAKE2b. Among 100,000 states the chance of two alike is below 1e-9.
    """
    return torch.tensor([_fingerprint(state, pad) for state in states], dtype=torch.int64, device="cpu")


def padding_of(model: object) -> int | None:
    """The padding token of a model that names one."""
    pad: int | None = check.attribute(model, "pad_token_id")
    return pad


def _fingerprint(state: State, pad: int | None) -> int:
    tokens = state.tokens.to("cpu", torch.int64)
    masked = torch.zeros(tokens.shape, dtype=torch.int64, device="cpu")
    masked[state.positions.cpu()] = 1
    both = torch.stack([tokens, masked])
    if pad is not None:
        inside = ((tokens != pad) | (masked == 1)).nonzero().flatten()
        both = both[:, inside[0] : inside[-1] + 1] if len(inside) else both[:, :0]
    digest = hashlib.blake2b(both.numpy().astype("<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
