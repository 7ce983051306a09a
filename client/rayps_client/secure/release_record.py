"""What a client has released in secure rounds, on its own disk: written before it is sent.

A round's serial number is used once, and its secrets are in memory alone. A client that is killed within a round and
started again has lost them: it takes no further part in that round, and so cannot release a second kind of share. The
record also refuses a second vector of one update: if the job returns to a checkpoint and asks for the same round from
the same parameters, the sums over two sets of clients would differ by the update of one client.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection
from pathlib import Path

from rayps_client.errors import Conflict

_FILE = "released.json"
_KEPT = 1000  # updates that are remembered


class ReleaseRecord:
    """The record of one client in one job."""

    def __init__(self, folder: Path) -> None:
        """Read the record in `folder`, the client's own folder."""
        self._path = folder / _FILE
        try:
            found = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            found = {}
        self._serial: int = found.get("serial", 0)  # the newest round that was begun
        self._seeds: list[int] = found.get("seeds", [])  # clients about whose seeds shares were released in it
        self._keys: list[int] = found.get("keys", [])  # the same about mask keys
        self._updates: list[str] = found.get("updates", [])  # updates of which a masked vector was sent

    def begin(self, serial: int) -> None:
        """Record that round `serial` begins, before its first message is sent.

        Raises:
            Conflict: this round or a newer one was begun before, so that its secrets are lost.
        """
        if serial <= self._serial:
            raise Conflict(
                f"order {serial} was begun before, and its keys were lost when this client ended: it sits this round "
                "out",
                code="begun",
            )
        self._serial, self._seeds, self._keys = serial, [], []
        self._save()

    def send_update(self, serial: int, update: str) -> None:
        """Record that a masked vector is sent. `update` names what it was trained from: the round and the parameters.

        Raises:
            Conflict: a masked vector of this update was sent in an earlier order.
        """
        self._check(serial)
        if update in self._updates:
            raise Conflict(
                "this client has sent an update of this round from these parameters before: a second one would show "
                "its update in the difference of two sums",
                code="repeated",
            )
        self._updates = [*self._updates[1 - _KEPT :], update]
        self._save()

    def release(self, serial: int, seeds: Collection[int], keys: Collection[int]) -> None:
        """Record about whose seeds and about whose mask keys shares are released, before they are sent.

        Raises:
            Conflict: shares were released in this round before, or both kinds are asked for about one client.
        """
        self._check(serial)
        if self._seeds or self._keys or set(seeds) & set(keys):
            raise Conflict(
                f"order {serial} asks for a second kind of share about a client: this client refuses", code="refused"
            )
        self._seeds, self._keys = sorted(seeds), sorted(keys)
        self._save()

    def _check(self, serial: int) -> None:
        if serial != self._serial:
            raise Conflict(f"order {serial} is not the one that this client has begun", code="begun")

    def _save(self) -> None:
        facts = {"serial": self._serial, "seeds": self._seeds, "keys": self._keys, "updates": self._updates}
        part = self._path.with_name(f".{_FILE}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(facts, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path)
