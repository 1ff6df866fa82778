"""How tokens drawn in a pass change what is drawn after them in the same pass: what a coupling is, and how the loop asks it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.decoding.policies.order import ascending
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
    """How the tokens of one pass depend on each other. One with an attribute `greedy` that is True counts at temperature 0 too.

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


def checked_coupling(coupling: Any, model: MaskedModel, temperature: float) -> Coupling | None:
    """The coupling that a decode draws with: None without one, or where it was not made for temperature 0.

    Raises:
        TypeError: for what is no coupling.
        ValueError: if it was made for another model.
    """
    if coupling is None:
        return None
    if isinstance(coupling, type) or not isinstance(coupling, Coupling):
        raise TypeError(
            "decode: coupling must be an object with the methods begin and check_model, such as Probing(), "
            f"got {check.shown(coupling)}"
        )
    coupling.check_model(model)
    return coupling if temperature > 0 or check.attribute(coupling, "greedy") is True else None


def drawing_order(entropy: Tensor, selected: Tensor) -> Tensor:
    """[R, K] int64: the selected positions by entropy, ties by index, -1 where a sequence has fewer than K."""
    count = selected.sum(dim=-1, keepdim=True)
    order = ascending(entropy, selected)[:, : int(count.max())]
    return order.masked_fill(torch.arange(order.shape[1], device=order.device) >= count, -1)


class Turn(NamedTuple):
    """One draw of every sequence that draws so many.

    Attributes:
        k: which, from 0.
        rows: [r] int64, those sequences.
        positions: [r] int64, where.
        logits: [r, V], a copy: the coupling may run the model, which may answer into the same memory.
    """

    k: int
    rows: Tensor
    positions: Tensor
    logits: Tensor

    @classmethod
    def all_of(cls, order: Tensor, logits: Tensor) -> list[Turn]:
        """The turns of an order [R, K], the first one first, from logits [R, N, V]."""
        having = [(column >= 0).nonzero().squeeze(-1) for column in order.unbind(dim=-1)]
        places = [order[rows, k] for k, rows in enumerate(having)]
        return [
            cls(k, rows, positions, logits[rows, positions])
            for k, (rows, positions) in enumerate(zip(having, places, strict=True))
        ]


class CheckedPass:
    """A pass of a coupling, whose answers are checked.

    Args:
        coupling: whose pass it is.
        step: of the decoding loop.
        hidden: [R, N, D], the model's hidden states.
        order: [R, K] int64, as for `Coupling.begin`.

    Raises:
        TypeError: if the coupling begins no pass.
    """

    def __init__(self, coupling: Coupling, step: Step, hidden: Tensor, order: Tensor) -> None:
        begun: Any = coupling.begin(step, hidden, order)
        if not all(callable(check.attribute(begun, name)) for name in ("correction", "tell")):
            raise TypeError(
                f"decode: begin of {type(coupling).__name__} must answer with an object that has the methods correction "
                f"and tell, got {check.shown(begun)}"
            )
        self._pass: CoupledPass = begun
        self._name, self._step, self._order = type(coupling).__name__, step, order

    def logits(self, turn: Turn, own: Tensor) -> Tensor | None:
        """The corrected logits [r, V] float64 of a turn; None where nothing was told or nothing is to be added.

        Args:
            turn: who draws.
            own: [r, V], the logits of what may be written there.

        Raises:
            TypeError: for a correction that is no floating tensor.
            ValueError: for one of another shape or device, or one that leaves nothing to draw.
        """
        correction = self._pass.correction(turn.k) if turn.k else None
        if correction is None:
            return None
        what = f"correction of {self._name}"
        check.floating("decode", what, correction)
        check.shape("decode", what, correction, (len(self._order), own.shape[-1]), "[R, V]")
        check.same_device("decode", logits=own, **{what: correction})
        own = own.double()
        corrected = torch.where(own == -torch.inf, own, own + correction[turn.rows].double())
        broken = ~corrected.amax(dim=-1).isfinite()
        if bool(broken.any()):
            at = int(broken.nonzero()[0])
            row = int(turn.rows[at])
            sequence = row if self._step.sequences is None else int(self._step.sequences[row])
            raise ValueError(
                f"decode: the {what} at sequence {sequence}, position {int(turn.positions[at])} must leave a distribution, "
                "got NaN, +inf, or -inf for every token that may be written"
            )
        return corrected

    def tell(self, turn: Turn, drawn: Tensor) -> None:
        """What was drawn in a turn, [r] int64; the last one changes nothing any more."""
        if turn.k + 1 < self._order.shape[1]:
            tokens = torch.zeros(len(self._order), dtype=torch.int64, device=drawn.device)
            self._pass.tell(turn.k, tokens.index_copy(0, turn.rows, drawn))
