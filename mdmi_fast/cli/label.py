"""`mdmi-fast label`: mutual information of states, by probing a model."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._options import (
    DATA_HELP,
    FORM_NAMES,
    add_model,
    add_seed,
    add_threads,
    amount,
    at_least,
    natural,
    positive,
)
from mdmi_fast.files import check_folder

if TYPE_CHECKING:
    from torch import Tensor

    from mdmi_fast.labels import Masking
    from mdmi_fast.models import MaskedModel


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "label",
        help="probe a model for the mutual information of states",
        description="Probe a model for the mutual information of the masked pairs of every state, into a folder that "
        "train and evaluate read. An interrupted run goes on where it was. Under torchrun, and on several machines that "
        "share the folder, every process makes its share of the shards.",
    )
    add_model(parser)
    states = parser.add_mutually_exclusive_group(required=True)
    states.add_argument("--data", metavar="FILE", help=f"states or, with --mask, sequences: {DATA_HELP}")
    states.add_argument(
        "--states",
        type=positive,
        metavar="N",
        help="N states as met while decoding, drawn from --seed, for models that know how to make them: sudoku and "
        "sapiens:heavy",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="of the labels")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N states of the file")
    parser.add_argument(
        "--mask",
        type=_masking_spec,
        metavar="HOW",
        help="mask the sequences of the file: uniform (a share drawn from 0 to 1), share:S (a fixed one), or "
        "trajectory:entropy and trajectory:random (the model fills them itself, up to a share); default: as they are",
    )
    parser.add_argument(
        "--keep", type=natural, nargs="+", default=[], metavar="TOKEN", help="tokens that --mask leaves as they are"
    )
    parser.add_argument(
        "--form", choices=FORM_NAMES, nargs="+", default=["joint"], help="readings of the probes (default: joint)"
    )
    parser.add_argument(
        "--epsilon", type=amount, default=0.0, metavar="NATS", help="allowed error, saves passes (default: 0)"
    )
    parser.add_argument(
        "--directions",
        choices=("both", "one"),
        default="both",
        help="of a pair: one is enough where that saves passes (default: both, and their mean)",
    )
    parser.add_argument("--window", type=natural, metavar="N", help="only pairs at most N positions apart")
    parser.add_argument(
        "--samples", type=_several, metavar="N", help="draw N values where more are needed: a standard error, no bound"
    )
    parser.add_argument("--hidden", action="store_true", help="keep the hidden states of masked positions")
    parser.add_argument(
        "--shard-size", type=positive, default=100, metavar="N", help="states a file, what a restart may repeat"
    )
    parser.add_argument(
        "--batch-tokens", type=positive, default=1 << 16, metavar="N", help="tokens a forward pass (default: 65536)"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the model (default: fp32)")
    add_seed(parser, of="the states and all that is drawn")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_folder(options.out)
    if options.states is not None and (options.limit or options.mask):
        raise UsageError("--states takes no --limit and no --mask; they belong to --data")
    if options.states is not None:
        _maker(options.model)
    if options.keep and not options.mask:
        raise UsageError("--keep belongs to --mask")
    from mdmi_fast.cli._progress import bar
    from mdmi_fast.labels import SequenceError, write_labels
    from mdmi_fast.models import load_model

    model = load_model(options.model)
    sequences, places, origin = _sequences(options, model)
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    shards = -(-len(sequences) // options.shard_size)
    own = sum(len(sequences[n * options.shard_size :][: options.shard_size]) for n in range(rank, shards, world_size))
    start = time.perf_counter()
    try:
        with bar(total=own, unit="state", description="labelling") as progress:
            passes = write_labels(
                model,
                sequences,
                options.out,
                forms=options.form,
                epsilon=options.epsilon,
                directions=options.directions,
                window=options.window,
                samples=options.samples,
                masking=_masking(options.mask, tuple(options.keep)) if options.mask else None,
                seed=options.seed,
                hidden=options.hidden,
                shard_size=options.shard_size,
                batch_tokens=options.batch_tokens,
                precision=options.precision,
                rank=rank,
                world_size=world_size,
                provenance={"model": options.model, **origin},
                progress=progress.update,
            )
    except SequenceError as error:
        if error.number >= len(places):
            raise
        raise InputError(f"{places[error.number]}: {error.reason}") from error
    seconds = time.perf_counter() - start
    forms = ", ".join(options.form)
    print(f"{own} states in {options.out}, form {forms}: {passes} passes in this run, {seconds:.1f} s")
    return 0


def _maker(model: str) -> Callable[..., Iterable[Tensor]]:
    """What makes states of a model: `make(model, count, *, seed)`, of the entry-point group "mdmi_fast.states".

    Raises:
        UsageError: nothing does.
    """
    from mdmi_fast.models.loading import find_for_model, registered

    found: Callable[..., Iterable[Tensor]] | None = find_for_model("mdmi_fast.states", model)
    if found is None:
        known = ", ".join(name.replace(".", ":") for name in registered("mdmi_fast.states"))
        raise UsageError(f"--states makes states for {known}, not for {model}: give your own with --data")
    return found


def _sequences(
    options: argparse.Namespace, model: MaskedModel
) -> tuple[Sequence[Tensor], Sequence[str], dict[str, Any]]:
    """What to label, the place of each as `file:line` if it was read, and what a reader should know of all."""
    import torch

    from mdmi_fast.cli._sequences import read_sequences

    if options.states is not None:
        return list(_maker(options.model)(model, options.states, seed=options.seed)), (), {"states_seed": options.seed}
    found = read_sequences(options.data, model_name=options.model, model=model, limit=options.limit)
    if options.mask:
        masked = [sequence.where for sequence in found if model.mask_token_id in sequence.tokens]
        if masked:
            raise InputError(
                "\n".join(f"{where}: --mask takes no mask token {model.mask_token_id}" for where in masked[:20])
            )
    # A sequence means the same without its padding, which no label is about.
    shown = [sequence.attention_mask or [True] * len(sequence.tokens) for sequence in found]
    sequences = [torch.tensor(one.tokens)[torch.tensor(mask)] for one, mask in zip(found, shown, strict=True)]
    return sequences, [sequence.where for sequence in found], {"data": Path(options.data).name}


def _several(text: str) -> int:
    return at_least(2, text)


def _masking_spec(text: str) -> str:
    """The text itself, if it says how to mask."""
    try:
        _masking(text, ())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _masking(text: str, keep: tuple[int, ...]) -> Masking:
    from mdmi_fast.labels import FixedShare, Trajectory, UniformShare

    kind, _, rest = text.partition(":")
    if text == "uniform":
        return UniformShare(keep)
    if kind == "share":
        return FixedShare(float(rest), keep)
    if kind == "trajectory" and rest in ("entropy", "random"):
        return Trajectory(rest, keep=keep)  # type: ignore[arg-type]  # a string of the two
    raise ValueError(f"expected uniform, share:S, trajectory:entropy or trajectory:random, got {text}")
