"""Keys: a hash of everything that an answer depends on."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.policies.sources import Shuffled
from mdmi_fast.decoding.policies.step import Step, required
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import forbidden_tokens_of
from mdmi_fast.models.identity import describe_model, identity
from mdmi_fast.ops import TokenStats


class Keys:
    """The keys of a pass, one a sequence."""

    def __init__(self, kind: str, settings: object, model: MaskedModel) -> None:
        from mdmi_fast import __version__

        # Of a network whose logits are shifted or not, the weights are the same.
        model_text = f"{identity(model)} {check.attribute(model, 'shift')}"
        self._what = f"{__version__} {kind} {model_text} {describe(settings)}"
        self._forbidden = forbidden_tokens_of("cache", model)

    def __call__(self, mask: Tensor, step: Step, hidden: Tensor | None, stats: TokenStats | None) -> list[str]:
        tokens, visible = required("cache", "tokens", step.tokens), step.attention_mask
        if hidden is None:
            raise ValueError("cache: hidden must be [B, N, D], got None")
        # A processor and an accelerator, or two precisions, round differently.
        what = f"{self._what} {hidden.dtype} {hidden.device.type}"
        # What is decoded may write stop tokens that the model never writes by itself.
        permitted = set() if step.model is None else self._forbidden - forbidden_tokens_of("cache", step.model)
        what += f" permitting {sorted(permitted)}" if permitted else ""
        head = hashlib.blake2b(what.encode(), digest_size=20)
        visible = torch.ones_like(mask) if visible is None else visible
        read = () if stats is None else (stats.entropy, stats.confidence, stats.margin)
        marginals = (field.masked_fill(~mask, 0.0) for field in read)
        rows = zip(*(part.cpu().contiguous().numpy() for part in (tokens, mask, visible, *marginals)), strict=True)
        keys = []
        for parts in rows:
            key = head.copy()
            for part in parts:
                key.update(part.tobytes())
            keys.append(key.hexdigest())
        return keys


def describe(value: object) -> str:
    """Settings and weights of a policy or source as text: equal for equal answers, different for different ones.

    Raises:
        TypeError: for an object that may answer differently from one that looks the same.
    """
    if isinstance(value, torch.nn.Module):
        configure: Any = check.attribute(value, "configuration") or dict
        return f"{type(value).__qualname__} {configure()} {describe_model(value)}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, Shuffled):  # which draws
        fields = (f"{field.name}={describe(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    raise TypeError(f"describe: cannot tell by its settings what {type(value).__name__} will answer")
