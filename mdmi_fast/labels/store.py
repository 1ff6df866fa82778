"""Labels on disk: shards that are written whole, so that an interrupted run goes on where it was.

A folder holds `labels.json`, which says of which model, with which settings and of which sequences the labels are, and
`labels-NNNNN.safetensors`, each of so many sequences. A shard is whole or absent and depends on nothing but those
settings, so several processes may fill one folder: each makes every n-th shard, and whoever is lost costs the shard it
was at. Nothing is exchanged between them.

Sequences of one shard that have the same length are labelled together: nothing needs padding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mdmi_fast import __version__
from mdmi_fast.files import check_folder, read_json, replace_file
from mdmi_fast.labels.forward import Forward, Precision
from mdmi_fast.labels.masking import Masking
from mdmi_fast.labels.options import FORMS, Directions, Form, ProbeOptions
from mdmi_fast.labels.probe import probe_mi
from mdmi_fast.labels.shards import LabelledState, pack, read_shard, shard_path, unpack
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.identity import describe_model, differences, layer_of, tensors_of

INDEX_FILE = "labels.json"


class SequenceError(ValueError):
    """A sequence that cannot be labelled: its `number`, from 0, and the `reason`."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.number, self.reason = number, reason

    def __str__(self) -> str:
        return f"write_labels: sequence {self.number} cannot be labelled: {self.reason}"


class LabelSet(NamedTuple):
    """Labelled states of one model and one length.

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
    tokens: Tensor | Sequence[Tensor],
    folder: str | Path,
    *,
    forms: Sequence[Form] = ("joint",),
    epsilon: float = 0.0,
    directions: Directions = "both",
    window: int | None = None,
    samples: int | None = None,
    masking: Masking | None = None,
    seed: int = 0,
    hidden: bool = False,
    shard_size: int = 100,
    batch_tokens: int = 1 << 16,
    precision: Precision = "fp32",
    rank: int = 0,
    world_size: int = 1,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Label states (masked where they hold the mask token) into a folder of shards; finished ones are kept.

    A run that was interrupted is finished by the same call.

    Args:
        model: the frozen model; tokens are moved to the device of its parameters.
        tokens: [S, N] int64, or S tensors [N] of any lengths; the same in every run of one folder.
        folder: where; made if it does not exist.
        forms: the readings to keep, of one run of probes.
        epsilon: nats that an entry of each of these forms may be wrong by, as all that follows as for `probe_mi`.
        directions: "both" ends of a pair are read, or "one" where that saves passes.
        window: only pairs at most so many positions apart.
        samples: draw so many values where more are needed.
        masking: how to mask the sequences, which then hold no mask token; None: they are states.
        seed: of the masking and of the samples.
        hidden: keep the hidden states of masked positions.
        shard_size: sequences a file.
        batch_tokens: tokens of one forward pass; halved when memory runs out.
        precision: of the forward pass, "fp32" or "bf16".
        rank: which one this is of the processes that fill the folder.
        world_size: how many they are.
        provenance: what a reader should know of the sequences and the model, as JSON can hold it; kept in the index.
        progress: called with the number of sequences just finished by this process, those of earlier runs included.

    Returns:
        The forward passes of this run and process, those of the masking not counted.

    Raises:
        ValueError: if there are no sequences, a number is out of range, sequences to be masked hold the mask token, or the
            folder holds labels made with other settings, of another model or of other sequences. SequenceError, which is
            one, names the sequence that a model refuses; finished shards stay.
        OSError: if the folder cannot be made or written.

    Numerics:
        The same settings give the same bytes on any number of processes and after any interruption, if the model's
        answers do not depend on the batch and a batch holds all values of a position.
    """
    sequences = list(tokens)
    _check_sequences(sequences, None if masking is None else model.mask_token_id)
    if not forms or any(form not in FORMS for form in forms):
        raise ValueError(f"write_labels: forms must be some of {', '.join(FORMS)}, got {forms!r}")
    if min(shard_size, batch_tokens, world_size) < 1 or not 0 <= rank < world_size:
        raise ValueError(
            "write_labels: shard_size, batch_tokens and world_size must be at least 1 and rank below world_size, "
            f"got {shard_size}, {batch_tokens}, {world_size} and {rank}"
        )
    options = ProbeOptions(forms, epsilon, directions, window, samples, seed, precision)
    folder = Path(folder)
    check_folder(folder)
    settings: dict[str, Any] = {
        "model": describe_model(model),
        "layer": layer_of(model),
        **asdict(options),
        "masking": repr(masking) if masking is not None else None,
        "hidden": hidden,
        "shard_size": shard_size,
        "sequences": len(sequences),
        "fingerprint": _fingerprint(sequences),
        "versions": {"mdmi_fast": __version__, "torch": version("torch")},
        "provenance": provenance or {},
    }
    _open(folder, settings)
    forward = Forward(model, batch_tokens, precision)
    device = next((x.device for x in tensors_of(model).values()), torch.device("cpu"))

    def label(batch: Tensor, numbers: Sequence[int]) -> list[LabelledState]:
        batch = (batch.pin_memory() if device.type == "cuda" else batch).to(device, non_blocking=True)
        if masking is not None:
            batch = masking(model, batch, [_seed(seed, number) for number in numbers])
        probe = probe_mi(
            forward,
            batch,
            forms=options.forms,
            epsilon=options.epsilon,
            directions=options.directions,
            window=options.window,
            samples=options.samples,
            seed=options.seed,
        )
        return unpack(batch, probe, hidden=hidden, window=window)

    passes = 0
    for shard in range(rank, -(-len(sequences) // shard_size), world_size):
        numbers = range(shard * shard_size, min((shard + 1) * shard_size, len(sequences)))
        path = shard_path(folder, shard)
        for leftover in folder.glob(f".{path.name}.*"):
            leftover.unlink()
        if not path.exists():
            states = _label_by_length(sequences, numbers, forward, label)
            passes += sum(state.passes for state in states)
            with replace_file(path) as temporary:
                temporary.write_bytes(save(pack(states)))
        if progress is not None:
            progress(len(numbers))
    return passes


def _check_sequences(sequences: Sequence[Tensor], mask_token_id: int | None) -> None:
    """Refuse what are no sequences, or hold the mask token, where there is one that they must not hold."""
    if not sequences or any(x.ndim != 1 or x.dtype != torch.int64 or not len(x) for x in sequences):
        raise ValueError("write_labels: tokens must be [S, N] int64, or S tensors [N] int64, S >= 1, N >= 1")
    for number, sequence in enumerate(sequences):
        if mask_token_id is not None and bool(sequence.eq(mask_token_id).any()):
            raise ValueError(
                f"write_labels: tokens must hold no mask token {mask_token_id} where masking is given, "
                f"got one in sequence {number}"
            )


def _label_by_length(
    sequences: Sequence[Tensor],
    numbers: Sequence[int],
    forward: Forward,
    label: Callable[[Tensor, Sequence[int]], list[LabelledState]],
) -> list[LabelledState]:
    """Label the sequences of these numbers, those of one length together."""
    found: dict[int, LabelledState] = {}
    for length in sorted({len(sequences[number]) for number in numbers}):
        left = [number for number in numbers if len(sequences[number]) == length]
        while left:
            now = left[: forward.batch_size(length)]
            try:
                states = label(torch.stack([sequences[number] for number in now]), now)
            except torch.OutOfMemoryError:
                forward.shrink(len(now), length)
                continue
            except (ValueError, IndexError, RuntimeError):  # what models raise for what they cannot take
                for number in now:
                    try:
                        label(sequences[number].unsqueeze(0), [number])
                    except (ValueError, IndexError, RuntimeError) as error:
                        raise SequenceError(number, str(error)) from error
                raise
            found.update(zip(now, states, strict=True))
            left = left[len(now) :]
    return [found[number] for number in numbers]


def stream_labels(folder: str | Path, *, model: MaskedModel | None = None) -> Iterator[LabelledState]:
    """Read a folder of labels state by state, one shard in memory at a time.

    Args:
        folder: as `write_labels` filled it.
        model: the model that the labels must be of, None: whichever they are of.

    Yields:
        The states in the order of their sequences.

    Raises:
        FileNotFoundError: if it holds no labels.
        ValueError: if a shard is missing (the run was interrupted: run it again) or damaged, or the labels are of another
            model or layer.
    """
    folder = Path(folder)
    settings = _read_index(folder)
    if model is not None:
        for what, here in (("model", describe_model(model)), ("layer", layer_of(model))):
            if differences({what: settings[what]}, {what: here}):
                raise ValueError(f"{folder}: holds labels of another {what}: {settings[what]}, got {here}")
    count = -(-settings["sequences"] // settings["shard_size"])
    for number in range(count):
        path = shard_path(folder, number)
        if not path.exists():
            raise ValueError(
                f"{folder}: {path.name} of {count} shards is missing; run the labelling again to finish it"
            )
        try:
            states = list(read_shard(load(path.read_bytes()), settings))
        except (SafetensorError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: damaged ({error}); delete it and run the labelling again") from error
        first = number * settings["shard_size"]
        if len(states) != min(settings["shard_size"], settings["sequences"] - first):
            raise ValueError(
                f"{path}: holds {len(states)} states, other than {INDEX_FILE} says; delete it and run again"
            )
        yield from states


def read_labels(
    folder: str | Path, *, mask_token_id: int, form: Form | None = None, model: MaskedModel | None = None
) -> LabelSet:
    """Read a folder of labels of states of one length at once.

    Args:
        folder: as `write_labels` filled it.
        mask_token_id: the model's.
        form: which reading; None: the first one that the folder keeps.
        model: the model that the labels must be of, None: whichever they are of.

    Returns:
        All states, in the order they were given.

    Raises:
        FileNotFoundError: if it holds no labels.
        ValueError: as `stream_labels`, or if the lengths differ or the form was not kept.
    """
    kept = _read_index(Path(folder))["forms"]
    form = form or kept[0]
    if form not in kept:
        raise ValueError(f"{folder}: holds the forms {', '.join(kept)}, got form={form!r}")
    states = list(stream_labels(folder, model=model))
    lengths = sorted({len(state.tokens) for state in states})
    if len(lengths) > 1:
        raise ValueError(f"{folder}: holds lengths {lengths[0]} to {lengths[-1]}; read them with stream_labels")
    tokens = torch.stack([state.tokens for state in states])
    entropy = torch.zeros(tokens.shape, dtype=torch.float32, device="cpu")
    for row, state in enumerate(states):
        entropy[row, state.positions] = state.entropy
    mi = torch.stack([state.dense(form) for state in states])
    return LabelSet(tokens, tokens == mask_token_id, mi, entropy)


def _seed(seed: int, index: int) -> int:
    """Of one sequence, from the seed of all."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:7], "little")


def _fingerprint(sequences: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(f"{len(sequence)} ".encode())
        digest.update(sequence.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _open(folder: Path, settings: dict[str, Any]) -> None:
    """Begin a folder, or make sure that it was begun with the same settings."""
    text = json.dumps(settings, indent=2) + "\n"
    index = folder / INDEX_FILE
    if not index.exists():
        with replace_file(index) as temporary:
            temporary.write_text(text)
        return
    kept, asked = _read_index(folder), json.loads(text)
    changed = differences({key: kept.get(key) for key in asked}, asked)
    if changed:
        raise ValueError(f"{folder}: holds labels made with another {', '.join(changed)}; choose another folder")


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_FILE
    try:
        settings: dict[str, Any] = read_json(path, "damaged")
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: holds no labels ({INDEX_FILE} is missing)") from None
    needed = {"model", "layer", "forms", "window", "sequences", "shard_size"}
    if not isinstance(settings, dict) or not needed <= settings.keys():
        raise ValueError(f"{path}: damaged: not the index of a folder of labels")
    forms, window, counts = settings["forms"], settings["window"], [settings["sequences"], settings["shard_size"]]
    if not (
        isinstance(forms, list)
        and forms
        and all(form in FORMS for form in forms)
        and (window is None or (type(window) is int and window >= 0))
        and all(type(count) is int and count >= 1 for count in counts)
    ):
        raise ValueError(f"{path}: damaged: forms, window, sequences or shard_size make no sense")
    return settings
