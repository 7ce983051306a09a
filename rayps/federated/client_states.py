"""The state of each client between rounds: a private SQLite file, for any number of clients.

A state is named tensors, stored as safetensors, with the round that it follows. Of each client the newest state is
stored, and those that belong to the newest snapshot and to later rounds of which the driver may still take a snapshot:
a run can return to any of these. The file is unlinked right after it is opened, as in `rayps.ps.tables.disk`: no file
is left however the process ends. The driver holds the copy that survives the process
(`rayps.federated.client_states_backup`).
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import safetensors.torch
from torch import Tensor

from rayps.core.errors import ConfigError
from rayps.core.user_code import user_code
from rayps.federated.population.cohort import Ints
from rayps.workload.base import Workload

Row = tuple[int, int, bytes]  # client, the round that the state follows, the state
_CACHE = 4096  # KiB of pages that SQLite keeps
DEALT_STATES = "rayps.federated.client_states:DealtStates"  # a worker's companion, see `WorkerActor.companion`
CHUNK = 16 << 20  # bytes of states per read


class ClientStates:
    """The states of one worker's clients, by client and round.

    All methods may be called by any thread. The changes of one round are committed or undone together.
    """

    def __init__(self, folder: str | None = None) -> None:
        """Create the file. Raises ConfigError: the file cannot be created, for example because the disk is full."""
        self.saved = 0  # the round of the newest snapshot, whose states must stay available
        self.kept = 0  # the newest round of which a snapshot may still be taken
        self._lock = threading.Lock()
        try:
            with tempfile.TemporaryDirectory(prefix="rayps-clients-", dir=folder) as place:
                self._db = sqlite3.connect(Path(place) / "states", isolation_level=None, check_same_thread=False)
                for said in (
                    "locking_mode = exclusive",
                    "journal_mode = memory",
                    "synchronous = off",
                    "page_size = 8192",
                    f"cache_size = -{_CACHE}",
                    "temp_store = memory",
                ):
                    self._db.execute(f"pragma {said}")
                self._db.execute(
                    "create table states (client integer, round integer, state blob not null, "
                    "primary key (client, round))"
                )
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"states of clients cannot be put on disk in {folder or tempfile.gettempdir()}: {error}; set TMPDIR "
                "to a folder with space",
                field="strategy",
            ) from error

    def __len__(self) -> int:
        """Return the number of clients that have a state."""
        with self._lock:
            return int(self._db.execute("select count(distinct client) from states").fetchone()[0])

    # ---- used by a worker, in each round

    def get(self, client: int) -> dict[str, Tensor]:
        """Return the newest state of a client; empty if it has none."""
        asked = "select state from states where client = ? order by round desc limit 1"
        with self._lock:
            found = self._db.execute(asked, (client,)).fetchone()
        return {} if found is None else safetensors.torch.load(found[0])

    def put(self, client: int, state: dict[str, Tensor], round: int) -> None:
        """Store a client's state after `round`; it is committed by `end`."""
        plain = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        self.file([(client, round, safetensors.torch.save(plain))])

    def file(self, rows: Iterable[Row]) -> None:
        """Add states to the file, and drop the states of these clients that no snapshot can contain.

        The dropped states are older than the client's state at `saved`, or newer than `kept` and not the newest.
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

    def end(self, *, keep: bool = True) -> None:
        """Commit the states stored since the last `end`; undo them if `keep` is False."""
        with self._lock:
            if self._db.in_transaction:
                self._db.execute("commit" if keep else "rollback")

    # ---- snapshots

    def rows(self, since: int, upto: int, after: int = -1) -> list[Row]:
        """Return the newest states of rounds above `since` and up to `upto`, of clients above `after`, ascending.

        A call returns about 16 MiB at most, and at least one state if there is any: call again with the last client as
        `after`.
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

    def back(self, round: int) -> None:
        """Drop states newer than `round`."""
        with self._lock:
            self._db.execute("delete from states where round > ?", (round,))

    def clear(self) -> None:
        """Drop all states."""
        with self._lock:
            self._db.execute("delete from states")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()


class DealtStates:
    """The states of the clients that are assigned to one worker; they outlive the worker's generations.

    The driver passes the states before a generation starts (`take`), and after a snapshot fetches those that changed
    (`give`).
    """

    def __init__(self, workload: Callable[[], Workload]) -> None:
        """Store `workload`, a function that returns the job's workload."""
        self.states: ClientStates | None = None
        self._workload = workload

    def sizes(self) -> Ints:
        """Return the number of samples of each client of the data.

        Raises DataError, WorkloadError: the data cannot be read.
        """
        with user_code("data"):
            found: Ints = self._workload().data().clients.sizes
        return found

    def take(self, rows: list[Row] | None, round: int) -> None:
        """Add the states that clients have after `round`. With `rows` None, drop all states."""
        if rows is None:
            self.states = ClientStates()
            self.states.saved = round
        if self.states is not None:
            self.states.file(rows or ())
            self.states.end()

    def give(self, since: int, upto: int, after: int) -> list[Row]:
        """Return the states that changed in rounds above `since` and up to `upto`, of clients above `after`.

        See `ClientStates.rows`.
        """
        if self.states is None:
            return []
        self.states.saved = since
        return self.states.rows(since, upto, after)
