"""Admission and eviction of rows. No I/O.

Each decision is a function of the pushes alone. A segment and its backups therefore make the same decisions.

A table's `policy` is a dict of options. An option that is left out has no effect:

- `admit`, `probability`: a row is stored at the `admit`-th use of its id, and only for a share `probability` of all
  ids. While the row of an id is not stored, a pull returns its initial value, and its gradients are dropped.
- `capacity`: if the rows take more than this number of bytes, rows are evicted, by last use (`evict="lru"`) or by use
  count (`evict="lfu"`; each occurrence of an id in a batch counts).
- `ttl`: rows that were not used for more than this number of steps are evicted, while the table has more than `floor`
  rows.
- `memory`: if the rows take more than this number of bytes, the least recently used rows are on disk, in `folder`,
  until a push contains their ids. This changes no value and no decision.

`capacity`, `floor` and `memory` are for the whole table, and are divided among its segments.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rayps_client.errors import ConfigError

from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables.hash_index import ABSENT, HashIndex
from rayps.ps.tables.initial_rows import key_of
from rayps.ps.tables.row_store import USED, USES, RowStore
from rayps.ps.tables.segment_state import LifeHead
from rayps.ps.tables.wire_format import Counts, Ids, mix

LOGGED = 1 << 16  # most ids of evicted rows in a segment's log
CANDIDATES = 1 << 20  # most ids of a table that are counted and not stored; the least recently used are dropped first
_SLACK = 16  # an eviction removes one row in 16 at once, because choosing the rows reads all of them


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """The options of a table's `policy`; the module's docstring explains them."""

    admit: int = 1
    probability: float = 1.0
    evict: str | None = None  # "lru" or "lfu"; with a capacity, None means lru
    ttl: int | None = None
    floor: int = 0
    capacity: int | None = None
    memory: int | None = None  # bytes of rows in memory; the least recently used rows are on disk
    folder: str | None = None  # the folder of the rows on disk; None means the system's temporary folder

    @classmethod
    def of(cls, table: SparseTable) -> RowPolicy:
        """Return a table's policy. Raises ConfigError if an option is unknown or a value is not valid."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in table.policy:
            if key not in known:
                raise table.error(
                    ConfigError, f"the policy has no option {key!r}; its options are {', '.join(known)}", field="policy"
                )
        found = cls(**table.policy)
        for name, least in (("admit", 1), ("floor", 0), ("ttl", 1), ("capacity", 1), ("memory", 1)):
            value = getattr(found, name)
            if value is None and name not in ("admit", "floor"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise table.error(
                    ConfigError, f"{name} is {value!r}: give a whole number of at least {least}", field="policy"
                )
        p = found.probability
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 < p <= 1:
            raise table.error(ConfigError, f"probability is {p!r}: give a number above 0 and at most 1", field="policy")
        if found.folder is not None and not isinstance(found.folder, str):
            raise table.error(ConfigError, f"folder is {found.folder!r}: give a path", field="policy")
        if found.evict not in (None, "lru", "lfu"):
            raise table.error(ConfigError, f"evict is {found.evict!r}: give lru or lfu", field="policy")
        if found.evict and found.capacity is None:
            raise table.error(
                ConfigError, f"evict is {found.evict!r}, and capacity is missing: give capacity (bytes)", field="policy"
            )
        return found


class RowLifecycle:
    """The policy of a table applied to one segment: candidates for admission, and evicted rows."""

    def __init__(self, table: SparseTable, row_bytes: int, unit: int) -> None:
        """Apply a table's policy to a segment whose rows take `row_bytes` bytes each.

        `unit` is the number by which the segment's version grows in one training step.

        Raises:
            ConfigError: `RowPolicy.of` raises it; or the capacity is less than one row in each segment, or less than
                the floor.
        """
        self.policy = policy = RowPolicy.of(table)
        self.unit, self._name = unit, table.name
        self._floor = -(-policy.floor // table.segments)
        self.limit = None if policy.capacity is None else policy.capacity // table.segments // row_bytes
        if self.limit is not None and self.limit < max(1, self._floor):
            least = max(1, self._floor) * table.segments * row_bytes
            raise table.error(
                ConfigError,
                f"capacity is {policy.capacity} bytes: give at least {least} ({row_bytes} bytes "
                f"a row, {table.segments} segments, floor {policy.floor} rows)",
                field="policy",
            )
        self._key = np.int64(key_of(table.seed ^ 0x7A11))
        self._threshold = np.uint64(min(int(policy.probability * 2.0**64), 2**64 - 1))  # ids of lower hash are admitted
        self._most = max(64, CANDIDATES // table.segments)
        self._index = HashIndex()  # the index of the candidates
        self._seen = np.zeros((0, 2), np.int64)  # for each slot: the number of uses, and the version of the last use
        self.evicted = 0
        self.log: deque[tuple[int, Ids]] = deque()  # a version, and the ids that were evicted in it
        self.known_from = 0  # the log contains all evictions in versions after this one

    @property
    def candidates(self) -> int:
        """The number of ids that are counted and not stored."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """The bytes of memory for the candidates, which are ids that are counted and not stored."""
        return int(self._seen.nbytes) + self._index.nbytes if len(self._seen) else 0

    def admit(self, ids: Ids, counts: Counts, version: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Count the uses `counts` of n ids that are not stored.

        Return which of the ids to store now, bool [n], and the number of earlier uses of each id, int64 [n].
        """
        admitted = np.ones(len(ids), bool)
        before = np.zeros(len(ids), np.int64)
        if self.policy.probability < 1:
            admitted = mix(ids ^ self._key) < self._threshold
        if self.policy.admit > 1:
            counted = np.flatnonzero(admitted)
            slots = self._index.find(ids[counted])
            fresh = slots == ABSENT
            slots[fresh] = self._index.insert(ids[counted][fresh])
            self._widen()
            self._seen[slots[fresh]] = 0
            before[counted] = self._seen[slots, 0]
            self._seen[slots, 0] += counts[counted]
            self._seen[slots, 1] = version
            enough = self._seen[slots, 0] >= self.policy.admit
            admitted[counted] = enough
            self._index.delete(ids[counted][enough])
            self._drop_oldest()
        return admitted, before

    def _widen(self) -> None:
        if len(self._seen) < len(self._index.keys):
            wider = np.zeros((len(self._index.keys), 2), np.int64)
            wider[: len(self._seen)] = self._seen
            self._seen = wider

    def _drop_oldest(self) -> None:
        if len(self._index) > self._most:
            ids, seen = self._list_candidates()
            order = np.lexsort((ids, seen[:, 0], seen[:, 1]))
            self._index.delete(ids[order[: len(ids) // 2]])

    def _list_candidates(self) -> tuple[Ids, NDArray[np.int64]]:
        slots = self._index.slots()
        return self._index.keys[slots], self._seen[slots] if len(slots) else np.zeros((0, 2), np.int64)

    def due(self, rows: int, version: int) -> bool:
        """Return whether `victims` must be called after this version; `rows` is the number of stored rows."""
        if self.limit is not None and rows > self.limit:
            return True
        ttl = self.policy.ttl
        return ttl is not None and rows > self._floor and version % max(1, ttl * self.unit // 8) == 0

    def victims(self, ids: Ids, life: NDArray[np.int64], version: int) -> Ids:
        """Return the ids of the rows to evict, ascending. `ids` and `life` are the results of `RowStore.life`."""
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
        """Evict the rows that the policy does not allow after `version`; return their ids."""
        if not self.due(len(store), version):
            return np.empty(0, np.int64)
        ids = self.victims(*store.life(), version)
        if len(ids):
            store.delete(ids)
            self.log_evicted(version, ids)
        return ids

    def log_evicted(self, version: int, ids: Ids) -> None:
        """Add evicted rows to the log, and drop its oldest entries while it has more than `LOGGED` ids."""
        self.evicted += len(ids)
        self.log.append((version, ids))
        while self.log and sum(len(each) for _, each in self.log) > LOGGED:
            self.known_from = self.log.popleft()[0]

    def evicted_since(self, since: int) -> Ids | None:
        """Return the ids evicted in versions after `since`, or None if the log lacks some of them.

        An id that was evicted several times may be repeated.
        """
        if since < self.known_from:
            return None
        found = [ids for version, ids in self.log if version > since]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def dump(self) -> tuple[LifeHead, dict[str, Ids]]:
        """Return the state as JSON data and arrays."""
        ids, seen = self._list_candidates()
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

    def load(self, head: LifeHead, arrays: dict[str, Ids]) -> None:
        """Replace the state by one that `dump` returned."""
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
