"""A small network on pairs of positions: the layouts, masks and symmetries around the kernels.

Networks of up to two dense layers are scored by `_pairwise_forward`, those of up to one are differentiated by
`_pairwise_backward`; deeper ones are taken layer by layer by `_pairwise_deep`.
"""

import torch
from torch import Tensor

from mdmi_fast.backends.triton import _pairwise_backward as backward
from mdmi_fast.backends.triton import _pairwise_deep as deep
from mdmi_fast.backends.triton import _pairwise_forward as forward
from mdmi_fast.backends.triton._pairwise_forward import Network, halves_of, masked_positions, prepare_pairwise

Gradients = tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor, Tensor]


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


def _kept(mask: Tensor | None, batch: int, own: Tensor, other: Tensor, n: int) -> Tensor:
    """Where a pair is scored [B, ...]."""
    keep = (own != other) & (own >= 0) & (other >= 0) & (other < n)
    if mask is None:
        return keep.expand(batch, *keep.shape[-2:])
    masked = torch.nn.functional.pad(mask, (0, 1))
    b = torch.arange(batch, device=mask.device).view(-1, 1, 1)
    return keep & masked[b, own.clamp(-1, n)] & masked[b, other.clamp(-1, n)]


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


def _scores(
    u: Tensor,
    v: Tensor,
    network: Network,
    rows: Tensor | None,
    window: int | None,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
) -> Tensor:
    batch, n, _ = u.shape
    shape = (batch, n if rows is None else rows.shape[1], n if window is None else 2 * window + 1)
    if 0 in shape or window == 0:
        return torch.zeros(shape, dtype=torch.float32, device=u.device)
    if len(network.weights) > forward.MOST_LAYERS:
        return _deep_scores(u, v, network, rows, window, mask, combine, symmetry, activation)
    scored = None if rows is None else _masked_rows(rows, mask)
    return forward.score(halves_of(u, v), network, scored, window, mask, combine, symmetry, activation)


def _deep_scores(
    u: Tensor,
    v: Tensor,
    network: Network,
    rows: Tensor | None,
    window: int | None,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
) -> Tensor:
    """What `forward.score` gives, of a deeper network."""
    halves = halves_of(u, v)
    u, v = _cleared(halves.u, mask), _cleared(halves.v, mask)
    own, other = _ends(u.shape[1], rows, window, u.device)
    keep = _kept(mask, u.shape[0], own, other, u.shape[1])

    def directed(x: Tensor, y: Tensor, where: Tensor) -> Tensor:
        f = deep.score(network, x, y, where, window, combine)
        return torch.where(where, torch.nn.functional.softplus(f), 0.0) if activation == "softplus" else f

    if halves.same:  # f_ij = f_ji: half of the pairs do where both are asked for
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
        return (directed(x, v, keep) + directed(y, u, keep)) / 2
    return directed(x, v, keep & (own < other)) + directed(y, u, keep & (own > other))


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
    prepared: Network | None = None,
) -> Tensor:
    network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
    return _scores(u, v, network, None, None, mask, combine, symmetry, activation)


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
    prepared: Network | None = None,
) -> Tensor:
    network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
    return _scores(u, v, network, rows, None, mask, combine, symmetry, activation)


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
    prepared: Network | None = None,
) -> Tensor:
    network = prepared or prepare_pairwise(weights, biases, w_out, b_out, precision)
    return _scores(u, v, network, None, window, mask, combine, symmetry, activation)


# --- gradients


def _through_activation(
    e: Tensor,
    u: Tensor,
    v: Tensor,
    network: Network,
    rows: Tensor | None,
    window: int | None,
    mask: Tensor | None,
    combine: str,
    activation: str,
) -> Tensor:
    """e, times the slope of the activation at f."""
    if activation == "softplus":
        e = e * _scores(u, v, network, rows, window, mask, combine, "none", "identity").sigmoid()
    return e.contiguous()


def _in_units(e: Tensor) -> tuple[Tensor, Tensor]:
    """e in units of its largest, and that. Gradients are linear in e, and those of a mean over pairs vanish in float16."""
    size = e.abs().amax()
    size = torch.where((size > 0) & size.isfinite(), size, 1.0)
    return e / size, size


def _directed(
    network: Network,
    u: Tensor,
    v: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    e: Tensor,
    window: int | None,
    combine: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of u, of v, and of weights, biases, w_out and b_out in turn, from e at f_ij of u_i and v_j.

    left and right are the lists of the masked positions or None for all.
    """
    halves = halves_of(u, v)
    unit, size = _in_units(e) if network.operand == torch.float16 else (e, None)
    if len(network.weights) > backward.MOST_LAYERS:
        du, dv, d_network = deep.gradients(network, halves.u, halves.v, unit, window, combine)
    else:
        sides = backward.Side(halves.u, left), backward.Side(halves.v, right)
        du, dv, d_network = backward.gradients(network, *sides, unit, window, combine)
    if size is not None:
        du, dv, d_network = du * size, dv * size, [g * size for g in d_network]
    return du, dv, [*d_network, e.sum()]


def _finish(du: Tensor, dv: Tensor, d_network: list[Tensor], u: Tensor, v: Tensor, like: list[Tensor]) -> Gradients:
    """In the dtypes of the operands; like: the weights, biases, w_out and b_out."""
    *layers, d_w_out, d_b_out = (g.to(t.dtype) for g, t in zip(d_network, like, strict=True))
    n_layers = len(layers) // 2
    return du.to(u.dtype), dv.to(v.dtype), layers[:n_layers], layers[n_layers:], d_w_out, d_b_out


def _zeros(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in tensors]


def _square_backward(
    grad: Tensor,
    u: Tensor,
    v: Tensor,
    network: Network,
    like: list[Tensor],
    window: int | None,
    mask: Tensor | None,
    combine: str,
    symmetry: str,
    activation: str,
) -> Gradients:
    """Of all pairs, or of a band."""
    batch, n, _ = u.shape
    if not grad.numel() or window == 0:
        return _finish(*_zeros([u, v]), _zeros(like), u, v, like)
    own, other = _ends(n, None, window, u.device)
    if symmetry == "mean":
        grad = (grad + _transposed(grad, window)) / 2
    elif symmetry == "upper":
        grad = torch.where(own < other, grad + _transposed(grad, window), 0.0)
    e = torch.where(_kept(mask, batch, own, other, n), grad, 0.0)
    e = _through_activation(e, u, v, network, None, window, mask, combine, activation)
    positions = masked_positions(mask)
    x, y = _cleared(u, mask), _cleared(v, mask)
    return _finish(*_directed(network, x, y, positions, positions, e, window, combine), u, v, like)


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
) -> Gradients:
    network = prepare_pairwise(weights, biases, w_out, b_out, precision)
    like = [*weights, *biases, w_out, b_out]
    return _square_backward(grad, u, v, network, like, None, mask, combine, symmetry, activation)


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
) -> Gradients:
    network = prepare_pairwise(weights, biases, w_out, b_out, precision)
    like = [*weights, *biases, w_out, b_out]
    return _square_backward(grad, u, v, network, like, window, mask, combine, symmetry, activation)


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
) -> Gradients:
    network = prepare_pairwise(weights, biases, w_out, b_out, precision)
    like = [*weights, *biases, w_out, b_out]
    (du, dv), d_network = _zeros([u, v]), _zeros(like)
    batch, n, _ = u.shape
    if not grad.numel():
        return _finish(du, dv, d_network, u, v, like)
    own, other = _ends(n, rows, None, u.device)
    grad = torch.where(_kept(mask, batch, own, other, n), grad, 0.0)
    # f of (row, j), and f of (j, row)
    shares = {
        "none": (grad, None),
        "mean": (grad / 2, grad / 2),
        "upper": (torch.where(own < other, grad, 0.0), torch.where(own > other, grad, 0.0)),
    }[symmetry]
    positions = masked_positions(mask)
    scored = (_masked_rows(rows, mask) >= 0).unsqueeze(2)
    places = (torch.arange(batch, device=u.device).unsqueeze(1), rows.clamp_min(0))
    for e, x, y, dx, dy in ((shares[0], u, v, du, dv), (shares[1], v, u, dv, du)):
        if e is not None:
            e = _through_activation(e, x, y, network, rows, None, mask, combine, activation)
            # a row that is not scored may hold NaN; its gradient is 0, and so must it be
            x_rows = torch.where(scored, _rows_of(x, rows), 0.0)
            d_rows, d_all, parts = _directed(network, x_rows, _cleared(y, mask), None, positions, e, None, combine)
            dx.index_put_(places, d_rows, accumulate=True)
            dy += d_all
            d_network = [a + b for a, b in zip(d_network, parts, strict=True)]
    return _finish(du, dv, d_network, u, v, like)
