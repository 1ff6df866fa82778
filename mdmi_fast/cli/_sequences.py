"""Token sequences from files, and decoding them whatever their lengths."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._options import kind_of

if TYPE_CHECKING:
    from torch import Tensor

    from mdmi_fast.decode import PassRecord, Policy
    from mdmi_fast.models import MaskedModel
    from mdmi_fast.tasks.sudoku.puzzles import Puzzles

_MOST_PROBLEMS = 20


class TokenSequence(NamedTuple):
    """A sequence of a file: its tokens, and the record it stood in."""

    tokens: list[int]
    record: dict[str, Any]


class Decoded(NamedTuple):
    """A decoded sequence and its passes; `trace` has one record a pass where it was asked for."""

    tokens: list[int]
    passes: int
    trace: list[dict[str, Any]]


class _Lines(list[str]):
    """The lines of a file that know its name."""

    name: str


def read_lines(source: str) -> list[str]:
    """The lines of a text file, or of standard input for "-"; bytes that are no UTF-8 become U+FFFD."""
    lines = _Lines()
    if source != "-":
        lines.name = source
        with Path(source).open(encoding="utf-8-sig", errors="replace") as file:
            lines.extend(file)
        return lines
    lines.name = "<stdin>"
    if sys.stdin is None:
        raise UsageError("there is no standard input to read")
    if sys.stdin.isatty():
        print("reading from the terminal; end with ctrl-D", file=sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace")
    lines.extend(sys.stdin)
    return lines


def read_puzzle_lines(lines: list[str], *, check_unique: bool) -> Puzzles:
    """The puzzles of lines.

    Raises:
        InputError: for every line that holds none.
    """
    from mdmi_fast.tasks.sudoku.puzzles import PuzzleError, read_puzzles

    try:
        return read_puzzles(lines, check_unique=check_unique)
    except PuzzleError as error:
        raise InputError(str(error)) from error


def read_sequences(
    source: str, *, model_name: str, model: MaskedModel, limit: int | None = None
) -> list[TokenSequence]:
    """The sequences of a file: JSON lines {"tokens": [...]}, or puzzles where the model is one of Sudoku.

    Args:
        source: a path, or "-".
        model_name: as the user wrote it.
        model: whose tokens these must be.
        limit: only so many of the first.

    Raises:
        InputError: lines that hold no sequence of the model's tokens, at most 20 of them; or a file without any.
    """
    lines = read_lines(source)
    first = next((line.lstrip() for line in lines if line.strip()), "")
    if kind_of(model_name) == "sudoku" and not first.startswith("{"):
        from mdmi_fast.tasks.sudoku.puzzles import format_line

        givens = read_puzzle_lines(lines, check_unique=False).givens[:limit]
        found = [TokenSequence(board.tolist(), {"puzzle": format_line(board)}) for board in givens]
    else:
        found = _read_json_lines(lines, model)[:limit]
    if not found:
        raise InputError(f"{source}: holds no sequences")
    return found


def _read_json_lines(lines: list[str], model: MaskedModel) -> list[TokenSequence]:
    found: list[TokenSequence] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_read_record(line, model))
        except ValueError as error:
            problems.append(f"{getattr(lines, 'name', '<lines>')}:{number}: {error}")
            if len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        raise InputError("\n".join(problems))
    return found


def _read_record(line: str, model: MaskedModel) -> TokenSequence:
    try:
        record = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (character {error.pos + 1})") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise ValueError(f"not JSON: {error}") from error
    tokens = record.get("tokens") if isinstance(record, dict) else None
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise ValueError('expected an object {"tokens": [...]} with at least one integer')
    for position, token in enumerate(tokens):
        if not (0 <= token < model.vocab_size or token == model.mask_token_id):
            raise ValueError(
                f"token {token} at position {position} is neither in 0..{model.vocab_size - 1} nor the mask token "
                f"{model.mask_token_id}"
            )
    return TokenSequence(tokens, record)


def decode_all(
    model: MaskedModel,
    sequences: Sequence[Sequence[int]],
    policy: Policy,
    *,
    temperature: float,
    seed: int,
    batch_size: int,
    trace: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Decoded]:
    """Decode sequences of any lengths, in their order. A result depends on the sequence, its number and the seed only.

    Sequences of one length are decoded together, out of the next 8 * batch_size ones: nothing needs padding.
    """
    import torch

    from mdmi_fast.decode import decode
    from mdmi_fast.decode.randomness import draw_seeds

    seeds = draw_seeds(len(sequences), torch.Generator().manual_seed(seed), torch.device("cpu"))
    for start in range(0, len(sequences), 8 * batch_size):
        window = range(start, min(start + 8 * batch_size, len(sequences)))
        by_length: dict[int, list[int]] = {}
        for number in window:
            by_length.setdefault(len(sequences[number]), []).append(number)
        done: dict[int, Decoded] = {}
        for numbers in by_length.values():
            for first in range(0, len(numbers), batch_size):
                chosen = numbers[first : first + batch_size]
                tokens = torch.tensor([list(sequences[number]) for number in chosen])
                masked = (tokens == model.mask_token_id).any(dim=-1)
                if progress is not None:
                    progress(int((~masked).sum()))
                result = decode(
                    model,
                    tokens,
                    policy,
                    temperature=temperature,
                    seeds=seeds[chosen],
                    trace=trace,
                    progress=progress,
                )
                for row, number in enumerate(chosen):
                    record = _trace_of(result.trace or [], row, number)
                    done[number] = Decoded(result.tokens[row].tolist(), int(result.passes[row]), record)
        for number in window:
            yield done[number]


def _trace_of(trace: Sequence[PassRecord], row: int, number: int) -> list[dict[str, Any]]:
    """One sequence's passes, in words a file can hold."""
    passes = []
    for record in trace:
        at = (record.sequences == row).nonzero()
        if not len(at):
            break
        place = int(at[0])
        chosen: Tensor = record.selected[place].nonzero().squeeze(-1)
        passes.append(
            {
                "sequence": number,
                "pass": record.step,
                "positions": chosen.tolist(),
                "tokens": record.tokens[place, chosen].tolist(),
                "entropy": record.entropy[place, chosen].tolist(),
                "spent": float(record.spent[place]),
            }
        )
    return passes
