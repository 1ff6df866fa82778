"""One line of JSON: a sequence, its attention mask and its options, refused where anything is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from mdmi_fast.files import wrong_encoding
from mdmi_fast.models.base import CheckingModel

if TYPE_CHECKING:
    from mdmi_fast.decoding import Asked
    from mdmi_fast.models import MaskedModel

_DEEPEST = 100


class TokenSequence(NamedTuple):
    """A sequence of a file: its tokens, the record it stood in, and where that was, as `file:line`."""

    tokens: list[int]
    record: dict[str, Any]
    where: str = ""

    @property
    def attention_mask(self) -> list[bool] | None:
        """Which positions are not padding, where the record says so."""
        given = self.record.get("attention_mask")
        return None if given is None else [bool(shown) for shown in given]

    @property
    def asked(self) -> Asked:
        """For `decode_many`."""
        from mdmi_fast.decoding import Asked

        return Asked(self.tokens, self.attention_mask, self.record.get("options", {}))


def read_record(line: str, model: MaskedModel) -> TokenSequence:
    problem = wrong_encoding(line)
    if problem is not None:
        raise ValueError(problem)
    record = _read_object(line)
    tokens = record.get("tokens") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(tokens, list) or not tokens:
        raise ValueError('expected an object {"tokens": [...]} with at least one integer')
    for position, token in enumerate(tokens):
        if type(token) is not int:
            raise ValueError(f"{json.dumps(token)[:40]} at position {position} is no token, which is an integer")
        if not (0 <= token < model.vocab_size or token == model.mask_token_id):
            raise ValueError(
                f"token {token} at position {position} is neither in 0..{model.vocab_size - 1} nor the mask token "
                f"{model.mask_token_id}"
            )
    _check_attention_mask(record.get("attention_mask"), length=len(tokens))
    sequence = TokenSequence(tokens, record)
    if isinstance(model, CheckingModel):
        import torch

        visible = sequence.attention_mask
        model.check(torch.tensor([tokens]), None if visible is None else torch.tensor([visible]))
    _check_item(record.get("options", {}), tokens=tokens, model=model)
    return sequence


def _check_attention_mask(given: Any, *, length: int) -> None:
    """Refuse a mask of a record that no sequence of that length can have; None is none.

    Raises:
        ValueError: saying why.
    """
    if given is None:
        return
    if not isinstance(given, list) or not all(type(shown) in (int, bool) and shown in (0, 1) for shown in given):
        raise ValueError('"attention_mask" must be a list of 0 (padding) and 1, or of false and true')
    if len(given) != length:
        raise ValueError(f'"attention_mask" must be as long as "tokens", {length}, got {len(given)}')
    if "0" in "".join("1" if shown else "0" for shown in given).strip("0") or not any(given):
        raise ValueError('"attention_mask" must hide positions at the ends only, and not all of them')


def _read_object(line: str) -> Any:
    """The value of a line of JSON, without anything that would come out changed: what is written back is what came."""
    try:
        value = json.loads(
            line.strip(), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_repetition
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (character {error.pos + 1})") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise ValueError(f"not JSON: {error}") from error
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Refuse what is nested so deeply that it may not be written again: writing needs more of the stack than reading.

    Raises:
        ValueError: saying so.
    """
    level = [value]
    for _ in range(_DEEPEST):
        found = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [entry for each in found for entry in each]
    if any(isinstance(one, (dict, list)) for one in level):
        raise ValueError(f"lists and objects may be nested {_DEEPEST} deep, got more")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def are_tokens(value: Any) -> TypeGuard[list[int]]:
    """Whether a value of JSON is a list of integers."""
    return isinstance(value, list) and all(type(token) is int for token in value)


def _is_seed(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _are_sets(value: Any) -> bool:
    return isinstance(value, dict) and all(
        key.isdecimal() and str(int(key)) == key and are_tokens(tokens) for key, tokens in value.items()
    )


_OF_ONE: dict[str, Callable[[Any], bool]] = {"seed": _is_seed, "allowed": _are_sets}
"""What only one sequence has: its seed, and the allowed tokens of positions as {"POSITION": [TOKEN, ...]}."""


def check_options(options: Any) -> None:
    """Refuse options of a record, or of a chosen policy, that no sequence could have.

    Raises:
        ValueError: naming the option.
    """
    from mdmi_fast.decoding.options import OPTIONS, check_option

    if not isinstance(options, dict) or not options.keys() <= {*OPTIONS, *_OF_ONE}:
        raise ValueError(f'"options" must be an object with some of {", ".join([*OPTIONS, *_OF_ONE])}')
    for name, value in options.items():
        try:
            if not _OF_ONE[name](value) if name in _OF_ONE else value is None:
                raise ValueError
            if name in OPTIONS:
                check_option(name, value)
        except (TypeError, ValueError):
            raise ValueError(f"option {name!r} cannot be {value!r}") from None


def _check_item(options: Any, *, tokens: Sequence[int], model: MaskedModel) -> None:
    """Refuse options of a record that make no sense for its tokens.

    Raises:
        ValueError: naming the option.
    """
    check_options(options)
    from mdmi_fast.decoding.vocabulary import with_stops

    length, vocab_size = len(tokens), model.vocab_size
    for name in ("suppressed", "stop_tokens"):
        if not all(0 <= token < vocab_size for token in options.get(name, ())):
            raise ValueError(f"option {name!r} must name tokens below {vocab_size}")
    with_stops(model, options.get("stop_tokens", ()), options.get("suppressed", ()))
    unwritten = {model.mask_token_id, *options.get("suppressed", ())}
    for position, permitted in options.get("allowed", {}).items():
        if int(position) >= length or not all(0 <= token < vocab_size for token in permitted):
            raise ValueError(f"option 'allowed' must name positions below {length} and tokens below {vocab_size}")
        if tokens[int(position)] == model.mask_token_id and unwritten.issuperset(permitted):
            raise ValueError(f"option 'allowed' leaves nothing to write at position {position}")
