"""What was asked of a policy, what it did, and which of several is best."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mdmi_fast.files import read_json, replace_file
from mdmi_fast.statistics import Interval

Unit = Literal["share", "nats a token"]
"""What a loss is: a share of the quality of one position at a time, or the difference from its log-likelihood."""

_RESAMPLES = 1000
_STOP_QUANTILE = 0.001
"""Of the resampled values: a setting is given up when nearly all of them miss the target, because it is looked at often."""


class Target(NamedTuple):
    """What is asked of a policy: so many times fewer passes, or at most so much loss in a unit. One of them is None."""

    speedup: float | None
    loss: float | None
    unit: Unit = "share"

    @classmethod
    def of(cls, text: str) -> Target:
        """Read "4x", "4x fewer passes", "1%", "at most 1% loss", or of log-likelihood "0.05 nats", "at most 0.05 nats loss".

        Raises:
            ValueError: for anything else, a speedup of less than 1, a loss of more than 100% or a number beyond float64.

        Example:
            >>> Target.of("4x fewer passes")
            Target(speedup=4.0, loss=None, unit='share')
            >>> Target.of("at most 1% loss")
            Target(speedup=None, loss=0.01, unit='share')
            >>> Target.of("at most 0.05 nats loss")
            Target(speedup=None, loss=0.05, unit='nats a token')
        """
        number = r"(\d+\.?\d*|\.\d+)"
        speedup = re.fullmatch(rf"\s*{number}\s*x(?: fewer passes)?\s*", text)
        share = re.fullmatch(rf"\s*(?:at most )?{number}\s*%(?: loss)?\s*", text)
        nats = re.fullmatch(rf"\s*(?:at most )?{number}\s*nats?(?: a token)?(?: loss)?\s*", text)
        if speedup and 1 <= float(speedup[1]) < math.inf:
            return cls(float(speedup[1]), None)
        if share and float(share[1]) <= 100:
            return cls(None, float(share[1]) / 100)
        if nats and float(nats[1]) < math.inf:
            return cls(None, float(nats[1]), "nats a token")
        raise ValueError(
            "target must be such as '4x fewer passes', 'at most 1% loss' or, of log-likelihood a token, "
            f"'at most 0.05 nats loss', got {text!r}"
        )


class Tried(NamedTuple):
    """What a policy did on the calibration data.

    Attributes:
        policy: as text.
        sequences: how many it decoded; fewer than there are if it was given up.
        passes: forward passes a sequence.
        speedup: how many times fewer passes than one position at a time took for the same sequences.
        quality: the mean over sequences.
        loss: what is lost of the quality of one position at a time, in `unit`; below 0 for a gain.
        seconds: wall clock a sequence.
        given_up: it missed the target beyond doubt, so the rest of the data was left out.
        unit: of the loss; of the quality too where it is nats a token.
        rule: whose setting it is, if that was searched for.
    """

    policy: str
    sequences: int
    passes: float
    speedup: Interval
    quality: Interval
    loss: Interval
    seconds: float
    given_up: bool
    unit: Unit = "share"
    rule: str | None = None

    def meets(self, target: Target) -> bool:
        """Whether its figures reach the target; the intervals say how sure that is."""
        if self.given_up:
            return False
        if target.speedup is not None:
            return self.speedup.value >= target.speedup
        return self.loss.value <= (target.loss or 0.0)

    def surely_meets(self, target: Target) -> bool:
        """Whether the whole interval reaches the target; one sequence has none."""
        if self.given_up or self.sequences < 2:
            return False
        if target.speedup is not None:
            return self.speedup.low >= target.speedup
        return self.loss.high <= (target.loss or 0.0)

    def is_bold(self, target: Target) -> bool:
        """Whether it lies on the side of the target where fewer passes are taken: fast enough, or of too much loss."""
        return self.meets(target) == (target.speedup is not None)


class Measured:
    """A policy's passes and quality so far, a batch each.

    Attributes:
        passes: of every batch, [B] float64.
        quality: of every batch, [B] float64.
        seconds: of all batches.
        unit: of what is lost.
    """

    def __init__(self, unit: Unit = "share") -> None:
        self.passes: list[Tensor] = []
        self.quality: list[Tensor] = []
        self.seconds = 0.0
        self.unit = unit

    def resampled(self, yardstick: Measured, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """[1 + resamples] speedups, qualities and losses; the first of each is that of the data itself."""
        passes, quality = torch.cat(self.passes), torch.cat(self.quality)
        count = len(passes)
        base_passes, base_quality = torch.cat(yardstick.passes)[:count], torch.cat(yardstick.quality)[:count]
        rows = torch.randint(count, (_RESAMPLES, count), generator=generator, device="cpu")
        rows = torch.cat([torch.arange(count, device="cpu").unsqueeze(0), rows])
        speedup = base_passes[rows].sum(dim=-1) / passes[rows].sum(dim=-1)
        mean, base = quality[rows].mean(dim=-1), base_quality[rows].mean(dim=-1)
        if self.unit == "nats a token":
            return speedup, mean, base - mean
        # Where one position at a time has no quality at all there is none to lose.
        return speedup, mean, torch.where(base > 0, 1 - mean / base, 0.0)

    def hopeless(self, yardstick: Measured, target: Target, generator: torch.Generator) -> bool:
        """Whether it misses the target beyond doubt."""
        speedup, _, loss = self.resampled(yardstick, generator)
        if target.speedup is not None:
            return float(speedup.quantile(1 - _STOP_QUANTILE)) < target.speedup
        return float(loss.quantile(_STOP_QUANTILE)) > (target.loss or 0.0)

    def report(
        self, spec: str, yardstick: Measured, given_up: bool, generator: torch.Generator, rule: str | None = None
    ) -> Tried:
        """What it did on the sequences so far, beside the yardstick on the same ones."""
        speedup, quality, loss = (Interval.resampled(values) for values in self.resampled(yardstick, generator))
        passes = torch.cat(self.passes)
        seconds = self.seconds / len(passes)
        return Tried(
            spec, len(passes), float(passes.mean()), speedup, quality, loss, seconds, given_up, self.unit, rule
        )


def one_sided(tried: Iterable[Tried], target: Target) -> dict[str, str]:
    """The rules of which all settings lie on one side of the target, and what that means."""
    sides: dict[str, list[Tried]] = {}
    for one in tried:
        if one.rule is not None:
            sides.setdefault(one.rule, []).append(one)
    found = {}
    for rule, settings in sides.items():
        bold = {one.is_bold(target) for one in settings}
        speeds = [one.speedup.value for one in settings]
        if target.speedup is not None and bold == {False}:
            found[rule] = f"no setting reaches the target, the boldest takes {max(speeds):.2f} times fewer passes"
        elif target.speedup is not None and bold == {True}:
            found[rule] = (
                f"every setting exceeds the target, the most careful takes {min(speeds):.2f} times fewer passes"
            )
        elif bold == {False}:
            found[rule] = (
                f"even the boldest setting, of {max(speeds):.2f} times fewer passes, loses no more than the target"
            )
        elif bold == {True}:
            found[rule] = f"even the most careful setting, of {min(speeds):.2f} times fewer passes, loses more"
    return found


def choose(tried: Iterable[Tried], target: Target, *, surely: bool = False) -> Tried | None:
    """Of the policies that meet the target the one with the fewest passes, or, where speed is the target, the least loss.

    Args:
        tried: what `tune` gave.
        target: as there.
        surely: of those whose whole interval meets it.

    Returns:
        The policy, ties to the first; None if none meets the target.
    """
    fit = [one for one in tried if (one.surely_meets(target) if surely else one.meets(target))]
    if target.speedup is not None:
        return min(fit, key=lambda one: (one.loss.value, one.passes), default=None)
    return min(fit, key=lambda one: (one.passes, one.loss.value), default=None)


def frontier(tried: Iterable[Tried]) -> list[Tried]:
    """Those that no other beats in passes without losing more, fewest passes last; none that was given up."""
    best: list[Tried] = []
    for one in sorted((t for t in tried if not t.given_up), key=lambda t: (t.passes, t.loss.value)):
        if not best or one.loss.value < best[-1].loss.value:
            best.append(one)
    return best[::-1]


def save_choice(path: str | Path, chosen: Tried, **about: Any) -> None:
    """Write a chosen policy as JSON that `mdmi-fast decode --policy FILE` and `read_choice` read.

    Args:
        path: the file; whole or untouched.
        chosen: the policy.
        **about: what else a reader should know: model, estimator, temperature, target ...
    """
    figures = chosen._asdict()
    del figures["rule"]
    figures |= {name: figures[name]._asdict() for name in ("speedup", "quality", "loss")}
    text = json.dumps({"policy": figures.pop("policy"), **about, "measured": figures}, indent=2)
    with replace_file(Path(path)) as temporary:
        temporary.write_text(text + "\n")


def read_choice(path: str | Path) -> dict[str, Any]:
    """What `save_choice` wrote.

    Raises:
        OSError: if there is no such file.
        ValueError: if it holds something else.
    """
    choice: Any = read_json(Path(path))
    if not isinstance(choice, dict) or "policy" not in choice:
        raise ValueError(f'{path}: expected an object with a "policy"')
    return choice
