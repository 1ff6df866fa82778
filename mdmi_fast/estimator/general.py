"""The estimator for any model: hidden states of two positions through one to three hidden layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.estimator.layers import Head, RowLayers
from mdmi_fast.estimator.scorer import Output, PairScorer

Combine = Literal["concat", "product", "interaction"]
Marginals = Literal["none", "entropy", "summary"]


class PairwiseMIEstimator(PairScorer):
    """The general estimator: any hidden state in, one to three hidden layers.

    The first hidden layer of a pair reads (arXiv 2605.20187)

    - "concat": [h_i; h_j], averaged over both orders;
    - "product": (P h_i) * (P h_j), a learned bilinear form of low rank;
    - "interaction": that product joined to the concatenation [relu(A h_i); relu(A h_j)], whose two halves share their
      weights. Both are symmetric by themselves, so half of the pairs is scored.

    Args:
        hidden_size: D of the model.
        layers: widths of the hidden layers, 1 to 3 of them.
        combine: see above.
        rank: rows of P and of A; "concat" has none.
        output: "softplus", >= 0; "identity", for labels that may be negative; "bounded", between 0 and min(H_i, H_j).
        marginals: what joins the state: nothing, "entropy" H_i, or "summary": H_i, the largest probability and its margin.
        weighted_layers: L > 1: the model joined the states of L of its layers, D = L * width; one state is made of them
            with learned weights that sum to 1. 1 takes the joined states as they are.
        distances: K > 0: a learned number for each distance |i - j| up to K, the last one beyond, is added to the last
            layer's answer: hidden states of relative positions do not tell how far apart two of them are. A fresh network
            is trained from the mean label at each distance.
        relation: [N, N] integers from 0, for sequences of N positions whose geometry is known, such as the rows, columns and
            boxes of a board: a learned number for each relation instead of each distance.

    Raises:
        TypeError: if relation is no tensor of integers.
        ValueError: if a size is less than 1 or distances less than 0, there are no layers or more than three, weighted_layers does not divide
            hidden_size, combine, output or marginals is unknown, relation is not square or negative somewhere, or both
            distances and a relation are given.

    Example:
        >>> import torch
        >>> from mdmi_fast import PairwiseMIEstimator
        >>> estimator = PairwiseMIEstimator(hidden_size=8, layers=(16,))
        >>> estimator(torch.randn(1, 5, 8), torch.ones(1, 5, dtype=torch.bool)).shape
        torch.Size([1, 5, 5])
    """

    architecture = "general"

    def __init__(
        self,
        hidden_size: int,
        layers: Sequence[int] = (512, 256),
        combine: Combine = "concat",
        *,
        rank: int = 64,
        output: Output = "softplus",
        marginals: Marginals = "none",
        weighted_layers: int = 1,
        distances: int = 0,
        relation: Tensor | None = None,
    ) -> None:
        super().__init__(hidden_size)
        if not 1 <= len(layers) <= 3 or min(layers) < 1:
            raise ValueError(f"PairwiseMIEstimator: layers must be 1 to 3 widths >= 1, got {tuple(layers)}")
        for name, value, choices in (
            ("combine", combine, Combine),
            ("output", output, Output),
            ("marginals", marginals, Marginals),
        ):
            if value not in get_args(choices):
                raise ValueError(
                    f"PairwiseMIEstimator: {name} must be one of {', '.join(get_args(choices))}, got {value!r}"
                )
        if rank < 1:
            raise ValueError(f"PairwiseMIEstimator: rank must be at least 1, got {rank}")
        if weighted_layers < 1 or hidden_size % weighted_layers:
            raise ValueError(
                f"PairwiseMIEstimator: weighted_layers must be a divisor of hidden_size {hidden_size}, "
                f"got {weighted_layers}"
            )
        if distances < 0:
            raise ValueError(f"PairwiseMIEstimator: distances must be at least 0, got {distances}")
        if relation is not None:
            if distances:
                raise ValueError(f"PairwiseMIEstimator: distances must be 0 where there is a relation, got {distances}")
            self.relation = _checked_relation(relation)
        self.layers, self.kind, self.rank = tuple(layers), combine, rank
        self.output, self.marginals, self.weighted_layers = output, marginals, weighted_layers
        self.needs_stats = marginals != "none" or output == "bounded"
        self.combine = "add" if combine == "concat" else "mul"
        self.symmetry = "mean" if combine == "concat" else "upper"
        if weighted_layers > 1:
            self.layer_weights = nn.Parameter(torch.zeros(weighted_layers))
        width = hidden_size // weighted_layers + {"none": 0, "entropy": 1, "summary": 3}[marginals]
        self.distances = distances
        n_relations = distances if self.relation is None else int(self.relation.max()) + 1
        if n_relations:
            self.shift = nn.Parameter(torch.zeros(n_relations))
        if combine == "concat":
            self.left = RowLayers(width, layers[0])
            self.right = RowLayers(width, layers[0], bias=False)
            widths = self.layers
        else:
            self.project = RowLayers(width, rank)
            widths = (rank, *self.layers)
        if combine == "interaction":
            self.alone = RowLayers(width, rank)
            self.alone_in = nn.Linear(rank, layers[0], bias=False)
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.last = nn.Linear(widths[-1], 1)
        nn.init.constant_(self.last.bias, 0.0 if output == "identity" else -3.0)  # most pairs share nearly nothing

    def read(self, hidden: Tensor, marginals: ops.TokenStats | None) -> Tensor:
        if self.weighted_layers > 1:
            states = hidden.unflatten(-1, (self.weighted_layers, -1)).unbind(-2)
            shares = self.layer_weights.softmax(0)
            # One after the other: a sum over an axis may round by the size of the batch.
            hidden = reduce(torch.add, [share * state for share, state in zip(shares, states, strict=True)])
        if self.marginals == "none" or marginals is None:
            return hidden
        fields = [marginals.entropy]
        if self.marginals == "summary":
            fields += [marginals.confidence, marginals.margin]
        return torch.cat([hidden, torch.stack(fields, -1).to(hidden.dtype)], -1)

    def halves(self, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "concat":
            return self.left(state), self.right(state)
        product = self.project(state)
        if self.kind == "product":
            return product, product
        # x_i * 1 and 1 * x_j carry the concatenation through the product.
        alone = torch.relu(self.alone(state))
        ones = torch.ones_like(alone)
        return torch.cat([product, alone, ones], -1), torch.cat([product, ones, alone], -1)

    def head(self) -> Head:
        head = Head.of(self.dense, self.last)
        if self.kind == "interaction":
            alone = self.alone_in.weight.t()
            head.weights[0] = torch.cat([head.weights[0], alone, alone])
        return head

    def configuration(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "layers": list(self.layers),
            "combine": self.kind,
            "rank": self.rank,
            "output": self.output,
            "marginals": self.marginals,
            "weighted_layers": self.weighted_layers,
            "distances": self.distances,
        }


def _checked_relation(relation: Tensor) -> Tensor:
    """[N, N] int32, a copy."""
    check.dense("PairwiseMIEstimator", "relation", relation)
    if relation.is_floating_point() or relation.is_complex() or relation.dtype == torch.bool:
        raise TypeError(f"PairwiseMIEstimator: relation must be of integers, got {check.describe(relation)}")
    if relation.ndim != 2 or relation.shape[0] != relation.shape[1] or not relation.numel():
        raise ValueError(f"PairwiseMIEstimator: relation must be [N, N], got {check.describe(relation)}")
    least, most = (int(x) for x in relation.aminmax())
    if least < 0 or most >= 2**15:
        raise ValueError(f"PairwiseMIEstimator: relation must be within 0 .. 32767, got {least} .. {most}")
    return relation.to(torch.int32, copy=True)
