"""Maps of mutual information: a sequence's matrix, its graph, what in it is unexpected or missing, pictures and a page.

Everything but `mi_map` reads a finished matrix; where that comes from (probing or an estimator) is its business alone.
Graphs need networkx and pictures matplotlib, both in the extra "plot".
"""

from mdmi_fast.maps.graph import dependency_graph, write_graph
from mdmi_fast.maps.mi import MIMap, Pair, mi_map
from mdmi_fast.maps.page import write_page
from mdmi_fast.maps.picture import draw_arcs, draw_board, draw_comparison, draw_map
from mdmi_fast.maps.structure import (
    MapComparison,
    StructureReport,
    Surprises,
    compare_maps,
    compare_structure,
    find_surprises,
    roc_area,
)

__all__ = [
    "MIMap",
    "MapComparison",
    "Pair",
    "StructureReport",
    "Surprises",
    "compare_maps",
    "compare_structure",
    "dependency_graph",
    "draw_arcs",
    "draw_board",
    "draw_comparison",
    "draw_map",
    "find_surprises",
    "mi_map",
    "roc_area",
    "write_graph",
    "write_page",
]
