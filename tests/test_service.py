"""The service with real workers and real sockets: batches, deadlines, faults, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry, generate_latest

from mdmi_fast import PairwiseMIEstimator, UnsupportedError, decode, load_estimator
from mdmi_fast.cli import main
from mdmi_fast.decoding import parse_policy
from mdmi_fast.estimator.loading import own_folder
from mdmi_fast.service.dispatch import Dispatcher, Refused, StartError, Watcher
from mdmi_fast.service.log import Log
from mdmi_fast.service.server import Service
from mdmi_fast.service.worker import Answer, Engine, Job, Reply, Settings
from mdmi_fast.watch import Collector
from mdmi_fast.watch.guard import pseudo_likelihood
from tests._monitoring import asked_by_alerts, asked_by_panels, fires, metrics_in, values
from tests._service_models import SETTINGS, Deadly, Toy, broken_weights, make, while_there_is


def job(*tokens: int, policy: str | None = None, temperature: float = 0.0, seed: int = 1) -> Job:
    return Job(list(tokens), policy, temperature, seed)


class Seen(Watcher):
    """What a watcher is told."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.restarts: list[tuple[int, str]] = []
        self.reasons: list[str] = []

    def decoded(self, number: int, reply: Reply) -> None:
        self.batches.append(len(reply.answers))

    def restarting(self, number: int, reason: str) -> None:
        self.restarts.append((number, reason))

    def broken(self, reason: str) -> None:
        self.reasons.append(reason)


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
        assert answer == Answer(result.tokens[0].tolist(), int(result.passes[0]))


def test_a_model_that_cannot_pad_gets_batches_of_one_length() -> None:
    engine = Engine(Settings("sudoku", "mi-budget:0.05"))
    assert not engine.pads
    good, short = engine.run([job(*[0] * 81), job(0, 0, 0)])
    assert good.error is None
    assert len(good.tokens or []) == 81
    assert short.tokens is None
    assert "tokens must be [B, 81]" in (short.error or "")


def test_the_estimator_is_that_of_the_very_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDMI_CACHE", str(tmp_path))
    budget = Settings("toy:heavy", "mi-budget:0.1")
    with pytest.raises(UnsupportedError, match="no estimator ships for toy:heavy, and none was trained here: name one"):
        Engine(budget, model=Toy())
    other = Engine(Settings("toy:heavy", "topk:2"), model=Toy())  # needs none
    assert other.run([job(4, 4)])[0].error is None
    (asked,) = other.run([job(4, 4, policy="mi-budget:0.1")])
    assert asked.status == 422
    assert (asked.error or "").startswith("no estimator ships for toy:heavy")
    PairwiseMIEstimator(2, layers=(4,)).save_pretrained(own_folder("toy:heavy"))
    assert Engine(budget, model=Toy()).run([job(4, 4)])[0].error is None
    wrong = tmp_path / "wrong"
    PairwiseMIEstimator(3, layers=(4,)).save_pretrained(wrong)
    with pytest.raises(ValueError, match="reads hidden states of width 3, got Toy of width 2"):
        Engine(Settings("toy:heavy", "topk:2", estimator=str(wrong)), model=Toy())


def test_what_a_policy_was_chosen_with_is_what_it_decodes_with() -> None:
    writing = {"suppressed": [0, 1], "block_size": 2}
    engine = Engine(Settings("toy", "topk:2", writing=writing), model=Toy())
    alone = decode(Toy(), torch.full((1, 6), 4), parse_policy("topk:2"), seeds=torch.tensor([1]), **writing)
    assert engine.run([job(*[4] * 6)]) == [Answer(alone.tokens[0].tolist(), 3)]
    for wrong, told in [({"top_p": 2.0}, ValueError), ({"topp": 1.0}, TypeError)]:
        with pytest.raises(told):
            Engine(Settings("toy", "topk:2", writing=wrong), model=Toy())


def test_policies_that_are_not_cached_run_beside_those_that_are() -> None:
    engine = Engine(Settings("sudoku:weak", "coloring:0.05", cache="memory"))
    plain = Engine(Settings("sudoku:weak", "coloring:0.05"))
    jobs = [job(*[0] * 9, *[1] * 72, policy=policy) for policy in (None, "mi-budget:0.05", "topk:3")]
    assert engine.run(jobs) == plain.run(jobs)
    assert engine.cache is not None
    assert engine.cache.counts["memory"].misses > 0


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


def test_requests_that_come_together_share_a_batch() -> None:
    async def body(dispatcher: Dispatcher) -> Any:
        served = await asyncio.gather(*(dispatcher.decode(job(*[4] * (1 + n % 7), seed=n), 60) for n in range(40)))
        assert all(one.answer.error is None for one in served)
        return served

    seen = Seen()
    served = run(body, Toy(0.02), max_batch=16, watcher=seen)
    assert max(seen.batches) == 16
    assert sum(seen.batches) == 40
    # The last batch waited for those before it, and each was with the worker for the passes of its longest sequence.
    assert max(one.queue_seconds for one in served) > min(one.decode_seconds for one in served) > 0.02


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
        return [one.answer.error for one in await asyncio.gather(*waiting)]

    assert run(body, Toy(0.05), max_queue=3) == [None] * 3


def test_requests_whose_deadline_has_passed_take_no_place_in_the_queue() -> None:
    async def body(dispatcher: Dispatcher) -> Any:
        busy = asyncio.create_task(dispatcher.decode(job(*[4] * 20), 60))
        await asyncio.sleep(0)
        await until(lambda: dispatcher.waiting == 0)
        for _ in range(2):
            late = await asyncio.gather(*(dispatcher.decode(job(4), 0.05) for _ in range(3)), return_exceptions=True)
            assert [isinstance(one, Refused) and one.status for one in late] == [504] * 3
            assert dispatcher.waiting == 0
        return (await busy).answer.error

    assert run(body, Toy(0.1), max_queue=3) is None


def test_a_killed_worker_loses_nothing() -> None:
    async def body(dispatcher: Dispatcher) -> Any:
        tasks = [asyncio.create_task(dispatcher.decode(job(*[4] * 8, seed=n), 60)) for n in range(30)]
        await asyncio.sleep(0.1)
        for pid in dispatcher.pids():
            os.kill(pid, signal.SIGKILL)
        return [one.answer.error for one in await asyncio.gather(*tasks)]

    seen = Seen()
    assert run(body, Toy(0.02), max_batch=8, watcher=seen) == [None] * 30
    assert seen.restarts == [(0, "it was killed by signal 9 (Killed)")]


def test_an_idle_worker_that_was_killed_is_started_anew_before_a_request_needs_it() -> None:
    async def body(dispatcher: Dispatcher) -> None:
        before = dispatcher.pids()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(set(dispatcher.pids()) - set(before)) == 2)
        assert (await dispatcher.decode(job(4, 4), 60)).answer.error is None

    seen = Seen()
    run(body, Toy(), workers=2, watcher=seen)
    assert sorted(number for number, _ in seen.restarts) == [0, 1]


def test_an_idle_worker_that_was_killed_does_not_disturb_the_end() -> None:
    async def body(dispatcher: Dispatcher) -> None:
        for pid in dispatcher.pids():
            os.kill(pid, signal.SIGKILL)

    run(body, Toy(), workers=2)


def test_signals_to_the_whole_group_are_the_services_to_act_on() -> None:
    async def body(dispatcher: Dispatcher) -> Any:
        tasks = [asyncio.create_task(dispatcher.decode(job(*[4] * 8, seed=n), 60)) for n in range(8)]
        await asyncio.sleep(0.1)
        for pid in dispatcher.pids():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        return [one.answer.error for one in await asyncio.gather(*tasks)]

    seen = Seen()
    assert run(body, Toy(0.02), watcher=seen) == [None] * 8
    assert seen.restarts == []


def test_a_worker_that_hangs_is_started_anew() -> None:
    async def body(dispatcher: Dispatcher) -> Any:
        return await dispatcher.decode(job(4, 4), 60)

    seen = Seen()
    served = run(body, Toy(3.0), batch_seconds=0.3, watcher=seen)
    assert (served.answer.error, served.answer.status) == ("3 workers died over this request", 500)
    assert seen.restarts == [(0, "no answer within 0.3 s")] * 3


def test_a_request_that_kills_workers_or_fails_takes_no_other_with_it() -> None:
    async def body(dispatcher: Dispatcher) -> Any:
        jobs = [job(1, 4), job(2, 4), job(3, 4), job(0, 1, 4)]
        return [one.answer for one in await asyncio.gather(*(dispatcher.decode(one, 100) for one in jobs))]

    answers = run(body, Deadly(), max_batch=4)
    assert (answers[1].error, answers[1].status) == ("RuntimeError: not this one", 500)
    assert (answers[2].error, answers[2].status) == ("3 workers died over this request", 500)
    assert answers[0].error is answers[3].error is None


def test_a_worker_that_cannot_start_is_an_error_that_says_why() -> None:
    async def life() -> None:
        await Dispatcher(lambda number: broken_weights).start()

    with pytest.raises(StartError, match="worker 0 cannot start: the weights are NaN"):
        asyncio.run(life())


def test_a_worker_that_cannot_start_again_is_tried_three_times_and_then_ends_everything(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("0.05")

    async def life() -> list[int]:
        dispatcher = Dispatcher(lambda number: functools.partial(while_there_is, there), watcher=seen)
        await dispatcher.start()
        there.unlink()
        waiting = [asyncio.create_task(dispatcher.decode(job(*[4] * 8), 60)) for _ in range(3)]
        await asyncio.sleep(0.1)
        for pid in dispatcher.pids():
            os.kill(pid, signal.SIGKILL)
        refused = await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(Refused, match="the service is stopping"):
            await dispatcher.decode(job(4), 1)
        await dispatcher.stop()
        return [one.status for one in refused if isinstance(one, Refused)]

    seen = Seen()
    assert asyncio.run(asyncio.wait_for(life(), 120)) == [503] * 3
    assert len(seen.restarts) == 3
    assert len(seen.reasons) == 1
    assert seen.reasons[0].startswith("worker 0 cannot start: [Errno 2] No such file or directory")


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def watched(policy: str, folder: Path, *, estimator: str | None = None) -> dict[tuple[str, ...], float]:
    """What Prometheus sees of a guard when an engine has decoded 200 sequences, at 10 ms a call of the model."""
    settings = Settings("toy", policy, estimator=estimator, state=folder)
    engine = Engine(settings, model=Toy(0.01))
    assert engine.guard is not None
    engine.guard.audit_share = 0.0  # of passes this few, each would show
    for first in range(0, 200, 20):
        engine.run([job(*[4] * 6, seed=seed) for seed in range(first, first + 20)])
    registry = CollectorRegistry()
    registry.register(Collector(guards={"worker-0": folder / "worker-0.json"}))
    return values(generate_latest(registry).decode())


@pytest.mark.parametrize(
    ("policy", "estimator", "slower"),
    [
        # One position a pass, as sequentially, and beside the model's call those that probe: twice the time at least.
        ("mi-budget:0.000001,entropy_weight=0", "probe", True),
        # Half the passes.
        ("topk:2", None, False),
    ],
)
def test_the_guard_is_told_how_long_either_side_takes_though_both_share_batches(
    policy: str, estimator: str | None, slower: bool, tmp_path: Path
) -> None:
    seen = watched(policy, tmp_path, estimator=estimator)
    means = {}
    for side, fewest in (("policy", 4), ("control", 150)):
        count = seen["mdmi_guard_decoding_seconds_count", "worker-0", side]
        assert count >= fewest
        means[side] = seen["mdmi_guard_decoding_seconds_sum", "worker-0", side] / count
    assert means["control"] > 6 * 0.01  # its six calls of the model
    ratio = means["policy"] / means["control"]
    # Above 2, and 1/2, were there nothing but calls of the model; the limits leave room for what else there is.
    assert ratio > 1.5 if slower else ratio < 0.9
    series = {
        f'{name}{{guard="worker-0", side="{side}"}}': f"0+{seen[name, 'worker-0', side]}x200"
        for side in ("policy", "control")
        for name in ("mdmi_guard_decoding_seconds_sum", "mdmi_guard_decoding_seconds_count")
    }
    fires(series, {"MdmiSlowerThanSequential"} if slower else set(), tmp_path)


def test_one_side_does_not_pay_for_the_other_or_for_audits(tmp_path: Path) -> None:
    """Of a pass that both share, the control is charged the model's call and its own choice, not the probing."""
    alone = Engine(Settings("toy", "sequential", state=tmp_path / "alone"), model=Toy(0.01))
    mixed = Engine(
        Settings("toy", "mi-budget:0.000001,entropy_weight=0", estimator="probe", state=tmp_path / "mixed"),
        model=Toy(0.01),
    )
    means = []
    for engine in (alone, mixed):
        assert engine.guard is not None
        engine.guard.audit_share = 1.0
        engine.run([job(*[4] * 6, seed=seed) for seed in range(100)])
        control = engine.guard.state.control
        means.append(control.seconds / control.timed)
    assert means[1] < 1.5 * means[0]  # at least 2 with the probing, 3 with the audits as well


def test_quality_is_of_what_was_decoded_not_of_padding(tmp_path: Path) -> None:
    settings = Settings("toy", "topk:2", state=tmp_path)
    engine = Engine(settings, model=Toy())
    jobs = [job(4, 1, 4, 4, seed=1), job(*[4] * 40, seed=2)]
    engine.run(jobs)
    assert engine.guard is not None
    control = engine.guard.state.control
    expected = []
    for one in jobs:
        before = torch.tensor([one.tokens])
        after = decode(Toy(), before, parse_policy("sequential"), seeds=torch.tensor([one.seed])).tokens
        # Toy tells all positions apart, so whichever are drawn, their likelihoods bound the quality.
        each = []
        for position in (before == 4)[0].nonzero().squeeze(-1).tolist():
            decoded = torch.zeros_like(before, dtype=torch.bool)
            decoded[0, position] = True
            each.append(float(pseudo_likelihood(Toy(), after, decoded, positions=1)))
        expected.append((min(each), max(each)))
    assert control.sequences == 2
    assert sum(low for low, _ in expected) - 1e-6 <= control.quality <= sum(high for _, high in expected) + 1e-6


def test_a_guard_that_cannot_write_its_state_fails_no_request(tmp_path: Path) -> None:
    engine = Engine(Settings("toy", "topk:2", state=tmp_path / "state"), model=Toy())
    assert (tmp_path / "state" / "worker-0.json").exists()  # before the first sequence
    (tmp_path / "state" / "worker-0.json").unlink()
    (tmp_path / "state" / "worker-0.json").mkdir()
    with pytest.warns(UserWarning, match="the guard was not told of 1 sequences: .*is a folder"):
        assert engine.run([job(4, 4)])[0].error is None


Lines = Callable[[], list[dict[str, Any]]]


async def serving(
    body: Callable[[Service, str, Lines], Awaitable[None]], model: Any, settings: Settings, **options: Any
) -> list[dict[str, Any]]:
    """A service's life around a test's body; the lines of its log."""
    stream = io.StringIO()

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    dispatcher = Dispatcher(functools.partial(make, model=model, settings=settings), **options)
    service = Service(dispatcher, settings, log=Log("json", stream))
    url = await service.start("127.0.0.1", 0)
    try:
        await body(service, url, lines)
    finally:
        await service.stop()
    return lines()


def test_every_request_is_answered_clearly_in_one_shape_and_has_a_line() -> None:
    async def body(service: Service, url: str, lines: Lines) -> None:
        host, port = url.removeprefix("http://").split(":")
        async with ClientSession() as session:

            async def ask(method: str, path: str, **options: Any) -> tuple[int, Any]:
                async with session.request(method, f"{url}{path}", **options) as answer:
                    assert answer.content_type == "application/json"
                    told = await answer.json()
                    if answer.status != 200:
                        assert told["status"] == answer.status
                        assert told["id"] == answer.headers["X-Request-Id"]
                        assert isinstance(told["error"], str)
                    return answer.status, told

            async def chunks() -> AsyncIterator[bytes]:
                for _ in range(20):
                    yield b"[" * 100_000

            async def post(body: Any, kind: str = "application/json") -> tuple[int, Any]:
                data = json.dumps(body).encode() if isinstance(body, dict | list) else body
                return await ask("POST", "/decode", data=data, headers={"Content-Type": kind})

            expected = decode(Toy(), torch.tensor([[4, 1, 4]]), parse_policy("sequential")).tokens[0].tolist()
            assert await post({"tokens": [4, 1, 4], "policy": "sequential"}) == (
                200,
                {"tokens": expected, "passes": 2},
            )
            for wrong, told in [
                (b"{", "the body must be JSON"),
                (b"\xff" * 20, "the body must be JSON"),
                ([], "the body must be an object"),
                ({"tokens": [4], "tokenz": 1}, "no field is called 'tokenz', there are tokens, policy"),
                ({}, "tokens must be a list of at least one integer from 0 to 4"),
                ({"tokens": [5]}, "tokens must be a list"),
                ({"tokens": [True]}, "tokens must be a list"),
                ({"tokens": [4], "policy": "best"}, "policy 'best': no policy of that name"),
                ({"tokens": [4], "policy": 1}, "policy must be a string, got 1"),
                ({"tokens": [4], "temperature": -1}, "temperature must be a number from 0 to 100, got -1"),
                ({"tokens": [4], "temperature": float("nan")}, "temperature must be a number from 0 to 100, got NaN"),
                ({"tokens": [4], "seed": 1.5}, "seed must be an integer of 64 bits, got 1.5"),
                ({"tokens": [4], "deadline_ms": "x"}, 'deadline_ms must be a number from 0 to 3.6e+06, got "x"'),
            ]:
                status, answer = await post(wrong)
                assert status == 400
                assert told in answer["error"]
            assert (await post(io.BytesIO(b"[" * 2_000_000)))[0] == 413
            assert (await post(chunks()))[0] == 413  # without a length
            status, answer = await post(b'{"tokens": [4]}', "text/plain")
            assert (status, answer["error"]) == (415, "Content-Type must be application/json, got text/plain")
            status, answer = await ask("POST", "/decode", data=b"x", headers={"Content-Encoding": "gzip"})
            assert status == 415
            assert (await ask("GET", "/none"))[0] == 404
            async with session.put(f"{url}/decode") as refused:
                assert (refused.status, refused.headers["Allow"]) == (405, "POST")
            assert (await ask("DELETE", "/metrics"))[0] == 405
            status, answer = await post({"tokens": [2, 4]})
            assert (status, answer["error"]) == (500, "RuntimeError: not this one")
            status, answer = await post({"tokens": [4, 4], "policy": "mi-budget:0.1"})
            assert status == 422
            assert "no estimator ships for toy" in answer["error"]
            assert (await post({"tokens": [4] * 50, "policy": "sequential", "deadline_ms": 50}))[0] == 504
            for garbage in (
                b"\x00\xff nonsense\r\n\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01",
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(garbage)
                head, _, told_back = (await reader.read()).partition(b"\r\n\r\n")
                assert b" 400 " in head
                assert json.loads(told_back)["status"] == 400
                writer.close()
            reader, slow = await asyncio.open_connection(host, int(port))
            slow.write(b"POST /decode HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert (await post({"tokens": [4]}))[0] == 200  # meanwhile
            assert (await reader.readline()).split()[1] == b"408"
            slow.close()
            named = {"Content-Type": "application/json", "X-Request-Id": "of-mine"}
            async with session.post(f"{url}/decode", data=b'{"tokens": [4, 4]}', headers=named) as answered:
                assert answered.headers["X-Request-Id"] == "of-mine"
            forged = {**named, "X-Request-Id": "a b"}
            async with session.post(f"{url}/decode", data=b'{"tokens": [4, 4]}', headers=forged) as answered:
                assert answered.headers["X-Request-Id"] != "a b"
            assert (await ask("GET", "/health"))[1]["ready"] is True
            async with session.get(f"{url}/metrics") as metrics:
                seen = values(await metrics.text())
            counts = {int(key[1]): n for key, n in seen.items() if key[0] == "mdmi_requests_total"}
            logged = Counter(line["status"] for line in lines())
            assert {status: n for status, n in counts.items() if n} == logged
            assert set(counts) - {503} == set(logged)  # all there are
            assert seen["mdmi_decoded_tokens_total",] == 2 + 1 + 2 + 2
            assert seen["mdmi_queue_seconds_count",] == seen["mdmi_decode_seconds_count",] == 4
            service.dispatcher.close()  # the first thing that SIGTERM does
            status, answer = await post({"tokens": [4]})
            assert (status, answer["error"]) == (503, "the service is stopping")
            status, answer = await ask("GET", "/health")
            assert (status, answer["ready"], answer["error"]) == (503, False, "the service is stopping")

    lines = asyncio.run(asyncio.wait_for(serving(body, Deadly(), SETTINGS), 120))
    done = next(line for line in lines if line["status"] == 200)
    assert set(done) == {
        *("time", "level", "event", "id", "method", "path", "status", "sequences", "tokens", "passes"),
        *("ms", "queue_ms", "decode_ms", "bytes"),
    }
    assert (done["level"], done["event"], done["sequences"], done["tokens"], done["passes"]) == (
        "info",
        "request",
        1,
        2,
        2,
    )
    assert done["ms"] >= done["queue_ms"] + done["decode_ms"] - 0.2  # each is rounded
    assert {line["level"] for line in lines if line["status"] == 500} == {"error"}
    assert {line["level"] for line in lines if line["status"] in (503, 504)} == {"warning"}
    assert any(line["id"] == "of-mine" for line in lines)
    late = next(line for line in lines if line["status"] == 504)
    assert late["error"] == "the deadline of 0.05 s has passed"


def test_what_was_accepted_is_answered_at_the_end() -> None:
    async def life() -> list[int]:
        dispatcher = Dispatcher(functools.partial(make, model=Toy(0.01)))
        service = Service(dispatcher, SETTINGS)
        url = await service.start("127.0.0.1", 0)
        async with ClientSession() as session:

            async def post() -> int:
                async with session.post(f"{url}/decode", json={"tokens": [4] * 20, "policy": "sequential"}) as answer:
                    return answer.status

            slow = [asyncio.create_task(post()) for _ in range(5)]
            await asyncio.sleep(0.1)
            await service.stop()  # what SIGTERM does
            return await asyncio.gather(*slow)

    assert asyncio.run(asyncio.wait_for(life(), 120)) == [200] * 5


def test_every_metric_of_a_service_has_a_panel_and_every_panel_and_alert_a_metric_that_a_service_feeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        "sudoku:weak", "mi-budget:0.02,entropy_weight=0", temperature=1.0, cache="memory", state=tmp_path
    )
    engine = Engine(settings)
    assert engine.guard is not None
    engine.guard.audit_share = engine.guard.movement_share = 1.0  # 100 and 10 times as often, to be done soon
    state = engine.guard.state
    for first in range(0, 100, 5):
        engine.run([job(*[0] * 81, temperature=1.0, seed=seed) for seed in range(first, first + 5)])
        if None not in (state.correlation, state.false_independence, state.movement_slope, state.movement_ratio):
            break

    async def exposed() -> str:
        return generate_latest(Service(Dispatcher(lambda number: broken_weights), settings).metrics.registry).decode()

    fed = {name for name, *_ in values(asyncio.run(exposed())) if not name.endswith("_created")}
    shown, alarmed = metrics_in(asked_by_panels()), metrics_in(asked_by_alerts())
    assert shown - fed == alarmed - fed == set()
    parts = ("_bucket", "_sum", "_count")

    def family(name: str) -> str:
        return next((name.removesuffix(part) for part in parts if name.endswith(part)), name)

    assert {family(name) for name in fed} == {family(name) for name in shown}


@contextmanager
def command(*options: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, dict[str, Any]]]:
    """`mdmi-fast serve` with a log in JSON: its process, address and first line."""
    arguments = ["serve", "--port", "0", "--log-format", "json", *map(str, options)]
    process = subprocess.Popen(
        [sys.executable, "-m", "mdmi_fast", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        yield process, first["url"], first
    finally:
        process.kill()
        process.communicate()


def pids(url: str) -> list[int]:
    with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
        found: list[int] = json.load(answer)["workers"]
        return found


def decoded(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/decode", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_command_says_when_it_starts_restarts_and_ends(tmp_path: Path) -> None:
    with command("--model", "sudoku:weak", "--policy", "topk:9", "--state", tmp_path / "guards") as (
        process,
        url,
        first,
    ):
        assert (first["event"], first["model"], first["policy"], first["workers"]) == (
            "start",
            "sudoku:weak",
            "topk:9",
            1,
        )
        assert first["pid"] == process.pid
        (worker,) = pids(url)
        os.kill(worker, signal.SIGKILL)
        answer = decoded(url, tokens=[0] * 81, seed=1)
        assert len(answer["tokens"]) == 81
        (second,) = pids(url)
        assert second != worker
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        events = [json.loads(line) for line in out.splitlines()]
        assert [event["event"] for event in events] == ["restart", "request", "stop"]
        assert (events[0]["worker"], events[0]["reason"]) == (0, "it was killed by signal 9 (Killed)")
        assert (events[1]["status"], events[1]["tokens"], events[1]["passes"]) == (200, 81, answer["passes"])
        assert events[2]["reason"] == "SIGTERM"
        assert gone(second)
        assert (tmp_path / "guards" / "worker-0.json").exists()


def test_damage_that_a_worker_finds_in_its_cache_is_seen(tmp_path: Path) -> None:
    policy = "mi-budget:0.5,entropy_weight=0"

    def counts() -> dict[str, float]:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            seen = values(answer.read().decode())
        name = ("mdmi_cache_requests_total", "worker-0")
        return {key[2]: n for key, n in seen.items() if key[:2] == name and key[3] == "disk"}

    options = ("--model", "sudoku:weak", "--policy", policy, "--cache", "disk")
    with command(*options, MDMI_CACHE=str(tmp_path)) as (_, url, _first):
        assert counts() == {"hit": 0.0, "miss": 0.0, "corrupt": 0.0}
        first = decoded(url, tokens=[0] * 81, seed=1)
        entries = list((tmp_path / "mi").glob("??/*"))
        assert len(entries) == first["passes"]
        for entry in entries:
            entry.write_bytes(b"\0" + entry.read_bytes()[1:])
        os.kill(pids(url)[0], signal.SIGKILL)  # and with it what it holds in memory
        assert decoded(url, tokens=[0] * 81, seed=1) == first
        passes = float(first["passes"])
        # What was counted before the worker died still is.
        assert counts() == {"hit": 0.0, "miss": 2 * passes, "corrupt": passes}


def test_workers_do_not_outlive_a_service_that_is_killed() -> None:
    with command("--model", "sudoku:weak", "--policy", "topk:9", "--workers", 2) as (process, url, _):
        workers = pids(url)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while not all(map(gone, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_service_whose_workers_cannot_start_again_ends_with_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "estimator"
    load_estimator("sudoku:weak").save_pretrained(folder)
    options = ("--model", "sudoku:weak", "--policy", "mi-budget:0.5", "--estimator", folder)
    with command(*options) as (process, url, _):
        folder.rename(tmp_path / "elsewhere")
        (worker,) = pids(url)
        os.kill(worker, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert err == f"mdmi-fast serve: worker 0 cannot start: load_estimator: no folder {folder}\n"
        assert [json.loads(line)["event"] for line in out.splitlines()] == ["restart"] * 3 + ["stop"]


def test_a_log_that_nobody_reads_ends_no_service() -> None:
    with command("--model", "sudoku:weak", "--policy", "topk:9") as (process, url, _):
        assert process.stdout is not None
        process.stdout.close()
        assert decoded(url, tokens=[0] * 81)["passes"] == 9
        assert decoded(url, tokens=[0] * 81)["passes"] == 9
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == (
            "mdmi-fast: warning: the log cannot be written, the service goes on without it: [Errno 32] Broken pipe\n"
        )


def test_the_log_as_text_quotes_what_would_break_a_line() -> None:
    stream = io.StringIO()
    log = Log("text", stream)
    log("request", status=200, path="/a b", error='say "x"\nlevel=error', empty="")
    line = stream.getvalue()
    assert line.endswith(' info request status=200 path="/a b" error="say \\"x\\"\\nlevel=error" empty=""\n')
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (("--model", "nope"), 1, "load_model: nothing is registered as 'nope'"),
        (("--model", "sudoku:weak", "--estimator", "./none"), 1, "load_estimator: no folder ./none"),
        (("--model", "sudoku:weak", "--estimator", "probe:best"), 2, "the forms are joint, entropy, kl"),
        (
            ("--model", "sapiens:heavy"),
            2,
            "no estimator ships for sapiens:heavy, and none was trained here: name one with",
        ),
        (("--model", "sudoku:weak", "--policy", "best"), 2, "policy 'best': no policy of that name"),
        (("--model", "sudoku:weak", "--port", "65536"), 2, "--port: must be at most 65535, got 65536"),
        (("--model", "sudoku:weak", "--workers", "0"), 2, "--workers: must be at least 1, got 0"),
        (("--model", "sudoku:weak", "--max-batch", "0"), 2, "--max-batch: must be at least 1, got 0"),
        (("--model", "sudoku:weak", "--max-queue", "-1"), 2, "--max-queue: must be at least 1, got -1"),
        (("--model", "sudoku:weak", "--deadline", "0"), 2, "--deadline: must be above 0 and at most 3600, got 0"),
        (("--model", "sudoku:weak", "--batch-timeout", "nan"), 2, "--batch-timeout: must be a finite number"),
        (("--model", "sudoku:weak", "--cache", "here"), 2, "--cache: must be memory, disk or a URL that begins with"),
        (("--model", "sudoku:weak", "--state", "FILE"), 2, "FILE: must be a folder"),
        (("--model", "sudoku:weak", "--state", "BAD"), 1, "worker-0.json: not the state of a guard"),
        (
            ("--model", "sudoku:weak", "--host", "127.0.0.1", "--port", "TAKEN"),
            1,
            "cannot listen there: Address already",
        ),
        # Only the worker can tell.
        (("--model", "hf:./none", "--policy", "topk:2"), 1, "worker 0 cannot start: hf: there is no folder ./none"),
        (
            ("--model", "sudoku:weak", "--policy", "CHOICE"),
            2,
            "top_p",
        ),
    ],
)
def test_what_cannot_work_is_one_line_and_an_end(
    options: tuple[str, ...],
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MDMI_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").touch()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "worker-0.json").write_text("{")
    (tmp_path / "choice.json").write_text('{"policy": "topk:2", "options": {"top_p": 2.0}}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stands_for = {
            "FILE": tmp_path / "file",
            "BAD": tmp_path / "bad",
            "CHOICE": tmp_path / "choice.json",
            "TAKEN": taken.getsockname()[1],
        }
        arguments = ["serve", *(str(stands_for.get(option, option)) for option in options)]
        if "--port" not in arguments:
            arguments += ["--port", "0"]
        try:
            ended = main(arguments)
        except SystemExit as usage:
            ended = int(usage.code or 0)
    said = capsys.readouterr()
    assert ended == code
    assert said.out == ""
    assert told.replace("FILE", str(tmp_path / "file")) in said.err.splitlines()[-1]
    assert said.err.splitlines()[-1].startswith("mdmi-fast serve: ")
    assert "Traceback" not in said.err


def test_without_the_extra_it_is_said_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, package in (("aiohttp", "aiohttp"), ("prometheus_client", "prometheus-client")):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            assert main(["serve", "--model", "sudoku"]) == 1
        said = capsys.readouterr().err
        told = f"{package} is not installed: pip install 'mdmi-fast[service]'"
        assert said == f"mdmi-fast serve: the service is not supported: {told}\n"
