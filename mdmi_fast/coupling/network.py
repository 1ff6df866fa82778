"""The general coupling: hidden states of two positions, the token drawn at one of them, and how far apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mdmi_fast.coupling.learned import LearnedCoupling, read_configuration
from mdmi_fast.estimator.layers import RowLayers
from mdmi_fast.models.loading import resolve


class PairwiseCoupling(LearnedCoupling):
    """theta(a, v, j): what is added to the log-probabilities of position j once the token v was drawn at position a.

    z = relu(A h_a + B h_j + T[v] + D[j - a]), then dense layers, then a shift of `rank` numbers, which a table
    [rank, V] turns into one number for each token. A gate, itself an output of the network, is exactly 0 for pairs that are better
    left alone; pairs farther apart than `distances` always are.

    Args:
        hidden_size: D of the model.
        vocab_size: V of the model; the tables T and [rank, V] grow with it.
        layers: widths of the hidden layers, one at least.
        rank: numbers of a shift.
        distances: K, the farthest pair.

    Raises:
        ValueError: if a size is less than 1 or there are no layers.

    Example:
        >>> from mdmi_fast import PairwiseCoupling
        >>> PairwiseCoupling(hidden_size=8, vocab_size=5, layers=(16,)).n_parameters
        1697
    """

    architecture = "general"

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        layers: Sequence[int] = (128, 64),
        *,
        rank: int = 48,
        distances: int = 8,
    ) -> None:
        if not layers or min(hidden_size, vocab_size, rank, distances, *layers) < 1:
            raise ValueError(
                "PairwiseCoupling: hidden_size, vocab_size, layers, rank and distances must be at least 1, got "
                f"{hidden_size}, {vocab_size}, {tuple(layers)}, {rank}, {distances}"
            )
        super().__init__(hidden_size, vocab_size)
        self.layers, self.rank, self.distances = tuple(layers), rank, distances
        self.shift_size, self.reach = rank, distances
        first = layers[0]
        self.drawn = RowLayers(hidden_size, first)
        self.waiting = RowLayers(hidden_size, first, bias=False)
        self.token = nn.Parameter(0.3 * torch.randn(vocab_size, first))
        self.offset = nn.Parameter(0.3 * torch.randn(2 * distances + 1, first))
        self.dense = RowLayers(*layers, rank + 1)
        self.table = RowLayers(rank, vocab_size, bias=False)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.drawn(hidden), self.waiting(hidden)

    def shift(self, drawn: Tensor, waiting: Tensor, tokens: Tensor, a: Tensor, j: Tensor) -> Tensor:
        offset = j - a
        near = (offset != 0) & (offset.abs() <= self.distances)
        place = offset.clamp(-self.distances, self.distances) + self.distances
        told = self.dense(torch.relu(drawn + waiting + self.token[tokens] + self.offset[place]))
        gate = torch.relu(1.0 + told[..., -1:])
        shift: Tensor = told[..., :-1] * gate
        return shift.masked_fill(~near.unsqueeze(-1), 0.0)

    def output(self, shift: Tensor) -> Tensor:
        return self.table(shift)  # type: ignore[no-any-return]

    def configuration(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "layers": list(self.layers),
            "rank": self.rank,
            "distances": self.distances,
        }


def load_coupling(folder: str | Path) -> LearnedCoupling:
    """Load a coupling that `save_pretrained` or `mdmi-fast couple` wrote, of any architecture.

    Args:
        folder: its folder.

    Returns:
        The coupling in evaluation mode.

    Raises:
        FileNotFoundError: if there is no such folder, or it holds no coupling.
        ValueError: if the folder is damaged, or of an architecture that is not installed.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"load_coupling: no folder {folder}; `mdmi-fast couple` trains a coupling, none ships with the package"
        )
    architecture = read_configuration(Path(folder))["architecture"]
    if architecture == PairwiseCoupling.architecture:
        return PairwiseCoupling.from_pretrained(folder)
    found: type[LearnedCoupling] = resolve("mdmi_fast.couplings", architecture)
    return found.from_pretrained(folder)
