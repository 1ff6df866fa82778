"""What is known of a heavy chain without looking, and whether the pairs of largest mutual information agree with it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mdmi_fast.tasks.protein.chains import Chain

Matrix = NDArray[np.bool_]
APART = 6
"""Least distance along the chain of the pairs that are ranked: neighbours depend on each other in any text."""


class Enrichment(NamedTuple):
    """How many of the pairs of largest mutual information are known ones.

    Attributes:
        top: pairs looked at.
        known: of them, how many are known.
        expected: how many of as many pairs drawn at random.
        p: share of permutations of the positions with at least as many known pairs (+1 in both).
    """

    top: int
    known: int
    expected: float
    p: float


def known_pairs(chain: Chain) -> dict[str, Matrix]:
    """Kinds of pairs that biology connects, each [L, L] bool, symmetric, of residues at least APART apart.

    "cysteines" is the disulphide bond; "V gene" joins all residues before CDR3, which come from one germline gene;
    "CDR3" joins residues of the third loop, which is made anew in every cell; "loops" are pairs of two different loops,
    which meet in the binding site.
    """
    regions = chain.regions()
    length = len(regions)
    place = np.arange(length)
    apart = np.abs(place[:, None] - place) >= APART
    loop = regions % 2 == 1
    gene, third = regions < 5, regions == 5
    bond = np.zeros((length, length), dtype=bool)
    bond[chain.cysteines, chain.cysteines[::-1]] = True
    kinds = {
        "cysteines": bond,
        "V gene": gene[:, None] & gene,
        "CDR3": third[:, None] & third,
        "loops": loop[:, None] & loop & (regions[:, None] != regions),
    }
    return {name: pairs & apart for name, pairs in kinds.items()}


def rank_share(mi: NDArray[np.float64], pair: tuple[int, int]) -> float:
    """Share of the ranked pairs whose mutual information is at least that of one pair: small is high."""
    values = mi[_ranked(len(mi))]
    return float((values >= mi[pair]).mean())


def enrichment(mi: NDArray[np.float64], known: Matrix, *, permutations: int = 2000, seed: int = 0) -> Enrichment:
    """Known pairs among the L / 5 of largest mutual information, against permuted positions.

    Args:
        mi: [L, L] nats, symmetric, all positions masked.
        known: [L, L] bool, as `known_pairs` gives.
        permutations: of the positions of `known`.
        seed: of the permutations.
    """
    length = len(mi)
    rows, columns = _ranked(length)
    top = length // 5
    best = np.argsort(-mi[rows, columns], kind="stable")[:top]
    i, j = rows[best], columns[best]
    found = int(known[i, j].sum())
    random = np.random.default_rng(seed)
    reached = 0
    for _ in range(permutations):
        mixed = random.permutation(length)
        reached += int(known[mixed[i], mixed[j]].sum()) >= found
    return Enrichment(top, found, top * float(known[rows, columns].mean()), (1 + reached) / (1 + permutations))


def _ranked(length: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    rows, columns = np.triu_indices(length, APART)
    return rows, columns
