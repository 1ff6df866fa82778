"""Token sequences from files."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._records import TokenSequence, read_record
from mdmi_fast.files import wrong_encoding
from mdmi_fast.tasks.base import Task, task_of

if TYPE_CHECKING:
    from mdmi_fast.models import MaskedModel

_MOST_PROBLEMS = 20
_STDIN = "<stdin>"


class Lines(list[str]):
    """Lines of a file that know its name, and how many stood before them."""

    name: str
    before: int = 0


def read_lines(source: str) -> Lines:
    """The lines of a text file, or of standard input for "-"; bytes that are no UTF-8 become surrogates.

    Raises:
        InputError: it looks like UTF-16.
    """
    lines = Lines()
    if source != "-":
        lines.name = source
        with Path(source).open(encoding="utf-8-sig", errors="surrogateescape") as file:
            lines.extend(file)
    else:
        lines.name = _STDIN
        lines.extend(_standard_input())
    _check_start(lines)
    return lines


def _check_start(lines: Lines) -> None:
    """Refuse text whose every line would be wrong."""
    problem = wrong_encoding(lines[0][:4]) if lines else None
    if problem is not None and "UTF-16" in problem:
        raise InputError(f"{lines.name}: {problem}")


def _standard_input() -> Iterable[str]:
    if sys.stdin is None:
        raise UsageError("there is no standard input to read")
    if sys.stdin.isatty():
        print("reading from the terminal; end with ctrl-D", file=sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
    return sys.stdin


def read_sequences(
    source: str, *, model_name: str, model: MaskedModel, limit: int | None = None
) -> list[TokenSequence]:
    """The sequences of a file: JSON lines {"tokens": [...]}, or what the task of the model reads.

    Args:
        source: a path, or "-".
        model_name: as the user wrote it.
        model: whose tokens these must be.
        limit: only so many of the first.

    Raises:
        InputError: lines that hold no sequence that the model can run, at most 20 of them; or a file without any.
    """
    found = _parse(read_lines(source), task_of(model_name), model)[:limit]
    if not found:
        raise InputError(f"{_STDIN if source == '-' else source}: holds no sequences")
    return found


def stream_sequences(
    source: str, *, model_name: str, model: MaskedModel, window: int, limit: int | None = None
) -> Iterator[list[TokenSequence]]:
    """The sequences of a file, as they come: a file is read and checked whole, standard input by windows of JSON lines.

    Args:
        source: a path, or "-".
        model_name: as the user wrote it.
        model: whose tokens these must be.
        window: lines of standard input that are read before their sequences are given.
        limit: only so many of the first.

    Raises:
        InputError: as `read_sequences`, for the lines read so far.
    """
    if source != "-":
        yield read_sequences(source, model_name=model_name, model=model, limit=limit)
        return
    incoming, count, task = iter(_standard_input()), 0, task_of(model_name)
    lines = Lines()
    lines.name = _STDIN
    while limit is None or count < limit:
        lines.before += len(lines)
        lines[:] = itertools.islice(incoming, window)
        if not lines:
            break
        if not lines.before:
            _check_start(lines)
            if _are_the_tasks(lines, task):
                lines.extend(incoming)
        found = _parse(lines, task, model)[: None if limit is None else limit - count]
        count += len(found)
        if found:
            yield found
    if not count:
        raise InputError(f"{_STDIN}: holds no sequences")


def _are_the_tasks(lines: list[str], task: Task) -> bool:
    """Whether lines are written as the task has it, rather than as JSON."""
    first = next((line.lstrip() for line in lines if line.strip()), "")
    return task.read_lines is not None and not first.startswith("{")


def _parse(lines: Lines, task: Task, model: MaskedModel) -> list[TokenSequence]:
    if task.read_lines is None or not _are_the_tasks(lines, task):
        return _read_json_lines(lines, model)
    try:
        found = task.read_lines(lines)
    except ValueError as error:
        raise InputError(str(error)) from error
    return [
        TokenSequence(tokens, record, f"{lines.name}: {task.unit} {number}")
        for number, (tokens, record) in enumerate(found, 1)
    ]


def _read_json_lines(lines: Lines, model: MaskedModel) -> list[TokenSequence]:
    found: list[TokenSequence] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1 + lines.before):
        if not line.strip():
            continue
        where = f"{lines.name}:{number}"
        try:
            found.append(read_record(line, model)._replace(where=where))
        except ValueError as error:
            problems.append(f"{where}: {error}")
            if len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        raise InputError("\n".join(problems))
    return found
