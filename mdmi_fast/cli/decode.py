"""`mdmi-fast decode`: fill the masked positions of sequences."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mdmi_fast.cli._options import (
    DATA_HELP,
    add_decoding,
    add_model,
    add_policy,
    add_threads,
    json_text,
    load_policy,
    positive,
)
from mdmi_fast.files import replace_file


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "decode",
        help="fill the masked positions of sequences",
        description="Fill the masked positions of sequences. One JSON object a line comes out for each that goes in, "
        'in the same order: what the line held, with "tokens" filled and "passes" added.',
    )
    add_model(parser)
    parser.add_argument("--data", required=True, metavar="FILE", help=DATA_HELP)
    add_policy(parser)
    add_decoding(parser)
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N sequences")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of standard output")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="one JSON line a sequence and pass: positions, tokens, entropies, spent",
    )
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from mdmi_fast.cli._progress import bar
    from mdmi_fast.cli._sequences import decode_all, read_sequences
    from mdmi_fast.models import load_model

    model = load_model(options.model)
    sequences = read_sequences(options.data, model_name=options.model, model=model, limit=options.limit)
    policy = load_policy(options, model=options.model)
    start = time.perf_counter()
    passes = 0
    with (
        _output(options.out, sys.stdout) as out,
        _output(options.trace, None) as trace,
        bar(total=len(sequences), unit="sequence", description="decoding") as progress,
    ):
        decoded = decode_all(
            model,
            [sequence.tokens for sequence in sequences],
            policy,
            temperature=options.temperature,
            seed=options.seed,
            batch_size=options.batch_size,
            trace=trace is not None,
            progress=progress.update,
        )
        for sequence, done in zip(sequences, decoded, strict=True):
            print(json_text({**sequence.record, "tokens": done.tokens, "passes": done.passes}), file=out)
            for record in done.trace:
                print(json_text(record), file=trace)
            passes += done.passes
    seconds = time.perf_counter() - start
    print(
        f"mdmi-fast decode: {len(sequences)} sequences, {passes / len(sequences):.1f} passes each, {seconds:.2f} s",
        file=sys.stderr,
    )
    return 0


@contextlib.contextmanager
def _output(path: Path | None, otherwise: IO[str] | None) -> Iterator[IO[str] | None]:
    """A file that is whole or untouched, or what to use without a path."""
    if path is None:
        yield otherwise
        return
    with replace_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file
