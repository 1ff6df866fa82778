"""What only the C++ backend has: instruction sets, threads, fork, and its own tests under sanitizers."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mdmi_fast
from mdmi_fast.backends.calls import Budget, PairCall, PairNetwork, PairRule

_C = pytest.importorskip("mdmi_fast._C", reason="the extension is not built")

from mdmi_fast.backends.cpp import kl, mlp, pairwise, select, stats  # noqa: E402 - they need the extension

ROOT = Path(__file__).parent.parent
ISAS = ["scalar", "avx2", "avx512", "avx512bf16", "neon"]


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = mdmi_fast.get_num_threads()
    yield mdmi_fast.set_num_threads
    mdmi_fast.set_num_threads(before)


def _network(*widths: int) -> PairNetwork:
    pairs = list(itertools.pairwise(widths))
    weights = [torch.randn(i, o) / i**0.5 for i, o in pairs]
    return PairNetwork(weights, [torch.randn(o) for _, o in pairs], torch.randn(widths[-1]), torch.tensor(0.1))


def _inputs() -> dict[str, Tensor]:
    """Large enough for several threads."""
    generator = torch.Generator().manual_seed(0)
    return {
        "u": torch.randn(2, 60, 33, generator=generator),
        "v": torch.randn(2, 60, 33, generator=generator),
        "mask": torch.rand(2, 60, generator=generator) < 0.8,
        "grad": torch.randn(2, 60, 60, generator=generator),
        "logits": torch.randn(3, 4000, 33, generator=generator),
        "weights": torch.rand(3, 4000, generator=generator),
        "entropy": torch.rand(2, 60, generator=generator),
        "gamma": torch.tensor([3.0, 5.0], dtype=torch.float64),
        "head": torch.randn(5000, 33, generator=generator),
    }


def _everything(inputs: dict[str, Tensor], network: PairNetwork) -> list[Tensor]:
    """Results of every kernel."""
    u, v, mask, grad, logits, weights, entropy, gamma, head = inputs.values()
    call = PairCall(u, v, network, PairRule("add", "mean", "softplus", "fp32"), mask)
    mi = pairwise.pairwise_mlp(call)
    du, dv, d_network = pairwise.pairwise_mlp_backward(grad, call)
    budget = Budget(gamma, 1.0, 1.0)
    return [
        mi,
        pairwise.pairwise_mlp(call._replace(rows=torch.tensor([[3, -1], [59, 0]]))),
        pairwise.pairwise_mlp(call._replace(window=5)),
        *(du, dv, *d_network.tensors),
        *stats.token_stats(logits),
        *stats.linear_token_stats(u, head, None),
        stats.entropy_backward(weights, logits),
        kl.expected_kl(logits, weights, logits[0]),
        kl.mixture_entropy(logits, weights),
        *kl.mixture_stats(logits, weights, logits[0]),
        *kl.expected_kl_backward(weights[0], logits, weights, logits[0]),
        kl.mixture_entropy_backward(weights[0], logits, weights),
        mlp.mlp(logits, *network[:2]),
        *select.select_budget(entropy, mi, mask, budget),
        *select.select_threshold(entropy, mi, mask, 0.5, None),
        *select.score_and_select(entropy, call, budget),
        select.color(mi, mask, 0.5),
    ]


def _here() -> list[Tensor]:
    torch.manual_seed(0)
    return _everything(_inputs(), _network(33, 40, 17))


def test_results_do_not_depend_on_the_number_of_threads(threads: Callable[[int], None]) -> None:
    threads(1)
    alone = _here()
    for n in (2, 3, 8):
        threads(n)
        assert all(torch.equal(a, b) for a, b in zip(alone, _here(), strict=True))


def test_results_do_not_depend_on_the_default_dtype() -> None:
    inputs, network = _inputs(), _network(33, 40, 17)
    single = _everything(inputs, network)
    torch.set_default_dtype(torch.float64)
    try:
        double = _everything(inputs, network)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(single, double, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_exponentials_are_as_exact_as_their_comment_says() -> None:
    logits = torch.zeros(100_000, 2)
    logits[:, 1] = torch.linspace(-87.6, 0.0, len(logits))
    zero, one = torch.zeros(len(logits)), torch.ones(len(logits))
    # The gradient of the logsumexp is the softmax: e^x and two roundings.
    p = stats.token_stats_backward(zero, one, zero, zero, logits)[:, 1].double()
    error = (p / logits.double().softmax(-1)[:, 1] - 1).abs()
    near, far = (6.8e-7, 4.2e-6) if _C.isa() == "scalar" else (1.9e-7, 4.2e-7)
    assert float(error[logits[:, 1] >= -10].max()) < near + 1.8e-7
    assert float(error.max()) < far + 1.8e-7


def test_python_threads_may_call_at_the_same_time(threads: Callable[[int], None]) -> None:
    threads(2)
    logits = torch.randn(3000, 50)
    alone = stats.entropy(logits)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: stats.entropy(logits), range(40)):
            assert torch.equal(result, alone)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_works_after_fork() -> None:
    code = """
import os, torch, mdmi_fast
from mdmi_fast.backends.cpp import stats
mdmi_fast.set_num_threads(2)
logits = torch.randn(4000, 50)
before = stats.entropy(logits)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(stats.entropy(logits), before) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(stats.entropy(logits), before)
"""
    done = _run(code)
    assert done.returncode == 0, done.stderr


def test_subnormal_numbers_survive_the_import() -> None:
    code = """
import torch, mdmi_fast.backends.cpp
tiny = float("5e-324")
assert tiny != 0.0 and tiny / 2 == 0.0 and (torch.tensor([1e-45]) * 1.0).item() != 0.0
"""
    done = _run(code)
    assert done.returncode == 0, done.stderr


def test_the_extension_needs_neither_torch_nor_openmp() -> None:
    binary = Path(_C.__file__).read_bytes()
    assert not any(name in binary for name in (b"libtorch", b"libc10", b"libgomp", b"libomp"))


@pytest.mark.parametrize("isa", ISAS)
def test_a_forced_instruction_set_runs_or_is_refused(isa: str) -> None:
    done = _run("from mdmi_fast import _C; print(_C.isa())", MDMI_FORCE_ISA=isa)
    if isa in _C.supported_isas():
        assert done.stdout.strip() == isa
    else:
        assert "MDMI_FORCE_ISA must name an instruction set" in done.stderr
        assert f"got {isa}" in done.stderr


def test_an_unknown_instruction_set_is_refused() -> None:
    assert "got mmx" in _run("from mdmi_fast import _C; _C.isa()", MDMI_FORCE_ISA="mmx").stderr


def test_every_instruction_set_gives_the_same_answers(tmp_path: Path) -> None:
    here = _here()
    code = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_native import _here
torch.save(_here(), {file!r})
"""
    for isa in _C.supported_isas():
        file = tmp_path / isa
        done = _run(code.format(tests=str(ROOT / "tests"), file=str(file)), MDMI_FORCE_ISA=isa)
        assert done.returncode == 0, done.stderr
        for a, b in zip(here, torch.load(file), strict=True):
            # float32 sums of up to some thousand terms in another order
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_few_pairs_are_scored_where_the_budget_is_small() -> None:
    torch.manual_seed(0)
    u, v = torch.randn(1, 80, 16), torch.randn(1, 80, 16)
    call = PairCall(u, v, _network(16, 8), PairRule("add", "mean", "softplus", "fp32"))
    budget, entropy = Budget(torch.tensor([1.0], dtype=torch.float64), 0.01, 1.0), torch.rand(1, 80) * 2
    selected, spent, pairs = select.score_and_select_counted(entropy, call, budget)
    expected = select.select_budget(entropy, pairwise.pairwise_mlp(call), None, budget)
    assert torch.equal(selected, expected[0])
    assert torch.equal(spent, expected[1])
    assert selected.sum() > 3
    assert pairs < 80 * 79 / 2 / 5


def test_scoring_a_long_sequence_needs_little_memory() -> None:
    # 2,048 positions, every eighth row: the memory of the whole matrix in an eighth of its time
    code = """
import resource, torch, mdmi_fast
from mdmi_fast.backends.calls import PairCall, PairNetwork, PairRule
from mdmi_fast.backends.cpp import pairwise
u, v = torch.randn(1, 2048, 512), torch.randn(1, 2048, 512)
network = PairNetwork([torch.randn(512, 256)], [torch.randn(256)], torch.randn(256), torch.tensor(0.0))
rows = torch.arange(0, 2048, 32).unsqueeze(0)
pairwise.pairwise_mlp(PairCall(u[:, :20], v[:, :20], network, PairRule("add", "mean", "identity", "fp32")))
result = torch.zeros(1, 64, 2048)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pairwise.pairwise_mlp(PairCall(u, v, network, PairRule("add", "none", "identity", "fp32"), rows=rows))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = _run(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 1024


@pytest.mark.timeout(600)
def test_the_cores_pass_their_own_tests_under_sanitizers(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    sources = [*sorted((ROOT / "tests" / "csrc").glob("*.cpp")), *sorted((ROOT / "csrc").rglob("*.cpp"))]
    left_out = ("bindings.cpp", "cpu.cpp", "isa_avx512bf16.cpp")  # the test chooses tables itself
    sources = [s for s in sources if s.name not in left_out]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    flags = ["-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-w", "-pthread", f"-I{ROOT / 'csrc'}", *sanitize]

    def build(source: Path) -> Path:
        target = tmp_path / f"{source.stem}.o"
        subprocess.run([compiler, *flags, "-c", source, "-o", target], check=True, timeout=500)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(build, sources))
    program = tmp_path / "test_kernels"
    subprocess.run([compiler, *sanitize, "-pthread", *objects, "-o", program], check=True, timeout=120)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
