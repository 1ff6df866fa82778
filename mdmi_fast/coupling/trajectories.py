"""Sequences decoded one position a pass: what a model says before and after every token it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding import Random, Sequential, decode
from mdmi_fast.files import replace_file
from mdmi_fast.models import MaskedModel

_AT_ONCE = 256
"""Sequences of one batch."""


class Trajectories(NamedTuple):
    """How sequences came to be, from which every state on the way can be made again.

    Attributes:
        tokens: [W, N] int64, the finished sequences.
        order: [W, N] int64, the pass in which a position was written, counted from 0; -1 where it was given.
        mask_token_id: of the model.
    """

    tokens: Tensor
    order: Tensor
    mask_token_id: int

    def states(self, rows: Tensor, passes: Tensor) -> Tensor:
        """The states [R, N] of sequences rows [R] before their passes [R]."""
        unwritten = self.order[rows] >= passes.unsqueeze(-1)
        return self.tokens[rows].masked_fill(unwritten, self.mask_token_id)

    @property
    def lengths(self) -> Tensor:
        """[W] int64, passes of every sequence."""
        return self.order.amax(dim=-1) + 1

    def of(self, rows: Tensor) -> Trajectories:
        """Some of the sequences."""
        return Trajectories(self.tokens[rows], self.order[rows], self.mask_token_id)

    def save(self, path: str | Path) -> None:
        """Write all of it into one safetensors file, whole or not at all.

        Raises:
            OSError: if it cannot be written.
        """
        with replace_file(Path(path)) as temporary:
            metadata = {"mask_token_id": str(self.mask_token_id)}
            save_file({"tokens": self.tokens, "order": self.order}, temporary, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Trajectories:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it holds something else.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"Trajectories.load: no file {path}")
        try:
            with safe_open(path, "pt") as file:
                mask = int((file.metadata() or {})["mask_token_id"])
                found = cls(file.get_tensor("tokens"), file.get_tensor("order"), mask)
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: holds no trajectories: {error}") from None
        _check("Trajectories.load", found)
        return found


def _check(owner: str, trajectories: Trajectories) -> None:
    tokens, order, _ = trajectories
    for name, x in (("tokens", tokens), ("order", order)):
        check.of_kind(owner, name, x, torch.int64)
    if tokens.ndim != 2 or tokens.shape != order.shape:
        raise ValueError(
            f"{owner}: tokens and order must be [W, N], got {check.describe(tokens)} and {check.describe(order)}"
        )


def draw_trajectories(
    model: MaskedModel,
    tokens: Tensor,
    *,
    order: Literal["random", "entropy"] = "random",
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Trajectories:
    """Fill sequences one position a pass, and keep the order.

    Args:
        model: whose trajectories they are.
        tokens: [W, N] int64, masked where the model is to write. Many sequences are wanted rather than long ones: a
            thousand of 64 letters make a coupling of text.
        order: in which positions are written: at random, or by entropy, the lowest first, as policies do; a coupling is good
            at states like those it was trained on.
        temperature: of the draws, above 0; a coupling is for this one and those near it.
        generator: where seeds come from; None: torch's own.

    Raises:
        TypeError: as `decode`.
        ValueError: as `decode`, or if a sequence has nothing to fill, order is something else or temperature is 0.
    """
    masked = tokens == model.mask_token_id
    if tokens.ndim != 2 or not bool(masked.any(dim=-1).all()):
        raise ValueError("draw_trajectories: tokens must be [W, N] with a masked position in every sequence")
    check.one_of("draw_trajectories", "order", order, ("random", "entropy"))
    if temperature == 0:
        raise ValueError("draw_trajectories: temperature must be above 0: without draws nothing depends on them")
    filled, written = [], []
    for part in tokens.split(_AT_ONCE):
        policy = Random(1) if order == "random" else Sequential()
        result: Any = decode(model, part, policy, temperature=temperature, generator=generator, trace=True)
        own = torch.full_like(part, -1)
        for record in result.trace:
            row, position = record.selected.nonzero(as_tuple=True)
            own[record.sequences[row], position] = record.step
        filled.append(result.tokens)
        written.append(own)
    return Trajectories(torch.cat(filled), torch.cat(written), model.mask_token_id)
