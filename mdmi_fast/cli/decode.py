"""`mdmi-fast decode`: fill the masked positions of sequences."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._options import (
    DATA_HELP,
    add_decoding,
    add_model,
    add_policy,
    add_threads,
    add_writing,
    decoding_options,
    json_text,
    load_coupling,
    load_decoded,
    load_policy,
    positive,
)
from mdmi_fast.cli._records import TokenSequence
from mdmi_fast.errors import one_line
from mdmi_fast.files import check_file, open_output, same_file

if TYPE_CHECKING:
    from mdmi_fast.decoding import Decoded


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "decode",
        help="fill the masked positions of sequences",
        description="Fill the masked positions of sequences. One JSON object a line comes out for each that goes in, "
        'in the same order: what the line held, with "tokens" filled and "passes" added. A line may say for itself what '
        'the options from --temperature on say for all: {"tokens": [...], "options": {"temperature": 0.5, "seed": 7, '
        '"allowed": {"3": [1, 2]}}}. Lines of standard input are decoded as they come, --batch-size of them together. '
        "A line that cannot be decoded is named and ends the command; those before it are written.",
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
        help="one JSON line a sequence and pass: positions, tokens, entropies, spent, and the order of coupled draws",
    )
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_file(options.out)
    check_file(options.trace)
    if None not in (options.out, options.trace) and same_file(options.out, options.trace):
        raise UsageError(f"--out and --trace are both {options.out}: one of them would be lost")
    from torch import Generator

    from mdmi_fast.cli._progress import bar
    from mdmi_fast.cli._sequences import stream_sequences
    from mdmi_fast.decoding import decode_many

    model = load_decoded(options.model, [options.policy])
    defaults = decoding_options(options, model)
    policy = load_policy(options, model, name=options.model)
    coupling = load_coupling(options, model, options.policy)
    generator = Generator().manual_seed(options.seed)
    start = time.perf_counter()
    passes = count = 0
    failure: InputError | None = None
    with (
        _output(options.out, sys.stdout) as out,
        _output(options.trace, None) as trace,
        bar(total=0, unit="sequence", description="decoding") as progress,
    ):
        try:
            for sequences in stream_sequences(
                options.data, model_name=options.model, model=model, window=options.batch_size, limit=options.limit
            ):
                progress.total = count + len(sequences)
                decoded = decode_many(
                    model,
                    [sequence.asked for sequence in sequences],
                    policy,
                    generator=generator,
                    batch_size=options.batch_size,
                    coupling=coupling,
                    trace=trace is not None,
                    progress=progress.update,
                    **defaults,
                )
                for sequence, done in zip(sequences, _named(decoded, sequences), strict=True):
                    _print_line({**sequence.record, "tokens": done.tokens, "passes": done.passes}, out)
                    for entry in done.trace:
                        _print_line({"sequence": count, **entry}, trace)
                    passes += done.passes
                    count += 1
                for file in (out, trace):
                    _write("", file, flush=True)
        except InputError as error:
            if not count:
                raise  # and leave the files as they are
            failure = error
    if failure is not None:
        raise InputError(f"{failure}\nmdmi-fast decode: {count} sequences were decoded before") from failure.__cause__
    seconds = time.perf_counter() - start
    print(
        f"mdmi-fast decode: {count} sequences, {passes / count:.1f} passes each, {seconds:.2f} s",
        file=sys.stderr,
    )
    return 0


def _named(decoded: Iterator[Decoded], sequences: Sequence[TokenSequence]) -> Iterator[Decoded]:
    """What was decoded.

    Raises:
        InputError: where the first sequence that cannot be decoded would come, naming it and others.
    """
    from mdmi_fast.decoding import DecodeError

    try:
        yield from decoded
    except DecodeError as error:
        lines = [f"{sequences[number].where}: {_reason(alone)}" for number, alone in error.failures.items()]
        raise InputError("\n".join(lines)) from error.__cause__


def _reason(error: Exception) -> str:
    return one_line(error) or next(iter(str(error).splitlines()), type(error).__name__)


def _print_line(value: Any, file: IO[str] | None) -> None:
    """In one piece: whatever interrupts the command, no line is left half written."""
    if file is not None:
        _write(json_text(value) + "\n", file)


def _write(text: str, file: IO[str] | None, *, flush: bool = False) -> None:
    """Write to a file, whose path an error gets from `open_output`, or to standard output, which has none."""
    try:
        if file is not None:
            file.write(text)
            if flush:
                file.flush()
    except OSError as error:
        if file is sys.stdout:
            error.filename = "standard output"
        raise


def _output(path: Path | None, otherwise: IO[str] | None) -> AbstractContextManager[IO[str] | None]:
    """A file that is whole or untouched, or what to use without a path."""
    return nullcontext(otherwise) if path is None else open_output(path)
