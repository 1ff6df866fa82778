"""One page of pictures of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdmi_fast.errors import require
from mdmi_fast.estimator.evaluate import Evaluation
from mdmi_fast.estimator.report import MOST_FALSE, RATIOS, TAUS
from mdmi_fast.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BIN_NAMES = ("below .1", ".1 to .5", ".5 to 1", "1 and above")


def check_picture(path: Path) -> None:
    """Refuse a path that `plot_evaluation` could not draw to, before the evaluation.

    Args:
        path: of the picture; its suffix says the format.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ValueError: matplotlib knows no such format.
    """
    bases = require("matplotlib.backend_bases", "plot", "plot_evaluation")
    formats = bases.FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"plot_evaluation: path must end in one of .{', .'.join(sorted(formats))}, got {path}")


def plot_evaluation(evaluation: Evaluation, path: str | Path) -> None:
    """Draw predicted against labelled values of every split, and how the splits and baselines compare.

    Args:
        evaluation: of `evaluate_splits`.
        path: of the picture; its suffix says the format.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ValueError: matplotlib knows no such format.
        OSError: the picture cannot be written.
    """
    check_picture(Path(path))
    figures = require("matplotlib.figure", "plot", "plot_evaluation")
    splits = list(evaluation.reports)
    columns = max(3, len(splits))
    figure = figures.Figure(figsize=(4.2 * columns, 11), layout="constrained")
    figure.suptitle(evaluation.verdict)
    axes = figure.subplots(3, columns, squeeze=False)
    for axis in axes[0, len(splits) :]:
        axis.set_axis_off()
    for axis, name in zip(axes[0], splits, strict=False):
        _scatter(axis, evaluation, name)
    _by_split(axes[1, 0], evaluation, "mean absolute error, nats", _BIN_NAMES, lambda r: r.calibration)
    _by_split(
        axes[1, 1], evaluation, "Pearson r by masked share", RATIOS[1:], lambda r: [b.pearson for b in r.by_mask_ratio]
    )
    _baselines(axes[1, 2], evaluation)
    for axis, field in zip(axes[2], ("precision", "recall", "false_independence"), strict=False):
        _thresholds(axis, evaluation, field)
    for axis in [*axes[1, 3:], *axes[2, 3:]]:
        axis.set_axis_off()
    with replace_file(Path(path)) as temporary:
        figure.savefig(temporary, dpi=110)


def _scatter(axis: Axes, evaluation: Evaluation, name: str) -> None:
    sample = evaluation.samples[name].clamp(min=1e-4).numpy()
    axis.hexbin(sample[:, 1], sample[:, 0], gridsize=60, bins="log", xscale="log", yscale="log", mincnt=1)
    ends = (sample.min(), sample.max())
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.set(
        title=f"{name}: r = {evaluation.reports[name]['estimator'].pearson:.3f}",
        xlabel="label, nats",
        ylabel="predicted, nats",
    )


def _by_split(axis: Axes, evaluation: Evaluation, title: str, labels: Any, values: Any) -> None:
    for name, reports in evaluation.reports.items():
        axis.plot([str(label) for label in labels], values(reports["estimator"]), marker="o", label=name)
    axis.set(title=title)
    axis.legend()


def _baselines(axis: Axes, evaluation: Evaluation) -> None:
    splits = list(evaluation.reports)
    sources = list(evaluation.reports[splits[0]])
    for number, split in enumerate(splits):
        heights = [evaluation.reports[split][source].pearson for source in sources]
        axis.bar(
            [place + 0.8 * number / len(splits) for place in range(len(sources))],
            heights,
            0.8 / len(splits),
            label=split,
        )
    axis.set_xticks(range(len(sources)), sources, rotation=20)
    axis.set(title="Pearson r beside the baselines")
    axis.legend()


def _thresholds(axis: Axes, evaluation: Evaluation, field: str) -> None:
    for name, reports in evaluation.reports.items():
        axis.plot(TAUS, [getattr(at, field) for at in reports["estimator"].by_tau], marker="o", label=name)
    if field == "false_independence":
        axis.axhline(MOST_FALSE, color="black", linewidth=0.8)
    axis.set(title=f"MI < tau: {field.replace('_', ' ')}", xlabel="tau, nats", xscale="log", ylim=(-0.02, 1.02))
    axis.legend()
