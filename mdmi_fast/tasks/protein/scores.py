"""How good generated chains are: against real ones or the model's own, and how varied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdmi_fast.statistics import Floats, Interval
from mdmi_fast.tasks.protein.models import RESIDUES

_FROM_START, _FROM_END, _PLACES = 100, 20, 32
_GROUPS = ("AVILMC", "FWY", "STNQ", "KRH", "DE", "GP")
"""Aliphatic, aromatic, polar, positive, negative, and the two that bend: pairs of 20 residues are too many to count."""
_GROUP_OF = np.array([next(g for g, members in enumerate(_GROUPS) if residue in members) for residue in RESIDUES])


class Divergences(NamedTuple):
    """Jensen-Shannon divergence (nats) of three statistics of chains."""

    residue: Interval
    two_mer: Interval
    position_pair: Interval


def jensen_shannon(p: Floats, q: Floats) -> Floats:
    """JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2 in nats, over the last axis of distributions [..., K]."""

    def entropy(x: Floats) -> Floats:
        result: Floats = -(x * np.log(np.where(x > 0, x, 1.0))).sum(axis=-1)
        return result

    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


class Reference:
    """A set of chains that others are compared with.

    Position pairs: of the places counted from the start (the first 100) and from the end (the last 20), the 32 whose
    residue varies most among these chains; a divergence is the mean over their pairs of that of the 36 joint
    frequencies of six groups of residues. Such plug-in divergences grow as sets get smaller, so only sets of one size
    compare.

    Args:
        chains: real ones, or the model's own.
    """

    def __init__(self, chains: Sequence[str]) -> None:
        aligned = _aligned(chains)
        frequency = np.stack([(aligned == r).mean(axis=0) for r in range(len(RESIDUES))], axis=-1)
        entropy = -(frequency * np.log(np.where(frequency > 0, frequency, 1.0))).sum(axis=-1)
        self._places = np.sort(np.argsort(-entropy, kind="stable")[:_PLACES])
        self._weights = np.full(len(chains), 1 / len(chains))
        self._statistics = self._distributions(self._features(chains), self._weights)

    def compare(
        self, chains: Sequence[str], *, minus: Sequence[str] | None = None, resamples: int = 100, seed: int = 0
    ) -> Divergences:
        """Divergences of chains from the reference; intervals from bootstrap resampling of `chains`.

        Args:
            chains: generated ones.
            minus: as many others, whose divergences are taken off. Chain n of both answers one prompt, and both are
                resampled together: what the prompts share is not counted as chance.
            resamples: bootstrap samples; an interval is the value +- 1.96 standard deviations of theirs.
            seed: of the resampling.
        """
        count = len(chains)
        features = self._features(chains)
        others = None if minus is None else self._features(minus)

        def value(weights: Floats) -> Floats:
            found = self._divergence(features, weights)
            return found if others is None else found - self._divergence(others, weights)

        even = np.full(count, 1 / count)
        draws = np.random.default_rng(seed).multinomial(count, even, size=resamples) / count
        deviation = np.std([value(weights) for weights in draws], axis=0)
        return Divergences(*map(Interval.of, value(even).tolist(), deviation.tolist()))

    def _features(self, chains: Sequence[str]) -> tuple[Floats, Floats, Floats]:
        """Per chain: residue shares [n, 20], 2-mer shares [n, 400], and one-hot groups of the places [n, P * 6]."""
        size = len(RESIDUES)
        residue, two_mer = np.zeros((len(chains), size)), np.zeros((len(chains), size * size))
        for number, chain in enumerate(chains):
            codes = _codes(chain)
            residue[number] = np.bincount(codes, minlength=size) / len(codes)
            two_mer[number] = np.bincount(codes[:-1] * size + codes[1:], minlength=size * size) / (len(codes) - 1)
        groups = _GROUP_OF[_aligned(chains)[:, self._places]]
        one_hot = (groups[..., None] == np.arange(len(_GROUPS))).reshape(len(chains), -1).astype(np.float64)
        return residue, two_mer, one_hot

    def _distributions(self, features: tuple[Floats, Floats, Floats], weights: Floats) -> list[Floats]:
        residue, two_mer, one_hot = features
        size = len(_GROUPS)
        joint = (one_hot * weights[:, None]).T @ one_hot
        joint = joint.reshape(_PLACES, size, _PLACES, size).transpose(0, 2, 1, 3)
        upper = np.triu_indices(_PLACES, 1)
        return [weights @ residue, weights @ two_mer, joint[upper].reshape(-1, size * size)]

    def _divergence(self, features: tuple[Floats, Floats, Floats], weights: Floats) -> Floats:
        found = self._distributions(features, weights)
        return np.array([jensen_shannon(p, q).mean() for p, q in zip(found, self._statistics, strict=True)])


def diversity(chains: Sequence[str]) -> tuple[float, float]:
    """(share of distinct chains, mean identity of two of them): identity counts equal residues from either end inwards.

    Two chains of different lengths are compared as the statistics are: the first 100 residues from the start, the
    last 20 from the end.
    """
    aligned = _aligned(chains)
    size = len(RESIDUES)
    counts = np.stack([(aligned == r).sum(axis=0) for r in range(size)])
    n = len(chains)
    same = (counts * (counts - 1)).sum() / (n * (n - 1) * aligned.shape[1])
    return len(set(chains)) / n, float(same)


def _codes(chain: str) -> NDArray[np.int64]:
    return np.array([RESIDUES.index(residue) for residue in chain])


def _aligned(chains: Sequence[str]) -> NDArray[np.int64]:
    """[n, 120]: codes of the first 100 residues and the last 20."""
    shortest = min(map(len, chains))
    if shortest < _FROM_START:
        raise ValueError(f"chains must have at least {_FROM_START} residues, got one of {shortest}")
    return np.stack([np.concatenate([(c := _codes(chain))[:_FROM_START], c[-_FROM_END:]]) for chain in chains])
