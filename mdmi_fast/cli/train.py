"""`mdmi-fast train`: fit an estimator to labels."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._errors import UsageError
from mdmi_fast.cli._options import add_model, add_seed, add_threads, amount, kind_of, plain, positive, share

if TYPE_CHECKING:
    from mdmi_fast.estimator import PairScorer, TrainingProgress
    from mdmi_fast.models import MaskedModel


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="fit an estimator to labels",
        description="Fit an estimator to a folder of labels and save it; every epoch is judged on held-out states and "
        "the best one is kept.",
    )
    parser.add_argument("--labels", required=True, type=Path, metavar="FOLDER", help="written by label")
    add_model(parser)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="of the estimator")
    parser.add_argument(
        "--architecture", choices=("general", "sudoku"), help="of the estimator (default: sudoku for sudoku models)"
    )
    parser.add_argument(
        "--layers", type=_widths, metavar="W,W", help="widths of the layers (default: the architecture's)"
    )
    parser.add_argument(
        "--combine", choices=("concat", "product", "interaction"), help="of two states, general only (default: concat)"
    )
    parser.add_argument("--epochs", type=positive, default=20, metavar="N", help="at most (default: 20)")
    parser.add_argument("--lr", type=amount, default=1e-3, metavar="RATE", help="learning rate (default: 0.001)")
    parser.add_argument(
        "--underestimation",
        type=amount,
        default=1.0,
        metavar="WEIGHT",
        help="of predictions below the label against those above; more than 1 for sampling (default: 1)",
    )
    parser.add_argument("--batch-size", type=positive, default=16, metavar="N", help="states a step (default: 16)")
    parser.add_argument("--held-out", type=share, default=0.1, metavar="SHARE", help="of the states (default: 0.1)")
    parser.add_argument(
        "--patience",
        type=positive,
        default=5,
        metavar="N",
        help="epochs without a better r before it stops (default: 5)",
    )
    add_seed(parser, of="weights, split and order")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    architecture = options.architecture or ("sudoku" if kind_of(options.model) == "sudoku" else "general")
    if architecture != "general" and options.combine:
        raise UsageError("--combine belongs to --architecture general")
    import torch

    from mdmi_fast.cli import _report
    from mdmi_fast.cli._progress import bar
    from mdmi_fast.estimator import train_estimator
    from mdmi_fast.labels import read_labels
    from mdmi_fast.models import load_model

    model = load_model(options.model)
    labels = read_labels(options.labels, mask_token_id=model.mask_token_id)
    torch.manual_seed(options.seed)
    estimator = _network(architecture, options, model)
    print(f"{estimator.n_parameters:,} parameters, {len(labels.tokens)} states")
    print(f"{'epoch':>5} {'loss':>9} {'r':>7} {'Spearman':>9} {'error':>8} {'false independence':>19}")
    with bar(total=options.epochs, unit="epoch", description="training") as progress:

        def on_epoch(now: TrainingProgress) -> None:
            told = now.held_out
            progress.write(
                f"{now.epoch:5} {now.loss:9.5f} {told.pearson:7.3f} {told.spearman:9.3f} "
                f"{told.mean_absolute_error:8.4f} {_report.percent(told.false_independence):>19}"
            )
            progress.update(1)

        estimator, report = train_estimator(
            estimator,
            model,
            labels,
            epochs=options.epochs,
            batch_size=options.batch_size,
            learning_rate=options.lr,
            underestimation=options.underestimation,
            held_out=options.held_out,
            patience=options.patience,
            seed=options.seed,
            on_epoch=on_epoch,
        )
    judged = plain(_report.as_dict(report))
    estimator.provenance = {"model": options.model, "labels": options.labels.name, "held_out": judged}
    estimator.save_pretrained(options.out)
    print(f"\n{options.out}, the best epoch on held-out states:\n{_report.as_table(report)}")
    return 0


def _network(architecture: str, options: argparse.Namespace, model: MaskedModel) -> PairScorer:
    layers = {} if options.layers is None else {"layers": options.layers}
    if architecture == "sudoku":
        from mdmi_fast.tasks.sudoku.estimator import SudokuMIEstimator

        return SudokuMIEstimator(**layers)
    from mdmi_fast.estimator import PairwiseMIEstimator

    return PairwiseMIEstimator(model.hidden_size, combine=options.combine or "concat", **layers)


def _widths(text: str) -> tuple[int, ...]:
    return tuple(positive(width) for width in text.split(","))
