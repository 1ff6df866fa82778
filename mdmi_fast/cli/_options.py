"""Options that several commands share, and what they turn into."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from typing import TYPE_CHECKING, Any

from mdmi_fast.cli._errors import UsageError

if TYPE_CHECKING:
    from mdmi_fast.decode import Policy
    from mdmi_fast.estimator import PairScorer
    from mdmi_fast.labels import Form

POLICY_FORMS = """\
policies (SPEC):
  sequential                   one position a pass, the one of lowest entropy
  topk:K                       the K most confident positions
  random:K                     K positions at random
  confidence:THRESHOLD         every position of at least that probability
  confidence-budget:EPSILON    the most positions with sum(1 - probability) <= EPSILON
  entropy-bound:GAMMA          the most with sum(entropy) - max(entropy) <= GAMMA nats
  mi-budget:GAMMA[,lam=X][,entropy_weight=X][,order=entropy|cheapest][,limit=N]
                               greedy: entropy_weight * entropy + lam * sum(MI to those
                               chosen) within GAMMA nats; entropy_weight=0 for sampling
  mi-threshold:TAU[,limit=N]   positions that share less than TAU nats pairwise
"""
MODEL_HELP = "a model by name, such as sudoku or sudoku:weak"
DATA_HELP = 'a file, or - for standard input: a JSON object {"tokens": [...]} a line, or puzzles for sudoku models'
FORM_NAMES = ("joint", "entropy", "kl")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text}")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, got {text}")
    return value


def policy_spec(text: str) -> str:
    """The text itself, if it describes a policy."""
    from mdmi_fast.decode import parse_policy

    try:
        parse_policy(text, mi=lambda hidden, mask: hidden)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_policy(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """--policy, and the list of policies below the options."""
    told = "which positions to unmask in a pass, see below"
    parser.add_argument(
        "--policy",
        type=policy_spec,
        required=default is None,
        default=default,
        metavar="SPEC",
        help=told if default is None else f"{told} (default: {default})",
    )
    parser.description = textwrap.fill(parser.description or "", 78)
    parser.epilog = POLICY_FORMS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=positive, metavar="N", help="threads to use (default: all processors)")


def add_seed(parser: argparse.ArgumentParser, *, of: str) -> None:
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help=f"of {of} (default: 0)")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME", help=MODEL_HELP)


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Temperature, seed, batch and the source of mutual information of a policy."""
    parser.add_argument(
        "--estimator",
        metavar="E",
        help="where a policy's mutual information comes from: the name or folder of an estimator, or probe[:FORM], "
        "slow, with FORM one of joint, entropy, kl (default: the one shipped for the model)",
    )
    parser.add_argument(
        "--temperature", type=amount, default=0.0, metavar="T", help="0 takes the most probable tokens (default: 0)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=256, metavar="N", help="sequences decoded together (default: 256)"
    )
    add_seed(parser, of="what is drawn")


def kind_of(model: str) -> str:
    """The loader's name in a model's name: "sudoku" of "sudoku:weak"."""
    return model.partition(":")[0]


def _probed_form(source: str) -> Form | None:
    """The form that a source named probe[:FORM] asks for; None for other sources.

    Raises:
        UsageError: there is no such form.
    """
    kind, colon, form = source.partition(":")
    if kind != "probe":
        return None
    for known in FORM_NAMES:
        if form == known or (known == "joint" and not colon):
            return known  # type: ignore[return-value]  # a string of the list, which is the forms
    raise UsageError(f"--estimator {source}: the forms are {', '.join(FORM_NAMES)}")


def find_estimator(source: str | None, *, model: str) -> PairScorer:
    """The estimator of a name or folder; without one that which ships for the model, under the same name.

    Raises:
        UsageError: none is named and none ships.
    """
    from mdmi_fast.estimator import load_estimator

    if source is None and kind_of(model) != "sudoku":
        raise UsageError(f"no estimator ships for {model}: name one with --estimator")
    return load_estimator(source or model)


def load_policy(options: argparse.Namespace, *, model: str) -> Policy:
    """The policy of --policy, with the source of --estimator if it needs one."""
    from mdmi_fast.decode import Probing, needs_mi, parse_policy

    if not needs_mi(options.policy):
        return parse_policy(options.policy)
    form = _probed_form(options.estimator or "")
    mi = find_estimator(options.estimator, model=model) if form is None else Probing(form)
    return parse_policy(options.policy, mi)


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
