"""Where entries lie: memory, a folder, a Redis server."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

from mdmi_fast.errors import require
from mdmi_fast.files import cache_folder, replace_file


class Store(Protocol):
    """Where entries lie. A store that cannot be reached has nothing and says so once; it raises nothing."""

    name: str

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, entry: bytes) -> None: ...

    def drop(self, key: str) -> None: ...


class MemoryStore:
    """Entries in this process; the least recently used go when there is no room. Safe for threads.

    Args:
        max_bytes: of keys and entries together.
    """

    name = "memory"

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self.max_bytes = _at_least_one("MemoryStore", "max_bytes", max_bytes)
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def put(self, key: str, entry: bytes) -> None:
        with self._lock:
            self._forget(key)
            self._entries[key] = entry
            self._bytes += len(key) + len(entry)
            while self._bytes > self.max_bytes:
                self._forget(next(iter(self._entries)))

    def drop(self, key: str) -> None:
        with self._lock:
            self._forget(key)

    def _forget(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= len(key) + len(entry)


class DiskStore:
    """One file an entry in a local folder that several processes may share.

    A file is whole or absent. When this process has written a sixteenth of `max_bytes`, one process at a time deletes
    the files longest unused until fifteen sixteenths are left: so P processes hold at most max_bytes (15 + P) / 16.

    Args:
        folder: made if it does not exist; None: `mi` in MDMI_CACHE, or else in the user's cache folder.
        max_bytes: of all files together.

    Raises:
        UnsupportedError: filelock, or platformdirs where the folder is not named, is not installed.
    """

    name = "disk"

    def __init__(self, folder: str | Path | None = None, max_bytes: int = 2**30) -> None:
        self.max_bytes = _at_least_one("DiskStore", "max_bytes", max_bytes)
        filelock = require("filelock", "cache", "DiskStore")
        if folder is None:
            require("platformdirs", "cache", "DiskStore without a folder")
        self.folder = cache_folder() / "mi" if folder is None else Path(folder)
        self._lock = filelock.FileLock(self.folder / ".lock", timeout=0)
        self._busy = filelock.Timeout
        self._unchecked = self.max_bytes  # so the first write looks at what is already there
        self._say_once = _once(f"mdmi_fast: the cache folder {self.folder} cannot be used, decoding goes on without it")

    def get(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            entry = path.read_bytes()
            os.utime(path)  # the time of use is what eviction goes by
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._say_once(error)
            return None
        return entry

    def put(self, key: str, entry: bytes) -> None:
        try:
            with replace_file(self._path(key)) as temporary:
                temporary.write_bytes(entry)
            self._unchecked += len(entry)
            if self._unchecked > self.max_bytes // 16:
                self._evict()
        except OSError as error:
            self._say_once(error)

    def drop(self, key: str) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            self._say_once(error)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def _evict(self) -> None:
        try:
            with self._lock:
                self._unchecked = 0
                files = [(entry.stat(), entry) for entry in self.folder.glob("??/*") if entry.exists()]
                used = sum(stat.st_size for stat, _ in files)
                for stat, entry in sorted(files, key=lambda file: file[0].st_mtime_ns):
                    if used <= self.max_bytes * 15 // 16:
                        break
                    entry.unlink(missing_ok=True)
                    used -= stat.st_size
        except (self._busy, FileNotFoundError):
            return  # another process is at it


class RedisStore:
    """Entries in a Redis server that several machines may share. The server's own maxmemory bounds them.

    A server that does not answer in time is left alone for `retry_after` seconds: each request meanwhile is a miss.

    Args:
        url: such as "redis://127.0.0.1:6379/0" or "unix:///run/redis.sock".
        timeout: seconds to wait for a connection and for an answer.
        lifetime: seconds after which the server forgets an entry.
        retry_after: seconds.

    Raises:
        UnsupportedError: redis is not installed.
        ValueError: not a URL of Redis.
    """

    name = "redis"

    def __init__(
        self, url: str, *, timeout: float = 0.05, lifetime: int = 7 * 24 * 3600, retry_after: float = 30.0
    ) -> None:
        redis = require("redis", "cache", "RedisStore")
        once = require("redis.retry", "cache", "RedisStore").Retry(redis.backoff.NoBackoff(), 0)
        self.lifetime = _at_least_one("RedisStore", "lifetime", lifetime)
        self.retry_after = retry_after
        try:
            self._client = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=once)
        except ValueError as error:
            raise ValueError(f"RedisStore: url must be a URL of Redis, got {url!r}: {error}") from error
        self._error = redis.RedisError
        self._dead_until = 0.0
        self._say_once = _once(
            f"mdmi_fast: Redis does not answer, decoding goes on without it and asks again every {retry_after:g} s"
        )

    def get(self, key: str) -> bytes | None:
        entry: bytes | None = self._ask("get", self._named(key))
        return entry

    def put(self, key: str, entry: bytes) -> None:
        self._ask("set", self._named(key), entry, ex=self.lifetime)

    def drop(self, key: str) -> None:
        self._ask("delete", self._named(key))

    def _named(self, key: str) -> str:
        return f"mdmi_fast:{key}"

    def _ask(self, command: str, *arguments: Any, **options: Any) -> Any:
        if time.monotonic() < self._dead_until:
            return None
        try:
            return getattr(self._client, command)(*arguments, **options)
        except (self._error, OSError) as error:
            self._dead_until = time.monotonic() + self.retry_after
            self._say_once(error)
            return None


def _once(message: str) -> Any:
    """A function that warns with the message and an error, the first time it is called."""
    said = threading.Lock()

    def say(error: Exception) -> None:
        if said.acquire(blocking=False):
            warnings.warn(f"{message} ({type(error).__name__}: {error})", stacklevel=2)

    return say


def _at_least_one(owner: str, name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {value}")
    return value
