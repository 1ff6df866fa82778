"""Long sequences: an estimator that looks at the pairs of a sliding window only."""

from __future__ import annotations

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.estimator.scorer import PairScorer
from mdmi_fast.estimator.seen import SeenStates


class Windowed:
    """An estimator's predictions for pairs at most `window` apart; all others count as independent.

    A source of mutual information for `MIBudget`, which then needs memory for N (2 window + 1) pairs instead of N^2.

    Args:
        estimator: predicts the pairs.
        window: the farthest distance, at least 1.

    Raises:
        ValueError: if window is less than 1.

    Example:
        >>> from mdmi_fast import MIBudget, PairwiseMIEstimator
        >>> policy = MIBudget(Windowed(PairwiseMIEstimator(hidden_size=8, layers=(16,)), window=64), gamma=0.1)
    """

    def __init__(self, estimator: PairScorer, window: int) -> None:
        if window < 1:
            raise ValueError(f"Windowed: window must be at least 1, got {window}")
        self.estimator, self.window = estimator, window

    @property
    def seen(self) -> SeenStates | None:
        """As that of the estimator."""
        return self.estimator.seen

    def __repr__(self) -> str:
        return f"Windowed({type(self.estimator).__name__}, window={self.window})"

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """The whole matrix [B, N, N], 0 outside the window: for maps and rules that need it, not for long sequences."""
        n = mask.shape[1]
        place = torch.arange(n, device=mask.device)
        offset = place - place.unsqueeze(-1)
        near = offset.abs() <= self.window
        index = (offset + self.window).clamp(0, 2 * self.window).expand(len(mask), n, n)
        return self.estimator.band(hidden, mask, self.window).gather(-1, index) * near

    def score_and_select(
        self,
        entropy: Tensor,
        hidden: Tensor,
        mask: Tensor,
        *,
        gamma: float | Tensor,
        lam: float = 1.0,
        entropy_weight: float = 1.0,
        limit: int | None = None,
    ) -> ops.Selection:
        """`ops.select_budget_band` on the predicted band; arguments as of `PairScorer.score_and_select`.

        Positions whose own cost exceeds the budget can be taken first or not at all, so their pairs are not scored.
        """
        budget = torch.as_tensor(gamma, dtype=torch.float64, device=mask.device).reshape(-1, 1)
        hopeful = mask if entropy_weight == 0 else mask & (entropy_weight * entropy.double() <= budget)
        band = self.estimator.band(hidden, hopeful, self.window)
        return ops.select_budget_band(
            entropy, band, gamma=gamma, lam=lam, entropy_weight=entropy_weight, mask=mask, limit=limit
        )
