"""What torch wraps around tensors: views with a flag, transforms, modes, tracers and subclasses. It works, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from mdmi_fast import UnsupportedError, ops
from mdmi_fast.ops import Selection

# torch's own transforms still use it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

K, B, N, V = 3, 2, 5, 7
NETWORK = ([torch.randn(6, 4)], [torch.randn(4)], torch.randn(4), 0.25)
HEAD = torch.randn(9, 6)
BATCH = 4


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# Every op as a function of tensors that can carry one more dimension in front.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "entropy": (ops.entropy, (normal(BATCH, N, V),)),
    "token_stats": (lambda x, **o: tuple(ops.token_stats(x, **o)), (normal(BATCH, N, V),)),
    "linear_token_stats": (lambda x, **o: tuple(ops.linear_token_stats(x, HEAD, **o)), (normal(BATCH, N, 6),)),
    "kl_divergence": (ops.kl_divergence, (normal(BATCH, N, V), normal(BATCH, V, N).mT)),
    "expected_entropy": (ops.expected_entropy, (normal(BATCH, K, N, V), normal(BATCH, K, N).abs())),
    "expected_kl": (ops.expected_kl, (normal(BATCH, K, N, V), normal(BATCH, K, N).abs(), normal(BATCH, N, V))),
    "mixture_entropy": (ops.mixture_entropy, (normal(BATCH, K, N, V), normal(BATCH, K, N).softmax(1))),
    "mixture_stats": (
        lambda *x, **o: tuple(ops.mixture_stats(*x, **o)),
        (normal(BATCH, K, N, V), normal(BATCH, K, N).softmax(1), normal(BATCH, N, V)),
    ),
    "mlp": (lambda x, w, **o: ops.mlp(x, [w], [NETWORK[1][0]], **o), (normal(BATCH, N, 6), normal(BATCH, 6, 4))),
    "pairwise_mlp": (
        lambda u, v, **o: ops.pairwise_mlp(u, v, *NETWORK, **o),
        (normal(BATCH, N, 6), normal(BATCH, N, 6)),
    ),
    "pairwise_mlp_rows": (
        lambda u, **o: ops.pairwise_mlp_rows(u, u, *NETWORK, torch.tensor([3, -1]), **o),
        (normal(BATCH, N, 6),),
    ),
    "pairwise_mlp_band": (lambda u, **o: ops.pairwise_mlp_band(u, u, *NETWORK, 2, **o), (normal(BATCH, N, 6),)),
    "select_budget": (
        lambda h, mi, **o: tuple(ops.select_budget(h, mi, gamma=1.0, **o)),
        (normal(BATCH, N).abs(), normal(BATCH, N, N) / 9),
    ),
    "select_budget_band": (
        lambda h, mi, **o: tuple(ops.select_budget_band(h, mi, gamma=1.0, **o)),
        (normal(BATCH, N).abs(), normal(BATCH, N, 5) / 9),
    ),
    "select_threshold": (
        lambda h, mi, **o: tuple(ops.select_threshold(h, mi, tau=0.1, **o)),
        (normal(BATCH, N).abs(), normal(BATCH, N, N) / 9),
    ),
    "color": (lambda mi, **o: ops.color(mi, tau=0.1, **o), (normal(BATCH, N, N) / 9,)),
    "score_and_select": (
        lambda h, u, **o: tuple(ops.score_and_select(h, u, u, *NETWORK, gamma=1.0, **o)),
        (normal(BATCH, N).abs(), normal(BATCH, N, 6)),
    ),
}
DIFFERENTIABLE = [
    "entropy",
    "token_stats",
    "kl_divergence",
    "expected_entropy",
    "expected_kl",
    "mixture_entropy",
    "mlp",
]
DIFFERENTIABLE += ["pairwise_mlp", "pairwise_mlp_rows", "pairwise_mlp_band"]
EVERY_OP = pytest.mark.op(*CALLS)
of_every_op = pytest.mark.parametrize("name", CALLS)


def tensors_of(answer: Any) -> tuple[Tensor, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


def same(got: Any, expected: Any) -> None:
    for a, b in zip(tensors_of(got), tensors_of(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def negated(x: Tensor) -> Tensor:
    """x, as a view of -x that is negated when it is read."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg()
    assert torch.equal(view, x)
    return view


@EVERY_OP
@of_every_op
def test_views_that_are_negated_when_read_are_read_so(name: str, backend: str) -> None:
    call, inputs = CALLS[name]
    first = [x[0] for x in inputs]
    same(call(*map(negated, first), backend=backend), call(*first, backend=backend))


@EVERY_OP
def test_negated_masters_of_everything_else_are_read_so(backend: str) -> None:
    u, h, mi = normal(N, 6), normal(N).abs(), normal(N, N).abs()
    weights, biases, w_out, _ = NETWORK
    network = ([negated(w) for w in weights], [negated(b) for b in biases], negated(w_out), negated(torch.tensor(0.25)))
    expected = ops.pairwise_mlp(u, -u, *NETWORK, backend=backend)
    same(ops.pairwise_mlp(u, -u, *network, backend=backend), expected)
    # u and v lie in one memory, and one of them reads it with the other sign
    half = torch.complex(torch.zeros_like(u), u)
    same(ops.pairwise_mlp(half.imag, half.conj().imag, *NETWORK, backend=backend), expected)
    prepared = ops.prepare_pairwise(*network, backend=backend)
    same(ops.pairwise_mlp(negated(u), -u, *network, prepared=prepared), expected)
    selection = ops.score_and_select(h, u, -u, *NETWORK, gamma=1.0, backend=backend)
    same(ops.score_and_select(negated(h), negated(u), -u, *network, gamma=1.0, prepared=prepared), selection)
    budgets = torch.tensor([1.0, 2.0], dtype=torch.float64)
    args = (torch.stack([h, h]), torch.stack([mi, mi]))
    same(
        ops.select_budget(*args, gamma=negated(budgets), backend=backend),
        ops.select_budget(*args, gamma=budgets, backend=backend),
    )
    logits = torch.complex(torch.zeros(1, 5), -torch.arange(1.0, 6)[None]).conj().imag
    assert ops.select_budget(logits, torch.zeros(1, 5, 5), gamma=3.0, backend=backend).spent.tolist() == [3.0]


@pytest.mark.op("entropy", "entropy_backward", "pairwise_mlp", "pairwise_mlp_backward")
def test_negated_incoming_gradients_are_read_so(backend: str) -> None:
    x, u = normal(N, V).requires_grad_(), normal(N, 6).requires_grad_()
    for tensor, answer in (
        (x, ops.entropy(x, backend=backend)),
        (u, ops.pairwise_mlp(u, u, *NETWORK, backend=backend)),
    ):
        grad = torch.ones_like(answer)
        (expected,) = torch.autograd.grad(answer, tensor, grad, retain_graph=True)
        (got,) = torch.autograd.grad(answer, tensor, negated(grad))
        same(got, expected)


@EVERY_OP
def test_zeros_without_memory_are_zeros(backend: str) -> None:
    zeros = torch._efficientzerotensor((2, 3))
    same(ops.entropy(zeros, backend=backend), ops.entropy(torch.zeros(2, 3), backend=backend))
    nothing = torch._efficientzerotensor((N, N))
    same(ops.color(nothing, tau=0.1, backend=backend), torch.zeros(N, dtype=torch.int64))


@EVERY_OP
@of_every_op
def test_vmap_gives_what_a_loop_gives(name: str, backend: str) -> None:
    call, inputs = CALLS[name]

    def run(*x: Tensor) -> Any:
        return call(*x, backend=backend)

    alone = [run(*(x[i] for x in inputs)) for i in range(BATCH)]
    expected = tuple(torch.stack(parts) for parts in zip(*map(tensors_of, alone), strict=True))
    same(torch.vmap(run)(*inputs), expected)
    last = [x.movedim(0, -1) for x in inputs]
    same(torch.vmap(run, in_dims=-1)(*last), expected)
    # one operand without the dimension
    fixed = torch.vmap(run, in_dims=(0, *(None,) * (len(inputs) - 1)))(inputs[0], *(x[0] for x in inputs[1:]))
    again = [tensors_of(run(inputs[0][i], *(x[0] for x in inputs[1:]))) for i in range(BATCH)]
    same(fixed, tuple(torch.stack(parts) for parts in zip(*again, strict=True)))
    twice = torch.vmap(torch.vmap(run))(*(torch.stack([x, x]) for x in inputs))
    same(twice, tuple(torch.stack([x, x]) for x in expected))


def test_a_batch_of_nothing_under_vmap_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="entropy under vmap is not supported"):
        torch.vmap(ops.entropy)(torch.zeros(0, 3, 4))


@EVERY_OP
def test_prepared_weights_serve_inside_vmap_too(backend: str) -> None:
    prepared = ops.prepare_pairwise(*NETWORK, backend=backend)
    u = normal(BATCH, N, 6)
    got = torch.vmap(lambda u: ops.pairwise_mlp(u, u, *NETWORK, prepared=prepared))(u)
    same(got, ops.pairwise_mlp(u, u, *NETWORK, backend=backend))
    weights, biases, w_out, b_out = NETWORK
    with pytest.raises(UnsupportedError, match="prepare_pairwise"):
        torch.vmap(lambda w: ops.prepare_pairwise([w], biases, w_out, b_out, backend=backend).scalar)(
            torch.stack([weights[0]] * 2)
        )
    with pytest.raises(ValueError, match="it made of others"):
        torch.vmap(lambda w: ops.pairwise_mlp(u[0], u[0], [w], biases, w_out, b_out, prepared=prepared))(
            torch.stack([weights[0]] * 2)
        )


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_batches_of_incoming_gradients_give_what_a_loop_gives(name: str) -> None:
    call, inputs = CALLS[name]
    x, *others = (t[0].clone().requires_grad_(i == 0) for i, t in enumerate(inputs))
    answer = tensors_of(call(x, *others))[0]
    grads = torch.stack([normal(*answer.shape), torch.ones_like(answer)])
    expected = torch.stack([torch.autograd.grad(answer, x, g, retain_graph=True)[0] for g in grads])
    (got,) = torch.vmap(lambda g: torch.autograd.grad(answer, x, g, retain_graph=True))(grads)
    same(got, expected)
    if "mlp" in name:  # torch's older vmap takes no lists of tensors
        with pytest.raises(UnsupportedError, match=r"(?s)mlp_backward in a batch of gradients.* use torch.vmap"):
            torch.autograd.grad(answer, x, grads, is_grads_batched=True)
    else:
        (got,) = torch.autograd.grad(answer, x, grads, is_grads_batched=True)
        same(got, expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jvp(torch.vmap(f), (x[None],), (x[None],)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
        lambda f, x: torch.func.grad(lambda y: torch.vmap(f)(y).sum())(x[None]),
        lambda f, x: torch.vmap(torch.func.grad(lambda y: f(y).sum()))(x[None]),
        lambda f, x: torch.func.jacrev(f)(x),
        lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
        lambda f, x: torch.func.vjp(f, x),
        lambda f, x: torch.func.linearize(f, x),
    ],
    ids=[
        "jvp",
        "jvp of vmap",
        "jacfwd",
        "grad",
        "grad of vmap",
        "vmap of grad",
        "jacrev",
        "hessian",
        "vjp",
        "linearize",
    ],
)
def test_derivatives_that_would_be_lost_are_refused(name: str, transform: Callable[..., Any]) -> None:
    call, inputs = CALLS[name]
    x, *others = (t[0] for t in inputs)
    operator = "pairwise_mlp" if name.startswith("pairwise_mlp") else name
    with pytest.raises(UnsupportedError, match=f"{operator} is not supported:\n.*gradients of backward calls only"):
        transform(lambda y: tensors_of(call(y, *others))[0], x)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_tangents_of_any_operand_are_refused(name: str) -> None:
    call, inputs = CALLS[name]
    with forward_ad.dual_level():
        for k in range(len(inputs)):
            some = [forward_ad.make_dual(x[0], x[0]) if i == k else x[0] for i, x in enumerate(inputs)]
            with pytest.raises(UnsupportedError, match="forward mode"):
                call(*some)
        same(call(*(x[0] for x in inputs)), call(*(x[0].clone() for x in inputs)))
        weight = forward_ad.make_dual(NETWORK[0][0], NETWORK[0][0])
        with pytest.raises(UnsupportedError, match="forward mode"):
            ops.pairwise_mlp(normal(N, 6), normal(N, 6), [weight], *NETWORK[1:])


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivatives_are_refused(name: str) -> None:
    call, inputs = CALLS[name]
    x, *others = (t[0].clone().requires_grad_(i == 0) for i, t in enumerate(inputs))
    (first,) = torch.autograd.grad(tensors_of(call(x, *others))[0].sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="gradient of the gradient"):
        first.sum().backward()


def test_what_has_no_gradient_says_so() -> None:
    hidden = normal(N, 6).requires_grad_()
    with pytest.raises(UnsupportedError, match="a gradient of linear_token_stats is not supported"):
        ops.linear_token_stats(hidden, HEAD).entropy.sum().backward()
    with pytest.raises(UnsupportedError, match="linear_token_stats is not supported"):
        torch.func.jvp(lambda h: ops.linear_token_stats(h, HEAD).entropy, (hidden,), (hidden,))


def test_selections_inside_transforms_are_constants() -> None:
    h, mi = normal(N).abs(), normal(N, N) / 9
    expected = ops.select_budget(h, mi, gamma=1.0)

    def weighted(h: Tensor) -> Tensor:
        selection: Selection = ops.select_budget(h, mi, gamma=1.0)
        return (h * selection.selected).sum() + selection.spent

    same(torch.func.grad(weighted)(h), expected.selected.float())
    assert torch.func.jvp(weighted, (h,), (torch.ones_like(h),))[1] == expected.selected.sum()


@EVERY_OP
@of_every_op
def test_functions_are_traced_as_operators(name: str, backend: str) -> None:
    call, inputs = CALLS[name]
    first = tuple(x[0].contiguous() for x in inputs)
    other = tuple(x[1].contiguous() for x in inputs)

    def run(*x: Tensor) -> Any:
        return call(*x, backend=backend)

    expected = run(*other)
    same(torch.func.functionalize(run)(*other), expected)
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=True)(*first)
        assert "mdmi_fast" in traced.code
        same(traced(*other), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["entropy", "kl_divergence", "pairwise_mlp", "color"])
def test_a_trace_follows_its_inputs(name: str) -> None:
    call, inputs = CALLS[name]
    traced = torch.jit.trace(call, tuple(x[0] for x in inputs))
    other = [x[1] for x in inputs]
    same(traced(*other), call(*other))


@of_every_op
def test_tensors_without_data_give_tensors_without_data(name: str) -> None:
    call, inputs = CALLS[name]
    expected = tensors_of(call(*(x[0] for x in inputs)))
    # the network of some calls is real: only what depends on all operands can be asked of the meta device
    if name in ("entropy", "token_stats", "kl_divergence", "expected_kl", "mixture_stats", "select_budget", "color"):
        got = tensors_of(call(*(x[0].to("meta") for x in inputs)))
        assert [(x.shape, x.dtype, x.is_meta) for x in got] == [(x.shape, x.dtype, True) for x in expected]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = tensors_of(call(*(mode.from_tensor(x[0]) for x in inputs)))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in expected]
    assert all(type(x).__name__ == "FakeTensor" for x in got)


@of_every_op
def test_subclasses_and_inference_tensors_are_taken(name: str) -> None:
    class Named(Tensor):
        pass

    call, inputs = CALLS[name]
    expected = call(*(x[0] for x in inputs))
    got = tensors_of(call(*(x[0].as_subclass(Named) for x in inputs)))
    same(tuple(x.as_subclass(Tensor) for x in got), expected)
    with torch.inference_mode():
        frozen = [x[0].clone() for x in inputs]
        same(call(*frozen), expected)
    same(call(*frozen), expected)
