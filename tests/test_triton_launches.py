"""How launches are chosen: dispatch, bounded compilation, tuning and compiling ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import mdmi_fast
from benchmarks import offline
from mdmi_fast import ops
from mdmi_fast.backends.triton import tuner as tuning
from mdmi_fast.backends.triton._common import Tile
from mdmi_fast.backends.triton.tiles import PairTile
from mdmi_fast.backends.triton.tuner import tuner


def test_interpreted_kernels_run_only_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MDMI_BACKEND", raising=False)
    x = torch.zeros(2, 3)
    assert ops._dispatch.choose("stats", "entropy", None, [x])[0] != "triton"
    assert ops._dispatch.choose("stats", "entropy", "triton", [x])[0] == "triton"
    assert ops.backends("cpu")["entropy"]["triton"] == []
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert ops.backends("cpu")["entropy"]["triton"] == ["runs on cuda tensors, got cpu"]


def test_a_device_of_every_kind_has_choices() -> None:
    for target in offline.TARGETS:
        for precision in ("bf16", "fp16", "tf32", "fp32"):
            for direction, widths in (
                ("forward", (512, 256, 0)),
                ("forward", (512, 256, 128)),
                ("backward", (512, 256, 0)),
            ):
                with offline.recorded(target):
                    tile = tuner.tile(direction, torch.device("cpu"), precision, widths, lambda tile: None)
                assert tile.tile.warps * offline.TARGETS[target].warp_size <= 1024


@pytest.fixture
def two_candidates(monkeypatch: pytest.MonkeyPatch) -> list[PairTile]:
    candidates = [PairTile(4, 4, 16, 16, Tile(1)), PairTile(4, 8, 16, 16, Tile(1))]
    monkeypatch.setattr(tuning, "CANDIDATES", {"half": candidates, "single": candidates})
    monkeypatch.setattr(tuner, "found", {})
    return candidates


def test_tuning_measures_once_remembers_and_reads_back(two_candidates: list[PairTile], tmp_path: Path) -> None:
    u, network = torch.randn(1, 5, 4), ([torch.randn(4, 3)], [torch.randn(3)], torch.randn(3), 0.0)
    expected = ops.pairwise_mlp(u, u, *network, backend="triton")
    assert not tuner.found
    cache = tmp_path / "new" / "tiles.json"
    with mdmi_fast.tune_kernels(cache=cache):
        got = ops.pairwise_mlp(u, u, *network, backend="triton")
    torch.testing.assert_close(got, expected)
    ((key, tile),) = tuner.found.items()
    assert key == "interpreter: forward, fp32, 4/3/0"
    assert tile in two_candidates
    assert list(json.loads(cache.read_text())) == [key]
    tuner.found.clear()
    with mdmi_fast.tune_kernels(cache=cache):
        assert tuner.found == {key: tile}


def test_a_cache_that_cannot_be_written_is_said(two_candidates: list[PairTile], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.warns(UserWarning, match="choices are kept in memory only"),
        mdmi_fast.tune_kernels(cache=tmp_path / "file" / "x.json"),
    ):
        pass


def test_each_candidate_alone_writes_every_element(two_candidates: list[PairTile]) -> None:
    # torch.empty is NaN in these tests
    u, v = torch.randn(2, 1, 9, 4)
    network = ([torch.randn(4, 3)], [torch.randn(3)], torch.randn(3), 0.0)
    expected = ops.pairwise_mlp(u, v, *network, backend="torch")
    for tile in two_candidates:
        with tuner.forced(tile):
            torch.testing.assert_close(
                ops.pairwise_mlp(u, v, *network, backend="triton"), expected, rtol=1e-5, atol=1e-5
            )
