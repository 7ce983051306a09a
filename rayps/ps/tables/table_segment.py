"""One segment of a table, as its primary and as a copy: `rayps.ps.protocol.segment.ServedSegment`. No sockets, no
threads.

Without gathering each push is applied as it comes, as the strategy says (a parameter server scales it by 1/N), and
goes to the copies as it came. With gathering a round's pushes become one gradient over all ids that somebody named,
and that goes to the copies. A pull changes nothing, but where its piece has counts: then it uses the rows, which makes
and counts them, and copies do the same.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayps.core.clock import Clock
from rayps.core.errors import CheckpointError, ConfigError, TrainingError
from rayps.core.ledger import WINDOW, Ledger
from rayps.core.retained_parts import RetainedParts
from rayps.core.server_updates import weighted_mean
from rayps.core.strategy import ServerHalf
from rayps.core.topology import Servers, servers_of
from rayps.ps.protocol.space import SparseTable
from rayps.ps.tables import initial_rows, segment_state
from rayps.ps.tables.hash_index import ABSENT
from rayps.ps.tables.merge_pushes import union
from rayps.ps.tables.row_lifecycle import RowLifecycle, RowPolicy
from rayps.ps.tables.row_optimizers import Knobs, Scheduled, rule_of
from rayps.ps.tables.row_store import RowStore
from rayps.ps.tables.wire_format import (
    DTYPES,
    Counts,
    Ids,
    TablePush,
    decode_pull,
    decode_push,
    encode_pull,
    encode_push,
    encode_rows,
)

_PUSH, _ROUND, _USE = 1, 2, 3  # kinds of changes
_HEAD = 32  # kind, rank, step: int64; weight: float64
_DECAYS = struct.Struct("<d")  # before each gradient of a round: how many whole steps it counts for


def check_table(table: SparseTable) -> None:
    """Refuse what a table cannot be.

    Raises:
        ConfigError: naming the table, the field, and what it may be.
    """
    for name, value in (("dim", table.dim), ("segments", table.segments)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"table {table.name!r}: {name} is {value!r}: give a whole number of at least 1",
                field=name,
                table=table.name,
            )
    if table.dtype not in DTYPES:
        raise ConfigError(
            f"table {table.name!r}: dtype is {table.dtype!r}: give {' or '.join(DTYPES)}",
            field="dtype",
            table=table.name,
        )
    initial_rows.check(table)
    store = RowStore(table, rule_of(table))
    RowLifecycle(table, store.row_bytes, 1)


class TableSegment:
    """Segment `index` of a table: its rows, its clock and its ledger."""

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
        """`start_marks`: by rank, its next step; 0 for all unless said otherwise. `scheduled`: the job's schedule.

        Raises:
            ConfigError, WorkloadError: the table cannot be, or its schedule cannot.
        """
        self.table, self.index, self.strategy, self.size = table, index, strategy, workers
        self.rounds = 1  # see ShardView
        self.seq = self.version = 0
        self.operations = 0  # ids pulled and pushed: every step names every segment, and only ids tell a hot one
        self.copied = True  # whether changes go to copies; where not, they come back empty
        self.store = self._store()
        self._now: Knobs = self.store.rule.knobs  # those of the round that is applied
        self._scheduled, self._pace = scheduled, None if scheduled is None else scheduled.pace(table, self.store.rule)
        self._begin(Ledger([0] * workers if start_marks is None else start_marks))

    def _begin(self, ledger: Ledger) -> None:
        self.ledger = ledger
        servers = servers_of(self.strategy) or Servers()
        self.clock = Clock(ledger.marks, servers.staleness)
        self._gathers = servers.update.gathers
        self.life = RowLifecycle(self.table, self.store.row_bytes, 1 if self._gathers else max(1, self.size))
        self._closed = self.clock.slowest  # rounds that all ranks have pushed
        self._inbox: dict[int, dict[int, tuple[TablePush, float]]] = {}
        self._parts: RetainedParts[tuple[RowStore, dict[str, Any], dict[str, Any]]] = RetainedParts()
        self._wanted: set[int] = set()
        # ids, their slots, and which rows of the gradient these are (None: all)
        self._touched: tuple[Any, Any, Any] = (None, None, None)
        self._overflown: int | None = None  # the first id whose row a step made not finite
        self._fault: TrainingError | None = None  # the same as an error: no push is acknowledged from then on
        self._steps: list[tuple[Tensor, float]] = []  # gradients stepped by in a round, and what each step counts for
        self._checked: tuple[Any, TablePush] | None = None
        self._found: deque[tuple[Ids, Any, Any, int]] = deque(maxlen=2 * self.size)  # with what was pulled last

    def _store(self) -> RowStore:
        policy = RowPolicy.of(self.table)
        memory = None if policy.memory is None else policy.memory // self.table.segments
        return RowStore(self.table, rule_of(self.table), memory, policy.folder)

    @property
    def rows(self) -> int:
        """Rows that are stored."""
        return len(self.store)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, optimizer state, index and candidates."""
        return self.store.nbytes + self.life.nbytes

    def marks(self) -> dict[int, int]:
        """By rank: its next step here."""
        return dict(self.ledger.marks)

    def durable(self, rank: int) -> int:
        """The step of this rank below which all pushes are applied here."""
        return min(self._closed, self.ledger.marks[rank]) if self._gathers else self.ledger.marks[rank]

    def may_pull(self, rank: int) -> bool:
        """Whether a pull of `rank` may be served now."""
        return self.clock.may_pull(rank)

    def laggards(self) -> list[int]:
        """The ranks that pulls wait for."""
        return self.clock.laggards()

    # pushes

    def check(self, rank: int, step: int, weight: float, data: Any) -> None:
        """Raises what `push` would.

        Raises:
            ConfigError: see `rayps.ps.tables.wire_format.decode_push`.
            ValueError: the rank is not of this group, or too many steps were skipped.
        """
        if not self.ledger.seen(rank, step):
            mark = self.ledger.marks[rank]
            if step - mark >= WINDOW:
                raise ValueError(
                    f"rank {rank} pushed step {step} of table {self.table.name!r} before step {mark}: "
                    f"at most {WINDOW - 1} may be skipped"
                )
            self._checked = (data, decode_push(data, self.table))

    def push(self, rank: int, step: int, weight: float, data: Any) -> list[bytes]:
        """File a push, which may close rounds; what copies must apply for it.

        Raises:
            ConfigError, ValueError: as `check`; nothing was applied.
            TrainingError: a step has made a row not finite, now or before.
        """
        if self.ledger.seen(rank, step):
            self._must_be_finite(step)
            return []
        if self._checked is None or self._checked[0] is not data:
            self.check(rank, step, weight, data)
        assert self._checked is not None
        push, self._checked = self._checked[1], None
        self.operations += len(push.ids)
        if not self._gathers:
            self._apply(rank, step, weight, push)
            self._must_be_finite(step, rank)
            return [b"".join([_head(_PUSH, rank, step, weight), data]) if self.copied else b""]
        self.ledger.add(rank, step)
        kept = push
        if self.clock.slowest <= step:  # it waits for others, and its memory is the caller's
            kept = TablePush(push.ids.copy(), push.counts.copy(), push.rows.clone())
        self._inbox.setdefault(step, {})[rank] = (kept, weight)
        changes = self._close()
        self._must_be_finite(step)
        return changes

    def _must_be_finite(self, step: int, rank: int | None = None) -> None:
        """Refuse to go on with a row that is not finite since this step, which was `rank`'s alone where it is given."""
        if self._fault is None and self._overflown is not None:
            who = "" if rank is None else f" by the push of worker-{rank}"
            self._fault = TrainingError(
                f"table {self.table.name!r}: the row of id {self._overflown}, or its optimizer state, is not finite "
                f"(NaN or infinite) since round {step}{who}, although the gradient is:\nlower the table's rate",
                parameter=self.table.name,
                id=self._overflown,
                round=step,
                **({} if rank is None else {"rank": rank}),
            )
        if self._fault is not None:
            raise self._fault

    def _apply(self, rank: int, step: int, weight: float, push: TablePush) -> None:
        """A push that is applied as it comes."""
        self.ledger.add(rank, step)
        self.version += 1
        with self.store.lock:
            if len(push.ids) and weight:
                self._use(push.ids, push.counts)
                self._at(step)
                self.strategy.on_push(self, push.rows, weight)
            self._after()
        while self._closed < self.clock.slowest:
            self._closed += 1
            self._keep()

    def _close(self) -> list[bytes]:
        """Close the rounds that all have pushed by now; a change for each."""
        changes = []
        while self._closed < self.clock.slowest:
            held = sorted(self._inbox.pop(self._closed, {}).items())
            ids, counts, values = union(self.table, [push for _, (push, _) in held])
            self.version += 1
            self._steps = []
            weights: list[float] = [weight for _, (_, weight) in held]
            with self.store.lock:
                if len(ids) and any(weights):
                    self._use(ids, counts)
                    self._at(self._closed)
                    self.strategy.on_round(self, values, weights)
                self._after()
            pieces = [b"".join([_DECAYS.pack(decays), encode_push(ids, grad, counts)]) for grad, decays in self._steps]
            head = _head(_ROUND, len(pieces), self._closed, 0.0)
            changes.append(b"".join([head, *pieces]) if self.copied else b"")
            self._steps = []
            self._closed += 1
            self._keep()
        return changes

    def _slots(self, ids: Ids, rank: int = -1) -> tuple[Any, Any]:
        """Where rows are, and which are not stored; found before, mostly: a rank pushes what it pulled."""
        for known, slots, missing, lost in self._found:
            if lost == self.store.lost and np.array_equal(known, ids):
                if len(missing):  # somebody may have stored them since
                    slots[missing] = self.store.find(ids[missing])
                    missing = np.flatnonzero(slots == ABSENT)
                return slots.copy(), missing
        slots = self.store.find(ids)
        missing = np.flatnonzero(slots == ABSENT)
        if rank >= 0:
            self._found.append((ids.copy(), slots, missing, self.store.lost))
        return slots, missing

    def _use(self, ids: Ids, counts: Counts) -> None:
        """Find, let in and count rows; what follows steps those that are stored."""
        slots, missing = self._slots(ids)
        if len(missing) and self.store.warm(ids[missing]):
            slots[missing] = self.store.find(ids[missing])
            missing = np.flatnonzero(slots == ABSENT)
        if len(missing):
            good, uses = self.life.admit(ids[missing], counts[missing], self.version)
            come = missing[good]
            if len(come):
                slots[come] = self.store.make(ids[come], uses[good], self.version)
        stored: Any = None
        if len(missing) and not good.all():
            stored = np.flatnonzero(slots != ABSENT)
            ids, slots, counts = ids[stored], slots[stored], counts[stored]
        self.store.use(slots, counts, self.version)
        self._touched = (ids, slots, stored)

    def step(self, grad: Tensor, scale: float = 1.0, decays: float | None = None) -> None:
        """Let the optimizer apply `scale` times the gradient of the rows that are being pushed, [n, dim].

        `decays`: how many whole steps this one counts for, by which weight decay is multiplied; None = |`scale`|.
        """
        decays = abs(scale) if decays is None else decays
        if self._gathers and self.copied:
            self._steps.append((grad * scale, decays))
        ids, slots, stored = self._touched
        grad = grad if stored is None else grad[torch.from_numpy(stored)]
        fault = self.store.step(slots, grad, scale, self._knobs(decays))
        if fault is not None and self._overflown is None:
            self._overflown = int(ids[fault])

    def _knobs(self, decays: float) -> Knobs:
        """The optimizer's numbers for a step that counts for `decays` whole ones."""
        knobs = self._now
        if decays == 1 or not knobs.get("weight_decay"):
            return knobs
        return {**knobs, "weight_decay": knobs["weight_decay"] * decays}

    def _at(self, step: int) -> None:
        """What is stepped now is of this round."""
        if self._pace is not None:
            self._now = self._pace.at(step)

    def step_mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> None:
        """As `step` of sum(w_i v_i) / sum(w_i), added up in the order given."""
        self.step(weighted_mean(list(values), list(weights)))

    def _after(self) -> None:
        self.seq += 1
        self.life.evict(self.store, self.version)
        self.store.cool()

    # copies

    def replay(self, change: Any) -> None:
        """On a copy: apply one item of what `push` or `pull` gave on the primary. Raises ConfigError."""
        view = memoryview(change)
        kind, rank, step = np.frombuffer(view[:24], np.int64).tolist()
        weight = float(np.frombuffer(view[24:_HEAD], np.float64)[0])
        data = view[_HEAD:]
        if kind == _PUSH:
            self._apply(rank, step, weight, decode_push(data, self.table))
        elif kind == _USE:
            pull = decode_pull(data, self.table)
            self._count(pull.ids, pull.counts)
        elif kind == _ROUND:
            self._replay_round(rank, step, data)
        else:
            raise ConfigError(f"table {self.table.name!r}: a change of kind {kind} is not known here")

    def _replay_round(self, count: int, step: int, data: memoryview) -> None:
        size = len(data) // count if count else 0
        for rank in self.ledger.marks:
            self.ledger.add(rank, step)
        self.version += 1
        self._at(step)
        with self.store.lock:
            for k in range(count):
                one = data[k * size : (k + 1) * size]
                push = decode_push(one[_DECAYS.size :], self.table)
                if k == 0:
                    self._use(push.ids, push.counts)
                self.step(push.rows, decays=_DECAYS.unpack_from(one)[0])
            self._steps = []
            self._after()
        self._closed = step + 1
        self._keep()

    # pulls

    def pull(self, rank: int, data: Any) -> tuple[Any, int, list[bytes]]:
        """The rows asked for, as a buffer; by how many rounds `rank` leads; and what copies must apply.

        Raises:
            ConfigError: see `rayps.ps.tables.wire_format.decode_pull`.
        """
        asked = decode_pull(data, self.table)
        self.operations += len(asked.ids)
        changes: list[bytes] = []
        with self.store.lock:
            if asked.counts is not None and len(asked.ids):
                self._count(asked.ids, asked.counts)
                head = _head(_USE, rank, 0, 0.0)
                changes = [b"".join([head, encode_pull(asked.ids, asked.counts)]) if self.copied else b""]
            rows = self.store.read(asked.ids, self._slots(asked.ids, rank)[0])
        return encode_rows(rows, asked.half), self.ledger.marks[rank] - self.clock.slowest, changes

    def read(self, data: Any) -> Any:
        """The same outside the clock; changes nothing."""
        asked = decode_pull(data, self.table)
        with self.store.lock:
            return encode_rows(self.store.read(asked.ids, self.store.find(asked.ids)), asked.half)

    def _count(self, ids: Ids, counts: Counts) -> None:
        with self.store.lock:
            self._use(ids, counts)
            self._touched = (None, None, None)
            self._after()

    # states

    def keep(self, rounds: Sequence[int]) -> None:
        """After which rounds of the slowest worker to keep a state."""
        self._wanted.update(each for each in rounds if each >= self._closed)

    def _keep(self) -> None:
        if self._closed in self._wanted:
            self._wanted.discard(self._closed)
            with self.store.lock:
                self._parts.keep(self._closed, (self.store.branch(), *self._said()))

    def part(self, rounds: int) -> bytes | None:
        """The state after `rounds`, if it is kept."""
        held = self._parts.get(rounds)
        if held is None:
            return None
        store, head, arrays = held
        with store.lock:
            return segment_state.pack(head, {**segment_state.as_arrays(store.export()), **arrays})

    def dump(self) -> bytes:
        """The whole state; of gathered pushes, those whose rounds are closed."""
        with self.store.lock:
            head, arrays = self._said()
            return segment_state.pack(head, {**segment_state.as_arrays(self.store.export()), **arrays})

    def _said(self) -> tuple[dict[str, Any], dict[str, Any]]:
        ledger = self.ledger
        if self._gathers:
            ledger = Ledger(min(mark, self._closed) for mark in ledger.marks.values())
        head, arrays = self.life.dump()
        said = {
            "table": self.table.name,
            "index": self.index,
            "segments": self.table.segments,
            "seq": self.seq,
            "version": self.version,
            "ledger": ledger.to_json(),
            "life": head,
        }
        return said, {f"life.{name}": value for name, value in arrays.items()}

    def load(self, data: Any) -> None:
        """Become what `dump` gave.

        Raises:
            CheckpointError: it is torn, of another table, or of another cut.
        """
        head, arrays = segment_state.unpack(data)
        if [head.get("index"), head.get("segments")] != [self.index, self.table.segments]:
            raise CheckpointError(
                f"table {self.table.name!r}: segment {head.get('index')} of {head.get('segments')} "
                f"came: {self.index} of {self.table.segments} was expected",
                table=self.table.name,
            )
        store = self._store()
        columns = segment_state.as_columns(self.table, self.store.rule.fields, arrays)
        ledger = Ledger.from_json(head["ledger"])
        if len(ledger.marks) != self.size:
            raise CheckpointError(
                f"table {self.table.name!r}: a state of {len(ledger.marks)} workers came: {self.size} were expected",
                table=self.table.name,
            )
        store.load(columns)
        self.store = store
        self._begin(ledger)
        self.seq, self.version = int(head["seq"]), int(head["version"])
        self.life.load(head["life"], {name[5:]: value for name, value in arrays.items() if name.startswith("life.")})

    def branch(
        self, workers: int | None = None, strategy: ServerHalf | None = None, scheduled: Scheduled | None = None
    ) -> TableSegment:
        """A segment that begins with the same rows and goes its own way, for as many workers; its clock begins anew."""
        other = TableSegment(
            self.table, self.index, strategy or self.strategy, workers or self.size, scheduled=scheduled
        )
        with self.store.lock:
            other.store = self.store.branch()
            other.version = self.version
            other.life.load(*self.life.dump())
        return other


def _head(kind: int, rank: int, step: int, weight: float) -> bytes:
    return np.array([kind, rank, step], np.int64).tobytes() + np.float64(weight).tobytes()
