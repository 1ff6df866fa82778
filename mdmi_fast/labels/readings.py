"""What the answers to one position's probes say of every other position, in the three forms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.labels.options import Form


class Group(NamedTuple):
    """The probes of one position.

    Attributes:
        row, position: where.
        kept: share of p that the values carry.
        draws: how many draws the values are of; 0 where they were not drawn.
        values: [K] what the position is set to.
        shares: [K] float64 weights.
        probes: [R] the values that are run.
        place: [K] which of the probes tells of a value.
    """

    row: int
    position: int
    kept: float
    draws: int
    values: Tensor
    shares: Tensor
    probes: Tensor
    place: Tensor

    def answers(self, logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Logits [K', N, V] of every value that the probes from `first` on tell of, from theirs [R', N, V]; shares [K']."""
        if len(self.probes) == len(self.values):
            return logits, self.shares[first : first + len(logits)]
        own = ((self.place >= first) & (self.place < first + len(logits))).nonzero().squeeze(-1)
        place = self.place[own]
        stack = logits[place - first]
        this, run = (
            token.view(-1, 1, 1).expand(*stack.shape[:2], 1) for token in (self.values[own], self.probes[place])
        )
        swapped = stack.scatter(-1, this, stack.gather(-1, run)).scatter(-1, run, stack.gather(-1, this))
        return swapped, self.shares[own]


class Reading(NamedTuple):
    """What the probes of a position say of some columns: per form values [n], and standard errors of what was drawn."""

    group: Group
    columns: slice
    values: dict[Form, Tensor]
    errors: dict[Form, Tensor] | None


def read(group: Group, columns: slice, logits: Tensor, base: Tensor, entropy: Tensor) -> Reading:
    """Reduce the answers [R, n, V] to a position's probes, without a temporary of their size."""
    answers, shares = group.answers(logits, 0)
    stats = ops.mixture_stats(answers, shares.unsqueeze(-1).expand(answers.shape[:-1]), base)
    joint = (stats.mixture_entropy - stats.expected_entropy).clamp(min=0)
    return Reading(group, columns, _forms(group, joint, entropy - stats.expected_entropy, stats.expected_kl), None)


def _forms(group: Group, joint: Tensor, entropy: Tensor, kl: Tensor) -> dict[Form, Tensor]:
    """The readings of the values probed as labels: two of them count for the share of p that was probed."""
    return {"joint": joint * group.kept, "entropy": entropy, "kl": kl * group.kept}


def read_in_pieces(
    group: Group, columns: slice, pieces: Iterable[tuple[int, Tensor]], base: Tensor, entropy: Tensor
) -> Reading:
    """`read` of a position with too many probes for one batch, the number of the first and the answers of each: sums, and the
    mixture itself, over batches.
    """
    kl, conditional, mixture = torch.zeros_like(entropy), torch.zeros_like(entropy), torch.zeros_like(base)
    for first, logits in pieces:
        answers, shares = group.answers(logits, first)
        weights = shares.unsqueeze(-1).expand(answers.shape[:-1])
        kl += ops.expected_kl(answers, weights, base)
        conditional += ops.expected_entropy(answers, weights)
        mixture += _mixture(answers, shares)
    joint = (ops.entropy(mixture.log()) - conditional).clamp(min=0)
    return Reading(group, columns, _forms(group, joint, entropy - conditional, kl), None)


def _mixture(answers: Tensor, shares: Tensor) -> Tensor:
    """[n, V] sum_k shares_k softmax(answers_k).

    No matrix product, which adds in another order when there are more positions.
    """
    return (shares.to(answers.dtype).view(-1, 1, 1) * answers.softmax(dim=-1)).sum(dim=0)


def read_sample(group: Group, columns: slice, logits: Tensor, base: Tensor, entropy: Tensor) -> Reading:
    """`read` of values drawn at random: means over the draws, with their standard errors.

    The joint form is the mean of KL(q_v || m), m the mean of the q_v drawn; that m moves with every draw changes the mean
    in second order only, so its standard error is that of the terms.
    """
    answers, shares = group.answers(logits, 0)
    mixture = _mixture(answers, shares).log()
    terms: dict[Form, Tensor] = {
        "joint": ops.kl_divergence(answers, mixture.expand_as(answers)),
        "entropy": entropy - ops.entropy(answers),
        "kl": ops.kl_divergence(answers, base.expand_as(answers)),
    }
    weights = shares.unsqueeze(-1).float()
    values = {form: (weights * each).sum(dim=0) for form, each in terms.items()}
    errors = {
        form: ((weights * (each - values[form]).square()).sum(dim=0) / (group.draws - 1)).sqrt()
        for form, each in terms.items()
    }
    own = entropy[group.position - (columns.start or 0)]
    values["joint"] = values["joint"].minimum(own)  # the draws may be more even than p; I <= H(X_i)
    return Reading(group, columns, values, errors)
