"""The pair network as kernels take it: halves and layers, and the device functions that take them on a tile of pairs."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.calls import PairCall, PairNetwork
from mdmi_fast.backends.triton._common import INTERPRETED, actual, dot, relu, rounded, varying
from mdmi_fast.backends.triton.tiles import PairTile

MOST_LAYERS = 2
"""Dense layers that kernels hold in registers."""


class Half(NamedTuple):
    """u or v [B, N, H1], or one sequence of it: where its first row is, and how far sequences and rows are apart.

    batch is `varying`.
    """

    ptr: Any
    batch: Any
    row: Any


class Layers(NamedTuple):
    """Weights and biases of the dense layers, None where there is no such layer, and of the output layer."""

    w1: Any
    b1: Any
    w2: Any
    b2: Any
    w_out: Any
    b_out: Any


@dataclass(frozen=True)
class Net:
    """What a kernel is compiled for: the network, and how many inputs and outputs of its layers are taken at a time.

    Kernels name what they use of it in a shape or hand on as a string, because Triton 3.6 takes neither from a field.
    """

    ADD: bool
    """Whether halves are added (and go through a relu), else multiplied."""
    SOFTPLUS: bool
    PRECISION: str
    """Of float32 products."""
    H1: int
    H2: int
    H3: int
    """Widths; 0 where there is no such layer."""
    BLOCK_I: int
    BLOCK_J: int
    """Positions of a tile of pairs."""
    BLOCK_K: int
    """Inputs of the first layer."""
    BLOCK_N: int
    """Its outputs."""
    BLOCK_L: int
    """Outputs of the second layer."""


# --- on a tile of pairs, positions left [I] and right [J]


@triton.jit
def of_sequence(half, b):
    """The half of sequence b."""
    return Half(half.ptr + b * actual(half.batch), half.batch, half.row)


@triton.jit
def load_half(half, position, columns, n_columns):
    """Rows of a half at positions, 0 where the position is -1."""
    inside = (position >= 0)[:, None] & (columns < n_columns)[None, :]
    return tl.load(half.ptr + position.to(tl.int64)[:, None] * half.row + columns[None, :], mask=inside, other=0.0)


@triton.jit
def combined(left, right, OPERAND: tl.constexpr, ADD: tl.constexpr):
    """Activations [I * J, K] of the combined halves [I, K] and [J, K], in the dtype of the products."""
    if INTERPRETED or left.dtype != OPERAND:  # the interpreter adds the raw bits of bfloat16
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    if ADD:
        z = relu(left[:, None, :] + right[None, :, :])
    else:
        z = left[:, None, :] * right[None, :, :]
    return rounded(tl.reshape(z, (left.shape[0] * right.shape[0], left.shape[1])), OPERAND)


@triton.jit
def load_weights(w_ptr, rows, columns, N_IN: tl.constexpr, N_OUT: tl.constexpr):
    """A tile of a matrix [N_IN, N_OUT], 0 outside."""
    inside = (rows < N_IN)[:, None] & (columns < N_OUT)[None, :]
    return tl.load(w_ptr + rows[:, None] * N_OUT + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_vector(x_ptr, columns, N: tl.constexpr):
    return tl.load(x_ptr + columns, mask=columns < N, other=0.0)


@triton.jit
def within(z, columns, N: tl.constexpr, BLOCK: tl.constexpr):
    """Activations z without those of columns behind N: weights of 0 made them, but inf * 0 is NaN."""
    return z if N % BLOCK == 0 else tl.where((columns < N)[None, :], z, 0.0)


@triton.jit
def first_layer(halves, places, layers, columns, NET: tl.constexpr):
    """relu(z W + b) [I * J, columns] in float32, of two halves at places; columns behind H2 are 0."""
    x, y = halves
    left, right = places
    PRECISION: tl.constexpr = NET.PRECISION
    acc = tl.zeros((left.shape[0] * right.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, NET.H1, NET.BLOCK_K):
        k = start + tl.arange(0, NET.BLOCK_K)
        w = load_weights(layers.w1, k, columns, NET.H1, NET.H2)
        z = combined(load_half(x, left, k, NET.H1), load_half(y, right, k, NET.H1), w.dtype, NET.ADD)
        acc = dot(z, w, acc, PRECISION)
    return within(relu(acc + load_vector(layers.b1, columns, NET.H2)[None, :]), columns, NET.H2, NET.BLOCK_N)


# --- on the host

_OPERAND = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Network:
    """The weights in the dtype of the products, the vectors in float32, all contiguous."""

    weights: list[Tensor]
    biases: list[Tensor]
    w_out: Tensor
    b_out: Tensor
    precision: str

    @property
    def operand(self) -> torch.dtype:
        return _OPERAND[self.precision]

    @property
    def widths(self) -> tuple[int, ...]:
        """H1 and those of the dense layers; at least three, 0 where there is no such layer."""
        h1 = self.weights[0].shape[0] if self.weights else self.w_out.shape[0]
        return h1, *(w.shape[1] for w in self.weights), *[0] * (MOST_LAYERS - len(self.weights))

    @property
    def layers(self) -> Layers:
        """Of a network that kernels hold in registers."""
        layers = [t for layer in zip(self.weights, self.biases, strict=True) for t in layer]
        return Layers(*layers, *[None] * (2 * MOST_LAYERS - len(layers)), self.w_out, self.b_out)

    @property
    def input_precision(self) -> str:
        return "tf32" if self.precision == "tf32" else "ieee"

    def net(self, tile: PairTile, combine: str, activation: str = "identity") -> Net:
        h1, h2, h3 = self.widths
        return Net(
            ADD=combine == "add",
            SOFTPLUS=activation == "softplus",
            PRECISION=self.input_precision,
            H1=h1,
            H2=h2,
            H3=h3,
            BLOCK_I=tile.i,
            BLOCK_J=tile.j,
            BLOCK_K=block(h1, tile.k),
            BLOCK_N=block(h2, tile.n),
            BLOCK_L=block(h3, tile.last),
        )


def prepare_pairwise(network: PairNetwork, precision: str) -> Network:
    operand = _OPERAND[precision]
    return Network(
        [w.to(operand).contiguous() for w in network.weights],
        [b.float().contiguous() for b in network.biases],
        network.w_out.float().contiguous(),
        network.b_out.float(),
        precision,
    )


def block(size: int, most: int) -> int:
    """Of a dimension of a product: a power of two, at least 16."""
    return min(most, max(16, triton.next_power_of_2(size)))


def half_of(x: Tensor) -> Half:
    """Of a tensor [B, N, H1] with rows in one piece."""
    batch, row, _ = x.stride()
    return Half(x, varying(batch), row)


@dataclass(frozen=True)
class Halves:
    """u and v of one dtype with rows in one piece."""

    u: Tensor
    v: Tensor
    same: bool


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def halves_of(call: PairCall) -> Halves:
    u, v, same = call.u, call.v, call.halves_are_same
    if u.dtype != v.dtype:
        u, v = u.float(), v.float()
    u = _in_rows(u)
    return Halves(u, u if same else _in_rows(v), same)
