"""What all pair ops share: the checks of their arguments, and networks packed once for many calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.backends.calls import PairCall, PairNetwork, PairRule
from mdmi_fast.ops._register import in_memory

GivenNetwork = tuple[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor | float]
"""weights, biases, w_out and b_out as a caller gives them."""
GivenRule = tuple[str, str, str, str | None]
"""combine, symmetry, activation and precision, the last None where the operands decide."""

GivenShift = tuple[Tensor | None, Tensor | None]
"""shift and relation as a caller gives them."""

_WHOLE = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)

PRECISIONS = ("fp32", "bf16", "tf32", "fp16")


@dataclass(frozen=True)
class PreparedPairwise:
    """The weights of a pair network, packed once for a backend; made by `prepare_pairwise`."""

    tensors: tuple[Tensor, ...]
    """weights, biases, w_out and, if it is a tensor, b_out."""
    b_out: Tensor | float
    network: PairNetwork
    """The same, b_out a tensor of shape []."""
    versions: tuple[tuple[int, int | None], ...]
    """Of the tensors when they were packed: where their memory was, and how often it had been written."""
    precision: str
    backend: str
    packed: object
    """What the backend made of them."""


def versions_of(tensors: Sequence[Tensor]) -> tuple[tuple[int, int | None], ...]:
    # The address, because `module.half()` and `weight.data = ...` put other memory into the same tensor and leave its
    # version alone. Inference tensors count no versions.
    return tuple((t.data_ptr(), None if t.is_inference() else t._version) for t in tensors)


def network_tensors(network: GivenNetwork) -> tuple[Tensor, ...]:
    weights, biases, w_out, b_out = network
    return (*weights, *biases, w_out, *([b_out] if isinstance(b_out, Tensor) else []))


def check_network(op: str, network: GivenNetwork) -> PairNetwork:
    """Checks a network by itself; b_out becomes a tensor of shape []."""
    weights, biases, w_out, b_out = network
    check.floating(op, "w_out", w_out)
    check.dense_layers(op, weights, biases, None, w_out=w_out)
    n_last = weights[-1].shape[1] if weights else None
    if w_out.ndim != 1 or w_out.shape[0] == 0 or n_last not in (None, w_out.shape[0]):
        expected = "[H1]" if n_last is None else f"[H_last] = ({n_last},)"
        raise ValueError(f"{op}: w_out must be {expected}, got {check.describe(w_out)}")
    if not isinstance(b_out, Tensor):
        bias = check.number(op, "b_out", b_out)
        dtype = torch.float64 if w_out.dtype == torch.float64 else torch.float32
        if math.isfinite(bias) and abs(bias) > torch.finfo(dtype).max:
            raise ValueError(f"{op}: b_out must be a number that {str(dtype)[6:]} can hold, got {check.shown(b_out)}")
        scalar = torch.full((), bias, dtype=dtype, device=w_out.device)
        return PairNetwork(list(weights), list(biases), w_out, scalar)
    check.floating(op, "b_out", b_out)
    if b_out.shape not in ((), (1,)):
        raise ValueError(f"{op}: b_out must be [] or [1], got {check.describe(b_out)}")
    check.same_device(op, w_out=w_out, b_out=b_out)
    return PairNetwork(list(weights), list(biases), w_out, b_out.reshape(()))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same elements of the same memory."""
    if a is b or not (in_memory(a) and in_memory(b)):
        return a is b
    of_a, of_b = ((x.data_ptr(), x.dtype, x.shape, x.stride(), x.is_neg()) for x in (a, b))
    return of_a == of_b


def _check_shift(op: str, given: GivenShift, u: Tensor) -> GivenShift:
    """Checks what is added to scores, but not what a relation holds (see `in_range`), which becomes [B, N, N] or [1, N, N]."""
    shift, relation = given
    if shift is None:
        if relation is not None:
            raise ValueError(f"{op}: relation must come with a shift, got {check.describe(relation)} and no shift")
        return None, None
    check.floating(op, "shift", shift)
    if shift.ndim != 1 or len(shift) == 0:
        raise ValueError(f"{op}: shift must be [R] with R at least 1, got {check.describe(shift)}")
    check.same_device(op, u=u, shift=shift)
    if relation is None:
        return shift, None
    check.dense(op, "relation", relation)
    if relation.dtype not in _WHOLE:
        raise TypeError(f"{op}: relation must be of integers, got {check.describe(relation)}")
    square = (u.shape[-2], u.shape[-2])
    if tuple(relation.shape) not in (square, (*u.shape[:-2], *square)):
        raise ValueError(
            f"{op}: relation must be [N, N] or [..., N, N] with [..., N] = {tuple(u.shape[:-1])}, "
            f"got {check.describe(relation)}"
        )
    check.same_device(op, u=u, relation=relation)
    return shift, check.one_batch(relation, 2)


def in_range(op: str, call: PairCall) -> PairCall:
    """The call as backends take it: its relation int32, contiguous, and within 0 .. R - 1.

    Raises:
        ValueError: on a CPU, where it is not; elsewhere that would stop the queue, and the nearest is taken.
    """
    shift, relation = call.shift, call.relation
    if shift is None or relation is None:
        return call
    if relation.device.type != "cpu":
        relation = relation.clamp(0, len(shift) - 1)
    elif relation.numel():
        least, most = (int(x) for x in relation.aminmax())
        if least < 0 or most >= len(shift):
            raise ValueError(f"{op}: relation must be within 0 .. R - 1 = {len(shift) - 1}, got {least} .. {most}")
    return call._replace(relation=relation.to(torch.int32).contiguous())


def _check_prepared(op: str, prepared: PreparedPairwise, network: GivenNetwork, *operands: Tensor | None) -> None:
    """Raises ValueError unless the weights, checked then, are as they were packed, and nothing wants a gradient."""
    if not isinstance(prepared, PreparedPairwise):
        raise TypeError(f"{op}: prepared must be made by prepare_pairwise, got {type(prepared).__name__}")
    weights, biases, _, b_out = network
    check.sequences(op, weights=weights, biases=biases)
    tensors = network_tensors(network)
    same = len(weights) == len(biases) and len(tensors) == len(prepared.tensors)
    same = same and all(map(_same, tensors, prepared.tensors))
    if not same or (not isinstance(b_out, Tensor) and b_out != prepared.b_out):
        raise ValueError(f"{op}: prepared must be made of the weights passed with it, got it made of others")
    if prepared.versions != versions_of(prepared.tensors):
        raise ValueError(f"{op}: prepared must be made again after the weights change, got it from before")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*operands, *tensors)):
        raise ValueError(f"{op}: prepared is for inference: call under torch.no_grad() or detach the operands")


def check_pairs(
    op: str,
    halves: tuple[Tensor, Tensor],
    network: GivenNetwork,
    rule: GivenRule,
    shift: GivenShift,
    mask: Tensor | None,
    prepared: PreparedPairwise | None,
    backend: str | None,
) -> tuple[PairCall, str | None]:
    """Checks what all pair ops share and flattens the batch: the call, and the backend that it names."""
    (u, v), (combine, symmetry, activation, precision) = halves, rule
    check.rows_of(op, "u", u, "[..., N, H1]", 2)
    check.floating(op, "v", v)
    check.shape(op, "v", v, u.shape, "[..., N, H1] like u")
    if prepared is None:
        checked = check_network(op, network)
    else:
        _check_prepared(op, prepared, network, u, v, shift[0])
        checked = prepared.network
    weights, w_out = checked.weights, checked.w_out
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
    call = PairCall(
        check.one_batch(u, 2),
        check.one_batch(v, 2),
        checked,
        PairRule(combine, symmetry, activation, precision),
        mask,
        None,
        None,
        *_check_shift(op, shift, u),
        packed=None if prepared is None else prepared.packed,
    )
    return call, backend
