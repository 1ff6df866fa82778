"""Files that are either whole or absent, and where those lie that the library makes for a user."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Give a name in the folder of `path` to write to; what was written there becomes `path` if no error ends the block.

    The name is `.NAME.RANDOM.SUFFIX` of NAME.SUFFIX. It is left behind only by a process that was killed.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "answer.txt"
        >>> with replace_file(path) as temporary:
        ...     characters = temporary.write_text("42")
        >>> path.read_text()
        '42'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where fetched models, trained estimators and kept answers lie: MDMI_CACHE, or else in the user's cache folder.

    Raises:
        ImportError: without platformdirs, if MDMI_CACHE does not name a folder.
    """
    named = os.environ.get("MDMI_CACHE")
    if named:
        return Path(named)
    try:
        from platformdirs import user_cache_path
    except ImportError:
        raise ImportError(
            "the user's cache folder needs platformdirs: pip install platformdirs, or name a folder in MDMI_CACHE",
            name="platformdirs",
        ) from None
    return user_cache_path("mdmi_fast")
