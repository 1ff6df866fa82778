"""What was computed for a context, kept: mutual information and selections, in memory, on disk and in Redis (row S12).

A key is a hash of everything that an answer depends on: the library's version, the model's weights, the settings of
the policy or source with the estimator's weights, the tokens, the mask, the padding, and, where they are read, the
marginals, which differ with the tokens that `decode` suppresses. An entry carries a checksum; one that does not agree
with it is dropped and counts as a miss. No fault of a store ever fails a decode.

Worth it where an answer is expensive: probing takes hundreds of forward passes, a hit 20 to 200 microseconds. The
selection by a small estimator takes hardly longer than a hit (benchmarks/results/cache.csv), and the states of sampled
sequences do not recur: computing again is faster. So nothing is cached unless it is wrapped here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from mdmi_fast.decode.policies.base import Step, checked_pass
from mdmi_fast.decode.policies.mutual_information import (
    MIBudget,
    MISource,
    MIThreshold,
    Probing,
    Shuffled,
    pairwise_mi,
)
from mdmi_fast.errors import UnsupportedError
from mdmi_fast.files import cache_folder, replace_file
from mdmi_fast.models import MaskedModel
from mdmi_fast.models.identity import describe_model, identity
from mdmi_fast.ops import Selection, TokenStats

_CHECKSUM = 16
"""Bytes of the BLAKE2b in front of an entry."""


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
        try:
            import filelock

            self.folder = cache_folder() / "mi" if folder is None else Path(folder)
        except ImportError as error:
            raise _missing_extra(error, "DiskStore") from None
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
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise _missing_extra(error, "RedisStore") from None
        self.lifetime = _at_least_one("RedisStore", "lifetime", lifetime)
        self.retry_after = retry_after
        self._client = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
        )
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


@dataclasses.dataclass
class Counts:
    """What one store was asked for; read by the metrics."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0


class Cache:
    """Stores behind each other, the fastest first; what a later one has is copied to those before it.

    Args:
        *stores: one at least.

    Attributes:
        counts: by the stores' names.

    Example:
        >>> cache = Cache(MemoryStore(max_bytes=1000))
        >>> cache.put("key", b"answer")
        >>> cache.get("key"), cache.get("other"), cache.counts["memory"].hits
        (b'answer', None, 1)
    """

    def __init__(self, *stores: Store) -> None:
        if not stores:
            raise ValueError("Cache: needs one store at least, got none")
        self.stores = stores
        self.counts = {store.name: Counts() for store in stores}

    def get(self, key: str) -> bytes | None:
        for depth, store in enumerate(self.stores):
            counts, start = self.counts[store.name], time.perf_counter()
            entry = store.get(key)
            payload = None if entry is None else _checked(entry)
            if entry is not None and payload is None:
                counts.corrupt += 1
                store.drop(key)
            counts.seconds += time.perf_counter() - start
            if payload is not None:
                counts.hits += 1
                counts.read_bytes += len(payload)
                for faster in self.stores[:depth]:
                    self._put(faster, key, payload)
                return payload
            counts.misses += 1
        return None

    def put(self, key: str, payload: bytes) -> None:
        for store in self.stores:
            self._put(store, key, payload)

    def drop(self, key: str) -> None:
        for store in self.stores:
            self.counts[store.name].corrupt += 1
            store.drop(key)

    def _put(self, store: Store, key: str, payload: bytes) -> None:
        start = time.perf_counter()
        store.put(key, hashlib.blake2b(payload, digest_size=_CHECKSUM).digest() + payload)
        self.counts[store.name].written_bytes += len(payload)
        self.counts[store.name].seconds += time.perf_counter() - start


class CachedMI:
    """A source of mutual information whose answers are kept; itself a source, for any policy that takes one.

    Args:
        source: an estimator (a torch module) or `Probing`.
        model: the model that is decoded; its weights are hashed here, once.
        cache: where answers lie.

    Raises:
        TypeError: for a source that cannot be described by its settings and weights.

    Example:
        >>> from mdmi_fast import MIBudget, Probing, decode
        >>> from mdmi_fast.models.exact import JointTable
        >>> model, cache = JointTable(torch.tensor([[0.6, 0.0], [0.0, 0.4]])), Cache(MemoryStore())
        >>> policy = MIBudget(CachedMI(Probing(), model, cache), gamma=0.1, entropy_weight=0.0)
        >>> for _ in range(2):
        ...     result = decode(model, torch.tensor([[2, 2]]), policy)
        >>> cache.counts["memory"].hits > 0
        True
    """

    needs_step: ClassVar[Literal[True]] = True

    def __init__(self, source: MISource, model: MaskedModel, cache: Cache) -> None:
        self.source, self.cache = source, cache
        self._keys = _Keys("mi", source, model)

    def __repr__(self) -> str:
        return f"CachedMI({self.source!r})"

    def __call__(self, hidden: Tensor, mask: Tensor, step: int) -> Tensor:
        n = mask.shape[1]
        mi = torch.zeros(len(mask), n, n)
        reads_stats = getattr(self.source, "needs_step", False) and not isinstance(self.source, Probing)
        stats = getattr(step, "stats", None) if reads_stats else None
        keys, missing = self._keys(mask, step, hidden, stats), []
        positions = [row.nonzero().squeeze(-1) for row in mask.cpu()]
        for row, (key, at) in enumerate(zip(keys, positions, strict=True)):
            payload = self.cache.get(key)
            if payload is not None and len(payload) != 4 * len(at) ** 2:
                self.cache.drop(key)
                payload = None
            if payload is None:
                missing.append(row)
            elif len(at):
                values = torch.frombuffer(bytearray(payload), dtype=torch.float32)
                mi[row, at.unsqueeze(1), at] = values.view(len(at), len(at))
        if missing:
            found = pairwise_mi(self.source, hidden, _only(mask, missing), step).detach().float().cpu()
            for row in missing:
                at = positions[row]
                mi[row] = found[row]
                self.cache.put(keys[row], found[row][at.unsqueeze(1), at].numpy().tobytes())
        return mi.to(mask.device)


class CachedPolicy:
    """A policy whose selections are kept; for rules that read mutual information, all others cost less than a look-up.

    Args:
        policy: `MIBudget` or `MIThreshold`, whose choice depends on nothing but the context.
        model: the model that is decoded; its weights are hashed here, once.
        cache: where selections lie.

    Raises:
        TypeError: for another policy, or one whose source cannot be described by its settings and weights.
    """

    def __init__(self, policy: MIBudget | MIThreshold, model: MaskedModel, cache: Cache) -> None:
        if not isinstance(policy, MIBudget | MIThreshold):
            raise TypeError(f"CachedPolicy: policy must be MIBudget or MIThreshold, got {type(policy).__name__}")
        self.policy, self.cache = policy, cache
        self._keys = _Keys("selection", policy, model)

    def __repr__(self) -> str:
        return f"CachedPolicy({self.policy!r})"

    def select(self, stats: TokenStats, hidden: Any, mask: Any, step: int) -> Selection:
        stats, hidden, mask = checked_pass("CachedPolicy", stats, hidden, mask)
        if getattr(step, "notes", None) is not None:  # reasons are asked for, and only computing gives them
            return self.policy.select(stats, hidden, mask, step)
        n, width = mask.shape[1], -(-mask.shape[1] // 8)
        selected, spent = torch.zeros(mask.shape, dtype=torch.bool), torch.zeros(len(mask), dtype=torch.float64)
        keys, missing = self._keys(mask, step, hidden, stats), []
        for row, key in enumerate(keys):
            payload = self.cache.get(key)
            if payload is not None and len(payload) != width + 8:
                self.cache.drop(key)
                payload = None
            if payload is None:
                missing.append(row)
            else:
                bits = np.unpackbits(np.frombuffer(payload, np.uint8, count=width), count=n)
                selected[row] = torch.from_numpy(bits.astype(bool))
                spent[row] = float(np.frombuffer(payload, np.float64, offset=width)[0])
        if missing:
            found = self.policy.select(stats, hidden, _only(mask, missing), step)
            for row in missing:
                selected[row], spent[row] = found.selected[row].cpu(), found.spent[row].cpu()
                self.cache.put(keys[row], np.packbits(selected[row].numpy()).tobytes() + spent[row].numpy().tobytes())
        return Selection(selected.to(mask.device), spent.to(mask.device))


class _Keys:
    """The keys of a pass, one a sequence."""

    def __init__(self, kind: str, settings: object, model: MaskedModel) -> None:
        from mdmi_fast import __version__

        # Of a network whose logits are shifted or not, the weights are the same.
        model_text = f"{identity(model)} {getattr(model, 'shift', None)}"
        self._what = f"{__version__} {kind} {model_text} {describe(settings)}"
        self._never = _never(model)

    def __call__(self, mask: Tensor, step: int, hidden: Tensor | None, stats: TokenStats | None) -> list[str]:
        tokens, visible = getattr(step, "tokens", None), getattr(step, "attention_mask", None)
        if not isinstance(step, Step) or tokens is None:
            raise ValueError("cache: step must be a Step with tokens, got a bare number")
        if hidden is None:
            raise ValueError("cache: hidden must be [B, N, D], got None")
        # A processor and an accelerator, or two precisions, round differently.
        what = f"{self._what} {hidden.dtype} {hidden.device.type}"
        # What is decoded may write stop tokens that the model never writes by itself.
        permitted = self._never - _never(step.model)
        what += f" permitting {sorted(permitted)}" if step.model is not None and permitted else ""
        head = hashlib.blake2b(what.encode(), digest_size=20)
        visible = torch.ones_like(mask) if visible is None else visible
        read = () if stats is None else (stats.entropy, stats.confidence, stats.margin)
        marginals = (field.masked_fill(~mask, 0.0) for field in read)
        rows = zip(*(part.cpu().contiguous().numpy() for part in (tokens, mask, visible, *marginals)), strict=True)
        keys = []
        for parts in rows:
            key = head.copy()
            for part in parts:
                key.update(part.tobytes())
            keys.append(key.hexdigest())
        return keys


def _never(model: MaskedModel | None) -> set[int]:
    return {int(token) for token in getattr(model, "never", ())}


def describe(value: object) -> str:
    """Settings and weights of a policy or source as text: equal for equal answers, different for different ones.

    Raises:
        TypeError: for an object that may answer differently from one that looks the same.
    """
    if isinstance(value, torch.nn.Module):
        configuration: Any = getattr(value, "configuration", dict)()
        return f"{type(value).__qualname__} {configuration} {describe_model(value)}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, Shuffled):  # which draws
        fields = (f"{field.name}={describe(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    raise TypeError(f"describe: cannot tell by its settings what {type(value).__name__} will answer")


def _only(mask: Tensor, rows: list[int]) -> Tensor:
    """The mask with nothing masked in all other rows: they cost nothing, and no tensor has to be cut."""
    keep = torch.zeros(len(mask), 1, dtype=torch.bool)
    keep[rows] = True
    return mask & keep.to(mask.device)


def _checked(entry: bytes) -> bytes | None:
    """What an entry holds, or None if its checksum is another."""
    checksum, payload = entry[:_CHECKSUM], entry[_CHECKSUM:]
    return payload if hashlib.blake2b(payload, digest_size=_CHECKSUM).digest() == checksum else None


def _once(message: str) -> Any:
    """A function that warns with the message and an error, the first time it is called."""
    said = threading.Lock()

    def say(error: Exception) -> None:
        if said.acquire(blocking=False):
            warnings.warn(f"{message} ({type(error).__name__}: {error})", stacklevel=2)

    return say


def _missing_extra(error: ImportError, what: str) -> UnsupportedError:
    return UnsupportedError([f"{error.name} is not installed: pip install 'mdmi-fast[cache]'"], what)


def _at_least_one(owner: str, name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {value}")
    return value
