"""What the kernels share: launching, what their arguments are, and the device functions of row statistics and products.

Kernel files do without `from __future__ import annotations`: Triton reads the annotations of a kernel as objects.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

LOWEST = tl.constexpr(-1e30)
"""Stands for -inf where -inf * 0 would be NaN; far below any logit that a float32 exponential tells from it."""


# --- launching


class Tile(NamedTuple):
    """How a kernel is compiled beyond what its arguments say; the table of pair tiles is `tiles`."""

    warps: int
    stages: int = 1
    fusion: bool = True
    """Whether a * b + c may be one instruction; said for every kernel, because Triton's default changes with its versions."""


def launch(kernel, n_programs: int, tile: Tile, *args: object, **constants: object) -> None:
    """Runs n_programs programs of a kernel; every launch of the package passes here."""
    if n_programs:
        kernel[(n_programs,)](
            *args, **constants, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=tile.fusion
        )


def target_name(device: torch.device) -> str:
    """The architecture that launch choices are made for; a newer or unknown one gets those of the nearest below."""
    if device.type != "cuda":
        return "sm_80"  # interpreted: any choice is right
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm_80", 9: "sm_90"}.get(major, "sm_100" if major >= 10 else "sm_80")


def varying(n: int) -> int:
    """A size or stride that differs from call to call, as a member of a tuple that a kernel takes; `actual` gives n back.

    Triton compiles a kernel anew for a member that is 1 and for one that is a multiple of 16, and `do_not_specialize` does not
    reach into tuples. A negative odd number is neither.
    """
    return ~(2 * n)


@triton.jit
def actual(member):
    """What `varying` was given."""
    return ~member >> 1


# --- rows: tensors [..., V] whose leading dimensions have any strides

ROW_ELEMENTS = 2048  # 8 for each of 256 threads: enough loads in flight, and no kernel spills
ROW_SPLIT = 16384  # columns of one program where a row is shared by several


class RowTile(NamedTuple):
    """Rows and columns of a tile; they depend on V alone, so a row is summed the same way in any batch."""

    rows: int
    columns: int
    tile: Tile


def row_tile(n_v: int, acc: tl.dtype) -> RowTile:
    elements = ROW_ELEMENTS // 4 if acc == tl.float64 else ROW_ELEMENTS
    columns = min(triton.next_power_of_2(n_v), elements)
    rows = min(elements // columns, 128)
    # more elements a thread would spill: 2 float64, 4 float32 where the tile is small
    return RowTile(rows, columns, Tile(warps=min(8, max(1, rows * columns // (64 if acc == tl.float64 else 128)))))


def accumulator(*tensors: Tensor) -> tl.dtype:
    """float64 if any tensor is, else float32."""
    return tl.float64 if any(t.dtype == torch.float64 for t in tensors) else tl.float32


def torch_dtype(accumulator: tl.dtype) -> torch.dtype:
    return torch.float64 if accumulator == tl.float64 else torch.float32


def row_views(lead: torch.Size, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views [outer, inner, ...] of tensors [*lead, ...], whatever their strides; more than one tuple of them only if needed."""
    if not lead.numel():
        return
    for cut in range(len(lead), -1, -1) if lead.numel() < 2**31 else ():
        sizes = (lead[:cut].numel(), lead[cut:].numel())
        try:
            views = tuple(t.view(*sizes, *t.shape[len(lead) :]) for t in tensors)
        except RuntimeError:  # these strides cannot be two dimensions cut here
            continue
        yield views
        return
    for parts in zip(*(t.unbind(0) for t in tensors), strict=True):
        yield from row_views(lead[1:], *parts)


def row_strides(x: Tensor) -> tuple[int, int]:
    """Strides of a view [outer, inner, ...]; that of a dimension of 1 is 0, which keeps it out of the compiled variants."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True))


class View(NamedTuple):
    """A view [outer, inner, ...] as kernels take it: the tensor and its strides, 0 where it has no alternatives or no V.

    outer and k are `varying`; the others belong to a model and may be compiled in.
    """

    ptr: Any
    outer: Any
    inner: Any
    k: Any
    v: Any


def view_of(x: Tensor, dims: str) -> View:
    """Of a tensor [outer, inner, *dims]; dims are "v", "k" or "kv"."""
    outer, inner = row_strides(x)
    strides = dict(zip(dims, x.stride()[2:], strict=True))
    return View(x, varying(outer), inner, varying(strides.get("k", 0)), strides.get("v", 0))


class Sizes(NamedTuple):
    """Of the rows of a launch: outer times inner of them, each of n_parts alternatives or shared by n_parts programs, and V.

    All but n_v are `varying`.
    """

    n_rows: Any
    n_inner: Any
    n_parts: Any
    n_v: Any


def sizes_of(x: Tensor, n_parts: int) -> Sizes:
    """Of a view [outer, inner, ..., V]."""
    outer, inner = x.shape[:2]
    return Sizes(varying(outer * inner), varying(inner), varying(n_parts), x.shape[-1])


@triton.jit
def part_of_program(sizes):
    """The block of rows, and the part of them, of a program where every part has one."""
    n_parts = actual(sizes.n_parts)
    return tl.program_id(0) // n_parts, tl.program_id(0) % n_parts


@triton.jit
def rows_of_block(block, sizes, ROWS: tl.constexpr):
    """Rows [ROWS] of a block, and which of them there are."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row < actual(sizes.n_rows)


@triton.jit
def row_ptrs(view, row, sizes):
    """Where rows of a view start; there are less than 2^31 of them, and 64-bit division is a subroutine."""
    row = row.to(tl.int32)
    n_inner = actual(sizes.n_inner)
    outer, inner = (row // n_inner).to(tl.int64), (row % n_inner).to(tl.int64)
    return view.ptr + outer * actual(view.outer) + inner * view.inner


@triton.jit
def part_ptrs(ptr, field, part, row, sizes):
    """Where a part of rows keeps a field, in scratch [field, part, row]."""
    return ptr + (field * actual(sizes.n_parts) + part).to(tl.int64) * actual(sizes.n_rows) + row


# --- products


@triton.jit
def relu(x):
    """max(x, 0); NaN stays NaN, so that it reaches the score and is seen."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x to the nearest number of a dtype."""
    if INTERPRETED and tl.bfloat16 == DTYPE:  # to which the interpreter truncates
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b with float32 sums; PRECISION ("ieee" or "tf32") is that of float32 operands."""
    if INTERPRETED:  # which multiplies the raw bits of bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


class MatrixTile(NamedTuple):
    """Rows, columns and inputs of a tile of a product of rows with a matrix."""

    rows: int
    columns: int
    k: int
    tile: Tile


_MATRIX = {True: MatrixTile(128, 128, 64, Tile(8, 3)), False: MatrixTile(64, 64, 16, Tile(8, 2))}
"""By whether the operands are half precision; chosen to fit every target, see `benchmarks/static_report`."""


def matrix_tile(x: Tensor, w: Tensor) -> tuple[MatrixTile, tl.dtype]:
    """Of a product of x with w, with the dtype of its operands: exact, so float32 unless both are of one half precision."""
    half = x.dtype == w.dtype and x.dtype in (torch.bfloat16, torch.float16)
    operand = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[x.dtype] if half else tl.float32
    return _MATRIX[half], operand


class Matrix(NamedTuple):
    """A matrix as kernels take it, of a model: the tensor and its strides."""

    ptr: Any
    row: Any
    column: Any


class Lines(NamedTuple):
    """Rows or columns of a product: where each begins, whether it is there, and how far apart its entries are."""

    ptrs: Any
    inside: Any
    step: Any


@triton.jit
def matrix_product(
    x,
    w,
    D: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The `Lines` x [R] times the `Lines` w [C], of D entries each; [R, C] in float32."""
    acc = tl.zeros((x.ptrs.shape[0], w.ptrs.shape[0]), tl.float32)
    for start in range(0, D, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_here = x.inside[:, None] & (k < D)[None, :]
        w_here = w.inside[None, :] & (k < D)[:, None]
        left = tl.load(x.ptrs[:, None] + k.to(tl.int64)[None, :] * x.step, mask=x_here, other=0.0)
        right = tl.load(w.ptrs[None, :] + k.to(tl.int64)[:, None] * w.step, mask=w_here, other=0.0)
        acc = dot(left.to(OPERAND), right.to(OPERAND), acc, PRECISION)
    return acc


# --- statistics of rows, tile by tile.  top: the largest logit so far; total: the sum of e = exp(x - top); weighted: the
# sum of e (x - top).  NaN and +inf make total NaN, whatever the maximum does with them; nothing but -inf leaves it 0.


@triton.jit
def product(a, b):
    """a * b in which 0 times anything is 0: a weight, a probability or a slope of 0 silences inf and NaN."""
    return tl.where((a == 0) | (b == 0), 0.0, a * b)


@triton.jit
def above_floor(top):
    """What to subtract before an exponential: top, or 0 where there is nothing but -inf."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def tile_sums(x):
    """top, total and weighted [R] of a tile [R, C], -inf where it is padded."""
    top = tl.max(x, 1)
    shifted = x - above_floor(top)[:, None]
    e = tl.exp(shifted)
    return top, tl.sum(e, 1), tl.sum(e * tl.maximum(shifted, LOWEST), 1)


@triton.jit
def merge_sums(top_a, total_a, weighted_a, top_b, total_b, weighted_b):
    """The sums of two parts of a row."""
    top = tl.maximum(top_a, top_b)
    base = above_floor(top)
    shift_a, shift_b = top_a - base, top_b - base
    scale_a, scale_b = tl.exp(shift_a), tl.exp(shift_b)
    weighted_a += tl.maximum(shift_a, LOWEST) * total_a
    weighted_b += tl.maximum(shift_b, LOWEST) * total_b
    return top, scale_a * total_a + scale_b * total_b, scale_a * weighted_a + scale_b * weighted_b


@triton.jit
def defined(total):
    """total, NaN where the row has no probabilities."""
    return tl.where(total == 0, float("nan"), total)


@triton.jit
def entropy_of(total, weighted):
    total = defined(total)
    return tl.log(total) - weighted / total


@triton.jit
def load_logits(pointers, inside, ACC: tl.constexpr):
    """A tile of logits in ACC, -inf outside."""
    return tl.load(pointers, mask=inside, other=-float("inf")).to(ACC)
