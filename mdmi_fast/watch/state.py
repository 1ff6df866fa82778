"""What a guard must not forget over a restart, and the file it is in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from mdmi_fast import checks as check
from mdmi_fast.files import read_json
from mdmi_fast.watch.evidence import Evidence


@dataclass
class ArmTotals:
    """What one side, the watched policy or the control, has done so far.

    Attributes:
        sequences: finished.
        judged: of them, those whose quality was told, and `quality` the sum of theirs.
        timed: of them, those whose seconds were told, and `seconds` the sum of theirs.
        passes: forward passes of all.
    """

    sequences: int = 0
    quality: float = 0.0
    passes: int = 0
    seconds: float = 0.0
    judged: int = 0
    timed: int = 0


@dataclass
class State:
    """All that a restart must not forget; what `Guard` writes to its file."""

    watched: str
    stage: int = 0
    scale: float = 1.0
    fallen_back: bool = False
    reason: str = ""
    fallbacks_in_a_row: int = 0
    finished_since_change: int = 0
    correlation: float | None = None
    false_independence: float | None = None
    calibration: list[float] = dataclasses.field(default_factory=list)
    audits: int = 0
    movement_slope: float | None = None
    movement_ratio: float | None = None
    reveals: int = 0
    errors: int = 0
    alarms: dict[str, int] = dataclasses.field(default_factory=dict)
    capital: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    policy: ArmTotals = dataclasses.field(default_factory=ArmTotals)
    control: ArmTotals = dataclasses.field(default_factory=ArmTotals)


def read_state(path: Path) -> tuple[State, float]:
    """What a guard wrote to its file: its state and the share of the watched policy.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not the state of a guard; the file is named.
    """
    held = read_json(path, "not the state of a guard")
    try:
        share = held.pop("share")
        for side in ("policy", "control"):
            totals = ArmTotals(**held[side])
            if "judged" not in held[side]:  # an older version's, which took for granted that all were told or none
                totals.judged = totals.sequences if totals.quality else 0
                totals.timed = totals.sequences if totals.seconds else 0
            held[side] = totals
        state = State(**held)
        check.whole("state", "stage", state.stage, 0)
        if not isinstance(state.fallen_back, bool):
            raise TypeError(f"state: fallen_back must be true or false, got {state.fallen_back!r}")
        counts = [share, state.scale, state.audits, state.reveals, state.errors, *state.alarms.values()]
        counts += [state.fallbacks_in_a_row, state.finished_since_change]
        counts += [*vars(state.policy).values(), *vars(state.control).values()]
        found = [state.correlation, state.false_independence, state.movement_slope, state.movement_ratio]
        # Nothing may have been found yet, and the calibration of a bin that nothing fell into is NaN.
        known = [number for number in found if number is not None] + [x for x in state.calibration if x == x]
        for number in counts + known:
            check.number("state", "each number", number)
        for capital in state.capital.values():
            Evidence(upper=1.0, interval=2.0, capital=[check.number("state", "capital", held) for held in capital])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not the state of a guard: {error}") from error
    return state, share
