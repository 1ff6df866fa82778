"""`mdmi-fast tune`: choose a policy by what it does on calibration data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._options import (
    DATA_HELP,
    PolicySpec,
    add_decoding,
    add_model,
    add_threads,
    add_writing,
    coupling_of,
    load_coupling,
    load_decoded,
    load_source,
    policies_text,
    policy_spec,
    positive,
    writing_options,
)
from mdmi_fast.files import check_file
from mdmi_fast.tasks.base import Task, task_of

if TYPE_CHECKING:
    from torch import Tensor

    from mdmi_fast.cli._records import TokenSequence
    from mdmi_fast.decoding.calibrate import Quality, Target, Tried, Unit
    from mdmi_fast.models import MaskedModel

_QUALITIES = ("pseudo-likelihood", "accuracy", "valid")


def _target(text: str) -> Target:
    from mdmi_fast.decoding.calibrate import Target

    try:
        return Target.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _policy_or_rule(text: str) -> str:
    """A policy with its value or the file of one, as for decode, or a rule without."""
    from mdmi_fast.decoding.calibrate import is_rule

    try:
        return text if not text.endswith(".json") and is_rule(text) else policy_spec(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="choose a decoding policy by measurement",
        description="Decode calibration sequences with every policy, next to one position at a\n"
        "time, print what each costs and loses, and save the best that meets the target.\n"
        "Settings follow the data: of each policy those on both sides of the target are\n"
        "looked for on a few sequences and measured on all.",
        epilog=policies_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    parser.add_argument("--data", required=True, metavar="FILE", help=DATA_HELP)
    parser.add_argument(
        "--target",
        type=_target,
        required=True,
        metavar="T",
        help="'4x fewer passes', 'at most 1%% loss' or, where the quality is pseudo-likelihood, 'at most 0.05 nats loss' a "
        "token; in short 4x, 1%% or '0.05 nats'",
    )
    parser.add_argument(
        "--quality",
        choices=_QUALITIES,
        help="pseudo-likelihood: by the model itself, log p of each token given all others, a loss is in nats a token; accuracy: "
        'the share of positions as in the record\'s "target" [...]; valid: as the task of the model judges, such as Sudoku boards; of these two a loss is a share '
        "(default: valid where there is a task, else pseudo-likelihood)",
    )
    parser.add_argument(
        "--policies",
        type=_policy_or_rule,
        nargs="+",
        metavar="SPEC",
        help="try these instead of the usual ones; without a value, as in entropy-bound or mi-budget,entropy_weight=0, "
        "settings are looked for",
    )
    add_decoding(parser)
    add_writing(parser)
    parser.set_defaults(batch_size=32)
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N sequences")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to save the chosen policy")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_file(options.out)
    from mdmi_fast.cli._progress import bar
    from mdmi_fast.cli._sequences import read_sequences
    from mdmi_fast.decoding import needs_mi
    from mdmi_fast.decoding.calibrate import candidates, choose, tune
    from mdmi_fast.decoding.vocabulary import with_stops
    from mdmi_fast.estimator.loading import has_estimator

    if options.out is not None and options.out.suffix != ".json":
        raise UsageError(f"--out {options.out}: must end in .json, by which decode --policy knows it")
    model = load_decoded(options.model, options.policies or [])
    sequences = read_sequences(options.data, model_name=options.model, model=model, limit=options.limit)
    to_do = [sequence for sequence in sequences if model.mask_token_id in sequence.tokens]
    if not to_do:
        raise InputError(f"{options.data}: holds no sequence with a masked position")
    tokens, attention_mask = _padded(to_do, model)
    name = options.quality or ("valid" if task_of(options.model).quality is not None else "pseudo-likelihood")
    unit: Unit = "nats a token" if name == "pseudo-likelihood" else "share"
    _check_unit(options.target, name, unit)
    has_mi = options.estimator is not None or has_estimator(options.model)
    specs = options.policies or candidates(mi=has_mi, sampling=options.temperature > 0)
    own = [spec for spec in specs if isinstance(spec, PolicySpec)]
    estimator = options.estimator or next(filter(None, (spec.estimator for spec in own)), None)
    mi = load_source(estimator, model, name=options.model) if any(map(needs_mi, specs)) else None
    coupling = load_coupling(options, model, *own)
    judge = with_stops(model, options.stop, options.suppress)
    quality = _quality(name, judge, to_do, attention_mask, task_of(options.model))
    tried: list[Tried] = []
    print(_header(unit))
    with bar(total=None, unit="policy", description="tuning") as progress:
        for one in tune(
            model,
            tokens,
            quality,
            options.target,
            policies=specs,
            mi=mi,
            attention_mask=attention_mask,
            batch_size=options.batch_size,
            seed=options.seed,
            unit=unit,
            coupling=coupling,
            **writing_options(options),
        ):
            tried.append(one)
            progress.write(_row(one), end="\n")
            progress.update(1)
    _print_frontier(tried, options.target)
    chosen = choose(tried, options.target)
    if chosen is None:
        print("\nno policy meets the target")
        return 1
    print(f"\nchosen: {chosen.policy}")
    if not chosen.surely_meets(options.target):
        print(_warning(chosen, choose(tried, options.target, surely=True), options.target))
    if options.out is not None:
        _save(options, chosen, name, estimator=estimator, coupling=coupling_of(options, *own))
    return 0


def _save(options: argparse.Namespace, chosen: Tried, quality: str, **sources: str | None) -> None:
    from mdmi_fast.decoding.calibrate import save_choice

    save_choice(
        options.out,
        chosen,
        model=options.model,
        **sources,
        options=writing_options(options),
        target=options.target._asdict(),
        quality=quality,
        surely_meets_target=chosen.surely_meets(options.target),
    )


def _check_unit(target: Target, quality: str, unit: Unit) -> None:
    """A loss can be asked for in the unit of the quality only."""
    if target.loss is not None and target.unit != unit:
        instead = "'at most 0.05 nats loss'" if quality == "pseudo-likelihood" else "'at most 1% loss'"
        raise UsageError(f"--target: a loss of {quality} is in {unit}: write such as {instead}")


def _print_frontier(tried: Sequence[Tried], target: Target) -> None:
    """The policies that no other beats, and the rules whose settings all lie on one side of the target."""
    from mdmi_fast.decoding.calibrate import frontier, one_sided

    print("\nfrontier, no policy needs fewer passes without losing more:")
    print("\n".join(_row(one) for one in frontier(tried)))
    alone = one_sided(tried, target)
    if alone:
        print("\non one side of the target only:")
        print("\n".join(f"{rule}: {reason}" for rule, reason in alone.items()))


def _header(unit: Unit) -> str:
    quality, loss = (
        ("quality (95%)", "loss (95%)") if unit == "share" else ("nats a token (95%)", "loss, nats a token (95%)")
    )
    return f"{'policy':<38} {'seqs':>5} {'passes':>7}  {'times fewer (95%)':<20} {quality:<26} {loss:<28} ms/seq"


def _shown(interval: tuple[float, float, float], form: str) -> str:
    value, low, high = (f"{number:{form}}" for number in interval)
    return f"{value} ({low}..{high})"


def _warning(chosen: Tried, sure: Tried | None, target: Target) -> str:
    """What a reader must know of a choice whose interval reaches beyond the target."""
    if target.speedup is not None:
        reach = f"may take only {chosen.speedup.low:.2f} times fewer passes, not {target.speedup:g}"
    elif chosen.unit == "share":
        reach = f"may lose {chosen.loss.high:.2%}, not {target.loss:.2%}"
    else:
        reach = f"may lose {chosen.loss.high:.4f} nats a token, not {target.loss:g}"
    if chosen.sequences < 2:
        reach = "was measured on one sequence, which says nothing of others"
    instead = f"{sure.policy} meets it for sure" if sure is not None else "none of those tried meets it for sure"
    return f"warning: it {reach} (95% interval); {instead}, and more sequences tell better"


def _row(one: Tried) -> str:
    speedup, quality = _shown(one.speedup, ".2f"), _shown(one.quality, ".4f")
    loss = _shown(one.loss, "+.2%" if one.unit == "share" else "+.4f")
    end = "  given up" if one.given_up else ""
    return (
        f"{one.policy:<38} {one.sequences:>5} {one.passes:>7.1f}  {speedup:<20} {quality:<26} {loss:<28} "
        f"{1000 * one.seconds:.1f}{end}"
    )


def _padded(sequences: Sequence[TokenSequence], model: MaskedModel) -> tuple[Tensor, Tensor | None]:
    """Tokens [S, N] padded on the right, and which are not padding; None where there is none."""
    import torch

    from mdmi_fast.models.call import visible_positions

    width = max(len(sequence.tokens) for sequence in sequences)
    tokens = torch.zeros(len(sequences), width, dtype=torch.int64)
    visible = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        own, mask = torch.tensor([sequence.tokens]), sequence.attention_mask
        shown = visible_positions("tune", model, own, None if mask is None else torch.tensor([mask]))
        tokens[row, : own.shape[1]] = own[0]
        visible[row, : own.shape[1]] = True if shown is None else shown[0]
    told = any(sequence.attention_mask is not None for sequence in sequences)
    return tokens, visible if told or not bool(visible.all()) else None


def _quality(
    name: str, model: MaskedModel, sequences: Sequence[TokenSequence], attention_mask: Tensor | None, task: Task
) -> Quality:
    """The quality of that name.

    Raises:
        InputError: naming the records that lack what it needs, at most 20 of them.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from mdmi_fast.cli._records import are_tokens
    from mdmi_fast.decoding.calibrate import accuracy, log_likelihood

    if name == "pseudo-likelihood":
        return log_likelihood(model, attention_mask=attention_mask)
    if name == "accuracy":
        targets: list[list[int]] = []
        size = model.vocab_size
        for sequence in sequences:
            target = sequence.record.get("target")
            if not are_tokens(target) or len(target) != len(sequence.tokens):
                raise InputError(
                    f'{sequence.where}: accuracy needs "target": [...] of integers, as many as "tokens", in every record'
                )
            # Elsewhere it may hold anything, such as -100; what no model can write would count as an error of all policies.
            shown = sequence.attention_mask or [True] * len(target)
            asked = [seen and token == model.mask_token_id for token, seen in zip(sequence.tokens, shown, strict=True)]
            wrong = [token for token, is_asked in zip(target, asked, strict=True) if is_asked and not 0 <= token < size]
            if wrong:
                raise InputError(
                    f'{sequence.where}: "target" must hold tokens from 0 to {size - 1} where "tokens" is masked, got {wrong[0]}'
                )
            targets.append([token if is_asked else 0 for token, is_asked in zip(target, asked, strict=True)])
        return accuracy(pad_sequence([torch.tensor(target) for target in targets], batch_first=True))
    judge = task.quality
    if judge is None:
        raise UsageError("--quality valid: the model is of no task that judges sequences")
    return lambda tokens, asked, sequences: judge(tokens)
