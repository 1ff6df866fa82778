"""A small network on every pair of positions, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads
from mdmi_fast.native._memory import DTYPE, mask_of

SYMMETRY = {"none": 0, "mean": 1, "upper": 2}

Half = tuple[int, int, tuple[int, int]]
GradientTensors = tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor, Tensor]


def scoring_refusals(tensors: list[Tensor], precision: str | None) -> list[str]:
    reasons = []
    if precision not in (None, "fp32", "bf16"):
        reasons.append(f"has the precisions fp32 and bf16, not {precision}")
    if any(x.dtype == torch.float64 for x in tensors):
        reasons.append("scores pairs in float32, got float64")
    return reasons


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    return scoring_refusals(tensors, precision)


class Network:
    """The weights as contiguous float32 tensors, kept alive as long as their addresses are used."""

    def __init__(
        self, weights: list[Tensor], biases: list[Tensor], w_out: Tensor, b_out: Tensor | float, precision: str
    ) -> None:
        self.weights, self.biases = ([x.float().contiguous() for x in xs] for xs in (weights, biases))
        self.w_out, self.b_out = w_out.float().contiguous(), b_out
        layers = [
            (w.data_ptr(), b.data_ptr(), w.shape[0], w.shape[1]) for w, b in zip(self.weights, self.biases, strict=True)
        ]
        self.addresses = (layers, self.w_out.data_ptr(), w_out.shape[0], float(b_out), precision == "bf16")

    def packed(self) -> _C.PackedNetwork:
        return _C.PackedNetwork(self.addresses)


def prepare_pairwise(
    weights: list[Tensor], biases: list[Tensor], w_out: Tensor, b_out: Tensor, precision: str
) -> _C.PackedNetwork:
    return Network(weights, biases, w_out, b_out, precision).packed()


def _half(x: Tensor) -> tuple[Tensor, Half]:
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x, (x.data_ptr(), DTYPE[x.dtype], (x.stride(0), x.stride(1)))


class Pairs:
    """The positions whose pairs are scored, kept alive as long as their addresses are used."""

    def __init__(self, u: Tensor, v: Tensor, mask: Tensor | None, combine: str, symmetry: str, activation: str) -> None:
        same = u.data_ptr() == v.data_ptr() and u.stride() == v.stride() and u.dtype == v.dtype
        self.u, half_u = _half(u)
        self.v, half_v = (self.u, half_u) if same else _half(v)
        self.halves = (half_u, half_v, u.shape, *mask_of(mask))
        self.rule = (SYMMETRY[symmetry], combine == "mul", activation == "softplus")


class Gradients:
    """Gradients in float32 that C++ writes, and their addresses."""

    def __init__(self, u: Tensor, v: Tensor, network: Network) -> None:
        self.u, self.v = (torch.empty(x.shape, dtype=torch.float32, device="cpu") for x in (u, v))
        self.weights, self.biases = ([torch.empty_like(x) for x in xs] for xs in (network.weights, network.biases))
        self.w_out, self.b_out = torch.empty_like(network.w_out), torch.empty((), dtype=torch.float32, device="cpu")
        self.addresses = (
            self.u.data_ptr(),
            self.v.data_ptr(),
            [x.data_ptr() for x in self.weights],
            [x.data_ptr() for x in self.biases],
            self.w_out.data_ptr(),
            self.b_out.data_ptr(),
        )

    def like(
        self, u: Tensor, v: Tensor, weights: list[Tensor], biases: list[Tensor], w_out: Tensor, b_out: Tensor
    ) -> GradientTensors:
        """In the dtypes of what they belong to."""
        d_weights = [d.to(x.dtype) for d, x in zip(self.weights, weights, strict=True)]
        d_biases = [d.to(x.dtype) for d, x in zip(self.biases, biases, strict=True)]
        return (
            self.u.to(u.dtype),
            self.v.to(v.dtype),
            d_weights,
            d_biases,
            self.w_out.to(w_out.dtype),
            self.b_out.to(b_out.dtype),
        )


def pairwise_mlp(
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
    prepared: _C.PackedNetwork | None = None,
) -> Tensor:
    network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
    pairs = Pairs(u, v, mask, combine, symmetry, activation)
    batch, n = u.shape[:2]
    result = torch.empty(batch, n, n, dtype=torch.float32, device="cpu")
    _C.score_all(network, pairs.halves, pairs.rule, result.data_ptr(), get_num_threads())
    return result


def pairwise_mlp_rows(
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
    prepared: _C.PackedNetwork | None = None,
) -> Tensor:
    network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
    pairs = Pairs(u, v, mask, combine, symmetry, activation)
    rows = rows.contiguous()
    result = torch.empty(*rows.shape, u.shape[1], dtype=torch.float32, device="cpu")
    _C.score_rows(
        network, pairs.halves, pairs.rule, rows.data_ptr(), rows.shape[1], result.data_ptr(), get_num_threads()
    )
    return result


def pairwise_mlp_band(
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    window: int,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
    prepared: _C.PackedNetwork | None = None,
) -> Tensor:
    network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
    pairs = Pairs(u, v, mask, combine, symmetry, activation)
    batch, n = u.shape[:2]
    result = torch.empty(batch, n, 2 * window + 1, dtype=torch.float32, device="cpu")
    _C.score_band(network, pairs.halves, pairs.rule, window, result.data_ptr(), get_num_threads())
    return result


def pairwise_mlp_backward(
    grad: Tensor,
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
) -> GradientTensors:
    network = Network(weights, biases, w_out, b_out, precision)
    pairs, out = Pairs(u, v, mask, combine, symmetry, activation), Gradients(u, v, network)
    grad = grad.float().contiguous()
    _C.score_all_backward(
        network.addresses, pairs.halves, pairs.rule, grad.data_ptr(), out.addresses, get_num_threads()
    )
    return out.like(u, v, weights, biases, w_out, b_out)


def pairwise_mlp_rows_backward(
    grad: Tensor,
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
) -> GradientTensors:
    network = Network(weights, biases, w_out, b_out, precision)
    pairs, out = Pairs(u, v, mask, combine, symmetry, activation), Gradients(u, v, network)
    grad = grad.float().contiguous()
    rows = rows.contiguous()
    _C.score_rows_backward(
        network.addresses,
        pairs.halves,
        pairs.rule,
        rows.data_ptr(),
        rows.shape[1],
        grad.data_ptr(),
        out.addresses,
        get_num_threads(),
    )
    return out.like(u, v, weights, biases, w_out, b_out)


def pairwise_mlp_band_backward(
    grad: Tensor,
    u: Tensor,
    v: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    window: int,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
) -> GradientTensors:
    network = Network(weights, biases, w_out, b_out, precision)
    pairs, out = Pairs(u, v, mask, combine, symmetry, activation), Gradients(u, v, network)
    grad = grad.float().contiguous()
    _C.score_band_backward(
        network.addresses, pairs.halves, pairs.rule, window, grad.data_ptr(), out.addresses, get_num_threads()
    )
    return out.like(u, v, weights, biases, w_out, b_out)
