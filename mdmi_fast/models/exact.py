"""Masked models over small alphabets whose every conditional is known exactly.

They are what labels, decoding and documentation are checked against: entropies, pairwise mutual information and total
correlation given any visible tokens have closed forms. All figures are in nats, all arithmetic is float64. A
sequence's answer is the same bit for bit alone and in any batch.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mdmi_fast.models.base import MaskedOutput

_MOST_SEQUENCES = 2**24
_AT_ONCE = 2**20
"""Weights of sequences held for one batch."""


def _total(x: Tensor, axis: int) -> Tensor:
    """x.sum(axis) one slice after the other: torch's own order of summation depends on the batch."""
    return functools.reduce(torch.add, x.unbind(axis))


class ExactModel(ABC):
    """A masked model that knows its joint distribution.

    Token v of the alphabet is v; the mask token is V, one past the alphabet. The hidden state of a position is its
    marginal joined with its one-hot index, so that an estimator can be trained on it.
    """

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size = self.mask_token_id = vocab_size
        self.length = length
        self.hidden_size = vocab_size + length

    @abstractmethod
    def _marginals(self, evidence: Tensor) -> Tensor:
        """Marginals [B, N, V] given evidence [B, N, V], 1 for what a position may hold and 0 else; 0 if impossible."""

    @abstractmethod
    def entropy(self, tokens: Tensor, positions: tuple[int, ...]) -> float:
        """H of some masked positions together, given the visible tokens [N].

        Raises:
            ValueError: if tokens have another length, what is visible has probability 0, or positions are none, not of the
                sequence or not distinct.
        """

    def mutual_information(self, tokens: Tensor) -> Tensor:
        """I(X_i; X_j | visible) = H_i + H_j - H_ij for all masked pairs: [N, N] float64, 0 elsewhere."""
        masked = [i for i, token in enumerate(tokens.tolist()) if token == self.mask_token_id]
        single = {i: self.entropy(tokens, (i,)) for i in masked}
        mi = torch.zeros(len(tokens), len(tokens), dtype=torch.float64, device=tokens.device)
        for i, j in itertools.combinations(masked, 2):
            mi[i, j] = mi[j, i] = single[i] + single[j] - self.entropy(tokens, (i, j))
        return mi

    def total_correlation(self, tokens: Tensor, positions: tuple[int, ...]) -> float:
        """The sum of all H(X_i) minus H of all: the error, in nats, of drawing the positions from their marginals."""
        return sum(self.entropy(tokens, (i,)) for i in positions) - self.entropy(tokens, positions)

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        """Exact marginals.

        Args:
            tokens: [B, N] int64.
            attention_mask: [B, N] bool; what is False is summed out, whatever token stands there.

        Returns:
            logits [B, N, V] float64, log-probabilities; hidden [B, N, V + length] float32.

        Raises:
            ValueError: for tokens of another length, or if what is visible has probability 0: nothing follows from the
                impossible.
        """
        if attention_mask is not None:
            tokens = tokens.masked_fill(~attention_mask, self.mask_token_id)
        p = self._marginals(self._evidence(tokens))
        impossible = (p.sum(dim=-1) == 0).any(dim=-1)
        if bool(impossible.any()):
            sequence = tokens[int(impossible.nonzero()[0])].tolist()
            raise ValueError(f"{type(self).__name__}: the visible tokens {sequence} have probability 0")
        index = torch.eye(self.length, dtype=torch.float32, device=tokens.device)[: tokens.shape[1]].expand(
            len(tokens), -1, -1
        )
        return MaskedOutput(p.log(), torch.cat([p.float(), index], dim=-1))

    def _evidence(self, tokens: Tensor) -> Tensor:
        self._check_length(tokens.shape[-1])
        hidden = tokens.unsqueeze(-1) == self.mask_token_id
        return ((tokens.unsqueeze(-1) == torch.arange(self.vocab_size, device=tokens.device)) | hidden).double()

    def _check_positions(self, positions: tuple[int, ...], length: int) -> None:
        if not positions or len(set(positions)) < len(positions) or not all(0 <= i < length for i in positions):
            raise ValueError(
                f"{type(self).__name__}: positions must be distinct and of 0..{length - 1}, at least one, got {positions}"
            )

    def _check_length(self, length: int) -> None:
        if length != self.length:
            raise ValueError(f"{type(self).__name__}: tokens must be [..., {self.length}], got length {length}")


class JointTable(ExactModel):
    """A masked model that answers from an explicit joint distribution.

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

    def __init__(self, joint: Tensor) -> None:
        if joint.ndim < 1 or len(set(joint.shape)) != 1:
            raise ValueError(f"JointTable: joint must be [V, V, ..., V], got shape {tuple(joint.shape)}")
        weights = joint.to(torch.float64)
        if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()) or float(weights.sum()) <= 0:
            raise ValueError("JointTable: joint must hold finite weights >= 0 with a positive sum")
        super().__init__(joint.shape[0], joint.ndim)
        self.joint = weights / weights.sum()

    def marginal(self, tokens: Tensor, positions: tuple[int, ...]) -> Tensor:
        """The exact joint [V, ...] of some masked positions given the visible tokens [N], axes in the order given.

        Raises:
            ValueError: as `entropy`.
        """
        evidence = self._evidence(tokens.unsqueeze(0))
        self._check_positions(positions, self.length)
        table = self._posterior(evidence)[0]
        if float(table.sum()) == 0.0:
            raise ValueError(f"{type(self).__name__}: the visible tokens {tokens.tolist()} have probability 0")
        others = [axis for axis in range(self.length) if axis not in positions]
        kept = (table.sum(dim=others) if others else table) / table.sum()
        ascending = sorted(positions)
        return kept.permute([ascending.index(position) for position in positions])

    def entropy(self, tokens: Tensor, positions: tuple[int, ...]) -> float:
        return float(torch.special.entr(self.marginal(tokens, positions)).sum())

    def _posterior(self, evidence: Tensor) -> Tensor:
        """Weights [B, V, ..., V] of every sequence that agrees with the evidence."""
        table = self.joint.expand(len(evidence), *self.joint.shape)
        for i in range(self.length):
            shape = [len(evidence)] + [self.vocab_size if axis == i else 1 for axis in range(self.length)]
            table = table * evidence[:, i].view(shape)
        return table

    def _marginals(self, evidence: Tensor) -> Tensor:
        parts = []
        for part in evidence.split(max(1, _AT_ONCE // self.joint.numel())):
            table = self._posterior(part)
            sums = []
            for i in range(self.length):
                kept = table
                for axis in reversed([axis for axis in range(self.length) if axis != i]):
                    kept = _total(kept, 1 + axis)
                sums.append(kept / _total(kept, 1).clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(-1))
            parts.append(torch.stack(sums, dim=1))
        return torch.cat(parts) if parts else evidence


class PottsModel(JointTable):
    """A Potts model: p(x) proportional to exp(sum_i fields[i, x_i] + sum_{i<j} couplings[i, j, x_i, x_j]), enumerated.

    Args:
        fields: [N, V] float.
        couplings: [N, N, V, V] float; only i < j is read.

    Raises:
        ValueError: if shapes do not fit, an entry is not finite, or there are more than 2^24 sequences.

    Example:
        >>> import torch
        >>> couplings = torch.zeros(2, 2, 2, 2)
        >>> couplings[0, 1] = 50.0 * torch.eye(2)  # as good as always equal
        >>> round(float(PottsModel(torch.zeros(2, 2), couplings).mutual_information(torch.tensor([2, 2]))[0, 1]), 4)
        0.6931
    """

    def __init__(self, fields: Tensor, couplings: Tensor) -> None:
        if fields.ndim != 2 or couplings.shape != (len(fields), *fields.shape, fields.shape[1]):
            raise ValueError(
                f"PottsModel: fields must be [N, V] and couplings [N, N, V, V], got shapes {tuple(fields.shape)} and "
                f"{tuple(couplings.shape)}"
            )
        n, v = fields.shape
        if v**n > _MOST_SEQUENCES:
            raise ValueError(f"PottsModel: at most {_MOST_SEQUENCES} sequences can be enumerated, got {v}^{n}")
        energy = torch.zeros((v,) * n, dtype=torch.float64, device=fields.device)
        for i in range(n):
            energy += fields[i].double().view([v if axis == i else 1 for axis in range(n)])
        for i, j in itertools.combinations(range(n), 2):
            energy += couplings[i, j].double().view([v if axis in (i, j) else 1 for axis in range(n)])
        if not bool(energy.isfinite().all()):
            raise ValueError("PottsModel: fields and couplings must be finite")
        super().__init__((energy - energy.max()).exp())


class MarkovChain(ExactModel):
    """A Markov chain, answered by the forward-backward recursion: exact at any length, without enumeration.

    p(x) = initial[x_1] * prod_t transition[x_t, x_{t+1}]. Sequences may be shorter than `length`: what follows is summed out.

    Args:
        initial: [V] weights of the first token, normalised here.
        transition: [V, V] weights of the next token (columns) after each token (rows), rows normalised here.
        length: of the longest sequence.

    Raises:
        ValueError: if shapes do not fit, weights are negative or not finite, a row sums to 0, or length is less than 1.

    Example:
        >>> import torch
        >>> model = MarkovChain(torch.ones(2), torch.tensor([[0.9, 0.1], [0.1, 0.9]]), length=3)
        >>> model.mutual_information(torch.tensor([2, 2, 2])).round(decimals=4).tolist()[0]
        [0.0, 0.3681, 0.2218]
        >>> model.mutual_information(torch.tensor([2, 0, 2])).abs().max() < 1e-12  # the past tells nothing more
        tensor(True)
    """

    def __init__(self, initial: Tensor, transition: Tensor, length: int) -> None:
        if initial.ndim != 1 or transition.shape != (len(initial), len(initial)):
            raise ValueError(
                f"MarkovChain: initial must be [V] and transition [V, V], got shapes {tuple(initial.shape)} and "
                f"{tuple(transition.shape)}"
            )
        if length < 1:
            raise ValueError(f"MarkovChain: length must be at least 1, got {length}")
        rows = torch.cat([initial.unsqueeze(0), transition]).double()
        if not bool(rows.isfinite().all()) or bool((rows < 0).any()) or not bool((rows.sum(-1) > 0).all()):
            raise ValueError(
                "MarkovChain: initial and transition must hold finite weights >= 0, in rows that sum above 0"
            )
        super().__init__(len(initial), length)
        self.initial, self.transition = rows[0] / rows[0].sum(), rows[1:] / rows[1:].sum(-1, keepdim=True)

    def entropy(self, tokens: Tensor, positions: tuple[int, ...]) -> float:
        """As of every exact model. The positions form a chain themselves: H = H(first) + sum of H(next | one before)."""
        evidence = self._evidence(tokens.unsqueeze(0))
        self._check_positions(positions, len(tokens))
        forward, backward = self._messages(evidence)
        first, *later = sorted(positions)
        p = forward[0, first] * backward[0, first]
        if float(p.sum()) == 0.0:
            raise ValueError(f"MarkovChain: the visible tokens {tokens.tolist()} have probability 0")
        total = float(torch.special.entr(p / p.sum()).sum())
        for before, after in itertools.pairwise((first, *later)):
            pair = torch.diag(forward[0, before])
            for t in range(before + 1, after + 1):
                pair = pair @ self.transition * evidence[0, t]
            pair = pair * backward[0, after]
            pair = pair / pair.sum()
            total += float(torch.special.entr(pair).sum() - torch.special.entr(pair.sum(1)).sum())
        return total

    def _messages(self, evidence: Tensor) -> tuple[Tensor, Tensor]:
        """Forward [B, N, V], of what is visible up to a position, and backward, of what is behind it; each scaled."""
        ones = torch.ones_like(evidence[:, 0])
        forward, backward = [_scaled(self.initial * evidence[:, 0])], [ones]
        for t in range(1, evidence.shape[1]):
            reached = _total(forward[-1].unsqueeze(-1) * self.transition, 1)
            forward.append(_scaled(reached * evidence[:, t]))
            back = (evidence[:, -t] * backward[-1]).unsqueeze(-1)
            backward.append(_scaled(_total(self.transition.t() * back, 1)))
        return torch.stack(forward, dim=1), torch.stack(backward[::-1], dim=1)

    def _marginals(self, evidence: Tensor) -> Tensor:
        forward, backward = self._messages(evidence)
        return _scaled(forward * backward)

    def _check_length(self, length: int) -> None:
        if not 1 <= length <= self.length:
            raise ValueError(f"MarkovChain: tokens must be [..., 1 to {self.length}], got length {length}")


def _scaled(x: Tensor) -> Tensor:
    """Rows [..., V] scaled to sum to 1; a row of zeros stays."""
    return x / _total(x, -1).clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(-1)


def xor_triple() -> JointTable:
    """Three fair bits with x3 = x1 xor x2: every pairwise MI is 0, the total correlation is ln 2.

    The limit of everything pairwise: no pair shows that the three depend on each other.

    Example:
        >>> import torch
        >>> model, tokens = xor_triple(), torch.tensor([2, 2, 2])
        >>> model.mutual_information(tokens).abs().max() < 1e-12
        tensor(True)
        >>> round(model.total_correlation(tokens, (0, 1, 2)), 4)  # ln 2
        0.6931
    """
    joint = torch.zeros(2, 2, 2, dtype=torch.float32, device="cpu")
    for a, b in itertools.product(range(2), repeat=2):
        joint[a, b, a ^ b] = 0.25
    return JointTable(joint)
