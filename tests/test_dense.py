"""Rows through dense layers: values, gradients, and independence of the batch."""

from itertools import pairwise

import pytest
import torch

from mdmi_fast import ops, reference
from mdmi_fast.ops.dense import _mlp

pytestmark = pytest.mark.arithmetic

pytestmark = pytest.mark.op("mlp")


def layers(*widths: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = list(pairwise(widths))
    return [torch.randn(a, b) / a**0.5 for a, b in pairs], [torch.randn(b) for _, b in pairs]


def exact(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    return reference.mlp(x.double(), [w.double() for w in weights], [b.double() for b in biases])


@pytest.mark.parametrize("widths", [(1, 1), (19, 32, 10), (7, 5, 3, 2), (100, 513), (33, 17)])
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 81), (2, 7, 9), (0, 4), (3, 0)])
def test_values(backend: str, widths: tuple[int, ...], shape: tuple[int, ...]) -> None:
    weights, biases = layers(*widths)
    x = torch.randn(*shape, widths[0])
    got = ops.mlp(x, weights, biases, backend=backend)
    assert got.dtype == torch.float32
    # float32 sums of at most 513 terms of size 1
    torch.testing.assert_close(got.double(), exact(x, weights, biases), atol=1e-4, rtol=1e-5)


def test_strided_rows_are_read_where_they_lie(backend: str) -> None:
    weights, biases = layers(19, 32, 10)
    hidden = torch.randn(4, 81, 198)
    views = [
        hidden[..., :171].unflatten(-1, (9, 19)),
        hidden[::2, ::3, 5:24],
        hidden.transpose(0, 1)[..., :19],
        hidden[:, :19].transpose(1, 2),
        hidden[:1, :, :19].expand(3, 81, 19),
    ]
    for x in views:
        torch.testing.assert_close(
            ops.mlp(x, weights, biases, backend=backend).double(), exact(x, weights, biases), atol=1e-4, rtol=1e-5
        )


@pytest.mark.usefixtures("two_threads")
def test_a_sequence_gives_the_same_bits_in_every_batch(backend: str) -> None:
    weights, biases = layers(19, 32, 10)
    x = torch.randn(70, 81, 19)
    together = ops.mlp(x, weights, biases, backend=backend)
    for rows in ([0], [69], [3, 1, 2], list(range(5, 40))):
        assert torch.equal(ops.mlp(x[rows], weights, biases, backend=backend), together[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    weights, biases = layers(8, 4)
    x = torch.randn(3, 5, 8).to(dtype)
    got = ops.mlp(x, weights, biases)
    torch.testing.assert_close(got.double(), exact(x, weights, biases), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wide", range(5))
def test_sums_are_double_if_any_operand_is(wide: int) -> None:
    weights, biases = layers(64, 64, 4)
    operands = [torch.randn(3, 64), *weights, *biases]
    operands[wide] = operands[wide].double()
    x, weights, biases = operands[0], operands[1:3], operands[3:]
    # sums of 64 terms in float32 are off by about 1e-6, those in float64 are rounded once, to float32
    assert torch.equal(ops.mlp(x, weights, biases), exact(x, weights, biases).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_inside_autocast_are_those_outside(backend: str, dtype: torch.dtype) -> None:
    weights, biases = layers(6, 5, 4)
    operands = [x.requires_grad_() for x in (torch.randn(3, 7, 6), *weights, *biases)]
    answer, upstream = ops.mlp(operands[0], operands[1:3], operands[3:], backend=backend), torch.randn(3, 7, 4)
    expected = torch.autograd.grad(answer, operands, upstream, retain_graph=True)
    with torch.autocast("cpu", dtype=dtype):
        got = torch.autograd.grad(answer, operands, upstream)
    assert all(map(torch.equal, got, expected))


def test_gradients(backend: str) -> None:
    weights, biases = layers(6, 5, 4)
    operands = [torch.randn(3, 7, 6), *weights, *biases]
    ours = [t.clone().requires_grad_() for t in operands]
    theirs = [t.double().requires_grad_() for t in operands]
    upstream = torch.randn(3, 7, 4)
    (ops.mlp(ours[0], ours[1:3], ours[3:], backend=backend) * upstream).sum().backward()
    (reference.mlp(theirs[0], theirs[1:3], theirs[3:]) * upstream.double()).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-4, rtol=1e-4)


def test_operator_is_registered_well(backend: str) -> None:
    weights, biases = layers(6, 5, 4)
    x = torch.randn(3, 7, 6, requires_grad=True)
    torch.library.opcheck(_mlp.operator, (x, [w.requires_grad_() for w in weights], biases, backend))


def test_compiles_without_a_break() -> None:
    weights, biases = layers(6, 4)
    x = torch.randn(3, 6)
    compiled = torch.compile(lambda x: ops.mlp(x, weights, biases) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ops.mlp(x, weights, biases) * 2)


def test_errors_name_the_argument() -> None:
    weights, biases = layers(6, 4)
    with pytest.raises(ValueError, match=r"mlp: weights\[0\] must be \[in, out\] with in = 5"):
        ops.mlp(torch.randn(2, 5), weights, biases)
    with pytest.raises(ValueError, match="one a layer, got 1 weights and 0"):
        ops.mlp(torch.randn(2, 6), weights, [])
    with pytest.raises(TypeError, match="weights must be a sequence"):
        ops.mlp(torch.randn(2, 6), weights[0], biases)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"biases\[0\]"):
        ops.mlp(torch.randn(2, 6), weights, [torch.randn(3)])
    with pytest.raises(ValueError, match="at least one layer, got none"):
        ops.mlp(torch.randn(2, 6), [], [])
