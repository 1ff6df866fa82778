"""What a command can fail with, and how it is said."""

from __future__ import annotations

from mdmi_fast.errors import UnsupportedError


class UsageError(Exception):
    """Arguments that argparse accepts one by one but that make no sense together: exit code 2."""


class InputError(Exception):
    """Lines of an input file that cannot be used, each as `file:line: reason`: printed as they are, exit code 1."""


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
