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
    add_writing,
    decoding_options,
    json_text,
    load_decoded,
    load_policy,
    positive,
)
from mdmi_fast.files import replace_file


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "decode",
        help="fill the masked positions of sequences",
        description="Fill the masked positions of sequences. One JSON object a line comes out for each that goes in, "
        'in the same order: what the line held, with "tokens" filled and "passes" added. A line may say for itself what '
        'the options from --temperature on say for all: {"tokens": [...], "options": {"temperature": 0.5, "seed": 7, '
        '"allowed": {"3": [1, 2]}}}. Lines of standard input are decoded as they come, --batch-size of them together.',
    )
    add_model(parser)
    parser.add_argument("--data", default="-", metavar="FILE", help=f"{DATA_HELP} (default: -)")
    add_policy(parser)
    add_decoding(parser)
    add_writing(parser)
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
    from torch import Generator

    from mdmi_fast.cli._progress import bar
    from mdmi_fast.cli._sequences import decode_all, stream_sequences

    model = load_decoded(options.model, [options.policy])
    policy = load_policy(options, model, name=options.model)
    generator = Generator().manual_seed(options.seed)
    start = time.perf_counter()
    passes = count = 0
    with (
        _output(options.out, sys.stdout) as out,
        _output(options.trace, None) as trace,
        bar(total=0, unit="sequence", description="decoding") as progress,
    ):
        for sequences in stream_sequences(
            options.data, model_name=options.model, model=model, window=options.batch_size, limit=options.limit
        ):
            progress.total = count + len(sequences)
            decoded = decode_all(
                model,
                sequences,
                policy,
                generator=generator,
                batch_size=options.batch_size,
                defaults=decoding_options(options),
                first_number=count,
                trace=trace is not None,
                progress=progress.update,
            )
            for sequence, done in zip(sequences, decoded, strict=True):
                _print_line({**sequence.record, "tokens": done.tokens, "passes": done.passes}, out)
                for record in done.trace:
                    _print_line(record, trace)
                passes += done.passes
                count += 1
            if out is not None:
                out.flush()
    seconds = time.perf_counter() - start
    print(
        f"mdmi-fast decode: {count} sequences, {passes / count:.1f} passes each, {seconds:.2f} s",
        file=sys.stderr,
    )
    return 0


def _print_line(value: Any, file: IO[str] | None) -> None:
    """In one piece: whatever interrupts the command, no line is left half written."""
    if file is not None:
        file.write(json_text(value) + "\n")


@contextlib.contextmanager
def _output(path: Path | None, otherwise: IO[str] | None) -> Iterator[IO[str] | None]:
    """A file that is whole or untouched, or what to use without a path."""
    if path is None:
        yield otherwise
        return
    with replace_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file
