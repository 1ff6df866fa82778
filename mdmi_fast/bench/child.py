"""Measurements in a process of their own: with another environment, or with memory that nothing else has touched."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mdmi_fast.bench.measure import Unavailable

MIB = 2**20


def in_child(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """What a function of this package returns in a fresh process; arguments and result are plain JSON.

    Raises:
        Unavailable: if it fails there, with the last line it wrote.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, function.__module__, function.__name__, json.dumps(arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise Unavailable(f"a process of its own ended with {done.returncode}: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_growth(run: Callable[[], Any]) -> int:
    """Bytes by which the memory of this process grew at most while `run` ran, its result included.

    Raises:
        Unavailable: on a system that does not tell.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        raise Unavailable("the peak of resident memory is read from /proc")

    def kib(name: str) -> int:
        return int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith(name + ":")))

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # memory that malloc keeps would hide what is taken again
    if trim is not None:
        trim(0)
    reset.write_text("5")  # the peak becomes what is in use now
    before = kib("VmRSS")
    run()
    return (kib("VmHWM") - before) * 1024


def main() -> None:
    module, name, arguments = sys.argv[1:]
    result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    print(json.dumps(result))  # noqa: T201 - how the parent hears of it


if __name__ == "__main__":
    main()
