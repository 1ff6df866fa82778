"""Kernels of stats under the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mdmi_fast import ops, reference

INF = torch.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# 16384 columns a program: 33000 are split over three
VOCABULARIES = [1, 2, 9, 33, 127, 4097, 33000]


def logits_like(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * 3).to(dtype)


def agree(got: ops.TokenStats, expected: ops.TokenStats) -> None:
    for name, a, b in zip(got._fields, got, expected, strict=True):
        if name == "token":
            assert torch.equal(a, b)
        else:
            # float32 rounding of sums of up to 33,000 terms and of log V
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("n_v", VOCABULARIES)
def test_statistics_of_any_vocabulary(n_v: int) -> None:
    x = logits_like(3, n_v)
    x[1, n_v // 2] = x[1].max()  # two equal largest
    agree(ops.token_stats(x, backend="triton"), reference.token_stats(x.double()))
    torch.testing.assert_close(
        ops.entropy(x, backend="triton").double(), reference.entropy(x.double()), rtol=1e-6, atol=4e-6
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_and_gradients_of_every_dtype(dtype: torch.dtype) -> None:
    x = logits_like(2, 3, 33, dtype=dtype)
    x[0, 0, ::3] = -INF
    x[0, 1, 5] = x[0, 1, 9] = 30.0
    agree(ops.token_stats(x, backend="triton"), reference.token_stats(x.double()))
    exact = x.clone().double().requires_grad_()
    mine = x.clone().requires_grad_()
    weights = torch.randn(4, 2, 3, dtype=torch.float64)
    for logits, stats in ((exact, reference.token_stats), (mine, lambda t: ops.token_stats(t, backend="triton"))):
        h, lse, confidence, _, margin = stats(logits)
        (torch.stack([h, lse, confidence, margin]) * weights.to(h.dtype)).sum().backward()
    # a gradient has the dtype of its logits: half an ulp of it
    bound = {torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(dtype, 2e-6)
    rows = [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]  # at the tie autograd halves what goes to the lowest index here
    for row in rows:
        torch.testing.assert_close(mine.grad[row].double(), exact.grad[row], rtol=bound, atol=bound)
    assert (mine.grad[0, 0, ::3] == 0).all()


def test_the_gradient_of_a_split_row() -> None:
    x = logits_like(2, 20000)
    exact, mine = x.double().requires_grad_(), x.clone().requires_grad_()
    reference.entropy(exact).sum().backward()
    ops.entropy(mine, backend="triton").sum().backward()  # its gradient comes with stride 0
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-5, atol=1e-8)


def test_undefined_rows_are_nan_with_gradient_0() -> None:
    x = logits_like(4, 33)
    x[0, 4], x[1, 32], x[2] = torch.nan, INF, -INF
    mine = x.clone().requires_grad_()
    stats = ops.token_stats(mine, backend="triton")
    for value in (stats.entropy, stats.logsumexp, stats.confidence, stats.margin):
        assert value.isnan().tolist() == [True, True, True, False]
    assert stats.token[:3].tolist() == [0, 0, 0]
    sum(value.nansum() for value in (stats.entropy, stats.margin)).backward()
    assert (mine.grad[:3] == 0).all()
    assert (mine.grad[3] != 0).any()


def test_known_extremes() -> None:
    assert float(ops.entropy(torch.tensor([0.0, 0.0, -INF]), backend="triton")) == pytest.approx(0.6931472, abs=1e-6)
    assert float(ops.entropy(torch.tensor([65504.0, -65504.0]).half(), backend="triton")) == 0.0
    x = logits_like(33)
    shifted = ops.entropy(x + 1e4, backend="triton")  # the sum itself rounds to 1e-3
    assert float(shifted) == pytest.approx(float(ops.entropy((x + 1e4) - 1e4, backend="triton")), abs=1e-5)


def test_rows_of_any_strides() -> None:
    x = logits_like(4, 3, 9)
    expected = ops.entropy(x, backend="triton")
    padded = x.new_full((4, 6, 18), torch.nan)
    padded[:, ::2, ::2] = x
    views = [
        x.transpose(0, 1).contiguous().transpose(0, 1),
        padded[:, ::2, ::2],
        x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        x[None].expand(2, -1, -1, -1)[1],
    ]
    for view in views:
        assert torch.equal(ops.entropy(view, backend="triton"), expected)
    five = x.view(2, 2, 3, 1, 9).permute(1, 2, 0, 3, 4)  # no two dimensions can hold these rows
    assert torch.equal(ops.entropy(five, backend="triton"), expected.view(2, 2, 3, 1).permute(1, 2, 0, 3))
    assert ops.entropy(torch.empty(0, 5), backend="triton").shape == (0,)


def test_offsets_beyond_31_bits() -> None:
    step = 2**31 + 16
    storage = torch.UntypedStorage(2 * (step + 64))  # reserved, hardly touched
    far = torch.empty(0, dtype=torch.bfloat16).set_(storage, 0, (2, 33), (step, 1))
    near = logits_like(2, 33, dtype=torch.bfloat16)
    far.copy_(near)
    assert torch.equal(ops.entropy(far, backend="triton"), ops.entropy(near, backend="triton"))


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    x = logits_like(5, 20000)
    assert torch.equal(ops.entropy(x, backend="triton")[4:5], ops.entropy(x[4:5].clone(), backend="triton"))


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_statistics_from_hidden_states(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for n_v, d in ((1, 3), (33, 20), (4100, 16)):  # 4096 columns a program
        hidden, weight, bias = torch.randn(2, 3, d).to(dtypes[0]), torch.randn(d, n_v).to(dtypes[1]).T, torch.randn(n_v)
        bias[n_v // 2] = -INF if n_v > 1 else 0.0
        hidden[0, 0] = torch.nan
        exact = reference.token_stats(hidden.double() @ weight.double().T + bias.double())
        got = ops.linear_token_stats(hidden, weight, bias, backend="triton")
        assert torch.equal(got.token, exact[3])
        for a, b in zip(got, exact, strict=True):
            # sums of d products of size 1 in float32
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("n_v", [4, 20000])
def test_a_probability_of_0_silences_an_incoming_gradient_that_is_not_finite(n_v: int) -> None:
    x = torch.randn(3, n_v)
    x[:, 1] = -torch.inf
    x[2] = torch.nan
    x.requires_grad_()
    answers = {"entropy alone": ops.entropy(x, backend="triton")}
    answers |= {name: v for name, v in ops.token_stats(x, backend="triton")._asdict().items() if name != "token"}
    for name, answer in answers.items():
        (got,) = torch.autograd.grad(answer, x, torch.full((3,), torch.inf), retain_graph=True)
        assert not got[:, 1].any(), name
        assert not got[2].any(), name
        assert not got[:2, 0].isfinite().any(), name
