"""Calls that together launch every kernel, for compiling without running: what tests and `benchmarks/static_report` look at."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from mdmi_fast.backends.calls import Budget, PairCall, PairNetwork, PairRule
from mdmi_fast.backends.triton import dense, kl, pairwise, select, stats


def pairs(widths: tuple[int, ...], precision: str, symmetry: str, n: int, mask: Tensor | None = None) -> PairCall:
    """A call with a network of H1 and the widths of the dense layers."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    u, v = torch.empty(2, 1, n, widths[0], dtype=dtype)
    weights = [torch.empty(a, b, dtype=dtype) for a, b in itertools.pairwise(widths)]
    network = PairNetwork(weights, [torch.empty(b) for b in widths[1:]], torch.empty(widths[-1]), torch.empty(()))
    return PairCall(u, v, network, PairRule("add", symmetry, "identity", precision), mask)


def scores(widths: tuple[int, ...], precision: str = "bf16", symmetry: str = "upper", n: int = 256) -> None:
    pairwise.pairwise_mlp(pairs(widths, precision, symmetry, n))


def gradients(widths: tuple[int, ...], precision: str = "bf16", n: int = 256) -> None:
    mask = torch.ones(1, n, dtype=torch.bool)
    pairwise.pairwise_mlp_backward(torch.empty(1, n, n), pairs(widths, precision, "mean", n, mask))


def token_statistics(n_v: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x, g = torch.empty(64, n_v, dtype=dtype), torch.empty(64)
    stats.token_stats(x)
    stats.token_stats_backward(g, g, g, g, x)


def head_statistics(n_v: int, d: int, dtype: torch.dtype = torch.bfloat16) -> None:
    stats.linear_token_stats(torch.empty(64, d, dtype=dtype), torch.empty(n_v, d, dtype=dtype), None)


def divergences(n_v: int, dtype: torch.dtype = torch.float32) -> None:
    x, w, g = torch.empty(4, 64, n_v, dtype=dtype), torch.empty(4, 64), torch.empty(64)
    kl.expected_entropy(x, w)
    kl.expected_kl(x, w, x[0])
    kl.kl_divergence(x[0], x[1])
    kl.expected_kl_backward(g, x, w, x[0])
    kl.mixture_entropy(x, w)
    kl.mixture_entropy_backward(g, x, w)
    kl.mixture_stats(x, w, x[0])


def selections(n: int, masked: bool = True) -> None:
    h, mi = torch.empty(2, n), torch.empty(2, n, n)
    mask = torch.ones(2, n, dtype=torch.bool) if masked else None
    for order in ("entropy", "cheapest"):
        select.select_budget(h, mi, mask, Budget(torch.ones(2, dtype=torch.float64), 1.0, 1.0, order))
    select.select_threshold(h, mi, mask, 0.1, None)
    select.color(mi, mask, 0.1)


def dense_layers(d: int, dtype: torch.dtype = torch.float32) -> None:
    dense.mlp(torch.empty(64, d, dtype=dtype), [torch.empty(d, 64, dtype=dtype)], [torch.empty(64)])


def _cut(shape: tuple[int, ...], beyond: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor, cut out of one whose second to last dimension is longer: strides before it are no products of sizes."""
    *lead, n, last = shape
    return torch.empty(*lead, n + beyond, last, dtype=dtype)[..., :n, :]


def every_kernel(n: int, k: int, beyond: int = 0) -> None:
    """Calls on n rows or positions, k alternatives and rows of pairs, that are alike in all that belongs to a model.

    Args:
        n: rows and positions, at most 32.
        k: alternatives and rows of pairs.
        beyond: rows between those of different sequences that belong to none.
    """
    for n_v in (33, 20000):
        x, g = _cut((2, n, n_v), beyond), torch.empty(2, n)
        stats.entropy(x)
        stats.entropy_backward(g, x)
        stats.token_stats(x)
        stats.token_stats_backward(g, g, g, g, x)
        many, w, y = _cut((k, 2, n, n_v), beyond), _cut((k, 2, n, 1), beyond).squeeze(3), _cut((2, n, n_v), beyond)
        kl.expected_entropy(many, w)
        kl.expected_kl(many, w, y)
        kl.expected_kl_backward(g, many, w, y)
        kl.kl_divergence(x, y)
        kl.mixture_entropy(many, w)
        kl.mixture_entropy_backward(g, many, w)
        kl.mixture_stats(many, w, y)
    stats.linear_token_stats(torch.empty(n, 64), torch.empty(9, 64), None)
    dense.mlp(torch.empty(n, 64), [torch.empty(64, 16)], [torch.empty(16)])
    h, mi = torch.empty(2, n + beyond)[:, :n], torch.empty(2, n + beyond, n + beyond)[:, :n, :n]
    mask = torch.ones(2, n + beyond, dtype=torch.bool)[:, :n]
    select.select_budget(h, mi, mask, Budget(torch.ones(2, dtype=torch.float64), 1.0, 1.0, limit=k))
    select.select_threshold(h, mi, mask, 0.1, k)
    select.color(mi, mask, 0.1)
    for widths in ((64,), (64, 32), (64, 32, 16), (64, 32, 16, 16)):
        call = pairs(widths, "bf16", "mean", n, torch.ones(1, n + beyond, dtype=torch.bool)[:, :n])
        call = call._replace(u=_cut((1, n, 64), beyond, torch.bfloat16), v=_cut((1, n, 64), beyond, torch.bfloat16))
        for layout in (call, call._replace(rows=torch.zeros(1, k, dtype=torch.int64)), call._replace(window=5)):
            pairwise.pairwise_mlp(layout)
            pairwise.pairwise_mlp_backward(torch.empty(layout.shape), layout)
        shifted = call._replace(shift=torch.empty(7))
        pairwise.pairwise_mlp(shifted)
        pairwise.pairwise_mlp(shifted._replace(relation=torch.zeros(1, n, n, dtype=torch.int32)))


CASES: dict[str, dict[str, Callable[[], None]]] = {
    "typical": {
        "stats": lambda: token_statistics(33),
        "kl": lambda: divergences(33),
        "select": lambda: selections(1024),
        "head": lambda: head_statistics(50257, 1024),
        "mlp": lambda: dense_layers(256),
        "pairs": lambda: (scores((512, 256)), scores((256, 128)), scores((512, 256, 128))),
        "pairs fp32": lambda: (scores((512, 256), "fp32"), scores((512, 256, 128), "fp32")),
        "pairs tf32": lambda: (scores((512, 256), "tf32"), scores((512, 256, 128), "tf32")),
        "pair gradients": lambda: gradients((512, 256)),
        "pair gradients fp32": lambda: gradients((512, 256), "fp32"),
        "pair gradients, no layer": lambda: gradients((512,)),
        "deep pairs": lambda: scores((512, 256, 128, 64)),
        "deep pair gradients": lambda: gradients((512, 256, 128)),
        "deep pair gradients fp32": lambda: gradients((512, 256, 128), "fp32"),
        "deep pair gradients tf32": lambda: gradients((512, 256, 128), "tf32"),
    },
    "smallest": {
        "stats": lambda: token_statistics(2),
        "kl": lambda: divergences(2),
        "select": lambda: selections(2),
        "head": lambda: head_statistics(2, 1),
        "pairs": lambda: (scores((1,)), scores((16, 1))),
    },
    "largest": {
        "stats": lambda: (token_statistics(256000), token_statistics(4096, torch.float64)),
        "kl": lambda: (divergences(151936), divergences(33, torch.float64)),
        "select": lambda: selections(select.MOST_POSITIONS),
        "head": lambda: head_statistics(4096, 4096, torch.float32),
        "pairs": lambda: scores((2048, 1024), symmetry="mean"),
    },
}
