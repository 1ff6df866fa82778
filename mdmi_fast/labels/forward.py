"""The frozen model as probing calls it: in a given precision, and in batches that fit into memory."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mdmi_fast.models import MaskedModel, MaskedOutput
from mdmi_fast.models.call import call_model

Precision = Literal["fp32", "bf16"]


class Forward:
    """A model with the number of tokens it is given at once.

    Args:
        model: the frozen model.
        batch_tokens: tokens at once, or one sequence where that is more.
        precision: "bf16" runs the model under torch.autocast.

    Attributes:
        batch_tokens: as given; less after memory ran out.
    """

    def __init__(self, model: MaskedModel, batch_tokens: int, precision: Precision = "fp32") -> None:
        self.model, self.batch_tokens, self.precision = model, batch_tokens, precision

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None) -> MaskedOutput:
        """One forward pass of all sequences given.

        Raises:
            TypeError: as `call_model`, for an answer of another kind.
            ValueError: likewise, for one that does not fit.
        """
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return call_model("probe_mi", self.model, tokens, attention_mask)

    def batch_size(self, length: int) -> int:
        """Sequences of a length at once."""
        return max(1, self.batch_tokens // max(1, length))

    def shrink(self, sequences: int, length: int) -> None:
        """After torch.OutOfMemoryError with so many sequences of a length: from now on half of them at once.

        Call it where the error is being handled.

        Raises:
            torch.OutOfMemoryError: the error itself, if there was only one.
        """
        if sequences <= 1:
            raise
        self.batch_tokens = min(self.batch_tokens, sequences // 2 * length)
