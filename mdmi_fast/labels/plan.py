"""Which probes a labelling needs, and how far from full probing it can be without the others.

Write p for the base marginal of X_i, q_v for p(x_j | X_i = v), and let the values that are probed carry 1 - delta of p.
What the others could change, whatever the model answers to them:

- "joint": with T the event that X_i is not probed, the chain rule gives
  I(X_i; X_j) = I(T; X_j) + (1 - delta) I(X_i; X_j | not T) + delta I(X_i; X_j | T).
  All terms are >= 0, the first is at most h(delta), the last at most delta H(X_i | T). So full probing lies between
  (1 - delta) I_probed, which is the label, and that plus h(delta) + delta H(X_i | T), the entropy of X_i that was not
  probed. With no probe at all this says 0 <= I <= H(X_i): a position of low entropy needs no probe.
- "entropy": H(x_j) is known from the base pass, and of the sum of p_v H(q_v) there lacks between 0 and delta ln V. The label
  takes the mean of those probed for the others, which is wrong by at most delta ln V.
- "kl": the sum of p_v KL(q_v || p_j) lacks between 0 and delta max_x(-ln p_j(x)), as KL(q || p) <= max_x(-ln p(x)). That is
  inf where p_j has a zero: then nothing is left out.

Answers received do not make these bounds smaller: one not asked for may put all of q_v on a token that is nearly
impossible otherwise, and the base marginal of X_j does not exclude it, because a trained network's conditionals do not
add up to it. In the joint form a label in the middle of its interval would be proven twice as well, which saves 1% of
the passes on Sudoku states (a threshold of 0.02 instead of 0.01 nats), but would lift every pair that shares nothing.

Three more savings:

- One end of a pair is enough where one direction is asked for. Then the positions that stay unprobed may be any set
  without a pair inside that still needs a probe; the most expensive positions are tried first. By symmetry of mutual
  information nothing is lost if the model's conditionals are consistent; else the label is that of the direction taken.
- Interchangeable tokens. If relabelling some tokens relabels the model's answer (Sudoku digits), then for two of them, u
  and v, that are not visible, the exchange of u and v leaves the sequence as it is. So the answer to X_i = v is the
  answer to X_i = u with u and v exchanged, and one probe tells of all such tokens. Exact in every form.
- Pairs further apart than a window, or not chosen, are left at 0 and ask for no probe.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mdmi_fast.labels.options import FORMS, Form, ProbeOptions


class Plan(NamedTuple):
    """What to probe in B sequences.

    Attributes:
        values: [B, N, V] bool, what X_i is set to.
        weights: [B, N, V] float64, shares of those values, of sum 1 where there are any.
        kept: [B, N] float64, 1 - delta: what the weighted sum is worth; 1 where the values were drawn.
        probes: [B, N, V] bool, the passes: `values`, one for all interchangeable ones.
        twin: [B, V] int64, the token whose probe tells of this one, itself for most.
        known: [B, N] bool: this end says something of its pairs. False only where the other end is relied on.
        draws: [B, N] int64: how many draws the values are of, 0 where they were not drawn.
        error: form -> [B, N, N] float32, at most so far from full probing is row i of what the probes give.
    """

    values: Tensor
    weights: Tensor
    kept: Tensor
    probes: Tensor
    twin: Tensor
    known: Tensor
    draws: Tensor
    error: dict[Form, Tensor]


def make_plan(
    base: Tensor,
    tokens: Tensor,
    mask: Tensor,
    pairs: Tensor,
    *,
    visible: Tensor | None,
    options: ProbeOptions,
    interchangeable: Sequence[int],
) -> Plan:
    """Find the fewest probes that keep every form asked for within epsilon of full probing, as the module's text proves.

    Args:
        base: [B, N, V] logits without a probe.
        tokens: [B, N] int64, the mask token where masked.
        mask: [B, N] bool.
        pairs: [B, N, N] bool, symmetric: the pairs wanted, both ends masked.
        visible: [B, N] bool, False at padding; None: no padding.
        options: the forms whose error must be within epsilon, the directions of a pair, and what is drawn: from the seed and the
            sequence itself, so that nothing depends on the batch or on padding.
        interchangeable: tokens whose relabelling relabels the model's answer.
    """
    logp = base.double().log_softmax(dim=-1).masked_fill(~mask.unsqueeze(-1), 0.0)  # what is visible may be NaN
    p = logp.exp()
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    outside = _outside(ordered, (-logp).amax(dim=-1))
    needed = torch.zeros_like(mask, dtype=torch.int64)
    for form in options.forms:
        needed = needed.maximum(outside.needed(form, pairs, options.epsilon))
    needed = needed.masked_fill(~pairs.any(dim=-1), 0)
    known = mask
    if options.directions == "one":
        asking = needed > 0
        known = mask & ~_independent(pairs & asking.unsqueeze(-1) & asking.unsqueeze(-2), asking, needed)
        needed = needed.masked_fill(~known, 0)

    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(p.shape[-1], device=p.device).expand_as(order))
    weights = p * (rank < needed.unsqueeze(-1))
    drawn = torch.zeros_like(mask)
    if options.samples is not None:
        drawn = needed > options.samples
        weights = _draw(p, tokens, visible, options.samples, options.seed).where(drawn.unsqueeze(-1), weights)
    values = weights > 0
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)

    trusted = needed.masked_fill(drawn, 0)  # a sample proves no more than no probe
    error = {form: outside.error(form, trusted).where(pairs, outside.error(form, needed * 0)) for form in FORMS}
    kept = 1 - outside.mass.gather(-1, trusted.unsqueeze(-1)).squeeze(-1)
    twin = _twins(tokens, p.shape[-1], interchangeable)
    probes = torch.zeros_like(order).scatter_add_(-1, twin.unsqueeze(1).expand_as(order), values.long()) > 0
    kept = kept.masked_fill(drawn, 1.0)
    draws = drawn * (options.samples or 0)
    return Plan(values, weights, kept, probes, twin, known, draws, {form: each.float() for form, each in error.items()})


class _Outside(NamedTuple):
    """What is left out when only the k most probable values are probed, for k = 0 .. V.

    Attributes:
        mass: [B, N, V + 1] float64, delta.
        entropy: [B, N, V + 1] float64, h(delta) + delta H(X_i | T).
        surprise: [B, N] float64, max_x(-ln p_j(x)).
    """

    mass: Tensor
    entropy: Tensor
    surprise: Tensor

    def needed(self, form: Form, pairs: Tensor, epsilon: float) -> Tensor:
        """[B, N] the fewest values with an error within epsilon for every pair wanted."""
        error = self.entropy
        if form == "entropy":
            error = self.mass * self._most_entropy()
        elif form == "kl":
            error = times(self.mass, self.surprise.unsqueeze(-2).where(pairs, 0.0).amax(dim=-1, keepdim=True))
        return (error > epsilon * (1 - 1e-6)).sum(dim=-1)  # the result is rounded to float32

    def error(self, form: Form, count: Tensor) -> Tensor:
        """[B, N, N] of row i when count[i] values are probed."""
        mass, entropy = (each.gather(-1, count.unsqueeze(-1)) for each in (self.mass, self.entropy))
        if form == "kl":
            return times(mass, self.surprise.unsqueeze(-2))
        return (entropy if form == "joint" else mass * self._most_entropy()).expand(*count.shape, count.shape[-1])

    def _most_entropy(self) -> float:
        return math.log(self.mass.shape[-1] - 1)


def _outside(ordered: Tensor, surprise: Tensor) -> _Outside:
    """From p [B, N, V] in descending order."""

    def behind(x: Tensor) -> Tensor:
        """Sums from k to the end, small terms first; exactly 0 where all are."""
        return F.pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1))

    mass = behind(ordered).clamp(max=1.0)
    inside = F.pad(ordered.cumsum(-1), (1, 0)).clamp(max=1.0)
    # h(delta) + delta H(X | T) = -(1 - delta) ln(1 - delta) - sum over T of p ln p
    entropy = (behind(torch.special.entr(ordered)) + torch.special.entr(inside)).where(mass > 0, 0.0)
    return _Outside(mass, entropy, surprise)


def times(share: Tensor, nats: Tensor) -> Tensor:
    """The product, in which a share of 0 gives 0 of infinitely many nats."""
    return (share * nats).where(share > 0, 0.0)


def _independent(edges: Tensor, candidates: Tensor, cost: Tensor) -> Tensor:
    """[B, N] bool: candidates without an edge among them, greedily from the highest cost (ties: lower index)."""
    chosen = torch.zeros_like(candidates)
    for index in cost.sort(dim=-1, descending=True, stable=True).indices.unbind(-1):
        at = index.view(-1, 1)
        row = edges.gather(1, at.unsqueeze(-1).expand(-1, 1, edges.shape[-1])).squeeze(1)
        free = candidates.gather(1, at).squeeze(1) & ~(row & chosen).any(dim=-1)
        chosen.scatter_(1, at, free.unsqueeze(-1))
    return chosen


def _draw(p: Tensor, tokens: Tensor, visible: Tensor | None, samples: int, seed: int) -> Tensor:
    """How often each value [B, N, V] float64 comes up in `samples` draws a position, from seed and sequence alone."""
    uniforms = torch.zeros(*tokens.shape, samples, dtype=torch.float64, device="cpu")
    for row, sequence in enumerate(tokens):
        own = torch.ones_like(sequence, dtype=torch.bool) if visible is None else visible[row]
        generator = torch.Generator().manual_seed((seed + fingerprint(sequence[own])) % 2**63)
        uniforms[row, own.cpu()] = torch.rand(
            int(own.sum()), samples, dtype=torch.float64, generator=generator, device="cpu"
        )
    drawn = invert_cumulative(p, uniforms.to(p.device))
    return torch.zeros_like(p).scatter_add_(-1, drawn, torch.ones_like(drawn, dtype=p.dtype))


def invert_cumulative(p: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from weights p [..., V] float64 with numbers [..., S] in [0, 1): the values [..., S] int64, none of weight 0."""
    cumulative = p.cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, uniforms * cumulative[..., -1:], right=True)
    # Rounding may carry a target to the very end: no further than the last value of any weight.
    return drawn.minimum(torch.searchsorted(cumulative, cumulative[..., -1:].contiguous()))


def _twins(tokens: Tensor, vocabulary: int, interchangeable: Sequence[int]) -> Tensor:
    """[B, V]: the lowest interchangeable token that is not visible, for all of these; every other token itself."""
    identity = torch.arange(vocabulary, device=tokens.device).expand(len(tokens), vocabulary)
    if not len(interchangeable):
        return identity
    group = torch.tensor(sorted(interchangeable), device=tokens.device)
    absent = (tokens.unsqueeze(-1) != group).all(dim=1)
    first = group[absent.long().argmax(dim=-1)].unsqueeze(-1)
    return identity.scatter(1, group.expand(len(tokens), -1), group.where(~absent, first))


def fingerprint(tokens: Tensor) -> int:
    """A number of 62 bits that changes with any token or place."""
    digest = hashlib.sha256(tokens.cpu().contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 2
