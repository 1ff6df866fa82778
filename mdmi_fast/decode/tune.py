"""Choosing a policy by measurement: every rule over its settings on calibration data, and the best that meets a target."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast import ops
from mdmi_fast.decode.loop import decode
from mdmi_fast.decode.policies import MISource, needs_mi, parse_policy
from mdmi_fast.decode.randomness import draw_seeds
from mdmi_fast.files import read_json, replace_file
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import _checks as check

Quality = Callable[[Tensor, Tensor, Tensor], Tensor]
"""How good decoded tokens [B, N] are, given what was asked for [B, N] bool and the sequences' numbers [B] in the data:
[B], more is better, at least 0."""

YARDSTICK = "sequential"
SETTINGS: dict[str, tuple[str, ...]] = {
    "topk": ("2", "3", "4", "6", "8"),
    "confidence": ("0.99", "0.95", "0.9", "0.8", "0.6"),
    "confidence-factor": ("0.1", "0.3", "1", "2"),
    "confidence-budget": ("0.02", "0.05", "0.1", "0.2", "0.5", "1"),
    "entropy-bound": ("0.02", "0.05", "0.1", "0.2", "0.5", "1"),
    "stability": ("0.001,confidence=0.9", "0.01,confidence=0.9", "0.01,confidence=0.7"),
    "mi-budget": ("0.1", "0.3", "0.6", "1", "2"),
    "mi-threshold": ("0.005", "0.02", "0.05", "0.1"),
    "coloring": ("0.005", "0.02", "0.05", "0.05,replan=2"),
}
"""The settings tried of each rule, careful ones first."""
SAMPLING = ("0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5")
"""Budgets of mi-budget with entropy_weight=0, tried too where tokens are drawn."""

_RESAMPLES = 1000
_STOP_QUANTILE = 0.001
"""Of the resampled values: a rule is given up when nearly all of them miss the target, because it is looked at often."""


class Target(NamedTuple):
    """What is asked of a policy: so many times fewer passes, or at most so much loss. One of them is None."""

    speedup: float | None
    loss: float | None

    @classmethod
    def of(cls, text: str) -> Target:
        """Read "4x", "4x fewer passes", "1%" or "at most 1% loss".

        Raises:
            ValueError: for anything else, a speedup of less than 1 or a loss of more than 100%.

        Example:
            >>> Target.of("4x fewer passes")
            Target(speedup=4.0, loss=None)
            >>> Target.of("at most 1% loss")
            Target(speedup=None, loss=0.01)
        """
        speedup = re.fullmatch(r"\s*(\d+\.?\d*)\s*x(?: fewer passes)?\s*", text)
        loss = re.fullmatch(r"\s*(?:at most )?(\d+\.?\d*)\s*%(?: loss)?\s*", text)
        if speedup and float(speedup[1]) >= 1:
            return cls(float(speedup[1]), None)
        if loss and float(loss[1]) <= 100:
            return cls(None, float(loss[1]) / 100)
        raise ValueError(f"target must be such as '4x fewer passes' or 'at most 1% loss', got {text!r}")


class Interval(NamedTuple):
    """A figure and the middle 95% of its bootstrap distribution over sequences."""

    value: float
    low: float
    high: float


class Tried(NamedTuple):
    """What a policy did on the calibration data.

    Attributes:
        policy: as text.
        sequences: how many it decoded; fewer than there are if it was given up.
        passes: forward passes a sequence.
        speedup: how many times fewer passes than one position at a time took for the same sequences.
        quality: the mean over sequences.
        loss: share of the quality of one position at a time that is lost, below 0 for a gain.
        seconds: wall clock a sequence.
        given_up: it missed the target beyond doubt, so the rest of the data was left out.
    """

    policy: str
    sequences: int
    passes: float
    speedup: Interval
    quality: Interval
    loss: Interval
    seconds: float
    given_up: bool

    def meets(self, target: Target) -> bool:
        """Whether its figures reach the target; the intervals say how sure that is."""
        if self.given_up:
            return False
        if target.speedup is not None:
            return self.speedup.value >= target.speedup
        return self.loss.value <= (target.loss or 0.0)


def candidates(*, mi: bool, sampling: bool) -> list[str]:
    """The policies that `tune` tries unless told.

    Args:
        mi: whether there is a source of mutual information.
        sampling: whether tokens are drawn.
    """
    specs = [f"{name}:{value}" for name, values in SETTINGS.items() for value in values]
    if sampling:
        specs += [f"mi-budget:{value},entropy_weight=0" for value in SAMPLING]
    return [spec for spec in specs if mi or not needs_mi(spec)]


def tune(
    model: MaskedModel,
    tokens: Tensor,
    quality: Quality,
    target: Target,
    *,
    policies: Sequence[str] | None = None,
    mi: MISource | None = None,
    attention_mask: Tensor | None = None,
    batch_size: int = 32,
    seed: int = 0,
    **options: Any,
) -> Iterator[Tried]:
    """Try policies on calibration sequences, in batches, and give up each that misses the target beyond doubt.

    The yardstick, one position at a time, comes first. All policies decode the same sequences with the same seeds, so
    speedup and loss are paired; their intervals resample sequences.

    Args:
        model: the model to be decoded.
        tokens: [S, N] int64, the calibration sequences, masked where something is to be decoded.
        quality: what counts, such as `pseudo_likelihood`.
        target: what a policy has to reach.
        policies: as text; None: `candidates`.
        mi: the source for those that read mutual information.
        attention_mask: [S, N] bool, False at padding.
        batch_size: sequences between two looks at the target.
        seed: of the draws and of the resampling.
        **options: of `decode`.

    Yields:
        A Tried for every policy, the yardstick first.

    Raises:
        ValueError: for a policy that cannot be read, or data without a masked position.
    """
    asked = tokens == model.mask_token_id
    if attention_mask is not None:
        asked &= attention_mask
    if not bool(asked.any(dim=-1).all()) or not len(tokens):
        raise ValueError("tune: tokens must hold at least one sequence, and every one a masked position")
    sampling = float(options.get("temperature", 0.0)) > 0
    specs = candidates(mi=mi is not None, sampling=sampling) if policies is None else list(policies)
    tried = [(spec, parse_policy(spec, mi)) for spec in (YARDSTICK, *specs)]
    generator = torch.Generator().manual_seed(seed)
    seeds = draw_seeds(len(tokens), generator, tokens.device)
    batches = torch.arange(len(tokens)).split(batch_size)
    yardstick: Measured | None = None
    for spec, policy in tried:
        measured, given_up = Measured(), False
        for number, rows in enumerate(batches):
            visible = None if attention_mask is None else attention_mask[rows]
            start = time.perf_counter()
            result = decode(model, tokens[rows], policy, seeds=seeds[rows], attention_mask=visible, **options)
            measured.seconds += time.perf_counter() - start
            measured.passes.append(result.passes.double().cpu())
            measured.quality.append(quality(result.tokens, asked[rows], rows).double().cpu())
            last = number == len(batches) - 1
            if yardstick is not None and not last and measured.hopeless(yardstick, target, generator):
                given_up = True
                break
        if yardstick is None:
            yardstick = measured
        yield measured.report(spec, yardstick, given_up, generator)


class Measured:
    """A policy's passes and quality so far, a batch each.

    Attributes:
        passes: of every batch, [B] float64.
        quality: of every batch, [B] float64.
        seconds: of all batches.
    """

    def __init__(self) -> None:
        self.passes: list[Tensor] = []
        self.quality: list[Tensor] = []
        self.seconds = 0.0

    def resampled(self, yardstick: Measured, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """[1 + resamples] speedups, qualities and losses; the first of each is that of the data itself."""
        passes, quality = torch.cat(self.passes), torch.cat(self.quality)
        count = len(passes)
        base_passes, base_quality = torch.cat(yardstick.passes)[:count], torch.cat(yardstick.quality)[:count]
        rows = torch.randint(count, (_RESAMPLES, count), generator=generator)
        rows = torch.cat([torch.arange(count).unsqueeze(0), rows])
        speedup = base_passes[rows].sum(dim=-1) / passes[rows].sum(dim=-1)
        mean, base = quality[rows].mean(dim=-1), base_quality[rows].mean(dim=-1)
        # Where one position at a time has no quality at all there is none to lose.
        return speedup, mean, torch.where(base > 0, 1 - mean / base, 0.0)

    def hopeless(self, yardstick: Measured, target: Target, generator: torch.Generator) -> bool:
        """Whether it misses the target beyond doubt."""
        speedup, _, loss = self.resampled(yardstick, generator)
        if target.speedup is not None:
            return float(speedup.quantile(1 - _STOP_QUANTILE)) < target.speedup
        return float(loss.quantile(_STOP_QUANTILE)) > (target.loss or 0.0)

    def report(self, spec: str, yardstick: Measured, given_up: bool, generator: torch.Generator) -> Tried:
        """What it did on the sequences so far, beside the yardstick on the same ones."""
        speedup, quality, loss = (_interval(values) for values in self.resampled(yardstick, generator))
        passes = torch.cat(self.passes)
        seconds = self.seconds / len(passes)
        return Tried(spec, len(passes), float(passes.mean()), speedup, quality, loss, seconds, given_up)


def _interval(values: Tensor) -> Interval:
    low, high = values[1:].quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return Interval(float(values[0]), low, high)


def choose(tried: Iterable[Tried], target: Target) -> Tried | None:
    """Of the policies that meet the target the one with the fewest passes, or, where speed is the target, the least loss.

    Returns:
        The policy, ties to the first; None if none meets the target.
    """
    fit = [one for one in tried if one.meets(target)]
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


def accuracy(target: Tensor) -> Quality:
    """A quality for data whose answer is known: the share of decoded positions that are as in target [S, N] int64.

    Raises:
        TypeError: for a target of another kind.
    """
    check.of_kind("accuracy", "target", target, torch.int64)

    def quality(tokens: Tensor, asked: Tensor, sequences: Tensor) -> Tensor:
        right = (tokens == target[sequences].to(tokens.device)) & asked
        return right.sum(dim=-1) / asked.sum(dim=-1)

    return quality


def pseudo_likelihood(
    model: MaskedModel,
    *,
    attention_mask: Tensor | None = None,
    positions: int = 16,
    seed: int = 0,
    batch_size: int = 256,
) -> Quality:
    """A quality without a task: exp(mean_i log p(x_i | all others)) over decoded positions, by the model itself.

    The geometric mean of the probabilities that the model gives to what was decoded, each position masked alone.

    Args:
        model: the judge; its own taste is all that is measured.
        attention_mask: [S, N] bool of the data, False at padding.
        positions: at most so many of a sequence, drawn at random, are looked at: a pass each.
        seed: of that draw.
        batch_size: sequences of a pass.
    """

    @torch.no_grad()
    def quality(tokens: Tensor, asked: Tensor, sequences: Tensor) -> Tensor:
        luck = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)).to(tokens.device)
        order = luck.masked_fill(~asked, 2.0).argsort(dim=-1)[:, :positions]
        row, rank = asked.gather(-1, order).nonzero(as_tuple=True)
        place = order[row, rank]
        log_p = torch.empty(len(row), dtype=torch.float64, device=tokens.device)
        for start in range(0, len(row), batch_size):
            part = slice(start, start + batch_size)
            number = torch.arange(len(row[part]), device=tokens.device)
            one_masked = tokens[row[part]]
            truth = one_masked[number, place[part]].clone()
            one_masked[number, place[part]] = model.mask_token_id
            visible = () if attention_mask is None else (attention_mask[sequences[row[part]]],)
            logits = model(one_masked, *visible).logits[number, place[part]]
            log_p[part] = logits.gather(-1, truth.unsqueeze(-1)).squeeze(-1) - ops.token_stats(logits).logsumexp
        total = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device).index_add(0, row, log_p)
        return (total / asked.sum(dim=-1).clamp(max=positions)).exp()

    return quality


def save_choice(path: str | Path, chosen: Tried, **about: Any) -> None:
    """Write a chosen policy as JSON that `mdmi-fast decode --policy FILE` and `read_choice` read.

    Args:
        path: the file; whole or untouched.
        chosen: the policy.
        **about: what else a reader should know: model, estimator, temperature, target ...
    """
    figures = chosen._asdict()
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
