"""The clients' states in a checkpoint: a Parquet file with a row for each client that has a state.

    client   the client's number
    name     the client's name
    round    the round after which the state was computed
    state    the state's tensors, as safetensors

The file's metadata has the name of the strategy that stored the states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import safetensors.torch
from torch import Tensor

from rayps.core.urls import Location
from rayps.federated.client_states import Row
from rayps.tensors.checkpoints import checkpoint

_FOLDER, _FILE = "clients", "states.parquet"
_STRATEGY = b"rayps.strategy"
_BATCH = 64  # states that are read from a file at once
_SCHEMA = pa.schema([("client", pa.int64()), ("name", pa.string()), ("round", pa.int64()), ("state", pa.binary())])


class StoredStates(Protocol):
    """The states of the clients of a job that has ended."""

    def find(self, name: str) -> int | None:
        """Return the number of the client of this name; None if it has no state."""

    def get(self, client: int) -> dict[str, Tensor]:
        """Return the state of a client, or {} if it has none."""


def write_states(folder: Path, strategy: str, names: Sequence[str], chunks: Iterable[list[Row]]) -> Path:
    """Write the states of `chunks` into a checkpoint's folder of tables, and return the file's path.

    `names` are those of all clients, by number.
    """
    path = folder / _FOLDER / _FILE
    path.parent.mkdir(parents=True)
    with pq.ParquetWriter(path, _SCHEMA.with_metadata({_STRATEGY: strategy.encode()})) as writer:
        for rows in chunks:
            clients, rounds, states = (list(column) for column in zip(*rows, strict=True))
            columns = [clients, [names[client] for client in clients], rounds, states]
            writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
    return path


def read_states(folder: Path) -> tuple[str, Iterator[list[Row]]] | None:
    """Return the name of the strategy, and the states in pieces, from a checkpoint's folder of tables.

    Return None if the checkpoint has no states.
    """
    path = folder / _FOLDER / _FILE
    if not path.exists():
        return None
    file = pq.ParquetFile(path)
    columns = ["client", "round", "state"]
    batches = file.iter_batches(batch_size=_BATCH, columns=columns)
    chunks = (list(zip(*(batch[name].to_pylist() for name in columns), strict=True)) for batch in batches)
    return (file.schema_arrow.metadata or {}).get(_STRATEGY, b"").decode(), chunks


class CheckpointStates:
    """The states in a checkpoint, of which only the asked ones are read."""

    def __init__(self, path: Location) -> None:
        """`path` is a checkpoint: a folder, or the URL of one."""
        self._path = path

    def find(self, name: str) -> int | None:
        """Return the number of the client of this name; None if it has no state.

        Raises CheckpointError if the checkpoint cannot be read.
        """
        with checkpoint.tables_of(self._path) as tables:
            path = tables / _FOLDER / _FILE
            if not path.exists():
                return None
            known = pq.read_table(path, columns=["client", "name"])
        found = known.filter(pc.equal(known["name"], name))["client"].to_pylist()
        return found[0] if found else None

    def get(self, client: int) -> dict[str, Tensor]:
        """Return the state of a client, or {} if it has none. Raises CheckpointError if it cannot be read."""
        with checkpoint.tables_of(self._path) as tables:
            path = tables / _FOLDER / _FILE
            if not path.exists():
                return {}
            found = pq.read_table(path, columns=["state"], filters=[("client", "=", client)])["state"].to_pylist()
        return safetensors.torch.load(found[0]) if found else {}
