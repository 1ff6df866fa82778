"""A process that decodes: batches of jobs come in over a pipe, one answer a job goes back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mdmi_fast import MIBudget, MIThreshold, decode, set_num_threads
from mdmi_fast.cache import Cache, CachedPolicy, Counts, DiskStore, MemoryStore, RedisStore
from mdmi_fast.decoding import Asked, Decoded, Step, decode_batch
from mdmi_fast.decoding.named import find_coupling, load_decoded, load_source
from mdmi_fast.decoding.policies import MISource, Policy, needs_mi, parse_policy
from mdmi_fast.decoding.policies.step import required
from mdmi_fast.errors import UnsupportedError
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import Selection, TokenStats
from mdmi_fast.tasks.base import task_of
from mdmi_fast.watch.guard import Guard, pseudo_likelihood

_MOST_POLICIES = 1000
"""Kept for the next request that names one; clients name them, so there must be an end."""


class Job(NamedTuple):
    """One sequence to decode."""

    tokens: list[int]
    policy: str | None
    temperature: float
    seed: int


class Answer(NamedTuple):
    """A decoded sequence, or why there is none and the HTTP status that says so."""

    tokens: list[int] | None
    passes: int
    error: str | None = None
    status: int = 200


class Hello(NamedTuple):
    """What a worker says first: what its model takes, or why it cannot work."""

    vocab_size: int = 0
    mask_token_id: int = 0
    warnings: Sequence[str] = ()
    error: str | None = None


class Reply(NamedTuple):
    """What comes back for a batch: the answers, and what happened since the reply before."""

    answers: list[Answer]
    seconds: float
    cached: Mapping[str, Counts]
    warnings: Sequence[str]


@dataclass(frozen=True)
class Settings:
    """What a worker loads.

    Attributes:
        model: name, as for `load_model`.
        policy: of jobs that name none.
        estimator: name or folder, or probe[:FORM]; None: the model's own.
        temperature: of requests that name none.
        writing: other arguments of `decode`, for all jobs: top_k, suppressed, stop_tokens ...
        cache: "memory", "disk" or the URL of a Redis server, for selections by mutual information, but not by a policy
            that a guard watches; None: no cache, which is faster with a small estimator.
        state: folder for the state of each worker's guard around `policy`; None: no guard.
        coupling: of all jobs: a folder, or probing; None: tokens of a pass are drawn independently.
    """

    model: str
    policy: str
    estimator: str | None = None
    temperature: float = 0.0
    writing: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    state: Path | None = None
    coupling: str | None = None

    def state_file(self, number: int) -> Path | None:
        """Where the guard of a worker keeps its state."""
        return None if self.state is None else self.state / f"worker-{number}.json"

    def make_cache(self) -> Cache | None:
        """Raises:
        UnsupportedError: what a store needs is not installed.
        ValueError: neither a store nor a URL of Redis.
        """
        if self.cache is None:
            return None
        if self.cache == "memory":
            return Cache(MemoryStore())
        return Cache(MemoryStore(), DiskStore() if self.cache == "disk" else RedisStore(self.cache))


class Engine:
    """A model, its policies, and a function from jobs to answers that fails for no batch, only for single jobs.

    Args:
        settings: what to load.
        number: of the worker.
        model: instead of the one that `settings` names.

    Raises:
        ValueError: if a weight is not a finite number, the default policy is none, or `writing` or the coupling is not for this model.
        UnsupportedError: if the default policy reads mutual information and there is no source of it.
        OSError: if the model, the estimator or the guard's state cannot be read, or the state not be written.
    """

    def __init__(self, settings: Settings, number: int = 0, *, model: MaskedModel | None = None) -> None:
        self.settings = settings
        self.model = load_decoded(settings.model, [settings.policy]) if model is None else model
        if isinstance(self.model, torch.nn.Module):
            for name, weight in self.model.state_dict().items():
                if not bool(weight.isfinite().all()):
                    raise ValueError(f"{settings.model}: the weight {name} holds values that are not finite numbers")
        self._source: MISource | None = None
        if settings.estimator is not None:
            self._mi()
        self._coupling = find_coupling(settings.coupling)
        self.cache = settings.make_cache()
        self._policies: dict[str, Policy] = {}
        self._default = self._policy(settings.policy)
        self.guard: Guard | None = None
        state = settings.state_file(number)
        if state is not None:
            watched = parse_policy(settings.policy, mi=self._mi() if needs_mi(settings.policy) else None)
            self._default = self.guard = Guard(watched, state=state)
            self.guard.save()  # so that its metrics are there before its first sequence, and a full disk is seen now
        nothing = torch.zeros(0, 1, dtype=torch.int64)  # decoding it checks the arguments
        decode(
            self.model,
            nothing,
            self._default,
            coupling=self._coupling,
            seeds=nothing[:, 0],
            temperature=settings.temperature,
            **settings.writing,
        )
        self.pads = self._can_pad()

    def run(self, jobs: Sequence[Job]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        for group in _turns(jobs):
            answers.update(zip(group, self._decode([jobs[at] for at in group]), strict=True))
        return [answers[at] for at in range(len(jobs))]

    def _decode(self, jobs: Sequence[Job]) -> list[Answer]:
        policy = BySequence(
            {job.seed: self._default if job.policy is None else job.policy for job in jobs}, self._policy
        )
        found = decode_batch(
            self.model,
            [Asked(job.tokens, options={"seed": job.seed, "temperature": job.temperature}) for job in jobs],
            policy,
            coupling=self._coupling,
            batch_size=len(jobs),
            pad=self.pads,
            every=True,
            **self.settings.writing,
        )
        if self.guard is not None:
            # A sequence that nothing was decoded of tells of no policy, and may not even be a board.
            decoded = [(job, each) for job, each in zip(jobs, found, strict=True) if isinstance(each, Decoded)]
            ours = [(job, each) for job, each in decoded if job.policy is None and each.passes > 0]
            try:
                self._tell(self.guard, ours, policy.seconds)
            except Exception as error:  # what was decoded is right all the same
                warnings.warn(f"the guard was not told of {len(ours)} sequences: {_reason(error)}", stacklevel=1)
        return [_answer(each) for each in found]

    def _tell(self, guard: Guard, ours: Sequence[tuple[Job, Decoded]], seconds: Mapping[int, float]) -> None:
        """Tell the guard how sequences of the default policy turned out."""
        if not ours:
            return
        before, after = (
            [torch.tensor(tokens) for tokens in side]
            for side in zip(*((job.tokens, each.tokens) for job, each in ours), strict=True)
        )
        lengths = torch.tensor([len(each) for each in before])
        tokens = pad_sequence(before, batch_first=True)
        visible = torch.arange(tokens.shape[1]) < lengths.unsqueeze(-1)
        guard.finish(
            torch.tensor([job.seed for job, _ in ours]),
            quality=self._quality(tokens, pad_sequence(after, batch_first=True), visible),
            seconds=[seconds[job.seed] for job, _ in ours],
            passes=[each.passes for _, each in ours],
        )

    def _quality(self, before: Tensor, after: Tensor, visible: Tensor) -> Tensor:
        """[B] from 0 to 1, of decoded sequences."""
        judge = task_of(self.settings.model).quality
        if judge is not None:
            return judge(after).double()
        decoded = (before == self.model.mask_token_id) & visible
        padding = None if bool(visible.all()) else visible
        return pseudo_likelihood(self.model, after, decoded, positions=2, attention_mask=padding)

    def _mi(self) -> MISource:
        """The source of mutual information, found when a policy first needs it: not every model has one."""
        if self._source is None:
            self._source = load_source(self.settings.estimator, self.model, name=self.settings.model)
        return self._source

    def _policy(self, spec: str) -> Policy:
        if spec not in self._policies:
            policy = parse_policy(spec, mi=self._mi() if needs_mi(spec) else None)
            if self.cache is not None and isinstance(policy, MIBudget | MIThreshold):
                policy = CachedPolicy(policy, self.model, self.cache)
            if len(self._policies) >= _MOST_POLICIES:
                self._policies.clear()
            self._policies[spec] = policy
        return self._policies[spec]

    def _can_pad(self) -> bool:
        """Whether the model takes sequences of several lengths in a batch."""
        tokens = torch.full((2, 3), self.model.mask_token_id, dtype=torch.int64)
        visible = torch.tensor([[True, True, False], [True, True, True]])
        try:
            self.model(tokens, visible)
        except (ValueError, TypeError):
            return False
        return True


class BySequence:
    """A policy of policies: each sequence is decoded by its own, and all share the model's passes.

    Args:
        policies: by the sequences' seeds, themselves or as text.
        make: what turns text into a policy.

    Attributes:
        seconds: by seed, how long each sequence was decoded, without what policies of other sequences took, nor the side of
            a guard that is not its own, nor a guard's audits.
    """

    def __init__(self, policies: Mapping[int, Policy | str], make: Callable[[str], Policy]) -> None:
        self.policies, self._make = policies, make
        self.seconds = dict.fromkeys(policies, 0.0)
        self._since = time.perf_counter()

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: Step) -> Selection:
        seeds: list[int] = required("BySequence", "seeds", step.seeds).tolist()
        took = time.perf_counter() - self._since  # the model's pass, and what was drawn before
        for seed in seeds:
            self.seconds[seed] += took
        given = [self.policies[seed] for seed in seeds]
        own = [self._make(policy) if isinstance(policy, str) else policy for policy in given]
        selected, spent = torch.zeros_like(mask), torch.zeros(len(mask), dtype=torch.float64)
        for policy in {id(policy): policy for policy in own}.values():
            rows = [row for row, other in enumerate(own) if other is policy]
            here = torch.zeros(len(mask), 1, dtype=torch.bool)
            here[rows] = True
            start = time.perf_counter()
            part = policy.select(stats, hidden, mask & here, step)
            took = time.perf_counter() - start
            for row in rows:
                self.seconds[seeds[row]] += float(policy.took[row]) if isinstance(policy, Guard) else took
            selected |= part.selected
            spent += part.spent
        self._since = time.perf_counter()
        return Selection(selected, spent)


def _turns(jobs: Sequence[Job]) -> list[list[int]]:
    """Indices of jobs that can be decoded together: a sequence is known by its seed, so two policies never share one."""
    turns: list[tuple[dict[int, str | None], list[int]]] = []
    for at, job in enumerate(jobs):
        for policies, members in turns:
            if policies.setdefault(job.seed, job.policy) == job.policy:
                members.append(at)
                break
        else:
            turns.append(({job.seed: job.policy}, [at]))
    return [members for _, members in turns]


def _answer(found: Decoded | Exception) -> Answer:
    if isinstance(found, Decoded):
        return Answer(found.tokens, found.passes)
    # The model's and the policies' way to say that it is the sequence is ValueError.
    status = 422 if isinstance(found, (ValueError, UnsupportedError)) else 500
    return Answer(None, 0, _reason(found), status)


def work(connection: Connection, make: Callable[[], Engine]) -> None:
    """The life of a worker: say what it can do or why it cannot start, then answer until None comes."""
    # The service says when to end: a signal to the whole group must not take what it has accepted.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # standard output is the log's; what a model prints is no line of it
        os.dup2(2, 1)
    torch.set_num_threads(1)
    set_num_threads(1)
    said: list[str] = []
    warnings.showwarning = lambda message, *_, **__: said.append(" ".join(str(message).split()))
    with contextlib.suppress(EOFError, ConnectionError):  # the service has gone
        try:
            engine = make()
        except Exception as error:
            connection.send(Hello(warnings=said, error=_reason(error)))
            return
        connection.send(Hello(engine.model.vocab_size, engine.model.mask_token_id, _taken(said)))
        before = _counts(engine.cache)
        while (jobs := connection.recv()) is not None:
            start = time.perf_counter()
            answers = engine.run(jobs)
            seconds, now = time.perf_counter() - start, _counts(engine.cache)
            connection.send(Reply(answers, seconds, _since(before, now), _taken(said)))
            before = now


def _reason(error: Exception) -> str:
    """An error as one line; with its type where it is no fault of what was asked."""
    text = " ".join(str(error).split())
    if isinstance(error, UnsupportedError):
        text = "; ".join(error.reasons)
    return (
        text
        if isinstance(error, (ValueError, OSError, ImportError, UnsupportedError))
        else f"{type(error).__name__}: {text}"
    )


def _taken(said: list[str]) -> list[str]:
    """What was said; it is forgotten here."""
    taken = list(said)
    said.clear()
    return taken


def _counts(cache: Cache | None) -> dict[str, Counts]:
    return {} if cache is None else {name: dataclasses.replace(counts) for name, counts in cache.counts.items()}


def _since(before: Mapping[str, Counts], now: Mapping[str, Counts]) -> dict[str, Counts]:
    """What was counted between."""
    return {
        store: Counts(**{name: value - getattr(before[store], name) for name, value in vars(counts).items()})
        for store, counts in now.items()
    }
