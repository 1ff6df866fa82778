"""What the workers of test_service.py load: apart, so that a worker imports no more than it needs."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdmi_fast.models import MaskedOutput
from mdmi_fast.service.worker import Engine, Settings


class Toy:
    """A model of sequences of any length over 4 tokens; what it says depends on the visible ones. Padding is ignored."""

    mask_token_id, vocab_size, hidden_size = 4, 5, 2

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        time.sleep(self.seconds)
        visible = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        known = visible & (tokens != self.mask_token_id)
        total = (known * (tokens + 1)).sum(dim=-1, keepdim=True)
        place = torch.arange(tokens.shape[1])
        logits = torch.sin((total + place).unsqueeze(-1) * torch.arange(1.0, 6.0))
        logits[..., self.mask_token_id] = -torch.inf
        return MaskedOutput(logits, torch.stack([place.expand_as(tokens), tokens], dim=-1).float())


class Deadly(Toy):
    """Kills its process over a sequence of nothing but 3 with one blank, and fails over one of nothing but 2."""

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
        for row in tokens.tolist():
            told = {token for token in row if token != self.mask_token_id}
            if told == {3}:
                os.kill(os.getpid(), signal.SIGKILL)
            if told == {2}:
                raise RuntimeError("not this one")
        return super().__call__(tokens, attention_mask)


SETTINGS = Settings("toy", "topk:2")


def make(number: int, model: Any, settings: Settings = SETTINGS) -> Callable[[], Engine]:
    return functools.partial(Engine, settings, number, model=model)


def broken_weights() -> Engine:
    raise ValueError("the weights are NaN")


def while_there_is(path: Path) -> Engine:
    """Starts only as long as a file exists, as a model does whose folder is removed later."""
    return Engine(SETTINGS, model=Toy(float(path.read_text())))
