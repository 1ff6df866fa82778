"""Sources of mutual information and policies whose answers are kept."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from mdmi_fast.cache.keys import Keys
from mdmi_fast.cache.tiers import Cache
from mdmi_fast.decoding.policies.pairs import MIBudget, MIThreshold
from mdmi_fast.decoding.policies.rule import checked_pass
from mdmi_fast.decoding.policies.sources import MISource, Probing, needs_step, pairwise_mi
from mdmi_fast.decoding.policies.step import Step
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import Selection, TokenStats


class CachedMI:
    """A source of mutual information whose answers are kept; itself a source, for any policy that takes one.

    Args:
        source: an estimator (a torch module) or `Probing`.
        model: the model that is decoded; its weights are hashed here, once.
        cache: where answers lie.

    Raises:
        TypeError: for a source that cannot be described by its settings and weights.

    Example:
        >>> from mdmi_fast import MIBudget, Probing, decode
        >>> from mdmi_fast.cache import Cache, CachedMI, MemoryStore
        >>> from mdmi_fast.models.exact import JointTable
        >>> model, cache = JointTable(torch.tensor([[0.6, 0.0], [0.0, 0.4]])), Cache(MemoryStore())
        >>> policy = MIBudget(CachedMI(Probing(), model, cache), gamma=0.1, entropy_weight=0.0)
        >>> for _ in range(2):
        ...     result = decode(model, torch.tensor([[2, 2]]), policy)
        >>> cache.counts["memory"].hits > 0
        True
    """

    needs_step: ClassVar[Literal[True]] = True

    def __init__(self, source: MISource, model: MaskedModel, cache: Cache) -> None:
        self.source, self.cache = source, cache
        self._keys = Keys("mi", source, model)

    def __repr__(self) -> str:
        return f"CachedMI({self.source!r})"

    def __call__(self, hidden: Tensor, mask: Tensor, step: SupportsIndex) -> Tensor:
        step = Step.of(step)
        n = mask.shape[1]
        mi = torch.zeros(len(mask), n, n, dtype=torch.float32, device="cpu")
        stats = step.stats if needs_step(self.source) and not isinstance(self.source, Probing) else None
        keys, missing = self._keys(mask, step, hidden, stats), []
        positions = [row.nonzero().squeeze(-1) for row in mask.cpu()]
        for row, (key, at) in enumerate(zip(keys, positions, strict=True)):
            payload = self.cache.get(key)
            if payload is not None and len(payload) != 4 * len(at) ** 2:
                self.cache.drop(key)
                payload = None
            if payload is None:
                missing.append(row)
            elif len(at):
                values = torch.frombuffer(bytearray(payload), dtype=torch.float32)
                mi[row, at.unsqueeze(1), at] = values.view(len(at), len(at))
        if missing:
            found = pairwise_mi(self.source, hidden, _only(mask, missing), step).detach().float().cpu()
            for row in missing:
                at = positions[row]
                mi[row] = found[row]
                self.cache.put(keys[row], found[row][at.unsqueeze(1), at].numpy().tobytes())
        return mi.to(mask.device)


class CachedPolicy:
    """A policy whose selections are kept; for rules that read mutual information, all others cost less than a look-up.

    Args:
        policy: `MIBudget` or `MIThreshold`, whose choice depends on nothing but the context.
        model: the model that is decoded; its weights are hashed here, once.
        cache: where selections lie.

    Raises:
        TypeError: for another policy, or one whose source cannot be described by its settings and weights.
    """

    def __init__(self, policy: MIBudget | MIThreshold, model: MaskedModel, cache: Cache) -> None:
        if not isinstance(policy, MIBudget | MIThreshold):
            raise TypeError(f"CachedPolicy: policy must be MIBudget or MIThreshold, got {type(policy).__name__}")
        self.policy, self.cache = policy, cache
        self._keys = Keys("selection", policy, model)

    def __repr__(self) -> str:
        return f"CachedPolicy({self.policy!r})"

    def select(self, stats: TokenStats, hidden: Any, mask: Any, step: SupportsIndex) -> Selection:
        step = Step.of(step)
        stats, hidden, mask = checked_pass("CachedPolicy", stats, hidden, mask)
        if step.notes is not None:  # reasons are asked for, and only computing gives them
            return self.policy.select(stats, hidden, mask, step)
        n, width = mask.shape[1], -(-mask.shape[1] // 8)
        selected = torch.zeros(mask.shape, dtype=torch.bool, device="cpu")
        spent = torch.zeros(len(mask), dtype=torch.float64, device="cpu")
        keys, missing = self._keys(mask, step, hidden, stats), []
        for row, key in enumerate(keys):
            payload = self.cache.get(key)
            if payload is not None and len(payload) != width + 8:
                self.cache.drop(key)
                payload = None
            if payload is None:
                missing.append(row)
            else:
                bits = np.unpackbits(np.frombuffer(payload, np.uint8, count=width), count=n)
                selected[row] = torch.from_numpy(bits.astype(bool))
                spent[row] = float(np.frombuffer(payload, np.float64, offset=width)[0])
        if missing:
            found = self.policy.select(stats, hidden, _only(mask, missing), step)
            for row in missing:
                selected[row], spent[row] = found.selected[row].cpu(), found.spent[row].cpu()
                self.cache.put(keys[row], np.packbits(selected[row].numpy()).tobytes() + spent[row].numpy().tobytes())
        return Selection(selected.to(mask.device), spent.to(mask.device))


def _only(mask: Tensor, rows: list[int]) -> Tensor:
    """The mask with nothing masked in all other rows: they cost nothing, and no tensor has to be cut."""
    keep = torch.zeros(len(mask), 1, dtype=torch.bool, device="cpu")
    keep[rows] = True
    return mask & keep.to(mask.device)
