"""Measures of how the code is built: sizes of files and functions, parameters, signatures, imports that go upwards.

    python tools/measure_house.py [--list]

Counts what a reader has to carry: files over 400 lines, functions over 60 lines of code (docstring and comments left
out), functions over 8 parameters, lines that only spell out signatures of 8 and more, `getattr` with a default, flags that
silence the type checker, and imports of a higher floor from a lower one. `--list` names every one of them.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mdmi_fast"
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS, MOST_BACKEND_PARAMETERS = 400, 60, 8, 6

FLOORS = (
    ("errors", "files", "_threads", "_C", "checks", "statistics", "_moved"),
    ("backends", "reference"),
    ("ops",),
    ("models",),
    ("labels",),
    ("estimator", "decoding", "coupling"),
    ("cache", "watch", "maps", "frontends"),
    ("tasks",),
    ("bench", "service"),
    ("cli",),
)
"""Rooms from the ground up. A room may import from floors below it, and from its own."""


class Function(NamedTuple):
    where: str
    code_lines: int
    parameters: int
    signature_lines: int


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def functions(path: Path) -> Iterator[Function]:
    text = path.read_text()
    code = _lines_of_code(text)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        last = node.end_lineno or node.lineno
        first = body[0].lineno if body else last + 1
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        named = [p for p in parameters if p.arg not in ("self", "cls")]
        head = (node.body[0].lineno if node.body else last) - node.lineno
        where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        yield Function(where, len(code & set(range(first, last + 1))), len(named), head)


def _lines_of_code(text: str) -> set[int]:
    """Lines that hold more than a comment or nothing."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            found.update(range(token.start[0], token.end[0] + 1))
    return found


def calls_with_default(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) == 3:
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of the package, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            for name in node.names:
                yield node.lineno, f"{PACKAGE}.{name.name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def upward_imports() -> list[str]:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    found = []
    for path in python_files(ROOT / PACKAGE):
        here = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if here is None or here not in floor:
            continue  # the face of the package, which imports what it shows
        for line, module in imports(path):
            there = room_of(module)
            if there in floor and floor[there] > floor[here]:
                found.append(f"{path.relative_to(ROOT)}:{line} {here} imports {there}")
    return found


def rooms_without_floor() -> list[str]:
    known = {room for rooms in FLOORS for room in rooms}
    rooms = {path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py") for path in python_files(ROOT / PACKAGE)}
    return sorted(rooms - known - {"__init__", "__main__"})


def measures() -> dict[str, list[str]]:
    package, core = python_files(ROOT / PACKAGE), sorted((ROOT / "csrc").rglob("*.*"))
    every = [function for path in package for function in functions(path)]
    backends = [
        function
        for path in python_files(ROOT / PACKAGE / "backends")
        for function in functions(path)
        if not function.where.split()[-1].endswith("kernel")
    ]
    return {
        f"package files over {MOST_FILE_LINES} lines": _long_files([*package, *core]),
        f"functions over {MOST_FUNCTION_LINES} code lines": [
            f"{f.where} {f.code_lines}" for f in every if f.code_lines > MOST_FUNCTION_LINES
        ],
        f"functions over {MOST_PARAMETERS} parameters": [
            f"{f.where} {f.parameters}" for f in every if f.parameters > MOST_PARAMETERS
        ],
        f"functions of a backend over {MOST_BACKEND_PARAMETERS} parameters": [
            f"{f.where} {f.parameters}" for f in backends if f.parameters > MOST_BACKEND_PARAMETERS
        ],
        f"lines that only are signatures of {MOST_PARAMETERS} and more": [
            f.where for f in every if f.parameters >= MOST_PARAMETERS for _ in range(f.signature_lines)
        ],
        "getattr with a default": [where for path in package for where in calls_with_default(path)],
        "type: ignore": _marks(package, "# type: ignore"),
        "noqa": _marks(package, "# noqa"),
        "imports of a higher floor": upward_imports(),
        "rooms without a floor": rooms_without_floor(),
    }


def _long_files(paths: list[Path]) -> list[str]:
    sizes = {path: len(path.read_text().splitlines()) for path in paths}
    return [f"{path.relative_to(ROOT)} {size}" for path, size in sizes.items() if size > MOST_FILE_LINES]


def _marks(paths: list[Path], mark: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if mark in line
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name everything that is counted")
    options = parser.parse_args()
    for folder, pattern in ((PACKAGE, "*.py"), ("csrc", "*.*"), ("tests", "*.py"), ("benchmarks", "*.py")):
        files = [path for path in (ROOT / folder).rglob(pattern) if path.suffix not in (".pyc", ".o")]
        print(f"{sum(len(path.read_text().splitlines()) for path in files):7,} lines in {folder}")
    for name, found in measures().items():
        print(f"{len(found):7,} {name}")
        if options.list:
            for where in dict.fromkeys(found):
                print(f"        {where}")


if __name__ == "__main__":
    main()
