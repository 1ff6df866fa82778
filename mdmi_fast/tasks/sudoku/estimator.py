"""The estimator of the Sudoku task: like the network, it does not care which digit is called what."""

from __future__ import annotations

from importlib.resources import as_file, files
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mdmi_fast.estimator.layers import Head, RowLayers
from mdmi_fast.estimator.scorer import ShippedScorer
from mdmi_fast.tasks.sudoku.model import DIGIT_STATE, DIGITS, HIDDEN_WIDTH, ITERATIONS, POSITION_WIDTH


class SudokuMIEstimator(ShippedScorer):
    """Two cells are compared digit by digit: sum over digits d of phi(cell i, d) * phi(cell j, d), then dense layers.

    phi sees one digit's vector, its probability and the cell's entropy, with weights shared by all digits. The one-hot
    position codes of both cells are multiplied too, which tells whether they share a row, a column or a box.

    Args:
        features: numbers per digit that enter the product.
        stem: hidden width of phi.
        layers: widths of the dense layers, one at least.

    Raises:
        ValueError: if a size is less than 1 or there are no layers.
    """

    architecture = "sudoku"
    combine = "mul"
    symmetry = "upper"  # both halves are the same, so f is symmetric and half of the pairs is enough

    def __init__(self, features: int = 8, stem: int = 32, layers: tuple[int, ...] | list[int] = (32, 16)) -> None:
        super().__init__(HIDDEN_WIDTH)
        if not layers or min(features, stem, *layers) < 1:
            raise ValueError(
                f"SudokuMIEstimator: features, stem and layers must be at least 1, got {features}, {stem}, {layers}"
            )
        self.features, self.stem_width, self.layers = features, stem, tuple(layers)
        self.stem = RowLayers(DIGIT_STATE, stem, features)
        self.same_digit = nn.Linear(features, layers[0])
        self.same_unit = nn.Parameter(0.1 * torch.randn(3, layers[0]))
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(layers))
        self.last = nn.Linear(layers[-1], 1)
        nn.init.constant_(self.last.bias, -3.0)

    def halves(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        digits, codes = hidden.split([DIGITS * DIGIT_STATE, POSITION_WIDTH], dim=-1)
        u = torch.cat([self.stem(digits.unflatten(-1, (DIGITS, DIGIT_STATE))).flatten(-2), codes], -1)
        return u, u

    def head(self) -> Head:
        head = Head.of([self.same_digit, *self.dense], self.last)
        shared, units = head.weights[0].repeat(DIGITS, 1), self.same_unit.repeat_interleave(DIGITS, dim=0)
        head.weights[0] = torch.cat([shared, units])
        return head

    def configuration(self) -> dict[str, Any]:
        return {"features": self.features, "stem": self.stem_width, "layers": list(self.layers)}

    @classmethod
    def shipped(cls, strength: str = "strong") -> SudokuMIEstimator:
        """The estimator that comes with the package for one of its networks: hidden states of another mean nothing to it.

        Raises:
            ValueError: for another name than "strong" or "weak".
        """
        if strength not in ITERATIONS:
            raise ValueError(f"sudoku: the shipped estimators are {', '.join(ITERATIONS)}, got {strength!r}")
        with as_file(files(__package__) / "weights" / f"estimator_{strength}") as folder:
            return cls.from_pretrained(folder)
