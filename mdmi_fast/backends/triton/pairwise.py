"""A small network on pairs of positions: the layouts, masks and symmetries around the kernels.

Networks of up to two dense layers are scored by `_pairwise_forward`, those of up to one are differentiated by
`_pairwise_backward`; deeper ones are taken layer by layer by `_pairwise_deep`.
"""

import torch
from torch import Tensor

from mdmi_fast.backends.calls import PairCall, PairGradients, PairNetwork
from mdmi_fast.backends.triton import _pairwise_backward as backward
from mdmi_fast.backends.triton import _pairwise_deep as deep
from mdmi_fast.backends.triton import _pairwise_forward as forward
from mdmi_fast.backends.triton._pairwise_network import MOST_LAYERS, Network, halves_of, prepare_pairwise
from mdmi_fast.backends.triton._pairwise_positions import masked_positions


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    return ["scores pairs in float32, got float64"] if any(x.dtype == torch.float64 for x in tensors) else []


# --- which pairs a layout holds: rows [B, R], a window, or neither for all pairs


def _ends(n: int, rows: Tensor | None, window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions i and j of the places of a layout, that broadcast to its shape; some are outside 0 .. n - 1."""
    every = torch.arange(n, device=device)
    if rows is not None:
        return rows.unsqueeze(2), every
    own = every.unsqueeze(1)
    return own, every if window is None else own + torch.arange(-window, window + 1, device=device)


def _kept(call: PairCall, own: Tensor, other: Tensor) -> Tensor:
    """Where a pair is scored [B, ...]."""
    mask, (batch, n, _) = call.mask, call.u.shape
    keep = (own != other) & (own >= 0) & (other >= 0) & (other < n)
    if mask is None:
        return keep.expand(batch, *keep.shape[-2:])
    masked = torch.nn.functional.pad(mask, (0, 1))
    b = torch.arange(batch, device=mask.device).view(-1, 1, 1)
    return keep & masked[b, own.clamp(-1, n)] & masked[b, other.clamp(-1, n)]


def _relation(call: PairCall, own: Tensor, other: Tensor) -> Tensor:
    """Of the pairs of a layout [B or 1, ...], anything where there is none."""
    n = call.u.shape[1]
    own, other = own.clamp(0, n - 1), other.clamp(0, n - 1)
    if call.relation is None:
        return call.relation_of(0, own, other)
    b = torch.arange(len(call.relation), device=own.device).view(-1, 1, 1)
    return call.relation[b, own, other].long()


def _shift_gradient(call: PairCall, own: Tensor, other: Tensor, e: Tensor) -> Tensor | None:
    """[R] float32, from e at the pairs of a layout: the sums over each relation, without atomics."""
    if call.shift is None:
        return None
    relation = _relation(call, own, other)
    return torch.stack([torch.where(relation == r, e, 0.0).sum() for r in range(len(call.shift))])


def _transposed(x: Tensor, window: int | None) -> Tensor:
    """x at (j, i) for every (i, j) of all pairs or of a band; anything at places outside the sequence."""
    if window is None:
        return x.mT
    n = x.shape[1]
    own, other = _ends(n, None, window, x.device)
    return x[:, other.clamp(0, n - 1), window + own - other]


def _masked_rows(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Rows as int32, those at unmasked positions -1."""
    if mask is not None and mask.shape[1]:
        rows = torch.where(mask.gather(1, rows.clamp_min(0)), rows, -1)
    return rows.to(torch.int32).contiguous()


def _cleared(x: Tensor, mask: Tensor | None) -> Tensor:
    """0 at unmasked positions, where NaN may be."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(2), 0)


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, R, H] at rows, anything where they are -1."""
    return x.gather(1, rows.clamp_min(0).unsqueeze(2).expand(-1, -1, x.shape[2]))


# --- scores


def _network(call: PairCall) -> Network:
    return call.packed or prepare_pairwise(call.network, call.rule.precision)


def pairwise_mlp(call: PairCall) -> Tensor:
    if 0 in call.shape or call.window == 0:
        return torch.zeros(call.shape, dtype=torch.float32, device=call.u.device)
    network = _network(call)
    if len(network.weights) > MOST_LAYERS:
        return _deep_scores(call, network)
    if call.rows is not None:
        call = call._replace(rows=_masked_rows(call.rows, call.mask))
    return forward.score(call, network)


def _deep_scores(call: PairCall, network: Network) -> Tensor:
    """What `forward.score` gives, of a deeper network."""
    rows, window, mask, (combine, symmetry, activation, _) = call.rows, call.window, call.mask, call.rule
    halves = halves_of(call)
    u, v = _cleared(halves.u, mask), _cleared(halves.v, mask)
    own, other = _ends(u.shape[1], rows, window, u.device)
    keep = _kept(call, own, other)

    def directed(x: Tensor, y: Tensor, where: Tensor, *, back: bool = False) -> Tensor:
        f = deep.score(network, x, y, where, window, combine)
        if call.shift is not None:
            ends = (other, own) if back else (own, other)
            f = torch.where(where, f + call.shift.float()[_relation(call, *ends)], 0.0)
        return torch.where(where, torch.nn.functional.softplus(f), 0.0) if activation == "softplus" else f

    if call.is_symmetric:  # f_ij = f_ji: half of the pairs do where both are asked for
        symmetry = "upper" if rows is None else "none"
    if rows is None:
        if symmetry == "none":
            return directed(u, v, keep)
        if symmetry == "mean":
            f = directed(u, v, keep) / 2
        else:
            f = directed(u, v, keep & (own < other))
        return torch.where(keep, f + _transposed(f, window), 0.0)
    x, y = _rows_of(u, rows), _rows_of(v, rows)
    if symmetry == "none":
        return directed(x, v, keep)
    if symmetry == "mean":
        return (directed(x, v, keep) + directed(y, u, keep, back=True)) / 2
    return directed(x, v, keep & (own < other)) + directed(y, u, keep & (own > other), back=True)


# --- gradients


def _through_activation(e: Tensor, call: PairCall) -> Tensor:
    """e, times the slope of the activation at f_ij of u_i and v_j."""
    if call.rule.activation == "softplus":
        rule = call.rule._replace(symmetry="none", activation="identity")
        e = e * pairwise_mlp(call._replace(rule=rule)).sigmoid()
    return e.contiguous()


def _in_units(e: Tensor) -> tuple[Tensor, Tensor]:
    """e in units of its largest, and that. Gradients are linear in e, and those of a mean over pairs vanish in float16."""
    size = e.abs().amax()
    size = torch.where((size > 0) & size.isfinite(), size, 1.0)
    return e / size, size


def _directed(
    call: PairCall, network: Network, left: Tensor | None, right: Tensor | None, e: Tensor
) -> tuple[Tensor, Tensor, PairNetwork]:
    """Gradients of u, of v and of the network, from e at f_ij of u_i and v_j, unmasked ones cleared.

    left and right are the lists of the masked positions or None for all.
    """
    halves, window, combine = halves_of(call), call.window, call.rule.combine
    unit, size = _in_units(e) if network.operand == torch.float16 else (e, None)
    if len(network.weights) > backward.MOST_LAYERS:
        du, dv, d_network = deep.gradients(network, halves.u, halves.v, unit, window, combine)
    else:
        sides = backward.Side(halves.u, left), backward.Side(halves.v, right)
        du, dv, d_network = backward.gradients(network, *sides, unit, window, combine)
    if size is None:
        return du, dv, d_network
    weights, biases, d_w_out, _ = d_network
    d_network = PairNetwork([w * size for w in weights], [b * size for b in biases], d_w_out * size, e.sum())
    return du * size, dv * size, d_network


def _no_gradients(call: PairCall) -> PairGradients:
    def zeros(t: Tensor) -> Tensor:
        return torch.zeros(t.shape, dtype=torch.float32, device=t.device)

    weights, biases, w_out, b_out = call.network
    network = PairNetwork([zeros(w) for w in weights], [zeros(b) for b in biases], zeros(w_out), zeros(b_out))
    return PairGradients(zeros(call.u), zeros(call.v), network, None if call.shift is None else zeros(call.shift))


def pairwise_mlp_backward(grad: Tensor, call: PairCall) -> PairGradients:
    if not grad.numel() or call.window == 0:
        return _no_gradients(call).like(call)
    network = prepare_pairwise(call.network, call.rule.precision)
    gradients = _square_backward if call.rows is None else _rows_backward
    return gradients(grad, call, network).like(call)


def _square_backward(grad: Tensor, call: PairCall, network: Network) -> PairGradients:
    """Of all pairs, or of a band."""
    mask, window, symmetry = call.mask, call.window, call.rule.symmetry
    own, other = _ends(call.u.shape[1], None, window, grad.device)
    if symmetry == "mean":
        grad = (grad + _transposed(grad, window)) / 2
    elif symmetry == "upper":
        grad = torch.where(own < other, grad + _transposed(grad, window), 0.0)
    e = _through_activation(torch.where(_kept(call, own, other), grad, 0.0), call)
    positions = masked_positions(mask)
    cleared = call._replace(u=_cleared(call.u, mask), v=_cleared(call.v, mask))
    d_shift = _shift_gradient(call, own, other, e)
    return PairGradients(*_directed(cleared, network, positions, positions, e), d_shift)


def _rows_backward(grad: Tensor, call: PairCall, network: Network) -> PairGradients:
    u, mask, rows = call.u, call.mask, call.rows
    du, dv, d_network, d_shift = _no_gradients(call)
    own, other = _ends(u.shape[1], rows, None, u.device)
    grad = torch.where(_kept(call, own, other), grad, 0.0)
    # f of (row, j), and f of (j, row)
    shares = {
        "none": (grad, None),
        "mean": (grad / 2, grad / 2),
        "upper": (torch.where(own < other, grad, 0.0), torch.where(own > other, grad, 0.0)),
    }[call.rule.symmetry]
    positions = masked_positions(mask)
    scored = (_masked_rows(rows, mask) >= 0).unsqueeze(2)
    places = (torch.arange(u.shape[0], device=u.device).unsqueeze(1), rows.clamp_min(0))
    for e, here, dx, dy in ((shares[0], call, du, dv), (shares[1], call.turned, dv, du)):
        if e is not None:
            e = _through_activation(e, here)
            if d_shift is not None:
                d_shift += _shift_gradient(here, own, other, e)
            # a row that is not scored may hold NaN; its gradient is 0, and so must it be
            x_rows = torch.where(scored, _rows_of(here.u, rows), 0.0)
            side = here._replace(u=x_rows, v=_cleared(here.v, mask), rows=None)
            d_rows, d_all, parts = _directed(side, network, None, positions, e)
            dx.index_put_(places, d_rows, accumulate=True)
            dy += d_all
            for sum_, part in zip(d_network.tensors, parts.tensors, strict=True):
                sum_ += part
    return PairGradients(du, dv, d_network, d_shift)
