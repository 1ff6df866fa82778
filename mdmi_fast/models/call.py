"""How this library calls a model, its own or anybody's: what is checked, and what is decided once for all passes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import _moved
from mdmi_fast import checks as check
from mdmi_fast.models.base import MaskedModel, MaskedOutput, PaddedModel, RestrictedModel
from mdmi_fast.models.identity import check_loaded, modules_of


def check_model(owner: str, model: Any) -> None:
    """Refuse what is no model, and a network whose weights were never loaded.

    Args:
        owner: who asks, for messages.
        model: to be called.

    Raises:
        TypeError: if it cannot be called or lacks an attribute of `MaskedModel`.
        ValueError: if weights are on the device "meta".
    """
    _check_protocol(owner, model)
    check_loaded(f"{owner}: {type(model).__name__}", model)


def _check_protocol(owner: str, model: Any) -> None:
    if isinstance(model, type) or not callable(model):
        raise TypeError(f"{owner}: model must be an object that can be called, got {model!r}")
    name = type(model).__name__
    for attribute, least in (("mask_token_id", 0), ("vocab_size", 1), ("hidden_size", 1)):
        value: Any = check.attribute(model, attribute)
        try:
            number = _index(value)
        except TypeError:
            raise TypeError(f"{owner}: model must have an integer {attribute}, got {value!r} of {name}") from None
        check.whole(owner, f"{attribute} of {name}", number, least)


def check_tokens(owner: str, tokens: Any, attention_mask: Any = None) -> None:
    """Refuse what is no batch of sequences.

    Raises:
        TypeError: for what is no tensor.
        ValueError: for another shape, dtype or device.
    """
    for name, given in (("tokens", tokens), ("attention_mask", attention_mask)):
        if given is not None or name == "tokens":
            check.dense(owner, name, given)
    if tokens.ndim != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"{owner}: tokens must be [B, N] int64, got shape {tuple(tokens.shape)} {tokens.dtype}")
    if tokens.is_meta:
        raise ValueError(f"{owner}: tokens must hold numbers, got {check.describe(tokens)}")
    if attention_mask is None:
        return
    if attention_mask.shape != tokens.shape or attention_mask.dtype != torch.bool:
        raise ValueError(
            f"{owner}: attention_mask must be {tuple(tokens.shape)} bool like tokens, "
            f"got shape {tuple(attention_mask.shape)} {attention_mask.dtype}"
        )
    check.same_device(owner, tokens=tokens, attention_mask=attention_mask)


def token_list(owner: str, name: str, tokens: Iterable[int], size: int) -> list[int]:
    """An argument that names tokens: integers, or a tensor of them.

    Raises:
        TypeError: for what is no sequence of integers; a float is not cut to one.
        ValueError: for tokens outside of the vocabulary of that size.
    """
    try:
        if isinstance(tokens, bytes):  # each of them counts as an integer
            raise TypeError
        found = [_index(token) for token in (_listed(tokens) if isinstance(tokens, Tensor) else tokens)]
    except TypeError:
        raise TypeError(
            f"{owner}: {name} must be a sequence of tokens, which are integers, got {check.shown(tokens)}"
        ) from None
    for token in found:
        if not 0 <= token < size:
            raise ValueError(f"{owner}: {name} must be tokens in 0..{size - 1}, got {token}")
    return found


def _listed(tokens: Tensor) -> list[Any]:
    if tokens.is_meta or tokens.ndim != 1:
        raise TypeError
    found: list[Any] = tokens.tolist()
    return found


def _index(value: Any) -> int:
    """An integer that is none of Python's, such as one of numpy, as one of Python's."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def forbidden_tokens_of(owner: str, model: MaskedModel) -> set[int]:
    """The tokens whose logits a model makes -inf itself.

    Raises:
        TypeError: if its attribute `forbidden_tokens` is no sequence of integers.
        ValueError: if it names what is no token.
    """
    if isinstance(model, RestrictedModel):
        tokens: Any = model.forbidden_tokens
    else:
        tokens = _moved.attribute(model, "never", "forbidden_tokens", ())
    return set(token_list(owner, f"forbidden_tokens of {type(model).__name__}", tokens, model.vocab_size))


def check_flag(owner: str, name: str, value: object) -> bool:
    """The value, True or False.

    Raises:
        TypeError: for anything else, such as a text.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be True or False, got {check.describe(value)}")
    return value


def visible_positions(owner: str, model: MaskedModel, tokens: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Which positions are not padding: [B, N] bool, or None for a model that knows no padding.

    Whoever runs a model several times on sequences that it writes to decides this once, from the tokens as they were
    given, and hands it to every pass: what is written may be the pad token.

    Raises:
        TypeError: if the model's `visible` answers with another kind than bool.
        ValueError: if the answer is not [B, N] on the device of the tokens.
    """
    if attention_mask is not None or not isinstance(model, PaddedModel):
        return attention_mask
    what = f"visible of {type(model).__name__}"
    visible = check.of_kind(owner, what, model.visible(tokens), torch.bool)
    _check_fit(owner, what, visible, tokens, (), "[B, N]")
    return visible


def call_model(owner: str, model: MaskedModel, tokens: Tensor, attention_mask: Tensor | None = None) -> MaskedOutput:
    """Run a model and check its answer.

    Args:
        owner: who asks, for messages.
        model: in training mode it answers as in evaluation mode.
        tokens: [B, N] int64.
        attention_mask: [B, N] bool, False at padding; None is not handed on.

    Raises:
        TypeError: if the model is none, or its answer does not have floating tensors `logits` and `hidden`.
        ValueError: if they are not [B, N, vocab_size] and [B, N, hidden_size] on the device of the tokens.
    """
    _check_protocol(owner, model)
    with evaluating(model):
        output = model(tokens) if attention_mask is None else model(tokens, attention_mask)
    _check_field(owner, model, output, "logits", tokens, model.vocab_size)
    _check_field(owner, model, output, "hidden", tokens, model.hidden_size)
    return output


def call_token_stats(owner: str, model: Any, tokens: Tensor, attention_mask: Tensor | None = None) -> Any:
    """`call_model` for a model that makes statistics without logits: its method `token_stats`.

    Raises:
        TypeError: if the answer does not have `stats`, a tuple of tensors, and a floating tensor `hidden`.
        ValueError: if they do not fit the tokens.
    """
    with evaluating(model):
        output = model.token_stats(tokens) if attention_mask is None else model.token_stats(tokens, attention_mask)
    stats = check.attribute(output, "stats")
    if not isinstance(stats, tuple) or not hasattr(stats, "_fields"):
        raise TypeError(
            f"{owner}: token_stats of {type(model).__name__} must answer with stats, got {type(stats).__name__}"
        )
    for name, field in zip(stats._fields, stats, strict=True):
        what = f"{name} of {type(model).__name__}"
        if name == "token":
            check.of_kind(owner, what, field, torch.int64)
        else:
            check.floating(owner, what, field)
        _check_fit(owner, what, field, tokens, (), "[B, N]")
    _check_field(owner, model, output, "hidden", tokens, model.hidden_size)
    return output


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """For a while, put those modules of a model that are in training mode into evaluation mode: no dropout.

    The mode is the caller's and comes back. Threads must not share a model in training mode.
    """
    training = [part for module in modules_of(model) for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _check_field(owner: str, model: object, output: Any, name: str, tokens: Tensor, width: int) -> None:
    field, kind = check.attribute(output, name), type(model).__name__
    if not isinstance(field, Tensor):
        raise TypeError(
            f"{owner}: {kind} must answer with MaskedOutput(logits, hidden), got {type(output).__name__} "
            + ("without " + name if field is None else f"with {name} of type {type(field).__name__}")
        )
    what = f"{name} of {kind}"
    check.floating(owner, what, field)
    _check_fit(owner, what, field, tokens, (width,), f"[B, N, {'V' if name == 'logits' else 'D'}]")


def _check_fit(owner: str, what: str, field: Tensor, tokens: Tensor, width: tuple[int, ...], text: str) -> None:
    check.shape(owner, what, field, (*tokens.shape, *width), text)
    check.same_device(owner, tokens=tokens, **{what: field})
