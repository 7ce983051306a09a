"""The division of rows into clients, its statistics and its picture."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import torch
from numpy.typing import ArrayLike, NDArray
from rayps_client.errors import ConfigError, DataError
from rayps_client.rows import native

from rayps.data.base import Batch, random_of
from rayps.data.client_picture import picture
from rayps.data.partition_rules import Ints, PartitionRule, apportion, classes

_COLUMNS = 100  # statistics() has a column for each label if there are at most this many
_SHOWN, _LABELS = 60, 20  # the most clients and labels in summary()
RowIds: TypeAlias = torch.Tensor | ArrayLike  # an id for each row: whole numbers or text, from torch, numpy or Arrow
GivenClients: TypeAlias = PartitionRule | RowIds | None  # a rule, the name of a column, or an id for each row


class ClientSummary(TypedDict):
    """The statistics of a division of rows into clients, as JSON data. `Clients.summary` returns it."""

    clients: int
    rows: int
    rule: str
    names: list[str]
    sizes: list[int]
    labels: list[str]
    counts: list[list[int]]
    smallest: int
    median: float
    largest: int


class Clients:
    """The rows of each client. The clients are numbered 0 to count - 1, in the order of their names or of the rule.

    - `names`: a text for each client.
    - `sizes`: the number of rows of each client, at least 1 [clients, int64].
    - `rule`: the rule as text.
    - `labels`: the names of the labels, and each client's number of rows of each label [clients, labels]; None if the
      labels are not classes.
    """

    def __init__(
        self,
        names: Sequence[str],
        order: Ints,
        sizes: Ints,
        take: Callable[[Ints], Batch],
        *,
        rule: str,
        labels: tuple[tuple[str, ...], Ints] | None = None,
    ) -> None:
        """Set the division. Raises DataError if a client has no rows.

        `order`: the row numbers of client 0, then of client 1, and so on. `take` makes a batch from row numbers.
        """
        self.names = tuple(names)
        self.sizes = sizes
        self.rule = rule
        self._order = order
        self._ends = np.concatenate(([0], np.cumsum(sizes))).tolist()
        self.labels = labels
        self._take = take
        if not len(sizes) or not sizes.all():
            empty = self.names[int(sizes.argmin())] if len(sizes) else "0"
            raise DataError(f"client {empty!r} has no samples: leave it out, or give it rows", client=empty)

    @property
    def count(self) -> int:
        """The number of clients."""
        return len(self.names)

    def rows(self, k: int) -> Ints:
        """Return the row numbers of client `k`, ascending. The caller must not change them.

        Raises ConfigError if there is no client `k`.
        """
        if not 0 <= k < len(self.names):
            raise ConfigError(f"there is no client {k}: their numbers are 0 to {len(self.names) - 1}", field="client")
        return self._order[self._ends[k] : self._ends[k + 1]]

    def batch(self, rows: Ints) -> Batch:
        """Return a batch of the rows with these numbers, in this order."""
        return self._take(rows)

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """The names of the labels, ascending by label; None if the labels are not classes."""
        return None if self.labels is None else self.labels[0]

    def find(self, name: str) -> int | None:
        """Return the number of the client with this name, or None if there is none."""
        return self._numbers.get(name)

    def alike(self, labels: torch.Tensor | ArrayLike, *, seed: int = 0) -> NDArray[np.str_]:
        """Divide other rows, e.g. evaluation data, among the same clients. `labels` are the other rows' labels.

        Return the name of a client for each of the other rows, which is a value for the argument `client` of other
        data. The rows of a label are distributed at random, in proportion to each client's number of rows of that
        label.

        Raises:
            DataError: the clients' labels or `labels` are not classes, or no client has a row of one of the labels.
        """
        if self.labels is None:
            raise DataError("these clients have no class labels, so other rows cannot be divided in the same way")
        values = labels.numpy(force=True) if isinstance(labels, torch.Tensor) else np.asarray(labels)
        names, numbers = classes(values, "alike")
        known, counts = self.labels
        owners = np.empty(len(numbers), dtype=np.int64)
        for label, name in enumerate(names):
            have = counts[:, known.index(name)] if name in known else np.zeros(self.count)
            if not have.any():
                raise DataError(f"no client has rows of label {name}: leave the rows of that label out")
            rows = random_of(seed, label).permutation(np.flatnonzero(numbers == label))
            owners[rows] = np.repeat(np.arange(self.count), apportion(len(rows), have / have.sum()))
        return np.array(self.names)[owners]

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: k for k, name in enumerate(self.names)}

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the clients' names, sizes and rows. Equal divisions have equal hashes in all processes."""
        found = hashlib.sha256(repr(self.names).encode())
        found.update(self.sizes.tobytes() + self._order.tobytes())
        return found.hexdigest()

    # ------------------------------------------------------------------------------------------ statistics

    def statistics(self) -> pa.Table:
        """Return a table with one row for each client and the columns `client` (its name) and `rows`.

        If the labels are classes, the table also has `labels` (the number of different labels) and `entropy` (in bits).
        If there are at most 100 different labels, it has a column `label NAME` for each of them, with its rows.
        """
        columns: dict[str, pa.Array] = {"client": pa.array(self.names, pa.string()), "rows": pa.array(self.sizes)}
        if self.labels is not None:
            names, counts = self.labels
            columns["labels"] = pa.array((counts > 0).sum(axis=1))
            columns["entropy"] = pa.array(entropy(counts))
            if len(names) <= _COLUMNS:
                columns |= {f"label {name}": pa.array(counts[:, i]) for i, name in enumerate(names)}
        return pa.table(columns)

    def summary(self) -> ClientSummary:
        """Return the statistics as JSON data, with at most 60 clients and 20 labels.

        If there are more clients, 60 of them are chosen at equal distances in the order of their sizes. If there are
        more labels, the last one is "other", with the rows of all labels that are left out.
        """
        by_size = np.argsort(-self.sizes, kind="stable")
        shown = np.arange(self.count)
        if self.count > _SHOWN:
            shown = by_size[np.arange(_SHOWN) * (self.count - 1) // (_SHOWN - 1)]
        labels, counts = self._few_labels()
        return {
            "clients": self.count,
            "rows": int(self.sizes.sum()),
            "rule": self.rule,
            "names": [self.names[k] for k in shown.tolist()],
            "sizes": self.sizes[shown].tolist(),
            "labels": labels,
            "counts": counts[shown].tolist() if labels else [],
            "smallest": int(self.sizes.min()),
            "median": float(np.median(self.sizes)),
            "largest": int(self.sizes.max()),
        }

    def _few_labels(self) -> tuple[list[str], Ints]:
        if self.labels is None:
            return [], np.zeros((self.count, 0), dtype=np.int64)
        names, counts = self.labels
        if len(names) <= _LABELS:
            return list(names), counts
        most = np.sort(np.argsort(-counts.sum(axis=0), kind="stable")[: _LABELS - 1])
        other = counts.sum(axis=1) - counts[:, most].sum(axis=1)
        return [*(names[i] for i in most.tolist()), "other"], np.column_stack([counts[:, most], other])

    def svg(self) -> str:
        """Return a picture of `summary()` as SVG: each client's number of rows, in total and of each label."""
        return picture(self.summary())


def entropy(counts: Ints) -> NDArray[np.float64]:
    """Return the entropy of each row of `counts` [rows, labels], in bits: log2(L) for L equally frequent labels."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(0.0 - (shares * logs).sum(axis=1), dtype=np.float64)


# ------------------------------------------------------------------------------------------------ division


def checked_client(client: GivenClients, columns: bool = False) -> GivenClients:
    """Return `client`, which must be None, a rule, an id for each row, or, if `columns`, the name of a column.

    Raises:
        ConfigError: `client` is none of these.
    """
    if client is None or isinstance(client, PartitionRule) or (columns and isinstance(client, str) and client):
        return client
    if isinstance(client, (str, bytes)) or not hasattr(client, "__len__"):
        other = "the name of a column, " if columns else ""
        hint = "; these rows have no columns" if isinstance(client, str) and not columns else ""
        raise ConfigError(
            f"client is {client!r}: give {other}a rule such as rayps.data.iid(20), or an id for each row{hint}",
            field="client",
        )
    return client


def divide(
    client: GivenClients,
    rows: int,
    labels: NDArray[np.generic] | None,
    take: Callable[[Ints], Batch],
    *,
    usable: Ints | None = None,
    column: str | None = None,
) -> Clients:
    """Divide `rows` rows by a rule, or by an id for each row.

    `labels`: the label of each row; None if there are no labels. `take` makes a batch from row numbers. `usable`: the
    row numbers to divide; None means all rows. `column`: the column that has the ids; None if they are not a column.

    Raises:
        ConfigError: the rule makes more clients or shards than there are rows.
        DataError: an id is null, the number of ids is not `rows`, or the rule needs labels that are classes.
    """
    which = np.arange(rows, dtype=np.int64) if usable is None else usable
    known = None if labels is None else labels[which]
    if isinstance(client, PartitionRule):
        owners = client.owners(len(which), classes(known, str(client))[1] if client.by_label else None)
        names = tuple(map(str, range(int(owners.max(initial=-1)) + 1)))
        words = str(client)
    else:
        names, owners = owners_by_id(client, rows, column or "client")
        owners = owners[which]
        words = f"column {column}" if column else "an id for each row"
        if usable is not None:  # drop clients without usable rows
            there, owners = np.unique(owners, return_inverse=True)
            names, owners = tuple(names[k] for k in there.tolist()), owners.astype(np.int64)
    order, sizes = in_order(owners, len(names))
    counts = None if known is None or not _are_classes(known) else label_counts(owners, len(names), known)
    return Clients(names, which[order], sizes, take, rule=words, labels=counts)


def in_order(owners: Ints, clients: int) -> tuple[Ints, Ints]:
    """Return all row numbers, sorted by client, and each client's number of rows.

    `owners` has the client of each row.
    """
    return np.argsort(owners, kind="stable"), np.bincount(owners, minlength=clients).astype(np.int64)


def _are_classes(labels: NDArray[np.generic]) -> bool:
    return labels.ndim == 1 and labels.dtype.kind in "iub"


def label_counts(owners: Ints, clients: int, labels: NDArray[np.generic]) -> tuple[tuple[str, ...], Ints] | None:
    """Return the labels' names, and each client's number of rows of each label [clients, labels].

    Return None if there are more than 10,000 labels or more than 50 million counts.
    """
    names, numbers = classes(labels, "statistics")
    if len(names) * clients > 50_000_000 or len(names) > 10_000:
        return None
    counts = np.bincount(owners * len(names) + numbers, minlength=clients * len(names))
    return names, counts.reshape(clients, len(names)).astype(np.int64)


def owners_by_id(ids: RowIds | None, rows: int, name: str = "client") -> tuple[tuple[str, ...], Ints]:
    """Return the clients' names, ascending, and for each row the index of its client's name.

    `ids` has an id for each of `rows` rows. `name` is the name of the ids in error messages.

    Raises:
        DataError: an id is null, there are not `rows` ids, or ids are neither whole numbers nor text.
    """
    column = ids if isinstance(ids, (pa.Array, pa.ChunkedArray)) else _as_arrow(ids)
    if len(column) != rows:
        raise DataError(f"client has {len(column)} ids for {rows} rows: give one for each row", column="client")
    return _coded(column, name)


def _coded(column: pa.Array, name: str) -> tuple[tuple[str, ...], Ints]:
    """Return the distinct values of an Arrow column as text, ascending, and the index of each row's value."""
    import pyarrow.compute as pc  # not at the top: it takes 0.1 s of each process's start

    kind = column.type.value_type if pt.is_dictionary(column.type) else column.type
    if column.null_count:
        row = int(pc.index(pc.is_null(column), True).as_py())
        raise DataError(
            f"{name} is null in row {row}, and in {column.null_count} rows in total: give every row a client",
            column=name,
            row=row,
        )
    if not (pt.is_integer(kind) or pt.is_boolean(kind) or pt.is_string(kind) or pt.is_large_string(kind)):
        raise DataError(f"{name} is {column.type}: give whole numbers or text", column=name)
    if pt.is_dictionary(column.type):
        column = column.cast(kind)
    if pt.is_boolean(kind):
        column = column.cast(pa.uint8())
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    found = pc.dictionary_encode(whole)
    if isinstance(found, pa.ChunkedArray):
        found = found.combine_chunks()
    order = pc.array_sort_indices(found.dictionary).to_numpy()
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    names = tuple(map(str, found.dictionary.take(pa.array(order)).to_pylist()))
    return names, place[found.indices.to_numpy(zero_copy_only=False)]


def _as_arrow(ids: RowIds | None) -> pa.Array:
    values = ids.numpy(force=True) if isinstance(ids, torch.Tensor) else ids
    if isinstance(values, np.ma.MaskedArray):
        values = values.tolist()
    try:
        return pa.array(native(values) if isinstance(values, np.ndarray) else values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"client: ids are not valid: {error}; give whole numbers or text, one for each row", column="client"
        ) from None
