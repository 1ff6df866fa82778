"""Options that several commands share, and what they turn into."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._errors import UsageError
from mdmi_fast.decoding import named
from mdmi_fast.decoding.named import kind_of as kind_of
from mdmi_fast.decoding.named import load_decoded as load_decoded
from mdmi_fast.decoding.options import OPTIONS, check_option
from mdmi_fast.errors import UnsupportedError

if TYPE_CHECKING:
    from mdmi_fast.decoding import Policy, Probing
    from mdmi_fast.decoding.coupling import Coupling
    from mdmi_fast.estimator import PairScorer
    from mdmi_fast.labels import Form
    from mdmi_fast.models import MaskedModel

POLICY_NOTES = """\
or FILE.json, what `mdmi-fast tune` has chosen.
EPSILON, GAMMA and the TAU of mi-threshold may be START..END: from all masked to none.
Where fewer than mi_min_masked=N or more than mi_max_masked=N are masked, MI is not asked for; min(entropies)
stands in for it.
"""
MODEL_HELP = (
    "a model by name: sudoku, sapiens:heavy, hf:FOLDER ... (mdmi-fast models list); options may follow: "
    "'hf:FOLDER?dtype=bfloat16&layers=-1,-2'"
)
DATA_HELP = (
    'a file, or - for standard input: a JSON object {"tokens": [...]} a line, with "attention_mask": [...] of 0 at '
    "padding where padding is, or what the task of the model reads, such as puzzles"
)
FORM_NAMES = ("joint", "entropy", "kl")


def positive(text: str) -> int:
    return at_least(1, text)


def natural(text: str) -> int:
    return at_least(0, text)


def at_least(least: int, text: str, *, bits: int = 63) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    if value >= 2**bits:
        raise argparse.ArgumentTypeError(f"must be below 2^{bits}, got {value}")
    return value


def amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text}")
    return value


def port(text: str) -> int:
    value = natural(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"must be at most 65535, got {value}")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, got {text}")
    return value


def _threads(text: str) -> int:
    return at_least(1, text, bits=31)


class PolicySpec(str):
    """A policy as text, with the estimator, coupling and options that it was chosen with, if it comes from a file."""

    estimator: str | None = None
    coupling: str | None = None
    options: dict[str, Any] | None = None


def policy_spec(text: str) -> PolicySpec:
    """The text itself, or that of the file it names, if it describes a policy."""
    from mdmi_fast.decoding import parse_policy

    try:
        spec = _chosen_spec(text) if text.endswith(".json") else PolicySpec(text)
        parse_policy(spec, mi=lambda hidden, mask: hidden)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return spec


def _chosen_spec(path: str) -> PolicySpec:
    """What `mdmi-fast tune` has chosen.

    Raises:
        OSError: there is no such file.
        ValueError: it holds something else.
    """
    from mdmi_fast.cli._records import check_options
    from mdmi_fast.decoding.calibrate import read_choice

    choice = read_choice(path)
    policy, options = choice["policy"], choice.get("options")
    estimator, coupling = choice.get("estimator"), choice.get("coupling")
    for name, value, kind in (
        ("policy", policy, str),
        ("estimator", estimator, str),
        ("coupling", coupling, str),
        ("options", options, dict),
    ):
        if not isinstance(value, kind) and (value is not None or name == "policy"):
            raise ValueError(f"{path}: {name} must be {'an object' if kind is dict else 'a text'}, got {value!r}")
    spec = PolicySpec(policy)
    spec.estimator, spec.coupling = estimator, coupling
    if options is not None:
        spec.options = {name: value for name, value in options.items() if value is not None}
        try:
            check_options(spec.options)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        alone = sorted(spec.options.keys() - OPTIONS.keys())
        if alone:
            raise ValueError(f"{path}: option {alone[0]!r} belongs to one sequence, not to a policy")
    return spec


def policies_text() -> str:
    """How every policy is written and what it unmasks."""
    from mdmi_fast.decoding.policies.registry import policy_help

    return f"policies (SPEC):\n{policy_help()}\n"


def add_policy(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """--policy, and the list of policies below the options."""
    told = "which positions to unmask in a pass, see below"
    parser.add_argument(
        "--policy",
        type=policy_spec,
        required=default is None,
        default=None if default is None else PolicySpec(default),
        metavar="SPEC",
        help=told if default is None else f"{told} (default: %(default)s)",
    )
    parser.description = textwrap.fill(parser.description or "", 78)
    parser.epilog = policies_text() + POLICY_NOTES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=_threads, metavar="N", help="threads to use (default: all processors)")


def add_seed(parser: argparse.ArgumentParser, *, of: str) -> None:
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help=f"of {of} (default: %(default)s)")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME", help=MODEL_HELP)


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Temperature, seed, batch, the source of mutual information of a policy, and what draws of one pass know of each other."""
    parser.add_argument(
        "--estimator",
        metavar="E",
        help="where a policy's mutual information comes from: the name or folder of an estimator, or probe[:FORM], "
        "slow, with FORM one of joint, entropy, kl (default: the one shipped for the model, or trained for it here)",
    )
    add_coupling(parser)
    parser.add_argument(
        "--temperature",
        type=amount,
        default=0.0,
        metavar="T",
        help="0 takes the most probable tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=256,
        metavar="N",
        help="sequences decoded together (default: %(default)s)",
    )
    add_seed(parser, of="what is drawn")


def add_coupling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coupling",
        metavar="C",
        help="draw the tokens of a pass one after the other, each corrected by those before it: the folder of a coupling, or "
        "probing, slow; at temperature 0 only one made for it counts (default: independently)",
    )


def add_writing(parser: argparse.ArgumentParser) -> None:
    """The other options of `decode`, which a record may also set for itself."""
    for name, option in OPTIONS.items():
        flag, told, default = f"--{_word(name).replace('_', '-')}", option.metadata["told"], option.default
        if name == "temperature":
            continue
        if default is False:
            parser.add_argument(flag, action="store_true", help=told)
        elif default == ():
            parser.add_argument(flag, type=int, nargs="+", default=[], metavar="TOKEN", help=told)
        else:
            read, metavar = (float, "P") if isinstance(default, float) else (int, "N")
            shown = "" if default is None else " (default: %(default)s)"
            kind = functools.partial(_read_option, name, read)
            parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=told + shown)


def _word(name: str) -> str:
    """What a command calls an option of `decode`."""
    word: str | None = OPTIONS[name].metadata["word"]
    return word or name


def _read_option(name: str, read: Callable[[str], Any], text: str) -> Any:
    value = read(text)
    try:
        check_option(name, value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(f"decode: {name} ")) from error
    return value


def writing_options(options: argparse.Namespace) -> dict[str, Any]:
    """What --temperature and, in commands that have them, the options of `add_writing` say, as arguments of `decode`."""
    return {name: vars(options)[_word(name)] for name in OPTIONS if _word(name) in vars(options)}


def decoding_options(options: argparse.Namespace, model: MaskedModel | None = None) -> dict[str, Any]:
    """`writing_options`, or, where none of them is given, those that the policy of a file was chosen with.

    Args:
        options: of the command.
        model: whose tokens they must name; None leaves that to who loads it.

    Raises:
        UsageError: they name tokens that the model does not have, or stop tokens that cannot be written.
    """
    from mdmi_fast.decoding.vocabulary import with_stops

    found = writing_options(options)
    if options.policy.options is not None:
        parser = argparse.ArgumentParser()
        add_decoding(parser)
        add_writing(parser)
        default = writing_options(parser.parse_args([]))
        if all(value == default[name] for name, value in found.items()):
            found |= options.policy.options
    for name in ("suppressed", "stop_tokens"):
        for token in found.get(name, ()):
            if model is not None and not 0 <= token < model.vocab_size:
                raise UsageError(
                    f"--{_word(name)} must name tokens in 0..{model.vocab_size - 1}, which {options.model} has, "
                    f"got {token}"
                )
    if model is not None:
        try:
            with_stops(model, found.get("stop_tokens", ()), found.get("suppressed", ()))
        except ValueError as error:
            raise UsageError(str(error)) from error
    return found


def choose_form(named: Form | None, labels: Path, trained_on: Form | None) -> Form:
    """The form of the label: the one named, else the one that the estimator was trained on, else the folder's first.

    Raises:
        UsageError: none is named, and the folder does not keep the estimator's.
    """
    from mdmi_fast.labels import stream_labels

    kept = list(next(stream_labels(labels)).mi)
    if named is None and trained_on is not None and trained_on not in kept:
        raise UsageError(
            f"{labels} holds the forms {', '.join(kept)}, the estimator was trained on {trained_on}: name one with --form"
        )
    return named or trained_on or kept[0]


@contextlib.contextmanager
def missing_source_is_usage() -> Iterator[None]:
    """A command that needs a source of mutual information makes no sense where there is none: a UsageError."""
    try:
        yield
    except UnsupportedError as error:
        raise UsageError("; ".join(error.reasons)) from None


def find_estimator(source: str | None, *, model: str) -> PairScorer:
    """As `mdmi_fast.decoding.named.find_estimator`.

    Raises:
        UsageError: none is named and there is none.
    """
    with missing_source_is_usage():
        return named.find_estimator(source, model=model)


def load_source(estimator: str | None, model: MaskedModel, *, name: str) -> PairScorer | Probing:
    """The source of mutual information of --estimator, or the one that ships for the model of that name.

    Raises:
        UsageError: none is named and there is none, or no such form.
        ValueError: the estimator was trained on another model.
    """
    with missing_source_is_usage():
        return named.load_source(estimator, model, name=name)


def load_policy(options: argparse.Namespace, model: MaskedModel, *, name: str) -> Policy:
    """The policy of --policy, with the source of --estimator if it needs one."""
    from mdmi_fast.decoding import needs_mi, parse_policy

    if not needs_mi(options.policy):
        return parse_policy(options.policy)
    return parse_policy(options.policy, load_source(options.estimator or options.policy.estimator, model, name=name))


def load_coupling(options: argparse.Namespace, model: MaskedModel, *policies: PolicySpec) -> Coupling | None:
    """The coupling of --coupling, else that which the first of the policies that has one was chosen with.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no coupling, or one of another model.
    """
    coupling = named.find_coupling(coupling_of(options, *policies))
    if coupling is not None:
        coupling.check_model(model)
    return coupling


def coupling_of(options: argparse.Namespace, *policies: PolicySpec) -> str | None:
    """The name of what `load_coupling` loads."""
    named_one: str | None = options.coupling
    return named_one or next(filter(None, (policy.coupling for policy in policies)), None)


def plain(value: Any) -> Any:
    """A value without the numbers that JSON has no word for: NaN and infinity become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def json_text(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(plain(value), allow_nan=False)
