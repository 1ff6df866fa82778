"""Between requests and workers: a bounded queue, batches, deadlines, and workers that may die."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from examples.service.worker import Answer, Engine, Job, work

_TRIES = 3
"""Workers that may die over one request before it is answered with an error: it may be what kills them."""
_START_SECONDS, _ANSWER_SECONDS, _RETRY_SECONDS = 300.0, 120.0, 2.0


class Refused(Exception):  # noqa: N818 - an answer to the client rather than an error
    """A request that will not be decoded; `status` is the HTTP status and the text says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class _Pending:
    job: Job
    answer: asyncio.Future[Answer]
    deadline: float
    tries: int = 0


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection


@dataclass
class Dispatcher:
    """Hands jobs to workers in batches, whatever came together while they were busy.

    Attributes:
        make: builds a worker's engine, in its process; gets its number.
        workers: processes.
        max_batch: jobs in a batch at most.
        max_queue: jobs that may wait; more are refused at once.
        linger: seconds that an idle worker waits for company of a first job.
        batches: sizes of the batches so far, by size.
        restarts: workers started anew.
    """

    make: Callable[[int], Callable[[], Engine]]
    workers: int = 1
    max_batch: int = 64
    max_queue: int = 512
    linger: float = 0.004
    batches: dict[int, int] = field(default_factory=dict)
    restarts: int = 0
    broken: str | None = None
    vocab_size: int = 0

    def __post_init__(self) -> None:
        self._queue: deque[_Pending] = deque()
        self._wake = asyncio.Event()
        self._stopping = False
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="worker-pipe")
        self._live: dict[int, _Worker] = {}
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers.

        Raises:
            RuntimeError: if one cannot start; the message is its own.
        """
        self._loops = []
        for worker in await asyncio.gather(*(self._started(number) for number in range(self.workers))):
            self._loops.append(asyncio.create_task(self._serve(len(self._loops), worker)))

    def close(self) -> None:
        """Accept nothing more."""
        self._stopping = True
        self._wake.set()

    async def stop(self) -> None:
        """Answer everything that was accepted, then end the workers."""
        self.close()
        await asyncio.gather(*self._loops)
        self._threads.shutdown()

    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._live.values()]

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def decode(self, job: Job, seconds: float) -> Answer:
        """The answer to a job.

        Args:
            job: what to decode.
            seconds: until its deadline.

        Raises:
            Refused: too many jobs wait, the service stops, no worker can start, or the deadline passed.
        """
        if self._stopping:
            raise Refused(503, "the service is stopping")
        if self.broken is not None:
            raise Refused(503, f"no worker can start: {self.broken}")
        if len(self._queue) >= self.max_queue:
            raise Refused(503, f"{len(self._queue)} requests are waiting already, try again later")
        pending = _Pending(job, asyncio.get_running_loop().create_future(), time.monotonic() + seconds)
        self._queue.append(pending)
        self._wake.set()
        try:
            return await asyncio.wait_for(pending.answer, seconds)
        except asyncio.TimeoutError:
            raise Refused(504, f"the deadline of {seconds:g} s has passed") from None

    async def _serve(self, number: int, worker: _Worker | None) -> None:
        while (batch := await self._next_batch()) is not None:
            while worker is None:
                worker = await self._restarted(number)
                if worker is None and self._stopping:
                    self._refuse(batch)
                    break
            if worker is None:
                continue
            self.batches[len(batch)] = self.batches.get(len(batch), 0) + 1
            try:
                answers = await self._ask(worker, [pending.job for pending in batch])
            except (EOFError, OSError, TimeoutError):
                self._end(number, worker)
                worker = None
                self._again(batch)
                continue
            for pending, answer in zip(batch, answers, strict=True):
                if not pending.answer.done():
                    pending.answer.set_result(answer)
        if worker is not None:
            with contextlib.suppress(OSError):  # it may have died since
                worker.pipe.send(None)
            worker.process.join(10)
            self._end(number, worker)

    async def _next_batch(self) -> list[_Pending] | None:
        """Jobs that still want an answer; None once the service stops and none is left."""
        while True:
            while not self._queue:
                if self._stopping:
                    return None
                self._wake.clear()
                await self._wake.wait()
            if len(self._queue) < self.max_batch and not self._stopping:
                await asyncio.sleep(self.linger)
            batch: list[_Pending] = []
            while self._queue and len(batch) < self.max_batch:
                # Who was there when a worker died is tried alone, so that what kills workers takes no other with it.
                if batch and (batch[0].tries or self._queue[0].tries):
                    break
                pending = self._queue.popleft()
                if not pending.answer.done() and pending.deadline > time.monotonic():
                    batch.append(pending)
            if batch:
                return batch

    def _again(self, batch: list[_Pending]) -> None:
        """Back to the head of the queue, in their order; who has outlived too many workers gets an error."""
        for pending in reversed(batch):
            pending.tries += 1
            if pending.answer.done():
                continue
            if pending.tries >= _TRIES:
                pending.answer.set_result(Answer(None, 0, f"{pending.tries} workers died over this request"))
            else:
                self._queue.appendleft(pending)
        self._wake.set()

    def _refuse(self, batch: list[_Pending]) -> None:
        for pending in [*batch, *self._queue]:
            if not pending.answer.done():
                pending.answer.set_exception(Refused(503, f"no worker can start: {self.broken}"))
        self._queue.clear()

    async def _ask(self, worker: _Worker, jobs: list[Job]) -> list[Answer]:
        def exchange() -> list[Answer]:
            worker.pipe.send(jobs)
            if not worker.pipe.poll(_ANSWER_SECONDS):
                raise TimeoutError
            answers: list[Answer] = worker.pipe.recv()
            return answers

        return await asyncio.get_running_loop().run_in_executor(self._threads, exchange)

    async def _restarted(self, number: int) -> _Worker | None:
        """A worker in place of a dead one; None, after a while, if it cannot start."""
        self.restarts += 1
        try:
            worker = await self._started(number)
        except RuntimeError as error:
            self.broken = str(error)
            self._refuse([])
            await asyncio.sleep(_RETRY_SECONDS)
            return None
        self.broken = None
        return worker

    async def _started(self, number: int) -> _Worker:
        # Workers are forked from a process that has imported everything and started no thread: a new one takes no time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([work.__module__])
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, self.make(number)), daemon=True)
        process.start()
        theirs.close()  # so that a dead worker is an end of file

        def hello() -> tuple[int, str | None]:
            return ours.recv() if ours.poll(_START_SECONDS) else (0, "a worker did not start in time")

        try:
            vocab_size, wrong = await asyncio.get_running_loop().run_in_executor(self._threads, hello)
        except EOFError:
            vocab_size, wrong = 0, "a worker died while it started"
        worker = _Worker(process, ours)
        if wrong is not None:
            self._end(number, worker)
            raise RuntimeError(wrong)
        self.vocab_size = vocab_size
        self._live[number] = worker
        return worker

    def _end(self, number: int, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self._live.pop(number, None)
