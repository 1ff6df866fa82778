"""The library's only exception class, and optional packages; everything else is TypeError or ValueError."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


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


_DISTRIBUTIONS = {"opentelemetry": "opentelemetry-api", "prometheus_client": "prometheus-client"}
"""Of packages that are installed by another name than they are imported by."""


def missing(module: str, extra: str) -> str:
    """How to get an optional package that is not there."""
    package = module.partition(".")[0]
    return f"{_DISTRIBUTIONS.get(package, package)} is not installed: pip install 'mdmi-fast[{extra}]'"


def require(module: str, extra: str, what: str) -> Any:
    """Import an optional package.

    Args:
        module: to import.
        extra: of this package that installs it.
        what: cannot do without it.

    Raises:
        UnsupportedError: it is not installed; says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError([missing(error.name or module, extra)], what) from None
