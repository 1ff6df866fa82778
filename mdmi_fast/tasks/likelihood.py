"""What a masked model thinks of texts, as means with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mdmi_fast.models.call import call_model
from mdmi_fast.statistics import Floats


def surprise(
    judge: Any, texts: Sequence[str], places: Sequence[Sequence[int]], *, every: int = 4, passes: int | None = None
) -> Floats:
    """Mean -log p (nats) of letters of each text under a masked model: [n].

    In a pass every `every`-th of a text's places is masked and judged, in the next pass those beside them, so that
    `every` passes judge each place once. Where there are fewer, texts begin with different ones in turn, so that a set
    of texts is judged on all of its places.

    Args:
        judge: a model with a `LetterTokenizer` as tokenizer.
        texts: complete ones.
        places: per text, from 0, the letters that count; `every` at least.
        every: how few are masked at a time.
        passes: of each text, None for all `every`.
    """
    found = np.zeros(len(texts))
    for number, (text, counted) in enumerate(zip(texts, places, strict=True)):
        tokens = judge.tokenizer.encode([text])
        parts = [counted[(number + turn) % every :: every] for turn in range(every if passes is None else passes)]
        total = 0.0
        for part in parts:
            judged = torch.tensor(part, device=tokens.device) + len(judge.tokenizer.before)
            masked = tokens.index_fill(1, judged, judge.mask_token_id)
            logp = call_model("surprise", judge, masked).logits[0].double().log_softmax(dim=-1)
            total -= float(logp[judged, tokens[0, judged]].sum())
        found[number] = total / sum(map(len, parts))
    return found
