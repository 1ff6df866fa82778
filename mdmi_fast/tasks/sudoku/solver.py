"""All solutions of one Sudoku puzzle, by propagation and search on sets of cells held as 81-bit integers.

The state is nine integers, one a digit: the cells where the digit can still stand. A cell left with one digit (a naked
single) and a digit left with one cell of a row, column or box (a hidden single) are forced; the search branches on the
cell, or the digit of a unit, with the fewest possibilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from mdmi_fast.tasks.sudoku.boards import PEERS, UNITS

_FULL = (1 << 81) - 1
_UNITS = [sum(1 << int(c) for c in unit) for unit in UNITS]
_UNIT_CELLS = [[int(c) for c in unit] for unit in UNITS]
_WITHOUT_PEERS = [_FULL & ~sum(1 << int(p) for p in peers) for peers in PEERS]


class Conflict(NamedTuple):
    """Two cells of a unit that hold the same digit."""

    unit: int
    """0 to 8 a row, 9 to 17 a column, 18 to 26 a box."""
    digit: int
    cells: tuple[int, int]

    def __str__(self) -> str:
        kind, number = ("row", "column", "box")[self.unit // 9], self.unit % 9 + 1
        first, second = (f"row {c // 9 + 1} column {c % 9 + 1}" for c in self.cells)
        return f"{kind} {number}: two {self.digit}s, at {first} and {second}"


def find_conflict(board: Sequence[int]) -> Conflict | None:
    """The first two givens of a board [81] (0 = blank) that break a rule: rows, then columns, then boxes."""
    for unit, cells in enumerate(_UNIT_CELLS):
        seen: dict[int, int] = {}
        for c in cells:
            digit = int(board[c])
            if digit and digit in seen:
                return Conflict(unit, digit, (seen[digit], c))
            seen[digit] = c
    return None


def solve(board: Sequence[int], *, limit: int = 2) -> list[list[int]]:
    """The solutions of a puzzle, at most limit of them; the default tells none, one and several apart.

    Args:
        board: [81], digits 1 to 9 and 0 for a blank; contradictory givens have no solution.
        limit: at least 1.

    Returns:
        Up to limit lists of 81 digits, in an order that depends on the board only.

    Raises:
        ValueError: board is not 81 integers from 0 to 9, or limit is below 1.

    Example:
        >>> len(solve([0] * 81, limit=3))
        3
    """
    if limit < 1:
        raise ValueError(f"solve: limit must be at least 1, got {limit}")
    state = _start(_checked("solve", board))
    solutions: list[list[int]] = []
    if state is not None:
        for cells in _search(*state):
            solutions.append(_digits(cells))
            if len(solutions) == limit:
                break
    return solutions


def count_solutions(board: Sequence[int], *, limit: int = 2) -> int:
    """How many solutions a puzzle [81] has, counted up to limit; see solve."""
    return len(solve(board, limit=limit))


Grade = Literal["naked", "hidden", "search"]


def grade(board: Sequence[int]) -> Grade:
    """What a puzzle [81] with a unique solution needs: naked singles only, hidden singles too, or more than singles.

    Example:
        >>> easy = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
        >>> grade([int(cell) for cell in easy])
        'naked'
    """
    puzzle = _checked("grade", board)
    names: tuple[Grade, Grade] = ("naked", "hidden")
    for name in names:
        state = _start(puzzle)
        if state is None:
            break
        if _propagate(*state, hidden=name == "hidden") == 0:
            return name
    return "search"


def _checked(where: str, board: Sequence[int]) -> list[int]:
    if len(board) != 81:
        raise ValueError(f"{where}: board must have 81 cells, got {len(board)}")
    digits = [int(digit) for digit in board]
    if min(digits) < 0 or max(digits) > 9 or any(digit != given for digit, given in zip(digits, board, strict=True)):
        raise ValueError(f"{where}: board must hold integers from 0 to 9")
    return digits


def _start(board: list[int]) -> tuple[list[int], int] | None:
    """The nine sets of cells with the givens placed, and the set of blank cells; None if two givens contradict."""
    cells = [_FULL] * 9
    left = _FULL
    for c, digit in enumerate(board):
        if digit:
            if not cells[digit - 1] >> c & 1:
                return None
            _place(cells, digit - 1, c)
            left ^= 1 << c
    return cells, left


def _place(cells: list[int], digit: int, c: int) -> None:
    others = ~(1 << c)
    here = cells[digit] & _WITHOUT_PEERS[c]
    for d in range(9):
        cells[d] &= others
    cells[digit] = here


def _propagate(cells: list[int], left: int, *, hidden: bool = True) -> int:
    """Places singles in cells (changing it) until none is found; the blank cells left, -1 for a contradiction."""
    while left:
        once = twice = 0
        for mask in cells:
            twice |= once & mask
            once |= mask
        if left & ~once:
            return -1
        single = left & ~twice
        if single:
            for d in range(9):
                found = cells[d] & single
                while found:
                    bit = found & -found
                    found ^= bit
                    if not cells[d] & bit:
                        return -1
                    _place(cells, d, bit.bit_length() - 1)
            left &= ~single
        elif hidden:
            before = left
            for d in range(9):
                for unit in _UNITS:
                    where = cells[d] & unit
                    if where & (where - 1) == 0:
                        if where == 0:
                            return -1
                        if where & left:
                            _place(cells, d, where.bit_length() - 1)
                            left ^= where
            if left == before:
                break
        else:
            break
    return left


def _search(cells: list[int], left: int) -> Iterator[list[int]]:
    """Every completed state below a state, depth first."""
    left = _propagate(cells, left)
    if left == -1:
        return
    if left == 0:
        yield cells
        return
    for digit, c in _branches(cells, left):
        below = cells.copy()
        _place(below, digit, c)
        yield from _search(below, left ^ 1 << c)


def _branches(cells: list[int], left: int) -> list[tuple[int, int]]:
    """(digit, cell) placements of which every solution holds exactly one, as few as can be found."""
    once = twice = more = 0
    for mask in cells:
        more |= twice & mask
        twice |= once & mask
        once |= mask
    two = left & ~more
    if two:
        bit = two & -two
        return [(d, bit.bit_length() - 1) for d in range(9) if cells[d] & bit]
    by_cell = [[(d, c) for d in range(9) if cells[d] >> c & 1] for c in _bits(left)]
    by_unit = [[(d, c) for c in _bits(cells[d] & unit & left)] for d in range(9) for unit in _UNITS]
    return min((options for options in by_cell + by_unit if options), key=len)


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        bit = mask & -mask
        found.append(bit.bit_length() - 1)
        mask ^= bit
    return found


def _digits(cells: list[int]) -> list[int]:
    board = [0] * 81
    for digit, mask in enumerate(cells, 1):
        for c in _bits(mask):
            board[c] = digit
    return board
