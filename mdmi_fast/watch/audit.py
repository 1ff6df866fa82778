"""Checking predicted mutual information against the model itself while it decodes, in two ways.

Probing one position (`audit_position`) costs up to 65 forward passes of one sequence and gives the mutual information of
its pairs, whatever is done with the answer.

The next pass (`Reveal`) costs no forward pass. Where one position i was drawn from p(x_i), still-masked ones j move by
KL(p(x_j | x_i) || p(x_j)), whose mean over the draw is their mutual information, the "kl" form of `label_mi` exactly. One
draw says little of one pair; over many, the slope of what moved on what was predicted is that of the truth on the
prediction: 1 for an unbiased estimator, 0 for one that knows nothing. Below 1/2 the predictions are farther from the
truth, in mean square, than their own mean is.

It sees pairs of which one was unmasked alone, in the states that decoding meets. It does not see pairs unmasked together
in one pass, what several positions tell only jointly, or that all predictions are too low by a factor (the ratio shows
it, but the joint form of a model whose conditionals disagree rightly lies below the kl form). It needs tokens drawn at
temperature 1 without top_k, top_p, suppressed tokens and allowed sets: of other draws the mean would be another.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.decoding.policies.sources import MISource, pairwise_mi
from mdmi_fast.decoding.policies.step import Step
from mdmi_fast.models.call import call_model
from mdmi_fast.ops import TokenStats

CALIBRATION_EDGES = (0.1, 0.5, 1.0)
"""Nats of probed mutual information between the bins whose mean errors are kept."""

_WATCHED = 64
"""Masked positions at most whose marginals before a reveal are kept."""

_STILL = 1e-3
"""Nats: a mean prediction and a mean movement below it are both taken for 0."""

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
    predicted = _predicted(source, hidden, mask, step, row)[position]

    def logits(states: Tensor) -> Tensor:
        assert step.model is not None
        shown = None if visible is None else visible.expand_as(states)
        return call_model("audit_position", step.model, states, shown).logits

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


@dataclass(frozen=True)
class Reveal:
    """A position that a pass unmasks alone in its sequence, kept for comparison with the next pass.

    Attributes:
        seed: of the sequence.
        tokens: [N] int64, before the position is unmasked.
        position: unmasked.
        others: [M] int64, still masked after it; 64 at most, drawn by `draw` where there are more.
        predicted: [M] their predicted mutual information with it, nats, not below 0.
        logits: [M, V], theirs before.
    """

    seed: int
    tokens: Tensor
    position: int
    others: Tensor
    predicted: Tensor
    logits: Tensor

    @classmethod
    def of(
        cls, source: MISource, hidden: Tensor, mask: Tensor, step: Step, row: int, position: int, draw: random.Random
    ) -> Reveal:
        """What must be kept of a step with tokens, logits and seeds; arguments as of `audit_position`.

        Raises:
            ValueError: if a prediction is no finite number.
        """
        assert step.tokens is not None
        assert step.logits is not None
        assert step.seeds is not None
        candidates = [j for j in mask[row].nonzero().squeeze(-1).tolist() if j != position]
        others = torch.tensor(draw.sample(candidates, min(_WATCHED, len(candidates))), device=mask.device)
        predicted = _predicted(source, hidden, mask, step, row)[position, others].float().clamp(min=0.0)
        if not bool(predicted.isfinite().all()):
            raise ValueError(
                f"audit: predicted mutual information of position {position} must be finite, got NaN or inf"
            )
        logits = step.logits[row, others]
        return cls(int(step.seeds[row]), step.tokens[row], position, others, predicted, logits)

    def moved(self, step: Step, mask_token_id: int) -> Tensor | None:
        """[M] nats, KL of the marginals after from those before; None if the next pass does not show it.

        It does not if the sequence is not in it, or anything but the position has changed.
        """
        assert step.tokens is not None
        assert step.logits is not None
        assert step.seeds is not None
        rows = (step.seeds == self.seed).nonzero().squeeze(-1).tolist()
        if len(rows) != 1 or step.tokens.shape[1:] != self.tokens.shape:
            return None
        now = step.tokens[rows[0]]
        changed = (now != self.tokens).nonzero().squeeze(-1).tolist()
        if changed != [self.position] or int(self.tokens[self.position]) != mask_token_id:
            return None
        moved = ops.kl_divergence(step.logits[rows[0], self.others], self.logits)
        return moved if bool(moved.isfinite().all()) else None


class MovementBlock:
    """Reveals and what followed them, collected until there are enough to say something of them."""

    def __init__(self) -> None:
        self.reveals = self._pairs = 0
        self._predicted = self._moved = self._spread = self._agreement = 0.0

    def add(self, predicted: Tensor, moved: Tensor) -> None:
        guess, truth = predicted.double(), moved.double()
        above = guess - guess.mean()
        self.reveals += 1
        self._pairs += len(guess)
        self._predicted += float(guess.sum())
        self._moved += float(truth.sum())
        self._spread += float(above.square().sum())
        self._agreement += float((above * truth).sum())

    def slope(self) -> float | None:
        """Of what moved on what was predicted, within reveals; 0 where all predictions are alike.

        None where neither side comes to a thousandth of a nat on average: between independent positions the slope of
        two kinds of nothing says nothing.
        """
        if max(self._predicted, self._moved) <= _STILL * self._pairs:
            return None
        # What rounding leaves of predictions that are all alike is no spread.
        return self._agreement / self._spread if self._spread > 1e-9 * self._predicted**2 / self._pairs else 0.0

    def ratio(self) -> float | None:
        """What moved as a multiple of what was predicted; None if nothing was."""
        return self._moved / self._predicted if self._predicted > 0 else None


def _predicted(source: MISource, hidden: Tensor, mask: Tensor, step: Step, row: int) -> Tensor:
    """[N, N] nats, of one sequence of a pass, without asking for the others."""

    def own(field: Tensor | None) -> Tensor | None:
        return None if field is None else field[row : row + 1]

    alone = Step(
        int(step),
        model=step.model,
        tokens=own(step.tokens),
        logits=own(step.logits),
        stats=None if step.stats is None else TokenStats(*(field[row : row + 1] for field in step.stats)),
        seeds=own(step.seeds),
        attention_mask=own(step.attention_mask),
    )
    return pairwise_mi(source, hidden[row : row + 1], mask[row : row + 1], alone)[0]


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
        """Pearson's r; 0 where only the predictions do not vary, None where the truth does not."""
        x, y = (torch.tensor(side, dtype=torch.float64, device="cpu") for side in (self.predicted, self.probed))
        x, y = x - x.mean(), y - y.mean()
        if not bool(y.any()):
            return None
        scale = float((x.square().sum() * y.square().sum()).sqrt())
        # Rounding may carry a perfect correlation past 1.
        return min(1.0, max(-1.0, float((x * y).sum()) / scale)) if scale > 0 else 0.0

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
