"""Sudoku puzzles: the shipped ones and how they were made, boards to train on, and the puzzle files of others.

`python -m mdmi_fast.tasks.sudoku.puzzles` makes the shipped files again from their seed.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from mdmi_fast import checks as check
from mdmi_fast.errors import run_program
from mdmi_fast.files import check_folder, replace_file, wrong_encoding
from mdmi_fast.tasks.sudoku.boards import (
    Boards,
    fingerprints,
    format_board,
    format_line,
    is_valid_board,
    random_bits,
    random_boards,
    random_clues,
    stream_boards,
)
from mdmi_fast.tasks.sudoku.solver import count_solutions, find_conflict, grade, solve

__all__ = [
    "PuzzleError",
    "Puzzles",
    "format_board",
    "format_line",
    "is_valid_board",
    "make_puzzles",
    "random_boards",
    "random_clues",
    "read_puzzles",
    "test_puzzles",
    "training_boards",
    "validation_puzzles",
]

SEED = 2026
"""Of the shipped files: the test puzzles come from SEED, the validation puzzles from SEED + 1."""
_N_TEST, _N_VALIDATION = 1000, 500
_TEST, _VALIDATION = "test_1000.txt", "validation_500.txt"
_FEWEST_CLUES, _MOST_CLUES = 24, 30


class Puzzles(NamedTuple):
    """Puzzles with their solutions."""

    givens: Boards
    """uint8 [n, 81], 0 where a cell is blank."""
    solutions: Boards
    """uint8 [n, 81], digits 1 to 9."""


class Problem(NamedTuple):
    """One line of a puzzle file that holds no usable puzzle."""

    line: int
    """Counted from 1."""
    reason: str


class PuzzleError(ValueError):
    """A puzzle file with lines that hold no usable puzzle; its text has one `file:line: reason` for each."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        super().__init__(source, problems)
        self.source = source
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(f"{self.source}:{line}: {reason}" for line, reason in self.problems)


# --- made from a seed


def make_puzzles(n: int, *, seed: int, avoid: Boards | None = None, progress: bool = False) -> Puzzles:
    """Puzzles with exactly one solution that naked singles alone do not solve, each from a board of its own.

    The clues of a random board are tried in random order and removed where the solution stays unique, until a number
    of clues drawn from 24 to 30 is left or none can go. No two solutions are symmetric to each other or to a board of
    avoid. The first puzzles of a longer draw are the puzzles of a shorter one.

    Args:
        n: how many.
        seed: at least 0.
        avoid: complete boards [m, 81].
        progress: show a bar, if the output is a terminal.

    Returns:
        Puzzles with n rows.

    Example:
        >>> puzzles = make_puzzles(2, seed=0)
        >>> count_solutions(puzzles.givens[0].tolist())
        1
    """
    taken = set() if avoid is None else set(fingerprints(avoid).tolist())
    givens: list[list[int]] = []
    solutions: list[list[int]] = []
    with tqdm(total=n, desc="puzzles", disable=None if progress else True) as bar:
        batches = stream_boards(seed=seed)
        tried = 0
        while len(givens) < n:
            batch = next(batches)
            for board, fingerprint in zip(batch.tolist(), fingerprints(batch).tolist(), strict=True):
                puzzle = _remove_clues(board, random_bits(seed, 2, tried))
                tried += 1
                if fingerprint in taken or grade(puzzle) == "naked":
                    continue
                taken.add(fingerprint)
                givens.append(puzzle)
                solutions.append(board)
                bar.update()
                if len(givens) == n:
                    break
    return Puzzles(np.array(givens, np.uint8).reshape(n, 81), np.array(solutions, np.uint8).reshape(n, 81))


def _remove_clues(board: list[int], bits: np.random.PCG64) -> list[int]:
    target = _FEWEST_CLUES + int(bits.random_raw()) % (_MOST_CLUES - _FEWEST_CLUES + 1)
    puzzle = board.copy()
    clues = 81
    for c in bits.random_raw(81).argsort(kind="stable").tolist():
        puzzle[c] = 0
        if count_solutions(puzzle) == 1:
            clues -= 1
            if clues == target:
                break
        else:
            puzzle[c] = board[c]
    return puzzle


def training_boards(n: int = 100_000, *, seed: int = 0) -> Boards:
    """Complete boards to train on, none symmetric to the solution of a shipped puzzle.

    Made in about 0.2 ms a board and kept in the cache folder: MDMI_CACHE, else mdmi_fast below XDG_CACHE_HOME, else
    below ~/.cache. A folder that cannot be written costs the time again in the next process, and is warned of once.

    Args:
        n: how many.
        seed: at least 0.

    Returns:
        uint8 [n, 81], digits 1 to 9.
    """
    boards: Boards = _training_boards(n, seed).copy()
    return boards


@cache
def _training_boards(n: int, seed: int) -> Boards:
    avoid = _shipped_fingerprints()
    path = _cache_folder() / f"sudoku_boards_{n}_{seed}_{zlib.crc32(avoid.tobytes()):08x}.npy"
    boards = _load_boards(path, n)
    if boards is None:
        boards = _boards_apart_from(avoid, n, seed)
        _save_boards(path, boards)
    return boards


@cache
def _shipped_fingerprints() -> npt.NDArray[np.uint64]:
    return np.sort(fingerprints(np.concatenate([test_puzzles().solutions, validation_puzzles().solutions])))


def _boards_apart_from(avoid: npt.NDArray[np.uint64], n: int, seed: int) -> Boards:
    parts = [np.empty((0, 81), dtype=np.uint8)]
    missing = n
    with tqdm(total=n, desc="boards", disable=None) as bar:
        batches = stream_boards(seed=seed)
        while missing > 0:
            batch = next(batches)
            batch = batch[~np.isin(fingerprints(batch), avoid)][:missing]
            parts.append(batch)
            missing -= len(batch)
            bar.update(len(batch))
    return np.concatenate(parts)


def _cache_folder() -> Path:
    named = os.environ.get("MDMI_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdmi_fast"


def _load_boards(path: Path, n: int) -> Boards | None:
    try:
        boards = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if not isinstance(boards, np.ndarray) or boards.shape != (n, 81) or boards.dtype != np.uint8:
        return None
    return boards if is_valid_board(boards).all() else None


def _save_boards(path: Path, boards: Boards) -> None:
    try:
        with replace_file(path) as temporary:
            np.save(temporary, boards)
    except OSError as error:
        _warn_uncached(str(path.parent), str(error.strerror))


@cache
def _warn_uncached(folder: str, reason: str) -> None:
    warnings.warn(
        f"the training boards are kept in memory only: {folder} cannot be written ({reason})",
        RuntimeWarning,
        stacklevel=2,
    )


# --- shipped


def test_puzzles() -> Puzzles:
    """The 1,000 shipped test puzzles: unique solution, 24 to 30 clues, never for choosing a setting."""
    return _shipped(_TEST)


test_puzzles.__test__ = False  # type: ignore[attr-defined]  # its name makes pytest collect it


def validation_puzzles() -> Puzzles:
    """The 500 shipped validation puzzles, made like the test puzzles: for choosing settings."""
    return _shipped(_VALIDATION)


def _shipped(name: str) -> Puzzles:
    text = (files("mdmi_fast.tasks.sudoku") / "data" / name).read_text(encoding="ascii")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    cells = np.frombuffer("".join(map("".join, lines)).replace(".", "0").encode(), dtype=np.uint8) - ord("0")
    grids = cells.reshape(len(lines), 2, 81)
    return Puzzles(grids[:, 0].copy(), grids[:, 1].copy())


def _describe(title: str, puzzles: Puzzles, seed: int) -> str:
    clues = (puzzles.givens > 0).sum(axis=1)
    search = sum(grade(givens) == "search" for givens in puzzles.givens.tolist()) / len(clues)
    lines = [
        f"{title}: {len(clues)} Sudoku puzzles with one solution each, seed {seed}.",
        "A puzzle a line ('.' is a blank), then its solution; both in reading order.",
        (
            f"Clues: mean {clues.mean():.2f}, from {clues.min()} to {clues.max()}. Naked singles alone solve none; "
            f"naked and hidden singles together do not solve {search:.1%}."
        ),
        "Made by python -m mdmi_fast.tasks.sudoku.puzzles. No two solutions here are symmetric to each other.",
    ]
    return "".join(f"# {line}\n" for line in lines)


def _write_puzzles(path: Path, title: str, puzzles: Puzzles, seed: int) -> None:
    rows = zip(puzzles.givens, puzzles.solutions, strict=True)
    body = "".join(f"{format_line(givens)} {format_line(solution)}\n" for givens, solution in rows)
    with replace_file(path) as temporary:
        temporary.write_text(_describe(title, puzzles, seed) + body, encoding="ascii", newline="\n")


# --- read from a file

_DIGITS = {**{str(digit): digit for digit in range(1, 10)}, **dict.fromkeys(".0*_", 0)}
_HEADINGS = {"puzzle", "puzzles", "quizzes", "sudoku", "puzzle,solution", "quizzes,solutions"}
_MOST_PROBLEMS = 20


def read_puzzles(source: str | os.PathLike[str] | Iterable[str], *, check_unique: bool = True) -> Puzzles:
    """The puzzles of a text file, one a line.

    A line has 81 cells in reading order: 1 to 9, and '.', '0', '*' or '_' for a blank. Spaces, tabs, commas and '|' may
    stand anywhere; '#' starts a comment; empty lines are skipped, and so is a first line with the usual column names
    ("quizzes,solutions"). 81 further cells are the solution of the puzzle and are checked. A byte order mark and any
    kind of line ends are fine.

    Args:
        source: a file's path, or its lines (an open file, sys.stdin, a list of strings).
        check_unique: a puzzle with several solutions is an error; False takes it, with one of its solutions.

    Returns:
        Puzzles in the order of the file; none if it has none.

    Raises:
        PuzzleError: names each line that is wrong and why, at most 20 of them: wrong characters, wrong length, two
            equal givens in a unit, no solution, several solutions, a wrong solution.
        OSError: the file cannot be read.

    Example:
        >>> puzzle = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."
        >>> format_line(read_puzzles([puzzle]).solutions[0])[:9]
        '812753649'
    """
    if isinstance(source, (str, os.PathLike)):
        # A byte that is no UTF-8 becomes a wrong character, which has a line to be named.
        with Path(source).open(encoding="utf-8-sig", errors="surrogateescape") as file:
            return _read_lines(os.fspath(source), file, check_unique)
    return _read_lines(str(check.attribute(source, "name") or "<lines>"), source, check_unique)


def _read_lines(name: str, lines: Iterable[str], check_unique: bool) -> Puzzles:
    givens: list[list[int]] = []
    solutions: list[list[int]] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].rstrip()
        if number == 1:
            text = text.removeprefix("\ufeff")
            problem = wrong_encoding(text[:4])
            if problem is not None and "UTF-16" in problem:
                raise PuzzleError(name, [Problem(number, problem)])
            if "".join(text.lower().split()) in _HEADINGS:
                continue
        if not text:
            continue
        try:
            puzzle, solution = _parse(text, check_unique)
        except ValueError as error:
            problems.append(Problem(number, str(error)))
            if len(problems) == _MOST_PROBLEMS:
                break
        else:
            givens.append(puzzle)
            solutions.append(solution)
    if problems:
        raise PuzzleError(name, problems)
    n = len(givens)
    return Puzzles(np.array(givens, np.uint8).reshape(n, 81), np.array(solutions, np.uint8).reshape(n, 81))


def _parse(text: str, check_unique: bool) -> tuple[list[int], list[int]]:
    """The puzzle of a line and its solution; a ValueError tells the reason why it has none."""
    cells: list[int] = []
    for position, character in enumerate(text, 1):
        if character in _DIGITS:
            cells.append(_DIGITS[character])
        elif "\udc80" <= character <= "\udcff":
            raise ValueError(f"byte 0x{ord(character) - 0xDC00:02x} (character {position}) is not UTF-8")
        elif not (character in ",|" or character.isspace()):
            raise ValueError(f"{character!r} (character {position}) is neither a digit nor a blank (. 0 * _)")
    if len(cells) not in (81, 162):
        raise ValueError(f"81 cells expected, got {len(cells)}")
    puzzle, stated = cells[:81], cells[81:]
    conflict = find_conflict(puzzle)
    if conflict is not None:
        raise ValueError(str(conflict))
    found = solve(puzzle, limit=2 if check_unique or stated else 1)
    if not found:
        raise ValueError("no solution")
    if check_unique and len(found) > 1:
        c, first, second = next((c, a, b) for c, (a, b) in enumerate(zip(*found, strict=True)) if a != b)
        raise ValueError(f"several solutions: row {c // 9 + 1} column {c % 9 + 1} can be {first} or {second}")
    if not stated:
        return puzzle, found[0]
    agrees = all(given in (0, digit) for given, digit in zip(puzzle, stated, strict=True))
    if not (agrees and is_valid_board(np.array(stated))):
        raise ValueError("the second grid of the line is not a solution of the first")
    return puzzle, stated


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the two shipped files."""
    parser = argparse.ArgumentParser(prog="python -m mdmi_fast.tasks.sudoku.puzzles", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="where to write them")
    parser.add_argument("--seed", type=int, default=SEED, help="of the test puzzles; the next one is the validation's")
    parser.add_argument("--test", type=int, default=_N_TEST, metavar="N", help="test puzzles (default %(default)s)")
    parser.add_argument("--validation", type=int, default=_N_VALIDATION, metavar="N", help="default %(default)s")
    options = parser.parse_args(arguments)
    check_folder(options.folder)
    options.folder.mkdir(parents=True, exist_ok=True)
    test = make_puzzles(options.test, seed=options.seed, progress=True)
    validation = make_puzzles(options.validation, seed=options.seed + 1, avoid=test.solutions, progress=True)
    _write_puzzles(options.folder / _TEST, "Test", test, options.seed)
    _write_puzzles(options.folder / _VALIDATION, "Validation", validation, options.seed + 1)


if __name__ == "__main__":
    sys.exit(run_program("python -m mdmi_fast.tasks.sudoku.puzzles", main))
