"""Which model something was made from: labels and estimators of one model mean nothing to another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from mdmi_fast.models.base import MaskedModel


def model_hash(model: MaskedModel) -> str:
    """A short fingerprint of a model's weights: other weights, another hash.

    Args:
        model: a torch module, or an object that holds tensors and modules as attributes.

    Returns:
        16 hexadecimal digits of a SHA-256 over the names, dtypes, shapes and bytes of all parameters and buffers.

    Example:
        >>> import torch
        >>> from mdmi_fast.models.exact import JointTable
        >>> coins, loaded = torch.ones(2, 2), torch.tensor([[0.9, 0.1], [0.1, 0.9]])
        >>> model_hash(JointTable(coins)) == model_hash(JointTable(coins))
        True
        >>> model_hash(JointTable(coins)) == model_hash(JointTable(loaded))
        False
    """
    digest = hashlib.sha256()
    for name, tensor in _weights(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _weights(model: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(model, torch.nn.Module):
        yield from sorted(model.state_dict().items())
        return
    for name, value in sorted(vars(model).items()):
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, torch.nn.Module):
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in _weights(value))
