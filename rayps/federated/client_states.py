"""Store the state of each client between rounds on a worker: a SQLite file, for any number of clients.

A state consists of named tensors, stored as safetensors with the round after which the state was computed. For each
client the file has the newest state, and the states to which the job may return: those of the newest snapshot, and of
later rounds of which the driver may still take a snapshot. The file is unlinked as soon as it is open, so that it is
removed however the process ends. The driver has a copy of the states that survives the process
(`rayps.federated.client_states_backup`).
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import safetensors.torch
from rayps_client.errors import ConfigError
from torch import Tensor

from rayps.core.job.user_code import user_code
from rayps.federated.population.cohort import Ints
from rayps.workload.base import Workload

Row = tuple[int, int, bytes]  # (client, round after which the state was computed, state)
_CACHE = 4096  # KiB of pages in SQLite's cache
WORKER_STATES = "rayps.federated.client_states:WorkerStates"  # a worker's companion, see `WorkerActor.companion`
CHUNK = 16 << 20  # bytes of states that `rows` returns at once


class ClientStates:
    """The states of one worker's clients, one for each client and round.

    Any thread may call the methods. The states stored in one round are committed together or not at all.
    """

    def __init__(self, folder: str | None = None) -> None:
        """Create the file. Raises ConfigError if that fails, for example because the disk is full."""
        self.saved = 0  # the round of the newest snapshot, whose states must stay available
        self.kept = 0  # the newest round of which a snapshot may still be taken
        self._lock = threading.Lock()
        try:
            with tempfile.TemporaryDirectory(prefix="rayps-clients-", dir=folder) as place:
                self._db = sqlite3.connect(Path(place) / "states", isolation_level=None, check_same_thread=False)
                for setting in (
                    "locking_mode = exclusive",
                    "journal_mode = memory",
                    "synchronous = off",
                    "page_size = 8192",
                    f"cache_size = -{_CACHE}",
                    "temp_store = memory",
                ):
                    self._db.execute(f"pragma {setting}")
                self._db.execute(
                    "create table states (client integer, round integer, state blob not null, "
                    "primary key (client, round))"
                )
                weakref.finalize(self, self._db.close)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"cannot store the clients' states on disk in {folder or tempfile.gettempdir()}: {error}; set TMPDIR "
                "to a folder with free space",
                field="strategy",
            ) from error

    def __len__(self) -> int:
        """Return the number of clients that have a state."""
        with self._lock:
            return int(self._db.execute("select count(distinct client) from states").fetchone()[0])

    # ---- used by a worker, in each round

    def get(self, client: int) -> dict[str, Tensor]:
        """Return the newest state of a client, or {} if the client has no state."""
        asked = "select state from states where client = ? order by round desc limit 1"
        with self._lock:
            found = self._db.execute(asked, (client,)).fetchone()
        return {} if found is None else safetensors.torch.load(found[0])

    def put(self, client: int, state: dict[str, Tensor], round: int) -> None:
        """Store a client's state after `round`. `commit` commits the state."""
        plain = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        self.add_rows([(client, round, safetensors.torch.save(plain))])

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add states to the file, and delete the states of the same clients that no snapshot can need.

        No snapshot can need a state that is older than the client's state as of round `saved`, or a state of a round
        between `kept` and the new state.
        """
        with self._lock:
            if not self._db.in_transaction:
                self._db.execute("begin")
            for client, round, state in rows:
                self._db.execute(
                    "delete from states where client = ? and round > ? and round < ?",
                    (client, max(self.saved, self.kept), round),
                )
                self._db.execute("insert or replace into states values (?, ?, ?)", (client, round, state))
                self._db.execute(
                    "delete from states where client = ?1 and round < "
                    "(select max(round) from states where client = ?1 and round <= ?2)",
                    (client, self.saved),
                )

    def commit(self, *, keep: bool = True) -> None:
        """Commit the states stored since the last call, or drop them if `keep` is False."""
        with self._lock:
            if self._db.in_transaction:
                self._db.execute("commit" if keep else "rollback")

    # ---- snapshots

    def rows(self, since: int, upto: int, after: int = -1) -> list[Row]:
        """Return, for each client above `after`, its newest state of the rounds above `since` and up to `upto`.

        The clients are in ascending order, without clients that have no such state. A call returns about 16 MiB at
        most. To get all states, call again with the last client as `after`, until the list is empty.
        """
        asked = (
            "select client, max(round), state from states where client > ? and round > ? and round <= ? "
            "group by client order by client"
        )
        found, size = list[Row](), 0
        with self._lock:
            for row in self._db.execute(asked, (after, since, upto)):
                found.append(row)
                size += len(row[2])
                if size >= CHUNK:
                    break
        return found

    def delete_after(self, round: int) -> None:
        """Delete the states of rounds after `round`."""
        with self._lock:
            self._db.execute("delete from states where round > ?", (round,))

    def clear(self) -> None:
        """Delete all states."""
        with self._lock:
            self._db.execute("delete from states")

    def close(self) -> None:
        """Close the file, which deletes it."""
        with self._lock:
            self._db.close()


class WorkerStates:
    """The states of one worker's clients, for the driver. The states outlive the worker's generations.

    Before a generation starts, the driver sends the states to the worker (`load_states`). After a snapshot, the driver
    fetches the states that have changed (`changed_states`).
    """

    def __init__(self, workload: Callable[[], Workload]) -> None:
        """Store `workload`, a function that returns the job's workload."""
        self.states: ClientStates | None = None
        self._workload = workload

    def clients(self) -> tuple[Ints, tuple[str, ...]]:
        """Return the number of samples and the name of each client of the data.

        Raises DataError or WorkloadError if the data cannot be read.
        """
        with user_code("data"):
            found = self._workload().data().clients
        return found.sizes, found.names

    def load_states(self, rows: list[Row] | None, round: int) -> None:
        """Add the states that clients have after `round`. If `rows` is None, start again without states."""
        if rows is None:
            self.states = ClientStates()
            self.states.saved = round
        if self.states is not None:
            self.states.add_rows(rows or ())
            self.states.commit()

    def changed_states(self, since: int, upto: int, after: int) -> list[Row]:
        """Return the states that changed in rounds above `since` and up to `upto`, as `ClientStates.rows` does."""
        if self.states is None:
            return []
        self.states.saved = since
        return self.states.rows(since, upto, after)
