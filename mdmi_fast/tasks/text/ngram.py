"""A judge of letters that knows nothing of any network: an interpolated n-gram."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mdmi_fast.statistics import Floats


class NGram:
    """Letters given the n - 1 before them, every order interpolated with the one below (Witten and Bell, 1991).

    p(c | h) = (count(h c) + kinds(h) p(c | h without its first letter)) / (count(h) + kinds(h)), kinds(h) being how many
    different letters follow h; below the first order all letters are alike.

    Args:
        text: what is counted.
        n: letters of the longest gram, at least 1.

    Raises:
        ValueError: for an n below 1, or no text.

    Example:
        >>> judge = NGram("abababab", 2)
        >>> judge.log_p("ab", 1) > judge.log_p("aa", 1)
        True
    """

    def __init__(self, text: str, n: int = 5) -> None:
        if n < 1 or not text:
            raise ValueError(f"NGram: n must be at least 1 and text not empty, got {n} and {len(text)} letters")
        self.n, self._letters = n, len(set(text))
        self._grams = Counter(text[i : i + k] for k in range(1, n + 1) for i in range(len(text) - k + 1))
        self._total: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        for gram, count in self._grams.items():
            self._total[gram[:-1]] += count
            self._kinds[gram[:-1]] += 1

    def log_p(self, text: str, place: int) -> float:
        """Nats of the letter at a place, given those before it in the text."""
        p = 1 / self._letters
        for length in range(min(self.n, place + 1)):
            history = text[place - length : place]
            kinds, total = self._kinds[history], self._total[history]
            if not total:
                break
            p = (self._grams[history + text[place]] + kinds * p) / (total + kinds)
        return math.log(p)

    def surprise(self, texts: Sequence[str], places: Sequence[Sequence[int]]) -> Floats:
        """Mean -log p (nats) over the letters of each text whose gram holds one of its places: [n]."""
        found = np.zeros(len(texts))
        for number, (text, counted) in enumerate(zip(texts, places, strict=True)):
            touched = sorted({i for place in counted for i in range(place, min(place + self.n, len(text)))})
            found[number] = -sum(self.log_p(text, i) for i in touched) / len(touched)
        return found
