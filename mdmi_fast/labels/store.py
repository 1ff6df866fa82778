"""Labels on disk: shards that are written whole, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mdmi_fast.files import replace_file
from mdmi_fast.labels.plan import Form
from mdmi_fast.labels.probe import label_mi
from mdmi_fast.models import MaskedModel

INDEX_FILE = "labels.json"


class LabelSet(NamedTuple):
    """Labelled states of one model.

    Attributes:
        tokens: [S, N] int64, the mask token where masked.
        mask: [S, N] bool, True = masked.
        mi: [S, N, N] float32, nats.
        entropy: [S, N] float32, nats.
    """

    tokens: Tensor
    mask: Tensor
    mi: Tensor
    entropy: Tensor


def write_labels(
    model: MaskedModel,
    tokens: Tensor,
    folder: str | Path,
    *,
    form: Form = "joint",
    epsilon: float = 0.0,
    shard_size: int = 100,
    batch_size: int = 512,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Label states (masked where they hold the mask token) into a folder of shards; finished ones are kept.

    A run that was interrupted is finished by the same call; one run at a time in a folder.

    Args:
        model: the frozen model.
        tokens: [S, N] int64, the same states in every run of one folder.
        folder: where; made if it does not exist.
        form: as for `label_mi`.
        epsilon: nats, as for `label_mi`.
        shard_size: states a file.
        batch_size: sequences in one forward pass.
        provenance: what a reader should know of the states and the model, as JSON can hold it; kept in the index.
        progress: called with the number of states just finished, those of earlier runs included.

    Returns:
        The forward passes of this run.

    Raises:
        ValueError: if there are no states, or the folder holds labels made with other settings or of other states.
    """
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or not len(tokens):
        raise ValueError(f"write_labels: tokens must be [S, N] int64, S >= 1, got {tuple(tokens.shape)} {tokens.dtype}")
    if shard_size < 1:
        raise ValueError(f"write_labels: shard_size must be at least 1, got {shard_size}")
    folder = Path(folder)
    settings: dict[str, Any] = {
        "form": form,
        "epsilon": epsilon,
        "shard_size": shard_size,
        "states": list(tokens.shape),
        "fingerprint": _fingerprint(tokens),
        "provenance": provenance or {},
    }
    text = json.dumps(settings, indent=2) + "\n"
    index = folder / INDEX_FILE
    if index.exists():
        kept, asked = _read_index(folder), json.loads(text)
        if kept != asked:
            changed = [key for key in asked if kept.get(key) != asked[key]]
            raise ValueError(f"{folder}: holds labels made with another {', '.join(changed)}; choose another folder")
        for leftover in folder.glob(".labels*"):
            leftover.unlink()
    else:
        with replace_file(index) as temporary:
            temporary.write_text(text)
    passes = 0
    for number, part in enumerate(tokens.split(shard_size)):
        path = _shard(folder, number)
        if not path.exists():
            labels = label_mi(model, part, form=form, epsilon=epsilon, batch_size=batch_size)
            passes += int(labels.passes.sum())
            with replace_file(path) as temporary:
                save_file(
                    {"tokens": part.contiguous(), "mi": labels.mi.contiguous(), "entropy": labels.entropy.contiguous()},
                    temporary,
                )
        if progress is not None:
            progress(len(part))
    return passes


def read_labels(folder: str | Path, *, mask_token_id: int) -> LabelSet:
    """Read a folder of labels.

    Args:
        folder: as `write_labels` filled it.
        mask_token_id: the model's.

    Returns:
        All states, in the order they were given.

    Raises:
        FileNotFoundError: if it holds no labels.
        ValueError: if a shard is missing (the run was interrupted: run it again) or damaged.
    """
    folder = Path(folder)
    settings = _read_index(folder)
    count = -(-settings["states"][0] // settings["shard_size"])
    shards = []
    for number in range(count):
        path = _shard(folder, number)
        if not path.exists():
            raise ValueError(
                f"{folder}: {path.name} of {count} shards is missing; run the labelling again to finish it"
            )
        try:
            shard = load_file(path)
            shards.append([shard[key] for key in ("tokens", "mi", "entropy")])
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path}: damaged ({error}); delete it and run the labelling again") from error
    tokens, mi, entropy = (torch.cat(field) for field in zip(*shards, strict=True))
    if _fingerprint(tokens) != settings["fingerprint"]:
        raise ValueError(f"{folder}: the shards hold other states than {INDEX_FILE} says; label into an empty folder")
    return LabelSet(tokens, tokens == mask_token_id, mi, entropy)


def _shard(folder: Path, number: int) -> Path:
    return folder / f"labels-{number:05d}.safetensors"


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_FILE
    try:
        settings: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: holds no labels ({INDEX_FILE} is missing)") from None
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    if not isinstance(settings, dict) or not {"states", "shard_size", "fingerprint"} <= settings.keys():
        raise ValueError(f"{path}: damaged: not the index of a folder of labels")
    return settings


def _fingerprint(tokens: Tensor) -> int:
    """A number that changes with any token, so that a resumed run notices other states."""
    weight = torch.arange(1, tokens.numel() + 1, dtype=torch.int64)
    return int(((tokens.cpu().flatten() + 1) * (weight * 2654435761 + 1)).sum())
