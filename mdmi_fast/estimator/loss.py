"""What an estimator is trained to make small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Transform = Literal["root", "none", "log"]


@dataclass(frozen=True)
class PairLoss:
    """Mean over masked pairs of weight * (t(predicted) - t(label))^2.

    Most pairs share nearly nothing and a few share much: a transform keeps the many small values from being lost beside
    the few large ones.

    Args:
        transform: t(x) is the signed root of |x|, x itself, or log(.01 + x) (of x >= 0).
        underestimation: weight of pairs predicted too low against those predicted too high. For sampling take more than
            1: a dependence overlooked spoils the sequence, one imagined costs a pass.
        emphasis: adds emphasis * label to a weight of 1, so that rare pairs of high mutual information count more.

    Raises:
        ValueError: for an unknown transform, an underestimation that is not positive or a negative emphasis.
    """

    transform: Transform = "root"
    underestimation: float = 1.0
    emphasis: float = 0.0

    def __post_init__(self) -> None:
        if self.transform not in get_args(Transform):
            raise ValueError(
                f"train_estimator: transform must be one of {', '.join(get_args(Transform))}, got {self.transform!r}"
            )
        if not 0 < self.underestimation < math.inf:
            raise ValueError(f"train_estimator: underestimation must be a positive number, got {self.underestimation}")
        if not 0 <= self.emphasis < math.inf:
            raise ValueError(f"train_estimator: emphasis must be a number of at least 0, got {self.emphasis}")

    def total(self, predicted: Tensor, mi: Tensor, pairs: Tensor) -> Tensor:
        """The sum over pairs [B, N, N]; divided by their number it is the loss."""
        gap = self._transformed(predicted) - self._transformed(mi)
        return (self._weight(gap, mi) * gap.square()).masked_fill(~pairs, 0.0).sum()

    def constant(self, mi: Tensor) -> float:
        """The one prediction of least loss for labels [Q], nats."""
        mi = mi.double()
        wanted = self._transformed(mi)
        mean = float(wanted.mean())
        for _ in range(20):  # a weight depends on the side of the mean that its label lies on
            weight = self._weight(mean - wanted, mi)
            mean = float((weight * wanted).sum() / weight.sum())
        if self.transform == "root":
            return math.copysign(mean * mean, mean)
        return math.exp(mean) - 0.01 if self.transform == "log" else mean

    def _weight(self, gap: Tensor, mi: Tensor) -> Tensor:
        return torch.where(gap < 0, self.underestimation, 1.0) * (1.0 + self.emphasis * mi.clamp(min=0))

    def _transformed(self, x: Tensor) -> Tensor:
        if self.transform == "root":
            return x.sign() * (x.abs() + 1e-6).sqrt()  # the constant keeps the slope finite at 0
        return (x.clamp(min=0) + 0.01).log() if self.transform == "log" else x
