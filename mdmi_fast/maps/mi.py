"""The mutual information of one sequence: where it comes from, its pairs, and its file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.decoding.policies import MISource, Step
from mdmi_fast.decoding.policies.sources import pairwise_mi
from mdmi_fast.files import replace_file
from mdmi_fast.labels import Form, label_mi, masked_pairs
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import call_model, visible_positions

_ARRAYS = ("mi", "entropy", "tokens", "mask")


class Pair(NamedTuple):
    """Two positions, the lower one first, and their mutual information in nats."""

    first: int
    second: int
    mi: float


@dataclass(frozen=True)
class MIMap:
    """Mutual information between the masked positions of one sequence.

    Attributes:
        mi: [N, N] float32, nats; 0 on the diagonal and where an end is not masked.
        entropy: [N] float32, nats; 0 where not masked.
        tokens: [N] int64, the mask token where masked.
        mask: [N] bool, True = masked.
        labels: a name for every position.
        source: where the numbers come from, for people.
    """

    mi: Tensor
    entropy: Tensor
    tokens: Tensor
    mask: Tensor
    labels: tuple[str, ...]
    source: str

    def pairs(self, which: Tensor | None = None, *, limit: int | None = None) -> list[Pair]:
        """Masked pairs by mutual information, the largest first, ties by position.

        Args:
            which: [N, N] bool, symmetric: only these pairs. None for all.
            limit: at most that many.
        """
        wanted = masked_pairs(self.mask) if which is None else which & masked_pairs(self.mask)
        first, second = wanted.triu(1).nonzero().unbind(dim=1)
        values = strength(self.mi)[first, second]
        order = values.argsort(descending=True, stable=True)[:limit].tolist()
        return [Pair(int(first[at]), int(second[at]), float(values[at])) for at in order]

    def save(self, path: str | Path) -> None:
        """Write all fields as numpy arrays into one .npz file, which is whole or untouched."""
        arrays: dict[str, Any] = {
            **{name: getattr(self, name).numpy(force=True) for name in _ARRAYS},
            "labels": np.array(self.labels),
            "source": np.array(self.source),
        }
        with replace_file(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> MIMap:
        """Read a map back.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no map.
        """
        with Path(path).open("rb") as file:
            try:
                if not zipfile.is_zipfile(file):  # numpy would speak of pickles
                    raise ValueError("it is no .npz file")
                file.seek(0)
                arrays = np.load(file, allow_pickle=False)
                mi, entropy, tokens, mask = (torch.from_numpy(arrays[name]) for name in _ARRAYS)
                found = cls(mi, entropy, tokens, mask, tuple(arrays["labels"].tolist()), str(arrays["source"]))
                found._check()
            except Exception as error:  # numpy and zipfile raise many kinds for a file that is something else
                raise ValueError(f"{path}: not a map of mutual information: {error}") from error
        return found

    def _check(self) -> None:
        n = len(self.tokens)
        wanted = ((torch.float32, (n, n)), (torch.float32, (n,)), (torch.int64, (n,)), (torch.bool, (n,)))
        for name, (dtype, shape) in zip(_ARRAYS, wanted, strict=True):
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != shape:
                raise ValueError(f"{name} must be {shape} {dtype}, got {tuple(array.shape)} {array.dtype}")
        if len(self.labels) != n:
            raise ValueError(f"labels must be {n} like tokens, got {len(self.labels)}")
        if bool(self.mi.isnan().any() | self.entropy.isnan().any()):
            raise ValueError("it holds NaN")


def mi_map(
    model: MaskedModel,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: MISource | None = None,
    form: Form = "joint",
    epsilon: float = 0.0,
    batch_size: int = 512,
    attention_mask: Tensor | None = None,
    labels: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> MIMap:
    """The mutual information of one sequence, predicted by an estimator or probed from the model.

    Args:
        model: the frozen model.
        tokens: [N] int64.
        mask: [N] bool, True = masked; None takes the positions that hold the mask token.
        estimator: hidden [B, N, D] and mask [B, N] to mutual information [B, N, N], one pass, or another source of a
            policy's mutual information; one that needs the marginals is given them. None probes the model.
        form: reading of the probes, as for `label_mi`.
        epsilon: nats a probed entry may be wrong by, as for `label_mi`.
        batch_size: sequences in one forward pass of the probing.
        attention_mask: [N] bool, False at padding, which is in no pair; None: as for `decode`.
        labels: a name for every position; None numbers them from 0.
        progress: called with the number of probing passes just finished.

    Raises:
        ValueError: for shapes that do not fit, fewer than two masked positions, or a model that answers NaN.
    """
    if tokens.ndim != 1 or tokens.dtype != torch.int64:
        raise ValueError(f"mi_map: tokens must be [N] int64, got shape {tuple(tokens.shape)} {tokens.dtype}")
    if mask is None:
        mask = tokens == model.mask_token_id
    elif mask.shape != tokens.shape or mask.dtype != torch.bool:
        raise ValueError(f"mi_map: mask must be {tuple(tokens.shape)} bool, got {tuple(mask.shape)} {mask.dtype}")
    if attention_mask is not None:
        check.of_kind("mi_map", "attention_mask", attention_mask, torch.bool)
        check.shape("mi_map", "attention_mask", attention_mask, tokens.shape, "[N]")
        attention_mask = attention_mask.unsqueeze(0)
    shown = visible_positions("mi_map", model, tokens.unsqueeze(0), attention_mask)
    attention_mask = None if shown is None else shown[0]
    mask = mask if attention_mask is None else mask & attention_mask
    if int(mask.sum()) < 2:
        raise ValueError(f"mi_map: at least two positions must be masked, got {int(mask.sum())}")
    if labels is not None and len(labels) != len(tokens):
        raise ValueError(f"mi_map: labels must name {len(tokens)} positions, got {len(labels)}")
    tokens = tokens.masked_fill(mask, model.mask_token_id)
    if estimator is None:
        found = label_mi(
            model,
            tokens,
            mask,
            form=form,
            epsilon=epsilon,
            attention_mask=attention_mask,
            batch_size=batch_size,
            progress=progress,
        )
        mi, entropy, source = found.mi, found.entropy, f"probed, {form} form"
    else:
        with torch.no_grad():
            output = call_model("mi_map", model, tokens.unsqueeze(0), shown)
            stats = ops.token_stats(output.logits)
            step = Step(
                0,
                model=model,
                tokens=tokens.unsqueeze(0),
                logits=output.logits,
                stats=stats,
                attention_mask=shown,
            )
            mi = pairwise_mi(estimator, output.hidden, mask.unsqueeze(0), step)[0].float()
        entropy = stats.entropy[0].masked_fill(~mask, 0.0)
        source = "predicted"
    if bool(entropy.isnan().any() | mi.isnan().any()):
        broken = (entropy.isnan() | mi.isnan().any(dim=-1)).nonzero()[0]
        raise ValueError(f"mi_map: the model or the estimator answers NaN at position {int(broken)}")
    names = tuple(labels) if labels is not None else tuple(str(index) for index in range(len(tokens)))
    return MIMap(mi, entropy, tokens, mask, names, source)


def strength(mi: Tensor) -> Tensor:
    """[N, N]: the larger of both directions of each pair, the strength that thresholds and colours go by."""
    return torch.maximum(mi, mi.T)


def check_tau(owner: str, tau: float) -> None:
    """Refuse a tau below 0 or NaN."""
    if not tau >= 0:
        raise ValueError(f"{owner}: tau must be at least 0 nats, got {tau}")
