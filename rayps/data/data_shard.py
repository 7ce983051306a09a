"""Tell an iterable data set which part of its items to yield: `rayps.data.shard()` and torch's `get_worker_info()`.

torch keeps one worker info for a process. Here several ranks may be threads of one process. Therefore the info that
torch returns looks up the values of the thread that asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.utils.data._utils import worker as torch_worker


class DataShard(NamedTuple):
    """The part of an iterable data set that one reader yields: number `rank` of `size` parts.

    Readers are the loader processes of all workers. A worker without loader processes is one reader.
    """

    rank: int
    size: int


_ALONE = DataShard(0, 1)


class _Here(threading.local):
    shard: DataShard | None = None
    seed = 0
    asked = False  # whether the data set has asked for its shard


_here = _Here()
_lock = threading.Lock()
_open = 0  # the number of threads that read now


def shard() -> DataShard:
    """Return which part of the items an IterableDataset must yield in its `__iter__`, under `shard="own"`.

    Anywhere else it is part 0 of 1: all items.

    Example:
        class Lines(torch.utils.data.IterableDataset):
            def __iter__(self):
                here = rayps.data.shard()
                yield from itertools.islice(open("lines.txt"), here.rank, None, here.size)
    """
    _here.asked = True
    return _here.shard or _ALONE


class _Info:
    """What `torch.utils.data.get_worker_info()` returns while a data set is read: a `WorkerInfo` of this thread."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def id(self) -> int:
        """The number of the reader."""
        return shard().rank

    @property
    def num_workers(self) -> int:
        """The number of readers."""
        return shard().size

    @property
    def seed(self) -> int:
        """The seed of the reader in this epoch."""
        return _here.seed + shard().rank


class Reading:
    """Makes `shard()` return one reader's shard inside `with reading.turn():`."""

    def __init__(self, found: DataShard, seed: int, dataset: Any) -> None:
        """Set the reader's shard, and the seed from which readers derive their own."""
        self.asked = False
        self._shard, self._seed, self._info = found, seed % 2**62, _Info(dataset)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return this reader's shard from `shard()` and `get_worker_info()`, in this thread and inside the block."""
        global _open
        before = _here.shard, _here.seed, _here.asked
        _here.shard, _here.seed, _here.asked = self._shard, self._seed, False
        with _lock:
            _open += 1
            torch_worker._worker_info = self._info  # type: ignore[assignment]
        try:
            yield
        finally:
            self.asked = self.asked or _here.asked
            _here.shard, _here.seed, _here.asked = before
            with _lock:
                _open -= 1
                if not _open:
                    torch_worker._worker_info = None
