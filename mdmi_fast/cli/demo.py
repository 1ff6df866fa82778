"""`mdmi-fast demo`: every decoding policy on real Sudoku, as one table and three pictures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._options import add_threads, positive
from mdmi_fast.files import check_file, check_folder, replace_file

if TYPE_CHECKING:
    from mdmi_fast.tasks.sudoku.demo import Row

HEADER = (
    f"{'policy':<60}{'passes':>8}{'valid':>8}  {'95% interval':<16}{'seconds':>8}{'speed':>7}  difference to sequential"
)
TITLES = {
    "solve": "Solving hard puzzles, one right answer (temperature 0)",
    "generate": "Sampling boards from an empty grid (temperature 1)",
    "complete": "Sampling boards from 20 random clues (temperature 1)",
}

BOARDS, ALL_BOARDS = 100, 500
"""Sampled in each task, and with --full."""


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="decode real Sudoku with every policy and print the table",
        description="Solve 1,000 hard Sudokus and sample boards with every decoding policy; print passes, valid boards "
        "with 95%% intervals and wall clock; draw the frontiers and one map of mutual information.",
    )
    parser.add_argument("--full", action="store_true", help="add every control and probed MI of all forms (minutes)")
    parser.add_argument(
        "--puzzles",
        type=positive,
        default=1000,
        help="hard puzzles to solve (default: all 1,000; by the weak network at most 400, unless --full)",
    )
    parser.add_argument(
        "--boards", type=positive, help=f"boards to sample in each task (default: {BOARDS}, with --full {ALL_BOARDS})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument(
        "--out", type=Path, default=Path("mdmi-demo"), help="folder of the pictures (default: mdmi-demo)"
    )
    parser.add_argument("--no-pictures", action="store_true", help="print the table only")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_file(options.json)
    check_folder(None if options.no_pictures else options.out)
    rows = list(_rows(options))
    if options.json:
        with replace_file(options.json) as temporary:
            temporary.write_text(json.dumps({"rows": [row.as_dict() for row in rows]}, indent=1) + "\n")
    if not options.no_pictures:
        from mdmi_fast.tasks.sudoku.pictures import draw_demo

        print(f"\nPictures: {', '.join(str(path) for path in draw_demo(rows, options.out))}")
    return 0


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure and print every row, task by task."""
    from mdmi_fast.cli._progress import bar
    from mdmi_fast.estimator import load_estimator
    from mdmi_fast.tasks.sudoku import demo
    from mdmi_fast.tasks.sudoku.model import load_model

    estimators = {regime: load_estimator(f"sudoku:{regime}") for regime in ("strong", "weak")}
    sampled = options.boards or (ALL_BOARDS if options.full else BOARDS)
    plan: list[tuple[str, str, int, dict[str, Any]]] = []
    for regime, mi in estimators.items():
        puzzles = options.puzzles if regime == "strong" or options.full else min(options.puzzles, 400)
        plan.append(("solve", regime, puzzles, demo.solving_policies(regime, mi, full=options.full)))
    for regime in ("strong", "weak") if options.full else ("strong",):
        for task in ("generate", "complete"):
            plan.append((task, regime, sampled, demo.sampling_policies(estimators[regime], full=options.full)))
    if options.full:
        for task in ("solve", "generate", "complete"):
            plan.append((task, "strong", min(100, sampled), demo.oracle_policies(task)))
    for task, regime, boards, policies in plan:
        print(f"\n{TITLES[task]}; {regime} network, {boards} boards\n{HEADER}", flush=True)
        with bar(total=boards * len(policies), unit="board", description=f"{task}, {regime}") as progress:
            for row in demo.measure(
                load_model(regime), regime, demo.make_task(task, boards), policies, progress=progress.update
            ):
                progress.write(_line(row))
                yield row


def _line(row: Row) -> str:
    difference = "the yardstick"
    if row.against_sequential is not None:
        difference = f"{row.against_sequential:+.1%} [{row.against_low:+.1%}, {row.against_high:+.1%}]"
    return (
        f"{row.policy:<60}{row.passes:8.1f}{row.solved:8.1%}  {f'{row.low:.1%} to {row.high:.1%}':<16}"
        f"{row.seconds:8.2f}{row.speedup:6.1f}x  {difference}"
    )
