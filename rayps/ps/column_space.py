"""One space of a job on a server group, as the job's driver uses it to load, fetch and restore the space's states.

A job has one space. If each data-parallel replica of its model is several workers, it has one space for each column of
the model. The ranks of a space are data ranks.

Servers answer a request for the states after a round (PART) when they close the round. The request must arrive before
that. A request for one round is cancelled when the states after another round are wanted.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rayps_client.errors import LinkError, RaypsError

from rayps.ps.client.session import Session
from rayps.ps.client.table_face import find_tables
from rayps.ps.group import ManagerClient
from rayps.ps.protocol.members import MemberChange, with_members
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.space import Space, SpaceRank, SparseTable
from rayps.ps.server.dense_segment import ShardPart, part_of, state_of
from rayps.tensors.snapshot import RetainedParts, Snapshot

log = logging.getLogger(__name__)

AGAIN_SECONDS = 0.2  # seconds from the loss of a connection to the next attempt to connect
LOAD_BYTES = 64_000_000  # bytes of states after which a LOAD request is sent


class ColumnSpace:
    """An open space. `positions`: for each data rank, the number of its first push to the space."""

    def __init__(self, group: ManagerClient, space: Space, positions: list[int], timeout: float) -> None:
        self.space = space
        self._group, self._positions, self._timeout = group, positions, timeout
        self._collector: Collector | None = None

    def rank(self, data: int) -> SpaceRank:
        """Return a new incarnation of a data rank; servers refuse the earlier incarnations of the rank."""
        return SpaceRank(self._group.contact(), self.space, self._group.join(self.space.number, data))

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Open a session of rank -1, which loads and reads states. Raises as `Session.join`."""
        session = self._open_session()
        session.join()
        try:
            yield session
        finally:
            session.close()

    def opener(self) -> Session:
        """Open a session of rank -1, which the caller joins and closes."""
        return self._open_session()

    def _open_session(self) -> Session:
        return Session(self._group.contact, self.space, -1, timeout=self._timeout, name=f"opener-{self.space.name}")

    # ---- states

    def load(
        self,
        part: Snapshot,
        tables: Mapping[int, Any],
        segments: Iterable[int] | None = None,
        *,
        members: Sequence[MemberChange] = (),
    ) -> None:
        """Send states to `segments` (default: all). `part` has the state of the dense vector.

        `tables` is a dict from segment to state, for segments of tables. Those that it lacks begin empty. `members`:
        which ranks take part, if workers join and leave.
        """
        self._load({}, part, tables, range(self.space.segments) if segments is None else segments, members)

    def restore(
        self,
        part: Snapshot,
        tables: Mapping[int, Any],
        segments: list[int],
        skips: Mapping[int, int],
        *,
        members: Sequence[MemberChange] = (),
    ) -> int:
        """Load lost segments again, as `load` does, and report this to the manager; return how many pushes are lost.

        `skips`: a dict from rank to the step below which no worker retains pushes. Such pushes are lost if the states
        do not contain them.
        """
        missing = self._load(skips, part, tables, segments, members)
        self._group.restored(self.space.number, segments)
        return missing

    def _load(
        self,
        skips: Mapping[int, int],
        part: Snapshot,
        tables: Mapping[int, Any],
        segments: Iterable[int],
        members: Sequence[MemberChange],
    ) -> int:
        most = 0
        with self.session() as session:
            batch: dict[int, Any] = {}
            for index in segments:
                table = tables.get(index)
                batch[index], missing = make_first_state(
                    self.space, index, part, self._positions, table, skips, members=members
                )
                most = max(most, missing)
                if sum(map(len, batch.values())) >= LOAD_BYTES:
                    session.exchange(GroupMessage.LOAD, batch)
                    batch = {}
            if batch:
                session.exchange(GroupMessage.LOAD, batch)
        return most

    # ---- checkpoints

    def collect(self) -> None:
        """Start a thread that fetches the segments' states from the servers for checkpoints; `want` names the round.

        Call this when a generation of the worker group begins: it ends the thread of the earlier generation. A space
        that has only tables gets no thread.
        """
        self.stop_collecting()
        if self.space.cuts:
            self._collector = Collector(self._open_session, list(range(self.space.segments)), self._timeout)

    def stop_collecting(self) -> None:
        """Stop fetching states."""
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    def want(self, rounds: int) -> None:
        """Fetch the states after round `rounds`."""
        if self._collector is not None:
            self._collector.want(rounds)

    def held(self, slowest: int) -> list[tuple[int, list[int]]]:
        """Return a list with the pair of progress and fetched rounds (`Collector.held`), or [] without a collector."""
        return [] if self._collector is None else [self._collector.held(slowest)]

    @property
    def unanswered(self) -> RaypsError | None:
        """Why the wanted states were not fetched in time; None if they were, or may still arrive."""
        return None if self._collector is None else self._collector.unanswered

    def states(self, rounds: int) -> dict[int, Any] | None:
        """Return a dict from segment to its state after round `rounds`, or None if these have not been fetched."""
        return None if self._collector is None else self._collector.states(rounds)

    def parts(self, rounds: int) -> list[ShardPart | None]:
        """Return the states of the dense vector's segments after round `rounds`, or None for each not fetched."""
        states = self.states(rounds)
        return [None if states is None else part_of(states[i], rounds, lo) for i, (lo, _) in enumerate(self.space.cuts)]

    def saved(self, rounds: int) -> None:
        """Notify the servers that a checkpoint has the states after round `rounds`."""
        if self._collector is not None:
            self._collector.saved(rounds)


def make_first_state(
    space: Space,
    index: int,
    part: Snapshot,
    positions: list[int],
    table: Any = None,
    skips: Mapping[int, int] | None = None,
    *,
    members: Sequence[MemberChange] = (),
) -> tuple[Any, int]:
    """Return the state with which a segment begins, and how many pushes are lost because of `skips`.

    A segment of the dense vector begins with its elements of the snapshot `part`. A segment of a table begins with the
    state `table`, or if that is None, without rows and at the steps `positions`. `skips`: a dict from rank to the step
    below which missing pushes count as applied, because no worker retains them. `members`: see `with_members`.
    """
    if space.table_of(index) is not None:
        tables = find_tables()
        return tables.skip_steps(table or tables.first_state(space, index, positions), skips or {}, members)
    lo, hi = space.cuts[index]
    ledger = part.ledger(lo, hi).copy()
    missing = sum(ledger.skip(rank, step) for rank, step in (skips or {}).items())
    ledger = with_members(ledger, members)
    return state_of(part.params[lo:hi], part.layout, lo, moments=part.moments, marks=ledger), missing


class Collector:
    """The thread that fetches states for the checkpoints of one generation of the worker group.

    `meet` creates a session of rank -1 with the space; `segments` are the segments whose states are fetched. `timeout`:
    seconds for the servers to answer after the workers have finished the round.
    """

    def __init__(self, meet: Callable[[], Session], segments: list[int], timeout: float) -> None:
        self._meet, self._segments, self._timeout = meet, segments, timeout
        self._states: RetainedParts[dict[int, Any]] = RetainedParts()
        self._asking = 0  # the round whose states the thread requests
        self._missed = 0  # the newest round whose states were requested too late
        self._finished_at = math.inf  # when the driver found that all workers had finished the wanted round
        self._error: RaypsError | None = None  # why the last request for the wanted states failed
        self._failed: RaypsError | None = None  # why the thread has ended
        self._saved: list[int] = []
        self._session: Session | None = None
        self._ended = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name="collector")
        self._thread.start()

    def want(self, rounds: int) -> None:
        """Fetch the states after round `rounds`; cancel an unanswered request for another round."""
        with self._news:
            changed = rounds != self._states.wanted
            self._states.wanted = rounds
            if changed:
                self._error, self._finished_at = None, math.inf
            if rounds == self._missed:  # there is no later round: request the states again
                self._missed = 0
            late = self._session if changed and self._asking not in (0, rounds) else None
            self._news.notify_all()
        if late is not None:
            late.hang_up()

    def saved(self, rounds: int) -> None:
        """Notify the servers that a checkpoint has the states after round `rounds`."""
        with self._news:
            self._saved.append(rounds)
            self._news.notify_all()

    def held(self, slowest: int) -> tuple[int, list[int]]:
        """Return the servers' progress in rounds, and the rounds whose states have been fetched.

        The driver waits for the states after the wanted round until the progress is greater than this round. The
        progress is the position `slowest` of the slowest worker. But it is at most the wanted round while the states
        may still arrive, and greater than the wanted round if they were requested too late. The time from which
        `unanswered` counts is the first call in which the slowest worker has finished the wanted round.
        """
        with self._news:
            wanted, held = self._states.wanted, sorted(self._states)
            if wanted and wanted not in held:
                if slowest >= wanted:
                    self._finished_at = min(self._finished_at, time.monotonic())
                return (max(slowest, wanted + 1) if self._missed == wanted else min(slowest, wanted)), held
            return slowest, held

    @property
    def unanswered(self) -> RaypsError | None:
        """Why the states were not fetched within `timeout` seconds after the workers had finished the wanted round.

        None if they were fetched, or may still arrive.
        """
        with self._news:
            late = time.monotonic() - self._finished_at >= self._timeout
            return self._failed or (self._error if late else None)

    def states(self, rounds: int) -> dict[int, Any] | None:
        """Return a dict from segment to its state after round `rounds`, or None if these have not been fetched."""
        with self._news:
            return self._states.get(rounds)

    def close(self) -> None:
        """End the thread and its connections."""
        with self._news:
            self._ended = True
            session = self._session
            self._news.notify_all()
        if session is not None:
            session.hang_up()
        self._thread.join(10.0)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # a bug: the job continues without further checkpoints, and restarts at its end
            log.exception("the thread that collects checkpoints failed")
            with self._news:
                self._failed = RaypsError(
                    f"the states for checkpoints cannot be read from the servers: {type(error).__name__}: {error}"
                )
        finally:
            if self._session is not None:
                self._session.close()

    def _turn(self) -> bool:
        """Wait for work, send the next request and wait for its answer; return False after `close`."""
        with self._news:
            self._news.wait_for(lambda: self._ended or self._saved or self._find_next())
            if self._ended:
                return False
            saved, self._saved = self._saved, []
            self._asking = rounds = 0 if saved else self._find_next()
        try:
            if self._session is None:
                self._session = self._meet()
                self._session.join()
            for each in saved:
                self._session.notify(GroupMessage.SAVED, each)
            if rounds:
                self._fetch(self._session, rounds)
        except LinkError as error:
            log.debug("a checkpoint's states could not be fetched: %s", error)
            if self._session is not None:
                self._session.close()
            with self._news:
                self._session = None
                self._saved = saved + self._saved
                if not self._ended and rounds in (0, self._states.wanted):
                    self._error = error
                    self._news.wait(AGAIN_SECONDS)
        finally:
            self._asking = 0
        return True

    def _find_next(self) -> int:
        wanted = self._states.wanted
        return 0 if wanted in self._states or wanted == self._missed else wanted

    def _fetch(self, session: Session, rounds: int) -> None:
        try:
            answers = session.exchange(GroupMessage.PART, dict.fromkeys(self._segments, b""), step=rounds)
        except LinkError:
            raise
        except RaypsError as error:  # the round had closed before the request arrived
            log.debug("%s", error)
            with self._news:
                self._missed = rounds
                if rounds == self._states.wanted:
                    self._error = error
            return
        with self._news:
            self._states.retain(rounds, answers.pieces)
            self._error, self._finished_at = None, math.inf


def yield_segment_states(session: Session, indices: Iterable[int]) -> Iterator[tuple[int, Any]]:
    """Yield (segment, its state now) for each of `indices`; states are requested one at a time."""
    for index in indices:
        yield index, session.exchange(GroupMessage.PART, {index: b""}, step=-1).pieces[index]


def read_tables(space: Space, session: Session) -> dict[str, list[Any]]:
    """Return the present states of all segments of each table, by the table's name."""
    return {
        table.name: [bytes(each) for _, each in yield_segment_states(session, segments)]
        for table, segments in _yield_tables(space)
    }


def write_tables(
    space: Space, folder: Path, kept: Mapping[int, Any] | None, meet: Callable[[], AbstractContextManager[Session]]
) -> list[Path]:
    """Write the tables to `folder`, and return the files.

    `kept` is a dict from segment to the state to write. If it is None, the present states are written, which are read
    in a session that `meet` opens.
    """
    if kept is not None:
        for table, segments in _yield_tables(space):
            find_tables().write(folder / table.name, table, (kept[index] for index in segments))
    else:
        with meet() as session:
            for table, segments in _yield_tables(space):
                find_tables().write(
                    folder / table.name, table, (each for _, each in yield_segment_states(session, segments))
                )
    return sorted(folder.rglob("*.parquet"))


def read_saved_tables(
    space: Space, folder: Path, positions: list[int], same: bool, only: Collection[int] | None = None
) -> dict[int, Any]:
    """Return the states that `write_tables` wrote to `folder`, as a dict from segment of `space` to state.

    `only`: the segments to return; None means all. The tables may have been written with another number of segments.
    `same`: they were written with this number of workers. If both numbers are the same, clocks continue as written;
    otherwise they begin at `positions`.
    """
    found: dict[int, Any] = {}
    for table, segments in _yield_tables(space):
        place = folder / table.name
        as_saved = same and len(list(place.glob("rows-*.parquet"))) == table.segments
        wanted = [index - segments.start for index in segments if only is None or index in only]
        read = find_tables().read(place, table, space.workers, wanted, None if as_saved else positions)
        found |= {segments[index]: each for index, each in read}
    return found


def carry_tables(old: Space, session: Session, new: Space) -> dict[int, Any]:
    """Return the old space's table states, which `session` reads, as a dict from segment of the new space to state."""
    there = {table.name: segments for table, segments in _yield_tables(new)}
    found: dict[int, Any] = {}
    for table, segments in _yield_tables(old):
        for index, each in yield_segment_states(session, segments):
            found[there[table.name][index - segments.start]] = each
    return found


def _yield_tables(space: Space) -> Iterator[tuple[SparseTable, range]]:
    first = len(space.cuts)
    for table in space.tables:
        yield table, range(first, first + table.segments)
        first += table.segments
