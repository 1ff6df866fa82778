"""What the decoding loop asks of a coupling: how tokens drawn in a pass change what is drawn after them in the same pass."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from mdmi_fast.decoding.policies.step import Step
from mdmi_fast.models import MaskedModel


class CoupledPass(Protocol):
    """One pass of a batch, whose positions are drawn in an order."""

    def correction(self, k: int) -> Tensor | None:
        """What is added to the logits of the k-th position of every sequence, given all that was told so far.

        Returns:
            [R, V] float, nats; None: nothing.
        """

    def tell(self, k: int, tokens: Tensor) -> None:
        """The tokens [R] int64 drawn at the k-th position; anything where a sequence draws fewer."""


@runtime_checkable
class Coupling(Protocol):
    """How the tokens of one pass depend on each other.

    The k-th position a_k of a pass is drawn from p(x | state) exp(sum over m < k of theta), theta what is known of the pair (a_m, a_k)
    where a_m holds the token drawn there: exactly the joint distribution for two positions if theta = log p(x_k | x_m) - log p(x_k).
    """

    def begin(self, step: Step, hidden: Tensor, order: Tensor) -> CoupledPass:
        """Get ready for a pass.

        Args:
            step: of the decoding loop, with the model, its tokens and logits.
            hidden: [R, N, D], the model's hidden states.
            order: [R, K] int64, the positions in the order in which they are drawn, -1 where a sequence draws fewer.
        """

    def check_model(self, model: MaskedModel) -> None:
        """Refuse another model than the one it was made for.

        Raises:
            ValueError: naming both.
        """
