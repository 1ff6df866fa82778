"""Drive `mdmi-fast serve` over loopback: python benchmarks/load.py [--rate R] [--seconds S] [--faults].

Starts the service with the Sudoku model and sends puzzles at an even rate, whatever the answers do (an open loop), so
that a latency counts from when a request was due. Every answer is compared with what `decode` gives for that puzzle
alone. With --faults, meanwhile: the worker is killed, the Redis server that the cache uses is killed, clients send
garbage and clients hang; and at last a service with NaN weights is started, which must refuse.

    python benchmarks/load.py --rate 166.7 --seconds 180       10,000 requests a minute for 3 minutes
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import numpy as np
import torch

from mdmi_fast import decode, load_estimator, load_model
from mdmi_fast.bench.report import write_table
from mdmi_fast.decoding import parse_policy
from mdmi_fast.tasks.sudoku.puzzles import validation_puzzles

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "load.csv"
SERVE = [sys.executable, "-m", "mdmi_fast", "serve", "--model", "sudoku"]
POLICY = "mi-budget:0.05"
GARBAGE = [b"", b"{", b"[]", b'{"tokens": [0, 2]}', b'{"tokens": "x"}', b'{"tokens": [11], "seed": 1}', b"\xff" * 2000]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_service(port: int, *options: str) -> subprocess.Popen[str]:
    command = [*SERVE, "--port", str(port), "--policy", POLICY, *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def answers(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Puzzles, and what decoding each gives."""
    tokens = torch.from_numpy(validation_puzzles().givens[:count]).long()
    result = decode(load_model("sudoku"), tokens, parse_policy(POLICY, mi=load_estimator("sudoku")))
    return tokens.tolist(), result.tokens.tolist()


class Load:
    """Requests sent, and what became of them."""

    def __init__(self, url: str, puzzles: list[list[int]], expected: list[list[int]]) -> None:
        self.url, self.puzzles, self.expected = url, puzzles, expected
        self.seconds: list[float] = []
        self.outcomes: Counter[str] = Counter()

    async def run(self, session: aiohttp.ClientSession, rate: float, seconds: float) -> None:
        start, tasks = time.perf_counter(), []
        for number in range(round(rate * seconds)):
            due = start + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._one(session, number % len(self.puzzles), due)))
        await asyncio.gather(*tasks)

    async def _one(self, session: aiohttp.ClientSession, which: int, due: float) -> None:
        try:
            async with session.post(f"{self.url}/decode", json={"tokens": self.puzzles[which]}) as answer:
                body = await answer.json()
                if answer.status == 200:
                    outcome = "ok" if body["tokens"] == self.expected[which] else "wrong"
                else:
                    outcome = f"{answer.status} {body['error']}"
        except Exception as error:
            outcome = f"lost: {type(error).__name__}"
        self.seconds.append(time.perf_counter() - due)
        self.outcomes[outcome] += 1


async def until_ready(session: aiohttp.ClientSession, url: str, service: subprocess.Popen[str]) -> None:
    while True:
        try:
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            if service.poll() is not None:
                raise RuntimeError(f"the service ended: {service.stderr and service.stderr.read()}") from None
        await asyncio.sleep(0.1)


async def misbehave(url: str, port: int, seconds: float, redis: subprocess.Popen[bytes]) -> Counter[str]:
    """Everything that can go wrong from outside, spread over the time; how garbage was answered."""
    said: Counter[str] = Counter()
    hanging = []
    async with aiohttp.ClientSession() as session:
        for turn in range(8):
            await asyncio.sleep(seconds / 10)
            if turn in (1, 4):
                async with session.get(f"{url}/health") as answer:
                    for pid in (await answer.json())["workers"]:
                        os.kill(pid, signal.SIGKILL)
            if turn == 3:
                redis.kill()
            for body in GARBAGE:
                headers = {"Content-Type": "application/json"}
                async with session.post(f"{url}/decode", data=body, headers=headers) as answer:
                    said[str(answer.status)] += 1
            for _ in range(5):  # headers that promise a body, and no body
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"POST /decode HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
                hanging.append(writer)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x00\xff nonsense\r\n\r\n")
        hanging.append(writer)
    for writer in hanging:
        writer.close()
    return said


def refuses_nan_weights(port: int) -> str:
    """What the service says when its weights are NaN; they are read from a copy of the package."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "mdmi_fast", Path(folder) / "mdmi_fast")
        from safetensors.torch import load_file, save_file

        path = Path(folder) / "mdmi_fast" / "tasks" / "sudoku" / "weights" / "network_strong.safetensors"
        save_file({name: torch.full_like(weight, torch.nan) for name, weight in load_file(path).items()}, path)
        done = subprocess.run(
            [*SERVE, "--port", str(port)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1]}"


async def drive(
    options: argparse.Namespace, load: Load, port: int, redis: subprocess.Popen[bytes] | None, extra: list[str]
) -> tuple[float, str]:
    service = start_service(port, *extra)
    try:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await until_ready(session, load.url, service)
            await load.run(session, min(50.0, options.rate), 1.0)  # connections and weights are warm from here on
            load.seconds.clear()
            load.outcomes.clear()
            start = time.perf_counter()
            trouble = asyncio.create_task(misbehave(load.url, port, options.seconds, redis)) if redis else None
            await load.run(session, options.rate, options.seconds)
            took = time.perf_counter() - start
            said = f"garbage answered with {dict(await trouble)}" if trouble else ""
        # Requests on their way when the service is told to end are answered: decoded, or refused if not yet accepted.
        last = Load(load.url, load.puzzles, load.expected)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            tasks = [asyncio.create_task(last._one(session, which, time.perf_counter())) for which in range(20)]
            await asyncio.sleep(0.05)
            service.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)
        assert service.wait(timeout=60) == 0, "the service did not end well"
    finally:
        service.kill()
        service.wait()
    unanswered = [outcome for outcome in last.outcomes if outcome != "ok" and not outcome.startswith("503")]
    load.outcomes.update({f"at the end: {outcome}": last.outcomes[outcome] for outcome in unanswered})
    print(f"20 requests while the service was told to end: {dict(last.outcomes)}")
    return took, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second (default: 50)")
    parser.add_argument("--seconds", type=float, default=20.0, help="(default: 20)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--faults", action="store_true")
    options = parser.parse_args()
    random.seed(0)
    torch.set_num_threads(1)
    puzzles, expected = answers(500)
    port = free_port()
    load = Load(f"http://127.0.0.1:{port}", puzzles, expected)
    extra, redis = ["--workers", str(options.workers)], None
    with tempfile.TemporaryDirectory() as folder:
        if options.faults:
            address = f"{folder}/redis.sock"
            command = ["redis-server", "--port", "0", "--unixsocket", address, "--save", "", "--dir", folder]
            redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            extra += ["--cache", f"unix://{address}"]
        took, said = asyncio.run(drive(options, load, port, redis, extra))
        if redis:
            redis.wait()
    sent = round(options.rate * options.seconds)
    p50, p95, p99, worst = (1000 * float(np.percentile(load.seconds, at)) for at in (50, 95, 99, 100))
    errors = sum(load.outcomes.values()) - load.outcomes["ok"]
    print(
        f"{sent} requests in {took:.1f} s, {60 * sent / took:.0f} a minute; then 20 while the service was told to end"
    )
    print(f"p50 {p50:.1f} ms, p95 {p95:.1f} ms, p99 {p99:.1f} ms, longest {worst:.1f} ms; errors {errors}")
    print(json.dumps(load.outcomes))
    if options.faults:
        print(said)
        print(f"NaN weights: {refuses_nan_weights(free_port())}")
    name = "faults" if options.faults else "load"
    row = [name, options.workers, f"{options.rate:g}", f"{options.seconds:g}", sent, f"{60 * sent / took:.0f}"]
    row += [f"{value:.1f}" for value in (p50, p95, p99, worst)] + [errors]
    rows = []
    if RESULTS.exists():
        rows = [old for old in list(csv.reader(RESULTS.open()))[1:] if old[:2] != [name, str(options.workers)]]
    columns = ["run", "workers", "rate_per_s", "seconds", "requests", "per_minute", "p50_ms", "p95_ms", "p99_ms"]
    write_table(RESULTS, [*columns, "longest_ms", "errors"], [*rows, row])
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
