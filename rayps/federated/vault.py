"""The driver's copy of all clients' states, as they were at its newest snapshot: for deaths, checkpoints and resuming.

After a snapshot the driver asks each worker for what changed since the last one, in pieces; before a generation begins,
each worker is given the states of the clients that live there. A checkpoint holds them as one Parquet file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayps.errors import CheckpointError, ClusterError
from rayps.federated.cohort import Ints, homes
from rayps.federated.states import Row, States

_FOLDER, _FILE = "clients", "states.parquet"
_STRATEGY = b"rayps.strategy"
_SCHEMA = pa.schema([("client", pa.int64()), ("round", pa.int64()), ("state", pa.binary())])


class Vault:
    """States of a job's clients; `sizes` are their samples, by which they are given homes."""

    def __init__(self, sizes: Ints) -> None:
        self._sizes, self._states = sizes, States()
        self._strategy = ""  # whose states these are
        self._at = 0  # the round of the newest snapshot

    def deal(self, workers: list[Any], strategy: Any, round: int, timeout: float) -> None:
        """Give each worker the states of its clients after `round`, before it begins.

        Raises:
            ClusterError, TimeoutError: a worker was lost meanwhile.
        """
        if strategy.name != self._strategy:  # another one's states say nothing to this one
            self._states.clear()
        self._strategy, self._at = strategy.name, round
        self._states.back(round)
        home = homes(self._sizes, len(workers))
        for worker in workers:
            worker.handle.call("take_states", [], True, round).result(timeout)
        for rows in self._all(round):
            shares: list[list[Row]] = [[] for _ in workers]
            for row in rows:
                shares[int(home[row[0]])].append(row)
            replies = [w.handle.call("take_states", share, False, round)
                       for w, share in zip(workers, shares, strict=True) if share]  # fmt: skip
            for reply in replies:
                reply.result(timeout)

    def gather(self, workers: list[Any], round: int, timeout: float) -> bool:
        """Take over what changed up to `round`; False where a worker was lost meanwhile: nothing has changed here."""
        try:
            for worker in workers:
                after = -1
                while rows := worker.handle.call("give_states", self._at, round, after).result(timeout):
                    self._states.file(rows)
                    after = rows[-1][0]
        except (ClusterError, TimeoutError):
            self._states.end(keep=False)
            return False
        self._states.end()
        self._at = self._states.saved = round
        return True

    def write(self, folder: Path) -> list[Path]:
        """The states into a checkpoint's folder of tables; which files there are now."""
        path = folder / _FOLDER / _FILE
        path.parent.mkdir(parents=True)
        with pq.ParquetWriter(path, _SCHEMA.with_metadata({_STRATEGY: self._strategy.encode()})) as writer:
            for rows in self._all(self._at):
                columns = [list(column) for column in zip(*rows, strict=True)]
                writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
        return [path]

    def read(self, folder: Path, round: int) -> None:
        """What a checkpoint holds, if it holds any. Raises CheckpointError: it is of other clients."""
        path = folder / _FOLDER / _FILE
        if not path.exists():
            return
        file = pq.ParquetFile(path)
        self._strategy = (file.schema_arrow.metadata or {}).get(_STRATEGY, b"").decode()
        for batch in file.iter_batches(batch_size=1024):
            columns = [batch.column(i).to_pylist() for i in range(3)]
            if columns[0] and max(columns[0]) >= len(self._sizes):
                raise CheckpointError(
                    f"the checkpoint holds a state of client {max(columns[0])}, and the data has {len(self._sizes)} "
                    "clients: give the same data and the same clients, or start without resume",
                    path=str(path),
                )
            self._states.file(zip(*columns, strict=True))
        self._states.end()
        self._at = self._states.saved = round

    def _all(self, round: int) -> Iterator[list[Row]]:
        after = -1
        while rows := self._states.rows(-1, round, after):
            yield rows
            after = rows[-1][0]

    def close(self) -> None:
        """Let go of the file."""
        self._states.close()
