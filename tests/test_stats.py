"""entropy, token_stats and linear_token_stats against float64 and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mdmi_fast import ops, reference
from mdmi_fast.backends.torch import stats as eager

pytestmark = pytest.mark.arithmetic

INF = torch.inf
VOCABULARIES = [1, 2, 9, 20, 33, 127, 50257, 65537, 128256, 151936, 256000]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tolerance(n_vocabulary: int) -> float:
    """float32 rounding (6e-8) of log V (at most 12.5) and of a sum whose error grows about as sqrt(V) at worst."""
    return 2e-6 + 4e-9 * math.sqrt(n_vocabulary)


def logits_like(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def random_strides(x: Tensor) -> list[Tensor]:
    """The same values as x [A, B, V] in other layouts: transposed, every second row, every second column."""
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    padded = x.new_full((x.shape[0], 2 * x.shape[1], 2 * x.shape[2]), torch.nan)
    padded[:, ::2, ::2] = x
    vocabulary_first = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    return [transposed, padded[:, ::2, ::2], vocabulary_first]


@pytest.mark.op("token_stats")
@pytest.mark.parametrize("n_vocabulary", [1, 2, 33, 50257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_stats_agrees_with_float64(n_vocabulary: int, dtype: torch.dtype, backend: str) -> None:
    x = logits_like(3, n_vocabulary, dtype=dtype)
    expected = reference.token_stats(x.double())
    got = ops.token_stats(x, backend=backend)
    bound = tolerance(n_vocabulary)
    for name, a, b in zip(got._fields, got, expected, strict=True):
        if name == "token":
            assert torch.equal(a, b)
        else:
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=bound)


@pytest.mark.op("entropy")
@pytest.mark.parametrize("n_vocabulary", VOCABULARIES)
def test_entropy_agrees_with_float64(n_vocabulary: int, backend: str) -> None:
    x = logits_like(4, n_vocabulary)
    expected = reference.entropy(x.double())
    torch.testing.assert_close(ops.entropy(x, backend=backend).double(), expected, rtol=0, atol=tolerance(n_vocabulary))


@pytest.mark.op("entropy")
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0.0, 0.0, -INF], math.log(2)),
        ([0.0], 0.0),
        ([5.0, -INF, -INF], 0.0),
        ([0.0] * 9, math.log(9)),
        ([200.0, 0.0, 0.0], 0.0),
        ([0.0, math.log(3.0)], math.log(4) - 0.75 * math.log(3)),
    ],
)
def test_entropy_of_known_distributions(logits: list[float], expected: float, backend: str) -> None:
    assert float(ops.entropy(torch.tensor(logits), backend=backend)) == pytest.approx(expected, abs=2e-7)


@pytest.mark.op("entropy", "token_stats")
def test_fp16_extremes_are_one_certain_token(backend: str) -> None:
    x = torch.tensor([65504.0, -65504.0], dtype=torch.float16)
    stats = ops.token_stats(x, backend=backend)
    assert float(ops.entropy(x, backend=backend)) == 0.0
    assert [float(f) for f in stats] == [0.0, 65504.0, 1.0, 0.0, 1.0]


@pytest.mark.op("token_stats")
def test_a_large_shift_changes_entropy_by_less_than_1e_5(backend: str) -> None:
    # multiples of 1/64 below 2^14 are exact in float32, so that the shifted logits are the same distribution
    x = (torch.randn(64, 33) * 64).round() / 64
    before, after = ops.token_stats(x, backend=backend), ops.token_stats(x + 1e4, backend=backend)
    assert (before.entropy - after.entropy).abs().max() < 1e-5
    assert torch.equal(before.token, after.token)


@pytest.mark.op("token_stats")
@pytest.mark.parametrize("n_vocabulary", [1, 2, 9, 33, 20000])
@pytest.mark.parametrize("poison", ["all -inf", "nan", "+inf"])
def test_an_undefined_row_is_nan_and_harms_no_neighbour(n_vocabulary: int, poison: str, backend: str) -> None:
    clean = logits_like(7, n_vocabulary)
    for position in {0, n_vocabulary // 2, n_vocabulary - 1}:
        x = clean.clone()
        if poison == "all -inf":
            x[3] = -INF
        else:
            x[3, position] = torch.nan if poison == "nan" else INF
        stats, expected = ops.token_stats(x, backend=backend), ops.token_stats(clean, backend=backend)
        assert ops.entropy(x, backend=backend)[3].isnan()
        for name, a, b in zip(stats._fields, stats, expected, strict=True):
            assert a[3] == 0 if name == "token" else a[3].isnan()
            assert torch.equal(a[[0, 1, 2, 4, 5, 6]], b[[0, 1, 2, 4, 5, 6]])


@pytest.mark.op("entropy_backward", "token_stats_backward")
@pytest.mark.parametrize("incoming", [INF, -INF, torch.nan])
@pytest.mark.parametrize("n_vocabulary", [4, 33, 20000])
def test_a_probability_of_0_silences_an_incoming_gradient_that_is_not_finite(
    n_vocabulary: int, incoming: float, backend: str
) -> None:
    x = logits_like(3, n_vocabulary)
    x[:, 1] = -INF
    x[2] = torch.nan  # undefined: gradient 0 throughout
    x.requires_grad_()
    grad = torch.full((3,), incoming)
    answers = {"entropy alone": ops.entropy(x, backend=backend)}
    answers |= {name: v for name, v in ops.token_stats(x, backend=backend)._asdict().items() if name != "token"}
    for name, answer in answers.items():
        (got,) = torch.autograd.grad(answer, x, grad, retain_graph=True)
        assert not got[:, 1].any(), name
        assert not got[2].any(), name
        assert not got[:2, 0].isfinite().any(), name  # what counts does not hide it


@pytest.mark.op("entropy", "token_stats", "linear_token_stats")
@pytest.mark.parametrize("n_vocabulary", [3, 40, 300_000])
def test_finite_logits_of_any_size_give_what_float64_gives(n_vocabulary: int, backend: str) -> None:
    far = torch.finfo(torch.float32).max
    x = torch.full((4, n_vocabulary), -far)
    x[0, -1] = x[1, 0] = far
    x[1, -1] = far
    x[2, 0], x[2, -1] = -1e30, 1e30
    expected = reference.token_stats(x.double())
    head = torch.ones(4, 1), x.T.contiguous()
    for got in (
        ops.token_stats(x, backend=backend),
        # one state a row would read the same head: each row has its own
        ops.TokenStats(
            *(
                torch.stack(parts)
                for parts in zip(
                    *(ops.linear_token_stats(head[0][0], head[1][:, i : i + 1], backend=backend) for i in range(4)),
                    strict=True,
                )
            )
        ),
    ):
        for name, a, b in zip(got._fields, got, expected, strict=True):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(ops.entropy(x, backend=backend), expected[0].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.op("token_stats")
def test_ties_go_to_the_lower_token(backend: str) -> None:
    stats = ops.token_stats(torch.tensor([[1.0, 3.0, 3.0, 2.0], [-INF, 0.0, -INF, 0.0]]), backend=backend)
    assert stats.token.tolist() == [1, 1]
    assert stats.margin.tolist() == [0.0, 0.0]


@pytest.mark.op("token_stats")
@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (1, 1), (5,), (2, 3, 4, 6)])
def test_any_leading_dimensions(shape: tuple[int, ...], backend: str) -> None:
    stats = ops.token_stats(torch.zeros(shape), backend=backend)
    assert all(x.shape == shape[:-1] for x in stats)
    torch.testing.assert_close(stats.entropy, torch.full(shape[:-1], math.log(shape[-1])))


@pytest.mark.op("token_stats", "token_stats_backward")
def test_strides_do_not_matter(backend: str) -> None:
    x = logits_like(4, 6, 33)
    expected = ops.token_stats(x, backend=backend)
    for other in random_strides(x):
        for a, b in zip(ops.token_stats(other, backend=backend), expected, strict=True):
            assert torch.equal(a, b)
    row = logits_like(33).requires_grad_()
    h = ops.token_stats(row.expand(2, 3, 33), backend=backend).entropy
    h.sum().backward()
    (expected_grad,) = torch.autograd.grad(reference.entropy(row.double()) * 6, row)
    torch.testing.assert_close(row.grad, expected_grad, rtol=1e-5, atol=1e-6)  # float32 rounding of six summands


@pytest.mark.op("token_stats")
@pytest.mark.parametrize("n_vocabulary", [9, 33, 50257, 151936])
@pytest.mark.usefixtures("two_threads")
def test_a_row_is_the_same_alone_and_in_a_batch(n_vocabulary: int, backend: str) -> None:
    x = logits_like(5, n_vocabulary)
    together = ops.token_stats(x, backend=backend)
    for i in range(5):
        for a, b in zip(ops.token_stats(x[i], backend=backend), together, strict=True):
            assert torch.equal(a, b[i])


def reference_gradients(x: Tensor, weights: list[Tensor]) -> Tensor:
    x = x.detach().double().requires_grad_()
    h, lse, confidence, _, margin = reference.token_stats(x)
    loss = sum((w * s).sum() for w, s in zip(weights, (h, lse, confidence, margin), strict=True))
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.op("token_stats", "token_stats_backward", "entropy", "entropy_backward")
@pytest.mark.parametrize("n_vocabulary", [1, 2, 33, 3000])
@pytest.mark.parametrize("scale", [1.0, 5.0, 640.0])
def test_gradients_agree_with_float64(n_vocabulary: int, scale: float, backend: str) -> None:
    x = logits_like(6, n_vocabulary, scale=scale).requires_grad_()
    weights = [torch.randn(6) for _ in range(4)]
    h, lse, confidence, _, margin = ops.token_stats(x, backend=backend)
    loss = sum((w * s).sum() for w, s in zip(weights, (h, lse, confidence, margin), strict=True))
    (grad,) = torch.autograd.grad(loss, x)
    # rounding of logits up to 640 * 4 costs p a relative 2e-4 at worst; unscaled ones 1e-6
    torch.testing.assert_close(grad.double(), reference_gradients(x, weights), rtol=1e-5 * scale, atol=2e-6 * scale)
    (grad,) = torch.autograd.grad((weights[0] * ops.entropy(x, backend=backend)).sum(), x)
    expected = reference_gradients(x, [weights[0], *(torch.zeros(6) for _ in range(3))])
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5 * scale, atol=2e-6 * scale)


@pytest.mark.op("token_stats", "token_stats_backward", "entropy", "entropy_backward")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_dtype_of_the_logits_and_are_0_where_suppressed(dtype: torch.dtype, backend: str) -> None:
    x = logits_like(4, 50, dtype=dtype)
    x[:, ::3] = -INF
    x[2] = -INF
    x[3, 0] = torch.nan
    x.requires_grad_()
    for stats in (ops.token_stats(x, backend=backend), [ops.entropy(x, backend=backend)]):
        (grad,) = torch.autograd.grad(
            sum(s[:2].sum() + 0 * s.nan_to_num().sum() for s in stats if s.is_floating_point()), x
        )
        assert grad.dtype == dtype
        assert grad.isfinite().all()
        assert (grad[:, ::3] == 0).all()
        assert (grad[2:] == 0).all()
        assert (grad[:2] != 0).any()


@pytest.mark.op("entropy", "entropy_backward")
def test_gradients_that_nobody_asks_for_are_not_made(backend: str) -> None:
    assert not ops.entropy(logits_like(3, 4), backend=backend).requires_grad
    with torch.no_grad():
        assert not ops.entropy(logits_like(3, 4).requires_grad_(), backend=backend).requires_grad


@pytest.mark.op("linear_token_stats")
@pytest.mark.parametrize(("n_rows", "n_hidden", "n_vocabulary"), [(5, 16, 33), (70, 8, 3001), (1, 1, 1), (0, 4, 7)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_token_stats_is_token_stats_of_the_logits(
    n_rows: int, n_hidden: int, n_vocabulary: int, with_bias: bool, backend: str
) -> None:
    hidden, weight = torch.randn(n_rows, n_hidden), torch.randn(n_vocabulary, n_hidden)
    bias = torch.randn(n_vocabulary) if with_bias else None
    if bias is not None and n_vocabulary > 4:
        bias[::3] = -INF  # suppressed tokens, and in the larger case whole tiles of them
        bias[: n_vocabulary // 2] = -INF
    expected = reference.linear_token_stats(hidden.double(), weight.double(), None if bias is None else bias.double())
    got = ops.linear_token_stats(hidden, weight, bias, backend=backend)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=1e-5, atol=2e-5)  # float32 dot products of 16 terms around 4


@pytest.mark.op("linear_token_stats")
@pytest.mark.parametrize("wide", range(3))
def test_linear_token_stats_of_doubles(wide: int, backend: str) -> None:
    operands = [torch.randn(7, 16), torch.randn(3001, 16), torch.randn(3001)]
    operands[wide] = 1000.0 + operands[wide].double() if wide == 2 else operands[wide].double()
    expected = reference.linear_token_stats(*(x.double() for x in operands))
    # logits near 1000 have an error of 3e-5 in float32
    for a, b in zip(ops.linear_token_stats(*operands, backend=backend), expected, strict=True):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=1e-6, atol=1e-6)


@pytest.mark.op("linear_token_stats")
def test_linear_token_stats_of_undefined_rows_is_nan(backend: str) -> None:
    hidden, weight = torch.randn(4, 8), torch.randn(600, 8)
    hidden[1, 3] = torch.nan
    stats = ops.linear_token_stats(hidden, weight, backend=backend)
    assert all(s[1].isnan() for s in stats if s.is_floating_point())
    assert stats.token[1] == 0
    assert all(s[[0, 2, 3]].isfinite().all() for s in stats)
    stats = ops.linear_token_stats(hidden, weight, torch.full((600,), -INF), backend=backend)
    assert all(s.isnan().all() for s in stats if s.is_floating_point())


@pytest.mark.op("linear_token_stats")
def test_large_half_precision_states_stay_finite(backend: str) -> None:
    # 300 * 300 * 4096 overflows float16 a thousandfold
    hidden = torch.full((2, 4096), 300.0, dtype=torch.float16)
    weight = torch.full((5, 4096), 300.0, dtype=torch.float16)
    stats = ops.linear_token_stats(hidden, weight, backend=backend)
    torch.testing.assert_close(stats.entropy, torch.full((2,), math.log(5)))


@pytest.mark.op("entropy", "token_stats")
@given(st.lists(st.one_of(st.just(-INF), st.floats(-1e4, 1e4, width=32)), min_size=1, max_size=40))
def test_any_row_is_a_distribution_or_nan(backend: str, logits: list[float]) -> None:
    x = torch.tensor(logits)
    h = float(ops.entropy(x, backend=backend))
    stats = ops.token_stats(x, backend=backend)
    if all(v == -INF for v in logits):
        assert math.isnan(h)
        return
    assert -1e-6 <= h <= math.log(len(logits)) + 2e-6
    assert stats.token == logits.index(max(logits))
    assert 0 < float(stats.confidence) <= 1 + 1e-6
    assert -1e-7 <= float(stats.margin) <= float(stats.confidence) + 1e-7


def test_no_temporary_grows_with_rows_times_vocabulary(largest_allocation) -> None:
    # the logits take 16 MB, a tile 1 MiB
    x = torch.randn(40, 1000, 100)
    for logits in (x, x.transpose(0, 1), x[:, :1].expand(40, 1000, 100)):
        assert largest_allocation(eager.token_stats, logits) <= 1 << 20
        assert largest_allocation(eager.entropy, logits) <= 1 << 20
    hidden, weight = torch.randn(2000, 16), torch.randn(2000, 16)
    assert largest_allocation(eager.linear_token_stats, hidden, weight, None) <= 1 << 20


@pytest.mark.parametrize("shape", [(2, 3, 7), (0, 4)])
def test_the_registrations_are_sound(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    torch.library.opcheck(torch.ops.mdmi_fast.entropy.default, (x, None))
    torch.library.opcheck(torch.ops.mdmi_fast.token_stats.default, (x, None))
    grads = [torch.randn(shape[:-1]) for _ in range(4)]
    torch.library.opcheck(torch.ops.mdmi_fast.entropy_backward.default, (grads[0], x.detach(), None))
    torch.library.opcheck(torch.ops.mdmi_fast.token_stats_backward.default, (*grads, x.detach(), None))
    torch.library.opcheck(
        torch.ops.mdmi_fast.linear_token_stats.default, (x.detach(), torch.randn(6, shape[-1]), None, None)
    )


def test_compiles_in_one_graph() -> None:
    weight = torch.randn(12, 9)

    def loss(x: Tensor) -> Tensor:
        stats = ops.token_stats(x * 2)
        head = ops.linear_token_stats(x.detach(), weight)
        return ops.entropy(x).sum() + stats.margin.sum() + stats.logsumexp.sum() + head.entropy.sum()

    x = torch.randn(4, 9, requires_grad=True)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(got, expected)


def test_float32_accumulation_under_autocast() -> None:
    x = logits_like(4, 1000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ops.entropy(x), ops.entropy(x))
        got = ops.linear_token_stats(x[:, :64], x[:, 64:128])
    expected = ops.linear_token_stats(x[:, :64], x[:, 64:128])
    assert torch.equal(got.entropy, expected.entropy)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.entropy([1.0]), TypeError, "entropy: logits must be a tensor, got list"),
        (
            lambda: ops.entropy(torch.zeros(3, dtype=torch.int64)),
            TypeError,
            r"entropy: logits must be float64, float32, bfloat16 or float16, got shape \(3,\) int64 on cpu",
        ),
        (
            lambda: ops.token_stats(torch.zeros(3, 0)),
            ValueError,
            r"token_stats: logits must be \[\.\.\., V\] with V at least 1, got shape \(3, 0\) float32 on cpu",
        ),
        (lambda: ops.entropy(torch.tensor(1.0)), ValueError, r"got shape \(\) float32 on cpu"),
        (
            lambda: ops.linear_token_stats(torch.zeros(2, 3), torch.zeros(5, 4)),
            ValueError,
            r"weight must be \[V, D\] with V at least 1 and D = 3, got shape \(5, 4\)",
        ),
        (
            lambda: ops.linear_token_stats(torch.zeros(2, 3), torch.zeros(5, 3, device="meta")),
            ValueError,
            "tensors must be on one device, got hidden on cpu and weight on meta",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.op("token_stats")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_gradient_is_zero_at_a_masked_logit(backend: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf], [0.0, -torch.inf, 3.0]], dtype=dtype, requires_grad=True)
    (1e6 * ops.token_stats(logits, backend=backend).entropy).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[logits == -torch.inf] == 0).all()
