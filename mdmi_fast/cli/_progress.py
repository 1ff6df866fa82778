"""Progress bars: on standard error, and none where that is not a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bar(*, total: int | None, unit: str, description: str, silent: bool = False) -> Iterator[Any]:
    """A bar whose `update(n)` counts what was finished and whose `write(line)` prints a line above it."""
    from tqdm import tqdm

    with tqdm(
        total=total, unit=unit, desc=description, disable=silent or None, dynamic_ncols=True, leave=False
    ) as progress:
        yield progress
