"""`mdmi-fast evaluate`: judge an estimator by labels."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mdmi_fast.cli._errors import UsageError
from mdmi_fast.cli._options import (
    FORM_NAMES,
    add_model,
    add_seed,
    add_threads,
    amount,
    choose_form,
    find_estimator,
    json_text,
    natural,
)
from mdmi_fast.files import check_file


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="judge an estimator by labels",
        description="Compare an estimator and simple baselines (the mean label at each distance, entropies, both, and its own "
        "predictions in wrong places) with labels of states it was not trained on, of states "
        "under another mask law, and of states built to make it err; say whether it may be used to decode. States that "
        "the estimator was trained on, by the record in its file, are left out; those held out in its training are not.",
    )
    parser.add_argument("--labels", required=True, type=Path, metavar="FOLDER", help="written by label")
    parser.add_argument("--all", action="store_true", help="leave no state out, not even those it was trained on")
    add_model(parser)
    parser.add_argument("--estimator", metavar="E", help="name or folder (default: the one shipped for the model)")
    parser.add_argument(
        "--shifted", type=Path, metavar="FOLDER", help="labels of another domain (default: built from the first states)"
    )
    parser.add_argument(
        "--built", type=natural, default=24, metavar="N", help="states to build and label for a split (default: 24)"
    )
    parser.add_argument("--form", choices=FORM_NAMES, help="of the label (default: that the estimator was trained on)")
    parser.add_argument(
        "--tau", type=amount, default=0.01, metavar="NATS", help="below it a pair counts as independent (default: 0.01)"
    )
    parser.add_argument(
        "--moved-model", action="store_true", help="judge although the model's weights changed since training"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="one page of pictures")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_seed(parser, of="the states that are built")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_file(options.plot)
    if options.plot is not None:
        from mdmi_fast.estimator.plots import check_picture, plot_evaluation

        check_picture(options.plot)
    from mdmi_fast.cli import _report
    from mdmi_fast.estimator import evaluate_splits
    from mdmi_fast.estimator.data import read_examples
    from mdmi_fast.estimator.evaluate import judged_states
    from mdmi_fast.estimator.splits import BUILT, build_split
    from mdmi_fast.models import load_model

    model = load_model(options.model)
    estimator = find_estimator(options.estimator, model=options.model)
    trained_form = estimator.provenance.get("form")
    form = choose_form(options.form, options.labels, trained_form)
    labels = read_examples(options.labels, form, model=model)
    estimator.check_model(model, moved=options.moved_model)
    splits = {"in distribution": labels}
    if options.shifted is not None:
        splits["shifted"] = read_examples(options.shifted, form, model=model)
    if options.built:
        unseen, _ = judged_states(estimator, model, labels, all_states=options.all)
        some = [state.tokens for state in unseen[: options.built]]
        for name in BUILT:
            if name not in splits:
                splits[name] = build_split(name, model, some, form=form, seed=options.seed)
    folders = {"in distribution": options.labels, "shifted": options.shifted}
    for name, given in splits.items():
        if not judged_states(estimator, model, given, all_states=options.all)[0]:
            raise UsageError(
                f"{folders.get(name) or name}: the estimator was trained on all {len(given)} states; label others, or "
                "judge it on these with --all"
            )
    evaluation = evaluate_splits(estimator, model, splits, tau=options.tau, all_states=options.all)
    if options.json:
        told = {
            split: {source: _report.as_dict(report) for source, report in reports.items()}
            for split, reports in evaluation.reports.items()
        }
        leads = {name: lead._asdict() for name, lead in evaluation.leads.items()}
        print(
            json_text(
                {
                    "verdict": evaluation.verdict,
                    "leads": leads,
                    "form": form,
                    "trained_form": trained_form,
                    "splits": told,
                }
            )
        )
    else:
        other = f" (the estimator was trained on the {trained_form} form)" if trained_form not in (None, form) else ""
        for split, reports in evaluation.reports.items():
            print(f"{split}, {form} form{other}\n{_report.as_lines(reports['estimator'].states)}")
            print(f"{_report.as_columns(reports)}\n")
        print(_report.as_leads(evaluation.leads))
        print(evaluation.verdict)
    if options.plot is not None:
        plot_evaluation(evaluation, options.plot)
    return 0
