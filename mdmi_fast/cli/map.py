"""`mdmi-fast map`: who depends on whom in one sequence, as arrays, a graph and a picture."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._options import (
    DATA_HELP,
    FORM_NAMES,
    add_model,
    add_threads,
    amount,
    find_estimator,
    natural,
    share,
)
from mdmi_fast.files import check_file, replace_file
from mdmi_fast.tasks.base import Structure, task_of

if TYPE_CHECKING:
    from mdmi_fast.cli._records import TokenSequence
    from mdmi_fast.maps import MIMap
    from mdmi_fast.models import MaskedModel

_NEEDS = {
    "npz": None,
    "graphml": "networkx",
    "dot": "networkx",
    "json": "networkx",
    "png": "matplotlib",
    "svg": "matplotlib",
    "html": None,
}
_USUAL = ("npz", "graphml", "png")


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "map",
        help="write the map of dependencies of one sequence",
        description="Write the mutual information of one sequence's masked positions as arrays (npz), as a graph of the "
        "dependent pairs (graphml, dot, json), as a picture (png, svg) and as one page with hover and a slider (html), "
        "and print the largest pairs. Where the task's rules are known, as in Sudoku, dependencies that they do not explain and those that are missing "
        "are marked, and the area under the ROC curve says how well the pairs tell the rules.",
    )
    add_model(parser)
    parser.add_argument("--data", required=True, metavar="FILE", help=DATA_HELP)
    parser.add_argument("--index", type=natural, default=0, metavar="K", help="which sequence, from 0 (default: 0)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--estimator", metavar="E", help="name or folder of an estimator (default: the one shipped for the model)"
    )
    source.add_argument("--probe", action="store_true", help="probe the model instead: slow, and its own answer")
    parser.add_argument("--form", choices=FORM_NAMES, help="reading of the probes (default: joint)")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="of the files")
    parser.add_argument(
        "--formats",
        type=_formats,
        default=_USUAL,
        metavar="F,F",
        help=f"of {','.join(_NEEDS)} (default: {','.join(_USUAL)})",
    )
    parser.add_argument(
        "--picture",
        choices=("heat", "arcs", "board"),
        default="heat",
        help="what png and svg show: the matrix, the sequence with arcs, or the board of Sudoku (default: heat)",
    )
    parser.add_argument(
        "--compare", type=Path, metavar="NPZ", help="another map of the same positions, to compare with and draw beside"
    )
    parser.add_argument(
        "--rate",
        type=share,
        default=0.05,
        metavar="Q",
        help="false discovery rate of the pairs called surprising (default: 0.05)",
    )
    parser.add_argument("--top", type=natural, default=20, metavar="N", help="pairs to print (default: 20)")
    parser.add_argument(
        "--tau", type=amount, default=0.01, metavar="NATS", help="from it on a pair counts as dependent (default: 0.01)"
    )
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.form and not options.probe:
        raise UsageError("--form belongs to --probe")
    structure = _structure(options.model)
    if options.picture == "board" and (structure is None or structure.block is None):
        raise UsageError("--picture board belongs to models of a task with a board, such as Sudoku")
    if not Path(f"{options.out}.x").name[:-2].strip("."):
        raise UsageError(f"--out must end in a name, to which .{options.formats[0]} is joined, got {options.out!r}")
    for name in options.formats:
        _check_extra(name)
        check_file(_path(options, name))
    from mdmi_fast.cli._sequences import read_sequences
    from mdmi_fast.models import load_model

    model = load_model(options.model)
    sequences = read_sequences(options.data, model_name=options.model, model=model)
    if options.index >= len(sequences):
        raise InputError(f"{options.data}: holds {len(sequences)} sequences, there is none of index {options.index}")
    sequence = sequences[options.index]
    other = _other(options.compare)
    if other is not None and len(other.tokens) != len(sequence.tokens):
        raise InputError(
            f"{options.compare}: is a map of {len(other.tokens)} positions, {sequence.where} has {len(sequence.tokens)}"
        )
    found = _map(options, model, sequence, None if structure is None else structure.labels)
    paths = _write(options, found, structure, other)
    _print_pairs(found, structure, options)
    if other is not None:
        _print_comparison(found, other, options)
    print(f"\n{', '.join(str(path) for path in paths)}")
    return 0


def _other(path: Path | None) -> MIMap | None:
    if path is None:
        return None
    from mdmi_fast.maps import MIMap

    return MIMap.load(path)


def _map(
    options: argparse.Namespace, model: MaskedModel, sequence: TokenSequence, labels: Sequence[str] | None
) -> MIMap:
    import torch

    from mdmi_fast.cli._progress import bar
    from mdmi_fast.maps import mi_map

    state, shown = torch.tensor(sequence.tokens), sequence.attention_mask
    visible = None if shown is None else torch.tensor(shown)
    estimator = None
    if not options.probe:
        estimator = find_estimator(options.estimator, model=options.model)
        estimator.check_model(model)
    masked = int((state == model.mask_token_id).sum())
    with bar(
        total=1 + masked * model.vocab_size, unit="pass", description="probing", silent=not options.probe
    ) as progress:
        try:
            return mi_map(
                model,
                state,
                estimator=estimator,
                form=options.form or "joint",
                attention_mask=visible,
                labels=None if labels is None else [*labels],
                progress=progress.update,
            )
        except ValueError as error:
            raise InputError(f"{sequence.where}: {error}") from error


def _structure(model: str) -> Structure | None:
    """The dependencies that the task of the model is known to have."""
    make = task_of(model).structure
    return None if make is None else make()


def _write(options: argparse.Namespace, found: MIMap, structure: Structure | None, other: MIMap | None) -> list[Path]:
    from mdmi_fast.maps import dependency_graph, write_graph, write_page

    expected = None if structure is None else structure.pairs
    name = "expected" if structure is None else structure.name
    title = f"{options.model}, sequence {options.index} of {Path(options.data).name}"
    paths = []
    for kind in options.formats:
        path = _path(options, kind)
        if kind == "npz":
            found.save(path)
        elif kind == "html":
            write_page(found, path, expected=expected, expected_name=name, title=title)
        elif _NEEDS[kind] == "networkx":
            write_graph(dependency_graph(found, options.tau), path)
        else:
            figure = _draw(options, found, structure, other, title)
            with replace_file(path) as temporary:
                figure.savefig(temporary, dpi=120)
        paths.append(path)
    return paths


def _path(options: argparse.Namespace, kind: str) -> Path:
    return Path(f"{options.out}.{kind}")


def _draw(
    options: argparse.Namespace, found: MIMap, structure: Structure | None, other: MIMap | None, title: str
) -> Any:
    from mdmi_fast.maps import draw_arcs, draw_board, draw_comparison, draw_map

    expected = None if structure is None else structure.pairs

    if other is not None:
        return draw_comparison(found, other, title=title)
    if options.picture == "heat":
        name, every = ("expected", None) if structure is None else (structure.name, structure.block)
        return draw_map(found, expected=expected, tau=options.tau, expected_name=name, title=title, every=every)
    draw = draw_arcs if options.picture == "arcs" else draw_board
    return draw(found, expected=expected, tau=options.tau)


def _print_pairs(found: MIMap, structure: Structure | None, options: argparse.Namespace) -> None:
    from mdmi_fast.maps import compare_structure, find_surprises, roc_area

    expected, name = (None, "") if structure is None else (structure.pairs, structure.name)
    top = found.pairs(limit=options.top)
    print(f"{'pair':<16}{'nats':>9}  {name}".rstrip())
    for pair in top:
        known = "" if expected is None else "yes" if bool(expected[pair.first, pair.second]) else "no"
        label = f"{found.labels[pair.first]} {found.labels[pair.second]}"
        print(f"{label:<16}{pair.mi:9.4f}  {known}".rstrip())
    dependent = sum(pair.mi >= options.tau for pair in found.pairs())
    print(
        f"\n{int(found.mask.sum())} masked positions, {dependent} dependent pairs at {options.tau:g} nats ({found.source})"
    )
    if expected is not None:
        report = compare_structure(found, expected, tau=options.tau)
        counts = {field: int(getattr(report, field).sum()) // 2 for field in report._fields}
        print("structure: " + ", ".join(f"{count} {field}" for field, count in counts.items()))
        surprises = find_surprises(found, expected, rate=options.rate)
        unexpected, missing = (int(which.sum()) // 2 for which in (surprises.unexpected, surprises.missing))
        print(
            f"surprises at a false discovery rate of {options.rate:g}: {unexpected} unexpected, {missing} missing\n"
            f"area under the ROC curve of {name!r}: {roc_area(found, expected):.4f}"
        )


def _print_comparison(found: MIMap, other: MIMap, options: argparse.Namespace) -> None:
    from mdmi_fast.maps import compare_maps

    report = compare_maps(found, other, limit=options.top)
    print(
        f"\ncompared with {options.compare.name} ({other.source}): r = {report.correlation:.4f}, "
        f"mean difference {report.mean_error:.4f} nats\n{'pair':<16}{'this':>9}{'other':>9}"
    )
    for first, second, difference in report.pairs:
        here = max(float(found.mi[first, second]), float(found.mi[second, first]))
        label = f"{found.labels[first]} {found.labels[second]}"
        print(f"{label:<16}{here:9.4f}{here - difference:9.4f}")


def _formats(text: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [part for part in chosen if part not in _NEEDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no format {unknown[0]!r}, there are {', '.join(_NEEDS)}")
    return chosen


def _check_extra(name: str) -> None:
    """Say now, not after the work, that a format's library is missing."""
    package = _NEEDS[name]
    if package is None:
        return
    try:
        importlib.import_module(package)
    except ImportError:
        raise UsageError(f"{name} needs {package}: pip install 'mdmi-fast[plot]', or choose other --formats") from None
