"""`mdmi-fast sudoku`: solve the puzzles of a file."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._errors import InputError
from mdmi_fast.cli._options import (
    add_decoding,
    add_policy,
    add_threads,
    decoding_options,
    json_text,
    load_coupling,
    load_policy,
)

if TYPE_CHECKING:
    from mdmi_fast.decoding import Decoded


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sudoku",
        help="solve the puzzles of a file",
        description="Solve puzzles with the shipped network. A puzzle a line: 81 cells, 1 to 9 and '.' or 0 for blanks; "
        "spaces and # comments are allowed. Exit code 1 if the network gets any of them wrong.",
    )
    parser.add_argument(
        "file", nargs="?", default="-", metavar="FILE", help="puzzles, or - for standard input (default)"
    )
    parser.add_argument("--model", choices=("strong", "weak"), default="strong", help="network (default: strong)")
    add_policy(parser, default="confidence-budget:0.05")
    add_decoding(parser)
    parser.add_argument(
        "--any-solution", action="store_true", help="accept puzzles with several solutions, even an empty grid"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--grid", action="store_true", help="print boards as people draw them")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    from mdmi_fast.cli._progress import bar
    from mdmi_fast.cli._sequences import read_lines
    from mdmi_fast.decoding import Asked, decode_many
    from mdmi_fast.tasks.sudoku.model import load_model
    from mdmi_fast.tasks.sudoku.puzzles import PuzzleError, format_line, is_valid_board, read_puzzles

    try:
        givens = read_puzzles(read_lines(options.file), check_unique=not options.any_solution).givens.tolist()
    except PuzzleError as error:
        raise InputError(str(error)) from error
    if not givens:
        raise InputError(f"{options.file}: holds no puzzles")
    model = load_model(options.model)
    policy = load_policy(options, model, name=f"sudoku:{options.model}")
    coupling = load_coupling(options, model, options.policy)
    defaults = decoding_options(options, model)
    start = time.perf_counter()
    with bar(total=len(givens), unit="puzzle", description="solving") as progress:
        found = list(
            decode_many(
                model,
                [Asked(given) for given in givens],
                policy,
                coupling=coupling,
                generator=torch.Generator().manual_seed(options.seed),
                batch_size=options.batch_size,
                progress=progress.update,
                **defaults,
            )
        )
    seconds = time.perf_counter() - start
    valid = is_valid_board(torch.tensor([decoded.tokens for decoded in found])).tolist()
    if options.json:
        rows = [
            {"puzzle": format_line(given), "solution": format_line(done.tokens), "valid": right, "passes": done.passes}
            for given, done, right in zip(givens, found, valid, strict=True)
        ]
        report = {"model": options.model, "policy": options.policy, **defaults}
        print(json_text({**report, "solved": sum(valid), "seconds": seconds, "puzzles": rows}))
    elif options.grid:
        _print_grids(givens, found, valid)
    else:
        print(f"{'puzzle':<81}  {'solved':<81}  valid  passes")
        for given, done, right in zip(givens, found, valid, strict=True):
            print(f"{format_line(given)}  {format_line(done.tokens)}  {'yes' if right else 'NO':<5}  {done.passes:6}")
    passes = sum(done.passes for done in found) / len(found)
    print(
        f"mdmi-fast sudoku: {sum(valid)} of {len(valid)} valid, {passes:.1f} passes a puzzle, {seconds:.2f} s",
        file=sys.stderr,
    )
    return 0 if all(valid) else 1


def _print_grids(givens: list[list[int]], found: list[Decoded], valid: list[bool]) -> None:
    from mdmi_fast.tasks.sudoku.puzzles import format_board

    for number, (given, done, right) in enumerate(zip(givens, found, valid, strict=True), 1):
        said = "solved" if right else "NOT VALID: the network got it wrong"
        print(f"puzzle {number}: {said}, {done.passes} passes")
        lines = zip(format_board(given).splitlines(), format_board(done.tokens).splitlines(), strict=True)
        print("\n".join(f"{left}    {right_line}" for left, right_line in lines), end="\n\n")
