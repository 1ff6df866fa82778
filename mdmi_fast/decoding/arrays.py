"""The one place where arrays of other libraries become tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack


def as_tensor(array: Any) -> Tensor:
    """A tensor of what a foreign loop hands over, on the device where it lies, sharing memory where it can.

    Args:
        array: a tensor, a numpy array, or any object that speaks DLPack (JAX, CuPy, an engine's own buffers).

    Raises:
        TypeError: for anything else.

    Example:
        >>> import numpy as np
        >>> as_tensor(np.array([[True, False]]))
        tensor([[ True, False]])
    """
    if isinstance(array, Tensor):
        return array
    if isinstance(array, np.ndarray):
        # Tensors have no strides below 0, as those of array[::-1], and none that may only be read.
        usable = array.flags.writeable and min(array.strides, default=0) >= 0
        return torch.from_numpy(array if usable else array.copy())
    if hasattr(array, "__dlpack__"):
        return from_dlpack(array)
    raise TypeError(f"expected a tensor, a numpy array or an object with __dlpack__, got {type(array).__name__}")
