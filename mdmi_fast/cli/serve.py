"""`mdmi-fast serve`: decode over HTTP."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from mdmi_fast.cli._errors import InputError, UsageError
from mdmi_fast.cli._options import (
    add_coupling,
    add_model,
    add_policy,
    amount,
    coupling_of,
    decoding_options,
    missing_source_is_usage,
    port,
    positive,
)

_STORES = ("memory", "disk")
_REDIS = ("redis://", "rediss://", "unix://")


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="decode over HTTP",
        description='Decode over HTTP: POST /decode {"tokens": [...]} as application/json, with "policy", "temperature", '
        '"seed" and "deadline_ms" if wanted, gives {"tokens": [...], "passes": n}, or {"error": "...", "status": n, '
        '"id": "..."}. GET /health says whether requests are accepted, GET /metrics answers Prometheus. Requests that come '
        "together are decoded together, whatever their policies. One line a request goes to standard output, except of "
        "/health and /metrics. SIGTERM or an interrupt ends it, when what was accepted is answered.",
    )
    add_model(parser)
    add_policy(parser, default="mi-budget:0.05")
    parser.add_argument(
        "--estimator",
        metavar="E",
        help="where policies' mutual information comes from: the name or folder of an estimator, or probe[:FORM], slow "
        "(default: the one shipped for the model, or trained for it here)",
    )
    add_coupling(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=8080, metavar="P", help="0: a free one (default: 8080)")
    parser.add_argument(
        "--workers", type=positive, default=1, metavar="N", help="processes that decode, a thread each (default: 1)"
    )
    parser.add_argument(
        "--max-batch", type=positive, default=64, metavar="N", help="sequences decoded together at most (default: 64)"
    )
    parser.add_argument(
        "--max-queue", type=positive, default=512, metavar="N", help="requests that may wait (default: 512)"
    )
    parser.add_argument(
        "--deadline",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds of a request that names none (default: 10)",
    )
    parser.add_argument(
        "--batch-timeout",
        type=_seconds,
        default=120.0,
        metavar="S",
        help="seconds after which a worker that does not answer is started anew (default: 120)",
    )
    parser.add_argument(
        "--cache",
        type=_cache,
        metavar="C",
        help="of selections: memory, disk or the URL of a Redis server (default: none); a policy that a guard watches is "
        "not cached",
    )
    parser.add_argument(
        "--state", type=Path, metavar="FOLDER", help="where guards around --policy keep their state (default: no guard)"
    )
    parser.add_argument(
        "--log-format", choices=("json", "text"), default="text", help="of the lines on standard output (default: text)"
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    value = amount(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 3600, got {text}")
    return value


def _cache(text: str) -> str:
    if text not in _STORES and not text.startswith(_REDIS):
        raise argparse.ArgumentTypeError(
            f"must be {', '.join(_STORES)} or a URL that begins with {', '.join(_REDIS)}, got {text!r}"
        )
    return text


def run(options: argparse.Namespace) -> int:
    import asyncio

    from mdmi_fast.service.dispatch import Dispatcher, StartError
    from mdmi_fast.service.log import Log
    from mdmi_fast.service.server import Service, check_installed
    from mdmi_fast.service.worker import Engine

    check_installed()
    settings = _settings(options)

    async def serve() -> None:
        dispatcher = Dispatcher(
            lambda number: functools.partial(Engine, settings, number),
            workers=options.workers,
            max_batch=options.max_batch,
            max_queue=options.max_queue,
            batch_seconds=options.batch_timeout,
        )
        log = Log(options.log_format, sys.stdout)
        await Service(dispatcher, settings, deadline=options.deadline, log=log).run(options.host, options.port)

    try:
        asyncio.run(serve())
    except StartError as error:
        raise InputError(f"mdmi-fast serve: {error}") from error
    return 0


def _settings(options: argparse.Namespace) -> Any:
    """What the workers shall load; all of it is checked here that can be without loading the model."""
    from mdmi_fast.decoding import named, needs_mi
    from mdmi_fast.models.loading import find_loader
    from mdmi_fast.service.worker import Settings
    from mdmi_fast.watch.state import read_state

    writing = decoding_options(options)  # those that a policy of a file was chosen with
    settings = Settings(
        options.model,
        str(options.policy),
        options.estimator or options.policy.estimator,
        writing.pop("temperature", 0.0),
        writing,
        options.cache,
        options.state,
        coupling_of(options, options.policy),
    )
    find_loader(settings.model)
    named.find_coupling(settings.coupling)
    if settings.estimator is not None or needs_mi(settings.policy):
        with missing_source_is_usage():
            named.find_source(settings.estimator, model=settings.model)
    settings.make_cache()
    if settings.state is not None:
        if settings.state.exists() and not settings.state.is_dir():
            raise UsageError(f"--state {settings.state}: must be a folder")
        settings.state.mkdir(parents=True, exist_ok=True)
        for number in range(options.workers):
            path = settings.state_file(number)
            if path is not None and path.exists():
                read_state(path)
    return settings
