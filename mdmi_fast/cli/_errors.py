"""What a command can fail with, and how it is said."""

from __future__ import annotations


class UsageError(Exception):
    """Arguments that argparse accepts one by one but that make no sense together: exit code 2."""


class InputError(Exception):
    """Lines of an input file that cannot be used, each as `file:line: reason`: printed as they are, exit code 1."""
