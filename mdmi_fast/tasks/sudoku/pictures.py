"""Pictures of the demo: passes against valid boards, and a board's map of mutual information beside the rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdmi_fast.errors import require
from mdmi_fast.estimator import load_estimator
from mdmi_fast.files import replace_file
from mdmi_fast.maps import draw_map, mi_map
from mdmi_fast.tasks.sudoku.boards import rule_matrix
from mdmi_fast.tasks.sudoku.demo import Row, make_task
from mdmi_fast.tasks.sudoku.model import load_model

_TASKS = {
    "solve": "Solving: one right answer",
    "generate": "Sampling from an empty grid",
    "complete": "Sampling from 20 clues",
}


def family(policy: str) -> str:
    """The policy's name without its settings: "MI budget 0.02, no entropy" belongs to "MI budget, no entropy"."""
    words = [word for word in policy.replace(",", " ,").split() if not word.replace(".", "", 1).isdigit()]
    name = " ".join(words).replace(" ,", ",")
    return name.split("-")[0] if name.startswith("top-") else name


def draw_demo(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write frontier_solve.png, frontier_sampling.png (whatever `rows` hold) and mi_map.png; returns their paths.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    require("matplotlib", "plot", "draw_demo")
    solving = [task for task in ("solve",) if any(row.task == task for row in rows)]
    sampling = [task for task in ("generate", "complete") if any(row.task == task for row in rows)]
    paths = []
    for name, tasks in (("frontier_solve.png", solving), ("frontier_sampling.png", sampling)):
        if tasks:
            paths.append(_draw_frontier(rows, tasks, folder / name))
    paths.append(draw_board_map(folder / "mi_map.png"))
    return paths


def _draw_frontier(rows: Sequence[Row], tasks: Sequence[str], path: Path) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    panels = [(task, regime) for task in tasks for regime in ("strong", "weak")]
    panels = [panel for panel in panels if any((row.task, row.regime) == panel for row in rows)]
    names = list(dict.fromkeys(family(row.policy) for row in rows if row.task in tasks))
    styles: dict[str, dict[str, Any]] = {
        name: {
            "color": f"C{index % 10}",
            "marker": "oxs^"[index // 10 % 4],
            "linestyle": ":" if "control" in name else "-",
        }
        for index, name in enumerate(names)
    }
    figure = Figure(figsize=(6.2 * len(panels), 6.0))
    for axis, (task, regime) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        shown = [row for row in rows if (row.task, row.regime) == (task, regime)]
        for name in names:
            points = sorted((row for row in shown if family(row.policy) == name), key=lambda row: row.passes)
            if points:
                spread = [[row.solved - row.low for row in points], [row.high - row.solved for row in points]]
                passes, solved = [row.passes for row in points], [row.solved for row in points]
                axis.errorbar(passes, solved, yerr=spread, capsize=2, **styles[name])
        axis.set(xscale="log", xlabel="model passes per board", ylabel="valid boards", ylim=(-0.03, 1.03))
        axis.set_title(f"{_TASKS[task]}, {regime} network")
        axis.set_xticks([4, 8, 16, 32, 64])
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    keys = [Line2D([], [], label=name, **styles[name]) for name in names]
    columns = min(len(names), 2 * len(panels))
    figure.legend(handles=keys, loc="lower center", ncols=columns, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.02 + 0.035 * -(-len(names) // columns), 1, 1))
    with replace_file(path) as temporary:
        figure.savefig(temporary, dpi=110)
    return path


def draw_board_map(path: Path) -> Path:
    """Predicted mutual information of one board of the completion task, beside the pairs that share a unit."""
    tokens = make_task("complete", 1).tokens[0]
    board = mi_map(load_model(), tokens, estimator=load_estimator("sudoku:strong"))
    figure = draw_map(
        board,
        expected=rule_matrix(),
        expected_name="same row, column or box",
        title="Mutual information of the blank cells of a board with 20 clues",
        tau=0.05,
        every=9,
    )
    with replace_file(path) as temporary:
        figure.savefig(temporary, dpi=110)
    return path
