"""Kernels of pairwise under the interpreter, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mdmi_fast import ops, reference
from mdmi_fast.backends.triton import _pairwise_deep

Network = tuple[list[Tensor], list[Tensor], Tensor, Tensor]


def network(*widths: int, dtype: torch.dtype = torch.float32) -> Network:
    weights, biases = [], []
    for a, b in itertools.pairwise(widths):
        weights.append((torch.randn(a, b) / a**0.5).to(dtype))
        biases.append((torch.randn(b) * 0.3).to(dtype))
    return weights, biases, (torch.randn(widths[-1]) / widths[-1] ** 0.5).to(dtype), torch.randn(()).to(dtype)


def double(net: Network) -> Network:
    weights, biases, w_out, b_out = net
    return [w.double() for w in weights], [b.double() for b in biases], w_out.double(), b_out.double()


def leaves(u: Tensor, v: Tensor, net: Network) -> list[Tensor]:
    return [u, v, *net[0], *net[1], *net[2:]]


LAYOUTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "all": ("pairwise_mlp", ()),
    "rows": ("pairwise_mlp_rows", (torch.tensor([[3, -1, 12, 3], [0, 16, 5, -1]]),)),
    "band": ("pairwise_mlp_band", (5,)),
}


def compare(
    layout: str, widths: tuple[int, ...], gradients: bool, *, relation: Tensor | None = None, **options: Any
) -> None:
    """Scores, and the gradients of all operands, of two ragged sequences of 17 with NaN where nothing is masked."""
    name, extra = LAYOUTS[layout]
    u, v = torch.randn(2, 17, 2 * widths[0])[..., ::2], torch.randn(17, 2, widths[0]).transpose(0, 1)
    mask = torch.rand(2, 17) < 0.7
    mask[1, 9:] = False
    net = network(*widths)
    dirty = u.masked_fill(~mask.unsqueeze(2), torch.nan)
    shift = torch.randn(6)
    mine = [x.detach().clone() for x in (*leaves(dirty, v, net), shift)]
    exact = [x.double() for x in (*leaves(u, v, double(net)), shift)]
    n = len(net[0])
    results = []
    for operands, module in ((mine, ops), (exact, reference)):
        for x in operands:
            x.requires_grad_(gradients)
        *layers, by_relation = operands
        halves, layers = layers[:2], (layers[2 : 2 + n], layers[2 + n : 2 + 2 * n], *layers[2 + 2 * n :])
        more = {"backend": "triton"} if module is ops else {}
        more |= {"shift": by_relation, "relation": relation, "mask": mask}
        results.append(getattr(module, name)(*halves, *layers, *extra, **more, **options))
    # sums of up to 40 products of size 1 in float32
    torch.testing.assert_close(results[0].double(), results[1], rtol=2e-5, atol=2e-5)
    if gradients:
        grad = torch.randn(results[0].shape[:-1]).unsqueeze(-1).expand(results[0].shape)
        results[0].backward(grad)
        results[1].backward(grad.double())
        for a, b in zip(mine, exact, strict=True):
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "combine", "symmetry", "activation"),
    [
        ("all", "add", "none", "softplus"),
        ("all", "mul", "upper", "identity"),
        ("rows", "mul", "mean", "softplus"),
        ("rows", "add", "upper", "identity"),
        ("band", "add", "mean", "identity"),
        ("band", "mul", "none", "softplus"),
    ],
)
@pytest.mark.parametrize("widths", [(19, 33), (6, 17, 9, 5)])
def test_scores_and_gradients_of_every_layout(
    layout: str, combine: str, symmetry: str, activation: str, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pairwise_deep, "SCRATCH", 37 * 17 * 6)  # 6 rows of a sequence at a time
    relation = torch.randint(0, 6, (2, 17, 17)) if activation == "softplus" else None
    compare(layout, widths, True, relation=relation, combine=combine, symmetry=symmetry, activation=activation)


@pytest.mark.parametrize("symmetry", ["none", "mean", "upper"])
@pytest.mark.parametrize("widths", [(8, 16), (8, 16, 8, 4)])
def test_a_relation_decides_whether_equal_halves_are_symmetric(symmetry: str, widths: tuple[int, ...]) -> None:
    h, net, shift = torch.randn(1, 21, 8), network(*widths), torch.randn(4)
    for relation in (None, torch.randint(0, 4, (21, 21), dtype=torch.int16)):
        operands = {"shift": shift, "relation": relation, "symmetry": symmetry}
        got = ops.pairwise_mlp(h, h, *net, **operands, backend="triton")
        operands["shift"] = shift.double()
        exact = reference.pairwise_mlp(h.double(), h.double(), *double(net), **operands)
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("widths", [(1,), (5, 1), (18, 33, 24), (7, 16, 5, 3)])
def test_other_depths_and_widths(widths: tuple[int, ...]) -> None:
    compare("all", widths, True, symmetry="upper")


@pytest.mark.parametrize("widths", [(8, 16), (8, 16, 8, 4)])
def test_equal_halves_are_scored_once(widths: tuple[int, ...]) -> None:
    h, net = torch.randn(1, 21, 8), network(*widths)
    for symmetry in ("none", "mean", "upper"):
        got = ops.pairwise_mlp(h, h, *net, symmetry=symmetry, backend="triton")
        exact = reference.pairwise_mlp(h.double(), h.double(), *double(net), symmetry=symmetry)
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


def test_bfloat16_rounds_the_operands_of_the_layers_only() -> None:
    u, v = torch.randn(2, 1, 11, 8).bfloat16()
    net = network(8, 16)
    for options in ({"precision": "bf16"}, {"precision": "fp32"}, {"precision": "tf32"}, {}):
        got = ops.pairwise_mlp(u, v, *net, backend="triton", **options)
        rounding = "fp32" if options.get("precision") == "tf32" else options.get("precision", "bf16")
        # the interpreter multiplies tf32 operands in full; the other roundings are the same ones in another order of sums
        expected = ops.pairwise_mlp(u, v, *net, backend="torch", precision=rounding)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("widths", [(8, 16), (8, 16, 8)])
def test_gradients_of_bfloat16_halves(widths: tuple[int, ...]) -> None:
    u, v = torch.randn(2, 1, 11, 8).bfloat16()
    net = network(*widths)
    halves = [x.float().requires_grad_() for x in (u, v)]
    coarse = [x.detach().clone().requires_grad_() for x in (u, v)]
    ops.pairwise_mlp(*coarse, *net, backend="triton").sum().backward()
    ops.pairwise_mlp(*halves, *net, backend="torch").sum().backward()
    for a, b in zip(coarse, halves, strict=True):
        torch.testing.assert_close(a.grad.float(), b.grad, rtol=3e-2, atol=3e-2)  # 3 bfloat16 roundings of sums of 20


@pytest.mark.parametrize("widths", [(8, 16), (8, 16, 8, 4)])
def test_gradients_through_float16_layers_are_as_exact_at_any_size(widths: tuple[int, ...]) -> None:
    (start, v), net = torch.randn(2, 1, 5, 8), network(*widths)

    def gradient(size: float) -> Tensor:
        u = start.clone().requires_grad_()
        (ops.pairwise_mlp(u, v, *net, precision="fp16", backend="triton").sum() * size).backward()
        assert u.grad is not None
        return u.grad

    expected = gradient(1.0)
    assert expected.any()
    for size in (1e-9, 1e9):  # outside of float16
        torch.testing.assert_close(gradient(size) / size, expected, rtol=1e-3, atol=1e-3)
    assert not gradient(torch.inf).isfinite().all()  # as who scales a loss must see


def test_deep_networks_take_memory_for_some_pairs_at_a_time(
    monkeypatch: pytest.MonkeyPatch, largest_allocation: Callable[..., int]
) -> None:
    n, net = 32, network(8, 16, 8, 4)
    monkeypatch.setattr(_pairwise_deep, "SCRATCH", 4 * n * (8 + 16 + 8 + 4))

    def step(u: Tensor) -> None:
        ops.pairwise_mlp(u, 2 * u, *net, backend="triton").sum().backward()

    # an int64 for each pair, or the activations of the widest layer of 4 rows; those of all pairs are 65536 bytes
    assert largest_allocation(step, torch.randn(1, n, 8, requires_grad=True)) <= max(8 * n * n, 4 * 4 * n * 16)


def test_half_precision_stays_finite_at_large_states() -> None:
    u = torch.full((1, 3, 4096), 300.0, dtype=torch.float16)
    got = ops.pairwise_mlp(u, -u, *network(4096, 16, dtype=torch.float16), precision="fp16", backend="triton")
    assert got.isfinite().all()


def test_a_sequence_is_scored_the_same_alone_and_in_a_batch() -> None:
    u, v, net = torch.randn(3, 20, 8), torch.randn(3, 20, 8), network(8, 16)
    mask = torch.rand(3, 20) < 0.5
    together = ops.pairwise_mlp(u, v, *net, mask=mask, backend="triton")
    alone = ops.pairwise_mlp(u[1:2].clone(), v[1:2].clone(), *net, mask=mask[1:2], backend="triton")
    padded = torch.nn.functional.pad(u[1:2], (0, 0, 4, 7)), torch.nn.functional.pad(v[1:2], (0, 0, 4, 7))
    wide = ops.pairwise_mlp(*padded, *net, mask=torch.nn.functional.pad(mask[1:2], (4, 7)), backend="triton")
    assert torch.equal(together[1:2], alone)
    assert torch.equal(wide[:, 4:24, 4:24], alone)


@pytest.mark.parametrize("widths", [(8, 16), (8, 16, 8, 4)])
def test_nan_at_a_masked_position_reaches_the_scores(widths: tuple[int, ...]) -> None:
    u, net = torch.randn(1, 5, 8), network(*widths)
    u[0, 2, 3] = torch.nan
    got = ops.pairwise_mlp(u, torch.randn(1, 5, 8), *net, symmetry="none", backend="triton")
    assert got[0, 2, [0, 1, 3, 4]].isnan().all()
    assert not got[0, [0, 1, 3, 4]].isnan().any()


def test_offsets_beyond_31_bits() -> None:
    step = 2**30 + 8  # between the rows of u, 4 of them
    storage = torch.UntypedStorage(2 * (3 * step + 64))  # reserved, hardly touched
    far = torch.empty(0, dtype=torch.bfloat16).set_(storage, 0, (1, 4, 8), (4 * step, step, 1))
    near, net = torch.randn(1, 4, 8).bfloat16(), network(8, 16)
    far.copy_(near)
    got, expected = (ops.pairwise_mlp(x, near, *net, backend="triton") for x in (far, near.clone()))
    assert torch.equal(got, expected)


def test_prepared_weights_and_empty_inputs() -> None:
    u, net = torch.randn(2, 6, 8), network(8, 16)
    prepared = ops.prepare_pairwise(*net, precision="bf16", backend="triton")
    got = ops.pairwise_mlp(u, u, *net, prepared=prepared)
    assert torch.equal(got, ops.pairwise_mlp(u, u, *net, precision="bf16", backend="triton"))
    for shape in ((0, 6, 8), (2, 0, 8)):
        x = torch.empty(shape)
        assert ops.pairwise_mlp(x, x, *net, backend="triton").shape == (shape[0], shape[1], shape[1])


def test_what_the_kernels_lack_is_refused() -> None:
    u = torch.randn(1, 3, 8)
    with pytest.raises(ops._dispatch.UnsupportedError, match="triton: scores pairs in float32, got float64"):
        ops.pairwise_mlp(u.double(), u, *network(8), backend="triton")


@pytest.mark.parametrize("combine", ["add", "mul"])
@pytest.mark.parametrize("widths", [(5,), (4, 7), (5, 17, 33), (6, 7, 5, 3)], ids=str)
def test_what_is_not_finite_scores_as_in_the_reference_at_any_width(widths: tuple[int, ...], combine: str) -> None:
    mask = torch.tensor([[True, True, False, True], [False, True, True, True]])
    calls = itertools.cycle(
        [("pairwise_mlp", ()), ("pairwise_mlp_rows", (torch.tensor([[1, -1], [3, 1]]),)), ("pairwise_mlp_band", (2,))]
    )
    operands = ["u", "v", "w_out", "b_out", *(["weights", "biases"] if len(widths) > 1 else [])]
    for value, operand, symmetry in zip(
        itertools.cycle([torch.inf, torch.inf, -torch.inf, torch.nan]),
        operands * 2,
        itertools.cycle(("none", "mean", "upper")),
    ):
        u, v = torch.randn(2, 4, widths[0]), torch.randn(2, 4, widths[0])
        net = network(*widths)
        for x in (*net[0], net[2]):
            x.abs_()  # which carries inf to the score; other weights soon make inf - inf of it
        places = {"u": u[:, 1], "v": v[:, 1], "w_out": net[2], "b_out": net[3].view(1)}
        places |= {"weights": net[0][-1], "biases": net[1][-1]} if len(widths) > 1 else {}
        places[operand][..., -1] = value
        options = {"mask": mask, "combine": combine, "symmetry": symmetry}
        name, extra = next(calls)
        got = getattr(ops, name)(u, v, *net, *extra, **options, backend="triton")
        expected = getattr(reference, name)(u.double(), v.double(), *double(net), *extra, **options)
        case = f"{name} {operand} {value} {symmetry}"
        # sums of up to 33 products of size 1 in float32, over three layers
        torch.testing.assert_close(
            got, expected.float(), rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m, case=case: f"{case}: {m}"
        )
