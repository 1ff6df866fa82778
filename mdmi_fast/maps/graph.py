"""The graph of the dependent pairs, and its files. Needs networkx, of the extra "plot"."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mdmi_fast.errors import require
from mdmi_fast.files import replace_file
from mdmi_fast.labels import masked_pairs
from mdmi_fast.maps.mi import MIMap, check_tau, strength

if TYPE_CHECKING:
    import networkx


def dependency_graph(
    mi: MIMap | Tensor, tau: float, labels: Sequence[str] | None = None, *, mask: Tensor | None = None
) -> networkx.Graph:
    """The graph whose edges are the dependent pairs: max(I_ij, I_ji) >= tau (arXiv 2605.20187, as `ops.color`).

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
    networkx = require("networkx", "plot", "dependency_graph")
    check_tau("dependency_graph", tau)
    matrix = mi.mi if isinstance(mi, MIMap) else mi
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"dependency_graph: mi must be [N, N], got shape {tuple(matrix.shape)}")
    n = len(matrix)
    if isinstance(mi, MIMap):
        labels = mi.labels if labels is None else labels
        mask = mi.mask if mask is None else mask
    labels = [str(index) for index in range(n)] if labels is None else labels
    mask = torch.ones(n, dtype=torch.bool, device="cpu") if mask is None else mask.cpu()
    if len(labels) != n or mask.shape != (n,):
        raise ValueError(
            f"dependency_graph: labels and mask must be [{n}] like mi, got {len(labels)} and {tuple(mask.shape)}"
        )
    graph = networkx.Graph(tau=float(tau))
    for index in mask.nonzero().squeeze(-1).tolist():
        graph.add_node(index, label=labels[index])
        if isinstance(mi, MIMap):
            graph.nodes[index]["entropy"] = float(mi.entropy[index])
    values = strength(matrix.cpu())
    joined = (values >= tau) & masked_pairs(mask)
    for first, second in joined.triu(1).nonzero().tolist():
        graph.add_edge(first, second, mi=float(values[first, second]))
    return graph


def write_graph(graph: networkx.Graph, path: str | Path) -> None:
    """Write a graph in the format that the file's name ends with; the file is whole or untouched.

    Args:
        graph: of `dependency_graph`.
        path: ends in .graphml, .dot (Graphviz) or .json (nodes and links, as d3 and networkx read them).

    Raises:
        ValueError: for another ending.
    """
    path = Path(path)
    networkx = require("networkx", "plot", "write_graph")
    if path.suffix not in (".graphml", ".dot", ".json"):
        raise ValueError(f"write_graph: path must end in .graphml, .dot or .json, got {path.name}")
    with replace_file(path) as temporary:
        if path.suffix == ".graphml":
            networkx.write_graphml(graph, temporary)
        elif path.suffix == ".json":
            temporary.write_text(json.dumps(networkx.node_link_data(graph, edges="links")) + "\n", encoding="utf-8")
        else:
            temporary.write_text(_dot(graph), encoding="utf-8")


def _dot(graph: networkx.Graph) -> str:
    """In Graphviz' language, whose quoted strings JSON's are; edges as wide as they are strong."""
    lines = [
        f"  {node} [label={json.dumps(data['label'], ensure_ascii=False)}];" for node, data in graph.nodes(data=True)
    ]
    lines += [
        f"  {first} -- {second} [mi={data['mi']:.6g}, penwidth={1 + 4 * data['mi'] ** 0.5:.3g}];"
        for first, second, data in graph.edges(data=True)
    ]
    return "\n".join(["graph dependencies {", *lines, "}", ""])
