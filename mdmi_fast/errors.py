"""The library's only exception class, optional packages, and how programs report errors. Everything else is TypeError or
ValueError.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
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


def one_line(error: Exception) -> str | None:
    """An error that a user can do something about, as one line; None for a fault of the program."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, (ValueError, OSError, UnsupportedError, ImportError, MemoryError)):
        lines = (line.strip() for line in str(error).splitlines())
        return "; ".join(line for line in lines if line).replace(":; ", ": ") or type(error).__name__
    if type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error):  # torch has no common kind
        return f"out of memory: {str(error).splitlines()[0]}"
    return None


def run_program(name: str, main: Callable[[], None]) -> int:
    """Run the main function of `python -m ...`; an error that a user can do something about becomes one line.

    Args:
        name: of the program, which the line begins with.
        main: parses its arguments and does the work.

    Returns:
        The exit code: 0, 1 where it failed, 130 where it was interrupted.
    """
    code, said = 1, "standard output is closed; send it to a file or to /dev/null"
    if sys.stdout is not None:
        try:
            main()
        except KeyboardInterrupt:
            code, said = 130, "interrupted"
        except Exception as error:
            message = one_line(error)
            if message is None or os.environ.get("MDMI_DEBUG") == "1":
                raise
            said = message
        else:
            return 0
    print(f"{name}: {said}", file=sys.stderr)  # noqa: T201 - it speaks for a program
    return code
