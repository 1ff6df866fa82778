"""A small network scored on pairs of positions: all of them, some rows, or a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast.ops import _checks as check
from mdmi_fast.ops._dispatch import call, choose, provided
from mdmi_fast.ops._register import registered

Operands = tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor, Tensor]
Options = tuple[Tensor | None, str, str, str, str]

PRECISIONS = ("fp32", "bf16", "tf32", "fp16")


@dataclass(frozen=True)
class PreparedPairwise:
    """The weights of a pair network, packed once for a backend; made by `prepare_pairwise`."""

    tensors: tuple[Tensor, ...]
    """weights, biases, w_out and, if it is a tensor, b_out."""
    b_out: Tensor | float
    scalar: Tensor
    """b_out as a tensor of shape []."""
    versions: tuple[tuple[int, int | None], ...]
    """Of the tensors when they were packed: where their memory was, and how often it had been written."""
    precision: str
    backend: str
    packed: object
    """What the backend made of them."""


def _versions(tensors: Sequence[Tensor]) -> tuple[tuple[int, int | None], ...]:
    # The address, because `module.half()` and `weight.data = ...` put other memory into the same tensor and leave its
    # version alone. Inference tensors count no versions.
    return tuple((t.data_ptr(), None if t.is_inference() else t._version) for t in tensors)


def _network_tensors(
    weights: Sequence[Tensor], biases: Sequence[Tensor], w_out: Tensor, b_out: Tensor | float
) -> tuple[Tensor, ...]:
    return (*weights, *biases, w_out, *([b_out] if isinstance(b_out, Tensor) else []))


class Pairs(NamedTuple):
    """What all pair ops share, checked and with exactly one batch dimension."""

    u: Tensor
    v: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    w_out: Tensor
    b_out: Tensor
    mask: Tensor | None
    combine: str
    symmetry: str
    activation: str
    precision: str
    backend: str | None
    packed: object

    @property
    def operands(self) -> Operands:
        return self.u, self.v, self.weights, self.biases, self.w_out, self.b_out

    @property
    def options(self) -> Options:
        return self.mask, self.combine, self.symmetry, self.activation, self.precision

    @property
    def tensors(self) -> list[Tensor]:
        return [self.u, self.v, *self.weights, *self.biases, self.w_out, self.b_out]


def _check_network(
    op: str, weights: Sequence[Tensor], biases: Sequence[Tensor], w_out: Tensor, b_out: Tensor | float
) -> Tensor:
    """Checks a network by itself; returns b_out as a tensor of shape []."""
    check.floating(op, "w_out", w_out)
    check.dense_layers(op, weights, biases, None, w_out=w_out)
    n_last = weights[-1].shape[1] if weights else None
    if w_out.ndim != 1 or w_out.shape[0] == 0 or n_last not in (None, w_out.shape[0]):
        expected = "[H1]" if n_last is None else f"[H_last] = ({n_last},)"
        raise ValueError(f"{op}: w_out must be {expected}, got {check.describe(w_out)}")
    if not isinstance(b_out, Tensor):
        return torch.full((), check.number(op, "b_out", b_out), dtype=w_out.dtype, device=w_out.device)
    check.floating(op, "b_out", b_out)
    if b_out.shape not in ((), (1,)):
        raise ValueError(f"{op}: b_out must be [] or [1], got {check.describe(b_out)}")
    check.same_device(op, w_out=w_out, b_out=b_out)
    return b_out.reshape(())


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same elements of the same memory."""
    return a is b or (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


def _check_prepared(
    op: str,
    prepared: PreparedPairwise,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    *halves: Tensor,
) -> None:
    """Raises ValueError unless the weights, checked then, are as they were packed, and nothing wants a gradient."""
    if not isinstance(prepared, PreparedPairwise):
        raise TypeError(f"{op}: prepared must be made by prepare_pairwise, got {type(prepared).__name__}")
    tensors = _network_tensors(weights, biases, w_out, b_out)
    same = len(weights) == len(biases) and len(tensors) == len(prepared.tensors)
    same = same and all(map(_same, tensors, prepared.tensors))
    if not same or (not isinstance(b_out, Tensor) and b_out != prepared.b_out):
        raise ValueError(f"{op}: prepared must be made of the weights passed with it, got it made of others")
    if prepared.versions != _versions(prepared.tensors):
        raise ValueError(f"{op}: prepared must be made again after the weights change, got it from before")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*halves, *tensors)):
        raise ValueError(f"{op}: prepared is for inference: call under torch.no_grad() or detach the operands")


def check_pairs(
    op: str,
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str | None,
    prepared: PreparedPairwise | None,
    backend: str | None,
) -> Pairs:
    """Checks what all pair ops share and flattens the batch."""
    check.rows_of(op, "u", u, "[..., N, H1]", 2)
    check.floating(op, "v", v)
    check.shape(op, "v", v, u.shape, "[..., N, H1] like u")
    if prepared is None:
        scalar = _check_network(op, weights, biases, w_out, b_out)
    else:
        _check_prepared(op, prepared, weights, biases, w_out, b_out, u, v)
        scalar = prepared.scalar
    n_first = weights[0].shape[0] if weights else w_out.shape[0]
    if n_first != u.shape[-1]:
        raise ValueError(
            f"{op}: {'weights[0]' if weights else 'w_out'} must take H1 = {u.shape[-1]} inputs, got {n_first}"
        )
    check.one_of(op, "combine", combine, ("add", "mul"))
    check.one_of(op, "symmetry", symmetry, ("none", "mean", "upper"))
    check.one_of(op, "activation", activation, ("identity", "softplus"))
    if mask is not None:
        check.of_kind(op, "mask", mask, torch.bool)
        check.shape(op, "mask", mask, u.shape[:-1], "[..., N]")
        mask = check.one_batch(mask, 1)
    check.same_device(op, u=u, v=v, w_out=w_out, mask=mask)
    if prepared is not None:
        precision, backend = precision or prepared.precision, backend or prepared.backend
        if (precision, backend) != (prepared.precision, prepared.backend):
            raise ValueError(
                f"{op}: prepared must be for precision {precision!r} and backend {backend!r}, "
                f"got {prepared.precision!r} and {prepared.backend!r}"
            )
    if precision is None:
        precision = "bf16" if u.dtype == torch.bfloat16 else "fp32"
    check.one_of(op, "precision", precision, PRECISIONS)
    return Pairs(
        check.one_batch(u, 2),
        check.one_batch(v, 2),
        list(weights),
        list(biases),
        w_out,
        scalar,
        mask,
        combine,
        symmetry,
        activation,
        precision,
        backend,
        None if prepared is None else prepared.packed,
    )


def _scores(pairs: Pairs, prepared: PreparedPairwise | None, rows: Tensor | None, window: int | None) -> Tensor:
    if prepared is None:
        return _pairwise_mlp(*pairs.operands, rows, window, *pairs.options, pairs.backend)
    # packed weights are no tensors, and a registered op takes nothing else
    return _forward(pairs.operands, rows, window, pairs.options, pairs.backend, pairs.packed)


def pairwise_mlp(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    *,
    mask: Tensor | None = None,
    combine: str = "add",
    symmetry: str = "mean",
    activation: str = "identity",
    precision: str | None = None,
    prepared: PreparedPairwise | None = None,
    backend: str | None = None,
) -> Tensor:
    """Scores of a small network on every pair of positions.

    z = relu(u_i + v_j) or u_i * v_j;  z = relu(z W_k + b_k) for each layer;  f_ij = activation(z . w_out + b_out)

    Args:
        u: [..., N, H1] float64, float32, bfloat16 or float16, any strides: the half of the first layer that position i gives.
        v: [..., N, H1], the half that position j gives. May be u itself: half the work is saved.
        weights: the dense layers [in, out], any number of them.
        biases: their biases [out].
        w_out: [H_last], the output layer.
        b_out: its bias, a tensor [] or [1] or a number.
        mask: [..., N] bool, True = masked (to be scored); None = all.
        combine: "add" or "mul".
        symmetry: "none"; "mean", (f_ij + f_ji) / 2; "upper", f of the pair with i < j for both.
        activation: "identity" or "softplus", applied before the symmetry.
        precision: of the products of the dense layers, "fp32", "bf16", "tf32" or "fp16" where the backend has it; None = "bf16"
            where u is bfloat16, else "fp32".
        prepared: `prepare_pairwise` of these weights, for inference outside torch.compile.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [..., N, N] float32; 0 on the diagonal and where an end is unmasked. Differentiable in u, v and the network.

    Raises:
        TypeError: an operand is not a floating tensor, mask is not bool, prepared is something else.
        ValueError: shapes do not match, an option is not one of its choices, operands are on several devices, or prepared was made of
            other weights.
        UnsupportedError: the backend named cannot run this call.

    Numerics:
        Sums in float32 (float64 if an operand is); "bf16" rounds both operands of the dense layers, and a processor's own dot
        product of bfloat16 takes operands and sums below 2^-126 for 0; the output dot stays
        float32. Activations are never held for more than a tile of pairs, and recomputed in the backward pass. NaN at unmasked
        positions reaches neither scores nor gradients.

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
    pairs = check_pairs(
        op, u, v, weights, biases, w_out, b_out, mask, combine, symmetry, activation, precision, prepared, backend
    )
    return _scores(pairs, prepared, None, None).reshape(*u.shape[:-1], u.shape[-2])


def pairwise_mlp_rows(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    rows: Tensor,
    *,
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
        mask: [..., N] bool or None.
        combine: "add" or "mul".
        symmetry: "none", "mean" or "upper".
        activation: "identity" or "softplus".
        precision: of the dense layers, or None.
        prepared: of `prepare_pairwise`, or None.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [..., R, N] float32. Differentiable in u, v and the network.

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
    pairs = check_pairs(
        op, u, v, weights, biases, w_out, b_out, mask, combine, symmetry, activation, precision, prepared, backend
    )
    check.of_kind(op, "rows", rows, torch.int64)
    if rows.ndim != u.ndim - 1 or rows.shape[:-1] != u.shape[:-2]:
        raise ValueError(f"{op}: rows must be [..., R] with {tuple(u.shape[:-2])} before R, got {check.describe(rows)}")
    check.same_device(op, u=u, rows=rows)
    flat = rows.reshape(pairs.u.shape[0], rows.shape[-1])
    return _scores(pairs, prepared, flat, None).reshape(*rows.shape, u.shape[-2])


def pairwise_mlp_band(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor | float,
    window: int,
    *,
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
        mask: [..., N] bool or None.
        combine: "add" or "mul".
        symmetry: "none", "mean" or "upper".
        activation: "identity" or "softplus".
        precision: of the dense layers, or None.
        prepared: of `prepare_pairwise`, or None.
        backend: "triton", "cpp", "torch" or None.

    Returns:
        [..., N, 2 * window + 1] float32. Differentiable in u, v and the network.

    Raises:
        TypeError: as `pairwise_mlp`; window is not an int.
        ValueError: as `pairwise_mlp`; window is negative.
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
    pairs = check_pairs(
        op, u, v, weights, biases, w_out, b_out, mask, combine, symmetry, activation, precision, prepared, backend
    )
    check.whole(op, "window", window, 0)
    return _scores(pairs, prepared, None, window).reshape(*u.shape[:-1], 2 * window + 1)


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
        UnsupportedError: the backend named cannot run such calls.

    Example:
        >>> import torch
        >>> from mdmi_fast import ops
        >>> head = ([], [], torch.ones(1), 0.0)
        >>> h = torch.tensor([[1.0], [2.0]])
        >>> ops.pairwise_mlp(h, h, *head, prepared=ops.prepare_pairwise(*head))
        tensor([[0., 3.],
                [3., 0.]])
    """
    op = "prepare_pairwise"
    scalar = _check_network(op, weights, biases, w_out, b_out)
    if precision is None:
        precision = "bf16" if w_out.dtype == torch.bfloat16 else "fp32"
    check.one_of(op, "precision", precision, PRECISIONS)
    name, _ = choose("pairwise", "pairwise_mlp", backend, [w_out, *weights], precision)
    pack = provided(name, "pairwise", op)
    with torch.no_grad():
        packed = pack(list(weights), list(biases), w_out, scalar, precision) if pack else None
    tensors = _network_tensors(weights, biases, w_out, b_out)
    return PreparedPairwise(tensors, b_out, scalar, _versions(tensors), precision, name, packed)


def _layout(rows: Tensor | None, window: int | None) -> tuple[str, tuple[Any, ...]]:
    """The backend's function for this layout and the argument it takes on top."""
    if rows is not None:
        return "pairwise_mlp_rows", (rows,)
    return ("pairwise_mlp", ()) if window is None else ("pairwise_mlp_band", (window,))


def _forward(
    operands: Operands, rows: Tensor | None, window: int | None, options: Options, backend: str | None, packed: object
) -> Tensor:
    u, v, weights, biases, w_out, b_out = operands
    op, extra = _layout(rows, window)
    if rows is not None and rows.device.type == "cpu" and rows.numel():
        least, most = (int(x) for x in rows.aminmax())
        if least < -1 or most >= u.shape[1]:
            raise ValueError(f"{op}: rows must be within -1 .. N - 1 = {u.shape[1] - 1}, got {least} .. {most}")
    tensors = [u, v, *weights, *biases, w_out, b_out]
    return call("pairwise", op, backend, tensors, options[-1], *operands, *extra, *options, packed)  # type: ignore[no-any-return]


@registered("pairwise_mlp")
def _pairwise_mlp(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    rows: Tensor | None,
    window: int | None,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
    backend: str | None,
) -> Tensor:
    operands = (u, v, list(weights), list(biases), w_out, b_out)
    return _forward(operands, rows, window, (mask, combine, symmetry, activation, precision), backend, None)


@_pairwise_mlp.register_fake
def _(
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    rows: Tensor | None,
    window: int | None,
    *options: Any,
) -> Tensor:
    batch, n, _ = u.shape
    n_rows = n if rows is None else rows.shape[1]
    return u.new_empty((batch, n_rows, n if window is None else 2 * window + 1), dtype=torch.float32)


@registered("pairwise_mlp_backward")
def _pairwise_mlp_backward(
    grad: Tensor,
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    rows: Tensor | None,
    window: int | None,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
    precision: str,
    backend: str | None,
) -> list[Tensor]:
    operands = (u, v, list(weights), list(biases), w_out, b_out)
    op, extra = _layout(rows, window)
    tensors = [u, v, *weights, *biases, w_out, b_out]
    options = (mask, combine, symmetry, activation, precision)
    du, dv, d_weights, d_biases, d_w_out, d_b_out = call(
        "pairwise", f"{op}_backward", backend, tensors, precision, grad, *operands, *extra, *options
    )
    return [du, dv, *d_weights, *d_biases, d_w_out, d_b_out]


@_pairwise_mlp_backward.register_fake
def _(
    grad: Tensor,
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w_out: Tensor,
    b_out: Tensor,
    *options: Any,
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (u, v, *weights, *biases, w_out, b_out)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, v, weights, biases, w_out, b_out, rows, ctx.window, mask, *ctx.options = inputs
    ctx.n_layers = len(weights)
    ctx.save_for_backward(u, v, w_out, b_out, rows, mask, *weights, *biases)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    u, v, w_out, b_out, rows, mask, *layers = ctx.saved_tensors
    n = ctx.n_layers
    du, dv, *d_layers, d_w_out, d_b_out = _pairwise_mlp_backward(
        grad, u, v, layers[:n], layers[n:], w_out, b_out, rows, ctx.window, mask, *ctx.options
    )
    return du, dv, d_layers[:n], d_layers[n:], d_w_out, d_b_out, *(None,) * (3 + len(ctx.options))


_pairwise_mlp.register_autograd(_gradient, setup_context=_setup)
