"""Entropy and the other statistics of rows of logits, against torch's log_softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import ops, reference
from mdmi_fast.bench.measure import Work, Workload

LOG_SOFTMAX = "log_softmax in PyTorch"
_TOLERANCE = 1e-4
"""Of all ways: torch's sums over 150,000 terms in float32 are off by 1e-5."""


def workloads(quick: bool = False) -> list[Workload]:
    scale = 50 if quick else 1
    shapes = [(1_000_000 // scale, 10, 12.0), (300_000 // scale, 33, 12.0)]
    shapes += [(512 // scale, 50_257, 25.0), (128 // (scale // 5 or 1), 151_936, 25.0)]
    found = [_entropy(*shape) for shape in shapes] + [_token_stats(*shape) for shape in shapes]
    found += [_half_precision(*shapes[2][:2]), _entropy(81 * 100 // (scale // 5 or 1), 10, None)]
    return [*found, _head(256 // scale or 8, 512, 50_257 // (scale // 5 or 1))]


def _logits(rows: int, width: int) -> Tensor:
    return 3.0 * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))


def _name(op: str, rows: int, width: int) -> str:
    return f"{op}, {rows:,} x {width:,}"


def _some_rows(logits: Tensor) -> Tensor:
    """Rows that the reference is asked for, the first and the last among them; all ways are compared on these."""
    return torch.linspace(0, len(logits) - 1, min(len(logits), 2 + 200_000 // logits.shape[1])).long()


def _entropy_in_torch(logits: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


def _entropy(rows: int, width: int, target: float | None) -> Workload:
    return Workload(
        name=_name("entropy", rows, width),
        make=lambda: _logits(rows, width),
        ways={"fused": ops.entropy, LOG_SOFTMAX: _entropy_in_torch},
        expected=lambda logits: reference.entropy(logits[_some_rows(logits)].double()),
        read=lambda logits, found: found[_some_rows(logits)],
        tolerance=_TOLERANCE,
        at_least={} if target is None else {LOG_SOFTMAX: target},
        work=Work("bytes", 4.0 * rows * width),
    )


def _half_precision(rows: int, width: int) -> Workload:
    return Workload(
        name=_name("entropy of bfloat16", rows, width),
        make=lambda: _logits(rows, width).bfloat16(),
        ways={"fused": ops.entropy, LOG_SOFTMAX: lambda logits: _entropy_in_torch(logits.float())},
        expected=lambda logits: reference.entropy(logits[_some_rows(logits)].double()),
        read=lambda logits, found: found[_some_rows(logits)],
        tolerance=_TOLERANCE,
        work=Work("bytes", 2.0 * rows * width),
    )


def _stats_in_torch(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five statistics from one log_softmax; the two largest give confidence, token and margin."""
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    best, token = log_p.topk(2, -1)
    confidence, second = best.exp().unbind(-1)
    logsumexp = logits.gather(-1, token[..., :1]).squeeze(-1) - best[..., 0]
    return entropy, logsumexp, confidence, token[..., 0], confidence - second


def _stack(stats: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    return torch.stack([field[rows].double() for field in stats])


def _token_stats(rows: int, width: int, target: float) -> Workload:
    return Workload(
        name=_name("token_stats", rows, width),
        make=lambda: _logits(rows, width),
        ways={"fused": ops.token_stats, LOG_SOFTMAX: _stats_in_torch},
        expected=lambda logits: torch.stack(
            [field.double() for field in reference.token_stats(logits[_some_rows(logits)].double())]
        ),
        read=lambda logits, found: _stack(found, _some_rows(logits)),
        tolerance=_TOLERANCE,
        at_least={LOG_SOFTMAX: target},
        work=Work("bytes", 4.0 * rows * width),
    )


def _head(rows: int, hidden_size: int, width: int) -> Workload:
    """Statistics from hidden states and the language-model head, without the logits."""

    def make() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, hidden_size, generator=generator)
        return hidden, torch.randn(width, hidden_size, generator=generator) * 3.0 * hidden_size**-0.5

    def expected(inputs: tuple[Tensor, Tensor]) -> Tensor:
        hidden, weight = inputs
        some = hidden[:4].double()
        return torch.stack([f.double() for f in reference.linear_token_stats(some, weight.double())])

    return Workload(
        name=f"linear_token_stats, {rows} x {hidden_size} x {width:,}",
        make=make,
        ways={
            "in vocabulary tiles": lambda inputs: ops.linear_token_stats(*inputs),
            "all logits, then log_softmax in PyTorch": lambda inputs: _stats_in_torch(
                torch.nn.functional.linear(*inputs)
            ),
        },
        expected=expected,
        read=lambda inputs, found: _stack(found, torch.arange(min(4, rows))),
        tolerance=_TOLERANCE,
        work=Work("flops", 2.0 * rows * hidden_size * width),
    )
