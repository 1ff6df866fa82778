"""A training step of the general estimator, against torch autograd on the split form; and the memory of both."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mdmi_fast import reference
from mdmi_fast.bench.child import MIB, in_child, peak_growth
from mdmi_fast.bench.measure import Figure, Unavailable, Work, Workload, threads
from mdmi_fast.estimator import PairwiseMIEstimator
from mdmi_fast.labels import masked_pairs

EAGER = "torch eager on the split form"
HIDDEN, LAYERS = 512, (512, 256)


@dataclass(frozen=True)
class Step:
    """A batch and the estimator to be trained on it.

    Attributes:
        estimator: its layers are used by all ways.
        hidden: [B, N, D].
        mask: [B, N] bool, all True: eager torch scores every pair anyway.
        labels: [B, N, N].
        scales: largest entry of every right gradient; gradients are compared in these units.
    """

    estimator: PairwiseMIEstimator
    hidden: Tensor
    mask: Tensor
    labels: Tensor
    scales: list[Tensor] = field(default_factory=list)


def workloads(quick: bool = False) -> list[Workload]:
    return [_step(*shape) for shape in _shapes(quick)]


def _shapes(quick: bool) -> list[tuple[int, int]]:
    """(batch, N): Sudoku boards and a long sequence."""
    return [(2, 40)] if quick else [(16, 81), (1, 512)]


def _step(batch: int, n: int) -> Workload:
    return Workload(
        name=_case(batch, n),
        make=lambda: _make(batch, n),
        ways={"mdmi_fast": _ours, EAGER: _eager},
        expected=_expected,
        read=_in_scale,
        tolerance=2e-3,  # sums of 10^5 pairs in float32
        at_least={EAGER: 3.0},
        work=Work("flops", 3 * 2.0 * batch * n * n * math.prod(LAYERS)),  # forward, and two products backward
    )


def others(quick: bool = False) -> Iterator[Figure]:
    shapes, measure = _shapes(quick), "memory above inputs and gradients"
    batch, n = shapes[-1]
    half = batch, n // 2
    try:
        peaks = in_child(_peaks, [*shapes, half])
    except Unavailable as reason:
        for shape in shapes:
            yield Figure(_case(*shape), measure, math.nan, "MiB", note=str(reason))
        return
    for shape, (ours, eager) in zip(shapes, peaks, strict=False):
        yield Figure(_case(*shape), measure, ours / MIB, "MiB", 64.0, "<=")
        yield Figure(_case(*shape), f"{measure}, {EAGER}", eager / MIB, "MiB", note=f"{eager / max(ours, 1):.0f}x ours")
    (ours, _), (ours_half, _) = peaks[-2:]
    yield Figure(
        _case(batch, n),
        f"that memory against N {half[1]}",
        ours / max(ours_half, MIB),
        "x",
        note=f"{ours_half / MIB:.0f} MiB at N {half[1]}; [N, N] maps of scores, labels and loss grow 4x",
    )


def _case(batch: int, n: int) -> str:
    return f"batch {batch}, N {n}, H {'/'.join(map(str, LAYERS))}"


def _make(batch: int, n: int) -> Step:
    torch.manual_seed(0)
    estimator = PairwiseMIEstimator(HIDDEN, layers=LAYERS)
    labels = torch.rand(batch, n, n).pow(4)
    return Step(
        estimator, torch.randn(batch, n, HIDDEN), torch.ones(batch, n, dtype=torch.bool), (labels + labels.mT) / 2
    )


def _gradients(step: Step, predicted: Tensor) -> list[Tensor]:
    """Of the squared error over masked pairs, for all parameters of the estimator."""
    pairs = masked_pairs(step.mask)
    loss = ((predicted - step.labels).square() * pairs).sum() / pairs.sum()
    return list(torch.autograd.grad(loss, list(step.estimator.parameters())))


def _halves(estimator: PairwiseMIEstimator, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """As plain products, in the dtype they are given."""
    left, right = estimator.left[0], estimator.right[0]
    return left(hidden), right(hidden)


def _ours(step: Step) -> list[Tensor]:
    return _gradients(step, step.estimator(step.hidden, step.mask))


def _eager(step: Step) -> list[Tensor]:
    """Every activation of every pair is kept for the backward pass."""
    estimator = step.estimator
    u, v = _halves(estimator, step.hidden)
    z = F.relu(u.unsqueeze(2) + v.unsqueeze(1), inplace=True)
    for layer in estimator.dense:
        z = F.relu(layer(z), inplace=True)
    f = F.softplus(estimator.last(z).squeeze(-1))
    return _gradients(step, (f + f.mT) / 2)


def _expected(step: Step) -> Tensor:
    """Through the reference in float64, one sequence after the other."""
    estimator = copy.deepcopy(step.estimator).double()
    total: list[Tensor] = []
    all_pairs = masked_pairs(step.mask).sum()
    for hidden, mask, labels in zip(step.hidden.double(), step.mask, step.labels.double(), strict=True):
        u, v = _halves(estimator, hidden)
        head = estimator.head()
        predicted = reference.pairwise_mlp(
            u, v, head.weights, head.biases, head.w_out, head.b_out, mask=mask, activation="softplus"
        )
        loss = ((predicted - labels).square() * masked_pairs(mask)).sum() / all_pairs
        gradients = torch.autograd.grad(loss, list(estimator.parameters()))
        total = [a + b for a, b in zip(total, gradients, strict=True)] if total else list(gradients)
    step.scales.extend(gradient.abs().amax() for gradient in total)
    return _in_scale(step, total)


def _in_scale(step: Step, gradients: list[Tensor]) -> Tensor:
    return torch.cat([(g.double() / s).flatten() for g, s in zip(gradients, step.scales, strict=True)])


def _peaks(shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In a child: bytes above inputs and gradients, (ours, eager) for every shape."""
    with threads(1):
        small, found = _make(1, 16), []
        for batch, n in shapes:
            step = _make(batch, n)
            gradients = sum(4 * p.numel() for p in step.estimator.parameters())
            peaks = []
            for way in (_ours, _eager):
                way(small)  # loads libraries and starts threads
                peaks.append(peak_growth(lambda way=way, step=step: way(step)) - gradients)  # type: ignore[misc]
            found.append((peaks[0], peaks[1]))
        return found
