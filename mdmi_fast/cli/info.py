"""`mdmi-fast info`: versions, processor, threads, and which backend runs what."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from mdmi_fast.cli._options import add_threads, json_text

_EXTRAS = ("matplotlib", "networkx", "transformers", "redis", "prometheus-client", "aiohttp")
_SETTINGS = ("MDMI_BACKEND", "MDMI_FORCE_ISA", "MDMI_CACHE", "MDMI_DEBUG")


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "info",
        help="versions, processor, threads and backends",
        description="Print versions, what the processor offers, threads, and which backend runs which op, with reasons.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    found = collect()
    print(json_text(found) if options.json else _as_text(found))
    return 0


def collect() -> dict[str, Any]:
    """Everything that a report of a fault should say about the machine."""
    import torch

    from mdmi_fast import __version__, get_num_threads, ops

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "versions": {
            "mdmi_fast": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "triton", "numpy")},
        },
        "extras": {name: _version(name) for name in _EXTRAS},
        "system": platform.platform(),
        "processor": {"name": _processor(), "count": os.cpu_count(), **_instruction_sets()},
        "gpus": gpus,
        "threads": {"torch": torch.get_num_threads(), "mdmi_fast": get_num_threads()},
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "backends": {device: ops.backends(device) for device in (["cpu", "cuda"] if gpus else ["cpu"])},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name; Linux alone keeps it out of Python's reach."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _instruction_sets() -> dict[str, Any]:
    """What the C++ extension uses and could use, or why it cannot be used."""
    try:
        from mdmi_fast import _C

        return {"isa": _C.isa(), "supported_isas": list(_C.supported_isas()), "extension": "in use"}
    except (ImportError, RuntimeError) as error:
        return {"isa": None, "supported_isas": [], "extension": f"not usable: {error}"}


def _as_text(found: dict[str, Any]) -> str:
    processor = found["processor"]
    rows = [(name, version or "not installed") for name, version in found["versions"].items()]
    rows += [
        ("extras", ", ".join(f"{name} {version or 'not installed'}" for name, version in found["extras"].items())),
        ("system", found["system"]),
        ("processor", f"{processor['name']}, {processor['count']} threads"),
        ("extension", processor["extension"]),
        ("instructions", f"{processor['isa']} in use, of {', '.join(processor['supported_isas'])}"),
        ("GPUs", ", ".join(found["gpus"]) or "none"),
        ("threads", f"{found['threads']['torch']} torch, {found['threads']['mdmi_fast']} C++"),
        ("settings", " ".join(f"{name}={value}" for name, value in found["settings"].items()) or "none"),
    ]
    if processor["isa"] is None:
        del rows[-4]
    lines = [f"{name:<14}{value}" for name, value in rows]
    for device, ops in found["backends"].items():
        lines += ["", *_backend_table(device, ops)]
    return "\n".join(lines)


def _backend_table(device: str, ops: dict[str, dict[str, list[str]]]) -> list[str]:
    """A line an op, then every reason once with the ops it holds for."""
    names = list(next(iter(ops.values())))
    lines = [f"{'ops on ' + device:<24}" + "".join(f"{name:<8}" for name in names) + "default"]
    why: dict[tuple[str, str], list[str]] = {}
    for op, reasons in ops.items():
        can = [name for name in names if not reasons[name]]
        marks = "".join(f"{'yes' if name in can else 'no':<8}" for name in names)
        lines.append(f"{op:<24}{marks}{os.environ.get('MDMI_BACKEND') or (can[0] if can else 'none')}")
        for name in names:
            for reason in reasons[name]:
                why.setdefault((name, reason), []).append(op)
    for (name, reason), which in why.items():
        lines.append(f"{name}: {reason} ({'all ops' if len(which) == len(ops) else ', '.join(which)})")
    return lines
