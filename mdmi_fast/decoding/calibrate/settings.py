"""Settings of a rule: what it would have had to allow on the way of one position at a time, and quantiles of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.decoding.policies.baselines import Sequential
from mdmi_fast.decoding.policies.parse import find_policy
from mdmi_fast.decoding.policies.registry import Prices, Seen
from mdmi_fast.decoding.policies.sources import MISource, pairwise_mi
from mdmi_fast.decoding.policies.step import Step
from mdmi_fast.ops import Selection, TokenStats

_HALVINGS = 10


class Survey:
    """A policy, one position at a time, that notes what other rules would see on the way.

    Args:
        mi: the source of mutual information; None: not to be noted.
        kl: whether to note how far distributions move.
        every: passes from one note to the next.
    """

    def __init__(self, mi: MISource | None, *, kl: bool, every: int) -> None:
        self._mi, self._kl, self._every = mi, kl, every
        self.seen: list[Seen] = []

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: int) -> Selection:
        assert isinstance(step, Step)  # from `decode`
        moved: Tensor | None = None
        if self._kl and step.memory is not None and step.logits is not None:
            if self in step.memory:
                moved = ops.kl_divergence(step.logits, *step.memory[self])
            step.memory[self] = (step.logits.clone(),)
        # In a first pass nothing has moved yet, and there may be no third one.
        if step % self._every == 0 or step == 1:
            mi = None if self._mi is None else pairwise_mi(self._mi, hidden, mask, step).clamp(min=0)
            attention = None if step.attention is None else (step.attention + step.attention.mT) / 2
            for row, masked in enumerate(mask):
                if int(masked.sum()) > 1:
                    entropy, doubt = (
                        x[row, masked].double().cpu() for x in (stats.entropy, 1 - stats.confidence.double())
                    )
                    kl = None if moved is None else moved[row, masked].double().cpu()
                    pairs = [None if x is None else x[row][masked][:, masked].double().cpu() for x in (mi, attention)]
                    self.seen.append(Seen(entropy, doubt, kl, *pairs))
        return Sequential().select(stats, hidden, mask, step)


class Settings:
    """The settings of a rule, from the most careful at 0 to the boldest at 1.

    Args:
        rule: as text, without a value.
        survey: what the rule would have seen.
        longest: the most masked positions of a sequence.
        one_by_one: passes of the few sequences, one position at a time.
        passes: the same of a setting.
    """

    def __init__(
        self, rule: str, survey: Survey, longest: int, one_by_one: float, passes: Callable[[str], float]
    ) -> None:
        self.rule, self._policy = rule, find_policy(rule)
        self._options = dict(option.split("=", 1) for option in rule.split(",")[1:])
        self._one_by_one, self._passes = one_by_one, passes
        self._known: dict[str, float] = {}
        if self._policy.is_count:
            self._levels = torch.arange(1, longest + 1, device="cpu")
        else:
            self._levels = self._levels_of(self._policy.prices, survey.seen)
        self._along = {
            option: (self._levels_of(prices, survey.seen), setting)
            for option, (prices, setting) in self._policy.along.items()
            if option not in self._options
        }

    def at(self, share: float) -> str:
        """The setting at a share of the way, as the text of a policy."""
        level = _at(self._levels, share)
        if self._policy.is_count:
            return with_value(self.rule, f"{round(level)}")
        along = "".join(f",{option}={setting(_at(levels, share))}" for option, (levels, setting) in self._along.items())
        return with_value(self.rule, self._policy.setting(level)) + along

    def reaching(self, speedup: float) -> str:
        """The most careful setting with that many times fewer passes on the few sequences; the boldest if there is none."""
        if speedup <= 1:
            return self.at(0.0)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = self._look_up(middle)
            low, high = (low, middle) if found >= speedup else (middle, high)
            if speedup <= found <= 1.05 * speedup:
                break
        if low == 0.0 and self._look_up(low) >= speedup:
            high = low
        return self.at(high)

    def _look_up(self, share: float) -> float:
        spec = self.at(share)
        if spec not in self._known:
            self._known[spec] = self._one_by_one / self._passes(spec)
        return self._known[spec]

    def _levels_of(self, prices: Prices | None, seen: Sequence[Seen]) -> Tensor:
        """All prices in ascending order, between nothing and more than any of them."""
        found = [torch.zeros(1, dtype=torch.float64, device="cpu")]
        for each in seen:
            asked = None if prices is None else prices(each, self._options)
            if asked is None:
                raise ValueError(
                    f"tune: the rule {self.rule} reads what the model does not show: give it a value, or leave it out"
                )
            found.append(asked)
        levels = torch.cat(found).sort().values
        return torch.cat([levels, 2 * levels[-1:]])


def _at(levels: Tensor, share: float) -> float:
    """The quantile of levels in ascending order."""
    place = share * (len(levels) - 1)
    first = int(place)
    low, high = float(levels[first]), float(levels[min(first + 1, len(levels) - 1)])
    return low + (place - first) * (high - low)


def with_value(rule: str, value: str) -> str:
    """The policy of a rule, such as "mi-budget,lam=2", with a value."""
    name, comma, options = rule.partition(",")
    return f"{name}:{value}{comma}{options}"
