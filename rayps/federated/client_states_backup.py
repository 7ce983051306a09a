"""The driver's copy of all clients' states, as of its newest snapshot: for recovery, checkpoints and resuming.

After a snapshot, the driver fetches from each worker the states that have changed since the previous snapshot. Before a
generation starts, the driver sends each worker the states of that worker's clients. A checkpoint has all states as one
Parquet file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from rayps_client.errors import CheckpointError, ClusterError
from torch import Tensor

from rayps.cluster.local import ActorHandle
from rayps.federated.client_states import WORKER_STATES, ClientStates, Row
from rayps.federated.client_states_file import read_states, write_states
from rayps.federated.population.cohort import Ints, home_ranks


class _Worker(Protocol):
    """A worker from which client states are fetched, and to which they are sent."""

    @property
    def handle(self) -> ActorHandle:
        """The handle of the worker's actor."""


class ClientStatesBackup:
    """The driver's copy of the states of a job's clients. The methods do nothing if the strategy stores no states."""

    def __init__(self) -> None:
        self._sizes: Ints | None = None  # samples of each client, by which they are assigned to workers
        self._names: tuple[str, ...] = ()  # of all clients, by number
        self._states: ClientStates | None = None
        self._strategy = ""  # the strategy whose states these are
        self._at = 0  # the round of the newest snapshot

    def send_states(self, workers: Sequence[_Worker], owner: str | None, round: int, timeout: float) -> None:
        """Send each worker, before its generation starts, the states that its clients have after `round`.

        `owner` is the name of the strategy if it stores client states. If `owner` is None, all states are dropped. If a
        worker is lost during this call, the method returns early; the next call to that worker detects the loss.
        `timeout` is the number of seconds for each request.
        """
        if owner is None:
            self.close()
            return
        if owner != self._strategy:  # the states of another strategy have another meaning
            self.close()
        self._strategy, self._at = owner, round
        try:
            if self._sizes is None:
                asked = workers[0].handle.call("companion", WORKER_STATES, "clients")
                self._sizes, self._names = asked.result(timeout)
            if self._states is not None:
                self._states.delete_after(round)
            ranks = home_ranks(self._sizes, len(workers))
            for worker in workers:
                worker.handle.call("companion", WORKER_STATES, "load_states", None, round).result(timeout)
            for rows in self._all(round):
                self._check_clients(rows)
                shares: list[list[Row]] = [[] for _ in workers]
                for row in rows:
                    shares[int(ranks[row[0]])].append(row)
                for worker, share in zip(workers, shares, strict=True):
                    worker.handle.call("companion", WORKER_STATES, "load_states", share, round).result(timeout)
        except (ClusterError, TimeoutError):
            return

    def fetch_states(self, workers: Sequence[_Worker], round: int, timeout: float) -> bool:
        """Fetch from all workers the states that have changed since the last call, up to `round`.

        Return False, with the copy unchanged, if a worker was lost during this call. `timeout` is the number of seconds
        for each request.
        """
        if not self._strategy:
            return True
        if self._states is None:
            self._states = ClientStates()
        try:
            for worker in workers:
                after, ask = -1, ("companion", WORKER_STATES, "changed_states", self._at, round)
                while rows := worker.handle.call(*ask, after).result(timeout):
                    self._states.add_rows(rows)
                    after = rows[-1][0]
        except (ClusterError, TimeoutError):
            self._states.commit(keep=False)
            return False
        self._states.commit()
        self._at = self._states.saved = round
        return True

    @property
    def writer(self) -> Callable[[Path], list[Path]] | None:
        """The function that writes the states into a checkpoint's folder; None if there are no states."""
        return self.write if self._states is not None else None

    def write(self, folder: Path) -> list[Path]:
        """Write the states into a checkpoint's folder. Return the paths of the written files."""
        return [write_states(folder, self._strategy, self._names, self._all(self._at))]

    def read(self, folder: Path, round: int) -> None:
        """Read the states, if there are any, from the folder of a checkpoint of `round`."""
        found = read_states(folder)
        if found is None:
            return
        (self._strategy, chunks), self._states = found, ClientStates()
        for rows in chunks:
            self._states.add_rows(rows)
        self._states.commit()
        self._at = self._states.saved = round

    def find(self, name: str) -> int | None:
        """Return the number of the client of this name, or None if no client has it."""
        return self._names.index(name) if name in self._names else None

    def get(self, client: int) -> dict[str, Tensor]:
        """Return the newest state of a client, or {} if it has none."""
        return {} if self._states is None else self._states.get(client)

    def _check_clients(self, rows: list[Row]) -> None:
        assert self._sizes is not None
        if rows[-1][0] >= len(self._sizes):
            raise CheckpointError(
                f"the checkpoint has a state of client {rows[-1][0]}, but the data has {len(self._sizes)} clients:\n"
                "give the same data, divided into the same clients, or start without resume"
            )

    def _all(self, round: int) -> Iterator[list[Row]]:
        after = -1
        while self._states is not None and (rows := self._states.rows(-1, round, after)):
            yield rows
            after = rows[-1][0]

    def close(self) -> None:
        """Drop all states."""
        if self._states is not None:
            self._states.close()
        self._states, self._strategy, self._at = None, "", 0
