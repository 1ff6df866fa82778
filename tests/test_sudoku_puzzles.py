"""Sudoku boards, the solver, the shipped puzzles, and the reader of puzzle files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mdmi_fast.tasks.sudoku import boards as boards_module
from mdmi_fast.tasks.sudoku import puzzles as puzzles_module
from mdmi_fast.tasks.sudoku.boards import fingerprints
from mdmi_fast.tasks.sudoku.puzzles import (
    SEED,
    PuzzleError,
    format_board,
    format_line,
    is_valid_board,
    main,
    make_puzzles,
    random_boards,
    random_clues,
    read_puzzles,
    test_puzzles,
    training_boards,
    validation_puzzles,
)
from mdmi_fast.tasks.sudoku.solver import count_solutions, find_conflict, grade, solve

EASY = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
EASY_SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
# Arto Inkala's puzzle of 2012, often called the hardest.
HARD = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."
HARD_SOLUTION = "812753649943682175675491283154237896369845721287169534521974368438526917796318452"
# No two givens clash, but 5, 6 and 1 cannot all be placed; plain backtracking needs minutes to find out.
IMPOSSIBLE = ".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4........."


def digits(text: str) -> list[int]:
    return [0 if c == "." else int(c) for c in text]


def count_by_trying(board: list[int], limit: int) -> int:
    """Every digit in every blank, in reading order: nothing to get wrong."""
    if 0 not in board:
        return 1
    c = board.index(0)
    total = 0
    for digit in range(1, 10):
        if all(board[peer] != digit for peer in boards_module.PEERS[c]):
            total += count_by_trying([*board[:c], digit, *board[c + 1 :]], limit - total)
            if total >= limit:
                break
    return total


def symmetric_to(board: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    lines = [np.concatenate([3 * band + rng.permutation(3) for band in rng.permutation(3)]) for _ in range(2)]
    grid = board.reshape(9, 9)[np.ix_(*lines)]
    if rng.random() < 0.5:
        grid = grid.T
    renamed: np.ndarray = np.concatenate([[0], 1 + rng.permutation(9)])[grid]
    return renamed.reshape(81).astype(np.uint8)


@pytest.fixture(scope="module")
def boards() -> np.ndarray:
    return random_boards(9000, seed=0)


class TestSolver:
    @pytest.mark.parametrize(("puzzle", "solution"), [(EASY, EASY_SOLUTION), (HARD, HARD_SOLUTION)])
    def test_known_puzzles_have_their_one_solution(self, puzzle: str, solution: str) -> None:
        assert solve(digits(puzzle)) == [digits(solution)]

    def test_solutions_are_counted_like_trying_everything(self) -> None:
        givens = random_clues(random_boards(20, seed=1), 36, seed=2).tolist()
        counts = [count_solutions(board, limit=100) for board in givens]
        assert counts == [count_by_trying(board, 100) for board in givens]
        assert min(counts) == 1
        assert max(counts) > 2

    def test_solutions_are_different_valid_and_keep_the_givens(self) -> None:
        for givens in random_clues(random_boards(5, seed=1), 22, seed=3):
            found = np.array(solve(givens.tolist(), limit=50))
            assert len(np.unique(found, axis=0)) == 50
            assert is_valid_board(found).all()
            assert ((found == givens) | (givens == 0)).all()

    def test_impossible_puzzle_is_refuted(self) -> None:
        assert solve(digits(IMPOSSIBLE)) == []

    def test_contradictory_givens_have_no_solution(self) -> None:
        assert count_solutions([5, 5] + [0] * 79) == 0
        complete = digits(EASY_SOLUTION)
        complete[:2] = complete[1::-1]
        assert count_solutions(complete) == 0

    def test_complete_board_is_its_own_solution(self) -> None:
        assert solve(digits(EASY_SOLUTION)) == [digits(EASY_SOLUTION)]

    @pytest.mark.parametrize("board", [[0] * 80, [10] + [0] * 80, [-1] + [0] * 80, [0.5] + [0] * 80])
    def test_what_is_no_board_is_refused(self, board: list[int]) -> None:
        with pytest.raises(ValueError, match="solve: board must"):
            solve(board)

    def test_limit_below_one_is_refused(self) -> None:
        with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
            solve([0] * 81, limit=0)

    def test_grades_of_known_puzzles(self) -> None:
        assert grade(digits(EASY)) == "naked"
        assert grade(digits(HARD)) == "search"
        # 17 clues, of the kind that needs hidden singles only
        assert (
            grade(digits("000000010400000000020000000000050407008000300001090000300400200050100000000806000"))
            == "hidden"
        )

    @pytest.mark.parametrize(
        ("cells", "message"),
        [
            ((18, 26), "row 3: two 5s, at row 3 column 1 and row 3 column 9"),
            ((4, 76), "column 5: two 5s, at row 1 column 5 and row 9 column 5"),
            ((60, 80), "box 9: two 5s, at row 7 column 7 and row 9 column 9"),
        ],
    )
    def test_conflict_names_the_unit_and_both_cells(self, cells: tuple[int, int], message: str) -> None:
        board = [5 if c in cells else 0 for c in range(81)]
        assert str(find_conflict(board)) == message

    def test_no_conflict_in_a_puzzle(self) -> None:
        assert find_conflict(digits(HARD)) is None


class TestBoards:
    def test_random_boards_are_valid_and_all_different(self, boards: np.ndarray) -> None:
        assert boards.dtype == np.uint8
        assert is_valid_board(boards).all()
        assert len(np.unique(boards, axis=0)) == 9000

    def test_random_boards_are_no_symmetries_of_a_few(self, boards: np.ndarray) -> None:
        # Of 5 * 10^9 pairs of boards 2 were seen to share a fingerprint; 2000 boards have 2 * 10^6 pairs.
        assert len(np.unique(fingerprints(boards[:2000]))) >= 1999

    def test_every_digit_is_as_frequent_in_every_cell(self, boards: np.ndarray) -> None:
        counts = np.stack([(boards == digit).sum(axis=0) for digit in range(1, 10)])
        # 1000 expected, binomial deviation 30; 729 counts stay within 5 deviations
        assert np.abs(counts - 1000).max() < 150

    def test_seed_decides_the_boards_and_longer_draws_begin_like_shorter_ones(self) -> None:
        assert (random_boards(2000, seed=4)[:10] == random_boards(10, seed=4)).all()
        assert (random_boards(10, seed=4) != random_boards(10, seed=5)).any()

    def test_seed_gives_these_boards_on_every_machine(self) -> None:
        assert (
            format_line(random_boards(1, seed=0)[0])
            == "758341926621798345439265781865473192913526478247189563576834219382917654194652837"
        )

    def test_no_boards(self) -> None:
        assert random_boards(0, seed=0).shape == (0, 81)
        assert is_valid_board(random_boards(0, seed=0)).shape == (0,)

    def test_negative_numbers_are_refused(self) -> None:
        with pytest.raises(ValueError, match="n=-1, seed=0"):
            random_boards(-1, seed=0)

    def test_every_broken_unit_is_seen(self) -> None:
        board = np.array(digits(EASY_SOLUTION))
        assert is_valid_board(board).item() is True
        for c in range(81):
            for digit in range(-1, 11):
                changed = board.copy()
                changed[c] = digit
                assert bool(is_valid_board(changed)) == (digit == board[c])

    @pytest.mark.parametrize("step", [1, 3])
    def test_latin_square_with_wrong_boxes_is_not_valid(self, step: int) -> None:
        row = np.arange(9)
        shifts = np.arange(9) if step == 1 else np.array([0, 3, 6, 1, 4, 7, 2, 5, 8])
        square = ((row[None, :] + shifts[:, None]) % 9 + 1).reshape(81)
        assert is_valid_board(square).item() is (step == 3)

    def test_validity_keeps_kind_and_leading_dimensions(self) -> None:
        boards = torch.from_numpy(random_boards(6, seed=0)).reshape(2, 3, 81)
        boards[1, 2, 0] = 0
        valid = is_valid_board(boards)
        assert isinstance(valid, torch.Tensor)
        assert valid.tolist() == [[True, True, True], [True, True, False]]
        assert isinstance(is_valid_board(boards.numpy()), np.ndarray)
        assert is_valid_board(boards.mT.contiguous().mT.long()).tolist() == valid.tolist()

    def test_validity_refuses_other_shapes_and_types(self) -> None:
        with pytest.raises(ValueError, match=r"boards must be \[..., 81\], got shape \(9, 9\)"):
            is_valid_board(torch.zeros(9, 9, dtype=torch.int64))
        with pytest.raises(TypeError, match="integers"):
            is_valid_board(torch.zeros(81))
        with pytest.raises(TypeError, match="integers"):
            is_valid_board(np.zeros(81))

    def test_clues_are_that_many_and_the_board_s(self) -> None:
        boards = random_boards(400, seed=0)
        givens = random_clues(boards, 20, seed=1)
        assert ((givens > 0).sum(axis=1) == 20).all()
        assert ((givens == boards) | (givens == 0)).all()
        # 400 * 20 / 81 = 98.8 expected in a cell, deviation 8.6
        assert np.abs((givens > 0).sum(axis=0) - 98.8).max() < 5 * 8.6
        assert (random_clues(boards, 20, seed=1) == givens).all()
        assert (random_clues(boards, 20, seed=2) != givens).any()

    def test_no_clue_and_every_clue(self) -> None:
        boards = random_boards(2, seed=0)
        assert (random_clues(boards, 0, seed=0) == 0).all()
        assert (random_clues(boards, 81, seed=0) == boards).all()
        with pytest.raises(ValueError, match="from 0 to 81, got 82"):
            random_clues(boards, 82, seed=0)

    def test_fingerprint_survives_every_symmetry(self) -> None:
        rng = np.random.default_rng(0)
        boards = random_boards(200, seed=0)
        moved = np.stack([symmetric_to(board, rng) for board in boards])
        assert is_valid_board(moved).all()
        assert (fingerprints(moved) == fingerprints(boards)).all()

    def test_board_is_printed_as_a_grid_and_as_a_line(self) -> None:
        lines = format_board(digits(EASY)).splitlines()
        assert lines[0] == "5 3 . | . 7 . | . . ."
        assert lines[3] == lines[7] == "------+-------+------"
        assert lines[10] == ". . . | . 8 . | . 7 9"
        assert len(lines) == 11
        assert format_line(digits(EASY), blank="0") == EASY
        with pytest.raises(ValueError, match=r"format_line: board must be \[81\], got shape \(9, 9\)"):
            format_line(np.zeros((9, 9), dtype=np.uint8))


class TestShipped:
    @pytest.mark.parametrize(("load", "n"), [(test_puzzles, 1000), (validation_puzzles, 500)])
    def test_files_hold_hard_puzzles_and_their_solutions(self, load: object, n: int) -> None:
        assert callable(load)
        givens, solutions = load()
        assert givens.shape == solutions.shape == (n, 81)
        assert givens.dtype == solutions.dtype == np.uint8
        assert is_valid_board(solutions).all()
        assert ((givens == solutions) | (givens == 0)).all()
        clues = (givens > 0).sum(axis=1)
        assert 26.5 < clues.mean() < 27.5
        assert clues.min() >= 24

    def test_solutions_are_the_only_ones(self) -> None:
        for givens, solutions in (test_puzzles(), validation_puzzles()):
            for puzzle, solution in zip(givens.tolist(), solutions.tolist(), strict=True):
                assert solve(puzzle) == [solution]
                assert grade(puzzle) != "naked"

    def test_no_two_solutions_are_symmetric(self) -> None:
        solutions = np.concatenate([test_puzzles().solutions, validation_puzzles().solutions])
        assert len(np.unique(fingerprints(solutions))) == 1500

    def test_first_puzzles_come_from_the_seed_again(self) -> None:
        test, validation = test_puzzles(), validation_puzzles()
        again = make_puzzles(6, seed=SEED)
        assert (again.givens == test.givens[:6]).all()
        assert (again.solutions == test.solutions[:6]).all()
        again = make_puzzles(4, seed=SEED + 1, avoid=test.solutions)
        assert (again.givens == validation.givens[:4]).all()

    def test_command_writes_files_that_the_reader_takes(self, tmp_path: Path) -> None:
        main([str(tmp_path / "new"), "--test", "3", "--validation", "2"])
        written = read_puzzles(tmp_path / "new" / "test_1000.txt")
        assert (written.givens == test_puzzles().givens[:3]).all()
        assert (written.solutions == test_puzzles().solutions[:3]).all()
        assert len(read_puzzles(tmp_path / "new" / "validation_500.txt").givens) == 2

    def test_make_puzzles_avoids_boards_and_their_symmetries(self) -> None:
        first = make_puzzles(3, seed=7)
        rng = np.random.default_rng(0)
        moved = np.stack([symmetric_to(first.solutions[0], rng)])
        assert (make_puzzles(2, seed=7, avoid=moved).givens == first.givens[1:]).all()


class TestTrainingBoards:
    @pytest.fixture(autouse=True)
    def fresh(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MDMI_CACHE", str(tmp_path / "cache"))
        puzzles_module._training_boards.cache_clear()
        puzzles_module._warn_uncached.cache_clear()

    def test_boards_are_apart_from_the_shipped_solutions(self) -> None:
        # The seed of the test puzzles: their boards would be among the first ones.
        boards = training_boards(1500, seed=SEED)
        assert boards.shape == (1500, 81)
        assert is_valid_board(boards).all()
        shipped = np.concatenate([test_puzzles().solutions, validation_puzzles().solutions])
        assert not np.isin(fingerprints(boards), fingerprints(shipped)).any()
        drawn = random_boards(1500, seed=SEED)
        assert np.isin(fingerprints(drawn), fingerprints(shipped)).sum() >= 1000

    def test_boards_are_kept_in_one_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        boards = training_boards(50)
        (kept,) = (tmp_path / "cache").iterdir()
        assert (np.load(kept) == boards).all()
        puzzles_module._training_boards.cache_clear()
        monkeypatch.setattr(puzzles_module, "stream_boards", None)
        assert (training_boards(50) == boards).all()

    def test_caller_may_write_to_the_boards(self) -> None:
        boards = training_boards(5)
        boards[:] = 0
        assert is_valid_board(training_boards(5)).all()

    @pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01", b"not an array"])
    def test_damaged_file_is_made_again(self, tmp_path: Path, content: bytes) -> None:
        boards = training_boards(5)
        (kept,) = (tmp_path / "cache").iterdir()
        kept.write_bytes(content)
        puzzles_module._training_boards.cache_clear()
        assert (training_boards(5) == boards).all()
        assert (np.load(kept) == boards).all()

    def test_folder_that_cannot_be_written_is_warned_of_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("MDMI_CACHE", str(tmp_path / "file" / "below"))
        with pytest.warns(RuntimeWarning, match="kept in memory only"):
            boards = training_boards(5)
        assert is_valid_board(boards).all()
        assert len(training_boards(6)) == 6


class TestReader:
    def read(self, tmp_path: Path, content: bytes) -> list[str]:
        path = tmp_path / "puzzles.txt"
        path.write_bytes(content)
        return [format_line(givens, blank="0") for givens in read_puzzles(path).givens]

    def test_puzzles_come_with_their_solutions(self) -> None:
        puzzles = read_puzzles([EASY, HARD])
        assert puzzles.givens.tolist() == [digits(EASY), digits(HARD)]
        assert puzzles.solutions.tolist() == [digits(EASY_SOLUTION), digits(HARD_SOLUTION)]
        assert puzzles.givens.dtype == puzzles.solutions.dtype == np.uint8

    @pytest.mark.parametrize("blank", ".0*_")
    def test_blanks(self, tmp_path: Path, blank: str) -> None:
        assert self.read(tmp_path, EASY.replace("0", blank).encode()) == [EASY]

    @pytest.mark.parametrize("separator", [" ", "\t", ",", " | "])
    def test_separators_inside_a_line(self, tmp_path: Path, separator: str) -> None:
        assert self.read(tmp_path, separator.join(EASY).encode()) == [EASY]

    @pytest.mark.parametrize(
        "content",
        [
            f"\ufeff# heading\n\n   \n{EASY} # easy\n",
            f"\ufeff{EASY}\n",
            f"{EASY}\r\n\r\n# the end\r\n",
            f"\r{EASY}\r",
            f"quizzes,solutions\n{EASY},{EASY_SOLUTION}\n",
            f"Puzzle, Solution\r\n{EASY}",
        ],
    )
    def test_comments_empty_lines_marks_line_ends_and_headings(self, tmp_path: Path, content: str) -> None:
        assert self.read(tmp_path, content.encode()) == [EASY]

    def test_file_without_puzzles_gives_none(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, b"# nothing\n") == []
        assert read_puzzles([]).givens.shape == (0, 81)

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (EASY[:-1], "81 cells expected, got 80"),
            (EASY + "1", "81 cells expected, got 82"),
            (EASY + EASY, "the second grid of the line is not a solution of the first"),
            (EASY + HARD_SOLUTION, "the second grid of the line is not a solution of the first"),
            ("x" + EASY[1:], "'x' (character 1) is neither a digit nor a blank (. 0 * _)"),
            (EASY[:5] + "\uff15" + EASY[6:], "'\uff15' (character 6) is neither a digit nor a blank (. 0 * _)"),
            (EASY[:1] + "5" + EASY[2:], "row 1: two 5s, at row 1 column 1 and row 1 column 2"),
            (EASY[:72] + "6" + EASY[73:], "column 1: two 6s, at row 2 column 1 and row 9 column 1"),
            (IMPOSSIBLE, "no solution"),
            ("." * 81, "several solutions: row "),
        ],
    )
    def test_wrong_line_is_named_with_its_reason(self, tmp_path: Path, line: str, reason: str) -> None:
        path = tmp_path / "puzzles.txt"
        path.write_text(f"# one\n{EASY}\n\n{line}\n{HARD}\n", encoding="utf-8")
        with pytest.raises(PuzzleError) as caught:
            read_puzzles(path)
        assert str(caught.value).startswith(f"{path}:4: {reason}")
        assert len(caught.value.problems) == 1

    def test_two_solutions_are_told_by_a_cell(self) -> None:
        # Rows 1 and 2 hold 5, 6 / 6, 5 in columns 1 and 6 of one such board; blanking them leaves two ways.
        board = next(b for b in random_boards(3000, seed=0).reshape(-1, 9, 9) if (b[0, :4:3] == b[1, 3::-3]).all())
        low, high = sorted(board[0, :4:3].tolist())
        board[:2, :4:3] = 0
        with pytest.raises(
            ValueError, match=f"several solutions: row 1 column 1 can be ({low} or {high}|{high} or {low})"
        ):
            read_puzzles([format_line(board.reshape(81))])
        assert len(read_puzzles([format_line(board.reshape(81))], check_unique=False).givens) == 1

    def test_all_wrong_lines_are_told_together(self) -> None:
        with pytest.raises(ValueError, match=r"<lines>:1: .*\n<lines>:3: ") as caught:
            read_puzzles(["1", EASY, "2"])
        assert isinstance(caught.value, PuzzleError)
        assert [problem.line for problem in caught.value.problems] == [1, 3]
        with pytest.raises(PuzzleError) as caught:
            read_puzzles(["1"] * 1000)
        assert len(caught.value.problems) == 20

    def test_without_uniqueness_a_solution_still_has_to_exist(self) -> None:
        puzzles = read_puzzles(["." * 81], check_unique=False)
        assert is_valid_board(puzzles.solutions).all()
        with pytest.raises(PuzzleError, match="no solution"):
            read_puzzles([IMPOSSIBLE], check_unique=False)

    def test_bytes_that_are_no_text_are_wrong_characters(self, tmp_path: Path) -> None:
        with pytest.raises(PuzzleError, match=r"puzzles.txt:2: byte 0xff \(character 1\) is not UTF-8"):
            self.read(tmp_path, b"#\n\xff\xfe" + EASY.encode())
        assert self.read(tmp_path, b"# caf\xe9\n" + EASY.encode()) == [EASY]

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
    def test_a_file_in_utf_16_is_known_as_such(self, tmp_path: Path, encoding: str) -> None:
        with pytest.raises(PuzzleError, match=r"^[^\n]*puzzles.txt:1: looks like UTF-16; save it as UTF-8$"):
            self.read(tmp_path, f"{EASY}\n{EASY}\n".encode(encoding))

    def test_open_file_is_named_and_missing_file_is_an_os_error(self, tmp_path: Path) -> None:
        path = tmp_path / "some.txt"
        path.write_text("1")
        with path.open() as file, pytest.raises(PuzzleError, match=r"some.txt:1: "):
            read_puzzles(file)
        with pytest.raises(FileNotFoundError):
            read_puzzles(tmp_path / "missing.txt")
