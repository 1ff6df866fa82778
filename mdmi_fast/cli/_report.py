"""How good an estimator is, as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mdmi_fast.estimator import PairReport

_CALIBRATION = ("[0, 0.1)", "[0.1, 0.5)", "[0.5, 1)", "1 and above")


def percent(share: float) -> str:
    """A share that is NaN where there was nothing to share."""
    return "no pairs" if math.isnan(share) else f"{share:.1%}"


def as_dict(report: PairReport) -> dict[str, Any]:
    """The report as JSON has it, the calibration by its bins."""
    fields = report._asdict()
    return {**fields, "calibration": dict(zip(_CALIBRATION, report.calibration, strict=True))}


def as_table(report: PairReport) -> str:
    rows = [
        ("masked pairs", f"{report.pairs:,}"),
        ("Pearson r", f"{report.pearson:.3f}"),
        ("Spearman r", f"{report.spearman:.3f}"),
        ("mean absolute error", f"{report.mean_absolute_error:.4f} nats"),
    ]
    for label, error in zip(_CALIBRATION, report.calibration, strict=True):
        rows.append((f"  where the label is {label}", "no pairs" if math.isnan(error) else f"{error:.4f} nats"))
    rows += [
        (f"independent at {report.tau:g} nats, precision", percent(report.precision)),
        ("  recall", percent(report.recall)),
        ("  false independence", percent(report.false_independence)),
    ]
    return "\n".join(f"{name:<40}{value}" for name, value in rows)
