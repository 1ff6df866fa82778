"""Where the mutual information of pairs comes from."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from mdmi_fast import checks as check
from mdmi_fast import ops
from mdmi_fast.decoding.policies.order import random_numbers
from mdmi_fast.decoding.policies.probed import ProbedPass
from mdmi_fast.decoding.policies.step import Step, required
from mdmi_fast.decoding.randomness import places
from mdmi_fast.labels import FORMS, Form, label_mi
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.call import check_flag
from mdmi_fast.ops import Selection

Answer = TypeVar("Answer")


@runtime_checkable
class StepwiseMI(Protocol):
    """A source of mutual information that may need to know more of the pass than hidden states."""

    @property
    def needs_step(self) -> bool:
        """Whether the pass itself, a `Step`, is its third argument."""
        ...

    def __call__(self, hidden: Tensor, mask: Tensor, step: Any, /) -> Tensor: ...


@runtime_checkable
class ScoringSource(Protocol):
    """The optional ability of a source to select within a budget itself, asking only for pairs that can matter."""

    def score_and_select(self, entropy: Tensor, hidden: Tensor, mask: Tensor, **rule: Any) -> Selection:
        """As `PairScorer.score_and_select`; where the source needs the step, `stats` is among the keywords."""
        ...


@runtime_checkable
class WrappingSource(Protocol):
    """A source whose answers are made of another's."""

    @property
    def source(self) -> MISource: ...


MISource = Callable[..., Tensor]
"""An estimator, or anything that turns hidden [B, N, D] and mask [B, N] into mutual information [B, N, N] in nats; one that is a
`StepwiseMI` is handed the `Step` as well."""


def pairwise_mi(source: MISource, hidden: Tensor | None, mask: Tensor, step: Step) -> Tensor:
    """[B, N, N] nats from any kind of source.

    Raises:
        TypeError: for what is no source.
        ValueError: if there is no hidden state to ask it about.
    """
    if isinstance(source, type) or not callable(source):
        raise TypeError(f"policy: mi must be an estimator, Probing() or another callable, got {source!r}")
    if hidden is None:
        raise ValueError("policy: hidden must be [B, N, D] for mutual information, got None")
    return source(hidden, mask, step) if needs_step(source) else source(hidden, mask)


def needs_step(source: object) -> bool:
    """Whether a source wants to know the pass itself."""
    return isinstance(source, StepwiseMI) and source.needs_step


def innermost(source: object) -> object:
    """The source that others are wrapped around."""
    while isinstance(source, WrappingSource):
        source = source.source
    return source


def scorer_of(source: object) -> Callable[..., Selection] | None:
    """The `score_and_select` of a source, if it has one. Takes `stats` besides, whether the source reads them or not."""
    if isinstance(source, TimeLimited):
        inner = scorer_of(source.source)
        return None if inner is None else functools.partial(source.select_in_time, inner)
    if not isinstance(source, ScoringSource):
        return None
    if needs_step(source):
        return source.score_and_select
    return lambda entropy, hidden, mask, *, stats, **rule: source.score_and_select(entropy, hidden, mask, **rule)


@dataclass(frozen=True)
class Probing:
    """The model's own answer, by probing every value of every masked position in every pass: an oracle for study.

    As the `coupling` of a decode it needs no more than the values that were drawn: a call of the model for each position
    of a pass but the last.

    Args:
        form: which reading of the probes, see `label_mi`.
        epsilon: nats an entry may be wrong by, see `label_mi`.
        batch_size: sequences in one forward pass.
        strength: as a coupling, what corrections are multiplied by.
        greedy: as a coupling, whether it also corrects what is written at temperature 0.
    """

    needs_step: ClassVar[Literal[True]] = True
    form: Form = "joint"
    epsilon: float = 0.0
    batch_size: int = 512
    strength: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        check.one_of("Probing", "form", self.form, FORMS)
        check.at_least("Probing", "epsilon", self.epsilon, 0.0)
        check.whole("Probing", "batch_size", self.batch_size, 1)
        check.weight("Probing", "strength", self.strength)
        check_flag("Probing", "greedy", self.greedy)

    def __call__(self, hidden: Tensor, mask: Tensor, step: Step) -> Tensor:
        step = Step.of(step)
        return label_mi(
            required("Probing", "model and tokens", step.model),
            required("Probing", "model and tokens", step.tokens),
            mask,
            form=self.form,
            epsilon=self.epsilon,
            attention_mask=step.attention_mask,
            batch_size=self.batch_size,
        ).mi

    def begin(self, step: Step, hidden: Tensor, order: Tensor) -> ProbedPass:
        """As `mdmi_fast.coupling.Coupling.begin`; hidden is not read."""
        return ProbedPass(Step.of(step), order, strength=self.strength, batch_size=self.batch_size)

    def check_model(self, model: MaskedModel) -> None:
        """Any model will do: it is asked itself."""


@dataclass(frozen=True)
class Shuffled:
    """A control: the values of another source, dealt out at random among the masked pairs of each sequence.

    Like `Random`, it needs a `Step` with seeds, or all sequences are dealt alike.

    Args:
        source: a symmetric one; of each pair the value of i < j counts.
    """

    needs_step: ClassVar[Literal[True]] = True
    source: MISource

    def __call__(self, hidden: Tensor, mask: Tensor, step: Step) -> Tensor:
        step = Step.of(step)
        mi = pairwise_mi(self.source, hidden, mask, step)
        row, column = torch.triu_indices(mask.shape[1], mask.shape[1], offset=1, device=mask.device)
        both = mask[:, row] & mask[:, column]
        # Pairs are numbered within their own sequence, so that padding changes nothing.
        visible = step.attention_mask
        place = places(mask, visible)
        length = mask.shape[1] if visible is None else visible.sum(dim=-1, keepdim=True)
        first, second = place[..., row], place[..., column]
        number = first * length - first * (first + 1) // 2 + second - first - 1
        uniforms = random_numbers(step, mask, stream=1, index=number)
        # The pairs with both ends masked come first in either order; the rest keeps its zeros.
        order = (~both).to(torch.int8).argsort(dim=-1, stable=True)
        drawn = uniforms.masked_fill(~both, torch.inf).argsort(dim=-1, stable=True)
        values = mi[:, row, column]
        dealt = torch.zeros_like(values).scatter(-1, order, values.gather(-1, drawn)) * both
        shuffled = torch.zeros_like(mi)
        shuffled[:, row, column] = dealt
        return shuffled + shuffled.transpose(-1, -2)


class TimeLimited:
    """Another source as long as its answers are fast enough; else min(H_i, H_j) stands in for I_ij.

    How long an answer will take is predicted from the seconds a pair of the last one, a tenth less after every pass without.
    So results depend on the clock, and on the batch: use `mi_max_masked` of the rules instead where decoding has to be
    reproducible.

    Args:
        source: the other source.
        seconds: most of a pass, at least 0.
    """

    needs_step: ClassVar[Literal[True]] = True

    def __init__(self, source: MISource, seconds: float) -> None:
        self.source, self.seconds = source, check.at_least("TimeLimited", "seconds", seconds, 0.0)
        self._seconds_a_pair = 0.0

    def __repr__(self) -> str:
        return f"TimeLimited({self.source!r}, {self.seconds})"

    def __call__(self, hidden: Tensor, mask: Tensor, step: Step) -> Tensor:
        stats = required("TimeLimited", "stats", Step.of(step).stats)
        return self._in_time(
            mask, lambda: pairwise_mi(self.source, hidden, mask, step), lambda: largest_mi(stats.entropy, mask)
        )

    def select_in_time(
        self, scorer: Callable[..., Selection], entropy: Tensor, hidden: Tensor, mask: Tensor, **rule: Any
    ) -> Selection:
        """What a `score_and_select` of the source selects, or the same budget on min(H_i, H_j)."""
        budget = {name: value for name, value in rule.items() if name != "stats"}
        return self._in_time(
            mask,
            lambda: Selection(*scorer(entropy, hidden, mask, **rule)),
            lambda: ops.select_budget(entropy, largest_mi(entropy, mask), mask=mask, **budget),
        )

    def _in_time(self, mask: Tensor, ask: Callable[[], Answer], do_without: Callable[[], Answer]) -> Answer:
        pairs = int(mask.sum(dim=-1).square().sum())
        if pairs * self._seconds_a_pair > self.seconds:
            self._seconds_a_pair *= 0.9
            return do_without()
        start = time.perf_counter()
        answer = ask()
        if mask.is_cuda:
            torch.cuda.synchronize(mask.device)
        self._seconds_a_pair = (time.perf_counter() - start) / max(pairs, 1)
        return answer


def largest_mi(entropy: Tensor, mask: Tensor) -> Tensor:
    """[B, N, N] nats: min(H_i, H_j) of masked pairs, which no mutual information exceeds."""
    known = entropy.masked_fill(~mask, 0.0)
    return torch.minimum(known.unsqueeze(-1), known.unsqueeze(-2))
