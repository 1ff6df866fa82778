"""Which model something was made from: labels and estimators of one model mean nothing to another."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from mdmi_fast import checks as check


def describe_model(model: object) -> dict[str, Any]:
    """What tells one model from another: its class, its plain attributes, and a hash of all its weights.

    Args:
        model: a torch module, or an object that holds tensors and modules as attributes.

    Returns:
        As JSON can hold it.

    Raises:
        ValueError: if its weights were never loaded.

    Example:
        >>> import torch
        >>> from mdmi_fast.models.exact import JointTable
        >>> coins, loaded = torch.ones(2, 2), torch.tensor([[0.9, 0.1], [0.1, 0.9]])
        >>> describe_model(JointTable(coins)) == describe_model(JointTable(coins))
        True
        >>> describe_model(JointTable(coins)) == describe_model(JointTable(loaded))
        False
    """
    check_loaded(type(model).__name__, model)
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors_of(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    plain = {
        name: value
        for name, value in _attributes(model).items()
        if type(value) in (bool, int, float, str) and name[0] != "_" and name != "training"
    }
    return {"class": type(model).__qualname__, **dict(sorted(plain.items())), "weights": digest.hexdigest()}


def check_loaded(owner: str, model: object) -> None:
    """Refuse a network whose weights are on the device "meta", which holds none."""
    empty = next((name for name, tensor in tensors_of(model).items() if tensor.is_meta), None)
    if empty is not None:
        raise ValueError(f"{owner}: weights must be loaded, got {empty} on the device meta, which holds no numbers")


def layer_of(model: object) -> Any:
    """The layers of the hidden state, for models that offer a choice; None for others."""
    layers = check.attribute(model, "layers")
    return list(layers) if isinstance(layers, (tuple, list)) else layers


def identity(model: object) -> dict[str, Any]:
    """What an estimator's model is told by: `describe_model`, and the layers of the state."""
    return {**describe_model(model), "layer": layer_of(model)}


def differences(kept: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """The keys by which two descriptions, also such that hold descriptions of models, differ.

    How long a sequence may be is told, but makes no other model: it says nothing of what both can read.
    """

    def differ(one: Any, other: Any) -> bool:
        if isinstance(one, dict) and isinstance(other, dict):
            return bool(differences(one, other))
        return bool(one != other)

    return [key for key in {**kept, **here} if key != "max_length" and differ(kept.get(key), here.get(key))]


def refuse_other(owner: str, trained_on: dict[str, Any] | None, model: object, remedy: str) -> None:
    """Refuse a model that something was not trained on.

    Args:
        owner: what was trained.
        trained_on: the `identity` of its model; None: unknown, and every model will do.
        model: the one at hand.
        remedy: what to do if the model moved.

    Raises:
        ValueError: naming what differs on both sides.
    """
    if trained_on is None:
        return
    here = identity(model)
    other = differences(trained_on, here)
    if other:
        there, found = (", ".join(f"{key} {of.get(key)}" for key in other) for of in (trained_on, here))
        raise ValueError(
            f"{owner}: was trained on a model of {there}, got one of {found}; if the model moved, {remedy}"
        )


def modules_of(model: object) -> list[torch.nn.Module]:
    """The model itself where it is a module, else the modules that it holds, see `_held_modules`."""
    if isinstance(model, torch.nn.Module):
        return [model]
    return list(_held_modules(model).values())


def tensors_of(model: object) -> dict[str, Tensor]:
    """The tensors that a model answers with: a module's parameters and buffers, or what another object holds of them.

    Of loose tensors only attributes count: a list of them may be anything, such as what was asked so far.
    """
    if isinstance(model, torch.nn.Module):
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name: value for name, value in _attributes(model).items() if isinstance(value, Tensor)}
    for name, module in _held_modules(model).items():
        found.update({f"{name}.{inner}": tensor for inner, tensor in tensors_of(module).items()})
    return found


_DEEPEST = 3
"""A model that wraps a model that keeps networks in a list: deeper lies what is not a model's own, such as loggers."""


def _held_modules(holder: object, depth: int = _DEEPEST) -> dict[str, torch.nn.Module]:
    """The modules among the attributes of an object, in lists, tuples and dicts there, and held by objects there."""
    found: dict[str, torch.nn.Module] = {}
    for name, value in _attributes(holder).items():
        if isinstance(value, torch.nn.Module):
            found[name] = value
        elif depth > 1 and not isinstance(value, (type, Tensor)):
            found.update({f"{name}.{inner}": module for inner, module in _held_modules(value, depth - 1).items()})
    return found


def _attributes(holder: object) -> dict[str, Any]:
    """What an object holds, by name; the entries of lists, tuples and dicts by number or key."""
    if isinstance(holder, dict):
        return {str(key): value for key, value in holder.items()}
    if isinstance(holder, (list, tuple)):
        return {str(number): value for number, value in enumerate(holder)}
    slots = [name for kind in type(holder).__mro__ for name in _slots(kind) if hasattr(holder, name)]
    return {**{name: getattr(holder, name) for name in slots}, **(check.attribute(holder, "__dict__") or {})}


def _slots(kind: type) -> list[str]:
    """The names in a class's `__slots__`, besides those that python keeps for itself."""
    slots = kind.__dict__.get("__slots__", ())
    return [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]
