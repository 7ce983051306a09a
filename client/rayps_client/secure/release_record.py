"""What a client has released in secure rounds, on its own disk: written before it is sent.

A round's serial number is used once, and its secrets are in memory alone. A client that is killed within a round and
started again has lost them: it takes no further part in that round, and so cannot release a second kind of share. The
record also refuses a second vector of the same numbers (`rayps_client.secure.sum_names`): the sums over two sets of
clients would differ by the number of one client.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection
from pathlib import Path

from rayps_client.errors import Conflict

_FILE = "released.json"
_KEPT = 1000  # names of each kind that are remembered


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
        self._updates: list[str] = found.get("updates", [])  # names of what was sent under masks

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
        """Record that a masked vector is sent. `update` names its numbers (`sum_names.name_vector`).

        Raises:
            Conflict: a masked vector of this name was sent in an earlier order.
        """
        self._check(serial)
        if not self.add_once(update):
            raise Conflict(
                "this client has sent these numbers from the same parameters before: a second sum would show them by "
                "its difference from the first",
                code="repeated",
            )

    def add_once(self, name: str) -> bool:
        """Record a name of what is about to be sent under masks. Return False if it was recorded before.

        Of each kind, the first word of a name, the newest are remembered.
        """
        if name in self._updates:
            return False
        kind = name.partition(" ")[0]
        same = [each for each in self._updates if each.partition(" ")[0] == kind]
        old = set(same[: max(0, len(same) + 1 - _KEPT)])
        self._updates = [*(each for each in self._updates if each not in old), name]
        self._save()
        return True

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
