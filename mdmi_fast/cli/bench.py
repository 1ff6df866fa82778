"""`mdmi-fast bench`: measure speed and memory against PyTorch, and say which targets are reached."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mdmi_fast.bench import STEMS
from mdmi_fast.cli._options import positive
from mdmi_fast.files import check_folder


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and memory against PyTorch",
        description="Measure speed and memory. Every answer is compared with the float64 reference before a speed is "
        "printed; the sides of a comparison are timed in turn, and medians of at least 5 are shown. A target that is "
        "missed is shown as MISSED; a wrong answer is REFUSED and fails the command.",
    )
    parser.add_argument(
        "stems", nargs="*", type=_stem, metavar="STEM", help=f"what to measure (default: all): {', '.join(STEMS)}"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs; no targets")
    parser.add_argument(
        "--threads",
        type=positive,
        default=1,
        metavar="N",
        help="threads of both sides (default: 1, as targets have it)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write STEM.csv and, with matplotlib, STEM.png here")
    parser.set_defaults(run=run)


def _stem(text: str) -> str:
    if text not in STEMS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(STEMS)}, got {text}")
    return text


def run(options: argparse.Namespace) -> int:
    check_folder(options.out)
    from mdmi_fast.bench import report
    from mdmi_fast.bench.run import measure_stem

    everything = []
    for stem in options.stems or STEMS:
        print(report.heading(stem), flush=True)
        found = []
        for figure in measure_stem(stem, quick=options.quick):
            found.append(figure)
            print(report.line(figure), flush=True)
        everything += found
        if options.out is not None:
            _write(stem, found, options)
    print(f"\n{report.summary(everything)}")
    return 1 if any(figure.refused for figure in everything) else 0


def _write(stem: str, found: list[Any], options: argparse.Namespace) -> None:
    from mdmi_fast.bench import report

    where = _circumstances(stem, options)
    print(f"wrote {report.write_csv(stem, found, where, options.out)}")
    try:
        title = f"{where['processor']}, {where['isa']}, threads: {where['threads']}, {where['date']}"
        print(f"wrote {report.draw(stem, found, title, options.out)}")
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed (pip install 'mdmi-fast[bench]')")


def _circumstances(stem: str, options: argparse.Namespace) -> dict[str, Any]:
    """The conditions a benchmark number is meaningless without."""
    from mdmi_fast.cli.info import collect

    here = collect()
    quick = " --quick" if options.quick else ""
    return {
        "processor": here["processor"]["name"],
        "processors": here["processor"]["count"],
        "isa": here["processor"]["isa"] or "none",
        **{name: here["versions"][name] for name in ("mdmi_fast", "python", "torch", "numpy")},
        "threads": options.threads,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": f"mdmi-fast bench {stem}{quick} --threads {options.threads}",
    }
