"""`mdmi-fast train`: fit an estimator to labels, or refine one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._errors import UsageError
from mdmi_fast.cli._options import (
    FORM_NAMES,
    add_model,
    add_seed,
    add_threads,
    amount,
    choose_form,
    kind_of,
    natural,
    plain,
    positive,
    share,
)
from mdmi_fast.files import check_folder
from mdmi_fast.models.loading import registered, resolve

if TYPE_CHECKING:
    import torch

    from mdmi_fast.estimator import PairReport, PairScorer, TrainingProgress
    from mdmi_fast.estimator.data import Example
    from mdmi_fast.models import MaskedModel

_GENERAL = ("combine", "rank", "output", "marginals", "weighted_layers", "distances")
"""Options of the general architecture only."""


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="fit an estimator to labels",
        description="Fit an estimator to a folder of labels and save it; every epoch is judged on held-out states and "
        "the best one is kept. A run that was interrupted goes on when the same command is given again. Under "
        "torchrun, several processes share the work.",
    )
    parser.add_argument("--labels", required=True, type=Path, metavar="FOLDER", help="written by label")
    add_model(parser)
    parser.add_argument(
        "--form", choices=FORM_NAMES, help="of the label (default: that of --from, or the first that the folder keeps)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="of the estimator (default: where the other commands find it by the name of the model)",
    )
    parser.add_argument(
        "--from",
        dest="start",
        metavar="E",
        help="name or folder of an estimator to refine, after the model has moved; 100 to 500 new states are enough",
    )
    parser.add_argument(
        "--old-labels",
        type=Path,
        metavar="FOLDER",
        help="with --from: labels from before, mixed in one to one so that it does not forget",
    )
    _add_network(parser)
    _add_fitting(parser)
    parser.add_argument("--device", metavar="D", help="such as cuda, where products are in bfloat16 (default: cpu)")
    add_seed(parser, of="weights, split and order")
    add_threads(parser)
    parser.set_defaults(run=run)


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--architecture",
        choices=("general", "table", *registered("mdmi_fast.estimators")),
        help="of the estimator; table: the mean label at each distance, without training (default: that which ships for "
        "the model, else general)",
    )
    parser.add_argument(
        "--layers", type=_widths, metavar="W,W", help="widths of the layers (default: the architecture's)"
    )
    general = parser.add_argument_group("of the general architecture")
    general.add_argument(
        "--combine", choices=("concat", "product", "interaction"), help="of two states (default: concat)"
    )
    general.add_argument("--rank", type=positive, metavar="N", help="of product and interaction (default: 64)")
    general.add_argument(
        "--output", choices=("softplus", "identity", "bounded"), help="bounded: by min(H_i, H_j) (default: softplus)"
    )
    general.add_argument(
        "--marginals", choices=("none", "entropy", "summary"), help="what joins the hidden state (default: none)"
    )
    general.add_argument(
        "--weighted-layers", type=positive, metavar="L", help="learn weights over L joined layers (default: 1)"
    )
    general.add_argument(
        "--distances",
        type=natural,
        metavar="K",
        help="learn a number for each distance up to K, beginning at the mean labels (default: 0)",
    )


def _add_fitting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=positive, default=20, metavar="N", help="at most (default: 20)")
    parser.add_argument("--lr", type=amount, default=1e-3, metavar="RATE", help="learning rate (default: 0.001)")
    parser.add_argument("--weight-decay", type=amount, default=1e-3, metavar="X", help="of AdamW (default: 0.001)")
    parser.add_argument(
        "--transform", choices=("root", "none", "log"), default="root", help="of labels in the loss (default: root)"
    )
    parser.add_argument(
        "--underestimation",
        type=amount,
        default=1.0,
        metavar="WEIGHT",
        help="of predictions below the label against those above; more than 1 for sampling (default: 1)",
    )
    parser.add_argument(
        "--emphasis", type=amount, default=0.0, metavar="X", help="weigh a pair by 1 + X * label (default: 0)"
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


def run(options: argparse.Namespace) -> int:
    architecture = options.architecture or _shipped_architecture(options.model)
    named = [name for name in _GENERAL if getattr(options, name) is not None]
    if architecture != "general" and named:
        raise UsageError(f"--{named[0].replace('_', '-')} belongs to --architecture general")
    if architecture == "table" and options.layers:
        raise UsageError("--layers belongs to a network, --architecture table has none")
    if options.start is not None and (options.architecture or options.layers or named):
        raise UsageError("--from brings its own architecture, leave the options of the network out")
    if options.old_labels is not None and options.start is None:
        raise UsageError("--old-labels belongs to --from")
    options.out = options.out or _own_folder(options.model)
    check_folder(options.out)
    import torch
    import torch.distributed as dist

    from mdmi_fast.estimator.data import read_examples
    from mdmi_fast.models import load_model

    device = _device(options.device or "cpu")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        model = load_model(options.model)
        if architecture == "table":
            return _fit_table(options, model)
        if isinstance(model, torch.nn.Module):
            model.to(device)
        torch.manual_seed(options.seed)
        estimator = _network(architecture, options, model).to(device)
        options.form = choose_form(options.form, options.labels, estimator.provenance.get("form"))
        labels = read_examples(options.labels, options.form, model=model)
        old = read_examples(options.old_labels, options.form) if options.old_labels else None
        _train(options, model, labels, old, estimator, speak=not several or dist.get_rank() == 0)
    finally:
        if several:
            dist.destroy_process_group()
    return 0


def _fit_table(options: argparse.Namespace, model: MaskedModel) -> int:
    """Fit the table on the states that a network would be trained on; judge it on those held out."""
    from mdmi_fast.estimator import DistanceTable, evaluate_estimator
    from mdmi_fast.estimator.data import read_examples, split_states
    from mdmi_fast.estimator.seen import padding_of

    options.form = choose_form(options.form, options.labels, None)
    labels = read_examples(options.labels, options.form, model=model)
    train, judge = split_states(labels, options.held_out, options.seed, pad=padding_of(model))
    table = DistanceTable.fit(train, model=model)
    report = evaluate_estimator(table, model, judge)
    _save(options, table, len(labels), report)
    return 0


def _save(options: argparse.Namespace, estimator: PairScorer, states: int, report: PairReport) -> None:
    from mdmi_fast.cli import _report

    estimator.provenance = {
        "model": options.model,
        "form": options.form,
        "labels": options.labels.name,
        "states": states,
        "refined_from": options.start,
        "held_out": plain(_report.as_dict(report)),
    }
    estimator.save_pretrained(options.out)
    print(f"\n{options.out}, on held-out states:\n{_report.as_table(report)}")


def _own_folder(model: str) -> Path:
    from mdmi_fast.estimator.loading import own_folder
    from mdmi_fast.models.loading import find_for_model

    if find_for_model("mdmi_fast.estimators", model) is not None:
        raise UsageError(f"--out is needed: an estimator ships for {model}, which the other commands find by that name")
    return own_folder(model)


def _train(
    options: argparse.Namespace,
    model: MaskedModel,
    labels: Sequence[Example],
    old: Sequence[Example] | None,
    estimator: PairScorer,
    *,
    speak: bool,
) -> None:
    """Train and save; only one process speaks and writes."""
    from mdmi_fast.cli import _report
    from mdmi_fast.cli._progress import bar
    from mdmi_fast.estimator import train_estimator

    checkpoint = options.out / "checkpoint.pt"
    if speak:
        print(f"{estimator.summary()}; {len(labels)} states")
        if checkpoint.exists():
            print(f"going on from {checkpoint}")
        print(
            f"{'epoch':>5} {'loss':>9} {'r':>7} {'table r':>8} {'Spearman':>9} {'error':>8} {'false independence':>19}"
        )
    with bar(total=options.epochs, unit="epoch", description="training", silent=not speak) as progress:

        def on_epoch(now: TrainingProgress) -> None:
            told = now.held_out
            progress.write(
                f"{now.epoch:5} {now.loss:9.5f} {told.pearson:7.3f} {now.table:8.3f} {told.spearman:9.3f} "
                f"{told.mean_absolute_error:8.4f} {_report.percent(told.false_independence):>19}"
            )
            progress.set_postfix(r=f"{told.pearson:.3f}")
            progress.update(now.epoch + 1 - progress.n)

        estimator, report = train_estimator(
            estimator,
            model,
            labels,
            old=old,
            epochs=options.epochs,
            batch_size=options.batch_size,
            learning_rate=options.lr,
            weight_decay=options.weight_decay,
            transform=options.transform,
            underestimation=options.underestimation,
            emphasis=options.emphasis,
            held_out=options.held_out,
            patience=options.patience,
            seed=options.seed,
            checkpoint=checkpoint,
            on_epoch=on_epoch,
        )
    if not speak:
        return
    _save(options, estimator, len(labels), report)
    checkpoint.unlink()


def _device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        UsageError: there is none, or this torch cannot use it.
    """
    import torch

    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}") from error


def _network(architecture: str, options: argparse.Namespace, model: MaskedModel) -> PairScorer:
    from mdmi_fast.estimator import DistanceTable, PairwiseMIEstimator, load_estimator

    if options.start is not None:
        start = load_estimator(options.start)
        if isinstance(start, DistanceTable):
            raise UsageError(f"--from {options.start}: a table is fitted anew, by --architecture table")
        return start
    named = ("layers", *_GENERAL) if architecture == "general" else ("layers",)
    given = {name: getattr(options, name) for name in named if getattr(options, name) is not None}
    if architecture == "general":
        return PairwiseMIEstimator(model.hidden_size, **given)
    made: PairScorer = resolve("mdmi_fast.estimators", architecture)(**given)
    return made


def _shipped_architecture(model: str) -> str:
    kind = kind_of(model)
    return kind if kind in registered("mdmi_fast.estimators") else "general"


def _widths(text: str) -> tuple[int, ...]:
    return tuple(positive(width) for width in text.split(","))
