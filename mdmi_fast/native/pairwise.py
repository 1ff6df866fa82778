"""A small network on every pair of positions, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import _C
from mdmi_fast._threads import get_num_threads
from mdmi_fast.native._memory import DTYPE, mask_of

SYMMETRY = {"none": 0, "mean": 1, "upper": 2}

Half = tuple[int, int, tuple[int, int]]


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    reasons = []
    if precision not in (None, "fp32", "bf16"):
        reasons.append(f"has the precisions fp32 and bf16, not {precision}")
    if any(x.dtype == torch.float64 for x in tensors[1 if op == "score_and_select" else 0 :]):
        reasons.append("scores pairs in float32, got float64")
    return reasons


def prepare_pairwise(
    weights: list[Tensor], biases: list[Tensor], w_out: Tensor, b_out: Tensor, precision: str
) -> _C.PackedNetwork:
    weights, biases = ([x.float().contiguous() for x in xs] for xs in (weights, biases))
    w_out = w_out.float().contiguous()
    layers = [
        (w.data_ptr(), b.data_ptr(), w.shape[0], w.shape[1]) for w, b in zip(weights, biases, strict=True)
    ]
    return _C.PackedNetwork(layers, w_out.data_ptr(), w_out.shape[0], float(b_out), precision == "bf16")


def _half(x: Tensor) -> tuple[Tensor, Half]:
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x, (x.data_ptr(), DTYPE[x.dtype], (x.stride(0), x.stride(1)))


class Call:
    """The operands that all three layouts share, kept alive as long as their addresses are used."""

    def __init__(
        self,
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
        prepared: _C.PackedNetwork | None,
    ) -> None:
        self.network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
        same = u.data_ptr() == v.data_ptr() and u.stride() == v.stride() and u.dtype == v.dtype
        self.u, half_u = _half(u)
        self.v, half_v = (self.u, half_u) if same else _half(v)
        self.halves = (half_u, half_v, u.shape, *mask_of(mask))
        self.rule = (SYMMETRY[symmetry], combine == "mul", activation == "softplus")


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
    call = Call(u, v, weights, biases, w_out, b_out, mask, combine, symmetry, activation, precision, prepared)
    batch, n = u.shape[:2]
    result = torch.empty(batch, n, n)
    _C.score_all(call.network, call.halves, call.rule, result.data_ptr(), get_num_threads())
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
    call = Call(u, v, weights, biases, w_out, b_out, mask, combine, symmetry, activation, precision, prepared)
    rows = rows.contiguous()
    result = torch.empty(*rows.shape, u.shape[1])
    _C.score_rows(
        call.network, call.halves, call.rule, rows.data_ptr(), rows.shape[1], result.data_ptr(), get_num_threads()
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
    call = Call(u, v, weights, biases, w_out, b_out, mask, combine, symmetry, activation, precision, prepared)
    batch, n = u.shape[:2]
    result = torch.empty(batch, n, 2 * window + 1)
    _C.score_band(call.network, call.halves, call.rule, window, result.data_ptr(), get_num_threads())
    return result
