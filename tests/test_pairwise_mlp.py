"""pairwise_mlp, its rows and its band against the float64 reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import mdmi_fast
from mdmi_fast import ops, reference
from mdmi_fast.backends.calls import PairCall, PairNetwork, PairRule
from mdmi_fast.backends.torch import pairwise as eager

pytestmark = pytest.mark.arithmetic

FORWARD = pytest.mark.op("pairwise_mlp", "pairwise_mlp_rows", "pairwise_mlp_band")
BACKWARD = pytest.mark.op("pairwise_mlp_backward", "pairwise_mlp_rows_backward", "pairwise_mlp_band_backward")
# float32 dot products of up to 64 terms of size 1, over three layers
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
# both operands rounded to 8 bits (relative 4e-3), errors of 64 terms mostly cancel
BF16 = {"rtol": 2e-2, "atol": 2e-2}
LAYERS = [(), (12,), (16, 5), (8, 8, 3)]
OPTIONS = [
    {"combine": combine, "symmetry": symmetry, "activation": activation}
    for combine, symmetry, activation in itertools.product(
        ("add", "mul"), ("none", "mean", "upper"), ("identity", "softplus")
    )
]


def named(options: dict[str, str]) -> str:
    return "-".join(options.values())


def network(n_in: int, layers: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """(weights, biases, w_out, b_out) with outputs of size 1."""
    sizes = (n_in, *layers)
    weights = [torch.randn(a, b).mul_((2 / a) ** 0.5).to(dtype) for a, b in itertools.pairwise(sizes)]
    biases = [torch.randn(b).to(dtype) * 0.3 for b in layers]
    return weights, biases, (torch.randn(sizes[-1]) / sizes[-1] ** 0.5).to(dtype), torch.randn(()).to(dtype)


def halves(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def in_float64(head: tuple[Any, ...]) -> tuple[Any, ...]:
    weights, biases, w_out, b_out = head
    return [w.double() for w in weights], [b.double() for b in biases], w_out.double(), b_out.double()


def some_mask(*shape: int) -> Tensor:
    mask = torch.rand(shape) < 0.6
    mask.view(-1, shape[-1])[0] = False  # a sequence without masked positions
    return mask


@FORWARD
@pytest.mark.parametrize("options", OPTIONS, ids=named)
@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_scores_agree_with_float64(
    options: dict[str, str], layers: tuple[int, ...], masked: bool, backend: str
) -> None:
    u, v = halves(3, 11, 10)
    head = network(10, layers)
    mask = some_mask(3, 11) if masked else None
    rows = torch.randint(-1, 11, (3, 6))
    args, args64 = (u, v, *head), (u.double(), v.double(), *in_float64(head))
    for got, expected in [
        (
            ops.pairwise_mlp(*args, mask=mask, **options, backend=backend),
            reference.pairwise_mlp(*args64, mask=mask, **options),
        ),
        (
            ops.pairwise_mlp_rows(*args, rows, mask=mask, **options, backend=backend),
            reference.pairwise_mlp_rows(*args64, rows, mask=mask, **options),
        ),
        (
            ops.pairwise_mlp_band(*args, 4, mask=mask, **options, backend=backend),
            reference.pairwise_mlp_band(*args64, 4, mask=mask, **options),
        ),
    ]:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, **CLOSE)
        assert torch.equal(got == 0, expected == 0) or options["activation"] == "identity"


@FORWARD
@pytest.mark.parametrize("n_positions", [1, 2, 3, 65])
@pytest.mark.parametrize(("n_in", "layers"), [(1, (1,)), (3, (2, 1)), (33, (17, 7)), (64, (32,)), (130, (70,))])
def test_any_size(n_positions: int, n_in: int, layers: tuple[int, ...], backend: str) -> None:
    u, v = halves(n_positions, n_in)
    head = network(n_in, layers)
    got = ops.pairwise_mlp(u, v, *head, backend=backend)
    expected = reference.pairwise_mlp(u.double(), v.double(), *in_float64(head))
    torch.testing.assert_close(got.double(), expected, **CLOSE)


@FORWARD
@pytest.mark.parametrize("symmetry", ["none", "mean", "upper"])
@pytest.mark.parametrize("combine", ["add", "mul"])
def test_equal_halves(symmetry: str, combine: str, backend: str) -> None:
    u, _ = halves(2, 14, 8)
    head = network(8, (6,))
    got = ops.pairwise_mlp(u, u, *head, symmetry=symmetry, combine=combine, backend=backend)
    expected = reference.pairwise_mlp(u.double(), u.double(), *in_float64(head), symmetry=symmetry, combine=combine)
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    assert torch.equal(got, got.mT)


@FORWARD
@pytest.mark.parametrize(
    ("shape", "n_rows", "window"),
    [((0, 5, 4), 3, 2), ((2, 0, 4), 0, 1), ((2, 1, 4), 1, 0), ((5, 4), 2, 9), ((2, 3, 5, 4), 0, 0)],
    ids=str,
)
def test_empty_and_odd_shapes(shape: tuple[int, ...], n_rows: int, window: int, backend: str) -> None:
    u, v = halves(*shape)
    head = network(4, (3,))
    *lead, n, _ = shape
    rows = torch.zeros(*lead, n_rows, dtype=torch.int64)
    args64 = (u.double(), v.double(), *in_float64(head))
    full = ops.pairwise_mlp(u, v, *head, backend=backend)
    assert full.shape == (*lead, n, n)
    torch.testing.assert_close(full.double(), reference.pairwise_mlp(*args64), **CLOSE)
    some = ops.pairwise_mlp_rows(u, v, *head, rows, backend=backend)
    assert some.shape == (*lead, n_rows, n)
    band = ops.pairwise_mlp_band(u, v, *head, window, backend=backend)
    torch.testing.assert_close(band.double(), reference.pairwise_mlp_band(*args64, window), **CLOSE)


@FORWARD
def test_strides_do_not_matter(backend: str) -> None:
    u, v = halves(3, 8, 6)
    weights, biases, w_out, b_out = network(6, (5,))
    mask = some_mask(3, 8)
    expected = ops.pairwise_mlp(u, v, weights, biases, w_out, b_out, mask=mask, backend=backend)
    wide = torch.full((3, 16, 12), torch.nan)
    wide[:, ::2, ::2] = u
    got = ops.pairwise_mlp(
        wide[:, ::2, ::2],
        v.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        [w.T.contiguous().T for w in weights],
        [torch.stack([b, b], 1)[:, 0] for b in biases],
        torch.stack([w_out, w_out], 1)[:, 1],
        b_out.reshape(1),
        mask=torch.stack([mask, ~mask], -1)[..., 0],
        backend=backend,
    )
    assert torch.equal(got, expected)
    same = ops.pairwise_mlp(
        u[:1].expand(3, 8, 6), v[:1].expand(3, 8, 6), weights, biases, w_out, float(b_out), backend=backend
    )
    torch.testing.assert_close(
        same, ops.pairwise_mlp(u[:1], v[:1], weights, biases, w_out, b_out).expand(3, 8, 8), **CLOSE
    )


@FORWARD
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("two_threads")
def test_a_sequence_scores_the_same_alone_in_a_batch_and_padded(precision: str, backend: str) -> None:
    u, v = halves(5, 37, 24)
    head = network(24, (16, 9))
    mask = torch.rand(5, 37) < 0.5
    options = {"precision": precision, "backend": backend}
    together = ops.pairwise_mlp(u, v, *head, mask=mask, **options)
    band = ops.pairwise_mlp_band(u, v, *head, 5, mask=mask, **options)
    for b, left in itertools.product(range(5), (0, 3)):
        pad = (0, 0, left, 6)
        padded = [torch.nn.functional.pad(x[b], pad, value=torch.nan) for x in (u, v)]
        padded_mask = torch.nn.functional.pad(mask[b], (left, 6))
        alone = ops.pairwise_mlp(*padded, *head, mask=padded_mask, **options)
        assert torch.equal(alone[left : left + 37, left : left + 37], together[b])
        rows = ops.pairwise_mlp_rows(*padded, *head, torch.arange(left, left + 37), mask=padded_mask, **options)
        torch.testing.assert_close(rows[:, left : left + 37], together[b], **CLOSE)
        alone = ops.pairwise_mlp_band(*padded, *head, 5, mask=padded_mask, **options)
        assert torch.equal(alone[left : left + 37], band[b])


@FORWARD
def test_bf16_rounds_the_operands_of_the_dense_layers_only(backend: str) -> None:
    u, v = halves(2, 20, 64)
    weights, biases, w_out, b_out = network(64, (64, 32))
    expected = reference.pairwise_mlp(u.double(), v.double(), *in_float64((weights, biases, w_out, b_out)))
    got = ops.pairwise_mlp(u, v, weights, biases, w_out, b_out, precision="bf16", backend=backend)
    torch.testing.assert_close(got.double(), expected, **BF16)
    low = [x.bfloat16() for x in (u, v)]
    by_default = ops.pairwise_mlp(*low, weights, biases, w_out, b_out, backend=backend)
    asked = ops.pairwise_mlp(*low, weights, biases, w_out, b_out, precision="bf16", backend=backend)
    assert torch.equal(by_default, asked)
    # without dense layers there is nothing to round
    flat = ops.pairwise_mlp(u, v, [], [], torch.ones(64), 0.0, precision="bf16", backend=backend)
    assert torch.equal(flat, ops.pairwise_mlp(u, v, [], [], torch.ones(64), 0.0, backend=backend))


@FORWARD
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype, backend: str | None) -> None:
    u, v = halves(2, 9, 16, dtype=dtype)
    head = network(16, (8,), dtype)
    if dtype == torch.float64 and backend == "cpp":
        with pytest.raises(mdmi_fast.UnsupportedError, match=r"cpp: .*float64"):
            ops.pairwise_mlp(u, v, *head, backend=backend)
        backend = None  # which then is one that can
    got = ops.pairwise_mlp(u, v, *head, precision="fp32", backend=backend)
    expected = reference.pairwise_mlp(u.double(), v.double(), *in_float64(head))
    torch.testing.assert_close(got.double(), expected, **CLOSE)


@FORWARD
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_large_states_stay_finite(dtype: torch.dtype, backend: str) -> None:
    u = torch.full((3, 4096), 300.0, dtype=dtype)
    head = ([torch.full((4096, 2), 1.0)], [torch.zeros(2)], torch.ones(2), 0.0)
    got = ops.pairwise_mlp(u, -u / 2, *head, backend=backend)
    # 150 * 4096 * 2, exact in float32
    assert torch.equal(got, 1228800.0 * (1 - torch.eye(3)))


def poisoned(
    operand: str, value: float, n_in: int, layers: tuple[int, ...], dtype: torch.dtype, positive: bool
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Halves and a network with one number of one operand replaced, in the last column.

    Positive weights carry inf to the score; others soon make inf - inf of it.
    """
    u, v = halves(2, 5, n_in, dtype=dtype)
    head = network(n_in, layers)
    weights, biases, w_out, b_out = head
    for x in (*weights, w_out) if positive else ():
        x.abs_()
    operands = {"u": u[:, 1], "v": v[:, 2], "w_out": w_out, "b_out": b_out.view(1)}
    if layers:
        operands |= {"weights": weights[-1], "biases": biases[-1]}
    operands[operand][..., -1] = value
    return u, v, head


@FORWARD
@pytest.mark.parametrize("combine", ["add", "mul"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("n_in", "layers"),
    [
        (7, ()),
        *((4, (n,)) for n in (1, 8, 33)),
        (31, (8,)),
        *((5, (n, m)) for n, m in ((16, 7), (9, 33))),
        (6, (7, 5, 3)),
    ],
    ids=str,
)
def test_what_is_not_finite_scores_as_in_the_reference_at_any_width(
    n_in: int, layers: tuple[int, ...], value: float, combine: str, backend: str
) -> None:
    mask = torch.tensor([[True, True, True, False, True], [False, True, False, True, True]])
    rows = torch.tensor([[1, 2, -1], [4, 1, 0]])
    operands = ["u", "v", *(["weights", "biases"] if layers else []), "w_out", "b_out"]
    sides = [("none", False), ("mean", False), ("upper", False), ("mean", True)]
    for dtype, precision in [(torch.float32, "fp32"), (torch.bfloat16, "bf16")]:
        close = CLOSE if precision == "fp32" else BF16
        for operand, (symmetry, same) in itertools.product(operands, sides):
            if precision == "bf16" and operand == "w_out":
                continue  # rounding decides which activations are 0, and 0 * inf is NaN
            u, v, head = poisoned(operand, value, n_in, layers, dtype, positive=symmetry != "none")
            v = u if same else v
            options = {"mask": mask, "combine": combine, "symmetry": symmetry}
            case = f"{operand} {symmetry} {'u twice' if same else ''} {dtype}"
            args, args64 = (u, v, *head), (u.double(), v.double(), *in_float64(head))
            for name, extra in [("pairwise_mlp", ()), ("pairwise_mlp_rows", (rows,)), ("pairwise_mlp_band", (2,))]:
                got = getattr(ops, name)(*args, *extra, **options, precision=precision, backend=backend)
                expected = getattr(reference, name)(*args64, *extra, **options).float()
                torch.testing.assert_close(
                    got, expected, **close, equal_nan=True, msg=lambda m, case=case, name=name: f"{name} {case}: {m}"
                )


@FORWARD
def test_an_infinite_state_reaches_every_output_it_is_weighed_for(backend: str) -> None:
    u = torch.full((1, 2, 4), torch.inf, dtype=torch.float16)
    head = ([torch.full((4, 8), 0.5)], [torch.zeros(8)], torch.ones(8), 0.0)
    got = ops.pairwise_mlp(u, torch.zeros_like(u), *head, backend=backend)
    assert got.tolist() == [[[0.0, torch.inf], [torch.inf, 0.0]]]


def gradients(scores: Tensor, weight: Tensor, operands: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((scores * weight.to(scores.dtype)).sum(), operands)


def operands_of(u: Tensor, v: Tensor, head: tuple[Any, ...]) -> list[Tensor]:
    weights, biases, w_out, b_out = head
    return [x.requires_grad_() for x in (u, v, *weights, *biases, w_out, b_out)]


@FORWARD
@BACKWARD
@pytest.mark.parametrize("options", OPTIONS, ids=named)
@pytest.mark.parametrize("layers", [(), (16, 5)], ids=str)
@pytest.mark.parametrize("layout", ["full", "rows", "band"])
def test_gradients_agree_with_float64(
    options: dict[str, str], layers: tuple[int, ...], layout: str, backend: str
) -> None:
    u, v = halves(2, 9, 10)
    head = network(10, layers)
    u64, v64, head64 = u.double(), v.double(), in_float64(head)
    mask = some_mask(2, 9)
    mask[1, :4] = True
    extra = {"full": (), "rows": (torch.tensor([[3, -1, 0], [2, 2, 3]]),), "band": (3,)}[layout]
    name = "pairwise_mlp" if layout == "full" else f"pairwise_mlp_{layout}"
    operands, operands64 = operands_of(u, v, head), operands_of(u64, v64, head64)
    expected_scores = getattr(reference, name)(u64, v64, *head64, *extra, mask=mask, **options)
    weight = torch.randn(expected_scores.shape)
    expected = gradients(expected_scores, weight, operands64)
    with torch.no_grad():  # what is not masked must not matter
        u[~mask], v[~mask] = torch.nan, torch.inf
    got = gradients(getattr(ops, name)(u, v, *head, *extra, mask=mask, **options, backend=backend), weight, operands)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)  # sums over some 50 pairs of CLOSE terms


@FORWARD
@BACKWARD
def test_gradients_of_equal_halves_and_expanded_gradients(backend: str) -> None:
    u, _ = halves(2, 7, 6)
    head = network(6, (5,))
    for symmetry in ("none", "mean", "upper"):
        x, x64 = u.clone().requires_grad_(), u.double().requires_grad_()
        (got,) = torch.autograd.grad(ops.pairwise_mlp(x, x, *head, symmetry=symmetry, backend=backend).sum(), x)
        (expected,) = torch.autograd.grad(
            reference.pairwise_mlp(x64, x64, *in_float64(head), symmetry=symmetry).sum(), x64
        )
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@FORWARD
@BACKWARD
def test_gradients_for_some_operands_only(backend: str) -> None:
    u, v = halves(1, 6, 5)
    head = network(5, (4,))
    weight = torch.randn(1, 6, 6)
    operands = operands_of(u, v, head)
    everything = gradients(ops.pairwise_mlp(u, v, *head, backend=backend), weight, operands)
    for k, _ in enumerate(everything):
        plain = [x.detach() for x in operands]
        plain[k].requires_grad_()
        args = (plain[0], plain[1], [plain[2]], [plain[3]], plain[4], plain[5])
        (got,) = gradients(ops.pairwise_mlp(*args, backend=backend), weight, [plain[k]])
        assert torch.equal(got, everything[k])
    assert not ops.pairwise_mlp(
        *(x.detach() for x in (u, v)), [], [], torch.ones(5), 0.0, backend=backend
    ).requires_grad


@FORWARD
@BACKWARD
def test_autocast_activations_with_float32_weights(backend: str) -> None:
    linear = torch.nn.Linear(12, 16)
    head = network(16, (8,))
    h = torch.randn(2, 10, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u = linear(h)
        assert u.dtype == torch.bfloat16
        f = ops.pairwise_mlp(u, u, *head, activation="softplus", backend=backend)
    assert f.dtype == torch.float32
    f.mean().backward()
    grad = linear.weight.grad.clone()
    linear.zero_grad()
    u = linear(h)
    expected = reference.pairwise_mlp(u, u, *head, activation="softplus")
    torch.testing.assert_close(f, expected, **BF16)
    expected.mean().backward()
    # a gradient of size 0.05 through bfloat16 activations
    torch.testing.assert_close(grad, linear.weight.grad, rtol=5e-2, atol=2e-3)


@FORWARD
def test_prepared_weights_score_the_same_and_are_refused_when_stale(backend: str) -> None:
    u, v = halves(2, 9, 8)
    weights, biases, w_out, b_out = network(8, (6,))
    for bias in (b_out, float(b_out)):
        head = (weights, biases, w_out, bias)
        prepared = ops.prepare_pairwise(*head, backend=backend)
        options = {"prepared": prepared, "mask": some_mask(2, 9)}
        plain = {"mask": options["mask"], "backend": backend}
        rows = torch.tensor([[0, 3], [8, -1]])
        assert torch.equal(ops.pairwise_mlp(u, v, *head, **options), ops.pairwise_mlp(u, v, *head, **plain))
        assert torch.equal(
            ops.pairwise_mlp_rows(u, v, *head, rows, **options), ops.pairwise_mlp_rows(u, v, *head, rows, **plain)
        )
        assert torch.equal(
            ops.pairwise_mlp_band(u, v, *head, 2, **options), ops.pairwise_mlp_band(u, v, *head, 2, **plain)
        )
    with pytest.raises(ValueError, match="must be for precision 'bf16'"):
        ops.pairwise_mlp(u, v, *head, prepared=prepared, precision="bf16")
    with pytest.raises(ValueError, match="it made of others"):
        ops.pairwise_mlp(u, v, [w.clone() for w in weights], biases, w_out, bias, prepared=prepared)
    with pytest.raises(ValueError, match="it made of others"):
        ops.pairwise_mlp(u, v, weights, biases, w_out, bias + 1, prepared=prepared)
    with pytest.raises(ValueError, match="prepared is for inference"):
        ops.pairwise_mlp(u.requires_grad_(), v, *head, prepared=prepared)
    with pytest.raises(TypeError, match="prepared must be made by prepare_pairwise, got dict"):
        ops.pairwise_mlp(u.detach(), v, *head, prepared={})
    weights[0].mul_(2)
    with pytest.raises(ValueError, match="after the weights change"):
        ops.pairwise_mlp(u.detach(), v, *head, prepared=prepared)
    prepared = ops.prepare_pairwise(*head, backend=backend)
    weights[0].data = 2 * weights[0]  # as module.half() and its like do
    with pytest.raises(ValueError, match="after the weights change"):
        ops.pairwise_mlp(u.detach(), v, *head, prepared=prepared)


def test_a_long_band_needs_little_memory() -> None:
    # [N, N] would be 1.6 GB and is never made
    u, v = halves(20000, 4)
    head = network(4, (2,))
    band = ops.pairwise_mlp_band(u, v, *head, 3)
    for i in (0, 7000, 19999):
        part = slice(max(i - 3, 0), i + 4)
        row = reference.pairwise_mlp(u[part], v[part], *head)[i - part.start]
        offset = part.start - i + 3
        torch.testing.assert_close(band[i, offset : offset + len(row)], row, **CLOSE)


def test_no_temporary_grows_with_pairs_times_width(largest_allocation) -> None:
    u, v = halves(1, 400, 64)
    call = PairCall(u, v, PairNetwork(*network(64, (48,))), PairRule("add", "mean", "identity", "fp32"))
    # activations of all pairs would take 41 MB, the scores take 0.64 MB, a tile 1 MiB
    assert largest_allocation(eager.pairwise_mlp, call) <= 1 << 20
    assert largest_allocation(eager.pairwise_mlp_backward, torch.randn(1, 400, 400), call) <= 1 << 20


@pytest.mark.parametrize("layout", ["full", "rows", "band"])
def test_the_registrations_are_sound(layout: str) -> None:
    u, v = halves(2, 5, 4)
    weights, biases, w_out, b_out = network(4, (3, 2))
    rows, window = {
        "full": (None, None),
        "rows": (torch.tensor([[1], [-1]]), None),
        "band": (None, 2),
    }[layout]
    options = (None, None, rows, window, some_mask(2, 5), "add", "mean", "softplus", "fp32", None)
    operands_of(u, v, (weights, biases, w_out, b_out))
    op = torch.ops.mdmi_fast.pairwise_mlp.default
    torch.library.opcheck(op, (u, v, weights, biases, w_out, b_out, *options))
    grad = torch.randn_like(op(u, v, weights, biases, w_out, b_out, *options))
    plain = [x.detach() for x in (u, v, *weights, *biases, w_out, b_out)]
    args = (*plain[:2], plain[2:4], plain[4:6], *plain[6:])
    torch.library.opcheck(torch.ops.mdmi_fast.pairwise_mlp_backward.default, (grad, *args, *options))


def test_compiles_in_one_graph() -> None:
    u, v = halves(2, 5, 4)
    weights, biases, w_out, b_out = network(4, (3,))
    operands = operands_of(u, v, (weights, biases, w_out, b_out))
    mask, rows = some_mask(2, 5), torch.tensor([[0, 1], [2, -1]])

    def loss(u: Tensor, v: Tensor, weight: Tensor, bias: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        head = ([weight], [bias], w_out, b_out)
        full = ops.pairwise_mlp(u, v, *head, mask=mask)
        return full.sum() + ops.pairwise_mlp_rows(u, v, *head, rows).sum() + ops.pairwise_mlp_band(u, v, *head, 2).sum()

    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*operands), operands)
    torch.testing.assert_close(got, torch.autograd.grad(loss(*operands), operands))


U, HEAD = torch.zeros(2, 5, 4), ([torch.zeros(4, 3)], [torch.zeros(3)], torch.zeros(3), 0.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ops.pairwise_mlp(torch.zeros(5), torch.zeros(5), *HEAD),
            ValueError,
            r"pairwise_mlp: u must be \[\.\.\., N, H1\] with H1 at least 1, got shape \(5,\) float32 on cpu",
        ),
        (lambda: ops.pairwise_mlp(U.int(), U, *HEAD), TypeError, "pairwise_mlp: u must be float64"),
        (lambda: ops.pairwise_mlp(U, U[:1], *HEAD), ValueError, r"v must be \[\.\.\., N, H1\] like u = \(2, 5, 4\)"),
        (lambda: ops.pairwise_mlp(U, U, HEAD[0][0], *HEAD[1:]), TypeError, "weights must be a sequence of tensors"),
        (lambda: ops.pairwise_mlp(U, U, HEAD[0], [], *HEAD[2:]), ValueError, "got 1 weights and 0 biases"),
        (lambda: ops.pairwise_mlp(U, U, [torch.zeros(5, 3)], *HEAD[1:]), ValueError, r"weights\[0\] must take H1 = 4"),
        (
            lambda: ops.pairwise_mlp(U, U, [*HEAD[0], torch.zeros(4, 2)], [*HEAD[1], torch.zeros(2)], *HEAD[2:]),
            ValueError,
            r"weights\[1\] must be \[in, out\] with in = 3, none empty, got shape \(4, 2\)",
        ),
        (
            lambda: ops.pairwise_mlp(U, U, *HEAD[:2], torch.zeros(4), 0.0),
            ValueError,
            r"w_out must be \[H_last\] = \(3,\)",
        ),
        (lambda: ops.pairwise_mlp(U, U, *HEAD[:3], torch.zeros(2)), ValueError, r"b_out must be \[\] or \[1\]"),
        (lambda: ops.pairwise_mlp(U, U, *HEAD[:3], "0"), TypeError, "b_out must be a number"),
        (
            lambda: ops.pairwise_mlp(U, U, *HEAD, mask=torch.ones(2, 5)),
            TypeError,
            r"mask must be bool, got shape \(2, 5\) float32 on cpu",
        ),
        (
            lambda: ops.pairwise_mlp(U, U, *HEAD, mask=torch.ones(5).bool()),
            ValueError,
            r"mask must be \[\.\.\., N\] = \(2, 5\)",
        ),
        (lambda: ops.pairwise_mlp(U, U.to("meta"), *HEAD), ValueError, "got u on cpu and v on meta"),
        (
            lambda: ops.pairwise_mlp(U, U, *HEAD, combine="sum"),
            ValueError,
            "combine must be one of 'add', 'mul', got 'sum'",
        ),
        (lambda: ops.pairwise_mlp(U, U, *HEAD, symmetry="max"), ValueError, "symmetry must be one of"),
        (lambda: ops.pairwise_mlp(U, U, *HEAD, activation="relu"), ValueError, "activation must be one of"),
        (lambda: ops.pairwise_mlp(U, U, *HEAD, precision="fp8"), ValueError, "precision must be one of"),
        (lambda: ops.pairwise_mlp_band(U, U, *HEAD, -1), ValueError, "window must be at least 0, got -1"),
        (lambda: ops.pairwise_mlp_band(U, U, *HEAD, 1.0), TypeError, "window must be an int"),
        (
            lambda: ops.pairwise_mlp_rows(U, U, *HEAD, torch.tensor([[5], [0]])),
            ValueError,
            r"pairwise_mlp_rows: rows must be within -1 \.\. N - 1 = 4, got 0 \.\. 5",
        ),
        (lambda: ops.pairwise_mlp_rows(U, U, *HEAD, torch.tensor([[0.0]])), TypeError, "rows must be int64"),
        (
            lambda: ops.pairwise_mlp_rows(U, U, *HEAD, torch.tensor([0])),
            ValueError,
            r"rows must be \[\.\.\., R\] with \(2,\)",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
