"""`mdmi-fast map`: who depends on whom in one sequence, as arrays, a graph and a picture."""

from __future__ import annotations

import argparse
import importlib
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
    kind_of,
    natural,
)

if TYPE_CHECKING:
    from torch import Tensor

    from mdmi_fast.maps import MIMap
    from mdmi_fast.models import MaskedModel

_NEEDS = {"npz": None, "graphml": "networkx", "png": "matplotlib"}
_TASKS = {"sudoku": "sharing a row, column or box"}


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "map",
        help="write the map of dependencies of one sequence",
        description="Write the mutual information of one sequence's masked positions as arrays (PREFIX.npz), as a graph "
        "of the dependent pairs (PREFIX.graphml) and as a picture (PREFIX.png), and print the largest pairs. For Sudoku "
        "the picture marks dependencies that the rules do not explain and those that are missing.",
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
        "--formats", type=_formats, default=tuple(_NEEDS), metavar="F,F", help=f"of {','.join(_NEEDS)} (default: all)"
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
    for name in options.formats:
        _check_extra(name)
    from mdmi_fast.cli._sequences import read_sequences
    from mdmi_fast.models import load_model

    model = load_model(options.model)
    sequences = read_sequences(options.data, model_name=options.model, model=model)
    if options.index >= len(sequences):
        raise InputError(f"{options.data}: holds {len(sequences)} sequences, there is none of index {options.index}")
    found = _map(options, model, sequences[options.index].tokens)
    expected = _expected(options.model)
    paths = _write(options, found, expected)
    _print_pairs(found, expected, options)
    print(f"\n{', '.join(str(path) for path in paths)}")
    return 0


def _map(options: argparse.Namespace, model: MaskedModel, tokens: list[int]) -> MIMap:
    import torch

    from mdmi_fast.cli._progress import bar
    from mdmi_fast.maps import mi_map

    state = torch.tensor(tokens)
    labels = [f"r{cell // 9 + 1}c{cell % 9 + 1}" for cell in range(81)] if kind_of(options.model) == "sudoku" else None
    if not options.probe:
        estimator = find_estimator(options.estimator, model=options.model)
        estimator.check_model(model)
        return mi_map(model, state, estimator=estimator, labels=labels)
    masked = int((state == model.mask_token_id).sum())
    with bar(total=1 + masked * model.vocab_size, unit="pass", description="probing") as progress:
        return mi_map(model, state, form=options.form or "joint", labels=labels, progress=progress.update)


def _expected(model: str) -> Tensor | None:
    """The structure that the task is known to have."""
    if kind_of(model) != "sudoku":
        return None
    from mdmi_fast.tasks.sudoku.boards import rule_matrix

    return rule_matrix()


def _write(options: argparse.Namespace, found: MIMap, expected: Tensor | None) -> list[Path]:
    from mdmi_fast.files import replace_file
    from mdmi_fast.maps import dependency_graph, draw_map

    paths = []
    for name in options.formats:
        path = Path(f"{options.out}.{name}")
        if name == "npz":
            found.save(path)
        elif name == "graphml":
            import networkx

            with replace_file(path) as temporary:
                networkx.write_graphml(dependency_graph(found, options.tau), temporary)
        else:
            sudoku = expected is not None
            figure = draw_map(
                found,
                expected=expected,
                tau=options.tau,
                expected_name=_TASKS.get(kind_of(options.model), "expected"),
                title=f"{options.model}, sequence {options.index} of {Path(options.data).name}",
                every=9 if sudoku else None,
            )
            with replace_file(path) as temporary:
                figure.savefig(temporary, dpi=120)
        paths.append(path)
    return paths


def _print_pairs(found: MIMap, expected: Tensor | None, options: argparse.Namespace) -> None:
    from mdmi_fast.maps import compare_structure

    name = _TASKS.get(kind_of(options.model), "")
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
