"""`mdmi-fast label`: mutual information of states, by probing a model."""

from __future__ import annotations

import argparse
import time
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
    kind_of,
    positive,
)

if TYPE_CHECKING:
    from torch import Tensor

    from mdmi_fast.models import MaskedModel


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "label",
        help="probe a model for the mutual information of states",
        description="Probe a model for the mutual information of the masked pairs of every state, into a folder that "
        "train and evaluate read. An interrupted run goes on where it was.",
    )
    add_model(parser)
    states = parser.add_mutually_exclusive_group(required=True)
    states.add_argument("--data", metavar="FILE", help=f"states of one length: {DATA_HELP}")
    states.add_argument(
        "--states", type=positive, metavar="N", help="sudoku models: N boards as met while decoding, drawn from --seed"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="of the labels")
    parser.add_argument("--form", choices=FORM_NAMES, default="joint", help="reading of the probes (default: joint)")
    parser.add_argument(
        "--epsilon",
        type=amount,
        default=0.0,
        metavar="NATS",
        help="allowed error, saves passes; joint form (default: 0)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N states of the file")
    parser.add_argument(
        "--shard-size", type=positive, default=100, metavar="N", help="states a file, what a restart may repeat"
    )
    parser.add_argument("--batch-size", type=positive, default=512, metavar="N", help="sequences a pass (default: 512)")
    add_seed(parser, of="the states")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.states is not None and (options.limit is not None or kind_of(options.model) != "sudoku"):
        raise UsageError("--states makes boards for sudoku models and takes no --limit; use --data for your own states")
    if options.epsilon > 0 and options.form != "joint":
        raise UsageError("--epsilon needs --form joint, whose error is proven")
    from mdmi_fast.cli._progress import bar
    from mdmi_fast.labels import write_labels
    from mdmi_fast.models import load_model

    model = load_model(options.model)
    tokens, origin = _states(options, model)
    start = time.perf_counter()
    with bar(total=len(tokens), unit="state", description="labelling") as progress:
        passes = write_labels(
            model,
            tokens,
            options.out,
            form=options.form,
            epsilon=options.epsilon,
            shard_size=options.shard_size,
            batch_size=options.batch_size,
            provenance={"model": options.model, **origin},
            progress=progress.update,
        )
    seconds = time.perf_counter() - start
    print(f"{len(tokens)} states in {options.out}, form {options.form}: {passes} passes in this run, {seconds:.1f} s")
    return 0


def _states(options: argparse.Namespace, model: MaskedModel) -> tuple[Tensor, dict[str, Any]]:
    """The states [S, N] to label, and where they come from."""
    import torch

    from mdmi_fast.cli._sequences import read_sequences

    if options.states is not None:
        from mdmi_fast.tasks.sudoku.states import decoding_states

        return decoding_states(model, options.states, seed=options.seed), {"states_seed": options.seed}
    found = read_sequences(options.data, model_name=options.model, model=model, limit=options.limit)
    lengths = sorted({len(sequence.tokens) for sequence in found})
    if len(lengths) > 1:
        raise InputError(f"{options.data}: label needs states of one length, got lengths {lengths[0]} to {lengths[-1]}")
    return torch.tensor([sequence.tokens for sequence in found]), {"data": Path(options.data).name}
