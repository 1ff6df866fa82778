"""Stores behind each other, and what they were asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import time

from mdmi_fast.cache.stores import Store

_CHECKSUM = 16
"""Bytes of the BLAKE2b in front of an entry."""


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
        >>> from mdmi_fast.cache import Cache, MemoryStore
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


def _checked(entry: bytes) -> bytes | None:
    """What an entry holds, or None if its checksum is another."""
    checksum, payload = entry[:_CHECKSUM], entry[_CHECKSUM:]
    return payload if hashlib.blake2b(payload, digest_size=_CHECKSUM).digest() == checksum else None
