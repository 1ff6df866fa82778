"""`mdmi-fast tune`: choose a policy by what it does on calibration data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._options import (
    DATA_HELP,
    POLICY_FORMS,
    add_decoding,
    add_model,
    add_threads,
    add_writing,
    kind_of,
    load_decoded,
    load_source,
    policy_spec,
    positive,
    writing_options,
)
from mdmi_fast.files import check_file

if TYPE_CHECKING:
    from torch import Tensor

    from mdmi_fast.cli._sequences import TokenSequence
    from mdmi_fast.decode.tune import Quality, Target, Tried
    from mdmi_fast.models import MaskedModel

_QUALITIES = ("pseudo-likelihood", "accuracy", "valid")


def _target(text: str) -> Target:
    from mdmi_fast.decode.tune import Target

    try:
        return Target.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="choose a decoding policy by measurement",
        description="Decode calibration sequences with every policy over its settings, next to one position at a "
        "time, print what each costs and loses, and save the best that meets the target.",
        epilog=POLICY_FORMS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    parser.add_argument("--data", required=True, metavar="FILE", help=DATA_HELP)
    parser.add_argument(
        "--target", type=_target, required=True, metavar="T", help="'4x fewer passes' or 'at most 1%% loss'; 4x or 1%%"
    )
    parser.add_argument(
        "--quality",
        choices=_QUALITIES,
        help="pseudo-likelihood: the model's own; accuracy: the share of positions as in the record's "
        '"target" [...]; valid: of Sudoku boards (default: valid for sudoku models, else pseudo-likelihood)',
    )
    parser.add_argument(
        "--policies", type=policy_spec, nargs="+", metavar="SPEC", help="try these instead of the usual settings"
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
    from mdmi_fast.decode import needs_mi
    from mdmi_fast.decode.tune import candidates, choose, frontier, save_choice, tune
    from mdmi_fast.estimator.network import has_estimator

    if options.out is not None and options.out.suffix != ".json":
        raise UsageError(f"--out {options.out}: must end in .json, by which decode --policy knows it")
    model = load_decoded(options.model, options.policies or [])
    sequences = read_sequences(options.data, model_name=options.model, model=model, limit=options.limit)
    to_do = [sequence for sequence in sequences if model.mask_token_id in sequence.tokens]
    if not to_do:
        raise InputError(f"{options.data}: holds no sequence with a masked position")
    tokens, attention_mask = _padded([sequence.tokens for sequence in to_do])
    name = options.quality or ("valid" if kind_of(options.model) == "sudoku" else "pseudo-likelihood")
    has_mi = options.estimator is not None or has_estimator(options.model)
    specs = options.policies or candidates(mi=has_mi, sampling=options.temperature > 0)
    estimator = options.estimator or next(filter(None, (getattr(spec, "estimator", None) for spec in specs)), None)
    mi = load_source(estimator, model, name=options.model) if any(map(needs_mi, specs)) else None
    tried: list[Tried] = []
    print(_HEADER)
    with bar(total=len(specs) + 1, unit="policy", description="tuning") as progress:
        for one in tune(
            model,
            tokens,
            _quality(name, model, to_do, attention_mask, options.data),
            options.target,
            policies=specs,
            mi=mi,
            attention_mask=attention_mask,
            batch_size=options.batch_size,
            seed=options.seed,
            **writing_options(options),
        ):
            tried.append(one)
            progress.write(_row(one), end="\n")
            progress.update(1)
    print("\nfrontier, no policy needs fewer passes without losing more:")
    print("\n".join(_row(one) for one in frontier(tried)))
    chosen = choose(tried, options.target)
    if chosen is None:
        print("\nno policy meets the target")
        return 1
    print(f"\nchosen: {chosen.policy}")
    if options.out is not None:
        save_choice(
            options.out,
            chosen,
            model=options.model,
            estimator=estimator,
            options=writing_options(options),
            target=options.target._asdict(),
            quality=name,
        )
    return 0


_HEADER = f"{'policy':<38} {'seqs':>5} {'passes':>7}  {'times fewer (95%)':<20} {'quality (95%)':<24} {'loss (95%)':<26} ms/seq"


def _row(one: Tried) -> str:
    speedup, quality, loss = (
        f"{value:{form}} ({low:{form}}..{high:{form}})"
        for (value, low, high), form in ((one.speedup, ".2f"), (one.quality, ".4f"), (one.loss, "+.2%"))
    )
    end = "  given up" if one.given_up else ""
    return (
        f"{one.policy:<38} {one.sequences:>5} {one.passes:>7.1f}  {speedup:<20} {quality:<24} {loss:<26} "
        f"{1000 * one.seconds:.1f}{end}"
    )


def _padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Tokens [S, N] padded on the right, and which are not padding; None if all have one length."""
    import torch

    width = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), width, dtype=torch.int64)
    visible = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        visible[row, : len(sequence)] = True
    return tokens, None if bool(visible.all()) else visible


def _quality(
    name: str, model: MaskedModel, sequences: Sequence[TokenSequence], attention_mask: Tensor | None, source: str
) -> Quality:
    """The quality of that name.

    Raises:
        InputError: a record lacks what it needs.
    """
    from mdmi_fast.cli._sequences import are_tokens
    from mdmi_fast.decode.tune import accuracy, pseudo_likelihood

    if name == "pseudo-likelihood":
        return pseudo_likelihood(model, attention_mask=attention_mask)
    if name == "accuracy":
        targets: list[list[int]] = []
        for sequence in sequences:
            target = sequence.record.get("target")
            if not are_tokens(target) or len(target) != len(sequence.tokens):
                raise InputError(
                    f'{source}: accuracy needs "target": [...] of integers, as many as "tokens", in every record'
                )
            targets.append(target)
        return accuracy(_padded(targets)[0])
    from mdmi_fast.tasks.sudoku.puzzles import is_valid_board

    return lambda tokens, asked, sequences: is_valid_board(tokens)
