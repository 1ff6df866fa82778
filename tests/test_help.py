"""What help texts say of defaults is what the commands do."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdmi_fast import PairwiseCoupling, PairwiseMIEstimator
from mdmi_fast.cli import _parser
from mdmi_fast.cli.demo import BOARDS
from mdmi_fast.maps import mi_map

ROOT = Path(__file__).parent.parent
SAID = re.compile(r"\bdefault: ?([^);]*)")


def default_of(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


ELSEWHERE = {
    **{
        ("train", name): default_of(PairwiseMIEstimator, name)
        for name in ("combine", "rank", "output", "marginals", "weighted_layers", "distances")
    },
    **{("couple", name): default_of(PairwiseCoupling, name) for name in ("rank", "distances")},
    ("map", "form"): default_of(mi_map, "form"),
    ("demo", "boards"): BOARDS,
}
"""The defaults of options whose absence means something to their command."""


def options(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, argparse.ArgumentParser, Any]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options(inner, f"{command} {name}".strip())
        elif action.help:
            yield command, parser, action


def written(value: Any) -> set[str]:
    """The ways to write a value."""
    if isinstance(value, (list, tuple)):
        return {separator.join(map(str, value)) for separator in (" ", ",")}
    return {str(value), f"{value:g}", f"{value:,}"} if isinstance(value, (int, float)) else {str(value)}


def named(said: str) -> str:
    """The value that a text begins with: "1000" of "all 1,000; by the weak network at most 400"."""
    return said.removeprefix("all ").split(", ")[0].strip()


ALL = [pytest.param(*option, id=f"{option[0]} {option[2].dest}") for option in options(_parser())]


@pytest.mark.parametrize(("command", "parser", "action"), ALL)
def test_a_default_that_help_names_is_the_default(
    command: str, parser: argparse.ArgumentParser, action: argparse.Action
) -> None:
    said = SAID.search(parser._get_formatter()._expand_help(action))
    if said is None:
        return
    value = action.default
    if (command, action.dest) in ELSEWHERE:
        assert value is None
        value = ELSEWHERE[command, action.dest]
    if value is None or value == []:
        # Words that describe what is done without the option; a value would have nothing to be compared with.
        assert not re.match(r"-?[\d.]+$", named(said[1])), said[1]
        assert named(said[1]) not in {str(choice) for choice in action.choices or ()}, said[1]
    else:
        assert named(said[1]) in written(value), f"help says {said[1]!r}, the default is {value!r}"


def test_commands_share_options_and_not_their_defaults() -> None:
    sizes = {command: action.default for command, _, action in options(_parser()) if action.dest == "batch_size"}
    assert (sizes["tune"], sizes["decode"], sizes["train"]) == (32, 256, 16)


def literals(call: ast.Call) -> tuple[str, Any] | None:
    """The help and the default of a call of add_argument, where both are written there."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    try:
        return str(ast.literal_eval(given["help"])), ast.literal_eval(given["default"])
    except (KeyError, ValueError):
        return None


def calls() -> Iterator[tuple[str, str, Any]]:
    for folder in ("mdmi_fast", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                    found = literals(node)
                    if found is not None:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", *found


def test_programs_beside_the_command_line_name_their_defaults_too() -> None:
    found = [
        (place, said[1], value)
        for place, text, value in calls()
        if "%(default)s" not in text and (said := SAID.search(text))
    ]
    assert any("benchmarks/load.py" in place for place, _, _ in found)
    for place, said, value in found:
        assert named(said) in written(value), f"{place}: help says {said!r}, the default is {value!r}"
