"""Selection on the device, one program a sequence, without a word to the host.

A step picks the next position with a few reductions over all of them, so nothing is sorted. Costs are float64 and no
multiply-add is fused: the same selection as on a CPU, bit for bit.

A sequence with NaN among its masked positions, or a budget that is NaN or negative, cannot raise here, because that would stop
the queue: nothing of it is selected and its `spent` is NaN (`color`: its groups are all -1), which no valid sequence with a
masked position has.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mdmi_fast.backends.calls import Budget, PairCall
from mdmi_fast.backends.triton import _common
from mdmi_fast.backends.triton._common import actual, varying
from mdmi_fast.backends.triton.pairwise import pairwise_mlp
from mdmi_fast.backends.triton.pairwise import refusals as pairwise_refusals

MOST_POSITIONS = 8192
"""What fits in the registers of one program."""

_FAR = tl.constexpr(2147483647)
_CHECKED_ROWS, _CHECKED_COLUMNS = 8, 256


def refusals(op: str, tensors: list[Tensor], precision: str | None) -> list[str]:
    """Why this backend cannot run a call."""
    first, *halves = tensors
    n = first.shape[1]
    reasons = [] if n <= MOST_POSITIONS else [f"selects among at most {MOST_POSITIONS} positions, got {n}"]
    if op == "score_and_select":
        reasons += pairwise_refusals("pairwise_mlp", halves, precision)
    return reasons


# --- what kernels take


class Positions(NamedTuple):
    """A mask or entropies [B, N]: the tensor and its strides; b is `varying`."""

    ptr: Any
    b: Any
    n: Any


class Pairs(NamedTuple):
    """Mutual information [B, N, N]: the tensor and its strides; b and i are `varying`."""

    ptr: Any
    b: Any
    i: Any
    j: Any


class Chosen(NamedTuple):
    """What a selection writes: [B, N] whether a position is selected, [B] what was spent."""

    selected: Any
    spent: Any


@triton.jit
def _load_at(x, b, i, inside, other):
    """Of positions i of sequence b."""
    return tl.load(x.ptr + b * actual(x.b) + i.to(tl.int64) * x.n, mask=inside, other=other)


@triton.jit
def _masked(mask, b, i, n):
    """Whether positions i of sequence b are masked."""
    masked = i < n
    if mask is not None:  # not a return where it is: Triton compiles what follows one in an `if`
        masked &= _load_at(mask, b, i, masked, 0).to(tl.int32) != 0
    return masked


@triton.jit
def _load_entropies(h, mask, b, i, n):
    """Those of positions i of sequence b; NaN, which is neither least nor equal to itself, where nothing may be chosen."""
    return _load_at(h, b, i, _masked(mask, b, i, n), float("nan"))


@triton.jit
def _load_pairs(mi, b, i, j, inside):
    pointers = mi.ptr + b * actual(mi.b) + i.to(tl.int64) * actual(mi.i) + j.to(tl.int64) * mi.j
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _again(i, pick):
    """i, in a form that no compiler works out ahead of the loop that finds pick >= 0: all offsets held over it would spill."""
    return i + tl.minimum(pick, 0)


@triton.jit
def _first_least(value, among, i):
    """The lowest of positions i that has the least value among some; far where there are none."""
    least = tl.min(tl.where(among, value, float("inf")), 0)
    return tl.min(tl.where(among & (value == least), i, _FAR), 0)


@triton.jit
def _value_at(value, i, at):
    """value [at] of a vector over positions i."""
    return tl.sum(tl.where(i == at, value, 0.0), 0)


@triton.jit
def _cost(h, acc, entropy_weight, lam, COUNT_ENTROPY: tl.constexpr, COUNT_MI: tl.constexpr):
    """entropy_weight h + lam acc; COUNT_*: whether a weight is not 0, one that is switches its term off, also where that is inf."""
    cost = entropy_weight * h.to(tl.float64) if COUNT_ENTROPY else tl.zeros(acc.shape, tl.float64)
    if COUNT_MI:
        cost += lam * acc
    return cost


@triton.jit
def _or(a, b):
    return a | b


# --- kernels


@triton.jit(do_not_specialize=["n", "tiles"])
def _check_kernel(
    h,
    mi,
    mask,
    tau: tl.float64,
    undefined_ptr,
    degree_ptr,
    n,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Marks the sequences with NaN where it counts; degrees in the graph of pairs >= tau, if asked for."""
    b = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    own = _masked(mask, b, i, n)
    bad = tl.zeros((ROWS,), tl.int32)
    degree = tl.zeros((ROWS,), tl.int32)
    if h is not None:
        own_h = _load_at(h, b, i, own, 0.0)
        bad += (own_h != own_h).to(tl.int32)
    for start in range(0, n, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        pairs = own[:, None] & _masked(mask, b, j, n)[None, :] & (i[:, None] != j[None, :])
        there = _load_pairs(mi, b, i[:, None], j[None, :], pairs)
        bad = tl.maximum(bad, tl.max((there != there).to(tl.int32), 1))
        if degree_ptr is not None:
            back = _load_pairs(mi, b, j[None, :], i[:, None], pairs)
            tied = pairs & (tl.maximum(there, back).to(tl.float64) >= tau)
            degree += tl.sum(tied.to(tl.int32), 1)
    if degree_ptr is not None:
        tl.store(degree_ptr + b * n + i, degree, mask=i < n)
    if tl.max(bad, 0) > 0:
        tl.store(undefined_ptr + b, 1)  # whoever writes, writes the same


@triton.jit(do_not_specialize=["n", "limit"])
def _select_budget_kernel(
    h,
    mi,
    mask,
    gamma_ptr,
    undefined_ptr,
    chosen,
    lam: tl.float64,
    entropy_weight: tl.float64,
    n,
    limit,
    COUNT_MI: tl.constexpr,
    COUNT_ENTROPY: tl.constexpr,
    CHEAPEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Marks what is chosen in chosen.selected, which is False before."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    remaining = tl.load(gamma_ptr + b)
    undefined = tl.where(remaining >= 0, tl.load(undefined_ptr + b), 1)  # 1: there is nothing to choose from
    h = _load_entropies(h, mask, b, i, n * (1 - undefined))
    acc = tl.zeros((BLOCK,), tl.float64)
    spent = tl.where(undefined == 0, 0.0, float("nan")).to(tl.float64)
    pick, h_pick, n_selected = -1, tl.full((), -float("inf"), h.dtype), 0
    while (pick < _FAR) & (n_selected < limit):
        # in the order of entropy those ahead of the next that fits are skipped for good
        waiting = h == h if CHEAPEST else (h > h_pick) | ((h == h_pick) & (i > pick))
        cost = _cost(h, acc, entropy_weight, lam, COUNT_ENTROPY, COUNT_MI)
        affordable = tl.where(n_selected == 0, float("inf"), remaining)  # the first is
        pick = _first_least(cost, waiting, i) if CHEAPEST else _first_least(h, waiting & (cost <= affordable), i)
        h_pick = _value_at(h, i, pick)
        paid = _cost(h_pick, _value_at(acc, i, pick), entropy_weight, lam, COUNT_ENTROPY, COUNT_MI)
        if CHEAPEST:
            pick = tl.where(paid <= affordable, pick, _FAR)
        if pick < _FAR:
            remaining -= paid
            spent += paid
            tl.store(chosen.selected + b * n + pick, 1)
            h = tl.where(i == pick, float("nan"), h)
            there = _load_pairs(mi, b, _again(i, pick), pick, waiting & (i != pick))
            acc += tl.maximum(there, 0.0).to(tl.float64)
            n_selected += 1
    tl.store(chosen.spent + b, spent)


@triton.jit(do_not_specialize=["n", "limit"])
def _select_threshold_kernel(h, mi, mask, undefined_ptr, chosen, tau: tl.float64, n, limit, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    undefined = tl.load(undefined_ptr + b)  # 1: there is nothing to choose from
    h = _load_entropies(h, mask, b, i, n * (1 - undefined))
    turn = tl.full((BLOCK,), _FAR, tl.int32)  # in which step a position was chosen
    spent = tl.where(undefined == 0, 0.0, float("nan")).to(tl.float64)
    n_selected = 0
    pick = _first_least(h, h == h, i)
    while (pick < _FAR) & (n_selected < limit):
        pairs = ((h == h) | (turn < _FAR)) & (i != pick)
        there = _load_pairs(mi, b, pick, _again(i, pick), pairs)
        back = _load_pairs(mi, b, _again(i, pick), pick, pairs)
        paid = tl.maximum(there, 0.0).to(tl.float64)
        for step in range(n_selected):
            spent += _value_at(paid, turn, step)
        turn = tl.where(i == pick, n_selected, turn)
        h = tl.where((i != pick) & (tl.maximum(there, back).to(tl.float64) < tau), h, float("nan"))
        pick = _first_least(h, h == h, i)
        n_selected += 1
    tl.store(chosen.selected + b * n + i, turn < _FAR, mask=i < n)
    tl.store(chosen.spent + b, spent)


@triton.jit(do_not_specialize=["n"])
def _color_kernel(mi, mask, undefined_ptr, degree_ptr, group_ptr, tau: tl.float64, n, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    undefined = tl.load(undefined_ptr + b)  # 1: there is nothing to choose from
    waiting = _masked(mask, b, i, n * (1 - undefined))
    degree = tl.load(degree_ptr + b * n + i, mask=waiting, other=-1)  # -1: not to be coloured, or coloured already
    group = tl.full((BLOCK,), -1, tl.int32)
    bit = tl.arange(0, 32)
    most = tl.max(degree, 0)
    while most >= 0:
        pick = tl.min(tl.where(degree == most, i, _FAR), 0)
        there = _load_pairs(mi, b, pick, _again(i, pick), group >= 0)
        back = _load_pairs(mi, b, _again(i, pick), pick, group >= 0)
        tied = (group >= 0) & (tl.maximum(there, back).to(tl.float64) >= tau)
        # the colours of neighbours as the bits of a word, 32 colours at a time, until one is free
        first, free = 0, 32
        while free == 32:
            within = tied & (group >= first) & (group < first + 32)
            taken = tl.reduce(tl.where(within, 1 << ((group - first) & 31), 0), 0, _or)
            free = tl.min(tl.where(((taken >> bit) & 1) == 0, bit, 32), 0)
            first += 32
        group = tl.where(i == pick, first - 32 + free, group)
        degree = tl.where(i == pick, -1, degree)
        most = tl.max(degree, 0)
    tl.store(group_ptr + b * n + i, group.to(tl.int64), mask=i < n)


# --- launching

_EXACT = _common.Tile(warps=4, fusion=False)


def _one_program(n: int, device: torch.device) -> tuple[int, _common.Tile]:
    """Positions and warps of the program of a sequence: 8 positions a thread, and at most 512 threads, because the registers of
    1024 spill on gfx942.
    """
    block = max(32, triton.next_power_of_2(n))
    threads = 64 if _common.target_name(device) == "gfx942" else 32  # of a warp
    return block, _common.Tile(warps=min(max(block // (8 * threads), 1), 512 // threads), fusion=False)


def _positions(x: Tensor | None) -> Positions | None:
    if x is None:
        return None
    b, n = x.stride()
    return Positions(x, varying(b), n)


def _pairs(mi: Tensor) -> Pairs:
    b, i, j = mi.stride()
    return Pairs(mi, varying(b), varying(i), j)


def _check(entropy: Tensor | None, mi: Tensor, mask: Tensor | None, tau: float, degree: Tensor | None) -> Tensor:
    """Sequences with NaN that counts [B] int32; fills degree [B, N] if given."""
    batch, n, _ = mi.shape
    undefined = torch.zeros(batch, dtype=torch.int32, device=mi.device)
    tiles = triton.cdiv(n, _CHECKED_ROWS)
    args = (_positions(entropy), _pairs(mi), _positions(mask), tau, undefined, degree, n, tiles)
    _common.launch(_check_kernel, batch * tiles, _EXACT, *args, ROWS=_CHECKED_ROWS, COLUMNS=_CHECKED_COLUMNS)
    return undefined


def _nothing(entropy: Tensor) -> Chosen:
    """Nothing selected so far; what is spent is not known yet."""
    selected = torch.zeros(entropy.shape, dtype=torch.bool, device=entropy.device)
    return Chosen(selected, torch.empty(entropy.shape[0], dtype=torch.float64, device=entropy.device))


def _on_device(gamma: Tensor, device: torch.device) -> Tensor:
    """Budgets from the CPU; one budget for all is filled in on the device, which a CUDA graph can capture as those there already."""
    if gamma.device == device:
        return gamma
    values = set(gamma.tolist())
    if len(values) == 1:
        return torch.full(gamma.shape, values.pop(), dtype=torch.float64, device=device)
    return gamma.to(device, non_blocking=True)


def select_budget(entropy: Tensor, mi: Tensor, mask: Tensor | None, budget: Budget) -> tuple[Tensor, Tensor]:
    batch, n = entropy.shape
    gamma, lam, entropy_weight, order, limit = budget
    chosen = _nothing(entropy)
    undefined = _check(entropy, mi, mask, 0.0, None)
    block, tile = _one_program(n, mi.device)
    _common.launch(
        _select_budget_kernel,
        batch,
        tile,
        _positions(entropy),
        _pairs(mi),
        _positions(mask),
        _on_device(gamma, entropy.device),
        undefined,
        chosen,
        lam,
        entropy_weight,
        n,
        n if limit is None else min(limit, n),
        COUNT_MI=lam != 0,
        COUNT_ENTROPY=entropy_weight != 0,
        CHEAPEST=order == "cheapest",
        BLOCK=block,
    )
    return tuple(chosen)


def select_threshold(
    entropy: Tensor, mi: Tensor, mask: Tensor | None, tau: float, limit: int | None
) -> tuple[Tensor, Tensor]:
    batch, n = entropy.shape
    chosen = _nothing(entropy)
    undefined = _check(entropy, mi, mask, 0.0, None)
    block, tile = _one_program(n, mi.device)
    most = n if limit is None else min(limit, n)
    args = (_positions(entropy), _pairs(mi), _positions(mask), undefined, chosen, tau, n, most)
    _common.launch(_select_threshold_kernel, batch, tile, *args, BLOCK=block)
    return tuple(chosen)


def color(mi: Tensor, mask: Tensor | None, tau: float) -> Tensor:
    batch, n, _ = mi.shape
    group = torch.empty((batch, n), dtype=torch.int64, device=mi.device)
    degree = torch.empty((batch, n), dtype=torch.int32, device=mi.device)
    undefined = _check(None, mi, mask, tau, degree)
    block, tile = _one_program(n, mi.device)
    args = (_pairs(mi), _positions(mask), undefined, degree, group, tau, n)
    _common.launch(_color_kernel, batch, tile, *args, BLOCK=block)
    return group


def score_and_select(entropy: Tensor, call: PairCall, budget: Budget) -> tuple[Tensor, Tensor]:
    return select_budget(entropy, pairwise_mlp(call), call.mask, budget)
