"""Pictures of the demo: passes against valid boards, and a board's map of mutual information beside the rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mdmi_fast.estimator import load_estimator
from mdmi_fast.files import replace_file
from mdmi_fast.labels import label_mi
from mdmi_fast.tasks.sudoku.demo import Row, make_task, rule_matrix
from mdmi_fast.tasks.sudoku.model import MASK_TOKEN, load_model

_TASKS = {
    "solve": "Solving: one right answer",
    "generate": "Sampling from an empty grid",
    "complete": "Sampling from 20 clues",
}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'mdmi-fast[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def family(policy: str) -> str:
    """The policy's name without its settings: "MI budget 0.02, no entropy" belongs to "MI budget, no entropy"."""
    words = [word for word in policy.replace(",", " ,").split() if not word.replace(".", "", 1).isdigit()]
    name = " ".join(words).replace(" ,", ",")
    return name.split("-")[0] if name.startswith("top-") else name


def draw_demo(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write frontier_solve.png, frontier_sampling.png (whatever `rows` hold) and mi_map.png; returns their paths."""
    solving = [task for task in ("solve",) if any(row.task == task for row in rows)]
    sampling = [task for task in ("generate", "complete") if any(row.task == task for row in rows)]
    paths = []
    for name, tasks in (("frontier_solve.png", solving), ("frontier_sampling.png", sampling)):
        if tasks:
            paths.append(_draw_frontier(rows, tasks, folder / name))
    paths.append(draw_map(folder / "mi_map.png"))
    return paths


def _draw_frontier(rows: Sequence[Row], tasks: Sequence[str], path: Path) -> Path:
    plt = _pyplot()
    panels = [(task, regime) for task in tasks for regime in ("strong", "weak")]
    panels = [panel for panel in panels if any((row.task, row.regime) == panel for row in rows)]
    figure, axes = plt.subplots(1, len(panels), figsize=(6.2 * len(panels), 5.6), squeeze=False)
    names = list(dict.fromkeys(family(row.policy) for row in rows if row.task in tasks))
    colours = {name: plt.get_cmap("tab20")(index % 20) for index, name in enumerate(names)}
    for axis, (task, regime) in zip(axes[0], panels, strict=True):
        shown = [row for row in rows if (row.task, row.regime) == (task, regime)]
        for name in names:
            points = sorted((row for row in shown if family(row.policy) == name), key=lambda row: row.passes)
            if not points:
                continue
            values = [row.solved for row in points]
            below = [row.solved - row.low for row in points]
            above = [row.high - row.solved for row in points]
            axis.errorbar(
                [row.passes for row in points],
                values,
                yerr=[below, above],
                marker="x" if name.startswith("control") else "o",
                linestyle=":" if name.startswith("control") else "-",
                capsize=2,
                color=colours[name],
                label=name,
            )
        axis.set(xscale="log", xlabel="model passes per board", ylabel="valid boards", ylim=(-0.03, 1.03))
        axis.set_title(f"{_TASKS[task]}, {regime} network")
        axis.xaxis.set_major_formatter(plt.ScalarFormatter())
        axis.xaxis.set_minor_formatter(plt.NullFormatter())
        axis.set_xticks([tick for tick in (2, 4, 8, 16, 32, 64)])
        axis.grid(alpha=0.3)
    handles = [
        plt.Line2D([], [], color=colours[name], marker="x" if name.startswith("control") else "o", label=name)
        for name in names
    ]
    figure.legend(handles=handles, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.04 + 0.03 * ((len(names) + 2) // 3), 1, 1))
    with replace_file(path) as temporary:
        figure.savefig(temporary, dpi=110)
    plt.close(figure)
    return path


def draw_map(path: Path, *, index: int = 0) -> Path:
    """Mutual information of one board of the completion task, predicted and probed, beside the rules' structure."""
    plt = _pyplot()
    tokens = make_task("complete", index + 1).tokens[index : index + 1]
    mask = tokens == MASK_TOKEN
    model = load_model()
    with torch.no_grad():
        predicted = load_estimator("sudoku")(model(tokens).hidden, mask)[0]
    probed = label_mi(model, tokens).mi[0]
    rules = rule_matrix().float() * (mask[0].unsqueeze(0) & mask[0].unsqueeze(1))
    figure, axes = plt.subplots(1, 3, figsize=(17, 5.6))
    top = float(torch.stack([predicted, probed]).quantile(0.999))
    for axis, (title, values, limit) in zip(
        axes,
        (
            ("Predicted mutual information", predicted, top),
            ("Probed mutual information (joint form)", probed, top),
            ("The rules: masked cells sharing a row, column or box", rules, 1.0),
        ),
        strict=True,
    ):
        image = axis.imshow(values, vmin=0, vmax=limit, cmap="viridis" if limit != 1.0 else "Greys")
        axis.set(title=title, xlabel="cell", ylabel="cell")
        if limit != 1.0 or title.startswith(("Pred", "Prob")):
            figure.colorbar(image, ax=axis, label="nats", shrink=0.85)
    figure.tight_layout()
    with replace_file(path) as temporary:
        figure.savefig(temporary, dpi=110)
    plt.close(figure)
    return path
