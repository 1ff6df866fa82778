"""The library's only exception class; everything else is TypeError or ValueError."""

from __future__ import annotations

from collections.abc import Sequence


class UnsupportedError(RuntimeError):
    """Nothing here can do what was asked; `reasons` says why, one string a reason.

    Example:
        >>> error = UnsupportedError(["triton: needs tensors on a GPU, got cpu"], "entropy")
        >>> print(error)
        entropy is not supported:
          triton: needs tensors on a GPU, got cpu
        >>> error.reasons
        ['triton: needs tensors on a GPU, got cpu']
    """

    def __init__(self, reasons: Sequence[str], what: str = "this call") -> None:
        self.reasons = list(reasons)
        self.what = what
        super().__init__("\n  ".join([f"{what} is not supported:", *self.reasons]))

    def __reduce__(self) -> tuple[type[UnsupportedError], tuple[list[str], str]]:
        return type(self), (self.reasons, self.what)
