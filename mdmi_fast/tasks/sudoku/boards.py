"""Complete Sudoku boards: made at random from a seed, checked, compared up to symmetry, emptied, printed.

A board is 81 digits in reading order, 0 for a blank. Everything here is array work on many boards at once; the search
for the solutions of one puzzle is in solver.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Boards = npt.NDArray[np.uint8]
_Array = TypeVar("_Array", np.ndarray, torch.Tensor)

_CELLS = np.arange(81)
_ROW, _COLUMN = _CELLS // 9, _CELLS % 9
_BOX = _ROW // 3 * 3 + _COLUMN // 3
UNITS = np.stack([np.flatnonzero(group == k) for group in (_ROW, _COLUMN, _BOX) for k in range(9)])
"""int64 [27, 9]: the cells of the nine rows, the nine columns and the nine boxes."""
PEERS = np.stack([np.setdiff1d(UNITS[np.isin(UNITS, c).any(axis=1)], [c]) for c in _CELLS])
"""int64 [81, 20]: the cells that share a row, a column or a box with a cell."""

_ALL = 511  # one bit per digit
_COUNT = np.array([bin(m).count("1") for m in range(512)], dtype=np.uint16)
# _NTH_BIT[m, k]: the k-th lowest bit of the mask m
_NTH_BIT = np.zeros((512, 9), dtype=np.uint16)
for _m in range(1, 512):
    _bits = [1 << d for d in range(9) if _m >> d & 1]
    _NTH_BIT[_m, : len(_bits)] = _bits
_ATTEMPTS = 1024  # boards tried at once: part of what a seed means, so changing it changes every board


def rule_matrix() -> torch.Tensor:
    """[81, 81] bool: True where two cells share a row, a column or a box."""
    shared = torch.zeros(81, 81, dtype=torch.bool, device="cpu")
    return shared.scatter_(1, torch.from_numpy(PEERS), True)


def random_bits(seed: int, *stream: int) -> np.random.PCG64:
    """The source of randomness for one purpose (stream 0, ... boards, 1 clues, 2, ... puzzles) of a seed.

    Draws are read with random_raw: numpy keeps those for ever, and not those of its Generator's methods.
    """
    return np.random.PCG64(np.random.SeedSequence([seed, *stream]))


def _fill(bits: np.random.PCG64) -> Boards:
    """Boards [m, 81] that came out complete of _ATTEMPTS random fillings, most constrained cell first."""
    n = _ATTEMPTS
    candidates = np.full((n, 81), _ALL, dtype=np.uint16)
    # Ties between equally constrained cells are broken by an order drawn per board. A filled cell carries 0xFFFF.
    order = (bits.random_raw(n * 81).reshape(n, 81) & 0xFFF).astype(np.uint16)
    key = (_COUNT[candidates] << 12) | order
    draws = bits.random_raw(81 * n).reshape(81, n)
    for step in range(81):
        rows = np.arange(len(candidates))
        cell = key.argmin(axis=1)
        mask = candidates[rows, cell]
        count = np.maximum(_COUNT[mask], 1)
        digit = _NTH_BIT[mask, (draws[step] >> np.uint64(16)) % count]
        candidates[rows, cell] = digit
        order[rows, cell] = key[rows, cell] = 0xFFFF
        peers = PEERS[cell]
        at = rows[:, None]
        left = candidates[at, peers] & ~digit[:, None]
        candidates[at, peers] = left
        key[at, peers] = (_COUNT[left] << 12) | order[at, peers]
        alive = left.all(axis=1)
        if not alive.all():
            candidates, order, key, draws = candidates[alive], order[alive], key[alive], draws[:, alive]
    digits = np.zeros(512, dtype=np.uint8)
    digits[1 << np.arange(9)] = np.arange(1, 10)
    return digits[candidates]


def stream_boards(*, seed: int) -> Iterator[Boards]:
    """Complete boards without end, in batches uint8 [m, 81] of some hundreds, always the same ones for a seed."""
    batch = 0
    while True:
        yield _fill(random_bits(seed, 0, batch))
        batch += 1


def random_boards(n: int, *, seed: int) -> Boards:
    """Complete valid boards, drawn at random: the most constrained cell first, its digit uniform over what is left.

    Every board can come out; the draw is not exactly uniform over all boards. Boards that dead-end (44%) are dropped.
    The first boards of a longer draw are the boards of a shorter one with the same seed, on every numpy version.

    Args:
        n: how many, at least 0.
        seed: at least 0.

    Returns:
        uint8 [n, 81], digits 1 to 9.

    Raises:
        ValueError: n or seed is negative.

    Example:
        >>> boards = random_boards(3, seed=0)
        >>> boards.shape, bool(is_valid_board(boards).all())
        ((3, 81), True)
    """
    if n < 0 or seed < 0:
        raise ValueError(f"random_boards: n and seed must be at least 0, got n={n}, seed={seed}")
    boards = np.empty((n, 81), dtype=np.uint8)
    have = 0
    batches = stream_boards(seed=seed)
    while have < n:
        batch = next(batches)[: n - have]
        boards[have : have + len(batch)] = batch
        have += len(batch)
    return boards


def random_clues(boards: Boards, n_clues: int, *, seed: int) -> Boards:
    """The boards with n_clues of their cells kept, chosen uniformly and apart for every board.

    With few clues there are many ways to complete one: the puzzles of the completion task.

    Args:
        boards: [n, 81], complete or not.
        n_clues: 0 to 81.
        seed: at least 0.

    Returns:
        Givens [n, 81] of the boards' dtype, 0 where a cell is blank.

    Raises:
        ValueError: boards is not [n, 81], or n_clues is out of range.

    Example:
        >>> givens = random_clues(random_boards(2, seed=0), 20, seed=1)
        >>> (givens > 0).sum(axis=1).tolist()
        [20, 20]
    """
    _check_boards("random_clues", boards)
    if not 0 <= n_clues <= 81:
        raise ValueError(f"random_clues: n_clues must be from 0 to 81, got {n_clues}")
    keys = random_bits(seed, 1).random_raw(boards.size).reshape(boards.shape)
    kept = keys.argsort(axis=1)[:, :n_clues]
    givens = np.zeros_like(boards)
    np.put_along_axis(givens, kept, np.take_along_axis(boards, kept, axis=1), axis=1)
    return givens


def is_valid_board(boards: _Array) -> _Array:
    """Whether boards are complete and obey the rules: every row, column and box holds 1 to 9 once each.

    Args:
        boards: integers [..., 81], a torch tensor on any device or a numpy array; values beyond 1 to 9 are not valid.

    Returns:
        bool [...], a tensor (same device) for a tensor and an array for an array.

    Raises:
        TypeError: boards is neither, or does not hold integers.
        ValueError: the last dimension is not 81.

    Example:
        >>> is_valid_board(torch.zeros(2, 81, dtype=torch.int64))
        tensor([False, False])
    """
    if isinstance(boards, np.ndarray):
        if boards.dtype.kind not in "iu":
            raise TypeError(f"is_valid_board: boards must hold integers, got {boards.dtype}")
        return np.asarray(is_valid_board(torch.from_numpy(boards.astype(np.int64))).numpy())
    if not isinstance(boards, torch.Tensor):
        raise TypeError(f"is_valid_board: boards must be a torch tensor or a numpy array, got {type(boards).__name__}")
    if boards.is_floating_point() or boards.is_complex() or boards.dtype == torch.bool:
        raise TypeError(f"is_valid_board: boards must hold integers, got {boards.dtype}")
    if boards.ndim == 0 or boards.shape[-1] != 81:
        raise ValueError(f"is_valid_board: boards must be [..., 81], got shape {tuple(boards.shape)}")
    digits = boards.long()
    # Four bits count each digit of a unit; nine cells overflow none of them.
    weight = torch.where((digits >= 1) & (digits <= 9), torch.ones_like(digits) << (4 * digits.clamp(1, 9)), 0)
    grid = weight.reshape(*weight.shape[:-1], 9, 9)
    boxes = weight.reshape(*weight.shape[:-1], 3, 3, 3, 3).sum((-3, -1)).flatten(-2)
    units = torch.stack([grid.sum(-1), grid.sum(-2), boxes], dim=-2)
    return (units == 0x1111111110).flatten(-2).all(-1)


def fingerprints(boards: Boards) -> npt.NDArray[np.uint64]:
    """A number per board that all boards symmetric to it share; different numbers prove that two boards are not.

    The symmetries are all of Sudoku's: digits renamed; bands, stacks, rows in a band and columns in a stack permuted;
    the board transposed. A digit is three permutations of nine (its rows to columns, rows to boxes, columns to boxes),
    and for two digits a, b the cycle lengths of p_a^-1 p_b survive them all. The number hashes those of all 36 pairs.

    Args:
        boards: [n, 81], complete valid boards.

    Returns:
        uint64 [n].

    Example:
        >>> board = random_boards(1, seed=0)
        >>> bool((fingerprints(board) == fingerprints(board.reshape(1, 9, 9).swapaxes(1, 2).reshape(1, 81))).all())
        True
    """
    _check_boards("fingerprints", boards)
    n = len(boards)
    if n > 4096:
        return np.concatenate([fingerprints(part) for part in np.array_split(boards, -(-n // 4096))])
    cells = boards.argsort(axis=1, kind="stable").reshape(n, 9, 9)  # of each digit, by row
    columns = _COLUMN[cells]
    boxes = _BOX[cells]
    by_column = columns.argsort(axis=2)
    boxes_by_column = np.take_along_axis(boxes, by_column, axis=2)
    row_column, row_box, column_box = (_pair_cycles(p) for p in (columns, boxes, boxes_by_column))
    # Transposing exchanges rows and columns, that is the last two.
    one = _mix(_mix(_mix(row_column) + row_box) + column_box).sum(axis=1)
    other = _mix(_mix(_mix(row_column) + column_box) + row_box).sum(axis=1)
    return np.asarray(_mix(one) + _mix(other))


def _pair_cycles(p: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """[n, 9 digits, 9] permutations -> [n, 36]: a code of the cycle lengths of p_a^-1 p_b for each pair a < b."""
    a, b = np.triu_indices(9, 1)
    q = np.take_along_axis(p.argsort(axis=2)[:, a], p[:, b], axis=2)
    code = np.zeros(q.shape[:2], dtype=np.uint64)
    power = q
    # The fixed points of q, q^2, ..., q^5 tell all cycle types of nine things apart.
    for _ in range(5):
        code = code * np.uint64(10) + (power == np.arange(9)).sum(axis=2).astype(np.uint64)
        power = np.take_along_axis(q, power, axis=2)
    return code


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 finaliser, a bijection of 64 bits."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def format_line(board: npt.ArrayLike, *, blank: str = ".") -> str:
    """A board [81] as 81 characters, the form that puzzle files have.

    Example:
        >>> format_line([5, 0, 1] + [0] * 78)[:5]
        '5.1..'
    """
    return "".join(str(digit) if digit else blank for digit in _one_board("format_line", board))


def format_board(board: npt.ArrayLike, *, blank: str = ".") -> str:
    """A board [81] as a grid of nine lines with its boxes drawn.

    Example:
        >>> print(format_board([5, 3, 0] + [0] * 78).splitlines()[0])
        5 3 . | . . . | . . .
    """
    text = format_line(_one_board("format_board", board), blank=blank)
    lines = [" | ".join(" ".join(text[at + k : at + k + 3]) for k in (0, 3, 6)) for at in range(0, 81, 9)]
    rule = "------+-------+------"
    return "\n".join([*lines[:3], rule, *lines[3:6], rule, *lines[6:]])


def _one_board(where: str, board: npt.ArrayLike) -> list[int]:
    digits = np.asarray(board)
    if digits.shape != (81,):
        raise ValueError(f"{where}: board must be [81], got shape {digits.shape}")
    if digits.dtype.kind not in "iu" or digits.min() < 0 or digits.max() > 9:
        raise ValueError(f"{where}: board must hold integers from 0 to 9")
    return [int(digit) for digit in digits]


def _check_boards(where: str, boards: Boards) -> None:
    if not isinstance(boards, np.ndarray):
        raise TypeError(f"{where}: boards must be a numpy array, got {type(boards).__name__}")
    if boards.ndim != 2 or boards.shape[1] != 81:
        raise ValueError(f"{where}: boards must be [n, 81], got shape {boards.shape}")
