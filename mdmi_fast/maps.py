"""Maps of mutual information: one sequence's matrix, its dependency graph, and a picture of both against a structure.

Everything here reads a finished matrix; where it comes from (probing or an estimator) is `mi_map`'s business alone.
Graphs need networkx and pictures matplotlib, both in the extra "plot".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.errors import UnsupportedError
from mdmi_fast.files import replace_file
from mdmi_fast.labels import Form, label_mi, masked_pairs
from mdmi_fast.models import MaskedModel

if TYPE_CHECKING:
    import networkx
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MIMap", "Pair", "StructureReport", "compare_structure", "dependency_graph", "draw_map", "mi_map"]

_ARRAYS = ("mi", "entropy", "tokens", "mask")


class Pair(NamedTuple):
    """Two positions, the lower one first, and their mutual information in nats."""

    first: int
    second: int
    mi: float


@dataclass(frozen=True)
class MIMap:
    """Mutual information between the masked positions of one sequence.

    Attributes:
        mi: [N, N] float32, nats; 0 on the diagonal and where an end is not masked.
        entropy: [N] float32, nats; 0 where not masked.
        tokens: [N] int64, the mask token where masked.
        mask: [N] bool, True = masked.
        labels: a name for every position.
        source: where the numbers come from, for people.
    """

    mi: Tensor
    entropy: Tensor
    tokens: Tensor
    mask: Tensor
    labels: tuple[str, ...]
    source: str

    def pairs(self, which: Tensor | None = None, *, limit: int | None = None) -> list[Pair]:
        """Masked pairs by mutual information, the largest first, ties by position.

        Args:
            which: [N, N] bool, symmetric: only these pairs. None for all.
            limit: at most that many.
        """
        wanted = masked_pairs(self.mask) if which is None else which & masked_pairs(self.mask)
        first, second = wanted.triu(1).nonzero().unbind(dim=1)
        values = _either_way(self.mi)[first, second]
        order = values.argsort(descending=True, stable=True)[:limit].tolist()
        return [Pair(int(first[at]), int(second[at]), float(values[at])) for at in order]

    def save(self, path: str | Path) -> None:
        """Write all fields as numpy arrays into one .npz file, which is whole or untouched."""
        arrays: dict[str, Any] = {
            **{name: getattr(self, name).numpy(force=True) for name in _ARRAYS},
            "labels": np.array(self.labels),
            "source": np.array(self.source),
        }
        with replace_file(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> MIMap:
        """Read a map back.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no map.
        """
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                mi, entropy, tokens, mask = (torch.from_numpy(arrays[name]) for name in _ARRAYS)
                return cls(mi, entropy, tokens, mask, tuple(arrays["labels"].tolist()), str(arrays["source"]))
        except FileNotFoundError:
            raise
        except Exception as error:  # numpy and zipfile raise many kinds for a file that is something else
            raise ValueError(f"{path}: not a map of mutual information: {error}") from error


def mi_map(
    model: MaskedModel,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: Callable[[Tensor, Tensor], Tensor] | None = None,
    form: Form = "joint",
    epsilon: float = 0.0,
    batch_size: int = 512,
    labels: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> MIMap:
    """The mutual information of one sequence, predicted by an estimator or probed from the model.

    Args:
        model: the frozen model.
        tokens: [N] int64.
        mask: [N] bool, True = masked; None takes the positions that hold the mask token.
        estimator: hidden [B, N, D] and mask [B, N] to mutual information [B, N, N], one pass; None probes the model.
        form: reading of the probes, as for `label_mi`.
        epsilon: nats a probed entry may be wrong by, as for `label_mi`.
        batch_size: sequences in one forward pass of the probing.
        labels: a name for every position; None numbers them from 0.
        progress: called with the number of probing passes just finished.

    Raises:
        ValueError: for shapes that do not fit, fewer than two masked positions, or a model that answers NaN.
    """
    if tokens.ndim != 1 or tokens.dtype != torch.int64:
        raise ValueError(f"mi_map: tokens must be [N] int64, got shape {tuple(tokens.shape)} {tokens.dtype}")
    if mask is None:
        mask = tokens == model.mask_token_id
    elif mask.shape != tokens.shape or mask.dtype != torch.bool:
        raise ValueError(f"mi_map: mask must be {tuple(tokens.shape)} bool, got {tuple(mask.shape)} {mask.dtype}")
    if int(mask.sum()) < 2:
        raise ValueError(f"mi_map: at least two positions must be masked, got {int(mask.sum())}")
    if labels is not None and len(labels) != len(tokens):
        raise ValueError(f"mi_map: labels must name {len(tokens)} positions, got {len(labels)}")
    tokens = tokens.masked_fill(mask, model.mask_token_id)
    if estimator is None:
        found = label_mi(model, tokens, mask, form=form, epsilon=epsilon, batch_size=batch_size, progress=progress)
        mi, entropy, source = found.mi, found.entropy, f"probed, {form} form"
    else:
        with torch.no_grad():
            output = model(tokens.unsqueeze(0))
            mi = estimator(output.hidden, mask.unsqueeze(0))[0].float()
        entropy = ops.entropy(output.logits[0]).masked_fill(~mask, 0.0)
        source = "predicted"
    if bool(entropy.isnan().any() | mi.isnan().any()):
        broken = (entropy.isnan() | mi.isnan().any(dim=-1)).nonzero()[0]
        raise ValueError(f"mi_map: the model or the estimator answers NaN at position {int(broken)}")
    names = tuple(labels) if labels is not None else tuple(str(index) for index in range(len(tokens)))
    return MIMap(mi, entropy, tokens, mask, names, source)


def dependency_graph(
    mi: MIMap | Tensor, tau: float, labels: Sequence[str] | None = None, *, mask: Tensor | None = None
) -> networkx.Graph:
    """The graph whose edges are the dependent pairs: max(I_ij, I_ji) >= tau (row S9 of the source, as `ops.color`).

    Args:
        mi: a map, whose own labels, mask, tokens and entropies are used, or a matrix [N, N] in nats.
        tau: nats.
        labels: a name for every position; None takes the map's, or numbers.
        mask: [N] bool: only these positions become nodes. None: the map's masked positions, or all.

    Returns:
        networkx.Graph. Nodes are positions with "label" and, from a map, "entropy"; edges carry "mi" (nats).

    Raises:
        ValueError: for shapes that do not fit, or a tau that is not a number of at least 0.
        UnsupportedError: networkx is not installed.
    """
    networkx = _extra("networkx", "dependency_graph")
    _check_tau("dependency_graph", tau)
    matrix = mi.mi if isinstance(mi, MIMap) else mi
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"dependency_graph: mi must be [N, N], got shape {tuple(matrix.shape)}")
    n = len(matrix)
    if isinstance(mi, MIMap):
        labels = mi.labels if labels is None else labels
        mask = mi.mask if mask is None else mask
    labels = [str(index) for index in range(n)] if labels is None else labels
    mask = torch.ones(n, dtype=torch.bool) if mask is None else mask.cpu()
    if len(labels) != n or mask.shape != (n,):
        raise ValueError(
            f"dependency_graph: labels and mask must be [{n}] like mi, got {len(labels)} and {tuple(mask.shape)}"
        )
    graph = networkx.Graph(tau=float(tau))
    for index in mask.nonzero().squeeze(-1).tolist():
        graph.add_node(index, label=labels[index])
        if isinstance(mi, MIMap):
            graph.nodes[index]["entropy"] = float(mi.entropy[index])
    strength = _either_way(matrix.cpu())
    joined = (strength >= tau) & masked_pairs(mask)
    for first, second in joined.triu(1).nonzero().tolist():
        graph.add_edge(first, second, mi=float(strength[first, second]))
    return graph


class StructureReport(NamedTuple):
    """A map against a structure that was expected, every field [N, N] bool and symmetric, masked pairs only.

    Attributes:
        found: expected, and dependent.
        unexpected: dependent without being expected.
        missing: expected, and independent although both positions are open enough to show it.
        settled: expected, but the entropy of one end is below tau: mutual information never exceeds it.
    """

    found: Tensor
    unexpected: Tensor
    missing: Tensor
    settled: Tensor


def compare_structure(mi: MIMap, expected: Tensor, *, tau: float) -> StructureReport:
    """Point out unexpected and missing dependencies (row S19 of the source).

    Args:
        mi: the map.
        expected: [N, N] bool, True where a pair should depend on each other; either direction counts.
        tau: nats from which on a pair counts as dependent.

    Raises:
        ValueError: for another shape or dtype, or a tau that is not a number of at least 0.
    """
    _check_tau("compare_structure", tau)
    if expected.shape != mi.mi.shape or expected.dtype != torch.bool:
        raise ValueError(
            f"compare_structure: expected must be {tuple(mi.mi.shape)} bool like mi, "
            f"got {tuple(expected.shape)} {expected.dtype}"
        )
    pairs = masked_pairs(mi.mask)
    dependent = (_either_way(mi.mi) >= tau) & pairs
    wanted = (expected | expected.T) & pairs
    open_enough = mi.entropy >= tau
    silent = wanted & ~dependent
    missing = silent & open_enough.unsqueeze(0) & open_enough.unsqueeze(1)
    return StructureReport(wanted & dependent, dependent & ~wanted, missing, silent & ~missing)


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
    _extra("matplotlib", "draw_map")
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

    values = np.ma.masked_where(~masked_pairs(mi.mask).numpy(), _either_way(mi.mi).clamp(min=0).numpy())
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


def _either_way(mi: Tensor) -> Tensor:
    """[N, N]: the larger of both directions of each pair, the strength that thresholds and colours go by."""
    return torch.maximum(mi, mi.T)


def _check_tau(owner: str, tau: float) -> None:
    if not tau >= 0:
        raise ValueError(f"{owner}: tau must be at least 0 nats, got {tau}")


def _extra(package: str, what: str) -> Any:
    """An optional package, or UnsupportedError that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UnsupportedError([f"{package} is not installed: pip install 'mdmi-fast[plot]'"], what) from None
