"""kl_divergence and the reductions over K against float64 and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mdmi_fast import ops, reference
from mdmi_fast.backends.torch import kl as eager

pytestmark = pytest.mark.arithmetic

INF = torch.inf
KL = pytest.mark.op("kl_divergence", "kl_divergence_backward")
EXPECTED = pytest.mark.op(
    "expected_entropy",
    "expected_entropy_backward",
    "expected_kl",
    "expected_kl_backward",
    "mixture_entropy",
    "mixture_entropy_backward",
)
# float32 rounding of log-probabilities down to about -20 (2e-6), weighted by probabilities
CLOSE = {"rtol": 1e-5, "atol": 4e-6}


@KL
@pytest.mark.parametrize("n_vocabulary", [1, 2, 9, 33, 50257])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kl_divergence_agrees_with_float64(n_vocabulary: int, dtype: torch.dtype, backend: str) -> None:
    p, q = ((3 * torch.randn(4, n_vocabulary)).to(dtype) for _ in range(2))
    got = ops.kl_divergence(p, q, backend=backend)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), reference.kl_divergence(p.double(), q.double()), rtol=1e-5, atol=1e-5)
    # one rounding of a probability-weighted log ratio
    torch.testing.assert_close(ops.kl_divergence(p, p, backend=backend), torch.zeros(4), rtol=0, atol=1e-7)


@KL
@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ([0.0, -INF], [0.0, 0.0], math.log(2)),  # the direction: the other way round it is infinite
        ([0.0, 0.0], [0.0, -INF], INF),
        ([0.0, -INF], [0.0, -INF], 0.0),
        ([0.0, -200.0], [0.0, -INF], INF),  # p underflows, but it is not 0
        ([math.log(0.9), math.log(0.1)], [math.log(0.5), math.log(0.5)], 0.9 * math.log(1.8) + 0.1 * math.log(0.2)),
        ([-INF, -INF], [0.0, 0.0], torch.nan),
        ([0.0, 0.0], [-INF, -INF], torch.nan),
        ([0.0, torch.nan], [0.0, -INF], torch.nan),
        ([0.0, 0.0], [0.0, INF], torch.nan),
        ([1e4, 1e4 + 1], [0.0, 1.0], 0.0),
        ([65504.0, -65504.0], [-65504.0, 65504.0], 131008.0),
    ],
)
def test_kl_of_known_distributions(p: list[float], q: list[float], expected: float, backend: str) -> None:
    p_logits, q_logits = torch.tensor([p], requires_grad=True), torch.tensor([q], requires_grad=True)
    kl = ops.kl_divergence(p_logits, q_logits, backend=backend)
    assert kl.item() == pytest.approx(expected, rel=1e-6, abs=3e-7, nan_ok=True)
    kl.sum().backward()
    assert p_logits.grad.isfinite().all()
    assert q_logits.grad.isfinite().all()
    if not math.isfinite(expected):
        assert not p_logits.grad.any()
        assert not q_logits.grad.any()


@KL
@pytest.mark.parametrize("scale", [1.0, 5.0, 100.0])
def test_kl_gradients_agree_with_float64(scale: float, backend: str) -> None:
    p, q = ((scale * torch.randn(5, 33)).requires_grad_() for _ in range(2))
    with torch.no_grad():
        p[:, ::4] = -INF
        q[:, ::8] = -INF
    weight = torch.randn(5)
    got = torch.autograd.grad((weight * ops.kl_divergence(p, q, backend=backend)).sum(), (p, q))
    p64, q64 = (x.detach().double().requires_grad_() for x in (p, q))
    expected = torch.autograd.grad((weight * reference.kl_divergence(p64, q64)).sum(), (p64, q64))
    for a, b in zip(got, expected, strict=True):
        # rounding of logits of some `scale` is a relative error of p, times a log ratio of the same size
        torch.testing.assert_close(a.double(), b, rtol=1e-5 * scale, atol=2e-6 * scale**2)


@KL
def test_kl_gradient_for_one_operand_only(backend: str) -> None:
    p, q = torch.randn(3, 7), torch.randn(3, 7)
    both = torch.autograd.grad(ops.kl_divergence(p.requires_grad_(), q.requires_grad_(), backend=backend).sum(), (p, q))
    (only_p,) = torch.autograd.grad(ops.kl_divergence(p, q.detach(), backend=backend).sum(), p)
    (only_q,) = torch.autograd.grad(ops.kl_divergence(p.detach(), q, backend=backend).sum(), q)
    assert torch.equal(only_p, both[0])
    assert torch.equal(only_q, both[1])
    assert not ops.kl_divergence(p.detach(), q.detach(), backend=backend).requires_grad


def alternatives(k: int, *lead: int, n_vocabulary: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    logits, base = 3 * torch.randn(k, *lead, n_vocabulary), 3 * torch.randn(*lead, n_vocabulary)
    weights = torch.softmax(torch.randn(k, *lead), 0)
    return logits, weights, base


@EXPECTED
@pytest.mark.parametrize("shape", [(9, 4, 5), (20, 3), (1, 2), (3,), (0, 3), (4, 0)])
@pytest.mark.parametrize("n_vocabulary", [1, 9, 33])
def test_reductions_agree_with_float64(shape: tuple[int, ...], n_vocabulary: int, backend: str) -> None:
    logits, weights, base = alternatives(*shape, n_vocabulary=n_vocabulary)
    logits64, weights64, base64 = logits.double(), weights.double(), base.double()
    pairs = [
        (
            ops.expected_entropy(logits, weights, backend=backend),
            reference.expected_entropy(logits64, weights64),
        ),
        (ops.expected_kl(logits, weights, base, backend=backend), reference.expected_kl(logits64, weights64, base64)),
        (ops.mixture_entropy(logits, weights, backend=backend), reference.mixture_entropy(logits64, weights64)),
        *zip(
            ops.mixture_stats(logits, weights, base, backend=backend),
            reference.mixture_stats(logits64, weights64, base64),
            strict=True,
        ),
    ]
    for got, expected in pairs:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, **CLOSE)


@EXPECTED
@pytest.mark.parametrize("n_vocabulary", [1, 9, 33, 300])
def test_one_read_gives_what_three_give(n_vocabulary: int, backend: str) -> None:
    logits, weights, base = alternatives(40, 3, 11, n_vocabulary=n_vocabulary)
    logits[1, 1, 2] = logits[3, 2, 5, 0] = -INF  # an undefined row and a zero
    base[0, 4, -1] = base[1, 7] = -INF
    weights[1, 1, :] = weights[:, 0, 3] = 0.0
    stats = ops.mixture_stats(logits, weights, base, backend=backend)
    alone = (
        ops.mixture_entropy(logits, weights, backend=backend),
        ops.expected_entropy(logits, weights, backend=backend),
        ops.expected_kl(logits, weights, base, backend=backend),
    )
    for got, expected in zip(stats, alone, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    for got, name in zip(stats, stats._fields, strict=True):
        args = (logits.double(), weights.double(), *([base.double()] if name == "expected_kl" else []))
        torch.testing.assert_close(got.double(), getattr(reference, name)(*args), **CLOSE, equal_nan=True)


@EXPECTED
def test_strides_do_not_matter(backend: str) -> None:
    logits, weights, base = alternatives(5, 4, 6)
    layouts = [
        (logits.transpose(0, 2).contiguous().transpose(0, 2), weights.mT.contiguous().mT, base.mT.contiguous().mT),
        (torch.stack([logits, logits], -1)[..., 0], weights, torch.stack([base, base], 1)[:, 0]),
    ]
    for a, w, b in layouts:
        for op, args, other in [
            (ops.expected_entropy, (logits, weights), (a, w)),
            (ops.expected_kl, (logits, weights, base), (a, w, b)),
            (ops.mixture_entropy, (logits, weights), (a, w)),
            (ops.kl_divergence, (logits[0], base), (a[0], b)),
        ]:
            assert torch.equal(op(*args, backend=backend), op(*other, backend=backend))
    expanded = base.expand(5, 4, 6, 9)
    assert ops.expected_kl(expanded, weights, base, backend=backend).max() <= 1e-7


@EXPECTED
def test_a_weight_of_0_silences_whatever_it_weighs(backend: str) -> None:
    logits, weights, base = alternatives(4, 3)
    base[:, 0] = -INF
    logits[:, :, 0] = -INF
    logits[1, 0], logits[1, 1], logits[1, 2] = torch.nan, -INF, 0.0  # NaN, undefined, infinite KL
    weights[1] = 0.0
    logits.requires_grad_()
    base.requires_grad_()
    keep = [0, 2, 3]
    for op, args in [
        (ops.expected_entropy, ()),
        (ops.expected_kl, (base,)),
        (ops.mixture_entropy, ()),
    ]:
        got = op(logits, weights, *args, backend=backend)
        torch.testing.assert_close(got, op(logits[keep], weights[keep], *args, backend=backend), **CLOSE)
        grads = torch.autograd.grad(got.sum(), (logits, *args))
        assert all(g.isfinite().all() for g in grads)
        assert not grads[0][1].any()


FAR = torch.finfo(torch.float32).max
# Logits of finite numbers so far apart that their difference, or a sum of such, exceeds float32: p and q of each row.
APART = [
    ([0.0, 0.0, 0.0, 0.0], [0.0, -FAR, -FAR, -FAR]),  # 3/4 of the largest number
    ([0.0] * 40, [0.0] + [-FAR] * 39),
    ([0.0] * 2500, [0.0] * 2499 + [-FAR]),
    ([0.0, 0.0, 0.0], [FAR, -FAR, FAR]),  # 2/3 of it, from a difference of twice
    ([0.0, 0.0], [FAR, -FAR]),  # all of it
    ([0.0, 0.0], [-FAR, FAR]),
    ([FAR, FAR, -FAR], [0.0, 1.0, 2.0]),
    ([FAR, -FAR], [FAR, -FAR]),
    ([-FAR, -FAR], [-FAR, -FAR]),
    ([FAR, -FAR, -INF], [FAR, 0.0, -INF]),
    ([0.0, 0.0, 0.0, -INF], [1.7e38, -1.7e38, -FAR, 0.0]),
    ([-1e30, 1e30], [1e30, -1e30]),
    ([0.0, -50.0], [0.0, -1e30]),
    ([-FAR, FAR], [FAR, -FAR]),  # beyond float32: inf
    ([0.0] * 9 + [-FAR], [FAR] + [-FAR] * 9),
    ([0.0, -FAR], [0.0, -INF]),
]


def rounded(logits: list[float], dtype: torch.dtype) -> Tensor:
    """As a row [1, V] of a dtype, finite where it was."""
    x = torch.tensor([logits])
    far = torch.finfo(dtype).max
    return torch.where(x == -INF, x, x.double().clamp(-far, far)).to(dtype)


@KL
@EXPECTED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", range(len(APART)))
def test_finite_logits_of_any_size_give_what_float64_gives(row: int, dtype: torch.dtype, backend: str) -> None:
    p, q = (rounded(logits, dtype) for logits in APART[row])
    expected = reference.kl_divergence(p.double(), q.double()).float()
    assert not expected.isnan()
    # float32 sums of up to 2,500 equal terms
    bound = {"rtol": 3e-6, "atol": 1e-6}
    torch.testing.assert_close(ops.kl_divergence(p, q, backend=backend), expected, **bound)
    stacked, weights = torch.stack([p, q, p]), torch.tensor([[0.25], [0.5], [0.125]])
    for name, base in [("expected_kl", (q,)), ("expected_entropy", ()), ("mixture_entropy", ())]:
        exact = getattr(reference, name)(stacked.double(), weights.double(), *(x.double() for x in base)).float()
        got = getattr(ops, name)(stacked, weights, *base, backend=backend)
        torch.testing.assert_close(got, exact, **bound, msg=lambda m, name=name: f"{name}: {m}")
    stats = ops.mixture_stats(stacked, weights, q, backend=backend)
    exact = reference.mixture_stats(stacked.double(), weights.double(), q.double())
    for got, one in zip(stats, exact, strict=True):
        torch.testing.assert_close(got, one.float(), **bound)


@KL
@EXPECTED
@pytest.mark.parametrize("row", [row for row, (p, q) in enumerate(APART) if len(p) < 40])
def test_gradients_of_finite_logits_of_any_size_are_those_of_float64(row: int, backend: str) -> None:
    p, q = (torch.tensor([logits]) for logits in APART[row])
    p64, q64 = p.double().requires_grad_(), q.double().requires_grad_()
    exact = reference.kl_divergence(p64, q64)
    expected = torch.autograd.grad(exact, (p64, q64), torch.ones_like(exact))
    p.requires_grad_()
    q.requires_grad_()
    weights = torch.full((1, 1), 0.5)
    for scale, got in [
        (1.0, ops.kl_divergence(p, q, backend=backend)),
        (0.5, ops.expected_kl(p.unsqueeze(0), weights, q, backend=backend)),
    ]:
        for a, b in zip(torch.autograd.grad(got, (p, q), torch.ones_like(got)), expected, strict=True):
            if got.isfinite():
                torch.testing.assert_close(a, (scale * b).float().nan_to_num(0.0), rtol=1e-5, atol=1e-6)
            else:
                assert not a.any()


def test_a_weight_makes_a_divergence_beyond_float32_finite() -> None:
    p, q = torch.tensor([[[-FAR, FAR]]]), torch.tensor([[FAR, -FAR]])
    assert ops.kl_divergence(p[0], q, backend="torch").item() == INF
    got = ops.expected_kl(p, torch.tensor([[0.25]]), q, backend="torch")
    assert got.item() == pytest.approx(FAR / 2, rel=1e-6)


@KL
@EXPECTED
@pytest.mark.parametrize("incoming", [INF, -INF, torch.nan])
def test_what_is_0_silences_an_incoming_gradient_that_is_not_finite(incoming: float, backend: str) -> None:
    logits, weights, base = alternatives(4, 3)
    logits[..., 5] = -INF  # a probability of 0
    base[..., 5] = -INF
    weights[1] = 0.0
    logits.requires_grad_()
    base.requires_grad_()
    grad = torch.full((3,), incoming)
    for op, args in [
        (ops.expected_entropy, (logits, weights)),
        (ops.expected_kl, (logits, weights, base)),
        (ops.mixture_entropy, (logits, weights)),
    ]:
        tensors = [x for x in args if x.requires_grad]
        grads = torch.autograd.grad(op(*args, backend=backend), tensors, grad)
        assert not grads[0][1].any(), op.__name__
        for g in grads:
            assert not g[..., 5].any(), op.__name__
        assert not grads[0][0, :, 0].isfinite().any()  # what counts does not hide it
    for got in torch.autograd.grad(ops.kl_divergence(logits[0], base, backend=backend), (logits, base), grad):
        assert not got[..., 5].any()


@EXPECTED
def test_an_undefined_row_makes_its_reduction_nan_with_gradient_0(backend: str) -> None:
    logits, weights, base = alternatives(4, 3)
    logits[1, 1, 2] = torch.nan
    logits.requires_grad_()
    for op, args in [(ops.expected_entropy, ()), (ops.expected_kl, (base,)), (ops.mixture_entropy, ())]:
        got = op(logits, weights, *args, backend=backend)
        assert got.isnan().tolist() == [False, True, False]
        (grad,) = torch.autograd.grad(got.nansum(), logits)
        assert grad.isfinite().all()
        assert not grad[1, 1].any()


@EXPECTED
def test_gradients_of_reductions_agree_with_float64(backend: str) -> None:
    logits, weights, base = alternatives(5, 6)
    logits[:, :, 3] = -INF
    base[:, 3] = -INF
    scale = torch.randn(6)
    for name, args in [("expected_entropy", ()), ("expected_kl", (base,)), ("mixture_entropy", ())]:
        x, *others = (t.clone().requires_grad_() for t in (logits, *args))
        got = torch.autograd.grad(
            (scale * getattr(ops, name)(x, weights, *others, backend=backend)).sum(), (x, *others)
        )
        x, *others = (t.double().requires_grad_() for t in (logits, *args))
        loss = (scale * getattr(reference, name)(x, weights.double(), *others)).sum()
        expected = torch.autograd.grad(loss, (x, *others))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), b.nan_to_num(), **CLOSE)
            assert not a[..., 3].any()


@EXPECTED
def test_exclusive_or_has_one_bit_of_mutual_information(backend: str) -> None:
    # y = x1 xor x2 given x2 = 0: the two values of x1 make y certain, their mixture is a fair coin
    logits = torch.tensor([[0.0, -INF], [-INF, 0.0]])
    weights = torch.tensor([0.5, 0.5])
    assert ops.mixture_entropy(logits, weights, backend=backend).item() == pytest.approx(math.log(2), abs=1e-7)
    assert ops.expected_entropy(logits, weights, backend=backend).item() == 0.0
    kl = ops.expected_kl(logits, weights, torch.zeros(2), backend=backend)
    assert kl.item() == pytest.approx(math.log(2), abs=1e-7)


@EXPECTED
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**31), st.floats(0.1, 30))
def test_the_mutual_information_of_a_joint_is_never_negative(
    backend: str, k: int, n_vocabulary: int, seed: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(k, n_vocabulary, generator=generator)
    weights = torch.softmax(torch.randn(k, generator=generator), 0)
    mixed = ops.mixture_entropy(logits, weights, backend=backend)
    alone = ops.expected_entropy(logits, weights, backend=backend)
    # float32 rounding of two entropies up to log 12
    assert -2e-6 <= float(mixed - alone) <= math.log(n_vocabulary) + 2e-6
    assert float(ops.expected_kl(logits, weights, logits[0], backend=backend)) >= 0


def test_no_temporary_grows_with_the_alternatives(largest_allocation) -> None:
    # the logits take 12 MB, one alternative's rows 0.6 MB
    logits, weights, base = alternatives(20, 1600, n_vocabulary=96)
    assert largest_allocation(eager.expected_entropy, logits, weights) <= 1 << 20
    assert largest_allocation(eager.expected_kl, logits, weights, base) <= 1 << 20
    assert largest_allocation(eager.mixture_entropy, logits, weights) <= 1 << 20


def test_the_registrations_are_sound() -> None:
    logits, weights, base = alternatives(3, 4)
    library, grad = torch.ops.mdmi_fast, torch.randn(4)
    x, b = logits.clone().requires_grad_(), base.clone().requires_grad_()
    torch.library.opcheck(library.kl_divergence.default, (logits[0].clone().requires_grad_(), b, None))
    torch.library.opcheck(library.kl_divergence_backward.default, (grad, logits[0], base, None))
    torch.library.opcheck(library.expected_entropy.default, (x, weights, None))
    torch.library.opcheck(library.expected_entropy_backward.default, (grad, logits, weights, None))
    torch.library.opcheck(library.expected_kl.default, (x, weights, b, None))
    torch.library.opcheck(library.expected_kl_backward.default, (grad, logits, weights, base, None))
    torch.library.opcheck(library.mixture_entropy.default, (x, weights, None))
    torch.library.opcheck(library.mixture_entropy_backward.default, (grad, logits, weights, None))
    torch.library.opcheck(library.mixture_stats.default, (logits, weights, base, None))


def test_compiles_in_one_graph() -> None:
    logits, weights, base = alternatives(3, 4)

    def loss(logits: Tensor, base: Tensor) -> Tensor:
        mi = ops.mixture_entropy(logits, weights) - ops.expected_entropy(logits, weights)
        return (mi + ops.expected_kl(logits, weights, base) + ops.kl_divergence(base, logits[0])).sum()

    operands = logits.requires_grad_(), base.requires_grad_()
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*operands), operands)
    torch.testing.assert_close(got, torch.autograd.grad(loss(*operands), operands))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ops.kl_divergence(torch.zeros(2, 3), torch.zeros(3)),
            ValueError,
            r"kl_divergence: q_logits must be of the shape of p_logits = \(2, 3\), got shape \(3,\) float32 on cpu",
        ),
        (
            lambda: ops.kl_divergence(torch.zeros(3), torch.zeros(3, device="meta")),
            ValueError,
            "got p_logits on cpu and q_logits on meta",
        ),
        (
            lambda: ops.expected_entropy(torch.zeros(2, 3, 4), torch.zeros(2)),
            ValueError,
            r"expected_entropy: weights must be \[K, \.\.\.\] = \(2, 3\), got shape \(2,\)",
        ),
        (
            lambda: ops.expected_kl(torch.zeros(2, 4), torch.zeros(2), torch.zeros(2, 4)),
            ValueError,
            r"expected_kl: base_logits must be \[\.\.\., V\] = \(4,\)",
        ),
        (
            lambda: ops.mixture_entropy(torch.zeros(2, 4), torch.zeros(2, requires_grad=True)),
            ValueError,
            "mixture_entropy: weights must not require a gradient",
        ),
        (lambda: ops.mixture_entropy(torch.zeros(4), torch.tensor(1.0)), ValueError, r"\[K, \.\.\., V\]"),
    ],
)
def test_wrong_arguments_are_named(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
