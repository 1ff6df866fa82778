"""A policy that watches another: audits it, compares it with sequential decoding, and takes it back before it harms.

Each sequence belongs, by its seed, to the watched policy or to a sequential control.
The share of the watched policy is 5%, then 50%, then all but the control; it moves on when there is evidence that
quality is not worse. Where there is evidence of harm the policy gets a tighter limit or nothing at all, and comes back
through the same stages. Evidence is gathered one observation at a time with a known rate of false alarms (`Evidence`).

    stage 5% --step--> 50% --step--> 98%          an alert halves the limit, down to an eighth, and the stage stays;
      ^                 |             |           a cooldown without another doubles it again
      |   cooldown      v             v
      +------------- fallen back <----+           on *_off and on an error: everything is decoded sequentially
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast.cache import describe
from mdmi_fast.decoding.policies import Policy, Sequential, Step
from mdmi_fast.decoding.policies.rule import checked_pass, checked_policy, checked_selection
from mdmi_fast.decoding.policies.step import required
from mdmi_fast.decoding.quality import pseudo_likelihood as pseudo_likelihood  # a quality for `finish`
from mdmi_fast.files import check_file, replace_file
from mdmi_fast.ops import Selection, TokenStats
from mdmi_fast.watch.auditor import Auditor, source_of
from mdmi_fast.watch.evidence import Evidence
from mdmi_fast.watch.limit import with_limit
from mdmi_fast.watch.state import State, read_state
from mdmi_fast.watch.thresholds import EVIDENCE, Thresholds

_REMEMBERED = 100_000
"""Sequences whose outcome may be outstanding; the oldest beyond are forgotten and count for neither side."""


class Guard:
    """The controller around a policy; itself a policy, for `decode` with seeds or any loop that hands over a `Step`.

    After a batch is decoded, `finish` tells the guard how good the sequences are. What it knows then is written to
    the file `state`, whole or not at all, so that a restart goes on where it was; another policy, or other weights of
    its estimator, start with the first stage. One guard serves one thread; processes have one each.

    Args:
        policy: the watched policy. Its limit (gamma, tau or epsilon) is tightened where it has one, for which it must
            be a dataclass; r is audited where it has a source `mi`.
        thresholds: when to speak and when to act.
        audit_share: of the passes in which one position is probed, which costs up to 65 forward passes of one
            sequence.
        movement_share: of the passes in which one position, unmasked alone, is compared with the next pass, which
            costs the source's predictions for one sequence. Only where tokens are drawn from what the model says, at
            temperature 1 without top_k, top_p, suppressed tokens and allowed sets, and the source does not probe.
        state: a JSON file.
        watched: names the policy in the file; None: its settings and weights.
        seed: of the choice of what to audit.

    Attributes:
        took: [B] float64, seconds that the choice of each sequence's own side took in the last `select`. What the other
            side and audits took is not in it, so that `seconds` of `finish` can be made of what a side needs alone.

    Raises:
        TypeError: for what is no policy; if a state is kept, `watched` is not given, and the policy cannot be described
            by its settings.
        ValueError: if audit_share or movement_share is no share, or the state is not that of a guard.
        OSError: if the state cannot be read or written.

    Example:
        >>> from mdmi_fast import MIBudget, Probing, decode
        >>> from mdmi_fast.models.exact import JointTable
        >>> model = JointTable(torch.tensor([[0.6, 0.0], [0.0, 0.4]]))
        >>> guard, seeds = Guard(MIBudget(Probing(), gamma=0.1)), torch.arange(40)
        >>> result = decode(model, torch.full((40, 2), 2), guard, seeds=seeds)
        >>> guard.finish(seeds, quality=(result.tokens[:, 0] == result.tokens[:, 1]).double(), passes=result.passes)
        >>> guard.state.policy.sequences, guard.state.control.sequences
        (1, 39)
    """

    def __init__(
        self,
        policy: Policy,
        *,
        thresholds: Thresholds | None = None,
        audit_share: float = 0.01,
        movement_share: float = 0.1,
        state: str | Path | None = None,
        watched: str | None = None,
        seed: int = 0,
    ) -> None:
        for name, share in (("audit_share", audit_share), ("movement_share", movement_share)):
            if not 0 <= check.number("Guard", name, share) <= 1:
                raise ValueError(f"Guard: {name} must be from 0 to 1, got {share}")
        checked_policy("Guard", policy)
        self.policy, self.control = policy, Sequential()
        self.thresholds = thresholds or Thresholds()
        self.audit_share, self.movement_share = audit_share, movement_share
        self._path = None if state is None else Path(state)
        check_file(self._path)
        self._random = random.Random(seed)
        if watched is None:
            watched = repr(policy) if state is None else describe(policy)
        self.state = self._load(watched)
        self.took = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._arms: OrderedDict[int, bool | None] = OrderedDict()
        self._waiting: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        self._auditor = Auditor(
            source_of(policy), self.thresholds.audited_positions, self._random, self.state.audits, self.state.reveals
        )
        self._tightened = with_limit(self.policy, self.state.scale)
        acts = {
            "count": self._count,
            "tighten": self._tighten,
            "fall back": self._fall_back,
            "next stage": self._next_stage,
        }
        self._act = {signal.name: acts[signal.leads_to] for signal in EVIDENCE}
        limits = self.thresholds
        self._evidence = {
            signal.name: Evidence(
                upper=signal.upper(limits),
                interval=limits.step_interval if signal.leads_to == "next stage" else limits.interval,
                capital=self.state.capital.get(signal.name),
            )
            for signal in EVIDENCE
        }

    def __repr__(self) -> str:
        return f"Guard({self.policy!r})"

    @property
    def share(self) -> float:
        """Of new sequences, how many the watched policy decodes."""
        return 0.0 if self.state.fallen_back else self.thresholds.stages[self.state.stage]

    def select(self, stats: TokenStats, hidden: Any, mask: Any, step: SupportsIndex) -> Selection:
        step = Step.of(step)
        seeds = required("Guard", "seeds", step.seeds)
        stats, hidden, mask = checked_pass("Guard", stats, hidden, mask)
        step = step.with_stats(stats)  # an audit asks sources that read the marginals too
        self._see_movement(step)
        # A row without a masked position is another policy's, in a batch that several share, and on neither side.
        here = mask.any(dim=-1).tolist()
        arms = [own and self._arm(seed) for own, seed in zip(here, seeds.tolist(), strict=True)]
        watched = torch.tensor(arms, dtype=torch.bool, device=mask.device).unsqueeze(-1)
        if self.audit_share and self._random.random() < self.audit_share:
            self._audit(hidden, mask, step)
        nothing = Selection(torch.zeros_like(mask), torch.zeros(len(mask), dtype=torch.float64, device=mask.device))
        ours, start = nothing, time.perf_counter()
        if any(arms):
            try:
                ours = self._tightened.select(stats, hidden, mask & watched, step)
                checked_selection(self.policy, ours.selected, mask & watched, step)
            except Exception as error:  # whatever it is, sequential decoding goes on
                self._failed(error)
                arms, watched = [False] * len(arms), torch.zeros_like(watched)
        between = time.perf_counter()
        theirs = nothing if arms == here else self.control.select(stats, hidden, mask & ~watched, step)
        took = torch.tensor([time.perf_counter() - between, between - start], dtype=torch.float64, device="cpu")
        self.took = took[watched.squeeze(-1).long().cpu()]
        selected = torch.where(watched, ours.selected, theirs.selected)
        if self.movement_share and self._random.random() < self.movement_share:
            self._await_movement(hidden, mask, step, selected)
        return Selection(selected, ours.spent + theirs.spent)

    def finish(
        self,
        seeds: Tensor,
        *,
        quality: Tensor | Sequence[float] | None = None,
        seconds: Tensor | Sequence[float] | None = None,
        passes: Tensor | Sequence[float] | None = None,
    ) -> None:
        """Tell how decoded sequences turned out; the guard draws its conclusions and writes its state.

        Args:
            seeds: [B] int64, as decoded.
            quality: [B] from 0 to 1, such as whether a board is valid, or `pseudo_likelihood`.
            seconds: [B] each sequence took. Where both sides are decoded in one batch, without what only the other side
                needed (see `took`): a side that shares its passes with the slower one looks no faster than that.
            passes: [B] forward passes.

        Raises:
            ValueError: for a number out of its range, or not one for each sequence; nothing has been counted then.
        """
        columns = [
            _numbers("quality", quality, seeds, "from 0 to 1", 1.0),
            _numbers("seconds", seconds, seeds, "finite and at least 0", sys.float_info.max),
            _numbers("passes", passes, seeds, "finite and at least 0", sys.float_info.max),
        ]
        for seed, good, took, count in zip(seeds.tolist(), *columns, strict=True):
            self.state.finished_since_change += 1
            arm = self._arms.pop(seed, None)
            if arm is None:
                continue
            totals = self.state.policy if arm else self.state.control
            totals.sequences += 1
            if good is not None:
                totals.judged += 1
                totals.quality += good
            if took is not None:
                totals.timed += 1
                totals.seconds += took
            totals.passes += int(count or 0)
            if good is not None and not self.state.fallen_back:
                self._waiting[arm].append((good, math.nan if took is None else took))
                self._compare()
        self._recover()
        self.save()

    def report(self) -> dict[str, Any]:
        """All that the guard knows, as it is written to its file and read by the metrics."""
        self.state.capital = {name: evidence.capital for name, evidence in self._evidence.items()}
        return {**dataclasses.asdict(self.state), "share": self.share}

    def save(self) -> None:
        """Write the state, if there is a file for it."""
        if self._path is not None:
            with replace_file(self._path) as temporary:
                temporary.write_text(json.dumps(self.report(), indent=1) + "\n")

    def _load(self, watched: str) -> State:
        if self._path is None or not self._path.exists():
            return State(watched)
        state, _ = read_state(self._path)
        if state.watched != watched:
            return State(watched)
        if not 0 <= state.stage < len(self.thresholds.stages):
            raise ValueError(f"{self._path}: not the state of a guard: there is no stage {state.stage}")
        return state

    def _arm(self, seed: int) -> bool:
        """Whether a sequence is the watched policy's: decided when it is first seen, by its seed and the share."""
        if seed not in self._arms:
            self._arms[seed] = _uniform_of(seed) < self.share
            if len(self._arms) > _REMEMBERED:
                self._arms.popitem(last=False)
        return bool(self._arms[seed]) and not self.state.fallen_back

    def _compare(self) -> None:
        """One observation from the sequences that wait on either side, as soon as there is one on both."""
        if not self._waiting[True] or not self._waiting[False]:
            return
        (ours, our_seconds), (theirs, their_seconds) = (
            tuple(math.fsum(column) / len(side) for column in zip(*side, strict=True))
            for side in (self._waiting[True], self._waiting[False])
        )
        self._waiting = {True: [], False: []}
        limits = self.thresholds
        self._observe("step", (1 - limits.quality_off) * theirs - ours)
        allowed = (1 + limits.latency_alert) * their_seconds
        if our_seconds + allowed > 0:
            self._observe("latency_alert", (allowed - our_seconds) / (allowed + our_seconds))
        if not self._observe("quality_off", ours - (1 - limits.quality_off) * theirs):
            self._observe("quality_alert", ours - (1 - limits.quality_alert) * theirs)

    def _audit(self, hidden: Tensor, mask: Tensor, step: Step) -> None:
        try:
            block = self._auditor.audit(hidden, mask, step)
        except Exception as error:
            self._failed(error)
            return
        self.state.audits = self._auditor.audits
        r = None if block is None else block.correlation()
        if block is None or r is None or math.isnan(r):
            return
        limits, state = self.thresholds, self.state
        state.correlation, state.calibration = r, block.calibration()
        state.false_independence = block.false_independence(limits.tau)
        if self._observe("correlation_off", r - limits.correlation_off):
            return
        if self._observe("correlation_alert", r - limits.correlation_alert):
            return
        if state.false_independence is not None:
            self._observe("false_independence_alert", limits.false_independence_alert - state.false_independence)

    def _await_movement(self, hidden: Tensor, mask: Tensor, step: Step, selected: Tensor) -> None:
        try:
            self._auditor.await_movement(hidden, mask, step, selected)
        except Exception as error:
            self._failed(error)

    def _see_movement(self, step: Step) -> None:
        block = self._auditor.see_movement(step)
        self.state.reveals = self._auditor.reveals
        slope = None if block is None else block.slope()
        if block is None or slope is None:
            return
        self.state.movement_slope, self.state.movement_ratio = slope, block.ratio()
        # A slope above 1 is chance, or predictions that are too low: neither makes up for others below.
        self._observe("movement_off", min(slope, 1.0) - self.thresholds.movement_off)

    def _observe(self, name: str, value: float) -> bool:
        """One observation of a signal; whether there is evidence now, which the guard has acted on."""
        if not self._evidence[name].add(value):
            return False
        self._act[name](name)
        return True

    def _count(self, alarm: str) -> None:
        self.state.alarms[alarm] = self.state.alarms.get(alarm, 0) + 1

    def _changed(self, reason: str) -> None:
        self.state.reason, self.state.finished_since_change = reason, 0
        self._waiting = {True: [], False: []}

    def _next_stage(self, reason: str) -> None:
        if self.state.stage + 1 < len(self.thresholds.stages):
            self.state.stage += 1
            self._changed(reason)
        else:
            self.state.fallbacks_in_a_row = 0

    def _tighten(self, alarm: str) -> None:
        """Halve the policy's limit, at most three times."""
        self._count(alarm)
        tighter = self.state.scale / 2
        if not self.state.fallen_back and tighter >= 1 / 8 and with_limit(self.policy, tighter) is not self.policy:
            self._use_scale(tighter)
            self._changed(alarm)

    def _fall_back(self, alarm: str) -> None:
        self._count(alarm)
        if self.state.fallen_back:
            return
        self.state.fallen_back, self.state.stage = True, 0
        self.state.fallbacks_in_a_row += 1
        # What is found from here on decides on the return.
        self.state.correlation = self.state.movement_slope = None
        # A sequence decoded by both arms counts for neither.
        self._arms = OrderedDict((seed, None if arm else arm) for seed, arm in self._arms.items())
        self._changed(alarm)
        self.save()

    def _failed(self, error: Exception) -> None:
        self.state.errors += 1
        if not self.state.fallen_back:
            warnings.warn(f"Guard: {self.policy!r} failed, decoding sequentially: {error}", stacklevel=3)
        self._fall_back("error")

    def _recover(self) -> None:
        """After a quiet time: from a fallback to the first stage, or to a limit half as tight."""
        state = self.state
        patience = self.thresholds.cooldown * 2 ** min(max(state.fallbacks_in_a_row - 1, 0), 5)
        if state.finished_since_change < patience:
            return
        if state.fallen_back:
            limits = self.thresholds
            if state.correlation is not None and state.correlation < limits.correlation_alert:
                return
            if state.movement_slope is not None and state.movement_slope < limits.movement_off:
                return
            state.fallen_back = False
            for evidence in self._evidence.values():
                evidence.reset()
            self._use_scale(1.0)
            self._changed("retry")
        elif state.scale < 1:
            self._use_scale(min(1.0, state.scale * 2))
            self._changed("relax")

    def _use_scale(self, scale: float) -> None:
        self.state.scale = scale
        self._tightened = with_limit(self.policy, scale)


def _uniform_of(seed: int) -> float:
    """A number in [0, 1) for a seed, that has nothing to do with what `decode` draws from it."""
    return random.Random(f"guard {seed}").random()


def _numbers(
    name: str, values: Tensor | Sequence[float] | None, seeds: Tensor, expected: str, most: float
) -> list[Any]:
    """An argument of `Guard.finish`, a float from 0 to `most` for each sequence; None for each if it was not given."""
    if values is None:
        return [None] * len(seeds)
    numbers = [float(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]
    if len(numbers) != len(seeds):
        raise ValueError(f"Guard: {name} must hold a number for each of {len(seeds)} sequences, got {len(numbers)}")
    for seed, number in zip(seeds.tolist(), numbers, strict=True):
        if not 0 <= number <= most:
            raise ValueError(f"Guard: {name} must be {expected}, got {number:g} of the sequence with seed {seed}")
    return numbers
