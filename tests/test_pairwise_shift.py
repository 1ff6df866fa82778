"""What pair scores gain by the relation of two positions: distance, or one that the caller knows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mdmi_fast import ops, reference
from mdmi_fast.backends.cpp import select as native
from mdmi_fast.ops._pairs import check_pairs, in_range

pytestmark = pytest.mark.arithmetic

FORWARD = pytest.mark.op("pairwise_mlp", "pairwise_mlp_rows", "pairwise_mlp_band")
BACKWARD = pytest.mark.op("pairwise_mlp_backward", "pairwise_mlp_rows_backward", "pairwise_mlp_band_backward")
# float32 dot products of up to 20 terms of size 1, over two layers
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
N = 11
LAYOUTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "all": ("pairwise_mlp", ()),
    "rows": ("pairwise_mlp_rows", (torch.tensor([[3, -1, 10, 3], [0, 7, 5, -1], [1, 1, 2, 9]]),)),
    "band": ("pairwise_mlp_band", (4,)),
}
OPTIONS = [
    dict(zip(("combine", "symmetry", "activation"), choice, strict=True))
    for choice in itertools.product(("add", "mul"), ("none", "mean", "upper"), ("identity", "softplus"))
]


def relations(kind: str) -> tuple[Tensor, Tensor | None]:
    """shift and relation; those of pairs are not symmetric."""
    if kind.startswith("distance"):
        return torch.randn(int(kind.removeprefix("distance"))), None
    shape, dtype = {"shared": ((N, N), torch.uint8), "each": ((3, N, N), torch.int64)}[kind]
    return torch.randn(6), torch.randint(0, 6, shape).to(dtype)


KINDS = ["distance1", "distance4", "distance40", "shared", "each"]


def operands(*layers: int) -> tuple[Any, ...]:
    sizes = (10, *layers)
    weights = [torch.randn(a, b) * (2 / a) ** 0.5 for a, b in itertools.pairwise(sizes)]
    biases = [torch.randn(b) * 0.3 for b in layers]
    w_out = torch.randn(sizes[-1]) / sizes[-1] ** 0.5
    return torch.randn(3, N, 10), torch.randn(3, N, 10), weights, biases, w_out, torch.randn(())


def in_float64(x: Any) -> Any:
    return type(x)(in_float64(y) for y in x) if isinstance(x, list | tuple) else x.double()


def some_mask() -> Tensor:
    mask = torch.rand(3, N) < 0.7
    mask[0] = False
    return mask


@FORWARD
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_agree_with_float64(layout: str, kind: str, options: dict[str, str], backend: str) -> None:
    name, extra = LAYOUTS[layout]
    args, (shift, relation), mask = operands(12), relations(kind), some_mask()
    got = getattr(ops, name)(*args, *extra, shift=shift, relation=relation, mask=mask, **options, backend=backend)
    expected = getattr(reference, name)(
        *in_float64(args), *extra, shift=shift.double(), relation=relation, mask=mask, **options
    )
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    plain = getattr(ops, name)(*args, *extra, mask=mask, **options, backend=backend)
    assert not torch.allclose(plain, got)


@FORWARD
@pytest.mark.parametrize("layers", [(), (12,), (16, 5), (8, 8, 3)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_shift_of_zeros_changes_no_bit(layers: tuple[int, ...], precision: str, backend: str) -> None:
    args = operands(*layers)
    plain = ops.pairwise_mlp(*args, precision=precision, backend=backend)
    same = ops.pairwise_mlp(*args, shift=torch.zeros(3), precision=precision, backend=backend)
    assert torch.equal(plain, same)


@FORWARD
@pytest.mark.parametrize("symmetry", ["none", "mean", "upper"])
def test_equal_halves_are_symmetric_only_where_the_relation_is(symmetry: str, backend: str) -> None:
    u, _, *network = operands(7)
    options: dict[str, Any] = {"symmetry": symmetry, "combine": "mul", "backend": backend}
    near, (shift, relation) = torch.randn(4), relations("shared")
    scores = ops.pairwise_mlp(u, u, *network, shift=near, **options)
    assert torch.equal(scores, scores.mT)
    got = ops.pairwise_mlp(u, u, *network, shift=shift, relation=relation, **options)
    options.pop("backend")
    args64 = in_float64((u, u, *network))
    expected = reference.pairwise_mlp(*args64, shift=shift.double(), relation=relation, **options)
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    assert torch.equal(got, got.mT) == (symmetry != "none")


@BACKWARD
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("kind", ["distance4", "distance40", "shared", "each"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("same", [False, True], ids=["two halves", "one half"])
def test_gradients_agree_with_float64(
    layout: str, kind: str, options: dict[str, str], same: bool, backend: str
) -> None:
    name, extra = LAYOUTS[layout]
    (u, v, weights, biases, w_out, b_out), (shift, relation), mask = operands(9, 5), relations(kind), some_mask()
    found = []
    for module, cast in ((ops, lambda x: x.clone()), (reference, lambda x: x.double())):
        leaves = [cast(x).requires_grad_() for x in (u, v, shift, w_out, b_out, *weights, *biases)]
        a, b, by_relation, out, bias, *layers = leaves
        more = {"backend": backend} if module is ops else {}
        scores = getattr(module, name)(
            *(a, a if same else b, layers[:2], layers[2:], out, bias, *extra),
            shift=by_relation,
            relation=relation,
            mask=mask,
            **options,
            **more,
        )
        scores.backward(torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores))
        found.append([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves])
    # sums over up to 300 pairs of the products above
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=2e-4)


@BACKWARD
def test_an_unread_number_reaches_neither_scores_nor_gradients(backend: str) -> None:
    args = operands(4)
    shift = torch.tensor([0.5, 1.0, torch.nan], requires_grad=True)
    mask = torch.zeros(3, N, dtype=torch.bool)
    mask[:, 4:7] = True  # distances 1 and 2 only
    scores = ops.pairwise_mlp(*args, shift=shift, mask=mask, backend=backend)
    assert not scores.isnan().any()
    (gradient,) = torch.autograd.grad(scores.sum(), shift)
    assert gradient.tolist() == [12.0, 6.0, 0.0]
    (gradient,) = torch.autograd.grad(
        ops.pairwise_mlp_rows(*args, torch.full((3, 1), -1), shift=shift, backend=backend).sum(), shift
    )
    assert gradient.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.op("score_and_select")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("symmetry", ["none", "mean", "upper"])
def test_selection_is_that_of_all_scores(kind: str, symmetry: str, backend: str) -> None:
    args, (shift, relation), mask = operands(6), relations(kind), some_mask()
    entropy = torch.rand(3, N)
    options: dict[str, Any] = {"mask": mask, "backend": backend}
    pairs: dict[str, Any] = {"shift": shift, "relation": relation, "activation": "softplus", "symmetry": symmetry}
    mi = ops.pairwise_mlp(*args, **pairs, **options)
    for gamma in (0.5, 2.0, 8.0):
        whole = ops.select_budget(entropy, mi.mT if symmetry == "none" else mi, gamma=gamma, **options)
        fused = ops.score_and_select(entropy, *args, gamma=gamma, **pairs, **options)
        assert torch.equal(whole.selected, fused.selected) or symmetry == "none"
        torch.testing.assert_close(whole.spent, fused.spent) if symmetry != "none" else None


def test_selection_leaves_out_pairs_that_cannot_matter() -> None:
    u, v, *network = operands(6)
    rule = ("add", "mean", "softplus", None)
    call, _ = check_pairs("score_and_select", (u, v), tuple(network), rule, relations("each"), None, None, None)  # type: ignore[arg-type]
    gamma = torch.full((3,), 2.0, dtype=torch.float64)
    budget = ops.select.Budget(gamma, 1.0, 1.0)
    _, _, scored = native.score_and_select_counted(torch.rand(3, N), in_range("score_and_select", call), budget)
    assert 0 < scored < 3 * N * (N - 1) // 2


@BACKWARD
@pytest.mark.usefixtures("two_threads")
def test_bits_do_not_depend_on_threads(backend: str) -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        args, (shift, relation) = operands(40, 20), relations("each")
        shift.requires_grad_()
        scores = ops.pairwise_mlp(*args, shift=shift, relation=relation, backend=backend)
        results.append((scores.detach(), *torch.autograd.grad(scores.square().sum(), shift)))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@FORWARD
def test_empty_and_strided_operands(backend: str) -> None:
    args = operands(4)
    shift, relation = relations("each")
    assert relation is not None
    expected = ops.pairwise_mlp(*args, shift=shift, relation=relation, backend=backend)
    spread = torch.zeros(3, N, 2 * N, dtype=torch.int16)
    spread[..., ::2] = relation
    wide = torch.stack([shift, shift], 1)[:, 0]
    assert torch.equal(ops.pairwise_mlp(*args, shift=wide, relation=spread[..., ::2], backend=backend), expected)
    one = [x[0] if isinstance(x, Tensor) and x.ndim == 3 else x for x in args]
    assert torch.equal(ops.pairwise_mlp(*one, shift=shift, relation=relation[0], backend=backend), expected[0])
    none = torch.zeros(0, N, N, dtype=torch.int64)
    halves = torch.zeros(0, N, 10), torch.zeros(0, N, 10)
    assert ops.pairwise_mlp(*halves, *args[2:], shift=shift, relation=none, backend=backend).shape == (0, N, N)
    halves = torch.zeros(3, 0, 10), torch.zeros(3, 0, 10)
    assert ops.pairwise_mlp(*halves, *args[2:], shift=shift, backend=backend).shape == (3, 0, 0)


@pytest.mark.parametrize(
    ("shift", "relation", "error", "message"),
    [
        (None, torch.zeros(N, N, dtype=torch.int64), ValueError, "relation must come with a shift"),
        (torch.zeros(3), torch.zeros(N, N), TypeError, "relation must be of integers"),
        (torch.zeros(3), torch.zeros(N, N, dtype=torch.bool), TypeError, "relation must be of integers"),
        (torch.zeros(3), torch.zeros(N, N + 1, dtype=torch.int64), ValueError, r"relation must be \[N, N\]"),
        (torch.zeros(3), torch.zeros(1, N, N, dtype=torch.int64), ValueError, r"relation must be \[N, N\]"),
        (torch.zeros(3), torch.full((N, N), 3), ValueError, r"relation must be within 0 .. R - 1 = 2, got 3 .. 3"),
        (torch.zeros(3), torch.full((N, N), -1), ValueError, r"relation must be within 0 .. R - 1 = 2, got -1"),
        (torch.zeros(3), torch.full((N, N), 2**32), ValueError, r"relation must be within"),
        (torch.zeros(3), [[0]], TypeError, "relation must be a tensor"),
        (torch.zeros(0), None, ValueError, r"shift must be \[R\] with R at least 1"),
        (torch.zeros(3, 1), None, ValueError, r"shift must be \[R\]"),
        (torch.zeros(3, dtype=torch.int64), None, TypeError, "shift must be float"),
        (1.5, None, TypeError, "shift must be a tensor"),
    ],
)
def test_bad_operands_are_named(shift: Any, relation: Any, error: type[Exception], message: str) -> None:
    args = operands(4)
    for call in (
        lambda: ops.pairwise_mlp(*args, shift=shift, relation=relation),
        lambda: ops.pairwise_mlp_rows(*args, torch.zeros(3, 1, dtype=torch.int64), shift=shift, relation=relation),
        lambda: ops.pairwise_mlp_band(*args, 2, shift=shift, relation=relation),
        lambda: ops.score_and_select(torch.rand(3, N), *args, gamma=1.0, shift=shift, relation=relation),
    ):
        with pytest.raises(error, match=message):
            call()


def test_torch_sees_the_operands() -> None:
    args, (shift, relation) = operands(4), relations("each")
    assert relation is not None
    flat = (*args, shift, relation, None, None, some_mask(), "add", "mean", "softplus", "fp32", None)
    flat = tuple(x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in flat)
    torch.library.opcheck(ops.pairwise._pairwise_mlp.operator, flat)

    def scores(shift: Tensor, relation: Tensor) -> Tensor:
        return ops.pairwise_mlp(*args, shift=shift, relation=relation)

    with torch.no_grad():
        expected = scores(shift, relation)
        assert torch.equal(torch.compile(scores, fullgraph=True, backend="aot_eager")(shift, relation), expected)
        batched = torch.vmap(scores, in_dims=(0, None))(torch.stack([shift, 2 * shift]), relation)
    assert torch.equal(batched[0], expected)
