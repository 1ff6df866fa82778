"""The library without Python: its header, a program in C, and each function against the op it stands for."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mdmi_fast
from mdmi_fast import ops

FOLDER = Path(mdmi_fast.__file__).parent
EXAMPLES = Path(__file__).parents[1] / "examples"
LIBRARY = FOLDER / "libmdmi_fast.so"
pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the extension is not built")

B, N = 3, 9
Size, Int, Real = ctypes.c_int64, ctypes.c_int, ctypes.c_double


@pytest.fixture(scope="module")
def library() -> Any:
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.mdmi_last_error.restype = ctypes.c_char_p
    loaded.mdmi_network_new.restype = ctypes.c_void_p
    return loaded


def at(tensor: Tensor | None) -> Any:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


@pytest.fixture
def state() -> tuple[Tensor, Tensor, Tensor]:
    mi = torch.rand(B, N, N) / 2
    return torch.rand(B, N), mi, torch.rand(B, N) < 0.8


def budget(library: Any, state: tuple[Tensor, Tensor, Tensor], **change: Any) -> tuple[int, Tensor, Tensor]:
    entropy, mi, mask = state
    rule = {"gamma": torch.full((B,), 0.9).double(), "lam": 0.5, "weight": 1.0, "order": 0, "limit": 0, "threads": 1}
    rule |= change
    selected, spent = torch.full((B, N), True), torch.full((B,), torch.nan, dtype=torch.float64)
    code = library.mdmi_select_budget(
        *(Size(B), Size(N), at(entropy), at(mi), at(mask), at(rule["gamma"]), Real(rule["lam"]), Real(rule["weight"])),
        *(Int(rule["order"]), Size(rule["limit"]), at(selected), at(spent), Int(rule["threads"])),
    )
    return code, selected, spent


@pytest.mark.parametrize("order", ["entropy", "cheapest"])
@pytest.mark.parametrize("limit", [None, 2])
def test_budgets_are_those_of_ops(
    library: Any, state: tuple[Tensor, Tensor, Tensor], order: Any, limit: int | None
) -> None:
    code, selected, spent = budget(library, state, order=int(order == "cheapest"), limit=limit or 0)
    expected = ops.select_budget(state[0], state[1], gamma=0.9, lam=0.5, order=order, mask=state[2], limit=limit)
    assert code == 0
    assert selected.equal(expected.selected)
    assert spent.equal(expected.spent)


def test_thresholds_and_colours_are_those_of_ops(library: Any, state: tuple[Tensor, Tensor, Tensor]) -> None:
    entropy, mi, mask = state
    selected, spent = torch.full((B, N), True), torch.empty(B, dtype=torch.float64)
    group = torch.full((B, N), 7)
    positions = (Size(B), Size(N), at(entropy), at(mi), at(mask))
    assert library.mdmi_select_threshold(*positions, Real(0.3), Size(0), at(selected), at(spent), Int(2)) == 0
    expected = ops.select_threshold(entropy, mi, tau=0.3, mask=mask)
    assert selected.equal(expected.selected)
    assert spent.equal(expected.spent)
    assert library.mdmi_color(Size(B), Size(N), at(mi), at(mask), Real(0.3), at(group), Int(1)) == 0
    assert group.equal(ops.color(mi, tau=0.3, mask=mask))
    assert library.mdmi_color(Size(B), Size(N), at(mi), None, Real(0.3), at(group), Int(1)) == 0
    assert group.equal(ops.color(mi, tau=0.3))


def test_token_statistics_are_those_of_ops(library: Any) -> None:
    logits = torch.randn(5, 33)
    logits[1, 3:] = -torch.inf
    logits[2, 0] = torch.nan
    entropy, confidence, token = torch.empty(5), torch.empty(5), torch.empty(5, dtype=torch.int64)
    assert library.mdmi_token_stats(at(logits), Size(5), Size(33), at(entropy), at(confidence), at(token), Int(1)) == 0
    expected = ops.token_stats(logits, backend="cpp")
    for ours, theirs in ((entropy, expected.entropy), (confidence, expected.confidence), (token, expected.token)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("symmetry", ["none", "mean", "upper"])
@pytest.mark.parametrize("combine", ["add", "mul"])
@pytest.mark.parametrize("widths", [(6,), (6, 5), (6, 5, 4)])
def test_scores_are_those_of_ops(library: Any, symmetry: Any, combine: Any, widths: tuple[int, ...]) -> None:
    weights = [torch.randn(a, b) for a, b in itertools.pairwise(widths)]
    biases, w_out = [torch.randn(b) for b in widths[1:]], torch.randn(widths[-1])
    u, v, mask, scores = torch.randn(B, N, 6), torch.randn(B, N, 6), torch.rand(B, N) < 0.8, torch.empty(B, N, N)
    pointers = ctypes.c_void_p * len(weights)
    network = library.mdmi_network_new(
        *(Size(len(weights)), (Size * len(widths))(*widths), pointers(*(w.data_ptr() for w in weights))),
        *(pointers(*(b.data_ptr() for b in biases)), at(w_out), ctypes.c_float(0.25)),
    )
    assert network
    handle = ctypes.c_void_p(network)
    rule = (Int(("none", "mean", "upper").index(symmetry)), Int(combine == "mul"), Int(1))
    operands = (Size(B), Size(N), at(u), at(v), at(mask))
    assert library.mdmi_score_pairs(handle, *operands, *rule, at(scores), Int(1)) == 0
    options = {"mask": mask, "combine": combine, "symmetry": symmetry, "activation": "softplus", "backend": "cpp"}
    assert scores.equal(ops.pairwise_mlp(u, v, weights, biases, w_out, 0.25, **options))
    shift, relation = torch.randn(3), torch.randint(0, 3, (N, N), dtype=torch.int32)
    for given in (relation, None):
        where = None if given is None else at(given)
        assert library.mdmi_network_shift(handle, Size(3), at(shift), Size(N), where) == 0
        assert library.mdmi_score_pairs(handle, *operands, *rule, at(scores), Int(1)) == 0
        shifted = ops.pairwise_mlp(u, v, weights, biases, w_out, 0.25, shift=shift, relation=given, **options)
        assert scores.equal(shifted)
    assert library.mdmi_score_pairs(handle, *operands, Int(3), *rule[1:], at(scores), Int(1)) == -1
    assert library.mdmi_last_error() == b"mdmi_score_pairs: symmetry must lie in 0..2, got 3"
    library.mdmi_network_free(handle)


def test_what_makes_no_sense_is_said(library: Any, state: tuple[Tensor, Tensor, Tensor]) -> None:
    for change, message in (
        ({"gamma": torch.tensor([1.0, -1.0, 1.0]).double()}, "gamma must be at least 0, got -1.000000 at batch 1"),
        ({"gamma": torch.tensor([1.0, 1.0, torch.nan]).double()}, "gamma must be at least 0, got nan at batch 2"),
        ({"lam": float("inf")}, "lam must be finite and at least 0, got inf"),
        ({"weight": -1.0}, "entropy_weight must be finite and at least 0, got -1.000000"),
        ({"order": 2}, "order must lie in 0..1, got 2"),
        ({"limit": -1}, "limit must be at least 1, or MDMI_NO_LIMIT, got -1"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
    ):
        assert budget(library, state, **change)[0] == -1
        assert library.mdmi_last_error().decode() == f"mdmi_select_budget: {message}"
    entropy, mi, mask = state
    entropy[1, 4] = torch.nan
    mask[1, 4] = True
    assert budget(library, (entropy, mi, mask))[0] == -1
    assert library.mdmi_last_error().endswith(
        b"entropy must not be NaN at masked positions, got NaN at batch 1, position 4"
    )
    assert not library.mdmi_network_new(Size(-1), None, None, None, None, ctypes.c_float(0))
    assert library.mdmi_last_error() == b"mdmi_network_new: n_layers must be at least 0, got -1"


def test_what_no_memory_holds_is_refused(library: Any, state: tuple[Tensor, Tensor, Tensor]) -> None:
    def refused(code: int) -> str:
        assert code == -1
        return library.mdmi_last_error().decode()

    entropy, mi, _ = state
    selected, spent, gamma = torch.empty(B, N, dtype=torch.bool), torch.empty(B).double(), torch.ones(B).double()
    tail = (Real(1), Real(1), Int(0), Size(0), at(selected), at(spent), Int(1))
    assert "entropy must be an array of sizes [3, 9], got NULL" in refused(
        library.mdmi_select_budget(Size(B), Size(N), None, at(mi), None, at(gamma), *tail)
    )
    assert "mi must fit into memory" in refused(
        library.mdmi_select_budget(Size(2**30), Size(2**20), at(entropy), at(mi), None, at(gamma), *tail)
    )
    assert "logits must fit into memory" in refused(
        library.mdmi_token_stats(at(mi), Size(2**40), Size(2**40), None, None, None, Int(1))
    )
    for exponent, message in ((62, b"w_out must fit into memory"), (58, b"mdmi_network_new: not enough memory")):
        widths = (Size * 1)(2**exponent)
        assert not library.mdmi_network_new(Size(0), widths, None, None, at(entropy), ctypes.c_float(0))
        assert message in library.mdmi_last_error()


def test_a_program_in_c_compiles_and_says_what_ops_says(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "select"
    subprocess.run(
        [
            *(compiler, "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", EXAMPLES / "select.c", f"-I{FOLDER}"),
            *(f"-L{FOLDER}", "-lmdmi_fast", f"-Wl,-rpath,{FOLDER}", "-o", program),
        ],
        check=True,
    )
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    entropy = ops.entropy(torch.tensor([[0.0, 1, 2, 3], [9, 0, 0, 0], [0, 0, 4, 0]]))
    mi = torch.tensor([[0, 0.1, 0.9], [0.1, 0, 0], [0.9, 0, 0]])
    expected = ops.select_budget(entropy, mi, gamma=1.5)
    assert [int(word) for word in printed[:6:2]] == expected.selected.tolist() == [0, 1, 1]
    assert [float(word) for word in printed[1:6:2]] == pytest.approx(entropy.tolist(), abs=1e-6)
    assert float(printed[6]) == pytest.approx(float(expected.spent), abs=1e-6)


def test_the_ctypes_example_runs_without_torch() -> None:
    source = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [
        sys.executable,
        "-c",
        source.replace("sys.argv[1]", repr(str(EXAMPLES / "select_ctypes.py"))),
        str(FOLDER),
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.count("write") == 2


def test_the_ctypes_example_finds_the_library_or_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "select_ctypes.py")]
    found = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(FOLDER.parent)}, check=False, capture_output=True, text=True
    )
    assert (found.returncode, found.stdout.count("write")) == (0, 2), found.stderr
    missing = subprocess.run([*command, tmp_path], check=False, capture_output=True, text=True)
    told = f"there is no {tmp_path}/libmdmi_fast.so: name the FOLDER that holds it\n"
    assert (missing.returncode, missing.stderr) == (1, told)
