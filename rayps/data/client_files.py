"""Store rows on disk, sorted by client, in memory-mapped files that the processes of a host share.

The system's temporary folder (TMPDIR) must have space for the rows and another 17 bytes per row. While the rows are
sorted, it must have space for the rows once more. One process sorts the rows, and needs 32 bytes of memory per row. The
other processes use only the operating system's page cache.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rayps_client.columns import ColumnLayout, ColumnRows
from rayps_client.errors import DataError

from rayps.cluster.scratch import SharedScratch
from rayps.data.clients import Clients
from rayps.data.partition_rules import Ints

Array = NDArray[np.generic]
_BLOCK = 32 << 20  # bytes that are sorted at a time


class RowsByClient:
    """All rows sorted by client, read from shared files.

    - `rows`: the sorted rows.
    - `order`: for each sorted row, its number in the data.
    - `place`: for each row of the data, its position in `rows`.
    - `sizes`, `names`, `labels`, `rule`: as in `Clients`.
    """

    def __init__(
        self,
        key: str,
        layout: ColumnLayout,
        count: int,
        read: Callable[[], Iterator[ColumnRows]],
        divide_rows: Callable[[Array | None, Ints | None], Clients],
        timeout: float = 600.0,
    ) -> None:
        """Sort the rows, or wait at most `timeout` seconds until another process of this host has sorted them.

        Processes with the same `key` share the files. `count` is the number of rows. `read()` returns all rows in the
        order of the data. `divide_rows(labels, usable)` returns their division into clients.
        """

        def fill(folder: Path) -> None:
            _check_disk_space(folder, count, layout)
            _fill(folder, layout, count, read, divide_rows)

        shared = SharedScratch(key, fill, what="sorting rows by client", timeout=timeout)
        self._closed = weakref.finalize(self, shared.close)
        self.rows = ColumnRows(
            _open(shared.path / "x.npy"),
            None if layout.label is None else _open(shared.path / "y.npy"),
            _open(shared.path / "good.npy").view(np.bool_),
            None,
        )
        self.place, self.order = (_open(shared.path / name).view(np.int64) for name in ("place.npy", "order.npy"))
        self.sizes = np.load(shared.path / "sizes.npy")
        summary = np.load(shared.path / "summary.npz")
        self.names, self.rule = tuple(summary["names"].tolist()), str(summary["rule"])
        self.labels = (tuple(summary["labels"].tolist()), summary["counts"]) if "labels" in summary else None

    def close(self) -> None:
        """Close the files. The last process of the host that closes them removes them."""
        self._closed()


def _open(path: Path) -> Array:
    return np.asarray(np.load(path, mmap_mode="r"))


def _new(path: Path, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)


def _check_disk_space(folder: Path, count: int, layout: ColumnLayout) -> None:
    needed, free = count * (2 * layout.row_bytes + 17), shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"sorting {count} rows by client needs {needed / 1e9:.1f} GB in {folder.parent}, which has "
            f"{free / 1e9:.1f}: set TMPDIR to a larger disk",
            needed=needed,
            free=free,
        )


def _fill(
    folder: Path,
    layout: ColumnLayout,
    count: int,
    read: Callable[[], Iterator[ColumnRows]],
    divide_rows: Callable[[Array | None, Ints | None], Clients],
) -> None:
    """Write the rows in the order of the data. Then write them sorted by client, one block at a time."""
    columns: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {
        "x": ((count, layout.width), layout.store),
        "good": ((count,), np.dtype(np.bool_)),
    }
    if layout.label is not None:
        columns["y"] = ((count,), layout.label_dtype)
    raw = {name: _new(folder / f"{name}.raw.npy", *how) for name, how in columns.items()}
    done = 0
    for rows in read():
        end = done + len(rows.good)
        for name, out in raw.items():
            out[done:end] = getattr(rows, name)
        done = end
    good = raw["good"]
    clients = divide_rows(raw.get("y"), None if good.all() else np.flatnonzero(good))
    order = np.concatenate([clients.rows(k) for k in range(clients.count)])
    place = np.zeros(count, dtype=np.int64)
    place[order] = np.arange(len(order))
    for name, out in raw.items():
        into = _new(folder / f"{name}.npy", (len(order), *out.shape[1:]), out.dtype)
        block = max(1, _BLOCK // max(1, out.itemsize * int(np.prod(out.shape[1:], dtype=np.int64))))
        for first in range(0, len(order), block):
            wanted = order[first : first + block]
            by_row = np.argsort(wanted)  # the file is read from front to back
            into[first + by_row] = out[wanted[by_row]]
        (folder / f"{name}.raw.npy").unlink()
    np.save(folder / "place.npy", place)
    np.save(folder / "order.npy", order)
    np.save(folder / "sizes.npy", clients.sizes)
    summary, names, rule = folder / "summary.npz", np.array(clients.names), np.array(clients.rule)
    if clients.labels is None:
        np.savez(summary, names=names, rule=rule)
    else:
        np.savez(summary, names=names, rule=rule, labels=np.array(clients.labels[0]), counts=clients.labels[1])
