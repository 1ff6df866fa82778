"""What a masked model thinks of texts, as means with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A value with a 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, deviation: float) -> Estimate:
        return cls(value, value - 1.96 * deviation, value + 1.96 * deviation)


def surprise(judge: Any, texts: Sequence[str], places: Sequence[Sequence[int]], *, every: int = 4) -> Floats:
    """Mean -log p (nats) of letters of each text under a masked model: [n], one pass a text.

    Of a text's places every `every`-th is masked and judged, beginning with another one from text to text, so that a
    set of texts is judged on all of its places.

    Args:
        judge: a model with a `LetterTokenizer` as tokenizer.
        texts: complete ones.
        places: per text, from 0, the letters that count.
        every: how few are masked at a time.
    """
    found = np.zeros(len(texts))
    for number, (text, counted) in enumerate(zip(texts, places, strict=True)):
        tokens = judge.tokenizer.encode([text])
        judged = torch.tensor(counted[number % every :: every]) + len(judge.tokenizer.before)
        masked = tokens.index_fill(1, judged, judge.mask_token_id)
        logp = judge(masked).logits[0].double().log_softmax(dim=-1)
        found[number] = -float(logp[judged, tokens[0, judged]].mean())
    return found


def mean_estimate(values: Floats) -> Estimate:
    """A mean with its 95% interval."""
    return Estimate.of(float(values.mean()), float(values.std(ddof=1)) / len(values) ** 0.5)
