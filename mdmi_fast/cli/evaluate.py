"""`mdmi-fast evaluate`: compare an estimator with labels."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mdmi_fast.cli._options import add_model, add_threads, amount, find_estimator, json_text


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="compare an estimator with labels",
        description="Compare an estimator's predictions with labels of states it was not trained on.",
    )
    parser.add_argument("--labels", required=True, type=Path, metavar="FOLDER", help="written by label")
    add_model(parser)
    parser.add_argument("--estimator", metavar="E", help="name or folder (default: the one shipped for the model)")
    parser.add_argument(
        "--tau", type=amount, default=0.01, metavar="NATS", help="below it a pair counts as independent (default: 0.01)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from mdmi_fast.cli import _report
    from mdmi_fast.estimator import evaluate_estimator
    from mdmi_fast.labels import read_labels
    from mdmi_fast.models import load_model

    model = load_model(options.model)
    labels = read_labels(options.labels, mask_token_id=model.mask_token_id)
    estimator = find_estimator(options.estimator, model=options.model)
    report = evaluate_estimator(estimator, model, labels, tau=options.tau)
    print(json_text(_report.as_dict(report)) if options.json else _report.as_table(report))
    return 0
