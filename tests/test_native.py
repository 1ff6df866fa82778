"""What only the C++ backend has: instruction sets, threads, fork, and its own tests under sanitizers."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mdmi_fast
from mdmi_fast import ops, reference
from mdmi_fast.backends.calls import Budget, PairCall, PairNetwork, PairRule

_C = pytest.importorskip("mdmi_fast._C", reason="the extension is not built")

from mdmi_fast.backends.cpp import dense, kl, pairwise, select, stats, sudoku  # noqa: E402 - they need the extension
from mdmi_fast.tasks.sudoku.model import SudokuModel  # noqa: E402

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
    some, band = call._replace(rows=torch.tensor([[3, -1], [59, 0]])), call._replace(window=5)
    shifted = call._replace(shift=torch.linspace(-1, 1, 7, dtype=torch.float32))
    mi, budget = pairwise.pairwise_mlp(call), Budget(gamma, 1.0, 1.0)
    return [
        mi,
        pairwise.pairwise_mlp(some),
        pairwise.pairwise_mlp(band),
        *pairwise.pairwise_mlp_backward(grad, call).tensors,
        *pairwise.pairwise_mlp_backward(grad[:, :2], some).tensors,
        *pairwise.pairwise_mlp_backward(grad[..., :11], band).tensors,
        pairwise.pairwise_mlp(shifted),
        *pairwise.pairwise_mlp_backward(grad[:, :2], shifted._replace(rows=some.rows)).tensors,
        *select.score_and_select(entropy, shifted, budget),
        *stats.token_stats(logits),
        *stats.linear_token_stats(u, head, None),
        stats.entropy_backward(weights, logits),
        kl.expected_kl(logits, weights, logits[0]),
        kl.mixture_entropy(logits, weights),
        *kl.mixture_stats(logits, weights, logits[0]),
        *kl.expected_kl_backward(weights[0], logits, weights, logits[0]),
        kl.mixture_entropy_backward(weights[0], logits, weights),
        dense.mlp(logits, *network[:2]),
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
    for n in (2, 3, 4, 8):
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


def _assert_alike(got: Tensor, expected: Tensor, name: str, rtol: float = 1e-5, atol: float = 4e-6) -> None:
    """Of float32 and float64: the same NaN and infinities, where float32 can hold the numbers, and these alike."""
    torch.testing.assert_close(
        got.double(),
        expected.float().double(),  # beyond float32 is inf
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda text: f"{_C.isa()}: {name}: {text}",
    )


def _check_infinities() -> None:
    """Inf, -inf or NaN somewhere in an operand, at widths that fill the vectors of no instruction set and of all."""
    rows = torch.tensor([[0, 4], [2, -1]])
    kinds = itertools.product(
        ("add", "mul"), ("none", "mean", "upper"), ("fp32", "bf16"), (math.inf, -math.inf, math.nan)
    )
    for (combine, symmetry, precision, value), widths in itertools.product(
        kinds, [(1,), (3,), (4, 8), (4, 1), (3, 5, 4), (5, 17, 3), (7, 16, 9, 33)]
    ):
        # small halves of integers: exact in bfloat16, and their sums in float32
        u, v, *layers = (
            torch.randint(-2, 3, shape) / 2
            for shape in (
                (2, 5, widths[0]),
                (2, 5, widths[0]),
                *itertools.pairwise(widths),
                *((n,) for n in widths[1:]),
            )
        )
        n_layers = len(widths) - 1
        w_out = torch.randint(-2, 3, widths[-1:]) / 2
        operand = (u, v, *layers, w_out)[int(torch.randint(3 + len(layers), ()))]
        operand.view(-1)[int(torch.randint(operand.numel(), ()))] = value
        network = (layers[:n_layers], layers[n_layers:], w_out, 0.5)
        network64 = ([w.double() for w in network[0]], [b.double() for b in network[1]], w_out.double(), 0.5)
        rule = {"combine": combine, "symmetry": symmetry}
        options, exact = {**rule, "precision": precision, "backend": "cpp"}, (u.double(), v.double(), *network64)
        name = f"{widths} {combine} {symmetry} {precision} {value}"
        _assert_alike(ops.pairwise_mlp(u, v, *network, **options), reference.pairwise_mlp(*exact, **rule), name)
        _assert_alike(
            ops.pairwise_mlp_rows(u, v, *network, rows, **options),
            reference.pairwise_mlp_rows(*exact, rows, **rule),
            f"rows of {name}",
        )
        _assert_alike(
            ops.pairwise_mlp_band(u, v, *network, 2, **options),
            reference.pairwise_mlp_band(*exact, 2, **rule),
            f"band of {name}",
        )
        if n_layers:
            expected = reference.mlp(u.double(), *network64[:2])
            _assert_alike(ops.mlp(u, *network[:2], backend="cpp"), expected, f"mlp of {name}")
    # the case that a padded column once decided
    u, v, head = (
        torch.full((1, 2, 4), math.inf, dtype=torch.float16),
        torch.zeros(1, 2, 4),
        ([torch.full((4, 8), 0.5)],),
    )
    scores = ops.pairwise_mlp(u, v, *head, [torch.zeros(8)], torch.ones(8), 0.0, symmetry="none", backend="cpp")
    assert scores.tolist() == [[[0.0, math.inf], [math.inf, 0.0]]]


def _check_pair_gradients() -> None:
    """NaN passes a rectifier, and so does its gradient; an infinite score does not spoil the gradient of others."""
    u, v = torch.tensor([[[1.0], [math.nan]]]), torch.ones(1, 2, 1)
    network = PairNetwork([torch.ones(1, 1)], [torch.zeros(1)], torch.ones(1), torch.zeros(()))
    ones, rule = torch.ones(1, 2, 2), PairRule("add", "none", "identity", "fp32")
    du, *_ = pairwise.pairwise_mlp_backward(ones, PairCall(u, v, network, rule))
    assert du.flatten().tolist() == [1.0, 1.0]
    for precision in ("fp32", "bf16"):
        u, v = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
        u[0, 0] = math.inf
        network = PairNetwork([torch.full((4, 8), 0.5)], [torch.zeros(8)], torch.ones(8), torch.zeros(()))
        rule = PairRule("add", "none", "softplus", precision)
        du, _, (_, _, d_w_out, d_b_out), _ = pairwise.pairwise_mlp_backward(ones, PairCall(u, v, network, rule))
        # the slope of softplus is 1 at inf and 1/2 at 0, where all rectifiers are closed
        assert du.flatten().tolist() == [4.0] * 4 + [0.0] * 4
        assert d_w_out.tolist() == [math.inf] * 8
        assert d_b_out.item() == 1.5


def _check_sudoku() -> None:
    """The compiled network and the eager one, with weights that training has spoilt."""
    tokens = torch.randint(0, 10, (2, 81))
    for name, value in (("kind", math.nan), ("own", math.inf), ("gain", 1e25), ("gain", -math.inf)):
        model = SudokuModel(3)
        with torch.no_grad():
            getattr(model, name)[2, -1] = value
            exact, _ = model._eager(tokens)
        # float32 sums of 16 products as large as the largest logit, three iterations after another
        atol = 1e-4 * max(1.0, float(exact.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        torch.testing.assert_close(model(tokens).logits, exact, rtol=1e-4, atol=atol, equal_nan=True, msg=name)


def _check_distant_logits() -> None:
    """Logits as far apart as their dtype allows, also where p is 0 but for float32's rounding."""
    most = torch.finfo(torch.float32).max
    zero, one_high = torch.zeros(1, 4), torch.tensor([[0.0, -most, -most, -most]])
    assert ops.kl_divergence(zero, one_high, backend="cpp").item() == pytest.approx(0.75 * most, rel=1e-6)
    assert ops.kl_divergence(zero, -one_high - most, backend="cpp").item() == pytest.approx(0.25 * most, rel=1e-6)
    p, q = torch.tensor([[0.0, -90.0]]), torch.tensor([[0.0, -most]])
    assert ops.kl_divergence(p, q, backend="cpp").item() == pytest.approx(math.exp(-90) * most, rel=1e-5)
    assert ops.entropy(torch.tensor([[most, -most]]), backend="cpp").item() == 0.0
    far = torch.finfo(torch.float64).max
    wide = torch.full((1, 1500), -far, dtype=torch.float64)
    wide[0, 1400] = far
    assert ops.entropy(wide, backend="cpp").item() == 0.0
    assert ops.kl_divergence(torch.zeros_like(wide), wide, backend="cpp").item() == math.inf
    values = torch.tensor([0.0, 1.0, -5.0, -90.0, -100.0, most, -most, -most / 2, -1e30, -1e31, most / 3, -math.inf])
    for width, dtype in itertools.product(
        (1, 2, 3, 9, 33, 128, 129, 300, 1500), (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ):
        logits, base = (3 * torch.randn(*lead, width) for lead in ((3, 7), (7,)))
        for x in (logits, base):
            some = torch.rand(x.shape) < 0.3
            x[some] = values[torch.randint(len(values), (int(some.sum()),))]
        base[:, -1] = torch.where(base[:, -1] == -math.inf, 0.0, base[:, -1])
        logits[..., 0], logits[0, 1, 0] = 0.0, math.nan
        logits, base, weights = logits.to(dtype), base.to(dtype), torch.softmax(torch.randn(3, 7), 0)
        weights[0, ::3] = 0.0
        exact = logits.double(), weights.double(), base.double()
        name = f"{width} {dtype}"
        all_three, expected = ops.mixture_stats(logits, weights, base, backend="cpp"), reference.mixture_stats(*exact)
        for field, got, want in zip(all_three._fields, all_three, expected, strict=True):
            _assert_alike(got, want, f"mixture_stats.{field} {name}")
        _assert_alike(ops.expected_kl(logits, weights, base, backend="cpp"), expected[2], f"expected_kl {name}")
        _assert_alike(ops.expected_entropy(logits, weights, backend="cpp"), expected[1], f"expected_entropy {name}")
        _assert_alike(ops.mixture_entropy(logits, weights, backend="cpp"), expected[0], f"mixture_entropy {name}")
        kl_exact = reference.kl_divergence(exact[0][0], exact[2])
        _assert_alike(ops.kl_divergence(logits[0], base, backend="cpp"), kl_exact, f"kl_divergence {name}")
        stats_got, stats_want = ops.token_stats(logits, backend="cpp"), reference.token_stats(exact[0])
        for field, got, want in zip(stats_got._fields, stats_got, stats_want, strict=True):
            _assert_alike(got, want, f"token_stats.{field} {name}")
        _check_distant_gradients(logits[1], base, name)


def _check_distant_gradients(p: Tensor, q: Tensor, name: str) -> None:
    p64, q64 = (x.double().requires_grad_() for x in (p, q))
    kl_exact = reference.kl_divergence(p64, q64)
    finite = kl_exact.float().isfinite()
    expected = torch.autograd.grad(kl_exact[finite].sum(), (p64, q64))
    got = kl.kl_divergence_backward(torch.ones(7), p, q)
    assert not any(g.isnan().any() for g in got), name
    assert not any(g[~finite].any() for g in got), name
    rounding = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(p.dtype, 1e-4)
    for ours, theirs in zip(got, expected, strict=True):
        holdable = theirs.abs() < torch.finfo(torch.float16 if p.dtype == torch.float16 else torch.float32).max / 2
        # differences of a log ratio and the divergence, each as large as the latter
        error = (ours.double() - theirs).abs() / (1 + theirs.abs() + 1e-3 * kl_exact.detach().abs().unsqueeze(-1))
        assert bool((error[finite][holdable[finite]] < rounding).all()), name


def _row_gradients(g: Tensor, logits: Tensor, weights: Tensor, base: Tensor) -> list[Tensor]:
    """Of every statistic of rows, g coming in: first those of logits [4, V] and base, then of logits [3, 4, V]."""
    none = torch.zeros_like(g)
    of_alternatives, of_base = kl.expected_kl_backward(g, logits, weights, base)
    return [
        stats.entropy_backward(g, logits[0]),
        stats.token_stats_backward(none, g, none, none, logits[0]),
        stats.token_stats_backward(none, none, g, none, logits[0]),
        stats.token_stats_backward(none, none, none, g, logits[0]),
        *kl.kl_divergence_backward(g, logits[0], base),
        of_base,
        of_alternatives,
        kl.expected_entropy_backward(g, logits, weights),
        kl.mixture_entropy_backward(g, logits, weights),
    ]


def _check_infinite_gradients() -> None:
    """An infinite incoming gradient: inf where the result depends on a logit, and 0 where it does not."""
    for width, dtype in itertools.product((9, 300), (torch.float32, torch.float64)):
        logits, base, weights = torch.randn(3, 4, width), torch.randn(4, width), torch.softmax(torch.randn(3, 4), 0)
        logits[..., 2] = base[..., 2] = -math.inf
        weights[1, :2] = 0.0
        operands = logits.to(dtype), weights, base.to(dtype)
        ordinary = _row_gradients(torch.ones(4), *operands)
        endless = _row_gradients(torch.full((4,), math.inf), *operands)
        for once, got in zip(ordinary, endless, strict=True):
            assert torch.equal(got, torch.where(once == 0, 0.0, once * math.inf))
            assert not got[..., 2].any()
        assert not any(got[1, :2].any() for got in endless[-3:])


def _check_subnormal_numbers() -> None:
    """They count, but for what a bfloat16 dot product takes."""
    tiny = 2.0**-130
    u, network = torch.full((1, 2, 4), tiny), ([torch.full((4, 3), 2.0**100)], [torch.zeros(3)], torch.ones(3), 0.0)
    for precision in ("fp32", "bf16"):
        scores = ops.pairwise_mlp(u, u, *network, precision=precision, backend="cpp")
        dropped = precision == "bf16" and _C.isa() == "avx512bf16"
        assert scores[0, 0, 1].item() == (0.0 if dropped else 2 * 4 * 3 * tiny * 2.0**100)


def _check_extremes() -> None:
    torch.manual_seed(0)
    _check_infinities()
    _check_pair_gradients()
    _check_sudoku()
    _check_distant_logits()
    _check_infinite_gradients()
    _check_subnormal_numbers()


@pytest.mark.parametrize("isa", _C.supported_isas())
def test_extreme_numbers_give_the_references_answer_on_every_instruction_set(isa: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); from test_native import _check_extremes as c; c()"
    done = _run(code, MDMI_FORCE_ISA=isa)
    assert done.returncode == 0, done.stderr


def _misaligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    n = math.prod(shape)
    return torch.frombuffer(bytearray(n * dtype.itemsize + 1), dtype=dtype, offset=1, count=n).view(shape)


def _freed(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


def _score(u: Tensor, **options: Any) -> Tensor:
    return ops.pairwise_mlp(u, u, [], [], torch.ones(u.shape[-1]), 0.0, **options)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: ops.entropy(_misaligned((9, 33), torch.float32)), "logits must begin at a multiple of 4 bytes"),
        (lambda: _score(_misaligned((9, 8), torch.float32)), "u must begin at a multiple of 4"),
        (
            lambda: ops.select_budget(torch.rand(1, 9), _misaligned((1, 9, 9), torch.float64), gamma=1.0),
            "mi must begin at a multiple of 8",
        ),
        (lambda: ops.entropy(_freed(torch.rand(9, 33))), r"logits must be an array of sizes \[9, 33\], got NULL"),
        (lambda: ops.color(_freed(torch.rand(9, 9)), tau=1.0), "mi must be an array"),
        (lambda: ops.select_threshold(_freed(torch.rand(9)), torch.rand(9, 9), tau=1.0), "entropy must be an array"),
        (lambda: ops.select_budget_band(torch.rand(9), _freed(torch.rand(9, 5)), gamma=1.0), "band must have memory"),
        (lambda: ops.mlp(_freed(torch.rand(9, 3)), [torch.rand(3, 2)], [torch.rand(2)]), "x must be an array"),
        (lambda: ops.mlp(torch.rand(9, 3), [_freed(torch.rand(3, 2))], [torch.rand(2)]), "weights must be an array"),
        (lambda: _score(_freed(torch.rand(9, 8))), "u must be an array"),
        (lambda: _score(torch.rand(9, 8), mask=_freed(torch.ones(9) > 0)), "mask must have memory"),
        (
            lambda: ops.expected_entropy(torch.rand(3, 9, 4), _freed(torch.rand(3, 9).double())),
            "weights must have memory",
        ),
        (
            lambda: ops.expected_kl(torch.rand(3, 9, 4), torch.rand(3, 9), _freed(torch.rand(9, 4))),
            "base_logits must be an array",
        ),
        (lambda: _score(torch.zeros(1, 1, 4).expand(0, 2**31, 4)), "n must lie in 0..2147483647, got 2147483648"),
        (
            lambda: sudoku.sudoku_forward(
                torch.zeros(1, 8).long(), torch.rand(_C.sudoku_weights), 1, torch.rand(81, 27)
            ),
            "tokens must be",
        ),
    ],
)
def test_tensors_without_usable_memory_are_refused(call: Callable[[], object], argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        call()


def test_strides_of_axes_of_one_element_do_not_matter() -> None:
    def odd(*shape: int) -> Tensor:
        x = torch.rand(1, *shape)
        return x.as_strided(x.shape, (2**62, *x.stride()[1:]))

    x = odd(9)
    assert torch.equal(ops.entropy(x), ops.entropy(x.clone()))
    u, mi = odd(3, 4), odd(3, 3)
    assert torch.equal(_score(u), _score(u.clone(memory_format=torch.contiguous_format)))
    assert ops.select_budget(odd(3), mi, gamma=math.inf).selected.all()


def test_more_threads_than_anybody_has_are_as_good_as_some(threads: Callable[[int], None]) -> None:
    alone = _here()
    threads(2**31 - 1)
    assert all(torch.equal(a, b) for a, b in zip(alone, _here(), strict=True))


def test_a_limit_beyond_any_number_of_positions_is_none() -> None:
    entropy, mi = torch.rand(2, 5), torch.rand(2, 5, 5)
    assert ops.select_budget(entropy, mi, gamma=math.inf, limit=2**63 - 1, backend="cpp").selected.all()


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
    left_out = ("bindings.cpp", "cpu.cpp", "isa_avx512bf16.cpp", "sudoku.cpp")  # the test chooses tables itself
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
