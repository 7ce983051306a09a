"""Where a worker's shards are, and where they are after they were replaced."""

from __future__ import annotations

import threading

from rayps.core.errors import PeerLost, PeerTimeout


class Addresses:
    """Where the shards are, as told by the driver; a lost one's new address is waited for."""

    def __init__(self, addresses: list[str] | None = None) -> None:
        self._addresses = addresses or []
        self._news = threading.Condition()
        self._changes = [0] * len(self._addresses)
        self._seen = [0] * len(self._addresses)
        self._closed = False

    def current(self, shard: int) -> str:
        """Where a shard is."""
        return self._addresses[shard]

    def change(self, shard: int, address: str) -> None:
        """A shard is elsewhere now."""
        with self._news:
            self._addresses[shard] = address
            self._changes[shard] += 1
            self._news.notify_all()

    def unseen(self) -> list[int]:
        """The shards whose new address nobody has asked for."""
        with self._news:
            return [i for i, count in enumerate(self._changes) if count > self._seen[i]]

    def changed(self, shard: int, timeout: float) -> str:
        """Wait for a shard's new address.

        Raises:
            PeerTimeout: it was not replaced within `timeout` seconds.
            PeerLost: this worker was ended meanwhile.
        """
        with self._news:
            if not self._news.wait_for(lambda: self._closed or self._changes[shard] > self._seen[shard], timeout):
                raise PeerTimeout(
                    f"shard-{shard} died and was not replaced within {timeout:g} s: raise timeout",
                    peer=f"shard-{shard}",
                    seconds=timeout,
                )
            if self._closed:
                raise PeerLost(f"shard-{shard} died and this worker was ended", peer=f"shard-{shard}")
            self._seen[shard] = self._changes[shard]
            return self._addresses[shard]

    def close(self) -> None:
        """Nobody waits any more."""
        with self._news:
            self._closed = True
            self._news.notify_all()
