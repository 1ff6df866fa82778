"""The command line `mdmi-fast`: one module a command, each with `add(subparsers)` and `run(options) -> exit code`.

Commands call the library, never the other way round, and import it inside `run`, so that help waits for none of it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from mdmi_fast import __version__
from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.errors import one_line
from mdmi_fast.files import FULL

COMMANDS = (
    *("demo", "sudoku", "models", "label", "train", "couple", "evaluate", "tune", "decode", "map"),
    *("serve", "serve-metrics", "bench", "info"),
)
"""In the order in which help lists them; each is a module of this package, with _ for -."""

FAILED, USAGE, INTERRUPTED = 1, 2, 130
_STDOUT = "standard output"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: what follows the program's name; None takes it from the process.

    Returns:
        0, 1 where the command failed, 2 for a command that makes no sense, 130 where it was interrupted.

    Raises:
        SystemExit: with the same numbers, by argparse, for help and arguments it cannot read.
    """
    if sys.stderr is None:  # print() would take standard output instead
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        print("mdmi-fast: standard output is closed; send it to a file or to /dev/null", file=sys.stderr)
        return FAILED
    if isinstance(sys.stdout, TextIOWrapper):  # a path that is no text can be printed, too
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(arguments)
    except SystemExit:
        if _flush():
            raise
        return FAILED
    return code if _flush() else FAILED


def _run(arguments: Sequence[str] | None) -> int:
    command = "mdmi-fast"
    try:
        options = _parser().parse_args(arguments)
        command = f"mdmi-fast {options.command}"
        if vars(options).get("threads"):
            _set_threads(options.threads)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = options.run(options)
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return FAILED  # the reader closed the pipe
    except UsageError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return USAGE
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in FULL:
            error.filename = _STDOUT  # files are named by those who write them
        if isinstance(error, OSError) and error.filename == _STDOUT:
            _forget_output()
        known = isinstance(error, InputError)
        message = str(error) if known else one_line(error)
        wants_traceback = os.environ.get("MDMI_DEBUG") == "1" and not (known and error.__cause__ is None)
        if message is None or wants_traceback:
            raise
        print(message if known else f"{command}: {message}", file=sys.stderr)
        return FAILED
    return code


def _flush() -> bool:
    """Write out what was printed, and say whether that went well."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"mdmi-fast: {_STDOUT}: {error.strerror}", file=sys.stderr)
        _forget_output()
        return False
    return True


def _forget_output() -> None:
    """Leave nothing for the last flush of the interpreter, which would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mdmi-fast",
        description="Pairwise mutual information of masked models: label, train, evaluate, decode, see.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. MDMI_DEBUG=1 shows tracebacks.",
    )
    parser.add_argument("--version", action="version", version=f"mdmi-fast {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name.replace('-', '_')}").add(subparsers)
    return parser


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as one line: a user has no use for the place in the source that Python adds."""
    print(f"mdmi-fast: warning: {message}", file=sys.stderr)


def _set_threads(n: int) -> None:
    import torch

    from mdmi_fast import set_num_threads

    torch.set_num_threads(n)
    set_num_threads(n)
