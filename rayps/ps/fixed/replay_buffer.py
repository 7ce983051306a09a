"""What a worker keeps of its pushes until they are durable, so that it can say them again. Pure: no sockets.

A push is durable on a shard once a snapshot that holds it is kept elsewhere. When a shard is restored from its last
snapshot, what the worker pushed since then is said again from here. Memory is bounded: beyond `limit` bytes the
oldest pushes are dropped, and are lost if their shard dies before it has been saved.
"""

from __future__ import annotations

import threading
from collections import deque

from rayps.ps.fixed.transport import ShardCall


class FixedReplayBuffer:
    """The pushes of one worker that are not durable yet, by shard, oldest first; at most `limit` bytes of payload."""

    def __init__(self, shards: int, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.dropped = 0  # pushes to one shard that were forgotten before they were durable there
        self._lock = threading.Lock()  # what is kept is said again from another thread than it is pushed from
        self._by_shard: list[deque[tuple[int, list[ShardCall], int]]] = [deque() for _ in range(shards)]

    def keep(self, shard: int, step: int, asks: list[ShardCall], size: int) -> None:
        """Keep what was said to a shard for a step, `size` bytes of it the keeper's own; the payloads must not change.

        Drops the oldest pushes to make room. One that is larger than the limit is not kept, and neither is what came
        before it: a replay has no holes.
        """
        with self._lock:
            self._by_shard[shard].append((step, asks, size))
            self.bytes += size
            while self.bytes > self.limit:
                oldest = min((held[0][0], i) for i, held in enumerate(self._by_shard) if held)[1]
                self._forget(oldest)
                self.dropped += 1

    def durable(self, shard: int, mark: int) -> None:
        """Forget what need not be said again to a shard: its steps below `mark` are durable."""
        held = self._by_shard[shard]
        if held and held[0][0] < mark:
            with self._lock:
                while held and held[0][0] < mark:
                    self._forget(shard)

    def first(self, shard: int, step: int) -> int:
        """The earliest step that can be said again to a shard whose next one is `step`, were nothing kept."""
        with self._lock:
            held = self._by_shard[shard]
            return held[0][0] if held else step

    def since(self, shard: int, mark: int) -> list[tuple[int, list[ShardCall]]]:
        """What is to be said again to a shard that has everything below `mark`, in order."""
        with self._lock:
            return [(step, asks) for step, asks, _ in self._by_shard[shard] if step >= mark]

    def _forget(self, shard: int) -> None:
        _, _, size = self._by_shard[shard].popleft()
        self.bytes -= size
