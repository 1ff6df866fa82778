"""The example service with real workers and real sockets: batches, deadlines, faults, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession, web

from examples.service.dispatch import Dispatcher, Refused
from examples.service.server import Service
from examples.service.worker import Answer, Engine, Job, Settings
from mdmi_fast import decode
from mdmi_fast.decoding import parse_policy
from tests._service_models import SETTINGS, Deadly, Toy, broken_weights, make


def job(*tokens: int, policy: str | None = None, temperature: float = 0.0, seed: int = 1) -> Job:
    return Job(list(tokens), policy, temperature, seed)


def run(body: Callable[[Dispatcher], Awaitable[Any]], model: Any, **options: Any) -> Any:
    """A dispatcher's life around a test's body."""

    async def life() -> Any:
        dispatcher = Dispatcher(functools.partial(make, model=model), **options)
        await dispatcher.start()
        try:
            return await body(dispatcher)
        finally:
            await dispatcher.stop()

    return asyncio.run(asyncio.wait_for(life(), 120))


def test_a_mixed_batch_gives_every_job_what_it_would_get_alone() -> None:
    engine = Engine(SETTINGS, model=Toy())
    assert engine.pads
    jobs = [
        job(4, 4, 4, 4, 4, seed=1),
        job(4, 1, 4, seed=2, policy="sequential"),
        job(*[4] * 9, seed=3, policy="confidence:0.4"),
        job(*[4] * 6, seed=4, temperature=1.0),
        job(*[4] * 6, seed=4, temperature=1.0, policy="random:3"),  # the seed of another policy
        job(0, 1, seed=6),
    ]
    together = engine.run(jobs)
    for single, answer in zip(jobs, together, strict=True):
        result = decode(
            Toy(),
            torch.tensor([single.tokens]),
            parse_policy(single.policy or "topk:2"),
            temperature=single.temperature,
            seeds=torch.tensor([single.seed]),
        )
        assert answer == (result.tokens[0].tolist(), int(result.passes[0]), None)


def test_a_model_that_cannot_pad_gets_batches_of_one_length() -> None:
    engine = Engine(Settings("sudoku", "mi-budget:0.05"))
    assert not engine.pads
    good, short = engine.run([job(*[0] * 81), job(0, 0, 0)])
    assert good.error is None
    assert len(good.tokens or []) == 81
    assert short.tokens is None
    assert "tokens must be [B, 81]" in (short.error or "")


def test_weights_that_are_not_finite_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the weight weight holds values that are not finite numbers"):
        Engine(SETTINGS, model=model)  # type: ignore[arg-type]


def test_a_guard_and_a_cache_change_no_answer(tmp_path: Path) -> None:
    plain = Engine(Settings("sudoku:weak", "mi-budget:0.05"))
    careful = Engine(Settings("sudoku:weak", "mi-budget:0.05", cache="memory", state=tmp_path))
    jobs = [
        job(*[0] * 70, *([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]), policy="mi-budget:0.05", seed=seed) for seed in range(4)
    ]
    assert careful.run(jobs) == plain.run(jobs) == careful.run(jobs)
    careful.run([job(*[0] * 81, seed=7)])
    assert careful.guard is not None
    assert careful.guard.state.finished_since_change == 1
    assert (tmp_path / "worker-0.json").exists()
    full = [job(1, 2, seed=8)]  # nothing to decode, and no board
    assert careful.run(full) == plain.run(full) == [Answer([1, 2], 0)]
    assert careful.guard.state.finished_since_change == 1


def test_options_that_cannot_work_are_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, wrong in [(["--port", port], "address already in use"), (["--workers", "0"], "at least 1, got 0")]:
            command = [sys.executable, "-m", "examples.service", *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
            assert done.returncode != 0
            assert wrong in done.stderr.splitlines()[-1]
            assert "Traceback" not in done.stderr


def test_requests_that_come_together_share_a_batch() -> None:
    async def body(dispatcher: Dispatcher) -> Any:
        answers = await asyncio.gather(*(dispatcher.decode(job(*[4] * (1 + n % 7), seed=n), 60) for n in range(40)))
        assert all(answer.error is None for answer in answers)
        return dispatcher.batches

    batches = run(body, Toy(0.02), max_batch=16)
    assert max(batches) == 16
    assert sum(size * count for size, count in batches.items()) == 40


def test_deadlines_backpressure_and_the_end_are_clear_answers() -> None:
    async def body(dispatcher: Dispatcher) -> Any:
        late = asyncio.create_task(dispatcher.decode(job(*[4] * 20), 0.2))
        await asyncio.sleep(0)
        while dispatcher.waiting:  # until it is being decoded
            await asyncio.sleep(0.005)
        waiting = [asyncio.create_task(dispatcher.decode(job(4, 4), 60)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="3 requests are waiting already, try again later") as busy:
            await dispatcher.decode(job(4), 60)
        assert busy.value.status == 503
        with pytest.raises(Refused, match=r"the deadline of 0\.2 s has passed") as missed:
            await late
        assert missed.value.status == 504
        dispatcher.close()
        with pytest.raises(Refused, match="the service is stopping"):
            await dispatcher.decode(job(4), 60)
        return [answer.error for answer in await asyncio.gather(*waiting)]

    assert run(body, Toy(0.05), max_queue=3) == [None] * 3


def test_a_killed_worker_loses_nothing() -> None:
    async def body(dispatcher: Dispatcher) -> Any:
        tasks = [asyncio.create_task(dispatcher.decode(job(*[4] * 8, seed=n), 60)) for n in range(30)]
        await asyncio.sleep(0.1)
        for pid in dispatcher.pids():
            os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        return [answer.error for answer in answers], dispatcher.restarts

    errors, restarts = run(body, Toy(0.02), max_batch=8)
    assert errors == [None] * 30
    assert restarts == 1


def test_an_idle_worker_that_was_killed_does_not_disturb_the_end() -> None:
    async def body(dispatcher: Dispatcher) -> None:
        for pid in dispatcher.pids():
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.2)

    run(body, Toy(), workers=2)


def test_a_request_that_kills_workers_or_fails_takes_no_other_with_it() -> None:
    async def body(dispatcher: Dispatcher) -> Any:
        jobs = [job(1, 4), job(2, 4), job(3, 4), job(0, 1, 4)]
        answers = await asyncio.gather(*(dispatcher.decode(one, 100) for one in jobs))
        return [answer.error for answer in answers]

    errors = run(body, Deadly(), max_batch=4)
    assert errors[1] == "RuntimeError: not this one"
    assert errors[2] == "3 workers died over this request"
    assert errors[0] is errors[3] is None


def test_a_worker_that_cannot_start_is_an_error_that_says_why() -> None:
    async def life() -> None:
        await Dispatcher(lambda number: broken_weights).start()

    with pytest.raises(RuntimeError, match="ValueError: the weights are NaN"):
        asyncio.run(life())


def test_the_http_side_answers_everything_clearly() -> None:
    async def life() -> None:
        dispatcher = Dispatcher(functools.partial(make, model=Toy(0.01)))
        runner = web.AppRunner(Service(dispatcher, SETTINGS).application())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}"
        async with ClientSession() as session:

            async def post(body: Any) -> tuple[int, Any]:
                options = {"data": body} if isinstance(body, bytes | io.BytesIO) else {"json": body}
                async with session.post(f"{url}/decode", **options) as answer:
                    return answer.status, await answer.json()

            expected = decode(Toy(), torch.tensor([[4, 1, 4]]), parse_policy("sequential")).tokens[0].tolist()
            assert await post({"tokens": [4, 1, 4], "policy": "sequential"}) == (
                200,
                {"tokens": expected, "passes": 2},
            )
            for body, told in [
                (b"{", "the body must be JSON"),
                ([], "the body must be an object"),
                ({"tokens": [4], "tokenz": 1}, "no field is called 'tokenz'"),
                ({}, "tokens must be a list of at least one integer from 0 to 4"),
                ({"tokens": [5]}, "tokens must be a list"),
                ({"tokens": [True]}, "tokens must be a list"),
                ({"tokens": [4], "policy": "best"}, "policy 'best': no policy of that name"),
                ({"tokens": [4], "policy": 1}, "policy must be a string"),
                ({"tokens": [4], "temperature": -1}, "temperature must be a number from 0 to 100"),
                ({"tokens": [4], "seed": 1.5}, "seed must be an integer of 64 bits"),
                ({"tokens": [4], "deadline_ms": "x"}, "deadline_ms must be a number"),
            ]:
                status, answer = await post(body)
                assert status == 400
                assert told in answer["error"]
            assert (await post(io.BytesIO(b"[" * 2_000_000)))[0] == 413
            assert (await post({"tokens": [4] * 50, "policy": "sequential", "deadline_ms": 50}))[0] == 504
            _, hanging = await asyncio.open_connection(host, port)
            hanging.write(b"POST /decode HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert (await post({"tokens": [4]}))[0] == 200
            async with session.get(f"{url}/health") as answer:
                assert (answer.status, (await answer.json())["ready"]) == (200, True)
            async with session.get(f"{url}/metrics") as answer:
                text = await answer.text()
            assert 'mdmi_requests_total{status="400"} 11.0' in text
            assert "mdmi_request_seconds_bucket" in text
            hanging.close()
            slow = [asyncio.create_task(post({"tokens": [4] * 20, "policy": "sequential"})) for _ in range(5)]
            await asyncio.sleep(0.05)
            await runner.cleanup()  # what a SIGTERM does
            assert [status for status, _ in await asyncio.gather(*slow)] == [200] * 5

    asyncio.run(asyncio.wait_for(life(), 120))
