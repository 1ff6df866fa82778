"""Sudoku for the commands: puzzles in, boards judged by the rules, maps compared with them."""

from __future__ import annotations

from typing import Any

from mdmi_fast.tasks.base import Structure, Task
from mdmi_fast.tasks.sudoku.boards import rule_matrix
from mdmi_fast.tasks.sudoku.puzzles import format_line, is_valid_board, read_puzzles


def _read_lines(lines: list[str]) -> list[tuple[list[int], dict[str, Any]]]:
    boards = read_puzzles(lines, check_unique=False).givens
    return [(board.tolist(), {"puzzle": format_line(board)}) for board in boards]


def _structure() -> Structure:
    labels = [f"r{cell // 9 + 1}c{cell % 9 + 1}" for cell in range(81)]
    return Structure("sharing a row, column or box", rule_matrix(), labels, block=9)


TASK = Task(unit="puzzle", read_lines=_read_lines, quality=is_valid_board, structure=_structure)
