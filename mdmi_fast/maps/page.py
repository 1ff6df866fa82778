"""A map as one HTML page that needs nothing else: heat map with hover, threshold slider, arcs and the pairs' table."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from torch import Tensor

from mdmi_fast.files import replace_file
from mdmi_fast.maps.mi import MIMap


def write_page(
    mi: MIMap, path: str | Path, *, expected: Tensor | None = None, expected_name: str = "expected", title: str = "Map"
) -> None:
    """Write the page; the file is whole or untouched.

    Args:
        mi: the map.
        path: of the file.
        expected: [N, N] bool, the structure; either direction counts. None: pairs are not told apart.
        expected_name: what the structure is.
        title: of the page.
    """
    pairs = mi.pairs()
    known = None if expected is None else (expected | expected.T)
    data = {
        "title": title,
        "source": mi.source,
        "expectedName": None if known is None else expected_name,
        "labels": list(mi.labels),
        "masked": mi.mask.int().tolist(),
        "entropy": [round(value, 6) for value in mi.entropy.tolist()],
        "pairs": [[pair.first, pair.second, round(max(pair.mi, 0.0), 6)] for pair in pairs],
        "expected": None if known is None else [int(known[pair.first, pair.second]) for pair in pairs],
    }
    page = files("mdmi_fast.maps").joinpath("page.html").read_text(encoding="utf-8")
    # A label must not be able to end the script element that the data stands in.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    with replace_file(Path(path)) as temporary:
        temporary.write_text(page.replace("/*DATA*/null", text), encoding="utf-8", errors="backslashreplace")
