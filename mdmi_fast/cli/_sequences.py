"""Token sequences from files, and decoding them whatever their lengths."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._options import kind_of
from mdmi_fast.errors import one_line
from mdmi_fast.files import wrong_encoding
from mdmi_fast.models.base import CheckingModel

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from mdmi_fast.decoding import Policy
    from mdmi_fast.models import MaskedModel
    from mdmi_fast.tasks.sudoku.puzzles import Puzzles

_MOST_PROBLEMS = 20
_STDIN = "<stdin>"
_DEEPEST = 100


class TokenSequence(NamedTuple):
    """A sequence of a file: its tokens, the record it stood in, and where that was, as `file:line`."""

    tokens: list[int]
    record: dict[str, Any]
    where: str = ""

    @property
    def attention_mask(self) -> list[bool] | None:
        """Which positions are not padding, where the record says so."""
        given = self.record.get("attention_mask")
        return None if given is None else [bool(shown) for shown in given]


class Decoded(NamedTuple):
    """A decoded sequence and its passes; `trace` has one record a pass where it was asked for."""

    tokens: list[int]
    passes: int
    trace: list[dict[str, Any]]


class _Lines(list[str]):
    """Lines of a file that know its name, and how many stood before them."""

    name: str
    before: int = 0


def read_lines(source: str) -> list[str]:
    """The lines of a text file, or of standard input for "-"; bytes that are no UTF-8 become surrogates.

    Raises:
        InputError: it looks like UTF-16.
    """
    lines = _Lines()
    if source != "-":
        lines.name = source
        with Path(source).open(encoding="utf-8-sig", errors="surrogateescape") as file:
            lines.extend(file)
    else:
        lines.name = _STDIN
        lines.extend(_standard_input())
    _check_start(lines)
    return lines


def _check_start(lines: _Lines) -> None:
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
        InputError: lines that hold no sequence that the model can run, at most 20 of them; or a file without any.
    """
    found = _parse(read_lines(source), model_name, model)[:limit]
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
    incoming, count = iter(_standard_input()), 0
    lines = _Lines()
    lines.name = _STDIN
    while limit is None or count < limit:
        lines.before += len(lines)
        lines[:] = itertools.islice(incoming, window)
        if not lines:
            break
        if not lines.before:
            _check_start(lines)
            if _holds_puzzles(lines, model_name):
                lines.extend(incoming)
        found = _parse(lines, model_name, model)[: None if limit is None else limit - count]
        count += len(found)
        if found:
            yield found
    if not count:
        raise InputError(f"{_STDIN}: holds no sequences")


def _holds_puzzles(lines: list[str], model_name: str) -> bool:
    first = next((line.lstrip() for line in lines if line.strip()), "")
    return kind_of(model_name) == "sudoku" and not first.startswith("{")


def _parse(lines: list[str], model_name: str, model: MaskedModel) -> list[TokenSequence]:
    if not _holds_puzzles(lines, model_name):
        return _read_json_lines(lines, model)
    from mdmi_fast.tasks.sudoku.puzzles import format_line

    givens, name = read_puzzle_lines(lines, check_unique=False).givens, getattr(lines, "name", "<lines>")
    return [
        TokenSequence(board.tolist(), {"puzzle": format_line(board)}, f"{name}: puzzle {number}")
        for number, board in enumerate(givens, 1)
    ]


def _read_json_lines(lines: list[str], model: MaskedModel) -> list[TokenSequence]:
    found: list[TokenSequence] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1 + getattr(lines, "before", 0)):
        if not line.strip():
            continue
        where = f"{getattr(lines, 'name', '<lines>')}:{number}"
        try:
            found.append(_read_record(line, model)._replace(where=where))
        except ValueError as error:
            problems.append(f"{where}: {error}")
            if len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        raise InputError("\n".join(problems))
    return found


def _read_record(line: str, model: MaskedModel) -> TokenSequence:
    problem = wrong_encoding(line)
    if problem is not None:
        raise ValueError(problem)
    record = _read_object(line)
    tokens = record.get("tokens") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(tokens, list) or not tokens:
        raise ValueError('expected an object {"tokens": [...]} with at least one integer')
    for position, token in enumerate(tokens):
        if type(token) is not int:
            raise ValueError(f"{json.dumps(token)[:40]} at position {position} is no token, which is an integer")
        if not (0 <= token < model.vocab_size or token == model.mask_token_id):
            raise ValueError(
                f"token {token} at position {position} is neither in 0..{model.vocab_size - 1} nor the mask token "
                f"{model.mask_token_id}"
            )
    _check_attention_mask(record.get("attention_mask"), length=len(tokens))
    sequence = TokenSequence(tokens, record)
    if isinstance(model, CheckingModel):
        import torch

        visible = sequence.attention_mask
        model.check(torch.tensor([tokens]), None if visible is None else torch.tensor([visible]))
    _check_item(record.get("options", {}), tokens=tokens, model=model)
    return sequence


def _check_attention_mask(given: Any, *, length: int) -> None:
    """Refuse a mask of a record that no sequence of that length can have; None is none.

    Raises:
        ValueError: saying why.
    """
    if given is None:
        return
    if not isinstance(given, list) or not all(type(shown) in (int, bool) and shown in (0, 1) for shown in given):
        raise ValueError('"attention_mask" must be a list of 0 (padding) and 1, or of false and true')
    if len(given) != length:
        raise ValueError(f'"attention_mask" must be as long as "tokens", {length}, got {len(given)}')
    if "0" in "".join("1" if shown else "0" for shown in given).strip("0") or not any(given):
        raise ValueError('"attention_mask" must hide positions at the ends only, and not all of them')


def _read_object(line: str) -> Any:
    """The value of a line of JSON, without anything that would come out changed: what is written back is what came."""
    try:
        value = json.loads(
            line.strip(), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_repetition
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (character {error.pos + 1})") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise ValueError(f"not JSON: {error}") from error
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Refuse what is nested so deeply that it may not be written again: writing needs more of the stack than reading.

    Raises:
        ValueError: saying so.
    """
    level = [value]
    for _ in range(_DEEPEST):
        found = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [entry for each in found for entry in each]
    if any(isinstance(one, (dict, list)) for one in level):
        raise ValueError(f"lists and objects may be nested {_DEEPEST} deep, got more")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def are_tokens(value: Any) -> TypeGuard[list[int]]:
    """Whether a value of JSON is a list of integers."""
    return isinstance(value, list) and all(type(token) is int for token in value)


_ITEM_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda value: type(value) in (int, float) and 0 <= value <= sys.float_info.max,
    "top_k": lambda value: type(value) is int and 1 <= value < 2**63,
    "top_p": lambda value: type(value) in (int, float) and 0 < value <= 1,
    "gumbel": lambda value: type(value) is bool,
    "block_size": lambda value: type(value) is int and 1 <= value < 2**63,
    "verify": lambda value: type(value) is bool,
    "remask_below": lambda value: type(value) in (int, float) and 0 <= value <= 1,
    "revisions": lambda value: type(value) is int and 0 <= value < 2**63,
    "suppressed": are_tokens,
    "stop_tokens": are_tokens,
    "seed": lambda value: type(value) is int and -(2**63) <= value < 2**63,
    "allowed": lambda value: (
        isinstance(value, dict)
        and all(key.isdecimal() and str(int(key)) == key and are_tokens(tokens) for key, tokens in value.items())
    ),
}
"""What "options" of a record may hold, and whether a value can be one: the arguments of `decode`, a seed, and
the allowed tokens of positions as {"POSITION": [TOKEN, ...]}."""


def check_options(options: Any) -> None:
    """Refuse options of a record, or of a chosen policy, that no sequence could have.

    Raises:
        ValueError: naming the option.
    """
    if not isinstance(options, dict) or not options.keys() <= _ITEM_OPTIONS.keys():
        raise ValueError(f'"options" must be an object with some of {", ".join(_ITEM_OPTIONS)}')
    for name, value in options.items():
        if not _ITEM_OPTIONS[name](value):
            raise ValueError(f"option {name!r} cannot be {value!r}")


def _check_item(options: Any, *, tokens: Sequence[int], model: MaskedModel) -> None:
    """Refuse options of a record that make no sense for its tokens.

    Raises:
        ValueError: naming the option.
    """
    check_options(options)
    from mdmi_fast.decoding.vocabulary import with_stops

    length, vocab_size = len(tokens), model.vocab_size
    for name in ("suppressed", "stop_tokens"):
        if not all(0 <= token < vocab_size for token in options.get(name, ())):
            raise ValueError(f"option {name!r} must name tokens below {vocab_size}")
    with_stops(model, options.get("stop_tokens", ()), options.get("suppressed", ()))
    unwritten = {model.mask_token_id, *options.get("suppressed", ())}
    for position, permitted in options.get("allowed", {}).items():
        if int(position) >= length or not all(0 <= token < vocab_size for token in permitted):
            raise ValueError(f"option 'allowed' must name positions below {length} and tokens below {vocab_size}")
        if tokens[int(position)] == model.mask_token_id and unwritten.issuperset(permitted):
            raise ValueError(f"option 'allowed' leaves nothing to write at position {position}")


def decode_all(
    model: MaskedModel,
    sequences: Sequence[TokenSequence],
    policy: Policy,
    *,
    generator: Generator,
    batch_size: int,
    defaults: Mapping[str, Any],
    first_number: int = 0,
    trace: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Decoded]:
    """Decode sequences of any lengths, in their order. A result depends on the sequence, its number and the seed only.

    Sequences of one length and the same options are decoded together, out of the next 8 * batch_size ones: nothing
    needs padding but what a record says of itself. A batch that fails is halved until it is known which sequences fail
    alone.

    Args:
        model: decodes.
        sequences: each may have "options" of its own in its record.
        policy: for all of them.
        generator: of the seeds, one a sequence.
        batch_size: at most so many at once.
        defaults: arguments of `decode` for what a record leaves open.
        first_number: of the first sequence, in the receipts.
        trace: keep the receipts.
        progress: called with the number of sequences that were finished.

    Raises:
        InputError: where the first sequence that cannot be decoded would come, naming it and others; at most 20.
    """
    import torch

    from mdmi_fast.decoding import decode, receipt
    from mdmi_fast.decoding.randomness import draw_seeds

    seeds = draw_seeds(len(sequences), generator, torch.device("cpu"))

    def run(chosen: list[int], options: Mapping[str, Any]) -> dict[int, Decoded]:
        tokens = torch.tensor([sequences[number].tokens for number in chosen])
        masks = [sequences[number].attention_mask for number in chosen]  # of all or none
        result = decode(
            model,
            tokens,
            policy,
            seeds=seeds[chosen],
            attention_mask=None if masks[0] is None else torch.tensor(masks),
            allowed=_allowed([sequences[number] for number in chosen], model.vocab_size),
            trace=trace,
            progress=progress,
            **options,
        )
        if progress is not None:
            progress(int((result.passes == 0).sum()))
        found = {}
        for row, number in enumerate(chosen):
            story = [{"sequence": first_number + number, **entry} for entry in receipt(result.trace or [], row)]
            found[number] = Decoded(result.tokens[row].tolist(), int(result.passes[row]), story)
        return found

    for start in range(0, len(sequences), 8 * batch_size):
        window = range(start, min(start + 8 * batch_size, len(sequences)))
        alike: dict[str, list[int]] = {}
        for number in window:
            own = sequences[number].record.get("options", {})
            if "seed" in own:
                seeds[number] = own["seed"]
            shared = {name: value for name, value in own.items() if name not in ("seed", "allowed")}
            has_mask = sequences[number].attention_mask is not None
            key = json.dumps([len(sequences[number].tokens), shared, has_mask], sort_keys=True)
            alike.setdefault(key, []).append(number)
        done: dict[int, Decoded] = {}
        failed: dict[int, Exception] = {}
        for key, numbers in alike.items():
            run_alike = functools.partial(run, options={**defaults, **json.loads(key)[1]})
            for first in range(0, len(numbers), batch_size):
                done |= _halving(run_alike, numbers[first : first + batch_size], failed)
        for number in window:
            if number not in done:
                lines = [f"{sequences[bad].where}: {_reason(failed[bad])}" for bad in sorted(failed)]
                raise InputError("\n".join(lines)) from failed[min(failed)]
            yield done[number]


def _halving(
    run: Callable[[list[int]], dict[int, Decoded]], chosen: list[int], failed: dict[int, Exception]
) -> dict[int, Decoded]:
    """What was decoded of a batch; what fails by itself is added to `failed`, of which there are enough at 20."""
    if len(failed) >= _MOST_PROBLEMS:
        return {}
    try:
        return run(chosen)
    except (ValueError, IndexError, RuntimeError) as error:  # what models raise for what they cannot take
        if len(chosen) == 1:
            failed[chosen[0]] = error
            return {}
        half = len(chosen) // 2
        return _halving(run, chosen[:half], failed) | _halving(run, chosen[half:], failed)


def _reason(error: Exception) -> str:
    return one_line(error) or next(iter(str(error).splitlines()), type(error).__name__)


def _allowed(sequences: Sequence[TokenSequence], vocab_size: int) -> Tensor | None:
    """[B, N, V] bool of the records' "allowed" sets; None where there are none."""
    import torch

    sets = [sequence.record.get("options", {}).get("allowed", {}) for sequence in sequences]
    if not any(sets):
        return None
    allowed = torch.ones(len(sets), len(sequences[0].tokens), vocab_size, dtype=torch.bool)
    for row, own in enumerate(sets):
        for position, tokens in own.items():
            allowed[row, int(position)] = False
            allowed[row, int(position), tokens] = True
    return allowed
