"""A process that decodes: batches of jobs come in over a pipe, one answer a job goes back."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdmi_fast import decode, load_estimator, load_model, set_num_threads
from mdmi_fast.cache import Cache, CachedPolicy, DiskStore, MemoryStore, RedisStore
from mdmi_fast.decoding import Policy, needs_mi, parse_policy
from mdmi_fast.models import MaskedModel
from mdmi_fast.ops import Selection, TokenStats
from mdmi_fast.tasks.sudoku.boards import is_valid_board
from mdmi_fast.watch.guard import Guard, pseudo_likelihood


class Job(NamedTuple):
    """One sequence to decode."""

    tokens: list[int]
    policy: str | None
    temperature: float
    seed: int


class Answer(NamedTuple):
    """A decoded sequence, or why there is none."""

    tokens: list[int] | None
    passes: int
    error: str | None = None


@dataclass(frozen=True)
class Settings:
    """What a worker loads.

    Attributes:
        model: name, as for `load_model`.
        policy: of jobs that name none.
        estimator: name or folder; None: the model's own.
        cache: "memory", "disk" or the URL of a Redis server, for selections by mutual information, but not by a policy
            that a guard watches; None: no cache, which is faster with a small estimator.
        state: folder for the state of each worker's guard around `policy`; None: no guard.
    """

    model: str
    policy: str
    estimator: str | None = None
    cache: str | None = None
    state: Path | None = None


class Engine:
    """A model, its policies, and a function from jobs to answers that fails for no batch, only for single jobs.

    Raises:
        ValueError: if a weight is not a finite number, or the default policy is none.
    """

    def __init__(self, settings: Settings, number: int = 0, *, model: MaskedModel | None = None) -> None:
        self.model = load_model(settings.model) if model is None else model
        if isinstance(self.model, torch.nn.Module):
            for name, weight in self.model.state_dict().items():
                if not bool(weight.isfinite().all()):
                    raise ValueError(f"{settings.model}: the weight {name} holds values that are not finite numbers")
        self._mi = (
            load_estimator(settings.estimator or settings.model.partition(":")[0]) if self._reads_mi(settings) else None
        )
        self._cache = _cache(settings.cache)
        self._policies: dict[str, Policy] = {}
        self._default = self._policy(settings.policy)
        self.guard: Guard | None = None
        if settings.state is not None:
            watched = parse_policy(settings.policy, mi=self._mi)
            self._default = self.guard = Guard(watched, state=settings.state / f"worker-{number}.json")
        self._is_sudoku = settings.model.startswith("sudoku")
        self.pads = self._can_pad()

    def run(self, jobs: Sequence[Job]) -> list[Answer]:
        answers: list[Answer | None] = [None] * len(jobs)
        for group in self._groups(jobs):
            try:
                found = self._decode([jobs[at] for at in group])
            except Exception as error:
                if len(group) == 1:
                    found = [Answer(None, 0, f"{type(error).__name__}: {error}")]
                else:  # one job must not take others with it
                    found = [answer for at in group for answer in self.run([jobs[at]])]
            for at, answer in zip(group, found, strict=True):
                answers[at] = answer
        return [answer for answer in answers if answer is not None]

    def _groups(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Indices of jobs that one `decode` can take: of one temperature, and of one length if the model cannot pad.

        A sequence is known by its seed while it is decoded, so two policies never share one in a group.
        """
        groups: dict[tuple[float, int, int], list[int]] = {}
        policies: dict[tuple[float, int, int], dict[int, str | None]] = {}
        for at, job in enumerate(jobs):
            turn = 0
            while True:
                key = (job.temperature, 0 if self.pads else len(job.tokens), turn)
                if policies.setdefault(key, {}).setdefault(job.seed, job.policy) == job.policy:
                    break
                turn += 1
            groups.setdefault(key, []).append(at)
        return list(groups.values())

    def _decode(self, jobs: Sequence[Job]) -> list[Answer]:
        lengths = [len(job.tokens) for job in jobs]
        n = max(lengths)
        tokens = torch.full((len(jobs), n), self.model.mask_token_id, dtype=torch.int64)
        for row, job in enumerate(jobs):
            tokens[row, : lengths[row]] = torch.tensor(job.tokens, dtype=torch.int64)
        visible = torch.arange(n) < torch.tensor(lengths).unsqueeze(-1)
        seeds = torch.tensor([job.seed for job in jobs], dtype=torch.int64)
        policies = {job.seed: self._default if job.policy is None else self._policy(job.policy) for job in jobs}
        result = decode(
            self.model,
            tokens,
            BySequence(policies),
            temperature=jobs[0].temperature,
            seeds=seeds,
            attention_mask=None if bool(visible.all()) else visible,
        )
        if self.guard is not None:
            self._tell_guard(jobs, tokens, result.tokens, result.passes, seeds)
        rows = zip(result.tokens.tolist(), lengths, result.passes.tolist(), strict=True)
        return [Answer(row[:length], passes) for row, length, passes in rows]

    def _tell_guard(self, jobs: Sequence[Job], before: Tensor, after: Tensor, passes: Tensor, seeds: Tensor) -> None:
        # A sequence that nothing was decoded of tells of no policy, and may not even be a board.
        ours = torch.tensor([job.policy is None for job in jobs]) & (passes > 0)
        if not bool(ours.any()):
            return
        assert self.guard is not None
        before, after = before[ours], after[ours]
        if self._is_sudoku:
            quality = is_valid_board(after).double()
        else:
            quality = pseudo_likelihood(self.model, after, before == self.model.mask_token_id, positions=2)
        self.guard.finish(seeds[ours], quality=quality, passes=passes[ours])

    def _reads_mi(self, settings: Settings) -> bool:
        return settings.estimator is not None or settings.model.startswith("sudoku") or needs_mi(settings.policy)

    def _policy(self, spec: str) -> Policy:
        if spec not in self._policies:
            policy = parse_policy(spec, mi=self._mi)
            if self._cache is not None and needs_mi(spec):
                policy = CachedPolicy(policy, self.model, self._cache)  # type: ignore[arg-type] # it reads MI
            if len(self._policies) >= 1000:  # clients name them
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
        policies: by the sequences' seeds.
    """

    def __init__(self, policies: dict[int, Policy]) -> None:
        self.policies = policies

    def select(self, stats: TokenStats, hidden: Tensor, mask: Tensor, step: Any) -> Selection:
        own = [self.policies[seed] for seed in step.seeds.tolist()]
        distinct = list({id(policy): policy for policy in own}.values())
        if len(distinct) == 1:
            return distinct[0].select(stats, hidden, mask, step)
        selected, spent = torch.zeros_like(mask), torch.zeros(len(mask), dtype=torch.float64)
        for policy in distinct:
            rows = torch.tensor([other is policy for other in own]).unsqueeze(-1)
            part = policy.select(stats, hidden, mask & rows, step)
            selected |= part.selected
            spent += part.spent
        return Selection(selected, spent)


def work(connection: Connection, make: Callable[[], Engine]) -> None:
    """The life of a worker: say what it can do or why it cannot start, then answer until None comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server says when to end
    torch.set_num_threads(1)
    set_num_threads(1)
    try:
        engine = make()
    except Exception as error:
        connection.send((0, f"{type(error).__name__}: {error}"))
        return
    connection.send((engine.model.vocab_size, None))
    while (jobs := connection.recv()) is not None:
        connection.send(engine.run(jobs))


def _cache(where: str | None) -> Cache | None:
    if where is None:
        return None
    if where == "memory":
        return Cache(MemoryStore())
    return Cache(MemoryStore(), DiskStore() if where == "disk" else RedisStore(where))
