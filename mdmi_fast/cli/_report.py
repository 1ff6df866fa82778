"""How good an estimator is, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mdmi_fast.estimator import JudgedStates, PairReport
    from mdmi_fast.statistics import Interval

_CALIBRATION = ("[0, 0.1)", "[0.1, 0.5)", "[0.5, 1)", "1 and above")


def percent(share: float) -> str:
    """A share that is NaN where there was nothing to share."""
    return "no pairs" if math.isnan(share) else f"{share:.1%}"


def as_dict(report: PairReport) -> dict[str, Any]:
    """The report as JSON has it, the calibration by its bins."""
    return {
        **report._asdict(),
        "calibration": dict(zip(_CALIBRATION, report.calibration, strict=True)),
        "by_tau": [at._asdict() for at in report.by_tau],
        "by_mask_ratio": [ratio._asdict() for ratio in report.by_mask_ratio],
        "states": report.states._asdict(),
    }


def as_lines(states: JudgedStates) -> str:
    """What a reader must know of the states that were judged, a line each."""
    lines = [f"{states.judged:,} states"]
    if states.left_out:
        lines.append(f"{states.left_out:,} more left out: the estimator was trained on them")
    if states.trained_on:
        lines.append(f"the estimator was trained on {states.trained_on:,} of them: its figures are too good")
    if states.held_out:
        lines.append(
            f"{states.held_out:,} of them were held out in training and chose the epoch, which favours it a little"
        )
    if not states.complete:
        lines.append("its file does not record all it was trained on: on states among those its figures are too good")
    return "\n".join(f"  {line}" for line in lines)


def as_table(report: PairReport) -> str:
    """One report, a row a figure."""
    return as_columns({"": report})


def as_columns(reports: Mapping[str, PairReport]) -> str:
    """Several reports on the same pairs, a column each."""
    cells = [_rows(report) for report in reports.values()]
    lines = [f"{'':<40}" + "".join(f"{name:>17}" for name in reports)] if any(reports) else []
    for row in zip(*cells, strict=True):
        lines.append(f"{row[0][0]:<40}" + "".join(f"{value:>17}" for _, value in row))
    return "\n".join(lines)


def as_leads(leads: Mapping[str, Interval]) -> str:
    """By how much the estimator's r is above that of each baseline which has one."""
    told = [
        f"  {name:<15} {lead.value:+.3f}, 95% interval {lead.low:+.3f} to {lead.high:+.3f}"
        for name, lead in leads.items()
        if not math.isnan(lead.value)
    ]
    return "\n".join(["Pearson r above that of", *told])


def _rows(report: PairReport) -> list[tuple[str, str]]:
    rows = [
        ("states", f"{report.states.judged:,}"),
        ("masked pairs", f"{report.pairs:,}"),
        ("Pearson r", _number(report.pearson)),
        ("  95% interval", _interval(*report.interval)),
    ]
    for ratio in report.by_mask_ratio:
        rows.append((f"  masked share {ratio.low:g} to {ratio.high:g}", _number(ratio.pearson)))
    rows += [
        ("Spearman r", _number(report.spearman)),
        ("  of a position's partners, mean", _number(report.partner_rank)),
        ("strongest partner found", percent(report.top_partner)),
        ("mean absolute error", _nats(report.mean_absolute_error)),
    ]
    for label, error in zip(_CALIBRATION, report.calibration, strict=True):
        rows.append((f"  where the label is {label}", _nats(error)))
    rows += [
        (f"independent at {report.tau:g} nats, precision", percent(report.precision)),
        ("  recall", percent(report.recall)),
        ("  false independence", percent(report.false_independence)),
        ("least tau of 5% false independence", "none" if math.isnan(report.safe_tau) else f"{report.safe_tau:g} nats"),
    ]
    return rows


def _number(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.3f}"


def _interval(low: float, high: float) -> str:
    return "undefined" if math.isnan(low) else f"{low:.3f} to {high:.3f}"


def _nats(value: float) -> str:
    return "no pairs" if math.isnan(value) else f"{value:.4f} nats"
