"""`mdmi-fast serve-metrics`: what guards know, for Prometheus."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._options import port


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve-metrics",
        help="answer Prometheus with what guards know",
        description="Answer Prometheus over HTTP with the state files that guards write, read anew at each question. "
        "A guard goes by its file's name without suffix. Ends by an interrupt or SIGTERM.",
    )
    parser.add_argument("states", nargs="+", type=Path, metavar="FILE", help="state file of a guard")
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=9464, metavar="P", help="0: a free one (default: 9464)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    guards: dict[str, Any] = {path.stem: path for path in options.states}
    if len(guards) < len(options.states):
        raise UsageError("two state files have the same name, by which Prometheus would have to tell them apart")
    from mdmi_fast.watch import Collector, serve
    from mdmi_fast.watch.state import read_state

    for name, path in guards.items():
        if not path.exists():  # its guard may be about to start, or the name is wrong
            print(
                f"{path}: there is no such file yet; mdmi_guard_up of {name} is 0 until a guard writes it",
                file=sys.stderr,
            )
        else:
            read_state(path)
    try:
        server = serve(Collector(guards=guards), host=options.host, port=options.port)
    except OSError as error:
        raise InputError(f"{options.host}:{options.port}: cannot listen there: {error.strerror or error}") from error
    print(f"http://{options.host}:{server.server_port}/metrics", flush=True)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    server.shutdown()
    return 0
