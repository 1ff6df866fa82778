"""What the kernels compile to for GPUs that are not here. benchmarks/static_report looks at more sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import mdmi_fast
from benchmarks import kernel_cases, offline
from mdmi_fast import ops
from mdmi_fast.backends.triton import select

ROOT = Path(__file__).parent.parent

# Each kernel at least once, the product kernels on every target; the targets of the others take turns to save time.
PRODUCTS: dict[str, Callable[[], None]] = {
    "scores 512/256": lambda: kernel_cases.scores((512, 256)),
    "gradients 256/128": lambda: kernel_cases.gradients((256, 128)),
}
OTHERS: list[tuple[str, str, Callable[[], None]]] = [
    ("sm_80", "statistics, smallest", lambda: kernel_cases.token_statistics(2)),
    ("sm_90", "statistics, split", lambda: kernel_cases.token_statistics(151936)),
    ("gfx942", "divergences, typical", lambda: kernel_cases.divergences(33)),
    ("gfx942", "selections, typical", lambda: kernel_cases.selections(1024)),
    ("sm_100", "selections, smallest", lambda: kernel_cases.selections(2)),
    ("sm_90", "selections without a mask", lambda: kernel_cases.selections(64, masked=False)),
    ("sm_90", "head", lambda: kernel_cases.head_statistics(4096, 1024)),
    ("sm_90", "dense", lambda: kernel_cases.dense_layers(256)),
    ("sm_90", "two layers", lambda: kernel_cases.scores((512, 256, 128))),
    ("sm_90", "fp32", lambda: (kernel_cases.scores((512, 256), "fp32"), kernel_cases.gradients((512, 256), "fp32"))),
    ("sm_100", "fp32", lambda: (kernel_cases.scores((512, 256), "fp32"), kernel_cases.gradients((512, 256), "fp32"))),
    ("sm_100", "two layers", lambda: kernel_cases.scores((512, 256, 128))),
    ("gfx942", "selections, largest", lambda: kernel_cases.selections(select.MOST_POSITIONS)),
    ("sm_90", "deep", lambda: kernel_cases.gradients((512, 256, 128))),
    ("gfx942", "deep, fp32", lambda: kernel_cases.gradients((64, 64, 32), "fp32")),
    ("sm_90", "selections, largest", lambda: kernel_cases.selections(select.MOST_POSITIONS)),
    ("sm_90", "tf32", lambda: kernel_cases.scores((512, 256), "tf32")),
    ("gfx942", "smallest scores", lambda: kernel_cases.scores((16, 1))),
]


def look(target: str, call: Callable[[], None], ones: bool = False) -> list[tuple[offline.Launch, offline.Code]]:
    """Compiles every launch of a call once; fails on what no launch may have."""
    with offline.recorded(target) as launches:
        call()
    seen = []
    for launch in offline.distinct(launches):
        code = offline.read(offline.compiled(launch, ones), target)
        assert code.spilled == 0, (launch.name, code)
        assert code.shared <= offline.SHARED_LIMIT[target], (launch.name, code)
        assert code.threads <= 1024, (launch.name, code)
        seen.append((launch, code))
    return seen


@pytest.mark.parametrize("target", offline.TARGETS)
@pytest.mark.parametrize("case", PRODUCTS)
def test_products_use_tensor_cores_and_spill_nothing(case: str, target: str) -> None:
    for launch, code in look(target, PRODUCTS[case]):
        if "pairwise_mlp" in launch.name:
            assert code.tensor_core > 0, launch.name


@pytest.mark.parametrize(("target", "case", "call"), OTHERS, ids=[f"{target}-{case}" for target, case, _ in OTHERS])
def test_kernels_stay_within_a_target(target: str, case: str, call: Callable[[], None]) -> None:
    for launch, code in look(target, call):
        products = ("_linear", "_pair", "_dense", "_weight")
        if case in ("head", "two layers", "deep", "tf32", "smallest scores") and launch.name.startswith(products):
            assert code.tensor_core > 0, launch.name


def test_every_kernel_compiles_with_its_scalars_equal_to_1() -> None:
    calls = [kernel_cases.CASES["smallest"][name] for name in ("stats", "kl", "select")]
    calls += [
        lambda: kernel_cases.gradients((16, 16)),
        lambda: kernel_cases.gradients((16,)),
        lambda: kernel_cases.gradients((16, 16, 16)),
        lambda: kernel_cases.head_statistics(2, 16),
    ]
    names = {launch.name for call in calls for launch, _ in look("gfx942", call, ones=True)}
    assert {"_pairwise_mlp_bwd_half_kernel", "_weight_gradient_kernel"} <= names


@pytest.mark.parametrize("beyond", [0, 1], ids=["in one piece", "cut out"])
def test_sizes_and_strides_that_differ_from_call_to_call_compile_no_second_kernel(beyond: int) -> None:
    """Also where they are 1 or multiples of 16, which Triton would compile in."""
    sizes = (2, 5, 15, 16, 17, 31, 32) if beyond else (1, 5, 16, 17, 32)
    with offline.recorded("sm_90") as launches:
        kernel_cases.every_kernel(7, 3, beyond)
        first = Counter(launch.name for launch in offline.distinct(launches))
        for n in sizes:
            for k in (1, 5, 16):
                kernel_cases.every_kernel(n, k, beyond)
    assert Counter(launch.name for launch in offline.distinct(launches)) == first
    sources = [path.read_text() for path in Path(select.__file__).parent.glob("*.py")]
    assert first.keys() == {
        name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
    }


def test_another_triton_compiles_the_same_kernels() -> None:
    """MDMI_OTHER_TRITON names a folder where another version of Triton is installed (`pip install --target`)."""
    folder = os.environ.get("MDMI_OTHER_TRITON")
    if not folder:
        pytest.skip("MDMI_OTHER_TRITON is not set")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
    del environment["MDMI_OTHER_TRITON"]

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        return done.stdout

    import triton

    assert run("-c", "import triton; print(triton.__version__)").strip() != triton.__version__
    kinds = (
        "no_second_kernel or (tensor_cores and (sm_90 or gfx942)) or typical or head or deep or without_a_mask or split"
    )
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", kinds)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on a CPU reach the host code of the kernels; these were imported as what is compiled."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_200_sizes_compile_once_a_class(on_cpu: None) -> None:
    network = ([torch.randn(33, 20)], [torch.randn(20)], torch.randn(20), 0.0)
    with offline.recorded("sm_90") as launches:
        for n in range(1, 201):
            u, v = (
                torch.empty(1, n, 33),
                torch.empty(1, n, 33),
            )  # a view that is not aligned to 16 bytes is a class of its own
            mask = torch.ones(1, n, dtype=torch.bool)
            rows = torch.zeros(1, min(n, 5), dtype=torch.int64)
            ops.pairwise_mlp(u, v, *network, mask=mask, backend="triton")
            ops.pairwise_mlp_rows(u, v, *network, rows, mask=mask, backend="triton")
            ops.token_stats(torch.empty(2, n, 33), backend="triton")
            h, mi = torch.empty(1, n), torch.empty(1, n, n)
            ops.select_budget(h, mi, gamma=1.0, mask=mask, backend="triton")
            ops.color(mi, tau=0.5, mask=mask, backend="triton")
    kinds = Counter(launch.name for launch in offline.distinct(launches))
    powers = 4  # 32, 64, 128 and 256 positions a program
    assert kinds.pop("_select_budget_kernel") == powers
    assert kinds.pop("_color_kernel") == powers
    assert kinds.pop("_pairwise_mlp_fwd_kernel") == 2  # all pairs; rows
    assert kinds.pop("_check_kernel") == 2  # with entropies; with degrees
    assert set(kinds.values()) == {1}, kinds


def test_warming_up_launches_what_a_step_launches(on_cpu: None) -> None:
    shape = mdmi_fast.StepShape(vocabulary=9, positions=12, layers=(8, 4), dtype=torch.float32)
    with offline.recorded("sm_90") as launches:
        mdmi_fast.warmup([shape], device="cpu", backend="triton")
        warm = list(launches)
        stats = ops.token_stats(torch.empty(3, 12, 9), backend="triton")
        u, v = torch.empty(3, 12, 8), torch.empty(3, 12, 8)
        network = ([torch.empty(8, 4)], [torch.empty(4)], torch.empty(4), 0.0)
        mask = torch.ones(3, 12, dtype=torch.bool)
        ops.score_and_select(stats.entropy, u, v, *network, gamma=0.5, mask=mask, backend="triton")
    assert len(launches) > len(warm)
    assert len(offline.distinct(launches)) == len(offline.distinct(warm))
