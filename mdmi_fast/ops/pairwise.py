"""A small network scored on pairs of positions: all of them, some rows, or a band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.backends.calls import PAIR_CALL, PairCall, PairGradients
from mdmi_fast.errors import UnsupportedError
from mdmi_fast.ops._dispatch import choose, provided, run
from mdmi_fast.ops._pairs import (
    PRECISIONS,
    PreparedPairwise,
    check_network,
    check_pairs,
    in_range,
    network_tensors,
    versions_of,
)
from mdmi_fast.ops._register import in_memory, keep, kept, registered

_WIDEST = 2**31 - 1
"""Of a band: no sequence is longer."""


def pairwise_mlp(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    *,
    shift: Tensor | None = None,
    relation: Tensor | None = None,
    mask: Tensor | None = None,
    combine: str = "add",
    symmetry: str = "mean",
    activation: str = "identity",
    precision: str | None = None,
    prepared: PreparedPairwise | None = None,
    backend: str | None = None,
) -> Tensor:
    """Scores of a small network on every pair of positions.

    z = relu(u_i + v_j) or u_i * v_j;  z = relu(z W_k + b_k) for each layer;
    f_ij = activation(z . w_out + b_out + shift[r_ij])

    Args:
        u: [..., N, H1] float64, float32, bfloat16 or float16, any strides: the half of the first layer that position i gives.
        v: [..., N, H1], the half that position j gives. May be u itself: half the work is saved.
        weights: the dense layers [in, out], any number of them.
        biases: their biases [out].
        w_out: [H_last], the output layer.
        b_out: its bias, a tensor [] or [1] or a number.
        shift: [R] floating, added by the relation r_ij of a pair; None = nothing.
        relation: [N, N] or [..., N, N] integers in 0 .. R - 1, r_ij; None = the distance, min(|i - j|, R) - 1: the last number
            of the shift holds for all beyond.
        mask: [..., N] bool, True = masked (to be scored); None = all.
        combine: "add" or "mul".
        symmetry: "none"; "mean", (f_ij + f_ji) / 2; "upper", f of the pair with i < j for both.
        activation: "identity" or "softplus", applied before the symmetry.
        precision: of the products of the dense layers, "fp32", "bf16", "tf32" or "fp16" where the backend has it; None = "bf16"
            where u is bfloat16, else "fp32".
        prepared: `prepare_pairwise` of these weights, for inference outside torch.compile. Where torch has to see the call (a
            transform, a mode, a tensor subclass) it is checked and left unused.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [..., N, N] float32; 0 on the diagonal and where an end is unmasked. Differentiable in u, v, the network and the shift.

    Raises:
        TypeError: an operand is not a floating tensor, mask is not bool, relation is not of integers, prepared is something else.
        ValueError: shapes do not match, an option is not one of its choices, operands are on several devices, prepared was made of
            other weights, there is a relation but no shift, or, on a CPU, a relation is out of range (elsewhere it counts as
            the nearest).
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Sums in float32 (float64 if an operand is); "bf16" rounds both operands of the dense layers, and on processors that
        multiply bfloat16 themselves operands and sums below 2^-126 count as 0; the output dot stays float32. Activations are
        never held for more than a tile of pairs, and recomputed in the backward pass. NaN at unmasked positions reaches
        neither scores nor gradients; inf and NaN elsewhere give what the formulas give, 0 * inf = NaN, at any width.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> h = torch.tensor([[1.0], [2.0], [3.0]])
        >>> ops.pairwise_mlp(h, h, [], [], torch.ones(1), 0.0, combine="mul")
        tensor([[0., 2., 3.],
                [2., 0., 6.],
                [3., 6., 0.]])
    """
    op = "pairwise_mlp"
    network, rule = (weights, biases, w_out, b_out), (combine, symmetry, activation, precision)
    call, backend = check_pairs(op, (u, v), network, rule, (shift, relation), mask, prepared, backend)
    return _scores(call, backend).reshape(*u.shape[:-1], u.shape[-2])


def pairwise_mlp_rows(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    rows: Tensor,
    *,
    shift: Tensor | None = None,
    relation: Tensor | None = None,
    mask: Tensor | None = None,
    combine: str = "add",
    symmetry: str = "mean",
    activation: str = "identity",
    precision: str | None = None,
    prepared: PreparedPairwise | None = None,
    backend: str | None = None,
) -> Tensor:
    """Some rows of `pairwise_mlp`.

    result[..., r, j] = pairwise_mlp(...)[..., rows[r], j]

    Args:
        u: [..., N, H1], as in `pairwise_mlp`, like all arguments not listed here.
        v: [..., N, H1].
        weights: the dense layers.
        biases: their biases.
        w_out: the output layer.
        b_out: its bias.
        rows: [..., R] int64, positions; -1 gives a row of zeros.
        shift: [R] or None.
        relation: [N, N], [..., N, N] or None.
        mask: [..., N] bool or None.
        combine: "add" or "mul".
        symmetry: "none", "mean" or "upper".
        activation: "identity" or "softplus".
        precision: of the dense layers, or None.
        prepared: of `prepare_pairwise`, or None.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [..., R, N] float32. Differentiable in u, v, the network and the shift.

    Raises:
        TypeError: as `pairwise_mlp`; rows is not int64.
        ValueError: as `pairwise_mlp`; on a CPU, a row is not within -1 .. N - 1.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        As `pairwise_mlp`.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> h = torch.tensor([[1.0], [2.0], [3.0]])
        >>> ops.pairwise_mlp_rows(h, h, [], [], torch.ones(1), 0.0, torch.tensor([2]), combine="mul")
        tensor([[3., 6., 0.]])
    """
    op = "pairwise_mlp_rows"
    network, rule = (weights, biases, w_out, b_out), (combine, symmetry, activation, precision)
    call, backend = check_pairs(op, (u, v), network, rule, (shift, relation), mask, prepared, backend)
    check.of_kind(op, "rows", rows, torch.int64)
    if rows.ndim != u.ndim - 1 or rows.shape[:-1] != u.shape[:-2]:
        raise ValueError(f"{op}: rows must be [..., R] with {tuple(u.shape[:-2])} before R, got {check.describe(rows)}")
    check.same_device(op, u=u, rows=rows)
    call = call._replace(rows=rows.reshape(call.u.shape[0], rows.shape[-1]))
    return _scores(call, backend).reshape(*rows.shape, u.shape[-2])


def pairwise_mlp_band(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    window: int,
    *,
    shift: Tensor | None = None,
    relation: Tensor | None = None,
    mask: Tensor | None = None,
    combine: str = "add",
    symmetry: str = "mean",
    activation: str = "identity",
    precision: str | None = None,
    prepared: PreparedPairwise | None = None,
    backend: str | None = None,
) -> Tensor:
    """The band of `pairwise_mlp` near the diagonal.

    result[..., i, window + d] = pairwise_mlp(...)[..., i, i + d] for |d| <= window, 0 outside the sequence

    Args:
        u: [..., N, H1], as in `pairwise_mlp`, like all arguments not listed here.
        v: [..., N, H1].
        weights: the dense layers.
        biases: their biases.
        w_out: the output layer.
        b_out: its bias.
        window: the farthest distance, at least 0.
        shift: [R] or None.
        relation: [N, N], [..., N, N] or None.
        mask: [..., N] bool or None.
        combine: "add" or "mul".
        symmetry: "none", "mean" or "upper".
        activation: "identity" or "softplus".
        precision: of the dense layers, or None.
        prepared: of `prepare_pairwise`, or None.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [..., N, 2 * window + 1] float32. Differentiable in u, v, the network and the shift.

    Raises:
        TypeError: as `pairwise_mlp`; window is not an int.
        ValueError: as `pairwise_mlp`; window is negative, or 2^31 and more.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        As `pairwise_mlp`.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> h = torch.tensor([[1.0], [2.0], [3.0]])
        >>> ops.pairwise_mlp_band(h, h, [], [], torch.ones(1), 0.0, 1, combine="mul")
        tensor([[0., 0., 2.],
                [2., 0., 6.],
                [6., 0., 0.]])
    """
    op = "pairwise_mlp_band"
    network, rule = (weights, biases, w_out, b_out), (combine, symmetry, activation, precision)
    call, backend = check_pairs(op, (u, v), network, rule, (shift, relation), mask, prepared, backend)
    check.whole(op, "window", window, 0, _WIDEST)
    reach = min(window, max(u.shape[-2] - 1, 0))
    band = _scores(call._replace(window=reach), backend).reshape(*u.shape[:-1], 2 * reach + 1)
    return band if reach == window else torch.nn.functional.pad(band, (window - reach, window - reach))


def prepare_pairwise(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    *,
    precision: str | None = None,
    backend: str | None = None,
) -> PreparedPairwise:
    """Packs a network's weights once, for many calls.

    Args:
        weights: the dense layers [in, out].
        biases: their biases [out].
        w_out: [H_last].
        b_out: a tensor [] or [1] or a number.
        precision: "fp32", "bf16", "tf32" or "fp16"; None = "bf16" where w_out is bfloat16, else "fp32".
        backend: the one to pack for; None = the one that would run.

    Returns:
        PreparedPairwise, to be passed as `prepared` with the same weights. It is refused after they change, unless by what
        torch does not count: writing in place to `weight.data` or to an inference tensor.

    Raises:
        TypeError: an operand is not a floating tensor.
        ValueError: shapes do not match, or an option is not one of its choices.
        UnsupportedError: the backend named cannot run such calls, or a tensor has no memory of its own to be packed (a subclass, one
            inside a transform).

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> head = ([], [], torch.ones(1), 0.0)
        >>> h = torch.tensor([[1.0], [2.0]])
        >>> ops.pairwise_mlp(h, h, *head, prepared=ops.prepare_pairwise(*head))
        tensor([[0., 3.],
                [3., 0.]])
    """
    op, given = "prepare_pairwise", (weights, biases, w_out, b_out)
    network = check_network(op, given)
    if precision is None:
        precision = "bf16" if w_out.dtype == torch.bfloat16 else "fp32"
    check.one_of(op, "precision", precision, PRECISIONS)
    name, _ = choose("pairwise", "pairwise_mlp", backend, [w_out, *weights], precision)
    pack = provided(name, "pairwise", op)
    tensors = network_tensors(given)
    if not all(map(in_memory, tensors)):
        raise UnsupportedError(["packs tensors that lie in memory, neither subclasses nor transformed ones"], op)
    packed = None
    if pack is not None:
        with torch.no_grad():
            packed = pack(network.map(Tensor.resolve_neg), precision)
    return PreparedPairwise(tensors, b_out, network, versions_of(tensors), precision, name, packed)


def _scores(call: PairCall, backend: str | None) -> Tensor:
    flat = (*call.flat(), backend)
    # packed weights are no tensors, and a registered operator takes nothing else
    if call.packed is None or _pairwise_mlp.seen(flat):
        return _pairwise_mlp(*flat)
    return _forward(call, backend)


def _forward(call: PairCall, backend: str | None) -> Tensor:
    rows, n = call.rows, call.u.shape[1]
    if rows is not None and rows.device.type == "cpu" and rows.numel():
        least, most = (int(x) for x in rows.aminmax())
        if least < -1 or most >= n:
            raise ValueError(f"{call.op}: rows must be within -1 .. N - 1 = {n - 1}, got {least} .. {most}")
    function = run("pairwise", call.op, backend, call.tensors, call.rule.precision)
    return function(in_range(call.op, call))  # type: ignore[no-any-return]


@registered("pairwise_mlp", f"({PAIR_CALL}, str? backend) -> Tensor")
def _pairwise_mlp(*flat: Any) -> Tensor:
    *call, backend = flat
    return _forward(PairCall.of(*call), backend)


@_pairwise_mlp.register_fake
def _(*flat: Any) -> Tensor:
    call = PairCall.of(*flat[:-1])
    return call.u.new_empty(call.shape, dtype=torch.float32)


@registered("pairwise_mlp_backward", f"(Tensor grad, {PAIR_CALL}, str? backend) -> Tensor[]")
def _pairwise_mlp_backward(grad: Tensor, *flat: Any) -> list[Tensor]:
    *arguments, backend = flat
    call = PairCall.of(*arguments)
    call = in_range(call.op, call)
    backward = run("pairwise", f"{call.op}_backward", backend, call.tensors, call.rule.precision)
    gradients: PairGradients = backward(grad, call)
    return gradients.tensors


@_pairwise_mlp_backward.register_fake
def _(grad: Tensor, *flat: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in PairCall.of(*flat[:-1]).tensors]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *call, _ = inputs = kept(ctx)
    du, dv, *others = _pairwise_mlp_backward(grad, *inputs)
    n = len(PairCall.of(*call).network.weights)
    d_w_out, d_b_out, *d_shift = others[2 * n :]
    gradients = (du, dv, others[:n], others[n : 2 * n], d_w_out, d_b_out, *(d_shift or (None,)))
    return *gradients, *(None,) * (len(inputs) - len(gradients))


_pairwise_mlp.register_autograd(_gradient, setup_context=keep)
