"""What travels from the public operators to the backends: one object a call, named as in the C++ core.

A new operand or option of the pair ops is one field here, with its place in `flat`, `of` and the schema beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class PairNetwork(NamedTuple):
    """What follows the two halves of the first layer.

    Attributes:
        weights: of the dense layers, [in, out] each.
        biases: theirs, [out] each.
        w_out: [H_last], of the output.
        b_out: [], of the output.
    """

    weights: list[Tensor]
    biases: list[Tensor]
    w_out: Tensor
    b_out: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.weights, *self.biases, self.w_out, self.b_out]

    def map(self, function: Callable[[Tensor], Tensor]) -> PairNetwork:
        """The network of what the function makes of each tensor."""
        weights, biases = [function(w) for w in self.weights], [function(b) for b in self.biases]
        return PairNetwork(weights, biases, function(self.w_out), function(self.b_out))


class PairRule(NamedTuple):
    """How halves become a score: the options of `ops.pairwise_mlp`, all decided."""

    combine: str
    symmetry: str
    activation: str
    precision: str


class PairCall(NamedTuple):
    """Pairs to be scored, checked and with exactly one batch dimension.

    Attributes:
        u: [B, N, H1], the half of position i.
        v: [B, N, H1], the half of position j.
        network: what follows.
        rule: how.
        mask: [B, N] bool, True = masked; None = all.
        rows: [B, R] int64, the rows asked for, -1 for none; None = all.
        window: the farthest distance asked for; None = any.
        shift: [R], added to the scores by the relation of the pair; None = nothing.
        relation: [B, N, N] or [1, N, N] integers, the relation of (i, j); None = min(|i - j|, R) - 1. Backends get int32,
            contiguous, within 0 .. R - 1.
        packed: the network as this backend packed it; None = not yet.
    """

    u: Tensor
    v: Tensor
    network: PairNetwork
    rule: PairRule
    mask: Tensor | None = None
    rows: Tensor | None = None
    window: int | None = None
    shift: Tensor | None = None
    relation: Tensor | None = None
    packed: Any = None

    @property
    def op(self) -> str:
        """The public operator that asks for this."""
        if self.rows is not None:
            return "pairwise_mlp_rows"
        return "pairwise_mlp" if self.window is None else "pairwise_mlp_band"

    @property
    def tensors(self) -> list[Tensor]:
        """The operands that have a gradient."""
        return [self.u, self.v, *self.network.tensors, *([] if self.shift is None else [self.shift])]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the scores."""
        batch, n, _ = self.u.shape
        n_rows = n if self.rows is None else self.rows.shape[1]
        return batch, n_rows, n if self.window is None else 2 * self.window + 1

    @property
    def halves_are_same(self) -> bool:
        """Whether u and v are the same elements of the same memory."""
        u, v = self.u, self.v
        return u is v or (u.data_ptr() == v.data_ptr() and u.stride() == v.stride() and u.dtype == v.dtype)

    @property
    def is_symmetric(self) -> bool:
        """Whether f_ij = f_ji without a symmetry."""
        return self.halves_are_same and self.relation is None

    @property
    def turned(self) -> PairCall:
        """The call whose f_ij is f_ji of this one."""
        relation = None if self.relation is None else self.relation.mT.contiguous()
        return self._replace(u=self.v, v=self.u, relation=relation)

    def relation_of(self, b: int, i: Tensor, j: Tensor) -> Tensor:
        """The relations of pairs of positions of sequence b, int64."""
        assert self.shift is not None
        if self.relation is None:
            return (i - j).abs().clamp(1, len(self.shift)) - 1
        relation = self.relation[b if len(self.relation) > 1 else 0]
        return relation[i, j].long()

    def flat(self) -> tuple[Any, ...]:
        """The arguments of a registered operator; what is packed is no tensor and stays behind."""
        where = self.shift, self.relation, self.rows, self.window, self.mask
        return self.u, self.v, *self.network, *where, *self.rule

    @classmethod
    def of(cls, *flat: Any) -> PairCall:
        """From what `flat` gave."""
        u, v, weights, biases, w_out, b_out, shift, relation, rows, window, mask, *rule = flat
        network = PairNetwork(list(weights), list(biases), w_out, b_out)
        return cls(u, v, network, PairRule(*rule), mask, rows, window, shift, relation)


PAIR_CALL = (
    "Tensor u, Tensor v, Tensor[] weights, Tensor[] biases, Tensor w_out, Tensor b_out, Tensor? shift, Tensor? relation, "
    "Tensor? rows, SymInt? window, Tensor? mask, str combine, str symmetry, str activation, str precision"
)
"""The schema of `PairCall.flat`."""


class PairGradients(NamedTuple):
    """Gradients of the operands of a call, in their order."""

    u: Tensor
    v: Tensor
    network: PairNetwork
    shift: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.u, self.v, *self.network.tensors, *([] if self.shift is None else [self.shift])]

    def like(self, call: PairCall) -> PairGradients:
        """In the dtypes of what they belong to."""
        network = PairNetwork(
            [d.to(w.dtype) for d, w in zip(self.network.weights, call.network.weights, strict=True)],
            [d.to(b.dtype) for d, b in zip(self.network.biases, call.network.biases, strict=True)],
            self.network.w_out.to(call.network.w_out.dtype),
            self.network.b_out.to(call.network.b_out.dtype),
        )
        shift = None if self.shift is None or call.shift is None else self.shift.to(call.shift.dtype)
        return PairGradients(self.u.to(call.u.dtype), self.v.to(call.v.dtype), network, shift)


class Budget(NamedTuple):
    """What the positions of a pass may cost together, see `ops.select_budget`.

    Attributes:
        gamma: [B] float64, nats.
        lam: weight of the mutual information.
        entropy_weight: weight of the entropy.
        order: "entropy" or "cheapest".
        limit: most positions of a sequence; None = no limit.
    """

    gamma: Tensor
    lam: float
    entropy_weight: float
    order: str = "entropy"
    limit: int | None = None


BUDGET = "Tensor gamma, float lam, float entropy_weight, str order, SymInt? limit"
"""The schema of a `Budget`."""
