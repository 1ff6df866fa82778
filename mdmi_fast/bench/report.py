"""What was measured as text, CSV and a picture."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mdmi_fast import get_num_threads
from mdmi_fast.bench.measure import Figure
from mdmi_fast.files import replace_file

_COLUMNS = {"case": 52, "measure": 44, "value": 11, "target": 11, "": 9}
_UNITS = {"x": "times faster", "%": "%", "us": "microseconds", "MiB": "MiB"}
_COLORS = {"reached": "tab:green", "MISSED": "tab:orange", "": "tab:gray"}


def heading(stem: str) -> str:
    n = get_num_threads()
    titles = "".join(f"{title:<{width}}" for title, width in _COLUMNS.items())
    return f"\n{stem}, {n} thread{'' if n == 1 else 's'} where no other number is named\n{titles}median times, remarks"


def line(figure: Figure) -> str:
    """One row of the table."""
    cells = (figure.case, figure.measure, _value(figure), _target(figure), figure.verdict)
    row = "".join(f"{cell + '  ':<{width}}" for cell, width in zip(cells, _COLUMNS.values(), strict=True))
    times = " against ".join(_time(seconds) for seconds in (figure.ours, figure.other) if not math.isnan(seconds))
    return f"{row}{'; '.join(text for text in (times, figure.note) if text)}".rstrip()


def summary(figures: Iterable[Figure]) -> str:
    verdicts = [figure.verdict for figure in figures]
    told = [f"{verdicts.count(word)} {word}" for word in ("reached", "MISSED", "n/a", "REFUSED") if word in verdicts]
    return f"targets: {', '.join(told) or 'none'}"


def _value(figure: Figure) -> str:
    if math.isnan(figure.value):
        return "-"
    digits = max(0, 2 - math.floor(math.log10(max(abs(figure.value), 0.1))))  # three figures are all that repeats
    return f"{figure.value:.{digits}f} {figure.unit}"


def _target(figure: Figure) -> str:
    return "" if figure.target is None else f"{figure.compare} {figure.target:g} {figure.unit}"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def write_csv(stem: str, figures: Sequence[Figure], where: Mapping[str, Any], folder: Path) -> Path:
    """FOLDER/STEM.csv, whole or untouched.

    Args:
        stem: first column.
        figures: the rows.
        where: machine, versions, date and command, repeated in every row.
        folder: made if it does not exist.
    """

    def cells(f: Figure) -> list[Any]:
        compare, target = ("", "") if f.target is None else (f.compare, f"{f.target:g}")
        words = [stem, f.case, f.measure, _cell(f.value), f.unit, compare, target, f.verdict]
        return [*words, _cell(f.ours), _cell(f.other), f.note, *where.values()]

    path = folder / f"{stem}.csv"
    columns = ["stem", "case", "measure", "value", "unit", "compare", "target", "verdict"]
    write_table(path, [*columns, "ours_seconds", "other_seconds", "remark", *where], map(cells, figures))
    return path


def write_table(path: Path, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A CSV file, whole or untouched.

    Args:
        path: of the file.
        columns: the first line.
        rows: a value for every column; or mappings by column, where what is missing stays empty.

    Raises:
        ValueError: for a row of another length, or with a key that is no column.
    """
    columns = [*columns]

    def cells(row: Iterable[Any]) -> list[Any]:
        found = [row.get(column, "") for column in columns] if isinstance(row, Mapping) else [*row]
        if len(found) != len(columns) or (isinstance(row, Mapping) and not row.keys() <= {*columns}):
            raise ValueError(f"write_table: rows must fit the columns {columns}, got {row}")
        return found

    with replace_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(map(cells, rows))


def _cell(number: float) -> str:
    return "" if math.isnan(number) else f"{number:.4g}"


def draw(stem: str, figures: Sequence[Figure], where: str, folder: Path) -> Path:
    """FOLDER/STEM.png: a bar a figure, a mark at its target, a panel a unit.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    from matplotlib.figure import Figure as Picture

    panels = {unit: [f for f in figures if f.unit == unit and not math.isnan(f.value)] for unit in _UNITS}
    panels = {unit: found for unit, found in panels.items() if found}
    picture = Picture(figsize=(11, 1.2 + 0.26 * sum(len(found) + 3 for found in panels.values())), layout="constrained")
    picture.suptitle(f"{stem}: {where}", fontsize=9)
    axes = picture.subplots(
        max(1, len(panels)), squeeze=False, gridspec_kw={"height_ratios": [len(f) + 2 for f in panels.values()] or [1]}
    )
    for axis, (unit, found) in zip(axes[:, 0], panels.items(), strict=False):
        rows = range(len(found))
        axis.barh(rows, [f.value for f in found], color=[_COLORS[f.verdict] for f in found])
        for row, f in zip(rows, found, strict=True):
            if f.target is not None:
                axis.plot([f.target] * 2, [row - 0.45, row + 0.45], color="black")
        axis.set_yticks(rows, [f"{f.case}: {f.measure}" for f in found], fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(f"{_UNITS[unit]}; black: target, green: reached, orange: missed", fontsize=7)
        if unit in ("x", "us"):
            axis.set_xscale("log")
    path = folder / f"{stem}.png"
    with replace_file(path) as temporary:
        picture.savefig(temporary, dpi=110)
    return path
