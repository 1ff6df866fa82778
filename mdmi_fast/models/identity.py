"""Which model something was made from: labels and estimators of one model mean nothing to another."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor


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
        for name, value in vars(model).items()
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
    layers = getattr(model, "layers", None)
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


def modules_of(model: object) -> list[torch.nn.Module]:
    """The model itself where it is a module, else the modules among its attributes."""
    if isinstance(model, torch.nn.Module):
        return [model]
    return [value for value in getattr(model, "__dict__", {}).values() if isinstance(value, torch.nn.Module)]


def tensors_of(model: object) -> dict[str, Tensor]:
    """The tensors that a model answers with: a module's parameters and buffers, or the attributes of another object."""
    if isinstance(model, torch.nn.Module):
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    attributes = getattr(model, "__dict__", {})
    found = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
    for name, value in attributes.items():
        if isinstance(value, torch.nn.Module):
            found.update({f"{name}.{inner}": tensor for inner, tensor in tensors_of(value).items()})
    return found
