"""The frozen model as probing calls it: in a given precision, and in batches that fit into memory."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mdmi_fast.models import MaskedModel, MaskedOutput

Precision = Literal["fp32", "bf16"]


class Forward:
    """A model with the number of sequences it is given at once.

    Args:
        model: the frozen model.
        batch_size: sequences at once.
        precision: "bf16" runs the model under torch.autocast.

    Attributes:
        batch_size: as given; less after memory ran out.
    """

    def __init__(self, model: MaskedModel, batch_size: int, precision: Precision = "fp32") -> None:
        self.model, self.batch_size, self.precision = model, batch_size, precision

    def __call__(self, tokens: Tensor, attention_mask: Tensor | None) -> MaskedOutput:
        """One forward pass of all sequences given."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.model(tokens) if attention_mask is None else self.model(tokens, attention_mask)

    def shrink(self, sequences: int) -> None:
        """After torch.OutOfMemoryError with so many sequences: from now on half of them at once.

        Call it where the error is being handled.

        Raises:
            torch.OutOfMemoryError: the error itself, if there was only one.
        """
        if sequences <= 1:
            raise  # noqa: PLE0704 - the error being handled
        self.batch_size = max(1, sequences // 2)
