"""How many threads the C++ backend uses: one number, below every room that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_threads: int | None = None


def set_num_threads(n: int) -> None:
    """Sets the number of threads of the C++ backend for this process.

    Args:
        n: at least 1.

    Raises:
        TypeError: n is not an int.
        ValueError: n is less than 1, or 2^31 and more.

    Numerics:
        Results do not depend on the number of threads.

    Example:
        >>> import mdmi_fast
        >>> before = mdmi_fast.get_num_threads()
        >>> mdmi_fast.set_num_threads(1)
        >>> mdmi_fast.get_num_threads()
        1
        >>> mdmi_fast.set_num_threads(before)
    """
    global _threads
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"set_num_threads: n must be an int, got {type(n).__name__}")
    if n < 1:
        raise ValueError(f"set_num_threads: n must be at least 1, got {n}")
    if n >= 2**31:
        raise ValueError(f"set_num_threads: n must be at most {2**31 - 1}, got {n}")
    _threads = n


def get_num_threads() -> int:
    """The number last set, else torch's own (`torch.get_num_threads()`)."""
    return torch.get_num_threads() if _threads is None else _threads


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute with one thread, the C++ backend with as many as before: torch's sums depend on the number, ours
    do not.
    """
    global _threads
    torch_threads, own = torch.get_num_threads(), _threads
    _threads = get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        _threads = own
