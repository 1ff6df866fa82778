"""Masked models over small alphabets whose every conditional is known exactly.

They are what labels, decoding and documentation are checked against: a table holds the whole joint distribution, so
entropies, pairwise mutual information and total correlation have closed forms. All figures are in nats.
"""

from __future__ import annotations

import itertools

import torch

from mdmi_fast.models.base import MaskedOutput


class JointTable:
    """A masked model that answers from an explicit joint distribution.

    Token v of the alphabet is v; the mask token is V, one past the alphabet. The hidden state of a position is its
    marginal joined with its one-hot index, so that an estimator can be trained on it.

    Args:
        joint: [V, V, ..., V] (N axes) non-negative weights of every sequence; normalised here, in float64.

    Raises:
        ValueError: if the axes differ in length, or the weights are negative, not finite or sum to 0.

    Example:
        >>> import torch
        >>> model = JointTable(torch.tensor([[0.5, 0.0], [0.0, 0.5]]))  # two fair bits that agree
        >>> model(torch.tensor([[0, 2]])).logits.exp().tolist()
        [[[1.0, 0.0], [1.0, 0.0]]]
        >>> round(model.total_correlation(torch.tensor([2, 2]), (0, 1)), 4)
        0.6931
    """

    def __init__(self, joint: torch.Tensor) -> None:
        if joint.ndim < 1 or len(set(joint.shape)) != 1:
            raise ValueError(f"JointTable: joint must be [V, V, ..., V], got shape {tuple(joint.shape)}")
        weights = joint.to(torch.float64)
        if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()) or float(weights.sum()) <= 0:
            raise ValueError("JointTable: joint must hold finite weights >= 0 with a positive sum")
        self.joint = weights / weights.sum()
        self.length = joint.ndim
        self.vocab_size = joint.shape[0]
        self.mask_token_id = self.vocab_size
        self.hidden_size = self.vocab_size + self.length

    def conditional(self, tokens: torch.Tensor) -> torch.Tensor:
        """The joint of all positions given the visible ones of tokens [N]: visible axes have length 1.

        Raises:
            ValueError: if tokens are not N, or if what is visible has probability 0: nothing follows from the
                impossible.
        """
        if tokens.shape != (self.length,):
            raise ValueError(f"JointTable: tokens must be [{self.length}], got shape {tuple(tokens.shape)}")
        index = tuple(
            slice(None) if token == self.mask_token_id else slice(int(token), int(token) + 1)
            for token in tokens.tolist()
        )
        table = self.joint[index]
        total = table.sum()
        if float(total) == 0.0:
            raise ValueError(f"JointTable: the visible tokens {tokens.tolist()} have probability 0")
        return table / total

    def marginal(self, tokens: torch.Tensor, positions: tuple[int, ...]) -> torch.Tensor:
        """The exact joint [V, ...] of some masked positions given the visible tokens [N], axes in the order given."""
        table = self.conditional(tokens)
        others = [axis for axis in range(self.length) if axis not in positions]
        kept = table.sum(dim=others) if others else table
        ascending = sorted(positions)
        return kept.permute([ascending.index(position) for position in positions])

    def entropy(self, tokens: torch.Tensor, positions: tuple[int, ...]) -> float:
        """H of some masked positions together, given the visible tokens [N]."""
        return float(torch.special.entr(self.marginal(tokens, positions)).sum())

    def mutual_information(self, tokens: torch.Tensor) -> torch.Tensor:
        """I(X_i; X_j | visible) for all masked pairs: [N, N] float64, 0 elsewhere and on the diagonal."""
        masked = [i for i, token in enumerate(tokens.tolist()) if token == self.mask_token_id]
        mi = torch.zeros(self.length, self.length, dtype=torch.float64)
        for i, j in itertools.combinations(masked, 2):
            value = self.entropy(tokens, (i,)) + self.entropy(tokens, (j,)) - self.entropy(tokens, (i, j))
            mi[i, j] = mi[j, i] = value
        return mi

    def total_correlation(self, tokens: torch.Tensor, positions: tuple[int, ...]) -> float:
        """The sum of all H(X_i) minus H of all: the error, in nats, of drawing the positions from their marginals."""
        return sum(self.entropy(tokens, (i,)) for i in positions) - self.entropy(tokens, positions)

    def __call__(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> MaskedOutput:
        """Exact marginals.

        Args:
            tokens: [B, N] int64.
            attention_mask: [B, N] bool; what is False is summed out, whatever token stands there.

        Returns:
            logits [B, N, V] float64, log-probabilities; hidden [B, N, V + N] float32.

        Raises:
            ValueError: as `conditional`.
        """
        if attention_mask is not None:
            tokens = tokens.masked_fill(~attention_mask, self.mask_token_id)
        logits = torch.empty(*tokens.shape, self.vocab_size, dtype=torch.float64)
        for row, sequence in enumerate(tokens):
            table = self.conditional(sequence)
            for i, token in enumerate(sequence.tolist()):
                if token == self.mask_token_id:
                    logits[row, i] = self._axis(table, i).log()
                else:
                    logits[row, i] = -torch.inf
                    logits[row, i, token] = 0.0
        index = torch.eye(self.length).expand(*tokens.shape, self.length)
        return MaskedOutput(logits, torch.cat([logits.exp().float(), index], dim=-1))

    def _axis(self, table: torch.Tensor, axis: int) -> torch.Tensor:
        others = [other for other in range(self.length) if other != axis]
        return table.sum(dim=others) if others else table


def xor_triple() -> JointTable:
    """Three fair bits with x3 = x1 xor x2: every pairwise MI is 0, the total correlation is ln 2.

    The limit of everything pairwise: no pair shows that the three depend on each other.
    """
    joint = torch.zeros(2, 2, 2)
    for a, b in itertools.product(range(2), repeat=2):
        joint[a, b, a ^ b] = 0.25
    return JointTable(joint)
