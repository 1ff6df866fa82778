"""Checking predicted mutual information against the model itself while it decodes: a few probes, now and then."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.decode.policies.base import Step
from mdmi_fast.decode.policies.mutual_information import MISource, pairwise_mi
from mdmi_fast.ops import TokenStats

CALIBRATION_EDGES = (0.1, 0.5, 1.0)
"""Nats of probed mutual information between the bins whose mean errors are kept (row S14 of the source)."""

_VALUES = 64
"""Probed values of a position at most: those of a large vocabulary that carry nearly all of the probability."""


def audit_position(
    source: MISource, hidden: Tensor, mask: Tensor, step: Step, row: int, position: int
) -> tuple[Tensor, Tensor]:
    """Predicted and probed mutual information of one masked position with all others of its sequence.

    Probed: H(sum_v p_v q_v) - sum_v p_v H(q_v) over the values v of the position, p_v of at most 64 of them scaled to
    sum 1, q_v = p(x_j | x_i = v): one direction of the "joint" form of `label_mi`.

    Args:
        source: of the mutual information that is checked.
        hidden: [B, N, D].
        mask: [B, N] bool, True = masked.
        step: with model and tokens.
        row: the sequence.
        position: masked in it.

    Returns:
        Two tensors [M - 1] float32, nats, for the other masked positions.

    Raises:
        ValueError: if step has no model or tokens.
    """
    if step.model is None or step.tokens is None:
        raise ValueError("audit_position: step must have model and tokens")
    tokens, visible = step.tokens[row], None if step.attention_mask is None else step.attention_mask[row]
    alone = Step(
        int(step),
        model=step.model,
        tokens=tokens.unsqueeze(0),
        stats=None if step.stats is None else TokenStats(*(field[row : row + 1] for field in step.stats)),
        seeds=None if step.seeds is None else step.seeds[row : row + 1],
        attention_mask=None if visible is None else visible.unsqueeze(0),
    )
    predicted = pairwise_mi(source, hidden[row : row + 1], mask[row : row + 1], alone)[0, position]

    def logits(states: Tensor) -> Tensor:
        assert step.model is not None
        return (step.model(states) if visible is None else step.model(states, visible.expand_as(states))).logits

    probability = logits(tokens.unsqueeze(0))[0, position].float().softmax(dim=-1)
    weight, value = probability.topk(min(_VALUES, int((probability > 0).sum())))
    probes = tokens.repeat(len(value), 1)
    probes[:, position] = value
    others = mask[row].clone()
    others[position] = False
    answers = logits(probes)[:, others]
    weights = (weight / weight.sum()).unsqueeze(-1).expand(answers.shape[:2])
    probed = ops.mixture_entropy(answers, weights) - ops.expected_entropy(answers, weights)
    return predicted[others].float(), probed.clamp(min=0.0)


@dataclass
class AuditBlock:
    """Audited pairs, collected until there are enough to say something of them."""

    positions: int = 0
    predicted: list[float] = field(default_factory=list)
    probed: list[float] = field(default_factory=list)

    def add(self, predicted: Tensor, probed: Tensor) -> None:
        self.positions += 1
        self.predicted += predicted.tolist()
        self.probed += probed.tolist()

    def correlation(self) -> float | None:
        """Pearson's r; None where one side does not vary."""
        x, y = (torch.tensor(side, dtype=torch.float64) for side in (self.predicted, self.probed))
        x, y = x - x.mean(), y - y.mean()
        scale = float((x.square().sum() * y.square().sum()).sqrt())
        # Rounding may carry a perfect correlation past 1.
        return min(1.0, max(-1.0, float((x * y).sum()) / scale)) if scale > 0 else None

    def false_independence(self, tau: float) -> float | None:
        """Of the pairs predicted below tau nats, the share probed above it; None if none was predicted so."""
        told = [truth for guess, truth in zip(self.predicted, self.probed, strict=True) if guess < tau]
        return sum(truth > tau for truth in told) / len(told) if told else None

    def calibration(self) -> list[float]:
        """Mean |predicted - probed| in nats by probed value, in the bins of `CALIBRATION_EDGES`; NaN where empty."""
        bins: list[list[float]] = [[] for _ in range(len(CALIBRATION_EDGES) + 1)]
        for guess, truth in zip(self.predicted, self.probed, strict=True):
            bins[sum(truth >= edge for edge in CALIBRATION_EDGES)].append(abs(guess - truth))
        return [math.fsum(errors) / len(errors) if errors else math.nan for errors in bins]
