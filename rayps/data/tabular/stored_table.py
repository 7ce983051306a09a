"""Write the rows of a sequential source once into an Arrow file, which all processes of a host share and map.

CSV, JSON lines, compressed Arrow files and Arrow datasets have no access to rows by number. Their used columns are
written, uncompressed, into a file in the system's temporary folder (TMPDIR). Memory holds one block of rows while the
file is written. Afterwards rows are read from the operating system's page cache, which may be dropped at any time.

Cost: the disk holds the used columns once, 8 bytes for a number, and every host that runs a worker reads the source
once. The file is removed when the last process of the host that uses it ends.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from rayps_client.errors import DataError

from rayps.cluster.scratch import SharedScratch
from rayps.data.files import as_data_error
from rayps.data.tabular.table_rows import ChunkedTable

FileBlocks = tuple[str, Iterator[pa.RecordBatch]]  # what a part of the source is, and its rows
Source = tuple[pa.Schema, Iterator[FileBlocks]]  # the columns of all parts, and the parts
_SECONDS = 3600.0  # for which a process waits while another one writes the file


class StoredTable(ChunkedTable):
    """The rows of a sequential source, in a memory-mapped file that processes with the same `key` share."""

    def __init__(self, key: str, read: Callable[[], Source], timeout: float = _SECONDS) -> None:
        """Write the rows of `read()`, or wait at most `timeout` seconds until another process has written them."""
        shared = SharedScratch(key, lambda folder: _write(folder, *read()), what="converting rows", timeout=timeout)
        self._closed = weakref.finalize(self, shared.close)
        with pa.memory_map(str(shared.path / "rows.arrow")) as file:
            table = pa.ipc.open_file(file).read_all()
        super().__init__(table, json.loads((shared.path / "parts.json").read_text()))

    def close(self) -> None:
        """Close the file. The last process of the host that closes it removes it."""
        self._closed()


def _write(folder: Path, schema: pa.Schema, parts: Iterator[FileBlocks]) -> None:
    counts: list[tuple[str, int]] = []
    try:
        with pa.ipc.new_file(folder / "rows.arrow", schema) as writer:
            for name, blocks in parts:
                rows = 0
                for block in _read(name, blocks):
                    writer.write_batch(block)
                    rows += block.num_rows
                counts.append((name, rows))
        (folder / "parts.json").write_text(json.dumps(counts))
    except OSError as error:
        raise DataError(
            f"the rows cannot be written into {folder.parent}: {error}\nset TMPDIR to a disk with more space",
            file=str(folder),
        ) from error


def _read(name: str, blocks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with as_data_error(name):
        yield from blocks
