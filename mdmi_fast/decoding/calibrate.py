"""Choosing a policy by measurement: every rule over settings that follow the data, and the best that meets a target.

A rule, such as "entropy-bound", is a policy without its value. Which values make sense depends on the model: a few of the
sequences are decoded one position at a time, and what the rule would have had to allow in order to take one more position is
noted on the way. Settings are quantiles of these prices. How many passes a setting takes is looked up on the same few
sequences; only those close to the target are measured on all, from both sides of it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.decoding.loop import decode
from mdmi_fast.decoding.policies import MISource, Policy, Sequential, Step, needs_mi, parse_policy
from mdmi_fast.decoding.policies.mutual_information import pairwise_mi
from mdmi_fast.decoding.randomness import draw_seeds
from mdmi_fast.files import read_json, replace_file
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import call_model
from mdmi_fast.ops import Selection, TokenStats

Quality = Callable[[Tensor, Tensor, Tensor], Tensor]
"""How good decoded tokens [B, N] are, given what was asked for [B, N] bool and the sequences' numbers [B] in the data:
[B], more is better; at least 0 where a loss is a share of it."""
Unit = Literal["share", "nats a token"]
"""What a loss is: a share of the quality of one position at a time, or the difference from its log-likelihood."""

YARDSTICK = "sequential"
RULES = (
    *("topk", "random", "confidence", "confidence-factor", "confidence-budget", "entropy-bound", "stability"),
    *("mi-budget", "mi-threshold", "coloring,replan=2"),
)
"""Tried unless told."""
SAMPLING = "mi-budget,entropy_weight=0"
"""Tried too where tokens are drawn."""

_FEW = 8
"""Sequences that settings are looked for with."""
_SURVEYED = 8
"""Passes at which prices are noted."""
_CLOSE_IN_SPEED, _CLOSE_IN_LOSS = 1.1, 1.2
"""How far apart the speeds may be that are aimed at on the two sides of a target: finer steps drown in chance."""
_HALVINGS = 10
_RESAMPLES = 1000
_STOP_QUANTILE = 0.001
"""Of the resampled values: a setting is given up when nearly all of them miss the target, because it is looked at often."""
_IMPOSSIBLE = math.log(torch.finfo(torch.float32).tiny)
"""Nats that a token counts which the model holds for impossible, so that a mean stays finite."""


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


def candidates(*, mi: bool, sampling: bool) -> list[str]:
    """The rules that `tune` tries unless told.

    Args:
        mi: whether there is a source of mutual information.
        sampling: whether tokens are drawn.
    """
    rules = [*RULES, SAMPLING] if sampling else RULES
    return [rule for rule in rules if mi or not needs_mi(rule)]


def is_rule(text: str) -> bool:
    """Whether a text is a rule, whose settings are to be searched for, rather than a policy with its value.

    Raises:
        ValueError: for a rule that does not exist, has no value to search for, or has other options.

    Example:
        >>> is_rule("entropy-bound"), is_rule("mi-budget,entropy_weight=0"), is_rule("topk:4"), is_rule("sequential")
        (True, True, False, False)
    """
    if ":" in text.partition(",")[0] or text.strip() == YARDSTICK:
        return False
    parse_policy(_with_value(text, "1"), lambda hidden, mask: hidden)
    return True


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
    unit: Unit = "share",
    **options: Any,
) -> Iterator[Tried]:
    """Try policies on calibration sequences, in batches, and give up each that misses the target beyond doubt.

    The yardstick, one position at a time, comes first. All policies decode the same sequences with the same seeds, so
    speedup and loss are paired; their intervals resample sequences. Of a rule settings are tried on both sides of the
    target, as far as it has them (see `one_sided`).

    Args:
        model: the model to be decoded.
        tokens: [S, N] int64, the calibration sequences, masked where something is to be decoded.
        quality: what counts, such as `log_likelihood`.
        target: what a policy has to reach.
        policies: as text, with a value ("topk:4") or, to search for it, without ("topk"); None: `candidates`.
        mi: the source for those that read mutual information.
        attention_mask: [S, N] bool, False at padding.
        batch_size: sequences between two looks at the target.
        seed: of the draws and of the resampling.
        unit: of the loss: "nats a token" where the quality is a log-likelihood, else "share".
        **options: of `decode`.

    Yields:
        A Tried for every policy and setting, the yardstick first.

    Raises:
        ValueError: for a policy that cannot be read, data without a masked position, or a loss asked for in another unit.
    """
    if unit not in get_args(Unit):
        raise ValueError(f"tune: unit must be one of {', '.join(get_args(Unit))}, got {unit!r}")
    if target.loss is not None and target.unit != unit:
        example = "'at most 0.05 nats loss'" if unit != "share" else "'at most 1% loss'"
        raise ValueError(f"tune: target must be in the unit of the loss, {unit}, such as {example}, got {target.unit}")
    asked = tokens == model.mask_token_id
    if attention_mask is not None:
        asked &= attention_mask
    if not bool(asked.any(dim=-1).all()) or not len(tokens):
        raise ValueError("tune: tokens must hold at least one sequence, and every one a masked position")
    sampling = float(options.get("temperature", 0.0)) > 0
    specs = candidates(mi=mi is not None, sampling=sampling) if policies is None else list(policies)
    for spec in specs:
        parse_policy(_with_value(spec, "1") if is_rule(spec) else spec, mi)
    generator = torch.Generator().manual_seed(seed)
    seeds = draw_seeds(len(tokens), generator, tokens.device)

    def decoded(policy: Policy, rows: Tensor) -> tuple[Tensor, Tensor]:
        visible = None if attention_mask is None else attention_mask[rows]
        result = decode(model, tokens[rows], policy, seeds=seeds[rows], attention_mask=visible, **options)
        return result.tokens, result.passes.double().cpu()

    batches = torch.arange(len(tokens), device="cpu").split(batch_size)
    yardstick: Measured | None = None

    def measure(spec: str, rule: str | None = None) -> Tried:
        nonlocal yardstick
        policy, measured, given_up = parse_policy(spec, mi), Measured(unit), False
        for number, rows in enumerate(batches):
            start = time.perf_counter()
            written, passes = decoded(policy, rows)
            measured.seconds += time.perf_counter() - start
            measured.passes.append(passes)
            measured.quality.append(quality(written, asked[rows], rows).double().cpu())
            last = number == len(batches) - 1
            if yardstick is not None and not last and measured.hopeless(yardstick, target, generator):
                given_up = True
                break
        yardstick = yardstick or measured
        return measured.report(spec, yardstick, given_up, generator, rule)

    # From the whole of the data, which may be in order of length.
    places = torch.linspace(0, len(tokens) - 1, min(_FEW, len(tokens)), dtype=torch.float64, device="cpu")
    few = places.round().long()

    def passes_of_few(policy: Policy) -> float:
        return float(decoded(policy, few)[1].sum())

    yield measure(YARDSTICK)
    longest, one_by_one = int(asked.sum(dim=-1).max()), 0.0
    survey: _Survey | None = None
    for spec in specs:
        if not is_rule(spec):
            yield measure(spec)
            continue
        if survey is None:
            survey = _Survey(
                mi if any(map(needs_mi, specs)) else None,
                kl=any(spec.startswith("stability") for spec in specs),
                every=-(-longest // _SURVEYED),
            )
            one_by_one = passes_of_few(survey)
        settings = _Settings(
            spec, survey, longest, one_by_one, lambda setting: passes_of_few(parse_policy(setting, mi))
        )
        yield from _search(settings, target, measure)


def _search(settings: _Settings, target: Target, measure: Callable[[str, str], Tried]) -> Iterator[Tried]:
    """Measure settings of a rule until some lie on both sides of the target, close to it, or there are none beyond."""
    by_speed = target.speedup is not None
    wanted, close = target.speedup or 4.0, _CLOSE_IN_SPEED if by_speed else _CLOSE_IN_LOSS
    careful: float | None = None
    bold: float | None = None
    tried: dict[str, Tried] = {}
    while careful is None or bold is None or bold > careful * close * (1 + 1e-9):
        spec = settings.reaching(wanted)
        if spec not in tried:
            tried[spec] = measure(spec, settings.rule)
            yield tried[spec]
        if tried[spec].is_bold(target):
            bold = wanted
            if careful is None and spec == settings.at(0.0):
                return
        else:
            careful = wanted
            if bold is None and spec == settings.at(1.0):
                return
        if careful is None:
            slower = wanted / close if by_speed else math.sqrt(wanted)  # gently: careful settings cost the most
            wanted = slower if slower > close else 1.0
        elif bold is None:
            wanted *= close if by_speed else 2.0
        else:
            wanted = math.sqrt(careful * bold)


class _Seen(NamedTuple):
    """What a pass shows of the M >= 2 masked positions of a sequence, float64; None where that was not asked for.

    Attributes:
        entropy: [M], nats.
        doubt: [M], 1 - confidence.
        kl: [M], nats, how far the distributions moved in the last pass.
        mi: [M, M], nats, at least 0.
        attention: [M, M], the mean of both directions.
    """

    entropy: Tensor
    doubt: Tensor
    kl: Tensor | None
    mi: Tensor | None
    attention: Tensor | None


class _Survey:
    """A policy, one position at a time, that notes what other rules would see on the way.

    Args:
        mi: the source of mutual information; None: not to be noted.
        kl: whether to note how far distributions move.
        every: passes from one note to the next.
    """

    def __init__(self, mi: MISource | None, *, kl: bool, every: int) -> None:
        self._mi, self._kl, self._every = mi, kl, every
        self.seen: list[_Seen] = []

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
                    self.seen.append(_Seen(entropy, doubt, kl, *pairs))
        return Sequential().select(stats, hidden, mask, step)


class _Settings:
    """The settings of a rule, from the most careful at 0 to the boldest at 1.

    Args:
        rule: as text, without a value.
        survey: what the rule would have seen.
        longest: the most masked positions of a sequence.
        one_by_one: passes of the few sequences, one position at a time.
        passes: the same of a setting.
    """

    def __init__(
        self, rule: str, survey: _Survey, longest: int, one_by_one: float, passes: Callable[[str], float]
    ) -> None:
        self.rule = rule
        self._name, *options = rule.split(",")
        self._options = dict(option.split("=", 1) for option in options)
        self._one_by_one, self._passes = one_by_one, passes
        self._known: dict[str, float] = {}
        self._levels = torch.arange(1, longest + 1, device="cpu")
        if self._name not in ("topk", "random"):
            self._levels = _levels([self._prices(seen) for seen in survey.seen])
        self._doubts = _levels([seen.doubt for seen in survey.seen])

    def at(self, share: float) -> str:
        """The setting at a share of the way, as the text of a policy."""
        level = _at(self._levels, share)
        if self._name in ("topk", "random"):
            return _with_value(self.rule, f"{round(level)}")
        if self._name == "confidence":
            return _with_value(self.rule, _threshold(level))
        spec = _with_value(self.rule, f"{level:.3g}")
        if self._name == "stability" and "confidence" not in self._options:
            spec += f",confidence={_threshold(_at(self._doubts, share))}"
        return spec

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

    def _prices(self, seen: _Seen) -> Tensor:
        """What the rule has to allow before it takes one more position, for any number of positions."""
        doubt, entropy = seen.doubt.sort().values, seen.entropy.sort().values
        if self._name == "confidence":
            return doubt[1:]
        if self._name == "confidence-factor":
            return (torch.arange(2, len(doubt) + 2, device="cpu") * doubt)[1:]
        if self._name == "confidence-budget":
            return doubt.cumsum(0)[1:]
        if self._name == "entropy-bound":
            return entropy.cumsum(0)[:-1]
        if self._name == "stability":
            return doubt[:0] if seen.kl is None else seen.kl
        pairs = seen.attention if self._name == "attention-graph" else seen.mi
        if pairs is None:
            raise ValueError(
                f"tune: the rule {self.rule} reads what the model does not show: give it a value, or leave it out"
            )
        if self._name != "mi-budget":
            return pairs[torch.ones_like(pairs, dtype=torch.bool).triu(1)]
        order = seen.entropy.argsort()
        lam, weight = (float(self._options.get(name, 1.0)) for name in ("lam", "entropy_weight"))
        return (weight * entropy + lam * pairs[order][:, order].tril(-1).sum(1)).cumsum(0)[1:]


def _levels(prices: list[Tensor]) -> Tensor:
    """All prices in ascending order, between nothing and more than any of them."""
    found = torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), *prices]).sort().values
    return torch.cat([found, 2 * found[-1:]])


def _at(levels: Tensor, share: float) -> float:
    """The quantile of levels in ascending order."""
    place = share * (len(levels) - 1)
    first = int(place)
    low, high = float(levels[first]), float(levels[min(first + 1, len(levels) - 1)])
    return low + (place - first) * (high - low)


def _threshold(doubt: float) -> str:
    """The confidence that leaves so much doubt, to the last digit that float32 tells apart."""
    return f"{max(0.0, 1.0 - doubt):.8g}"


def _with_value(rule: str, value: str) -> str:
    name, comma, options = rule.partition(",")
    return f"{name}:{value}{comma}{options}"


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
        speedup, quality, loss = (_interval(values) for values in self.resampled(yardstick, generator))
        passes = torch.cat(self.passes)
        seconds = self.seconds / len(passes)
        return Tried(
            spec, len(passes), float(passes.mean()), speedup, quality, loss, seconds, given_up, self.unit, rule
        )


def _interval(values: Tensor) -> Interval:
    low, high = values[1:].quantile(torch.tensor([0.025, 0.975], dtype=values.dtype, device=values.device)).tolist()
    return Interval(float(values[0]), low, high)


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


def accuracy(target: Tensor) -> Quality:
    """A quality for data whose answer is known: the share of decoded positions that are as in target [S, N] int64.

    Raises:
        TypeError: for a target of another kind.
    """
    check.of_kind("accuracy", "target", target, torch.int64)

    def quality(tokens: Tensor, asked: Tensor, sequences: Tensor) -> Tensor:
        right = (tokens == target[sequences].to(tokens.device)) & asked
        return right.sum(dim=-1).float() / asked.sum(dim=-1)

    return quality


def log_likelihood(
    model: MaskedModel,
    *,
    attention_mask: Tensor | None = None,
    positions: int = 16,
    seed: int = 0,
    batch_size: int = 256,
    least: float = _IMPOSSIBLE,
) -> Quality:
    """A quality without a task, in nats a token: mean_i log p(x_i | all others) over decoded positions, by the model itself.

    Each position is masked alone.

    Args:
        model: the judge; its own taste is all that is measured. See `mdmi_fast.watch.guard.pseudo_likelihood` for stop
            tokens.
        attention_mask: [S, N] bool of the data, False at padding.
        positions: at most so many of a sequence, drawn at random, are looked at: a pass each.
        seed: of that draw.
        batch_size: sequences of a pass.
        least: nats that a token counts at least, such as one that the model holds for impossible.
    """

    @torch.no_grad()
    def quality(tokens: Tensor, asked: Tensor, sequences: Tensor) -> Tensor:
        source = torch.Generator().manual_seed(seed)
        luck = torch.rand(tokens.shape, generator=source, dtype=torch.float32, device="cpu").to(tokens.device)
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
            visible = None if attention_mask is None else attention_mask[sequences[row[part]]]
            logits = call_model("log_likelihood", model, one_masked, visible).logits[number, place[part]]
            here = logits.gather(-1, truth.unsqueeze(-1)).squeeze(-1) - ops.token_stats(logits).logsumexp
            log_p[part] = here.clamp(min=least)
        total = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device).index_add(0, row, log_p)
        return total / asked.sum(dim=-1).clamp(max=positions)

    return quality


def pseudo_likelihood(
    model: MaskedModel,
    *,
    attention_mask: Tensor | None = None,
    positions: int = 16,
    seed: int = 0,
    batch_size: int = 256,
) -> Quality:
    """The geometric mean of the probabilities whose logarithms `log_likelihood` averages: between 0 and 1.

    Args:
        model: as for `log_likelihood`, like the rest.
        attention_mask: [S, N] bool of the data, False at padding.
        positions: at most so many of a sequence are looked at.
        seed: of that draw.
        batch_size: sequences of a pass.
    """
    mean = log_likelihood(
        model, attention_mask=attention_mask, positions=positions, seed=seed, batch_size=batch_size, least=-math.inf
    )
    return lambda tokens, asked, sequences: mean(tokens, asked, sequences).exp()


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
