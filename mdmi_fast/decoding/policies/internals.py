"""Policies that look at more of the model than one pass's statistics, without training anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.decoding.policies.order import take_lowest
from mdmi_fast.decoding.policies.registry import COUNT, NUMBER, above_diagonal, policy, threshold
from mdmi_fast.decoding.policies.rule import Rule, nothing_spent
from mdmi_fast.decoding.policies.step import Step, required
from mdmi_fast.ops import Selection, TokenStats


@policy(
    "stability",
    unmasks="positions whose distribution moved by at most kl nats since the last pass, of at least that confidence (0.9)",
    value=("kl", NUMBER),
    options={"confidence": NUMBER},
    prices=lambda seen, options: seen.doubt[:0] if seen.kl is None else seen.kl,
    along={"confidence": (lambda seen, options: seen.doubt, threshold)},
    tried=("",),
)
@dataclass(frozen=True)
class Stability(Rule):
    """Positions whose distribution has settled: KL(p_now || p_before) <= kl and max_v p(v) >= confidence, or the surest.

    KLASS (arXiv 2511.05664) with a history of one pass. In a sequence's first pass nothing has settled yet.

    Cost: one read of two [B, N, V] logits a pass, and a copy of the last pass's logits between passes. Needs a
    `Step` with logits and memory.

    Args:
        kl: nats, at least 0.
        confidence: a probability.
    """

    kl: float
    confidence: float = 0.9

    def __post_init__(self) -> None:
        check.at_least("Stability", "kl", self.kl, 0.0)
        check.at_least("Stability", "confidence", self.confidence, 0.0)

    @property
    def reads_stats_only(self) -> bool:
        return False

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        logits = required("Stability", "logits", step.logits)
        memory = required("Stability", "memory", step.memory)
        if logits.ndim != 3 or logits.shape[:2] != mask.shape:
            raise ValueError(
                f"Stability: step.logits must be [B, N, V] with [B, N] = {tuple(mask.shape)}, got {check.describe(logits)}"
            )
        settled = torch.zeros_like(mask)
        if self in memory:
            settled = ops.kl_divergence(logits, *memory[self]) <= float(self.kl)
        memory[self] = (logits.clone(),)  # a model may write its next answer into the same memory
        sure = settled & (stats.confidence >= float(self.confidence)) & mask
        return nothing_spent(sure | take_lowest(-stats.confidence, mask, 1))


@policy(
    "attention-graph",
    unmasks="a set without attention of tau or more between its members, for models that show theirs",
    value=("tau", NUMBER),
    options={"limit": COUNT},
    prices=lambda seen, options: None if seen.attention is None else above_diagonal(seen.attention),
)
@dataclass(frozen=True)
class AttentionGraph(Rule):
    """A maximal set of positions with (a_ij + a_ji) / 2 < tau for every pair, most neighbours x confidence first.

    Attention between masked positions stands in for their dependence: an edge where it reaches tau, and of the graph
    an independent set, taken greedily by degree times confidence (DAPD, arXiv 2603.12996).

    Cost: N^2 comparisons a sequence; no network. Needs a `Step` with attention [B, N, N], averaged over heads and
    late layers; `decode` takes it from a model whose output has such a field `attention` (`AttentiveOutput`), such as one of
    `load_model("hf:...", attention="eager")`.

    Args:
        tau: attention from which on a pair counts as dependent, at least 0.
        limit: most positions of a pass, at least 1; None for no limit.
    """

    tau: float
    limit: int | None = None

    def __post_init__(self) -> None:
        check.at_least("AttentionGraph", "tau", self.tau, 0.0)
        if self.limit is not None:
            check.whole("AttentionGraph", "limit", self.limit, 1)

    @property
    def reads_stats_only(self) -> bool:
        return False

    def _choose(self, stats: TokenStats, hidden: Tensor | None, mask: Tensor, step: Step) -> Selection:
        attention = step.attention
        if attention is None:
            raise ValueError(
                "AttentionGraph: step must be a Step with attention; models of transformers show theirs when loaded with "
                'attention="eager"'
            )
        if attention.shape != (*mask.shape, mask.shape[1]):
            raise ValueError(
                f"AttentionGraph: step.attention must be [B, N, N] = {(*mask.shape, mask.shape[1])}, averaged over heads "
                f"and layers, got {check.describe(attention)}"
            )
        check.same_device("AttentionGraph", **{"mask": mask, "step.attention": attention})
        weight = (attention + attention.transpose(-1, -2)) / 2
        pairs = mask.unsqueeze(-1) & mask.unsqueeze(-2)
        pairs.diagonal(dim1=-2, dim2=-1).fill_(False)
        degree = ((weight >= float(self.tau)) & pairs).sum(dim=-1)
        rank = -degree * stats.confidence
        return ops.select_threshold(rank, weight, tau=self.tau, mask=mask, limit=self.limit)
