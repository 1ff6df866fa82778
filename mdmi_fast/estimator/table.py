"""The mean label at every distance: what an estimator has to beat, and a source of mutual information by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mdmi_fast import ops
from mdmi_fast.estimator.data import Labels, examples
from mdmi_fast.estimator.distances import masked_band, of_band, of_pairs
from mdmi_fast.estimator.scorer import PairScorer
from mdmi_fast.estimator.seen import SeenStates, fingerprints, padding_of
from mdmi_fast.labels import masked_pairs
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.identity import identity


class DistanceTable(PairScorer):
    """Mutual information by distance alone: one number for each |i - j|, whatever the model says about the positions.

    A source for every policy, saved and loaded like an estimator. It reads no hidden state, takes no training, and is hard
    to beat where text or structure couples neighbours.

    Args:
        values: nats at the distances 1, 2, ...; the last one holds for all beyond.

    Raises:
        ValueError: if there is no value, or one that is not finite.

    Example:
        >>> import torch
        >>> from mdmi_fast import DistanceTable
        >>> table = DistanceTable([0.5, 0.25])
        >>> table(torch.zeros(1, 4, 8), torch.tensor([[True, True, False, True]]))[0, 0].tolist()
        [0.0, 0.5, 0.0, 0.25]
    """

    architecture = "table"
    output = "identity"

    def __init__(self, values: Sequence[float] | Tensor) -> None:
        super().__init__(1)
        self.hidden_size = 0  # it reads none
        found = torch.as_tensor(values, device="cpu").detach().to("cpu", torch.float32).clone()
        if found.ndim != 1 or len(found) < 1 or not bool(found.isfinite().all()):
            raise ValueError(f"DistanceTable: values must be at least one finite number of nats, got {values}")
        self.values = nn.Parameter(found, requires_grad=False)

    @classmethod
    def fit(cls, labels: Labels, *, distances: int | None = None, model: MaskedModel | None = None) -> DistanceTable:
        """The table that fits labels best, thin distances smoothed by their neighbours.

        The values are those of greatest probability if a label is its distance's value and normal noise, and the values
        walk at random along log(distance), by about as much as they are large. Where there are many labels that is their
        mean; where there are few or none, mostly what the distances around it say.

        Args:
            labels: of states of any lengths; a pair counts once, in whichever direction: labels are symmetric.
            distances: K, how many distances have a value of their own; the last one stands for all beyond. None: up to
                the farthest pair.
            model: whose labels they are, so that the table refuses another; None: it serves any.

        Raises:
            ValueError: if there is no labelled pair, a label is not finite, or distances is less than 1.
        """
        if distances is not None and distances < 1:
            raise ValueError(f"DistanceTable.fit: distances must be at least 1, got {distances}")
        states = examples(labels)
        mi = torch.cat(
            [torch.zeros(0, dtype=torch.float32, device="cpu"), *(state.mi.cpu() for state in states)]
        ).double()
        if not len(mi) or not bool(mi.isfinite().all()):
            finite = int(mi.isfinite().sum())
            raise ValueError(
                f"DistanceTable.fit: labels must hold a masked pair and be finite, got {len(mi)} pairs, {finite} finite"
            )
        pairs = torch.cat([state.pairs.cpu() for state in states])
        distance = (pairs[:, 0] - pairs[:, 1]).abs()
        size = int(distance.max()) if distances is None else distances
        table = cls(_smoothed(mi, distance.clamp(max=size) - 1, size))
        if model is not None:
            table.trained_on, pad = identity(model), padding_of(model)
            table.seen = SeenStates.none(complete=True).after(
                fingerprints(states, pad), torch.empty(0, dtype=torch.int64, device="cpu")
            )
        return table

    def configuration(self) -> dict[str, Any]:
        return {"values": [float(value) for value in self.values]}

    def summary(self) -> str:
        return f"table: the distances 1 to {len(self.values)}"

    def forward(self, hidden: Tensor, mask: Tensor, stats: ops.TokenStats | int | None = None) -> Tensor:
        """[B, N, N] float32, nats; hidden [B, N, D] is not read."""
        values = of_pairs(self.values.to(mask.device), mask.shape[1])
        return torch.where(masked_pairs(mask), values, 0.0)

    def band(self, hidden: Tensor, mask: Tensor, window: int) -> Tensor:
        values = of_band(self.values.to(mask.device), window)
        return torch.where(masked_band(mask, window), values, 0.0)

    @property
    def _needs_all_scores(self) -> bool:
        return True

    def check_model(self, model: MaskedModel, *, moved: bool = False) -> None:
        """Refuse another model than that of the labels, where it is known; hidden states of any width will do."""
        if not moved:
            self._check_identity(model)


def _smoothed(mi: Tensor, index: Tensor, size: int) -> Tensor:
    """[size] float64, see `DistanceTable.fit`."""
    count = torch.zeros(size, dtype=torch.float64, device="cpu").index_add_(0, index, torch.ones_like(mi))
    total = torch.zeros_like(count).index_add_(0, index, mi)
    held = count > 0
    mean = total / count.clamp(min=1)
    noise = float((mi - mean[index]).square().sum()) / max(len(mi) - int(held.sum()), 1)
    noise = max(noise, 1e-9 * float(mi.square().mean()), 1e-12)  # labels without noise leave the equations solvable
    # Far values are small and change by little: a step may be as large as what stands from half to twice its distance.
    octave = [slice((d - 1) // 2, 2 * d) for d in range(1, size + 1)]
    level = torch.stack([total[near].sum() / count[near].sum().clamp(min=1) for near in octave])
    tick = torch.arange(1, size + 1, dtype=torch.float64, device="cpu").log().diff() * level[1:].square()
    tick += 1e-6 * noise
    # Twice minus the log-likelihood, times noise: the sum of count (value - mean)^2 and of noise (value - next)^2 / tick.
    stiff = noise / tick
    system = torch.diag(count)
    first, second = torch.arange(size - 1, device="cpu"), torch.arange(1, size, device="cpu")
    system[first, first] += stiff
    system[second, second] += stiff
    system[first, second] -= stiff
    system[second, first] -= stiff
    values: Tensor = torch.linalg.solve(system, total)
    return values
