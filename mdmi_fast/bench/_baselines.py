"""Pair networks in plain PyTorch, three ways, as a careful user would write them; fp32, no symmetry, no mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import ops, reference
from mdmi_fast.bench.measure import Unavailable


@dataclass(frozen=True)
class Network:
    """Hidden states [B, N, D] and a network on their pairs: two halves of the first layer, then dense layers.

    Attributes:
        hidden: [B, N, D].
        w_u, w_v, b_u: the first layer, split.
        u, v: [B, N, H1], what it makes of the hidden states.
        weights, biases, w_out, b_out: as in `ops.pairwise_mlp`.
        rows: how many rows of the pair matrix the PyTorch ways compute, the first ones.
        prepared: the head packed before, or None to pack it in every call.
    """

    hidden: Tensor
    w_u: Tensor
    w_v: Tensor
    b_u: Tensor
    u: Tensor
    v: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    w_out: Tensor
    b_out: Tensor
    rows: int
    prepared: ops.PreparedPairwise | None = None

    @property
    def head(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        return self.weights, self.biases, self.w_out, self.b_out

    def halves(self) -> tuple[Tensor, Tensor]:
        """The first layer, one product a half."""
        flat = self.hidden.flatten(0, 1)
        return torch.addmm(self.b_u, flat, self.w_u).view_as(self.u), torch.mm(flat, self.w_v).view_as(self.v)


def network(batch: int, n: int, d: int, layers: tuple[int, ...], *, rows: int | None = None) -> Network:
    """Random numbers in the range of a trained network's."""
    generator = torch.Generator().manual_seed(batch * 1_000_003 + n * 1009 + d)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    first, *widths = layers
    hidden, w_u, w_v = random(batch, n, d), random(d, first, scale=d**-0.5), random(d, first, scale=d**-0.5)
    b_u, sizes = random(first, scale=0.1), [first, *widths]
    return Network(
        hidden,
        w_u,
        w_v,
        b_u,
        hidden @ w_u + b_u,
        hidden @ w_v,
        [random(a, b, scale=(2 / a) ** 0.5) for a, b in zip(sizes, widths, strict=False)],
        [random(b, scale=0.1) for b in widths],
        random(sizes[-1], scale=sizes[-1] ** -0.5),
        random(scale=0.1),
        n if rows is None else rows,
    )


def dense(z: Tensor, net: Network) -> Tensor:
    """The layers behind the first one, on rows of pairs [R, H1], which are overwritten."""
    for weight, bias in zip(net.weights, net.biases, strict=True):
        z = torch.addmm(bias, z, weight).relu_()
    return torch.addmv(net.b_out.expand(len(z)), z, net.w_out)


def fused(net: Network) -> Tensor:
    u, v = net.halves()
    return ops.pairwise_mlp(u, v, *net.head, symmetry="none", prepared=net.prepared)


def concatenated(net: Network) -> Tensor:
    """Both hidden states side by side for every pair, then linear layers."""
    b, n, d = net.hidden.shape
    left = net.hidden[:, : net.rows, None].expand(b, net.rows, n, d)
    right = net.hidden[:, None].expand(b, net.rows, n, d)
    pairs = torch.cat([left, right], -1).view(-1, 2 * d)
    first = torch.cat([net.w_u, net.w_v])
    return dense(torch.addmm(net.b_u, pairs, first).relu_(), net).view(b, net.rows, n)


def _halves(net: Network) -> tuple[Tensor, Tensor]:
    """Given where only some rows are scored: the products do not shrink with the rows, and would be counted too often."""
    return net.halves() if net.rows == net.u.shape[1] else (net.u, net.v)


def split(net: Network) -> Tensor:
    """The first layer applied to positions instead of pairs."""
    u, v = _halves(net)
    z = (u[:, : net.rows, None] + v[:, None]).relu_()
    return dense(z.flatten(0, 2), net).view(z.shape[:3])


_TILE_FLOATS = 2**19
"""Activations of a tile: the size at which this way was fastest, 1,024 pairs of 512."""


def tiled(net: Network) -> Tensor:
    """`split` a tile at a time, in buffers that are used again and stay in the cache."""
    u, v = _halves(net)
    b, n, width = u.shape
    n_columns = min(n, 128)
    n_rows = max(1, min(net.rows, _TILE_FLOATS // (width * n_columns)))
    buffers = [u.new_empty(n_rows * n_columns, w) for w in (width, *(w.shape[1] for w in net.weights))]
    scores = u.new_empty(b, net.rows, n)
    for board in range(b):
        for i in range(0, net.rows, n_rows):
            for j in range(0, n, n_columns):
                out = scores[board, i : i + n_rows, j : j + n_columns]
                z = buffers[0][: out.numel()]
                left, right = u[board, i : i + n_rows, None], v[board, None, j : j + n_columns]
                torch.add(left, right, out=z.view(*out.shape, width)).relu_()
                for weight, bias, buffer in zip(net.weights, net.biases, buffers[1:], strict=True):
                    z = torch.addmm(bias, z, weight, out=buffer[: out.numel()]).relu_()
                out.copy_(torch.addmv(net.b_out.expand(len(z)), z, net.w_out).view(out.shape))
    return scores


@cache
def _compiled() -> Any:
    from torch._inductor import config

    config.compile_threads = 1  # a pool of processes would disturb the clock
    return torch.compile(split, fullgraph=True, dynamic=False)


def compiled_split(net: Network) -> Tensor:
    """`split` through torch.compile; the first call compiles."""
    try:
        result: Tensor = _compiled()(net)
    except Exception as error:
        raise Unavailable(f"torch.compile: {str(error).splitlines()[0]}") from error
    return result


def sample(net: Network) -> tuple[Tensor, Tensor]:
    """Rows and columns of the pair matrix that are compared with the reference; no pair has equal ends."""
    n = net.u.shape[1]
    rows = torch.linspace(0, net.rows - 1, min(16, net.rows)).long().unique()
    columns = torch.linspace(0, n - 1, min(64, n)).long().unique()
    return rows, columns[~torch.isin(columns, rows)]


def sampled(net: Network, scores: Tensor) -> Tensor:
    """Those pairs of the answer [B, R, N]; NaN throughout if any other pair off the diagonal is not finite."""
    rows, columns = sample(net)
    picked = scores[:, rows][:, :, columns]
    return picked if bool(scores.isfinite().all()) else torch.full_like(picked, torch.nan)


def expected(net: Network, *, combine: str = "add") -> Tensor:
    """The same pairs by the reference in float64."""
    rows, columns = sample(net)
    both = torch.cat([rows, columns])
    u, v = net.u[:, both].double(), net.v[:, both].double()
    head = ([w.double() for w in net.weights], [b.double() for b in net.biases], net.w_out.double(), net.b_out.double())
    return reference.pairwise_mlp(u, v, *head, combine=combine, symmetry="none")[:, : len(rows), len(rows) :]
