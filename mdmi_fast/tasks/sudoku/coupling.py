"""The coupling of the Sudoku task: like the network, it does not care which digit is called what.

None ships. Trained as benchmarks/sudoku_coupling.py says (5,402 parameters, 600 boards decoded by entropy, five minutes) it makes 56%
of 500 boards valid in 13.1 passes from an empty grid (independent: 34% in 13.6), 42% in 12.0 (8% in 13.1) and 36% in 10.9 (0% in 11.9),
and changes nothing beyond the intervals from 15 passes on (benchmarks/results/sudoku_coupling.csv). Boards decoded in random order, and a larger network trained longer on
1,000 of them, explained as much of held-out draws or more and made boards worse where few passes are saved: what is learned from runs of dependent draws errs on the nearly
independent sets that a policy chooses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mdmi_fast.coupling import LearnedCoupling
from mdmi_fast.estimator.layers import RowLayers
from mdmi_fast.tasks.sudoku.model import (
    CELLS,
    DIGIT_STATE,
    DIGITS,
    HIDDEN_WIDTH,
    VOCABULARY,
    position_codes,
)


class SudokuCoupling(LearnedCoupling):
    """What a digit v drawn in cell a adds to every digit w of cell j, with weights shared by all pairs of digits.

    z = relu(A [h_a,w; h_a,v] + B [h_j,w; h_j,v] + S [w = v] + R[units that a and j share]), then dense layers, then one number and
    its gate; h_a,w is what the network says of the digit w in cell a.

    Args:
        layers: widths of the hidden layers, one at least.

    Raises:
        ValueError: if there are no layers, or a width is less than 1.
    """

    architecture = "sudoku"
    shared: Tensor

    def __init__(self, layers: tuple[int, ...] | list[int] = (48, 24)) -> None:
        if not layers or min(layers) < 1:
            raise ValueError(f"SudokuCoupling: layers must be one width or more, each at least 1, got {tuple(layers)}")
        super().__init__(HIDDEN_WIDTH, VOCABULARY)
        self.layers, self.shift_size, self.reach = tuple(layers), VOCABULARY, CELLS
        self.drawn = RowLayers(DIGIT_STATE, 2 * layers[0])
        self.waiting = RowLayers(DIGIT_STATE, 2 * layers[0], bias=False)
        self.same = nn.Parameter(0.3 * torch.randn(layers[0]))
        self.units = nn.Parameter(0.3 * torch.randn(8, layers[0]))
        self.dense = RowLayers(*layers, 2)
        share = torch.stack([codes @ codes.T for codes in position_codes().split(9, dim=1)], dim=-1)
        self.register_buffer("shared", (share @ torch.tensor([1.0, 2.0, 4.0])).long(), persistent=False)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        digits = hidden[..., : DIGITS * DIGIT_STATE].unflatten(-1, (DIGITS, DIGIT_STATE))
        return self.drawn(digits).flatten(-2), self.waiting(digits).flatten(-2)

    def shift(self, drawn: Tensor, waiting: Tensor, tokens: Tensor, a: Tensor, j: Tensor) -> Tensor:
        digit = (tokens - 1).clamp(min=0)
        total = torch.zeros((), device=drawn.device)
        for side in (drawn, waiting):
            each, chosen = side.unflatten(-1, (DIGITS, -1)).chunk(2, dim=-1)
            own = chosen.gather(-2, digit[..., None, None].expand(*digit.shape, 1, self.layers[0]))
            total = total + each + own
        same = torch.nn.functional.one_hot(digit, DIGITS).unsqueeze(-1) * self.same
        told = self.dense(torch.relu(total + same + self.units[self.shared[a, j]].unsqueeze(-2)))
        shift = told[..., 0] * torch.relu(1.0 + told[..., 1])
        return nn.functional.pad(shift.masked_fill((a == j).unsqueeze(-1), 0.0), (1, 0))

    def output(self, shift: Tensor) -> Tensor:
        return shift

    def configuration(self) -> dict[str, Any]:
        return {"layers": list(self.layers)}
