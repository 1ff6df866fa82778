"""How many tokens a network can read: it is asked, by running it on few tokens and watching which tables it reads.

A configuration does not tell. `max_position_embeddings` counts rows that stand for padding in some networks, is the
length of another table in some and of none in others.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_SHORT, _LONGER = 3, 5

_Key = tuple[Any, int, int]
"""A read: the operation, the table, and how often this operation had read it before."""


class _Read(NamedTuple):
    """The rows that a table has, and the first and the last one that were asked for."""

    rows: int
    low: int
    high: int

    @property
    def fits(self) -> bool:
        return self.low >= 0 and self.high < self.rows

    def limit(self, longer: _Read) -> int | None:
        """The most tokens by this read at `_SHORT` of them and another at `_LONGER`; None if they are alike."""
        more, room = _LONGER - _SHORT, []
        if longer.high > self.high:
            room.append((self.rows - 1 - self.high) * more // (longer.high - self.high))
        if longer.low < self.low:
            room.append(self.low * more // (self.low - longer.low))
        return _SHORT + min(room) if room else None


class _Stop(Exception):  # noqa: N818 - it is no error
    """Everything is known."""


class _Watch(TorchDispatchMode):
    """Notes every read of a table.

    Args:
        network: whose parameters and buffers are tables, besides those of embeddings.
        until: after all of these reads, or one of them that does not fit, `_Stop` ends the run.
    """

    def __init__(self, network: nn.Module, until: Collection[_Key] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: dict[_Key, _Read] = {}
        self._until = set(until)
        self._count: Counter[tuple[Any, int]] = Counter()
        self._tables = {_place(tensor) for group in (network.parameters(), network.buffers()) for tensor in group}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = self._read(func, args)
        if read is not None:
            what = func, _place(args[0])
            key = *what, self._count[what]
            self._count[what] += 1
            self.reads[key] = read
            if key in self._until and (not read.fits or self._until <= self.reads.keys()):
                raise _Stop
        return func(*args, **(kwargs or {}))

    def _read(self, func: Any, args: Any) -> _Read | None:
        if func is _aten.embedding.default:
            return _by_index(len(args[0]), args[1])
        if func in (_aten.gather.default, _aten.index_select.default) and _place(args[0]) in self._tables:
            return _by_index(args[0].shape[args[1]], args[2])
        if func is _aten.index.Tensor and _place(args[0]) in self._tables:
            axis, index = next((axis, index) for axis, index in enumerate(args[1]) if index is not None)
            return _by_index(args[0].shape[axis], index)
        # A slice that takes the whole is not seen: torch leaves it out.
        if func is _aten.slice.Tensor and len(args) >= 4 and _place(args[0]) in self._tables:
            end = args[3]
            return None if end is None or end == sys.maxsize else _Read(args[0].shape[args[1]], 0, end - 1)
        return None


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _by_index(rows: int, index: Tensor) -> _Read | None:
    if not index.numel() or index.dtype == torch.bool:
        return None
    return _Read(rows, int(index.min()), int(index.max()))


@torch.no_grad()
def length_limit(network: nn.Module, run: Callable[[int], object]) -> int | None:
    """The most tokens that a network can read; None where no table ends, as where positions are computed.

    What a table would have to hold for more tokens is seen from two short runs. That it does not is seen from a run on
    one token too many, which ends at the table.

    Args:
        network: in evaluation mode.
        run: runs it on so many tokens, none of them padding and all alike.
    """
    short, longer = (_watched(network, run, length) for length in (_SHORT, _LONGER))
    if short is None or longer is None:  # a table of a few rows
        lengths = range(1, _LONGER)
        return next(length for length in lengths if _watched(network, run, length + 1) is None)
    limits = {key: read.limit(longer[key]) for key, read in short.items() if key in longer}
    growing = {key: limit for key, limit in limits.items() if limit is not None}
    for limit in sorted(set(growing.values())):
        # Of what grows at first, such as the buckets of relative distances, not everything goes on growing.
        reads = _watched(network, run, limit + 1, until=growing)
        if reads is None or not all(reads[key].fits for key in growing if key in reads):
            # Slices do not tell when to stop: one that takes the whole is not seen.
            ends = [key for key in growing if key[0] is not _aten.slice.Tensor]
            if not ends:
                return limit
            return _last(limit, network, run, ends)
    return None


def _last(most: int, network: nn.Module, run: Callable[[int], object], ends: Collection[_Key]) -> int:
    """The most tokens that fit, of at most so many: a network may refuse what its tables still hold."""
    least = _LONGER
    length = most
    while least < most:
        if _watched(network, run, length, until=ends) is not None:
            least = length
        else:
            most = length - 1
        length = (least + most + 1) // 2
    return most


def _watched(
    network: nn.Module, run: Callable[[int], object], length: int, until: Collection[_Key] = ()
) -> dict[_Key, _Read] | None:
    """The reads of a run; None if the network cannot read so many tokens."""
    watch = _Watch(network, until)
    try:
        with watch:
            run(length)
    except _Stop:
        pass
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, ValueError, AssertionError):
        return None
    return watch.reads
