"""What tokenizers, configurations and answers of transformers, and of what is made like them, say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mdmi_fast.checks import attribute


def token_of(source: Any, role: str) -> Any:
    """The token for a role such as "mask"; None where there is none."""
    return attribute(source, f"{role}_token_id")


def nameless(tokenizer: Any, vocab_size: int) -> set[int]:
    """The numbers below `vocab_size` that stand for no token of a tokenizer, whose numbers may have gaps."""
    names = attribute(tokenizer, "get_vocab")
    known = range(len(tokenizer)) if names is None else names().values()
    return set(range(vocab_size)).difference(known)


_TEXT = ("bos", "eos", "cls", "sep", "unk", "mask")
"""Roles of special tokens with a meaning: one that is the pad token as well may be text."""


def _tokens_of(source: Any, roles: Iterable[str]) -> list[int]:
    """The tokens that a tokenizer or a configuration has for roles; some have several for one."""
    found = [token_of(source, role) for role in roles]
    tokens = [token for entry in found for token in (entry if isinstance(entry, list) else [entry])]
    return [token for token in tokens if token is not None]


def is_text(pad: int | None, tokenizer: Any, config: Any) -> bool:
    """Whether the pad token has another meaning too.

    One of the configuration's, of which some have a number that nobody chose, may also be any word of the tokenizer.
    """
    if token_of(tokenizer, "pad") is not None:
        return pad in _tokens_of(tokenizer, _TEXT)
    if tokenizer is None:
        return pad in _tokens_of(config, _TEXT)
    names = attribute(tokenizer, "get_vocab")
    return pad in (range(len(tokenizer)) if names is None else names().values())


def special_tokens(tokenizer: Any, config: Any, vocabulary: int) -> list[int]:
    """Tokens that are no text: special ones, and rows of the head that stand for no token at all."""
    if tokenizer is not None:
        found = {*tokenizer.all_special_ids, *nameless(tokenizer, vocabulary)}
    else:
        found = set(_tokens_of(config, ("pad", "bos", "eos", "cls", "sep")))
    return [token for token in found if 0 <= token < vocabulary]  # -1 is no pad token


@contextmanager
def loading_errors(name: str) -> Iterator[None]:
    """Let an error of transformers, and of the libraries that it reads files with, say what could not be loaded.

    Raises:
        OSError: a file is missing, or there is no network to fetch it.
        ValueError: a file holds something else than it should, which these libraries report in many kinds.
    """
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        if type(error) is ValueError:  # says itself what is not supported
            raise ValueError(f"hf: {name} cannot be loaded: {error}") from error
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".:!")
        folder = Path(name)
        if not folder.is_dir():
            if isinstance(error, OSError):
                reason += ". Without a network, copy the model's folder here and say hf:FOLDER"
        else:
            damaged = next((path.name for path in sorted(folder.glob("*.safetensors")) if _is_damaged(path)), None)
            reason += f". {damaged or 'A file of the folder'} is {'' if damaged else 'missing or '}damaged"
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"hf: {name} cannot be loaded: {reason}") from error


def _is_damaged(weights: Path) -> bool:
    try:
        with safe_open(weights, "pt"):
            return False
    except (SafetensorError, OSError):
        return True
