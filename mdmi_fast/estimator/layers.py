"""The parts that pair networks are made of: layers on single positions, the head behind the halves, and that head packed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from mdmi_fast import ops


@dataclass(frozen=True)
class Head:
    """What follows the two halves of a pair network: the arguments of `ops.pairwise_mlp`, in its order."""

    weights: list[Tensor]
    biases: list[Tensor]
    w_out: Tensor
    b_out: Tensor

    @classmethod
    def of(cls, dense: Iterable[nn.Module], last: nn.Linear) -> Head:
        """The head made of linear layers."""
        layers = [cast(nn.Linear, layer) for layer in dense]
        return cls(
            [layer.weight.t() for layer in layers], [layer.bias for layer in layers], last.weight[0], last.bias[0]
        )


class PackedHead(NamedTuple):
    """A head packed for inference, and how to see whether it still is the network's.

    Attributes:
        head: the layers.
        prepared: what a backend made of them.
        places: where modules and parameters were found: holder, name, found.
        parameters: of the network.
        versions: their addresses and how often they had been written.
    """

    head: Head
    prepared: ops.PreparedPairwise
    places: list[tuple[dict[str, Any], str, Any]]
    parameters: list[Tensor]
    versions: list[tuple[int, int]]

    @classmethod
    def of(cls, network: nn.Module, head: Head) -> PackedHead:
        """Pack the head of a network."""
        places = [
            (holder, name, found)
            for module in network.modules()
            for holder in (module._modules, module._parameters)
            for name, found in holder.items()
        ]
        parameters: list[Tensor] = list(network.parameters())
        prepared = ops.prepare_pairwise(head.weights, head.biases, head.w_out, head.b_out)
        return cls(head, prepared, places, parameters, _versions(parameters))

    def is_current(self) -> bool:
        """Whether no parameter was written or replaced. Walking the network would take longer than scoring a board: this looks
        where everything was found instead.
        """
        in_place = all(holder.get(name) is found for holder, name, found in self.places)
        return in_place and self.versions == _versions(self.parameters)


def _versions(parameters: list[Tensor]) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p._version) for p in parameters]


class RowLayers(nn.Sequential):
    """Linear layers with ReLU between them, on every position by itself: the same, bit for bit, in every batch.

    Args:
        widths: of the input and of every layer's output, two at least.
        bias: of the layers.
    """

    def __init__(self, *widths: int, bias: bool = True) -> None:
        layers = [nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)]
        super().__init__(*[module for layer in layers for module in (layer, nn.ReLU())][:-1])

    def forward(self, x: Tensor) -> Tensor:
        """[B, ..., in] to [B, ..., out]."""
        layers = [cast(nn.Linear, layer) for layer in list(self)[::2]]
        biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        return ops.mlp(x, [layer.weight.t() for layer in layers], biases)
