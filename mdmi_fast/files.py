"""How files are written and read: whole or untouched, refused before the work where they cannot be written."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, TextIOWrapper
from pathlib import Path
from typing import IO, Any, NoReturn

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that only writing can meet, and that do not name the file."""


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Give a name to write to; what was written there becomes `path` if no error ends the block.

    The name is `.NAME.RANDOM.SUFFIX` of NAME.SUFFIX in the folder of `path`, which is made if it does not exist. It is
    left behind only by a process that was killed. A link stays a link: the file that it points to is replaced, and keeps
    its permissions. A pipe or a device such as /dev/stdout is not replaced: the bytes are written into it in the end.

    Args:
        path: of the file.

    Raises:
        OSError: `path` is a folder or something else that is no file, or cannot be written; it names `path`.

    Example:
        >>> path = Path(tempfile.mkdtemp()) / "answer.txt"
        >>> with replace_file(path) as temporary:
        ...     characters = temporary.write_text("42")
        >>> path.read_text()
        '42'
    """
    if _is_stream(path):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder) / path.name
            with _naming(path, temporary):
                yield temporary
                with _open_stream(path) as stream, temporary.open("rb") as file:
                    shutil.copyfileobj(file, stream)
        return
    target = Path(os.path.realpath(path))
    temporary = _beside(target, path.suffix)
    try:
        with _naming(path, temporary):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            if target.exists():
                shutil.copymode(target, temporary)
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def open_output(path: Path) -> Iterator[IO[str]]:
    """A text file to write to line by line, which becomes `path` as in `replace_file`; a pipe or a device gets every
    line when it is flushed.

    Args:
        path: of the file.

    Raises:
        OSError: as `replace_file`.
    """
    if _is_stream(path):
        with _naming(path, path), TextIOWrapper(_open_stream(path), encoding="utf-8") as file:
            yield file
    else:
        with replace_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            yield file


def check_file(path: Path | None) -> None:
    """Refuse a path that `replace_file` could not write, before the work whose result belongs there.

    Args:
        path: of the file; None: nothing is to be written.

    Raises:
        OSError: naming `path` and the reason.
    """
    if path is None or _is_stream(path):
        return
    target = Path(os.path.realpath(path))
    _check_room(path, target.parent, target.name)


def check_folder(path: Path | None) -> None:
    """Refuse a folder in which no file could be written, before the work whose results belong there.

    Args:
        path: of the folder, which need not exist; None: nothing is to be written.

    Raises:
        OSError: naming `path` and the reason.
    """
    if path is not None:
        _check_room(path, Path(os.path.realpath(path)), "file")


def same_file(first: Path, second: Path) -> bool:
    """Whether two paths name one file that would be replaced; pipes and devices take the output of several."""
    return os.path.realpath(first) == os.path.realpath(second) and not _is_stream(first)


def _check_room(path: Path, folder: Path, name: str) -> None:
    """Refuse a folder in which a file of that name cannot be made, itself or its nearest parent that exists."""
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        _refuse(path, errno.ENOTDIR, "is no folder" if nearest == folder else f"cannot be made, {nearest} is no folder")
    probe = _beside(nearest / name, path.suffix)
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        _refuse(path, error.errno, error.strerror)


def _is_stream(path: Path) -> bool:
    """Whether bytes can only be written into `path`: a pipe, a device, or an open file of this process by its number.

    Raises:
        OSError: it can neither be written into nor be replaced.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False  # the folder is looked at later
    if stat.S_ISDIR(mode):
        _refuse(path, errno.EISDIR, "is a folder, and a file is to be written there")
    descriptor = _descriptor(path)
    if descriptor is None and (stat.S_ISBLK(mode) or stat.S_ISSOCK(mode)):
        _refuse(path, errno.EINVAL, "is a socket or a disk, and a file is to be written there")
    readable_only = descriptor is not None and _is_open_for_reading_only(descriptor)
    if readable_only or not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        _refuse(path, errno.EACCES, "may not be written")
    return descriptor is not None or not stat.S_ISREG(mode)


def _descriptor(path: Path) -> int | None:
    """The number of an open file of this process that a path such as /dev/stdout or /dev/fd/3 stands for."""
    while True:
        folder = os.path.realpath(path.parent)
        if folder in ("/dev/fd", f"/proc/{os.getpid()}/fd") and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = Path(folder) / path.readlink()


def _is_open_for_reading_only(descriptor: int) -> bool:
    import fcntl  # where there are such paths there is this module

    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def _open_stream(path: Path) -> BufferedWriter:
    descriptor = _descriptor(path)
    if descriptor is None:
        return path.open("wb")
    # Not by the path, which would be opened anew, emptied and written from its beginning.
    if sys.stdout is not None:
        sys.stdout.flush()
    return os.fdopen(os.dup(descriptor), "wb")


@contextmanager
def _naming(path: Path, temporary: Path) -> Iterator[None]:
    """Let an error of writing name the file that was asked for."""
    try:
        yield
    except OSError as error:
        unnamed = error.filename is None and error.errno in FULL
        if not unnamed and str(error.filename) != str(temporary):
            raise
        _refuse(path, error.errno, error.strerror)


def _beside(target: Path, suffix: str) -> Path:
    """A new name next to a file, with the suffix that was asked for, which a link need not share with its file; short
    enough for every file system, which count bytes.
    """
    start, end = (os.fsencode(text)[:50].decode(errors="ignore") for text in (target.name, suffix))
    return target.with_name(f".{start}.{secrets.token_hex(8)}{end}")


def _refuse(path: Path, number: int | None, reason: str | None) -> NoReturn:
    raise OSError(number or errno.EIO, reason, str(path)) from None


def read_json(path: Path, otherwise: str = "not JSON") -> Any:
    """The value that a JSON file holds.

    Args:
        path: of the file, in UTF-8 with or without a byte order mark.
        otherwise: what is said of a file that holds no JSON.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no JSON; the message names it and the reason.
    """
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    problem: object = wrong_encoding(text)
    if problem is None:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:  # thousands of brackets
            problem = error
    raise ValueError(f"{path}: {otherwise}: {problem}")


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    Args:
        path: of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such text; the message names it and the place.
    """
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    problem = wrong_encoding(text)
    if problem is not None:
        raise ValueError(f"{path}: {problem}")
    return text


def wrong_encoding(text: str) -> str | None:
    """Why a text is not in UTF-8, or None where it is.

    Args:
        text: decoded as UTF-8 with errors="surrogateescape".
    """
    if text.startswith(("\udcff\udcfe", "\udcfe\udcff")) or "\0" in text[:4]:
        return "looks like UTF-16; save it as UTF-8"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[: error.start].encode().rpartition(b"\n")
        line = text.count("\n", 0, error.start)
        where = f"byte {len(before[2]) + 1}" + (f" of line {line + 1}" if line else "")
        return f"not UTF-8: {where} is 0x{ord(text[error.start]) - 0xDC00:02x}"
    return None


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
