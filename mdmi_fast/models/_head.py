"""The last product of a network, from features to logits, and the network without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LastProduct:
    """logits = features weight^T + bias, where features is what the layer `name` of `owner` is given.

    Attributes:
        owner: the module that holds the layer.
        name: of the attribute.
        layer: the layer itself.
        bias: [V], the layer's own or one that its owner adds; None without one.
    """

    owner: nn.Module
    name: str
    layer: nn.Linear
    bias: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, network: Any, mask: int) -> LastProduct | None:
        """The last product of a masked LM, if it gives the logits of a sample; None where it cannot be found."""
        try:
            layer = network.get_output_embeddings()
        except AttributeError:  # a network of somebody's own need not have the method
            return None
        found = [
            cls(owner, name, layer)
            for owner in network.modules()
            for name, child in owner.named_children()
            if child is layer and isinstance(layer, nn.Linear)
        ]
        if len(found) != 1:
            return None
        (product,) = found
        tokens = torch.tensor([[0, mask, 1]], device=layer.weight.device)
        logits = network(input_ids=tokens).logits
        with product.left_out() as tap:
            network(input_ids=tokens)
        if tap.features is None:  # the network multiplies by the weights itself
            return None
        tolerance = 1e-4 if logits.dtype.itemsize >= 4 else 2e-2  # two orders of the same sum
        for bias in (layer.bias, dict(product.owner.named_parameters(recurse=False)).get("bias")):
            if torch.allclose(F.linear(tap.features, layer.weight, bias), logits, rtol=tolerance, atol=tolerance):
                return cls(product.owner, product.name, layer, bias)
        return None

    @contextmanager
    def left_out(self) -> Iterator[Tap]:
        """Run the network without the product, keeping what would have gone in. Not for two threads at once."""
        tap = Tap(self.layer)
        setattr(self.owner, self.name, tap)
        try:
            yield tap
        finally:
            setattr(self.owner, self.name, self.layer)


class Tap(nn.Module):
    """Stands where the last product was; keeps its input and answers zeros that take no memory."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.weight, self.bias = layer.out_features, layer.weight, layer.bias
        self.features: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.features = x
        return x.new_zeros(1).expand(*x.shape[:-1], self.out_features)
