"""Between requests and workers: a bounded queue, batches, deadlines, and workers that may die."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from mdmi_fast.service.worker import Answer, Engine, Hello, Job, Reply, work

_TRIES = 3
"""Workers that may die over one request before it is answered with an error: it may be what kills them."""
_STARTS, _RESTART_SECONDS = 3, 2.0
"""Tries to start a worker in place of a dead one, and the pause between them, before the service ends."""
_LINGER_SECONDS = 0.004
"""That an idle worker waits for company of a first job."""


class Refused(Exception):  # noqa: N818 - an answer to the client rather than an error
    """A request that will not be decoded; `status` is the HTTP status and the text says why."""

    def __init__(self, status: int, text: str, *, queue_seconds: float = 0.0) -> None:
        super().__init__(text)
        self.status, self.queue_seconds = status, queue_seconds


class StartError(Exception):
    """A worker cannot start, and so neither can the service; the text says why."""


class Served(NamedTuple):
    """An answer, and the seconds that its job waited for a worker and was with one."""

    answer: Answer
    queue_seconds: float
    decode_seconds: float


class Watcher:
    """Is told what happens to workers; this one makes nothing of it."""

    def decoded(self, number: int, reply: Reply) -> None:
        """A worker answered a batch."""

    def warned(self, number: int, warnings: Sequence[str]) -> None:
        """A worker has something to say."""

    def restarting(self, number: int, reason: str) -> None:
        """A worker is started in place of one that ended, or that could not start."""

    def broken(self, reason: str) -> None:
        """No worker can start any more; nothing will be decoded."""


@dataclass(eq=False)
class _Pending:
    job: Job
    answer: asyncio.Future[Served]
    deadline: float
    since: float
    """When it was accepted."""
    handed: float | None = None
    """When it last went to a worker."""
    tries: int = 0

    @property
    def queue_seconds(self) -> float:
        return (time.monotonic() if self.handed is None else self.handed) - self.since


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    ready: bool = False
    dead: bool = False


@dataclass
class Dispatcher:
    """Hands jobs to workers in batches, whatever came together while they were busy.

    Attributes:
        make: builds a worker's engine, in its process; gets its number.
        workers: processes.
        max_batch: jobs in a batch at most.
        max_queue: jobs that may wait; more are refused at once.
        batch_seconds: after which a worker that has not answered is taken for hung, and ended.
        start_seconds: the same for one that starts.
        watcher: what to tell of workers.
        hello: what a worker said of its model; None before there is one.
    """

    make: Callable[[int], Callable[[], Engine]]
    workers: int = 1
    max_batch: int = 64
    max_queue: int = 512
    batch_seconds: float = 120.0
    start_seconds: float = 300.0
    watcher: Watcher = field(default_factory=Watcher)
    hello: Hello | None = None

    def __post_init__(self) -> None:
        self._queue: deque[_Pending] = deque()
        self._wake = asyncio.Event()
        self._stopping = self._abandoned = False
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="worker-pipe")
        self._live: dict[int, _Worker] = {}
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers, the first before the others: what is wrong with one is wrong with all.

        Raises:
            StartError: if one cannot start; the message is its own.
        """
        try:
            started = [await self._started(0)]
            started += await asyncio.gather(*(self._started(number) for number in range(1, self.workers)))
        except BaseException:
            await self.stop()
            raise
        self._loops = [asyncio.create_task(self._serve(number, worker)) for number, worker in enumerate(started)]

    def close(self) -> None:
        """Accept nothing more."""
        self._stopping = True
        self._wake.set()

    async def stop(self) -> None:
        """Answer everything that was accepted, then end the workers, those too that have not yet started."""
        self.close()
        try:
            await asyncio.gather(*self._loops)
        finally:
            self._abandoned = True
            for worker in list(self._live.values()):
                worker.process.kill()  # which ends the thread that waits for it
            await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
            for number, worker in list(self._live.items()):
                self._end(number, worker)

    def pids(self) -> list[int]:
        """Of the workers that can decode."""
        return [worker.process.pid or 0 for worker in self._live.values() if worker.ready and not worker.dead]

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def decode(self, job: Job, seconds: float) -> Served:
        """The answer to a job.

        Args:
            job: what to decode.
            seconds: until its deadline.

        Raises:
            Refused: too many jobs wait, the service stops, no worker can start, or the deadline passed.
        """
        if self._stopping:
            raise Refused(503, "the service is stopping")
        if len(self._queue) >= self.max_queue:
            raise Refused(503, f"{len(self._queue)} requests are waiting already, try again later")
        now = time.monotonic()
        pending = _Pending(job, asyncio.get_running_loop().create_future(), now + seconds, now)
        self._queue.append(pending)
        self._wake.set()
        try:
            return await asyncio.wait_for(pending.answer, seconds)
        except asyncio.TimeoutError:
            with contextlib.suppress(ValueError):  # no worker has taken it: its place is another's
                self._queue.remove(pending)
            text = f"the deadline of {seconds:g} s has passed"
            raise Refused(504, text, queue_seconds=pending.queue_seconds) from None

    async def _serve(self, number: int, worker: _Worker) -> None:
        """A worker's life, and that of those which come in its place."""
        try:
            while (batch := await self._next_batch(worker)) is not None:
                reason = await self._try(number, worker, batch) if batch else _end_of(worker.process)
                if reason is None:
                    continue
                self._end(number, worker)
                self._again(batch)
                worker = await self._restarted(number, reason)
            with contextlib.suppress(OSError):  # it may have died since
                worker.pipe.send(None)
            await asyncio.get_running_loop().run_in_executor(self._threads, worker.process.join, 10)
            self._end(number, worker)
        except Exception as error:  # a fault of ours must not leave requests without an answer
            self._break(str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}")

    async def _next_batch(self, worker: _Worker) -> list[_Pending] | None:
        """Jobs that still want an answer; none if the worker has died; None once the service stops and no job is left."""
        while True:
            while not self._queue:
                if self._stopping:
                    return None
                if worker.dead:
                    return []
                self._wake.clear()
                await self._wake.wait()
            if worker.dead:
                return []
            if len(self._queue) < self.max_batch and not self._stopping:
                await asyncio.sleep(_LINGER_SECONDS)
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

    async def _try(self, number: int, worker: _Worker, batch: list[_Pending]) -> str | None:
        """Have a batch answered; what became of the worker if it could not."""

        def exchange() -> Reply:
            worker.pipe.send([pending.job for pending in batch])
            if not worker.pipe.poll(self.batch_seconds):
                raise TimeoutError
            reply: Reply = worker.pipe.recv()
            return reply

        for pending in batch:
            pending.handed = time.monotonic()
        try:
            reply = await asyncio.get_running_loop().run_in_executor(self._threads, exchange)
        except TimeoutError:
            return f"no answer within {self.batch_seconds:g} s"
        except (EOFError, OSError):
            return _end_of(worker.process)
        now = time.monotonic()
        self.watcher.decoded(number, reply)
        self.watcher.warned(number, reply.warnings)
        for pending, answer in zip(batch, reply.answers, strict=True):
            if not pending.answer.done():
                pending.answer.set_result(Served(answer, pending.queue_seconds, now - (pending.handed or now)))
        return None

    def _again(self, batch: list[_Pending]) -> None:
        """Back to the head of the queue, in their order; who has outlived too many workers gets an error."""
        for pending in reversed(batch):
            pending.tries += 1
            if pending.answer.done():
                continue
            if pending.tries >= _TRIES:
                answer = Answer(None, 0, f"{pending.tries} workers died over this request", 500)
                pending.answer.set_result(Served(answer, pending.queue_seconds, 0.0))
            else:
                pending.handed = None
                self._queue.appendleft(pending)
        self._wake.set()

    async def _restarted(self, number: int, reason: str) -> _Worker:
        """A worker in place of one that ended.

        Raises:
            StartError: none can start.
        """
        for _ in range(_STARTS - 1):
            self.watcher.restarting(number, reason)
            try:
                return await self._started(number)
            except StartError as error:
                reason = str(error)
                await asyncio.sleep(_RESTART_SECONDS)
        self.watcher.restarting(number, reason)
        return await self._started(number)

    def _break(self, reason: str) -> None:
        """Nothing will be decoded any more: say so to all who wait."""
        self.close()
        for pending in self._queue:
            if not pending.answer.done():
                pending.answer.set_exception(Refused(503, reason, queue_seconds=pending.queue_seconds))
        self._queue.clear()
        self.watcher.broken(reason)

    async def _started(self, number: int) -> _Worker:
        """A new worker that has said what it can do.

        Raises:
            StartError: with what it said instead.
        """

        def launch() -> tuple[_Worker, Hello]:
            # Workers are forked from a process that has imported everything and started no thread: a new one takes no
            # time.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([work.__module__])
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, self.make(number)), daemon=True)
            process.start()
            theirs.close()  # so that a dead worker is an end of file
            worker = self._live[number] = _Worker(process, ours)
            if self._abandoned:
                process.kill()
            try:
                if not ours.poll(self.start_seconds):
                    return worker, Hello(error=f"it did not start within {self.start_seconds:g} s")
                hello: Hello = ours.recv()
            except (EOFError, OSError):
                hello = Hello(error=_end_of(process))
            return worker, hello

        loop = asyncio.get_running_loop()
        worker, hello = await loop.run_in_executor(self._threads, launch)
        self.watcher.warned(number, hello.warnings)
        if hello.error is not None:
            self._end(number, worker)
            raise StartError(f"worker {number} cannot start: {hello.error}")

        def died() -> None:
            loop.remove_reader(worker.process.sentinel)
            worker.dead = True
            self._wake.set()

        loop.add_reader(worker.process.sentinel, died)
        self.hello, worker.ready = hello, True
        return worker

    def _end(self, number: int, worker: _Worker) -> None:
        if worker.ready:
            asyncio.get_running_loop().remove_reader(worker.process.sentinel)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self._live.pop(number, None)


def _end_of(process: BaseProcess) -> str:
    """How a process that has ended, or is about to, came to its end."""
    process.join(1)
    code = process.exitcode
    if code is not None and code < 0:
        return f"it was killed by signal {-code} ({signal.strsignal(-code)})"
    return "it does not answer" if code is None else f"it ended with exit code {code}"
