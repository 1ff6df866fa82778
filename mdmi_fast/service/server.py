"""Decoding over HTTP: one process answers requests, others decode them in batches."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import secrets
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mdmi_fast.errors import UnsupportedError, missing
from mdmi_fast.service.dispatch import Dispatcher, Refused, StartError, Watcher
from mdmi_fast.service.log import Level, Log
from mdmi_fast.service.metrics import Metrics
from mdmi_fast.service.requests import check_policy, id_of, number_of, read_body, shown
from mdmi_fast.service.worker import Hello, Job, Reply, Settings

if TYPE_CHECKING:
    from aiohttp import web

_FAREWELL_SECONDS = 10.0
"""That clients get to take their answers at the end."""
_CONNECTIONS: dict[str, Any] = {"keepalive_timeout": 75.0, "auto_decompress": False, "access_log": None}
"""A connection may be without the head of a request so long; a body must come as it is; lines are written here."""
_METHODS = {"/decode": ("POST",), "/health": ("GET", "HEAD"), "/metrics": ("GET", "HEAD")}
_EXTRAS = ("aiohttp", "prometheus_client")
_FIELDS = ("tokens", "policy", "temperature", "seed", "deadline_ms")


def check_installed() -> None:
    """Raises UnsupportedError: what the service needs besides is not installed."""
    absent = []
    for module in _EXTRAS:
        try:
            importlib.import_module(module)
        except ImportError:
            absent.append(missing(module, "service"))
    if absent:
        raise UnsupportedError(absent, "the service")


@dataclass
class _Outcome:
    """What becomes of a request, for its answer, its line in the log and the metrics."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    traceback: str | None = None
    sequences: int = 0
    tokens: int = 0
    passes: int = 0
    queue_seconds: float = 0.0
    decode_seconds: float = 0.0

    def fail(self, status: int, text: str) -> None:
        self.status, self.error = status, text


class Service(Watcher):
    """The HTTP side.

    Args:
        dispatcher: where jobs go; it tells the service of its workers.
        settings: of the workers.
        deadline: seconds of a request that names none.
        log: where lines go; None: nowhere.

    Raises:
        UnsupportedError: what the service or its cache needs is not installed.
    """

    def __init__(
        self, dispatcher: Dispatcher, settings: Settings, *, deadline: float = 10.0, log: Log | None = None
    ) -> None:
        check_installed()
        self.dispatcher, self.settings, self.deadline = dispatcher, settings, deadline
        self.metrics = Metrics(dispatcher, settings)
        self._log = Log("text", None) if log is None else log
        self._listener: asyncio.Server | None = None
        self._server: web.Server | None = None
        self._told_to_end = asyncio.Event()
        self._reason, self._broken = "", False
        dispatcher.watcher = self

    async def run(self, host: str, port: int) -> None:
        """Serve until SIGTERM or SIGINT, then answer what was accepted.

        Raises:
            StartError: it cannot listen, or a worker cannot start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number.name)
        starting = asyncio.ensure_future(self.start(host, port))
        ending = asyncio.ensure_future(self._told_to_end.wait())
        try:
            await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                url = starting.result()
                self._log(
                    "start",
                    url=url,
                    model=self.settings.model,
                    policy=self.settings.policy,
                    workers=self.dispatcher.workers,
                    pid=os.getpid(),
                )
                await ending
        finally:
            for task in (starting, ending):
                task.cancel()
            await asyncio.gather(starting, ending, return_exceptions=True)
            await self.stop()
        self._log("stop", level="error" if self._broken else "info", reason=self._reason)
        if self._broken:
            raise StartError(self._reason)

    async def start(self, host: str, port: int) -> str:
        """Start the workers, then listen; the address.

        Raises:
            StartError: it cannot listen there, or a worker cannot start.
        """
        from aiohttp import web

        loop = asyncio.get_running_loop()
        server, protocol = web.Server(self._answer), _protocol(self)
        self._server = server
        try:
            self._listener = await loop.create_server(
                lambda: protocol(server, loop=loop, **_CONNECTIONS),
                host,
                port,
                backlog=512,
                start_serving=False,  # a port that is taken is said before models are loaded
            )
        except OSError as error:
            number = error.errno or 0
            reason = (
                os.strerror(number) if number > 0 else error.strerror or str(error)
            )  # no address has its own numbers
            raise StartError(f"{host}:{port}: cannot listen there: {reason}") from error
        try:
            await self.dispatcher.start()
        except BaseException:
            self._listener.close()
            raise
        await self._listener.start_serving()
        name, number = self._listener.sockets[0].getsockname()[:2]
        return f"http://{f'[{name}]' if ':' in name else name}:{number}"

    async def stop(self) -> None:
        """Accept nothing more, answer what was accepted, and end."""
        if self._listener is not None:
            self._listener.close()
        await self.dispatcher.stop()
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(_FAREWELL_SECONDS)

    def _end(self, reason: str) -> None:
        if not self._told_to_end.is_set():
            self._reason = reason
            self._told_to_end.set()

    def decoded(self, number: int, reply: Reply) -> None:
        self.metrics.batches.observe(len(reply.answers))
        if self.metrics.caches:
            self.metrics.caches[f"worker-{number}"].add(reply.cached)

    def note(self, text: str, error: object) -> None:
        """Write a line about something that is no request's."""
        self._log("warning", level="warning", text=f"{text}: {' '.join(str(error).split())}")

    def warned(self, number: int, warnings: Sequence[str]) -> None:
        for text in warnings:
            self._log("warning", level="warning", worker=number, text=text)

    def restarting(self, number: int, reason: str) -> None:
        self.metrics.restarts.inc()
        self._log("restart", level="warning", worker=number, reason=reason)

    def broken(self, reason: str) -> None:
        self._broken = True
        self._end(reason)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """The answer to a request, whatever becomes of it."""
        start, outcome = time.perf_counter(), _Outcome()
        try:
            await self._route(request, outcome)
        except Refused as refusal:
            outcome.fail(refusal.status, str(refusal))
            outcome.queue_seconds = refusal.queue_seconds
        except Exception as error:
            outcome.fail(500, "an internal error; the log says more of this request")
            outcome.traceback = "".join(traceback.format_exception(error))
        return self.respond(request, outcome, time.perf_counter() - start)

    def respond(self, request: web.BaseRequest, outcome: _Outcome, seconds: float) -> web.Response:
        """Make the answer of an outcome, count it and write its line."""
        from aiohttp import web

        name = id_of(request)
        if outcome.error is not None:
            body = {**outcome.details, "error": outcome.error, "status": outcome.status, "id": name}
            outcome.body, outcome.kind = json.dumps(body).encode(), "application/json"
        if outcome.status == 503:
            outcome.headers["Retry-After"] = "1"
        quiet = request.path in ("/health", "/metrics") and outcome.status in (200, 503)  # asked every few seconds
        if not quiet:
            self.metrics.requests.labels(outcome.status).inc()
            self._write_line(request, outcome, name, seconds)
        if request.path == "/decode":
            self.metrics.request_seconds.observe(seconds)
        headers = {"Content-Type": outcome.kind, "X-Request-Id": name, **outcome.headers}
        response = web.Response(body=outcome.body, status=outcome.status, headers=headers)
        if self.dispatcher.stopping:
            response.force_close()
        return response

    def _write_line(self, request: web.BaseRequest, outcome: _Outcome, name: str, seconds: float) -> None:
        level: Level = "info" if outcome.status < 500 else "error" if outcome.status == 500 else "warning"
        errors = {"error": outcome.error, "traceback": outcome.traceback}
        self._log(
            "request",
            level=level,
            id=name,
            method=request.method,
            path=request.path[:100],
            status=outcome.status,
            sequences=outcome.sequences,
            tokens=outcome.tokens,
            passes=outcome.passes,
            ms=round(1000 * seconds, 1),
            queue_ms=round(1000 * outcome.queue_seconds, 1),
            decode_ms=round(1000 * outcome.decode_seconds, 1),
            bytes=len(outcome.body),
            **{key: text for key, text in errors.items() if text is not None},
        )

    async def _route(self, request: web.BaseRequest, outcome: _Outcome) -> None:
        methods = _METHODS.get(request.path)
        if methods is None:
            raise Refused(404, f"there is no {request.path[:100]}, only {', '.join(_METHODS)}")
        if request.method not in methods:
            outcome.headers["Allow"] = ", ".join(methods)
            raise Refused(405, f"{request.path} takes {' and '.join(methods)}, got {request.method}")
        if request.path == "/decode":
            await self._decode(request, outcome)
        elif request.path == "/health":
            self._health(outcome)
        else:
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            outcome.body, outcome.kind = generate_latest(self.metrics.registry), CONTENT_TYPE_LATEST

    async def _decode(self, request: web.BaseRequest, outcome: _Outcome) -> None:
        hello = self.dispatcher.hello
        assert hello is not None  # nothing listens before a worker has started
        job, seconds = self._job(await read_body(request), hello)
        outcome.sequences = 1
        served = await self.dispatcher.decode(job, seconds)
        answer = served.answer
        outcome.passes = answer.passes
        outcome.queue_seconds, outcome.decode_seconds = served.queue_seconds, served.decode_seconds
        if answer.error is not None:
            outcome.fail(answer.status, answer.error)
            return
        outcome.tokens = job.tokens.count(hello.mask_token_id)
        self.metrics.served(served, outcome.tokens)
        outcome.body = json.dumps({"tokens": answer.tokens, "passes": answer.passes}).encode()

    def _health(self, outcome: _Outcome) -> None:
        pids = self.dispatcher.pids()
        ready = bool(pids) and not self.dispatcher.stopping
        outcome.details = {"ready": ready, "waiting": self.dispatcher.waiting, "workers": pids}
        if ready:
            outcome.body = json.dumps({**outcome.details, "error": None}).encode()
        else:
            outcome.fail(503, "the service is stopping" if self.dispatcher.stopping else "no worker is ready")

    def _job(self, body: Any, hello: Hello) -> tuple[Job, float]:
        """The job of a request, and the seconds it may take."""
        if not isinstance(body, dict):
            raise Refused(400, "the body must be an object")
        unknown = body.keys() - set(_FIELDS)
        if unknown:
            raise Refused(400, f"no field is called {min(unknown)!r}, there are {', '.join(_FIELDS)}")
        tokens, most = body.get("tokens"), hello.vocab_size
        known = isinstance(tokens, list) and all(
            type(token) is int and (0 <= token < most or token == hello.mask_token_id) for token in tokens
        )
        if not tokens or not known:
            masked = "" if hello.mask_token_id < most else f", or {hello.mask_token_id} where masked"
            raise Refused(400, f"tokens must be a list of at least one integer from 0 to {most - 1}{masked}")
        policy = body.get("policy")
        if policy is not None:
            check_policy(policy)
        temperature = number_of(body, "temperature", self.settings.temperature, high=100.0)
        seconds = number_of(body, "deadline_ms", 1000 * self.deadline, high=3_600_000.0) / 1000
        seed = body.get("seed", secrets.randbits(62))
        if type(seed) is not int or not -(2**63) <= seed < 2**63:
            raise Refused(400, f"seed must be an integer of 64 bits, got {shown(seed)}")
        return Job(tokens, policy, temperature, seed), seconds


def _protocol(service: Service) -> type[web.RequestHandler]:
    """A connection that answers in the service's way what is no HTTP, too."""
    from aiohttp import web

    class Protocol(web.RequestHandler):
        def handle_error(
            self,
            request: web.BaseRequest,
            status: int = 500,
            exc: BaseException | None = None,
            message: str | None = None,
        ) -> web.StreamResponse:
            outcome = _Outcome()
            lines = (message or str(exc or "")).strip().splitlines()
            outcome.fail(status, f"the request cannot be read: {lines[0].rstrip(':') if lines else 'no HTTP'}")
            response = service.respond(request, outcome, 0.0)
            response.force_close()
            return response

        def log_exception(self, *args: Any, **kw: Any) -> None:
            service.note("the connection was closed", kw.get("exc_info"))

    return Protocol
