"""What a guard looks at in passing: audited positions, and how marginals move when one position is revealed."""

from __future__ import annotations

import random
from typing import Protocol, runtime_checkable

from torch import Tensor

from mdmi_fast.decoding.policies import MISource, Policy, Probing, Step
from mdmi_fast.decoding.policies.sources import innermost
from mdmi_fast.watch.audit import AuditBlock, MovementBlock, Reveal, audit_position


@runtime_checkable
class _PairPolicy(Protocol):
    """A policy that asks a source of mutual information."""

    @property
    def mi(self) -> MISource: ...


def source_of(policy: Policy) -> MISource | None:
    """The source of mutual information that a policy asks; None where it asks none."""
    return policy.mi if isinstance(policy, _PairPolicy) else None


class Auditor:
    """Collects audits and reveals until there are enough for an observation.

    Args:
        source: of the predictions; None: there is nothing to audit.
        enough: audits, or reveals, of an observation.
        draw: of what is audited.
        audits: so far.
        reveals: so far.
    """

    def __init__(
        self, source: MISource | None, enough: int, draw: random.Random, audits: int = 0, reveals: int = 0
    ) -> None:
        self.source, self.enough, self.audits, self.reveals = source, enough, audits, reveals
        self._draw = draw
        self._block, self._movement = AuditBlock(), MovementBlock()
        self._reveal: Reveal | None = None

    def audit(self, hidden: Tensor, mask: Tensor, step: Step) -> AuditBlock | None:
        """Probe one position of a pass; a block of audits when it is full."""
        rows = (mask.sum(dim=-1) >= 2).nonzero().squeeze(-1).tolist()
        if self.source is None or step.model is None or not rows:
            return None
        row = self._draw.choice(rows)
        position = self._draw.choice(mask[row].nonzero().squeeze(-1).tolist())
        self._block.add(*audit_position(self.source, hidden, mask, step, row, position))
        self.audits += 1
        if self._block.positions < self.enough:
            return None
        block, self._block = self._block, AuditBlock()
        return block

    def await_movement(self, hidden: Tensor, mask: Tensor, step: Step, selected: Tensor) -> None:
        """Keep one of the positions that are unmasked alone in their sequence for a look at the next pass."""
        if self.source is None or not step.sampled or step.model is None or step.tokens is None or step.logits is None:
            return
        if isinstance(innermost(self.source), Probing):
            return
        alone = (selected.sum(dim=-1) == 1) & (mask.sum(dim=-1) >= 3)  # two pairs at least: a slope needs them
        rows = alone.nonzero().squeeze(-1).tolist()
        if rows:
            row = self._draw.choice(rows)
            position = int(selected[row].nonzero())
            self._reveal = Reveal.of(self.source, hidden, mask, step, row, position, self._draw)

    def see_movement(self, step: Step) -> MovementBlock | None:
        """Compare the position that was kept with this pass; a block of reveals when it is full."""
        reveal, self._reveal = self._reveal, None
        if reveal is None or step.model is None or step.tokens is None or step.logits is None:
            return None
        moved = reveal.moved(step, step.model.mask_token_id)
        if moved is None:
            return None
        self._movement.add(reveal.predicted, moved)
        self.reveals += 1
        if self._movement.reveals < self.enough:
            return None
        block, self._movement = self._movement, MovementBlock()
        return block
