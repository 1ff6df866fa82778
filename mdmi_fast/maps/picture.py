"""Pictures of a map: heat map, arcs, Sudoku board, and two maps side by side. Needs matplotlib, of the extra "plot"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from mdmi_fast.errors import require
from mdmi_fast.labels import masked_pairs
from mdmi_fast.maps.mi import MIMap, check_tau, strength
from mdmi_fast.maps.structure import StructureReport, compare_maps, compare_structure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"found": "#33415c", "settled": "#c5cede", "missing": "#1f9bcf", "unexpected": "#e4572e"}
_NOT_MASKED = "#dcdcdc"
_PANEL, _SIDE, _TOP, _BOTTOM = 7.0, 6.1, 0.8, 1.9
"""Inches: width of a panel, side of its matrix, and what stands above and below it."""


def draw_map(
    mi: MIMap,
    *,
    expected: Tensor | None = None,
    tau: float = 0.01,
    expected_name: str = "expected",
    title: str | None = None,
    every: int | None = None,
) -> Figure:
    """Draw a map as a heat map, and beside it, if given, the expected structure with what is unexpected and missing.

    Args:
        mi: the map.
        expected: [N, N] bool, as for `compare_structure`.
        tau: nats from which on a pair counts as dependent.
        expected_name: what the structure is, for the second title.
        title: of the whole picture.
        every: a label and a thin line after every so many positions; None labels what has room.

    Returns:
        A matplotlib figure (`savefig` writes PNG, SVG, PDF), not registered with pyplot.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    require("matplotlib", "plot", "draw_map")
    from matplotlib.figure import Figure

    panels = 1 if expected is None else 2
    width, height = _PANEL * panels, _TOP + _SIDE + _BOTTOM
    figure = Figure(figsize=(width, height))
    axes = [
        figure.add_axes(
            (((number + 1) * _PANEL - _SIDE - 0.2) / width, _BOTTOM / height, _SIDE / width, _SIDE / height)
        )
        for number in range(panels)
    ]
    bar = figure.add_axes(((_PANEL - _SIDE - 0.2) / width, 0.75 / height, _SIDE / width, 0.16 / height))
    _draw_heat(figure, axes[0], bar, mi)
    if expected is not None:
        _draw_structure(axes[1], compare_structure(mi, expected, tau=tau), mi, tau, expected_name)
    for axis in axes:
        _label_positions(axis, mi.labels, every)
    if title is not None:
        figure.suptitle(title, fontsize=13, y=1 - 0.18 / height, va="top")
    return figure


def _draw_heat(figure: Figure, axis: Axes, bar: Axes, mi: MIMap) -> None:
    from matplotlib.colors import PowerNorm

    values = np.ma.masked_where(~masked_pairs(mi.mask).numpy(), strength(mi.mi).clamp(min=0).numpy())
    top = max(float(values.max()), 1e-3)
    # Few pairs share much and many share little: the root shows both.
    image = axis.imshow(values, norm=PowerNorm(0.5, 0.0, top), cmap="BuPu", interpolation="nearest")
    axis.set_facecolor(_NOT_MASKED)
    axis.set_title(f"Mutual information, {mi.source} ({int(mi.mask.sum())} masked positions)", fontsize=11)
    figure.colorbar(image, cax=bar, orientation="horizontal")
    bar.set_xlabel("nats (square-root scale); grey: not masked", fontsize=9)
    bar.tick_params(labelsize=8)


def _draw_structure(axis: Axes, report: StructureReport, mi: MIMap, tau: float, name: str) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    meaning = {
        "found": f"expected and found: at least {tau:g} nats",
        "settled": f"expected, but settled: an entropy below {tau:g} nats",
        "missing": f"missing: expected, but below {tau:g} nats",
        "unexpected": f"unexpected: at least {tau:g} nats",
    }
    kind = np.zeros(tuple(mi.mi.shape), dtype=np.int64)
    handles = []
    for number, (field, text) in enumerate(meaning.items(), 1):
        where = getattr(report, field)
        kind[where.numpy()] = number
        handles.append(Patch(color=_COLOURS[field], label=f"{text} ({int(where.sum()) // 2} pairs)"))
    shown = np.ma.masked_where(~masked_pairs(mi.mask).numpy(), kind)
    colours = ListedColormap(["white", *(_COLOURS[field] for field in meaning)])
    axis.imshow(shown, cmap=colours, vmin=-0.5, vmax=len(meaning) + 0.5, interpolation="nearest")
    axis.set_facecolor(_NOT_MASKED)
    axis.set_title(f"Structure: {name}", fontsize=11)
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.0, -0.09), fontsize=9, frameon=False)


def _label_positions(axis: Axes, labels: Sequence[str], every: int | None) -> None:
    step = every or max(1, -(-len(labels) // 27))
    places = range(0, len(labels), step)
    for side in (axis.xaxis, axis.yaxis):
        side.set_ticks(places, [labels[place] for place in places])
    axis.tick_params(axis="x", rotation=90)
    axis.tick_params(labelsize=8, length=2)
    if every:
        for place in places[1:]:
            for line in (axis.axhline, axis.axvline):
                line(place - 0.5, color="#888888", linewidth=0.4, alpha=0.6)


def draw_arcs(
    mi: MIMap, *, expected: Tensor | None = None, tau: float = 0.01, limit: int = 300, title: str | None = None
) -> Figure:
    """Draw a sequence as a line and its dependent pairs as arcs, as wide as they are strong.

    Args:
        mi: the map.
        expected: [N, N] bool: pairs outside of it are drawn as unexpected. None: all alike.
        tau: nats from which on a pair counts as dependent.
        limit: arcs at most, the strongest.
        title: of the picture.

    Returns:
        A matplotlib figure, as of `draw_map`.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    require("matplotlib", "plot", "draw_arcs")
    check_tau("draw_arcs", tau)
    from matplotlib.figure import Figure
    from matplotlib.patches import Arc

    n = len(mi.tokens)
    figure = Figure(figsize=(min(24.0, max(7.0, 0.16 * n)), 5.5), layout="constrained")
    axis = figure.add_subplot()
    pairs = [pair for pair in mi.pairs(limit=limit) if pair.mi >= tau]
    top = max((pair.mi for pair in pairs), default=1.0) or 1.0
    for first, second, value in reversed(pairs):  # the strongest on top
        colour = _COLOURS["found" if expected is None or _known(expected, first, second) else "unexpected"]
        width, center = second - first, (first + second) / 2
        line = 0.4 + 3.0 * (value / top) ** 0.5
        axis.add_patch(Arc((center, 0), width, width, theta1=0, theta2=180, color=colour, linewidth=line, alpha=0.7))
    positions = np.arange(n)
    masked = mi.mask.numpy()
    axis.scatter(positions[masked], np.zeros(int(masked.sum())), s=14, color="#33415c", zorder=3)
    axis.scatter(positions[~masked], np.zeros(int((~masked).sum())), s=14, color="#b5b5b5", zorder=3)
    step = max(1, -(-n // 60))
    axis.set_xticks(positions[::step], [mi.labels[at] for at in positions[::step]], rotation=90, fontsize=7)
    axis.set_xlim(-1, n)
    axis.set_ylim(-0.02 * n, max((pair.second - pair.first for pair in pairs), default=2) / 2 * 1.05)
    axis.set_yticks([])
    axis.set_frame_on(False)
    axis.set_title(title or f"{len(pairs)} pairs of at least {tau:g} nats ({mi.source}); grey: not masked", fontsize=11)
    return figure


def draw_board(
    mi: MIMap, *, expected: Tensor | None = None, tau: float = 0.02, limit: int = 80, title: str | None = None
) -> Figure:
    """Draw a Sudoku board: its givens, blank cells as dark as they are open, and lines between dependent cells.

    Args:
        mi: the map of a board, 81 positions.
        expected: [81, 81] bool: pairs outside of it are drawn as unexpected. None: all alike.
        tau: nats from which on a pair counts as dependent.
        limit: lines at most, the strongest.
        title: of the picture.

    Returns:
        A matplotlib figure, as of `draw_map`.

    Raises:
        ValueError: if the map is not of 81 positions.
        UnsupportedError: matplotlib is not installed.
    """
    require("matplotlib", "plot", "draw_board")
    check_tau("draw_board", tau)
    if len(mi.tokens) != 81:
        raise ValueError(f"draw_board: mi must be the map of 81 cells, got {len(mi.tokens)}")
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch

    figure = Figure(figsize=(7.5, 8.0), layout="constrained")
    axis = figure.add_subplot()
    openness = mi.entropy.clamp(min=0).view(9, 9).numpy()
    image = axis.imshow(openness, cmap="Blues", vmin=0, vmax=float(np.log(9)), extent=(0, 9, 9, 0))
    bar = figure.colorbar(image, ax=axis, orientation="horizontal", shrink=0.7, pad=0.02)
    bar.set_label("entropy of a blank cell, nats", fontsize=9)
    for line in range(10):
        for draw in (axis.axhline, axis.axvline):
            draw(line, color="black", linewidth=2.0 if line % 3 == 0 else 0.5)
    for cell, (token, blank) in enumerate(zip(mi.tokens.tolist(), mi.mask.tolist(), strict=True)):
        if not blank:
            axis.text(cell % 9 + 0.5, cell // 9 + 0.5, str(token), ha="center", va="center", fontsize=15)
    pairs = [pair for pair in mi.pairs(limit=limit) if pair.mi >= tau]
    top = max((pair.mi for pair in pairs), default=1.0) or 1.0
    for first, second, value in reversed(pairs):
        ends = [(cell % 9 + 0.5, cell // 9 + 0.5) for cell in (first, second)]
        colour = _COLOURS["missing" if expected is None or _known(expected, first, second) else "unexpected"]
        width = 0.5 + 4.0 * (value / top) ** 0.5
        bend = "arc3,rad=0.2"  # so that lines along one row do not lie on each other
        axis.add_patch(
            FancyArrowPatch(*ends, arrowstyle="-", connectionstyle=bend, color=colour, linewidth=width, alpha=0.65)
        )
    axis.set_xticks([])
    axis.set_yticks([])
    told = "" if expected is None else "; orange: not explained by the rules"
    axis.set_title(title or f"{len(pairs)} strongest pairs of at least {tau:g} nats ({mi.source}){told}", fontsize=11)
    return figure


def draw_comparison(first: MIMap, second: MIMap, *, title: str | None = None) -> Figure:
    """Draw two maps of the same positions: one below the diagonal and one above, and pair against pair.

    Args:
        first: below the diagonal, and to the right.
        second: above the diagonal, and up.
        title: of the picture.

    Returns:
        A matplotlib figure, as of `draw_map`.

    Raises:
        ValueError: as `compare_maps`.
        UnsupportedError: matplotlib is not installed.
    """
    require("matplotlib", "plot", "draw_comparison")
    report = compare_maps(first, second)
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 6.6), layout="constrained")
    heat, scatter = figure.subplots(1, 2)
    a, b = (strength(side.mi).clamp(min=0) for side in (first, second))
    both = (masked_pairs(first.mask & second.mask)).numpy()
    shown = np.ma.masked_where(~both, (a.tril() + b.triu()).numpy())
    top = max(float(a.max()), float(b.max()), 1e-3)
    image = heat.imshow(shown, norm=PowerNorm(0.5, 0.0, top), cmap="BuPu", interpolation="nearest")
    heat.set_facecolor(_NOT_MASKED)
    heat.set_title(f"below: {first.source}; above: {second.source}", fontsize=11)
    figure.colorbar(image, ax=heat, label="nats (square-root scale)", shrink=0.8)
    _label_positions(heat, first.labels, None)
    upper = np.triu(both, 1)
    scatter.plot([0, top], [0, top], color="#888888", linewidth=0.8)
    scatter.scatter(a.numpy()[upper], b.numpy()[upper], s=6, alpha=0.4, color="#33415c", linewidths=0)
    scatter.set_xlabel(f"{first.source}, nats")
    scatter.set_ylabel(f"{second.source}, nats")
    scatter.set_title(f"r = {report.correlation:.3f}, mean difference {report.mean_error:.4f} nats", fontsize=11)
    if title is not None:
        figure.suptitle(title, fontsize=13)
    return figure


def _known(expected: Tensor, first: int, second: int) -> bool:
    return bool(expected[first, second] | expected[second, first])
