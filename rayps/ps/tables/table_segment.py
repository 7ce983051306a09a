"""One segment of a table, on its primary or on a backup: a `rayps.ps.protocol.space.ServedSegment`.

It uses no sockets and no threads. Each push is applied once, because the ledger recognises repeated pushes. If the
strategy applies each push on arrival (`PerPush`), its `on_push` is called, and the push is forwarded to the backups. If
the strategy applies whole rounds (`PerRound`), its `on_round` is called with the pushes of a round, extended to the
union of their ids, and the gradients of the resulting steps are forwarded. A pull with counts stores missing rows and
counts a use of all its rows, on the primary and on the backups. A pull without counts changes nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
from rayps_client.errors import CheckpointError, ConfigError, TrainingError
from rayps_client.values import Buffer
from torch import Tensor

from rayps.core.job.repeated_pushes import WINDOW, Ledger
from rayps.core.strategy.apply_pushes import weighted_mean
from rayps.core.strategy.staleness_bound import Clock, MovedBound
from rayps.core.strategy.strategy import ServerHalf
from rayps.core.strategy.topology import Servers, servers_of
from rayps.ps.protocol.members import MemberChange, MemberChangeKind, explain_left
from rayps.ps.protocol.space import Space, SparseTable
from rayps.ps.tables import initial_rows, segment_state
from rayps.ps.tables.delta import encode_delta
from rayps.ps.tables.hash_index import ABSENT
from rayps.ps.tables.merge_pushes import unite_pushes
from rayps.ps.tables.row_lifecycle import RowLifecycle, RowPolicy
from rayps.ps.tables.row_optimizers import OptimizerOptions, Scheduled, TableSchedule, rule_of, schedule_of
from rayps.ps.tables.row_store import RowStore
from rayps.ps.tables.segment_state import SegmentHead
from rayps.ps.tables.wire_format import (
    DTYPES,
    Counts,
    Ids,
    Rows,
    Slots,
    TablePush,
    decode_pull,
    decode_push,
    encode_pull,
    encode_push,
    encode_rows,
)
from rayps.tensors.optim import Factory
from rayps.tensors.snapshot import RetainedParts

_PUSH, _ROUND, _USE, _MEMBERS = 1, 2, 3, 4  # kinds of changes for backups
_HEAD = 32  # bytes of a change's head: kind, rank and step (int64 each), weight (float64)
_NO_IDS = np.empty(0, np.int64)
_DECAYS = struct.Struct("<d")  # precedes each gradient of a round: the number of whole steps for which it counts


def check_table(table: SparseTable) -> None:
    """Check the options of a table.

    Raises:
        ConfigError: an option is not valid.
    """
    for name, value in (("dim", table.dim), ("segments", table.segments)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise table.error(ConfigError, f"{name} is {value!r}: give a whole number of at least 1", field=name)
    if table.dtype not in DTYPES:
        raise table.error(ConfigError, f"dtype is {table.dtype!r}: give {' or '.join(DTYPES)}", field="dtype")
    initial_rows.check(table)
    store = RowStore(table, rule_of(table))
    RowLifecycle(table, store.row_bytes, 1)


class _OpenRounds:
    """The pushes received so far for each round in which at least one rank has not pushed yet."""

    def __init__(self, closed: int, gathers: bool) -> None:
        self.gathers = gathers  # whether the strategy applies whole rounds
        self.closed = closed  # rounds that all ranks have pushed
        self._pushes: dict[int, dict[int, tuple[TablePush, float]]] = {}  # for each step: from rank to push and weight

    def add(self, rank: int, step: int, push: TablePush, weight: float) -> None:
        self._pushes.setdefault(step, {})[rank] = push, weight

    def take(self) -> tuple[list[TablePush], list[float]]:
        """Remove and return the pushes and weights of the oldest open round, in the order of the ranks."""
        found = [push for _, push in sorted(self._pushes.pop(self.closed, {}).items())]
        return [push for push, _ in found], [weight for _, weight in found]


class _RowUpdate:
    """Steps the rows of the current push or round with the table's optimizer."""

    def __init__(self, table: SparseTable, options: OptimizerOptions, pace: TableSchedule | None) -> None:
        self.pace = pace
        # the gradients of a round's steps, each with the number of whole steps for which it counts
        self.recorded: list[tuple[Tensor, float]] = []
        self._table, self._options = table, options  # `options`: the optimizer's options in the current round
        self._ids: Ids | None = None
        self._slots: Slots = np.empty(0, np.int64)
        self._stored: Slots | None = None  # indices of the ids in the gradient whose rows are stored; None means all
        self._overflown: int | None = None  # the id of the first row that was not finite after a step
        self._fault: TrainingError | None = None  # raised for every later push

    def begin_round(self, step: int) -> None:
        """Set the optimizer's options to those of the schedule in round `step`."""
        if self.pace is not None:
            self._options = self.pace.at(step)

    def select(self, ids: Ids, slots: Slots, stored: Slots | None) -> None:
        """Select the rows that the method `step` changes."""
        self._ids, self._slots, self._stored = ids, slots, stored

    def deselect(self) -> None:
        self._ids = None

    def step(self, store: RowStore, grad: Tensor, scale: float, decays: float) -> None:
        """Step the selected rows by `scale` times `grad` [n, dim]; weight decay is multiplied by `decays`."""
        assert self._ids is not None
        options, decay = self._options, self._options.get("weight_decay")
        if decays != 1 and isinstance(decay, float) and decay:
            options = {**options, "weight_decay": decay * decays}
        grad = grad if self._stored is None else grad[torch.from_numpy(self._stored)]
        fault = store.step(self._slots, grad, scale, options)
        if fault is not None and self._overflown is None:
            self._overflown = int(self._ids[fault])

    def must_be_finite(self, step: int, rank: int | None = None) -> None:
        """Raise TrainingError if a row is not finite after round `step` or an earlier round.

        `rank`: the worker whose push was applied; None if a whole round was applied.
        """
        if self._fault is None and self._overflown is not None:
            source = "" if rank is None else f" by the push of worker-{rank}"
            self._fault = TrainingError(
                f"table {self._table.name!r}: the row of id {self._overflown}, or its optimizer state, is not finite "
                f"(NaN or infinite) since round {step}{source}, although the gradient is finite:\nlower the table's lr",
                parameter=self._table.name,
                id=self._overflown,
                round=step,
                **({} if rank is None else {"rank": rank}),
            )
        if self._fault is not None:
            raise self._fault


class _SlotCache:
    """The slots of recently pulled ids, which pushes use again: a rank usually pushes the ids that it has pulled."""

    def __init__(self, ranks: int) -> None:
        self._limit = 2 * ranks
        # key: number of ids, first id, last id; value: the ids, their slots, indices of ids not stored, and the number
        # of the index's deletions
        self._found: dict[tuple[int, ...], tuple[Ids, Slots, Slots, int]] = {}

    def find(self, store: RowStore, ids: Ids, keep: bool) -> tuple[Slots, Slots]:
        """Return the slots of ids [n], and the indices of the ids that are not stored.

        With `keep`, the result is cached. The caller may change only the slots of ids that are not stored.
        """
        key = (len(ids), int(ids[0]), int(ids[-1])) if len(ids) else ()
        held = self._found.get(key)
        if held is not None and held[3] == store.deletions and (held[0] == ids).all():
            _, slots, missing, _ = held
            if len(missing):  # these ids may have been stored since
                slots = slots.copy()
                slots[missing] = store.find(ids[missing])
                missing = np.flatnonzero(slots == ABSENT)
                self._found[key] = held[0], slots, missing, store.deletions
            return slots, missing
        slots = store.find(ids)
        missing = _NO_IDS if slots.all() else np.flatnonzero(slots == ABSENT)
        if keep:
            self._found.pop(key, None)
            self._found[key] = ids.copy(), slots, missing, store.deletions
            if len(self._found) > self._limit:
                del self._found[next(iter(self._found))]
        return slots, missing


class _Snapshots:
    """The segment's states after the rounds that a checkpoint needs.

    They share memory with the segment until rows change.
    """

    def __init__(self) -> None:
        self.wanted: set[int] = set()
        self._parts: RetainedParts[tuple[RowStore, SegmentHead, dict[str, Rows]]] = RetainedParts()

    def retain(self, rounds: int, store: RowStore, state: tuple[SegmentHead, dict[str, Rows]]) -> None:
        self.wanted.discard(rounds)
        self._parts.retain(rounds, (store.branch(), *state))

    def dump(self, rounds: int) -> bytes | None:
        """Return the state after `rounds` rounds, or None if it is not retained."""
        held = self._parts.get(rounds)
        if held is None:
            return None
        store, head, arrays = held
        with store.lock:
            return segment_state.pack(head, {**segment_state.as_arrays(store.export()), **arrays})


class TableSegment:
    """One segment of a table: its rows, its clock, and its ledger, which recognises repeated pushes."""

    def __init__(
        self,
        table: SparseTable,
        index: int,
        strategy: ServerHalf,
        workers: int,
        start_marks: Sequence[int] | None = None,
        *,
        scheduled: Scheduled | None = None,
    ) -> None:
        """Prepare an empty segment.

        `start_marks`: the first step of each rank; None means 0 for all. `scheduled`: the job's learning-rate schedule.

        Raises:
            ConfigError: an option of the table is not valid.
            WorkloadError: the schedule cannot be evaluated.
        """
        self.table, self.index, self.strategy, self._ranks = table, index, strategy, workers
        self.rounds = 1  # see ShardView
        self.seq = self.version = 0
        self._bound: MovedBound | None = None  # the staleness bound, if it is not that of the strategy
        self.operations = 0  # number of ids pulled and pushed; the number of requests is the same for all segments
        self.copied = True  # whether there are backups; if not, the changes for backups are empty
        self.store = self._store()
        pace = None if scheduled is None else scheduled.pace(table, self.store.rule)
        self._begin(Ledger([0] * workers if start_marks is None else start_marks), pace)

    def _begin(self, ledger: Ledger, pace: TableSchedule | None) -> None:
        self.ledger = ledger
        servers = servers_of(self.strategy) or Servers()
        gathers = servers.update.gathers
        self.clock = Clock(ledger.marks, servers.staleness, ledger.active)
        self.clock.move(self._bound)
        self.life = RowLifecycle(self.table, self.store.row_bytes, 1 if gathers else max(1, self._ranks))
        self._open = _OpenRounds(self.clock.slowest, gathers)
        self._snapshots = _Snapshots()
        self._update = _RowUpdate(self.table, self.store.rule.options, pace)
        self._checked: tuple[Buffer, TablePush] | None = None  # the push that was checked last, decoded
        self._slots = _SlotCache(self._ranks)

    def _store(self) -> RowStore:
        policy = RowPolicy.of(self.table)
        memory = None if policy.memory is None else policy.memory // self.table.segments
        return RowStore(self.table, rule_of(self.table), memory, policy.folder)

    @property
    def size(self) -> int:
        """The number of workers that take part."""
        active = self.ledger.active
        return self._ranks if active is None else max(1, len(active.ranks))

    @property
    def closed(self) -> int:
        """The number of rounds that all ranks that take part have pushed."""
        return self._open.closed

    @property
    def rows(self) -> int:
        """The number of stored rows."""
        return len(self.store)

    @property
    def nbytes(self) -> int:
        """The bytes of rows, optimizer state, index and candidates."""
        return self.store.nbytes + self.life.nbytes

    def marks(self) -> dict[int, int]:
        """Return a dict from each rank to its next step. The pushes of all earlier steps are in the ledger."""
        return dict(self.ledger.marks)

    def durable(self, rank: int) -> int:
        """Return the first step of `rank` that is not applied on this server; all earlier steps are."""
        mark = self.ledger.marks[rank]
        return min(self._open.closed, mark) if self._open.gathers else mark

    def may_pull(self, rank: int, step: int | None = None) -> bool:
        """Return whether a pull of `rank`, which counts `step` pushes of its own, may be served now."""
        return self.clock.may_pull(rank, step)

    def laggards(self) -> list[int]:
        """Return the slowest ranks, whose pushes the delayed pulls wait for."""
        return self.clock.laggards()

    def move_bound(self, bound: MovedBound) -> None:
        """Replace the staleness bound from now on."""
        self._bound = bound
        self.clock.move(bound)

    # pushes

    def check(self, rank: int, step: int, weight: float, data: Buffer) -> None:
        """Check a push without applying it.

        Raises:
            ConfigError: the push is not valid: see `rayps.ps.tables.wire_format.decode_push`.
            ValueError: there is no such rank, or too many steps were skipped.
        """
        if not self.ledger.takes_part(rank):
            raise explain_left(rank)
        if not self.ledger.seen(rank, step):
            mark = self.ledger.marks[rank]
            if step - mark >= WINDOW:
                raise ValueError(
                    f"rank {rank} pushed step {step} of table {self.table.name!r} before step {mark}: "
                    f"at most {WINDOW - 1} steps may be skipped"
                )
            self._checked = (data, decode_push(data, self.table))

    def push(self, rank: int, step: int, weight: float, data: Buffer) -> list[bytes]:
        """Record a push and apply all rounds that are complete now; return the changes that backups must replay.

        A push that is in the ledger already has no effect.

        Raises:
            ConfigError, ValueError: `check` raises them. Nothing was applied.
            TrainingError: a row is not finite after a step of this push or of an earlier one.
        """
        if self.ledger.seen(rank, step):
            self._update.must_be_finite(step)
            return []
        if self._checked is None or self._checked[0] is not data:
            self.check(rank, step, weight, data)
        assert self._checked is not None
        push, self._checked = self._checked[1], None
        self.operations += len(push.ids)
        if not self._open.gathers:
            self._apply(rank, step, weight, push)
            self._update.must_be_finite(step, rank)
            return [b"".join([_encode_head(_PUSH, rank, step, weight), data]) if self.copied else b""]
        self.ledger.add(rank, step)
        if self.clock.slowest <= step:  # the round stays open, and the memory of `data` is the caller's
            push = TablePush(push.ids.copy(), push.counts.copy(), push.rows.clone())
        self._open.add(rank, step, push, weight)
        changes = self._apply_rounds()
        self._update.must_be_finite(step)
        return changes

    def _apply(self, rank: int, step: int, weight: float, push: TablePush) -> None:
        """Apply a push on arrival, for a strategy with `PerPush`."""
        applies = self.ledger.add(rank, step)
        self.version += 1
        with self.store.lock:
            if len(push.ids) and weight and applies:
                self._select_rows(push.ids, push.counts)
                self._update.begin_round(step)
                self.strategy.on_push(self, push.rows, weight)
            self._finish_change()
        self._close_rounds()

    def _close_rounds(self) -> None:
        """Count the rounds that all ranks that take part have pushed, if pushes are applied on arrival."""
        while self._open.closed < self.clock.slowest:
            self._open.closed += 1
            self._retain_wanted()

    def change_members(self, change: MemberChange) -> list[bytes]:
        """Apply a change of the ranks that take part; return the changes for backups: see `ServedSegment`."""
        if self._open.gathers:
            raise self.table.error(
                ConfigError, "the strategy applies whole rounds: workers neither join nor leave", field="strategy"
            )
        if change.kind is MemberChangeKind.END:
            self.keep([change.step])
        change.apply_to(self.ledger)
        self.clock.active = self.ledger.active
        with self.store.lock:
            self._finish_change()
        self._close_rounds()
        head = _encode_head(_MEMBERS, change.rank, change.step, 0.0)
        return [head + change.encode() if self.copied else b""]

    def _apply_rounds(self) -> list[bytes]:
        """Apply the rounds that all ranks have pushed; return one change for each of these rounds."""
        changes = []
        update = self._update
        while self._open.closed < self.clock.slowest:
            pushes, weights = self._open.take()
            ids, counts, values = unite_pushes(self.table, pushes)
            self.version += 1
            update.recorded = []
            with self.store.lock:
                if len(ids) and any(weights):
                    self._select_rows(ids, counts)
                    update.begin_round(self._open.closed)
                    self.strategy.on_round(self, values, weights)
                self._finish_change()
            pieces = [
                b"".join([_DECAYS.pack(decays), encode_push(ids, grad, counts).data])
                for grad, decays in update.recorded
            ]
            head = _encode_head(_ROUND, len(pieces), self._open.closed, 0.0)
            changes.append(b"".join([head, *pieces]) if self.copied else b"")
            update.recorded = []
            self._open.closed += 1
            self._retain_wanted()
        return changes

    def _select_rows(self, ids: Ids, counts: Counts) -> None:
        """Admit rows that are not stored yet, count a use of all rows, and select the stored ones for `step`."""
        slots, missing = self._slots.find(self.store, ids, keep=False)
        if len(missing) and self.store.load_from_disk(ids[missing]):
            slots[missing] = self.store.find(ids[missing])
            missing = np.flatnonzero(slots == ABSENT)
        stored = None
        if len(missing):
            admitted, uses = self.life.admit(ids[missing], counts[missing], self.version)
            fresh = missing[admitted]
            if len(fresh):
                slots[fresh] = self.store.make(ids[fresh], uses[admitted], self.version)
            if not admitted.all():
                stored = np.flatnonzero(slots != ABSENT)
                ids, slots, counts = ids[stored], slots[stored], counts[stored]
        self.store.count_uses(slots, counts, self.version)
        self._update.select(ids, slots, stored)

    def step(self, grad: Tensor, scale: float = 1.0, decays: float | None = None) -> None:
        """Step the rows of the current push by `scale` times a gradient [n, dim].

        `decays` is the number of whole steps for which this step counts, the factor of the weight decay. If it is None,
        it is |`scale`|.
        """
        decays = abs(scale) if decays is None else decays
        if self._open.gathers and self.copied:
            self._update.recorded.append((grad * scale, decays))
        self._update.step(self.store, grad, scale, decays)

    def step_mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Step the rows of the current push by the mean sum(w_i v_i) / sum(w_i), summed in the order given."""
        self.step(weighted_mean(list(values), list(weights)))

    def _finish_change(self) -> None:
        self.seq += 1
        self.life.evict(self.store, self.version)
        self.store.move_to_disk()

    # backups

    def replay(self, change: Buffer) -> None:
        """On a backup: apply one change that `push` or `pull` returned on the primary.

        Raises ConfigError if the change is not valid.
        """
        view = memoryview(change)
        kind, rank, step = np.frombuffer(view[:24], np.int64).tolist()
        weight = float(np.frombuffer(view[24:_HEAD], np.float64)[0])
        data = view[_HEAD:]
        if kind == _PUSH:
            self._apply(rank, step, weight, decode_push(data, self.table))
        elif kind == _USE:
            pull = decode_pull(data, self.table)
            assert pull.counts is not None
            self._count_pull(pull.ids, pull.counts)
        elif kind == _ROUND:
            self._replay_round(rank, step, data)
        elif kind == _MEMBERS:
            self.change_members(MemberChange.decode(data))
        else:
            raise ConfigError(f"table {self.table.name!r}: a change has the unknown kind {kind}")

    def _replay_round(self, count: int, step: int, data: memoryview) -> None:
        size = len(data) // count if count else 0
        for rank in self.ledger.marks:
            self.ledger.add(rank, step)
        self.version += 1
        self._update.begin_round(step)
        with self.store.lock:
            for k in range(count):
                one = data[k * size : (k + 1) * size]
                push = decode_push(one[_DECAYS.size :], self.table)
                if k == 0:
                    self._select_rows(push.ids, push.counts)
                self.step(push.rows, decays=_DECAYS.unpack_from(one)[0])
            self._update.recorded = []
            self._finish_change()
        self._open.closed = step + 1
        self._retain_wanted()

    # pulls

    def pull(self, rank: int, data: Buffer, out: memoryview | None = None) -> tuple[Buffer, int, list[bytes]]:
        """Serve a pull.

        Return the rows as bytes, the number of rounds by which `rank` is ahead of the slowest rank, and the changes
        that backups must replay. The rows are written to `out` if `out` is given and has their size.

        Raises:
            ConfigError: the pull is not valid: see `rayps.ps.tables.wire_format.decode_pull`.
        """
        asked = decode_pull(data, self.table)
        self.operations += len(asked.ids)
        changes: list[bytes] = []
        with self.store.lock:
            if asked.counts is not None and len(asked.ids):
                self._count_pull(asked.ids, asked.counts)
                head = _encode_head(_USE, rank, 0, 0.0)
                changes = [b"".join([head, encode_pull(asked.ids, asked.counts).data]) if self.copied else b""]
            slots = self._slots.find(self.store, asked.ids, keep=rank >= 0)[0]
            place = None if asked.half or out is None else self._view_rows(out, len(asked.ids))
            rows = self.store.read(asked.ids, slots, place)
        value: Buffer = out if place is not None and out is not None else encode_rows(rows, asked.half).data
        return value, self.ledger.marks[rank] - self.clock.slowest, changes

    def _view_rows(self, out: memoryview, count: int) -> Rows | None:
        """Return `out` as rows [count, dim], or None if `out` has another size."""
        size = count * self.table.dim * DTYPES[self.table.dtype].itemsize
        if len(out) != size or not size:
            return None
        found: Rows = np.frombuffer(out, self.table.dtype).reshape(count, self.table.dim)
        return found

    def read(self, data: Buffer) -> Buffer:
        """Serve a pull regardless of the clock, and count no use; return the rows as bytes."""
        asked = decode_pull(data, self.table)
        with self.store.lock:
            return encode_rows(self.store.read(asked.ids, self.store.find(asked.ids)), asked.half).data

    def _count_pull(self, ids: Ids, counts: Counts) -> None:
        with self.store.lock:
            self._select_rows(ids, counts)
            self._update.deselect()
            self._finish_change()

    # states

    def keep(self, rounds: Sequence[int]) -> None:
        """Retain the state after each of these numbers of rounds (see `RetainedParts`)."""
        self._snapshots.wanted.update(each for each in rounds if each >= self._open.closed)

    def _retain_wanted(self) -> None:
        if self._open.closed in self._snapshots.wanted:
            with self.store.lock:
                self._snapshots.retain(self._open.closed, self.store, self._make_head_and_life())

    def part(self, rounds: int) -> bytes | None:
        """Return the state after `rounds` rounds, or None if it is not retained."""
        return self._snapshots.dump(rounds)

    def dump(self) -> bytes:
        """Return the complete state, without the pushes of rounds that are not complete."""
        with self.store.lock:
            head, arrays = self._make_head_and_life()
            return segment_state.pack(head, {**segment_state.as_arrays(self.store.export()), **arrays})

    def _make_head_and_life(self) -> tuple[SegmentHead, dict[str, Rows]]:
        ledger = self.ledger
        if self._open.gathers:
            ledger = Ledger(min(mark, self._open.closed) for mark in ledger.marks.values())
        life, arrays = self.life.dump()
        head: SegmentHead = {
            "table": self.table.name,
            "index": self.index,
            "segments": self.table.segments,
            "seq": self.seq,
            "version": self.version,
            "ledger": ledger.to_json(),
            "life": life,
        }
        return head, {f"life.{name}": value for name, value in arrays.items()}

    def load(self, data: Buffer) -> None:
        """Replace the state by one that `dump` returned.

        Raises:
            CheckpointError: the state is truncated, of another table, or of another number of segments or workers.
        """
        head, arrays = segment_state.unpack(data)
        if [head.get("index"), head.get("segments")] != [self.index, self.table.segments]:
            raise self.table.error(
                CheckpointError,
                f"the state is of segment {head.get('index')} of {head.get('segments')}; "
                f"expected {self.index} of {self.table.segments}",
            )
        store = self._store()
        columns = segment_state.as_columns(self.table, self.store.rule.fields, arrays)
        ledger = Ledger.from_json(head["ledger"])
        if len(ledger.marks) != self._ranks:
            raise self.table.error(
                CheckpointError, f"the state is of {len(ledger.marks)} workers; expected {self._ranks}"
            )
        store.load(columns)
        self.store = store
        self._begin(ledger, self._update.pace)
        self.seq, self.version = int(head["seq"]), int(head["version"])
        self.life.load(
            head["life"], {name[5:]: value.view(np.int64) for name, value in arrays.items() if name.startswith("life.")}
        )

    @property
    def evicted(self) -> int:
        """The number of rows that were evicted so far."""
        return self.life.evicted

    def changed_since(self, version: int) -> bytes:
        """Return the rows that changed or were evicted after `version`: see `rayps.ps.tables.delta`.

        If `version` is later than the segment's, an earlier state has been loaded, and all rows are returned.
        """
        return encode_delta(self, version if version <= self.version else 0)

    def branch(self, space: Space | None = None, *, factory: Factory | None = None) -> TableSegment:
        """Return a branch of this segment, with a clock that begins at step 0; it may belong to another space.

        The branch and this segment share memory until rows change.
        """
        strategy, workers = (self.strategy, self._ranks) if space is None else (space.strategy, space.workers)
        other = TableSegment(
            self.table, self.index, strategy, workers, scheduled=None if space is None else schedule_of(space, factory)
        )
        with self.store.lock:
            other.store = self.store.branch()
            other.version = self.version
            other.life.load(*self.life.dump())
        return other


def make_segment(space: Space, index: int, factory: Factory | None) -> TableSegment:
    """Return a segment of a space's table without rows; `factory` may have the job's learning-rate schedule.

    Raises ConfigError if an option of the table is not valid, and WorkloadError if the schedule cannot be evaluated.
    """
    scheduled = schedule_of(space, factory)
    return TableSegment(*_table_of(space, index), space.strategy, space.workers, scheduled=scheduled)


def make_first_state(space: Space, index: int, positions: Sequence[int]) -> bytes:
    """Return the state of a segment without rows, at the steps `positions`."""
    return TableSegment(*_table_of(space, index), space.strategy, space.workers, positions).dump()


def _table_of(space: Space, index: int) -> tuple[SparseTable, int]:
    found = space.table_of(index)
    assert found is not None, "the segment is of a table"
    return found


def _encode_head(kind: int, rank: int, step: int, weight: float) -> bytes:
    return np.array([kind, rank, step], np.int64).tobytes() + np.float64(weight).tobytes()
