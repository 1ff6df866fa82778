"""A shard of labels: states packed into tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast.labels.options import Form
from mdmi_fast.labels.results import Probe


class LabelledState(NamedTuple):
    """One labelled state, its masked pairs packed.

    Attributes:
        tokens: [N] int64, the mask token where masked.
        positions: [M] int64, the masked positions.
        entropy: [M] float32, nats.
        pairs: [Q, 2] int64, positions i < j of the pairs that were asked for.
        mi: form -> [Q] float32, nats.
        bound: form -> [Q] float32, the most that an entry differs from full probing.
        standard_error: form -> [Q] float32, of entries that rest on values drawn at random; 0 elsewhere.
        hidden: [M, D] float32, the hidden states of the masked positions, if the folder keeps them.
        passes: forward passes.
    """

    tokens: Tensor
    positions: Tensor
    entropy: Tensor
    pairs: Tensor
    mi: dict[Form, Tensor]
    bound: dict[Form, Tensor]
    standard_error: dict[Form, Tensor]
    hidden: Tensor | None
    passes: int

    def dense(self, form: Form) -> Tensor:
        """[N, N] float32, symmetric, 0 where there is no label."""
        matrix = self.mi[form].new_zeros(len(self.tokens), len(self.tokens))
        first, second = self.pairs.unbind(dim=1)
        matrix[first, second] = matrix[second, first] = self.mi[form]
        return matrix


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"labels-{number:05d}.safetensors"


def _pair_index(positions: Tensor, window: int | None) -> Tensor:
    """Pairs [Q, 2] of masked positions i < j, at most `window` apart: the order in which a shard holds them."""
    first, second = torch.triu_indices(len(positions), len(positions), offset=1, device="cpu")
    pairs = torch.stack([positions[first], positions[second]], dim=1)
    return pairs if window is None else pairs[pairs[:, 1] - pairs[:, 0] <= min(window, torch.iinfo(pairs.dtype).max)]


def unpack(tokens: Tensor, probe: Probe, *, hidden: bool, window: int | None) -> list[LabelledState]:
    """A batch state by state, on the CPU."""
    labels = {form: probe.labels(form) for form in probe.directed}
    found = []
    for row in range(len(tokens)):
        positions = probe.mask[row].nonzero().squeeze(-1).cpu()
        pairs = _pair_index(positions, window)
        first, second = pairs.unbind(dim=1)
        mi, bound, error = (
            {form: getattr(each, field)[row].cpu()[first, second] for form, each in labels.items()}
            for field in ("mi", "bound", "standard_error")
        )
        states = probe.hidden[row].float().cpu()[positions] if hidden else None
        entropy, passes = probe.entropy[row].cpu()[positions], int(probe.passes[row])
        found.append(LabelledState(tokens[row].cpu(), positions, entropy, pairs, mi, bound, error, states, passes))
    return found


def pack(states: Sequence[LabelledState]) -> dict[str, Tensor]:
    """A shard: every field of its states, one state after the other."""
    shard = {
        "lengths": torch.tensor([len(state.tokens) for state in states], dtype=torch.int32, device="cpu"),
        "masked": torch.tensor([len(state.positions) for state in states], dtype=torch.int32, device="cpu"),
        "passes": torch.tensor([state.passes for state in states], device="cpu"),
        "tokens": torch.cat([state.tokens for state in states]).int(),
        "positions": torch.cat([state.positions for state in states]).int(),
        "entropy": torch.cat([state.entropy for state in states]),
    }
    for field in ("mi", "bound", "standard_error"):
        for form in states[0].mi:
            shard[f"{field}.{form}"] = torch.cat([getattr(state, field)[form] for state in states])
    if states[0].hidden is not None:
        shard["hidden"] = torch.cat([state.hidden for state in states if state.hidden is not None])
    return shard


def read_shard(shard: dict[str, Tensor], settings: dict[str, Any]) -> Iterator[LabelledState]:
    """The states that `pack` put together."""
    masked = shard["masked"].tolist()
    positions = shard["positions"].long().split(masked)
    pairs = [_pair_index(each, settings["window"]) for each in positions]
    sizes = [len(each) for each in pairs]
    per_pair = {
        field: {form: shard[f"{field}.{form}"].split(sizes) for form in settings["forms"]}
        for field in ("mi", "bound", "standard_error")
    }
    hidden = shard["hidden"].split(masked) if "hidden" in shard else [None] * len(masked)
    tokens = shard["tokens"].long().split(shard["lengths"].tolist())
    for state, own in zip(tokens, positions, strict=True):
        if len(own) and not 0 <= int(own.min()) <= int(own.max()) < len(state):
            raise ValueError("a masked position lies outside of its sequence")
    entropy, passes = shard["entropy"].split(masked), shard["passes"].tolist()
    for row in range(len(masked)):
        mi, bound, error = ({form: parts[row] for form, parts in forms.items()} for forms in per_pair.values())
        yield LabelledState(
            tokens[row], positions[row], entropy[row], pairs[row], mi, bound, error, hidden[row], passes[row]
        )
