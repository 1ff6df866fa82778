"""Decoding over HTTP: one process answers requests, others decode them in batches.

POST /decode  {"tokens": [...], "policy": "mi-budget:0.05", "temperature": 0, "seed": 7, "deadline_ms": 2000}; all but
              tokens may be left out. 200 {"tokens": [...], "passes": n}; else {"error": "..."} with
              400 the request makes no sense, 408 it did not arrive in time, 413 it is too large, 422 this sequence
              cannot be decoded, 503 too busy, stopping or broken: try again later, 504 the deadline has passed
GET /health   200 while requests are accepted, else 503
GET /metrics  for Prometheus
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import secrets
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from examples.service.dispatch import Dispatcher, Refused
from examples.service.worker import Engine, Job, Settings
from mdmi_fast.decoding import parse_policy
from mdmi_fast.watch import Collector

_MAX_BYTES, _BODY_SECONDS = 2**20, 5.0
_LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Service:
    """The HTTP side.

    Args:
        dispatcher: where jobs go.
        settings: of the workers.
        deadline: seconds of a request that names none.
    """

    def __init__(self, dispatcher: Dispatcher, settings: Settings, *, deadline: float = 10.0) -> None:
        self.dispatcher, self.settings, self.deadline = dispatcher, settings, deadline
        self.registry = CollectorRegistry()
        self._requests = Counter("mdmi_requests", "Requests by status.", ["status"], registry=self.registry)
        self._seconds = Histogram(
            "mdmi_request_seconds", "Seconds from a request to its answer.", registry=self.registry, buckets=_LATENCIES
        )
        waiting = Gauge("mdmi_requests_waiting", "Requests in the queue.", registry=self.registry)
        waiting.set_function(lambda: dispatcher.waiting)
        restarts = Gauge("mdmi_worker_restarts", "Workers started anew.", registry=self.registry)
        restarts.set_function(lambda: dispatcher.restarts)
        if settings.state is not None:
            states = {f"worker-{n}": settings.state / f"worker-{n}.json" for n in range(dispatcher.workers)}
            self.registry.register(Collector(guards=states))

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BYTES)
        app.add_routes(
            [web.post("/decode", self.decode), web.get("/health", self.health), web.get("/metrics", self.metrics)]
        )
        app.cleanup_ctx.append(self._workers)
        app.on_shutdown.append(self._stop)
        return app

    async def _workers(self, _: web.Application) -> Any:
        await self.dispatcher.start()
        yield
        await self.dispatcher.stop()

    async def _stop(self, _: web.Application) -> None:
        # What was accepted is answered; what still comes over an open connection is told to come back.
        self.dispatcher.close()

    async def decode(self, request: web.Request) -> web.Response:
        start = time.perf_counter()
        try:
            job, seconds = await self._read(request)
            answer = await self.dispatcher.decode(job, seconds)
            if answer.error is not None:
                raise Refused(422, answer.error)
            status = 200
            body: dict[str, Any] = {"tokens": answer.tokens, "passes": answer.passes}
        except Refused as refusal:
            status, body = refusal.status, {"error": str(refusal)}
        self._requests.labels(status).inc()
        self._seconds.observe(time.perf_counter() - start)
        headers = {"Retry-After": "1"} if status == 503 else {}
        return web.json_response(body, status=status, headers=headers)

    async def health(self, _: web.Request) -> web.Response:
        dispatcher = self.dispatcher
        ready = dispatcher.broken is None
        body = {"ready": ready, "waiting": dispatcher.waiting, "workers": dispatcher.pids(), "error": dispatcher.broken}
        return web.json_response(body, status=200 if ready else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _read(self, request: web.Request) -> tuple[Job, float]:
        """The job of a request, and the seconds it may take."""
        try:
            body = json.loads(await asyncio.wait_for(request.read(), _BODY_SECONDS))
        except asyncio.TimeoutError:
            raise Refused(408, f"the request did not arrive within {_BODY_SECONDS:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise Refused(413, f"a request may be {_MAX_BYTES} bytes long") from None
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body must be JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, "the body must be an object")
        unknown = body.keys() - {"tokens", "policy", "temperature", "seed", "deadline_ms"}
        if unknown:
            raise Refused(400, f"no field is called {min(unknown)!r}")
        tokens, most = body.get("tokens"), self.dispatcher.vocab_size
        if not isinstance(tokens, list) or not tokens or not all(type(t) is int and 0 <= t < most for t in tokens):
            raise Refused(400, f"tokens must be a list of at least one integer from 0 to {most - 1}")
        policy = body.get("policy")
        if policy is not None:
            _check_policy(policy)
        temperature = _number(body, "temperature", 0.0, high=100.0)
        seconds = _number(body, "deadline_ms", 1000 * self.deadline, high=3_600_000.0) / 1000
        seed = body.get("seed", secrets.randbits(62))
        if type(seed) is not int or not -(2**63) <= seed < 2**63:
            raise Refused(400, "seed must be an integer of 64 bits")
        return Job(tokens, policy, temperature, seed), seconds


@functools.lru_cache(maxsize=1000)
def _checked(policy: str) -> str | None:
    """What is wrong with a policy, if anything."""
    try:
        parse_policy(policy, mi=lambda hidden, mask: hidden)
    except ValueError as error:
        return str(error)
    return None


def _check_policy(policy: Any) -> None:
    if not isinstance(policy, str):
        raise Refused(400, "policy must be a string")
    wrong = _checked(policy)
    if wrong is not None:
        raise Refused(400, wrong)


def _number(body: dict[str, Any], name: str, default: float, *, high: float) -> float:
    value = body.get(name, default)
    if type(value) not in (int, float) or not 0 <= value <= high or math.isnan(value):
        raise Refused(400, f"{name} must be a number from 0 to {high:g}")
    return float(value)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.service", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="sudoku")
    parser.add_argument("--estimator", help="name or folder (default: the model's)")
    parser.add_argument("--policy", default="mi-budget:0.05", help="of requests that name none")
    parser.add_argument(
        "--cache",
        help="of selections: memory, disk or the URL of a Redis server (default: none); a policy that a guard watches is "
        "not cached",
    )
    parser.add_argument("--state", type=Path, help="folder for the guards' state (default: no guard)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--workers", type=_positive, default=1)
    parser.add_argument("--max-batch", type=_positive, default=64)
    parser.add_argument("--max-queue", type=_positive, default=512)
    options = parser.parse_args()
    settings = Settings(options.model, options.policy, options.estimator, options.cache, options.state)
    dispatcher = Dispatcher(
        lambda number: functools.partial(Engine, settings, number),
        workers=options.workers,
        max_batch=options.max_batch,
        max_queue=options.max_queue,
    )
    try:
        web.run_app(Service(dispatcher, settings).application(), host=options.host, port=options.port, access_log=None)
    except (RuntimeError, OSError) as error:  # a worker's reason, or the port's
        raise SystemExit(f"cannot start: {error}") from None
