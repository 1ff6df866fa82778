"""The kernel of mlp under the interpreter."""

from __future__ import annotations

import torch

from mdmi_fast import ops


def test_layers_agree_with_float64() -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):  # products of bfloat16 are exact in float32
        x = torch.randn(2, 3, 20).to(dtype)
        weights = [torch.randn(20, 70).to(dtype), torch.randn(5, 70).to(dtype).T]
        biases = [torch.randn(70), torch.randn(5)]
        exact = (x.double() @ weights[0].double() + biases[0]).relu() @ weights[1].double() + biases[1]
        got = ops.mlp(x, weights, biases, backend="triton")
        torch.testing.assert_close(got.double(), exact, rtol=bound, atol=70 * bound)


def test_a_row_is_the_same_alone_and_in_a_batch_and_nan_stays() -> None:
    x, weights, biases = torch.randn(70, 20), [torch.randn(20, 9), torch.randn(9, 4)], [torch.randn(9), torch.randn(4)]
    x[0, 3] = torch.nan
    got = ops.mlp(x, weights, biases, backend="triton")
    assert torch.equal(got[66:], ops.mlp(x[66:].clone(), weights, biases, backend="triton"))
    assert got[0].isnan().all()
    assert not got[1:].isnan().any()
