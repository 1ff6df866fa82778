"""Trying policies on calibration data, on both sides of what is asked of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from mdmi_fast.decoding.calibrate.results import Measured, Target, Tried, Unit
from mdmi_fast.decoding.calibrate.settings import Settings, Survey, with_value
from mdmi_fast.decoding.loop import decode
from mdmi_fast.decoding.policies.parse import needs_mi, parse_policy
from mdmi_fast.decoding.policies.registry import registered
from mdmi_fast.decoding.policies.rule import Policy
from mdmi_fast.decoding.policies.sources import MISource
from mdmi_fast.decoding.quality import Quality
from mdmi_fast.decoding.randomness import draw_seeds
from mdmi_fast.models import MaskedModel

YARDSTICK = "sequential"

_FEW = 8
"""Sequences that settings are looked for with."""
_SURVEYED = 8
"""Passes at which prices are noted."""
_CLOSE_IN_SPEED, _CLOSE_IN_LOSS = 1.1, 1.2
"""How far apart the speeds may be that are aimed at on the two sides of a target: finer steps drown in chance."""


def candidates(*, mi: bool, sampling: bool) -> list[str]:
    """The rules that `tune` tries unless told.

    Args:
        mi: whether there is a source of mutual information.
        sampling: whether tokens are drawn.
    """
    rules = []
    for name, each in registered().items():
        tried = [*each.tried, *(each.tried_sampling if sampling else ())]
        rules += [f"{name},{options}" if options else name for options in tried]
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
    parse_policy(with_value(text, "1"), lambda hidden, mask: hidden)
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
        parse_policy(with_value(spec, "1") if is_rule(spec) else spec, mi)
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
    survey: Survey | None = None
    for spec in specs:
        if not is_rule(spec):
            yield measure(spec)
            continue
        if survey is None:
            survey = Survey(
                mi if any(map(needs_mi, specs)) else None,
                kl=any(spec.startswith("stability") for spec in specs),
                every=-(-longest // _SURVEYED),
            )
            one_by_one = passes_of_few(survey)
        settings = Settings(spec, survey, longest, one_by_one, lambda setting: passes_of_few(parse_policy(setting, mi)))
        yield from _search(settings, target, measure)


def _search(settings: Settings, target: Target, measure: Callable[[str, str], Tried]) -> Iterator[Tried]:
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
