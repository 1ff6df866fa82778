"""A small network on pairs of positions, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads
from mdmi_fast.backends.calls import PairCall, PairGradients, PairNetwork
from mdmi_fast.backends.cpp._memory import DTYPE, mask_of

SYMMETRY = {"none": 0, "mean": 1, "upper": 2}

Half = tuple[int, int, tuple[int, int]]


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


class Weights:
    """A network as contiguous float32 tensors, kept alive as long as their addresses are used."""

    def __init__(self, network: PairNetwork, precision: str) -> None:
        self.weights, self.biases = ([x.float().contiguous() for x in xs] for xs in (network.weights, network.biases))
        self.w_out = network.w_out.float().contiguous()
        layers = [
            (w.data_ptr(), b.data_ptr(), w.shape[0], w.shape[1]) for w, b in zip(self.weights, self.biases, strict=True)
        ]
        width, b_out = self.w_out.shape[0], float(network.b_out)
        self.addresses = (layers, self.w_out.data_ptr(), width, b_out, precision == "bf16")

    def packed(self) -> _C.PackedNetwork:
        return _C.PackedNetwork(self.addresses)


def prepare_pairwise(network: PairNetwork, precision: str) -> _C.PackedNetwork:
    return Weights(network, precision).packed()


def _half(x: Tensor) -> tuple[Tensor, Half]:
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x, (x.data_ptr(), DTYPE[x.dtype], (x.stride(0), x.stride(1)))


class Pairs:
    """The positions whose pairs are scored, kept alive as long as their addresses are used."""

    def __init__(self, call: PairCall) -> None:
        self.u, half_u = _half(call.u)
        self.v, half_v = (self.u, half_u) if call.halves_are_same else _half(call.v)
        self.halves = (half_u, half_v, call.u.shape, *mask_of(call.mask), self._shift(call))
        rule = call.rule
        self.rule = (SYMMETRY[rule.symmetry], rule.combine == "mul", rule.activation == "softplus")
        self.rows = None if call.rows is None else call.rows.contiguous()

    def _shift(self, call: PairCall) -> tuple[int, int, int, int]:
        shift, self.relation = call.shift, call.relation
        if shift is None:
            return 0, 0, 0, 0
        self.shift = shift.float().contiguous()
        where = self.shift.data_ptr(), len(self.shift)
        if self.relation is None or not self.relation.numel():
            return *where, 0, 0
        return *where, self.relation.data_ptr(), self.relation.stride(0) if len(self.relation) > 1 else 0


def packed_network(call: PairCall) -> _C.PackedNetwork:
    return call.packed or prepare_pairwise(call.network, call.rule.precision)


def pairwise_mlp(call: PairCall) -> Tensor:
    network, pairs = packed_network(call), Pairs(call)
    result = torch.empty(call.shape, dtype=torch.float32, device="cpu")
    common = (network, pairs.halves, pairs.rule)
    if pairs.rows is not None:
        rows = (pairs.rows.data_ptr(), pairs.rows.shape[1])
        _C.score_rows(*common, *rows, result.data_ptr(), get_num_threads())
    elif call.window is not None:
        _C.score_band(*common, call.window, result.data_ptr(), get_num_threads())
    else:
        _C.score_all(*common, result.data_ptr(), get_num_threads())
    return result


def pairwise_mlp_backward(grad: Tensor, call: PairCall) -> PairGradients:
    network, pairs = Weights(call.network, call.rule.precision), Pairs(call)
    grad = grad.float().contiguous()
    d_u, d_v = (torch.empty(x.shape, dtype=torch.float32, device="cpu") for x in (call.u, call.v))
    d_weights, d_biases = ([torch.empty_like(x) for x in xs] for xs in (network.weights, network.biases))
    d_b_out = torch.empty((), dtype=torch.float32, device="cpu")
    d_shift = None if call.shift is None else torch.empty(call.shift.shape, dtype=torch.float32, device="cpu")
    d_network = PairNetwork(d_weights, d_biases, torch.empty_like(network.w_out), d_b_out)
    out = PairGradients(d_u, d_v, d_network, d_shift)
    addresses = (
        out.u.data_ptr(),
        out.v.data_ptr(),
        [x.data_ptr() for x in out.network.weights],
        [x.data_ptr() for x in out.network.biases],
        out.network.w_out.data_ptr(),
        out.network.b_out.data_ptr(),
        0 if d_shift is None else d_shift.data_ptr(),
    )
    common, last = (network.addresses, pairs.halves, pairs.rule), (grad.data_ptr(), addresses, get_num_threads())
    if pairs.rows is not None:
        _C.score_rows_backward(*common, pairs.rows.data_ptr(), pairs.rows.shape[1], *last)
    elif call.window is not None:
        _C.score_band_backward(*common, call.window, *last)
    else:
        _C.score_all_backward(*common, *last)
    return out.like(call)
