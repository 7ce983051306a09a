"""The life of a row: who is let in, who must go, and how many may stay. Pure; every decision is a function of what
was pushed, so that a segment and its copies decide the same.

A table's `policy` is plain data: {"admit": 3, "probability": 0.1, "evict": "lfu", "ttl": 1000, "floor": 10000,
"capacity": 10**9}; what is left out does not happen. An id is stored at its `admit`-th use, and, of all ids, a share
`probability` at all; before that it answers its first value, and its gradients are dropped. Beyond `capacity` bytes
rows go by last use (lru) or by true counts (lfu: duplicates count); not used for `ttl` steps they go too, but never
below a `floor` of rows. With `memory` bytes, rows beyond them lie on disk, in `folder`, until a push names them: that
changes no value and no decision. Numbers are of the whole table and are shared out among its segments.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayps.core.errors import ConfigError
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.hash_index import ABSENT, HashIndex
from rayps.ps.tables.initial_rows import key_of
from rayps.ps.tables.row_store import USED, USES, RowStore
from rayps.ps.tables.wire_format import Counts, Ids, mix

LOGGED = 1 << 16  # ids of evicted rows that a segment remembers
CANDIDATES = 1 << 20  # ids of a table that are counted and not stored yet; the ones seen longest ago are forgotten
_SLACK = 16  # beyond its capacity a segment gives up one row in so many at once: choosing them reads all


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """What a table's `policy` says. Raises ConfigError: a knob that there is not, or a value that cannot be."""

    admit: int = 1
    probability: float = 1.0
    evict: str | None = None  # "lru" or "lfu"; lru where only a capacity is given
    ttl: int | None = None
    floor: int = 0
    capacity: int | None = None
    memory: int | None = None  # bytes of rows in memory; those used longest ago lie on disk
    folder: str | None = None  # where they lie; None: where temporary files do

    @classmethod
    def of(cls, table: SparseTable) -> RowPolicy:
        """Read a table's policy."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in table.policy:
            if key not in known:
                raise ConfigError(
                    f"table {table.name!r}: the policy has no {key!r}: it has {', '.join(known)}",
                    field="policy",
                    table=table.name,
                )
        found = cls(**table.policy)
        whole = {"admit": (found.admit, 1), "floor": (found.floor, 0)}
        whole |= {
            name: (getattr(found, name), 1)
            for name in ("ttl", "capacity", "memory")
            if getattr(found, name) is not None
        }
        for name, (value, least) in whole.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"table {table.name!r}: {name} is {value!r}: give a whole number of at least {least}",
                    field="policy",
                    table=table.name,
                )
        p = found.probability
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 < p <= 1:
            raise ConfigError(
                f"table {table.name!r}: probability is {p!r}: give a share above 0 and up to 1",
                field="policy",
                table=table.name,
            )
        if found.folder is not None and not isinstance(found.folder, str):
            raise ConfigError(
                f"table {table.name!r}: folder is {found.folder!r}: give a path", field="policy", table=table.name
            )
        if found.evict not in (None, "lru", "lfu"):
            raise ConfigError(
                f"table {table.name!r}: evict is {found.evict!r}: give lru or lfu", field="policy", table=table.name
            )
        if found.evict and found.capacity is None:
            raise ConfigError(
                f"table {table.name!r}: evict is {found.evict!r} and there is no limit: give capacity (bytes)",
                field="policy",
                table=table.name,
            )
        return found


class RowLifecycle:
    """A table's policy at work in one of its segments."""

    def __init__(self, table: SparseTable, row_bytes: int, unit: int) -> None:
        """`unit` versions of the segment are one step of training.

        Raises:
            ConfigError: as `RowPolicy.of`; or the capacity does not hold a row in each segment, or not the floor.
        """
        self.policy = policy = RowPolicy.of(table)
        self.unit, self._name = unit, table.name
        self._floor = -(-policy.floor // table.segments)
        self.limit = None if policy.capacity is None else policy.capacity // table.segments // row_bytes
        if self.limit is not None and self.limit < max(1, self._floor):
            least = max(1, self._floor) * table.segments * row_bytes
            raise ConfigError(
                f"table {table.name!r}: capacity is {policy.capacity} bytes: a row takes {row_bytes}, "
                f"and {table.segments} segments with a floor of {policy.floor} rows need {least}",
                field="policy",
                table=table.name,
            )
        self._key = np.int64(key_of(table.seed ^ 0x7A11))
        self._luck = np.uint64(min(int(policy.probability * 2.0**64), 2**64 - 1))
        self._most = max(64, CANDIDATES // table.segments)
        self._index = HashIndex()  # of candidates
        self._seen = np.zeros((0, 2), np.int64)  # by slot: uses, version of the last one
        self.evicted = 0
        self.log: deque[tuple[int, Ids]] = deque()  # version, and the ids evicted in it
        self.known_from = 0  # evictions in later versions than this are all in the log

    @property
    def candidates(self) -> int:
        """Ids that are counted and not stored yet."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of the candidates."""
        return int(self._seen.nbytes) + self._index.nbytes if len(self._seen) else 0

    def admit(self, ids: Ids, counts: Counts, version: int) -> tuple[Any, Any]:
        """Of ids that are not stored: which are to be stored now, bool [n], and the uses that they had before."""
        good = np.ones(len(ids), bool)
        before = np.zeros(len(ids), np.int64)
        if self.policy.probability < 1:
            good = mix(ids ^ self._key) < self._luck
        if self.policy.admit > 1:
            lucky = np.flatnonzero(good)
            slots = self._index.find(ids[lucky])
            fresh = slots == ABSENT
            slots[fresh] = self._index.insert(ids[lucky][fresh])
            self._widen()
            self._seen[slots[fresh]] = 0
            before[lucky] = self._seen[slots, 0]
            self._seen[slots, 0] += counts[lucky]
            self._seen[slots, 1] = version
            enough = self._seen[slots, 0] >= self.policy.admit
            good[lucky] = enough
            self._index.delete(ids[lucky][enough])
            self._forget()
        return good, before

    def _widen(self) -> None:
        if len(self._seen) < len(self._index.keys):
            wider = np.zeros((len(self._index.keys), 2), np.int64)
            wider[: len(self._seen)] = self._seen
            self._seen = wider

    def _forget(self) -> None:
        if len(self._index) > self._most:
            ids, seen = self._candidates()
            order = np.lexsort((ids, seen[:, 0], seen[:, 1]))
            self._index.delete(ids[order[: len(ids) // 2]])

    def _candidates(self) -> tuple[Ids, Any]:
        slots = self._index.slots()
        return self._index.keys[slots], self._seen[slots] if len(slots) else np.zeros((0, 2), np.int64)

    def due(self, rows: int, version: int) -> bool:
        """Whether rows may have to go after this version."""
        if self.limit is not None and rows > self.limit:
            return True
        ttl = self.policy.ttl
        return ttl is not None and rows > self._floor and version % max(1, ttl * self.unit // 8) == 0

    def victims(self, ids: Ids, life: Any, version: int) -> Ids:
        """Which rows go, ascending; `life` as `RowStore.life` gives it, in any order."""
        count, kept = len(ids), max(self._floor, 0)
        gone = 0
        order = np.lexsort((ids, life[:, USED]))
        if self.policy.ttl is not None:
            old = version - life[order, USED] > self.policy.ttl * self.unit
            gone = min(int(np.count_nonzero(old)), max(0, count - kept))
        expired, rest = order[:gone], order[gone:]
        more = 0
        if self.limit is not None and len(rest) > self.limit:
            more = len(rest) - max(kept, 1, self.limit - self.limit // _SLACK)
        if self.policy.evict == "lfu" and more:
            rest = rest[np.lexsort((ids[rest], life[rest, USED], life[rest, USES]))]
        return np.sort(ids[np.concatenate([expired, rest[:more]])])

    def evict(self, store: RowStore, version: int) -> Ids:
        """Let rows go after `version`, where it is time; their ids."""
        if not self.due(len(store), version):
            return np.empty(0, np.int64)
        ids = self.victims(*store.life(), version)
        if len(ids):
            store.delete(ids)
            self.note(version, ids)
        return ids

    def note(self, version: int, ids: Ids) -> None:
        """Count evicted rows and remember their ids."""
        self.evicted += len(ids)
        self.log.append((version, ids))
        while self.log and sum(len(each) for _, each in self.log) > LOGGED:
            self.known_from = self.log.popleft()[0]

    def gone(self, since: int) -> Ids | None:
        """The ids evicted in versions after `since`, some perhaps twice; None: not all of them are remembered."""
        if since < self.known_from:
            return None
        found = [ids for version, ids in self.log if version > since]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def dump(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Plain data and arrays, for a state."""
        ids, seen = self._candidates()
        order = np.argsort(ids)
        logged = [ids for _, ids in self.log]
        return (
            {"evicted": self.evicted, "known_from": self.known_from, "log": [[v, len(i)] for v, i in self.log]},
            {
                "candidates": ids[order],
                "seen": seen[order],
                "evicted": np.concatenate(logged) if logged else np.empty(0, np.int64),
            },
        )

    def load(self, head: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Become what `dump` gave."""
        self.evicted, self.known_from = int(head["evicted"]), int(head["known_from"])
        self._index = HashIndex()
        self._seen = np.zeros((0, 2), np.int64)
        if len(arrays["candidates"]):
            slots = self._index.insert(arrays["candidates"])
            self._widen()
            self._seen[slots] = arrays["seen"]
        self.log.clear()
        at = 0
        for version, count in head["log"]:
            self.log.append((int(version), arrays["evicted"][at : at + count].copy()))
            at += count
