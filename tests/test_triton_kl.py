"""Kernels of kl under the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mdmi_fast import ops, reference

INF = torch.inf


def case(n_v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [3, 2, 5, V], weights with a 0 and base logits, with suppressed tokens."""
    x = (torch.randn(3, 2, 5, n_v, dtype=torch.float64) * 3).to(dtype)
    base = (torch.randn(2, 5, n_v, dtype=torch.float64) * 3).to(dtype)
    weights = torch.rand(3, 2, 5)
    weights[1, 0, 0] = 0.0
    if n_v > 2:
        x[:, 0, 1, 1] = -INF
        base[0, 1, 1] = -INF
        x[0, 1, 1, 0] = -INF
    return x, weights, base


def compare(n_v: int, dtype: torch.dtype) -> None:
    x, weights, base = case(n_v, dtype)
    grad = torch.randn(5, 2).T  # not contiguous
    calls = {
        "kl_divergence": lambda f, x, w, base, **o: f(x[0], base, **o),
        "expected_entropy": lambda f, x, w, base, **o: f(x, w, **o),
        "expected_kl": lambda f, x, w, base, **o: f(x, w, base, **o),
        "mixture_entropy": lambda f, x, w, base, **o: f(x, w, **o),
    }
    bound = {torch.bfloat16: 8e-3}.get(dtype, 1e-5)  # half an ulp of the gradient's dtype; float32 sums
    for name, call in calls.items():
        exact = [t.clone().double().requires_grad_() for t in (x, base)]
        mine = [t.clone().requires_grad_() for t in (x, base)]
        expected = call(getattr(reference, name), exact[0], weights.double(), exact[1])
        got = call(getattr(ops, name), mine[0], weights, mine[1], backend="triton")
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=4e-6, msg=lambda m, n=name: f"{n}: {m}")
        # a row of infinite value would give NaN in the reference
        (expected * grad.double()).where(expected.isfinite(), 0.0).sum().backward()
        (got * grad).where(got.isfinite(), 0.0).sum().backward()
        for a, b in zip(mine, exact, strict=True):
            if b.grad is not None:
                torch.testing.assert_close(
                    a.grad.double(), b.grad.nan_to_num(0.0), rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
                )


@pytest.mark.parametrize("n_v", [1, 9, 2500])
def test_values_and_gradients_of_any_vocabulary(n_v: int) -> None:
    compare(n_v, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_values_and_gradients_of_other_dtypes(dtype: torch.dtype) -> None:
    compare(33, dtype)


def test_zeros_infinities_and_undefined_rows() -> None:
    p = torch.tensor([[0.0, -INF], [0.0, 0.0], [0.0, torch.nan], [-INF, -INF], [0.0, 1.0]])
    q = torch.tensor([[0.0, 0.0], [0.0, -INF], [0.0, 0.0], [0.0, 0.0], [0.0, INF]])
    p, q = p.requires_grad_(), q.requires_grad_()
    got = ops.kl_divergence(p, q, backend="triton")
    assert got[:2].tolist() == [pytest.approx(0.6931472, abs=1e-6), INF]
    assert got[2:].isnan().all()
    got.nan_to_num(0.0, posinf=0.0).sum().backward()
    for grad in (p.grad, q.grad):
        assert grad.isfinite().all()
        assert (grad[1:] == 0).all()


def test_a_weight_of_0_silences_an_undefined_alternative() -> None:
    x, weights, base = case(9)
    x[1, 0, 0] = torch.nan  # its weight is 0
    for got in (
        ops.expected_entropy(x, weights, backend="triton"),
        ops.expected_kl(x, weights, base, backend="triton"),
        ops.mixture_entropy(x, weights, backend="triton"),
        *ops.mixture_stats(x, weights, base, backend="triton"),
    ):
        assert not got[0, 0].isnan()
    x.requires_grad_()
    ops.mixture_entropy(x, weights, backend="triton")[0, 0].backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("n_v", [9, 2500], ids=["rows of one tile", "rows of two"])
def test_one_call_gives_what_three_give(n_v: int) -> None:
    x, weights, base = case(n_v)
    base[1, 2, 0] = -INF  # an infinite divergence
    x[2, 1, 3, 0] = torch.nan
    got = ops.mixture_stats(x, weights, base, backend="triton")
    expected = reference.mixture_stats(x.double(), weights.double(), base.double())
    for name, a, b in zip(got._fields, got, expected, strict=True):
        torch.testing.assert_close(
            a, b.float(), rtol=1e-5, atol=4e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert got.expected_kl[1, 2] == INF
    assert got.mixture_entropy[1, 3].isnan()


FAR = torch.finfo(torch.float32).max
APART = [
    ([0.0] * 4, [0.0, -FAR, -FAR, -FAR]),
    ([0.0] * 3000, [0.0] * 2900 + [-FAR] * 100),  # two tiles
    ([0.0] * 2100, [-FAR] * 2099 + [FAR]),  # the largest is in the last tile
    ([0.0, 0.0, 0.0], [FAR, -FAR, FAR]),
    ([0.0, 0.0], [FAR, -FAR]),
    ([FAR, FAR, -FAR], [0.0, 1.0, 2.0]),
    ([FAR, -FAR, -INF], [FAR, 0.0, -INF]),
    ([-1e30, 1e30], [1e30, -1e30]),
    ([0.0, -50.0], [0.0, -1e30]),
    ([-FAR, FAR], [FAR, -FAR]),
    ([0.0, -FAR], [0.0, -INF]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_finite_logits_of_any_size_give_what_float64_gives(dtype: torch.dtype) -> None:
    bound = {"rtol": 3e-6, "atol": 1e-6}  # float32 sums of up to 3,000 equal terms
    for row in APART:
        p, q = (torch.tensor([logits], dtype=dtype) for logits in row)
        expected = reference.kl_divergence(p.double(), q.double()).float()
        torch.testing.assert_close(ops.kl_divergence(p, q, backend="triton"), expected, **bound)
        stacked, weights = torch.stack([p, q, p]), torch.tensor([[0.25], [0.5], [0.125]])
        exact = reference.mixture_stats(stacked.double(), weights.double(), q.double())
        for got, one in zip(ops.mixture_stats(stacked, weights, q, backend="triton"), exact, strict=True):
            torch.testing.assert_close(got, one.float(), **bound)
        got = ops.expected_kl(stacked, weights, q, backend="triton")
        torch.testing.assert_close(got, exact[2].float(), **bound)


def test_gradients_of_finite_logits_of_any_size_are_those_of_float64() -> None:
    for row in APART:
        p, q = (torch.tensor([logits], requires_grad=True) for logits in row)
        exact = [x.detach().double().requires_grad_() for x in (p, q)]
        expected = torch.autograd.grad(reference.kl_divergence(*exact).sum(), exact)
        got = ops.kl_divergence(p, q, backend="triton")
        for a, b in zip(torch.autograd.grad(got.sum(), (p, q)), expected, strict=True):
            if got.isfinite():
                torch.testing.assert_close(a, b.float().nan_to_num(0.0), rtol=1e-5, atol=1e-6)
            else:
                assert not a.any()


@pytest.mark.parametrize("incoming", [INF, torch.nan])
def test_what_is_0_silences_an_incoming_gradient_that_is_not_finite(incoming: float) -> None:
    x, weights, base = case(9)
    weights[1] = 0.0
    x[..., 5] = base[..., 5] = -INF
    x.requires_grad_()
    base.requires_grad_()
    grad = torch.full((2, 5), incoming)
    for op, args in [
        (ops.expected_entropy, (x, weights)),
        (ops.expected_kl, (x, weights, base)),
        (ops.mixture_entropy, (x, weights)),
    ]:
        tensors = [t for t in args if t.requires_grad]
        grads = torch.autograd.grad(op(*args, backend="triton"), tensors, grad)
        assert not grads[0][1].any(), op.__name__
        for g in grads:
            assert not g[..., 5].any(), op.__name__
        assert not grads[0][0, 0, 0, 0].isfinite()  # what counts does not hide it
