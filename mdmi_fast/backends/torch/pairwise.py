"""A small network on pairs of positions, a tile of pairs at a time; the backward pass recomputes what it needs.

A layout (all pairs, some rows, a band) says which pairs to score and where their scores go. Masked positions are
gathered on a CPU, so that padding costs nothing and changes nothing; on a GPU counting them would stop the queue, so
all positions are scored and the unmasked ones cleared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mdmi_fast.backends.calls import PairCall, PairGradients, PairNetwork
from mdmi_fast.backends.torch._tiles import compute_dtype, tile_rows


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    return [] if precision in (None, "fp32", "bf16") else [f"has the precisions fp32 and bf16, not {precision}"]


class _Tile(NamedTuple):
    """Pairs (i[p], j[p]), indices into the gathered positions, and the flat places [P] of the result their scores go to."""

    i: Tensor
    j: Tensor
    places: tuple[Tensor, ...]


class _Layout(Protocol):
    @property
    def shape(self) -> tuple[int, int]:
        """Of the result of one sequence."""

    def keep(self, b: int, masked: Tensor) -> Tensor:
        """Places of sequence b that hold a score, bool of that shape; the others are 0."""

    def tiles(self, b: int, positions: Tensor, symmetric: bool, n_pairs: int) -> Iterator[_Tile]:
        """Tiles of about n_pairs that cover every place to keep; f_ij = f_ji if symmetric."""


def _grid(n_rows: int, n_columns: int, n_pairs: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """All (row, column) in tiles of n_pairs."""
    for start in range(0, n_rows * n_columns, n_pairs):
        flat = torch.arange(start, min(start + n_pairs, n_rows * n_columns), device=device)
        yield flat // n_columns, flat % n_columns


def _triangle(n: int, n_pairs: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """All i < j < n in tiles of at most n_pairs."""
    start = 0
    while start < n - 1:
        n_rows = max(1, n_pairs // (n - start))
        pairs = torch.triu_indices(n_rows, n - start, 1, device=device) + start
        for part in torch.split(pairs, n_pairs, 1):
            yield part[0], part[1]
        start += n_rows


class _Full:
    def __init__(self, n: int) -> None:
        self.n = n
        self.shape = (n, n)

    def keep(self, b: int, masked: Tensor) -> Tensor:
        return (masked.unsqueeze(1) & masked).fill_diagonal_(False)

    def tiles(self, b: int, positions: Tensor, symmetric: bool, n_pairs: int) -> Iterator[_Tile]:
        n = len(positions)
        pairs = _triangle(n, n_pairs, positions.device) if symmetric else _grid(n, n, n_pairs, positions.device)
        for i, j in pairs:
            row, column = positions[i], positions[j]
            places = (row * self.n + column, column * self.n + row) if symmetric else (row * self.n + column,)
            yield _Tile(i, j, places)


class _Rows:
    def __init__(self, n: int, rows: Tensor) -> None:
        self.n, self.rows = n, rows
        self.shape = (rows.shape[1], n)

    def keep(self, b: int, masked: Tensor) -> Tensor:
        rows = self.rows[b].unsqueeze(1)
        if not self.n:
            return masked.expand(self.shape)
        own = (rows >= 0) & masked[rows.clamp_min(0)]
        return own & masked & (rows != torch.arange(self.n, device=rows.device))

    def tiles(self, b: int, positions: Tensor, symmetric: bool, n_pairs: int) -> Iterator[_Tile]:
        rows = self.rows[b]
        slots = torch.arange(len(rows), device=rows.device)
        if rows.device.type == "cpu":
            slots = torch.isin(rows, positions).nonzero().squeeze(1)
        index = torch.searchsorted(positions, rows.clamp_min(0)[slots])
        for a, j in _grid(len(slots), len(positions), n_pairs, rows.device):
            yield _Tile(index[a], j, (slots[a] * self.n + positions[j],))


class _Band:
    def __init__(self, n: int, window: int) -> None:
        self.n, self.window = n, window
        # rows of room below: a place that mirrors one across the end is written there
        self.shape = (n + window, 2 * window + 1)

    def keep(self, b: int, masked: Tensor) -> Tensor:
        offsets = torch.arange(-self.window, self.window + 1, device=masked.device)
        columns = torch.arange(self.shape[0], device=masked.device).unsqueeze(1) + offsets
        inside = torch.nn.functional.pad(masked, (self.window, 2 * self.window))
        return inside[self.window :][: self.shape[0], None] & inside[columns + self.window] & (offsets != 0)

    def tiles(self, b: int, positions: Tensor, symmetric: bool, n_pairs: int) -> Iterator[_Tile]:
        n = len(positions)
        n_offsets = self.window if symmetric else 2 * self.window + 1
        first = 1 if symmetric else -self.window
        for i, offset in _grid(n, n_offsets, n_pairs, positions.device):
            j = i + offset + first
            if positions.device.type == "cpu":
                near = (j >= 0) & (j < n)
                near &= (positions[j.clamp(0, n - 1)] - positions[i]).abs() <= self.window
                i, j = i[near], j[near]
                row, column = positions[i], positions[j]
            else:
                row, column = i, j
                j = j.clamp(0, n - 1)
            place = row * self.shape[1] + self.window + column - row
            mirrored = column * self.shape[1] + self.window + row - column
            yield _Tile(i, j, (place, mirrored) if symmetric else (place,))


class _Sequence(NamedTuple):
    """The positions to score of one sequence: the halves u and v [n, H1], and which sequence and positions [n] they are."""

    u: Tensor
    v: Tensor
    b: int
    positions: Tensor


class _Network:
    """The network of a call, in the dtype that sums are made in."""

    def __init__(self, call: PairCall) -> None:
        weights, biases, w_out, b_out = call.network
        self.combine, self.symmetry, self.activation, precision = call.rule
        self.dtype, self.bf16 = compute_dtype(*call.tensors), precision == "bf16"
        # contiguous, because the order of the sums in a product follows the layout
        self.weights = [self._rounded(w.to(self.dtype)).contiguous() for w in weights]
        self.biases = [b.to(self.dtype).contiguous() for b in biases]
        self.w_out, self.b_out = w_out.to(self.dtype).contiguous(), b_out.to(self.dtype)
        self.n_pairs = tile_rows(max([call.u.shape[-1], *(w.shape[1] for w in weights)]), call.u.device)
        self.is_symmetric = call.is_symmetric
        self.call, self.shift = call, None if call.shift is None else call.shift.to(self.dtype)

    def _rounded(self, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype) if self.bf16 else x

    def _relation(self, of: _Sequence, i: Tensor, j: Tensor) -> Tensor:
        return self.call.relation_of(of.b, of.positions[i], of.positions[j])

    def _layers(self, of: _Sequence, i: Tensor, j: Tensor) -> list[Tensor]:
        """Activations [P, H] of every layer, the combined halves first, and f before its activation [P] at last."""
        left, right = of.u[i], of.v[j]
        activations = [(left + right).relu_() if self.combine == "add" else left * right]
        for weight, bias in zip(self.weights, self.biases, strict=True):
            activations.append(torch.addmm(bias, self._rounded(activations[-1]), weight).relu_())
        f = torch.mv(activations[-1], self.w_out) + self.b_out
        return [*activations, f if self.shift is None else f + self.shift[self._relation(of, i, j)]]

    def _directed(self, of: _Sequence, i: Tensor, j: Tensor) -> Tensor:
        f = self._layers(of, i, j)[-1]
        return torch.nn.functional.softplus(f) if self.activation == "softplus" else f

    def score(self, of: _Sequence, i: Tensor, j: Tensor) -> Tensor:
        """Symmetrised scores [P] of pairs of a sequence's rows."""
        if self.symmetry == "upper":
            i, j = torch.minimum(i, j), torch.maximum(i, j)
        f = self._directed(of, i, j)
        if self.symmetry == "mean" and not self.is_symmetric:
            f = (f + self._directed(of, j, i)) / 2
        return f

    def no_gradients(self) -> tuple[PairNetwork, Tensor | None]:
        """Sums that `add_gradients` adds to, of the network and of the shift."""
        network = PairNetwork(
            [torch.zeros_like(w) for w in self.weights],
            [torch.zeros_like(b) for b in self.biases],
            torch.zeros_like(self.w_out),
            torch.zeros_like(self.b_out),
        )
        return network, None if self.shift is None else torch.zeros_like(self.shift)

    def add_gradients(self, of: _Sequence, i: Tensor, j: Tensor, grad: Tensor, sums: PairGradients) -> None:
        """Adds the gradients of the symmetrised scores times grad [P], those of u and v [n, H1] among them."""
        if self.symmetry == "upper":
            i, j = torch.minimum(i, j), torch.maximum(i, j)
        if self.symmetry == "mean":
            grad = grad / 2
            self._add_directed(of, j, i, grad, sums)
        self._add_directed(of, i, j, grad, sums)

    def _add_directed(self, of: _Sequence, i: Tensor, j: Tensor, grad: Tensor, sums: PairGradients) -> None:
        *activations, f = self._layers(of, i, j)
        if self.activation == "softplus":
            grad = grad * f.sigmoid()
        du, dv, network, d_shift = sums
        if d_shift is not None:
            d_shift.index_add_(0, self._relation(of, i, j), grad)
        network.b_out.add_(grad.sum())
        network.w_out.add_(torch.mv(activations[-1].T, grad))
        dz = torch.outer(grad, self.w_out)
        for k in reversed(range(len(self.weights))):
            dz.masked_fill_(activations[k + 1] <= 0, 0.0)
            network.biases[k].add_(dz.sum(0))
            network.weights[k].addmm_(self._rounded(activations[k]).T, dz)
            dz = dz @ self.weights[k].T
        if self.combine == "add":
            dz.masked_fill_(activations[0] <= 0, 0.0)
            du.index_add_(0, i, dz)
            dv.index_add_(0, j, dz)
        else:
            du.index_add_(0, i, dz * of.v[j])
            dv.index_add_(0, j, dz * of.u[i])


def _sequence(x: Tensor, masked: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [n, H1] of one sequence at the positions to score, unmasked ones cleared."""
    x = x.to(dtype)
    return x[positions].contiguous() if x.device.type == "cpu" else x.masked_fill(~masked.unsqueeze(1), 0.0)


def _positions(masked: Tensor) -> Tensor:
    if masked.device.type == "cpu":
        return masked.nonzero().squeeze(1)
    return torch.arange(len(masked), device=masked.device)


def _all_masked(mask: Tensor | None, u: Tensor) -> Tensor:
    return torch.ones(u.shape[:2], dtype=torch.bool, device=u.device) if mask is None else mask


def _layout(call: PairCall) -> _Layout:
    n = call.u.shape[1]
    if call.rows is not None:
        return _Rows(n, call.rows)
    return _Full(n) if call.window is None else _Band(n, call.window)


def _forward(network: _Network, layout: _Layout, call: PairCall) -> Tensor:
    u, v = call.u, call.v
    result = torch.zeros((u.shape[0], *layout.shape), dtype=torch.float32, device=u.device)
    symmetric = network.symmetry != "none" or network.is_symmetric
    for b, masked in enumerate(_all_masked(call.mask, u).unbind(0)):
        positions = _positions(masked)
        left, right = (_sequence(x[b], masked, positions, network.dtype) for x in (u, v))
        sequence = _Sequence(left, right, b, positions)
        out = result[b].view(-1)
        for i, j, places in layout.tiles(b, positions, symmetric, network.n_pairs):
            scores = network.score(sequence, i, j).to(torch.float32)
            for place in places:
                out[place] = scores
        result[b].masked_fill_(~layout.keep(b, masked), 0.0)
    return result


def _backward(network: _Network, layout: _Layout, grad: Tensor, call: PairCall) -> PairGradients:
    u, v = call.u, call.v
    du, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (u, v))
    d_network, d_shift = network.no_gradients()
    for b, masked in enumerate(_all_masked(call.mask, u).unbind(0)):
        positions = _positions(masked)
        left, right = (_sequence(x[b], masked, positions, network.dtype) for x in (u, v))
        sequence = _Sequence(left, right, b, positions)
        sums = PairGradients(torch.zeros_like(sequence.u), torch.zeros_like(sequence.v), d_network, d_shift)
        g = grad[b].masked_fill(~layout.keep(b, masked), 0.0).to(network.dtype).reshape(-1)
        for i, j, places in layout.tiles(b, positions, network.symmetry != "none", network.n_pairs):
            g_pairs = g[places[0]] if len(places) == 1 else g[places[0]] + g[places[1]]
            network.add_gradients(sequence, i, j, g_pairs, sums)
        du[b, positions] = sums.u.to(u.dtype)
        dv[b, positions] = sums.v.to(v.dtype)
    return PairGradients(du, dv, d_network, d_shift).like(call)


def pairwise_mlp(call: PairCall) -> Tensor:
    scores = _forward(_Network(call), _layout(call), call)
    return scores if call.window is None else scores[:, : call.u.shape[1]].contiguous()


def pairwise_mlp_backward(grad: Tensor, call: PairCall) -> PairGradients:
    if call.window is not None:
        grad = torch.nn.functional.pad(grad, (0, 0, 0, call.window))
    return _backward(_Network(call), _layout(call), grad, call)
