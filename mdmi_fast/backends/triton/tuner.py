"""The tile of a pair launch: what was measured on this card, else what `tiles` says.

Nothing is measured in normal use; inside `mdmi_fast.tune_kernels` the candidates of a kind of launch are, once.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import triton

from mdmi_fast.backends.triton import _common, tiles
from mdmi_fast.backends.triton._common import Tile
from mdmi_fast.backends.triton.tiles import PairTile
from mdmi_fast.files import read_json, replace_file

CANDIDATES = {
    "half": [
        PairTile(i, j, k, n, Tile(warps, stages))
        for i, j in ((8, 8), (8, 16), (16, 16))
        for k in (32, 64)
        for n in (128, 256)
        for warps in (4, 8)
        for stages in (2, 3)
    ],
    "single": [
        PairTile(i, j, 32, n, Tile(warps, stages))
        for i, j in ((4, 8), (8, 8), (8, 16))
        for n in (64, 128)
        for warps in (4, 8)
        for stages in (1, 2)
    ],
}


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median of five runs after one that compiles."""
    run()
    times = []
    for _ in range(5):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _fastest(device: torch.device, candidates: list[PairTile], run: Callable[[PairTile], object]) -> PairTile:
    times = {}
    for candidate in candidates:
        try:
            times[candidate] = _seconds(device, lambda tile=candidate: run(tile))
        except triton.runtime.errors.OutOfResources:
            continue  # this card has not the shared memory or registers for it
    return min(times, key=times.__getitem__)


def _is_tile(row: object) -> bool:
    return isinstance(row, list) and len(row) == 6 and all(type(number) is int and number >= 1 for number in row)


class Tuner:
    """What was measured, by card, direction, kind and widths, and whether more is to be."""

    def __init__(self) -> None:
        self.found: dict[str, PairTile] = {}
        self._measuring = False
        self._forced: PairTile | None = None

    def tile(
        self,
        direction: str,
        device: torch.device,
        precision: str,
        widths: tuple[int, int, int],
        run: Callable[[PairTile], object],
    ) -> PairTile:
        """The tile of a launch.

        Args:
            direction: "forward", "backward" (gradients of u and v) or "weights" (those of the network).
            device: of the tensors.
            precision: of the products.
            widths: H1, H2 and H3, 0 where there is no such layer.
            run: launches with a tile; called only inside `measured`.
        """
        if self._forced is not None:
            return self._forced
        kind = tiles.kind_of(direction, precision, widths)
        if self.found or self._measuring:
            key = f"{_card(device)}: {direction}, {kind}, {'/'.join(map(str, widths))}"
            if self._measuring and key not in self.found:
                candidates = CANDIDATES["half" if tiles.is_half(precision) else "single"]
                self.found[key] = _fastest(device, candidates, run)
            if key in self.found:
                return self.found[key]
        return tiles.tile_of(direction, _common.target_name(device), kind)

    def load(self, path: Path) -> None:
        """Load the choices of tiles that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        rows = read_json(path, "not the choices of `tune_kernels`")
        if not isinstance(rows, dict) or not all(_is_tile(row) for row in rows.values()):
            raise ValueError(
                f"{path}: not the choices of `tune_kernels`: expected an object of lists of six numbers >= 1"
            )
        for key, (*sizes, warps, stages) in rows.items():
            self.found[key] = PairTile(*sizes, Tile(warps, stages))

    def save(self, path: Path) -> None:
        rows = {key: [t.i, t.j, t.k, t.n, t.tile.warps, t.tile.stages] for key, t in sorted(self.found.items())}
        with replace_file(path) as temporary:
            temporary.write_text(json.dumps(rows, indent=1) + "\n")

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Launches of the block whose key is unknown are measured with every candidate."""
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False

    @contextmanager
    def forced(self, tile: PairTile) -> Iterator[None]:
        """Every pair launch of the block takes this tile: to look at one choice alone."""
        self._forced = tile
        try:
            yield
        finally:
            self._forced = None


tuner = Tuner()
"""The one that every pair launch asks."""
