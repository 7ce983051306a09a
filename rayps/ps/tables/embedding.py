"""`torch.nn` embeddings whose rows are in a sparse table instead of a dense weight.

A forward pass pulls the row of each id once. A backward pass adds the rows' gradients, summed by id, to the table's
next push. In a rayps job the table is on servers (`bind`). Outside of a job the table is in this process, and
`step(model)` applies the gradients.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from rayps_client.errors import ConfigError, WorkloadError
from rayps_client.values import Buffer, Json
from torch import Tensor, nn
from torch.nn import functional

from rayps.core.job.user_code import pause_clock, user_code
from rayps.core.strategy.apply_pushes import PlainServers, update_of
from rayps.core.strategy.topology import Servers
from rayps.data.base import Batch
from rayps.ps.protocol.space import Space, SparseTable
from rayps.ps.tables import parquet
from rayps.ps.tables.client import TableClient, Tables
from rayps.ps.tables.ids import GivenIds, hash_ids, ids_of
from rayps.ps.tables.local import InProcess, TableSession
from rayps.ps.tables.lookup import Lookup
from rayps.ps.tables.row_lifecycle import RowPolicy
from rayps.ps.tables.table_options import Options, TableOptions, make_table, wire_of
from rayps.workload.base import Workload

MODES = ("sum", "mean")


class _Rows(nn.Module):
    """The base class of `Embedding` and `EmbeddingBag`: a module whose rows are in a sparse table."""

    rows_in_table: ClassVar[bool] = True  # see `rayps.workload.model.has_tables`

    def __init__(
        self,
        dim: int,
        table: str,
        *,
        seed: int = 0,
        init: Options = "normal:scale=0.01",
        optimizer: Options = "adagrad:lr=0.1",
        policy: RowPolicy | Mapping[str, Json] | None = None,
        dtype: str | torch.dtype = "float32",
        wire: str | None = None,
        segments: int = 16,
    ) -> None:
        super().__init__()
        self.table = make_table(
            dim, table, seed=seed, init=init, optimizer=optimizer, policy=policy, dtype=dtype, segments=segments
        )
        self.wire = wire_of(wire)
        self._tables: Tables | None = None

    @property
    def dim(self) -> int:
        """The number of elements of a row."""
        return self.table.dim

    def extra_repr(self) -> str:
        """Return the text for print(model)."""
        return f"{self.table.dim}, table={self.table.name!r}"

    def step(self) -> None:
        """Apply the gradients of the last backward to this module's table, in a plain torch loop.

        See the function `step`.
        """
        step(self)

    def _bind(self, tables: Tables) -> None:
        self._tables = tables
        tables.clients[self.table.name].half = self.wire == "bf16"

    def _client(self) -> TableClient:
        return self._bound_tables().clients[self.table.name]

    def _bound_tables(self) -> Tables:
        if self._tables is None:
            self._bind(_make_local([self.table]))
        assert self._tables is not None
        return self._tables

    def _pull_rows(self, ids: Tensor) -> tuple[Lookup, Tensor]:
        """Return the lookup of the ids and its rows [n, dim]. A backward adds the rows' gradient to the next push."""
        client, learns = self._client(), torch.is_grad_enabled()
        with pause_clock():
            lookup, rows = client.rows(ids, learns=learns)
        if learns:
            rows = rows.detach().requires_grad_()
            rows.register_post_accumulate_grad_hook(_make_gradient_hook(client, lookup))  # type: ignore[no-untyped-call]
        return lookup, rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": None}  # connections and rows are not pickled


def _make_gradient_hook(client: TableClient, lookup: Lookup) -> Callable[[Tensor], None]:
    def hook(rows: Tensor) -> None:
        if rows.grad is not None:
            client.gradient(lookup, rows.grad)
            rows.grad = None

    return hook


class Embedding(_Rows):
    """`torch.nn.Embedding` over a sparse table, in which every id from 0 to 2**63 - 1 has a row.

    Args:
        dim: number of elements of a row.
        table: the table's name. Modules of one model with the same table name share the table's rows, and need the
            same options.
        seed: the seed from which the initial value of each row is computed, together with the id.
        init: initial value of a row: "normal:scale=0.01", "uniform:scale=0.05", "zeros", or {"name": ..., ...}.
        optimizer: the optimizer of the rows: "sgd:lr=0.1", "adagrad:lr=0.1", "adam:lr=0.001", or a dict.
        policy: admission and eviction, e.g. {"admit": 3}; see `rayps.ps.tables.row_lifecycle`.
        dtype: the dtype of the rows, float32 or float64.
        wire: "bf16" sends rows as bfloat16; None sends them in the table's dtype.
        segments: number of parts of the table. At most this many servers can share the table.

    Raises:
        ConfigError: an argument is not valid.

    Example:
        users = rayps.Embedding(16, table="users")
        rows = users(torch.tensor([3, 17, 3]))  # [3, 16]
    """

    def forward(self, ids: GivenIds) -> Tensor:
        """Return the rows of `ids`, [*ids.shape, dim].

        Ids are whole numbers from 0 or strings, of any shape (see `ids_of`).
        """
        given = ids_of(ids, self.table.name)
        if not given.numel():
            return torch.zeros(*given.shape, self.dim, dtype=getattr(torch, self.table.dtype), device=given.device)
        lookup, rows = self._pull_rows(given)
        return functional.embedding(lookup.inverse.to(given.device), rows)


class EmbeddingBag(_Rows):
    """`torch.nn.EmbeddingBag` over a sparse table: the sum or the mean of the rows of each bag of ids.

    `mode` is "sum" or "mean". The result of an empty bag is zeros. The other arguments are those of `Embedding`.

    Raises:
        ConfigError: an argument is not valid.

    Example:
        words = rayps.EmbeddingBag(16, table="words", mode="mean")
        bags = words(torch.tensor([[1, 2], [3, 4]]))  # [2, 16]
    """

    def __init__(self, dim: int, table: str, *, mode: str = "mean", **options: Unpack[TableOptions]) -> None:
        super().__init__(dim, table, **options)
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}: give one of {', '.join(MODES)}", field="mode")
        self.mode = mode

    def forward(self, ids: GivenIds, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return one row for each bag, [bags, dim].

        If `ids` is [bags, n], each of its rows is a bag. If `ids` is [m], give `offsets` [bags]: bag i begins at
        offsets[i]. `per_sample_weights`, of the shape of `ids`, multiply the rows (only with mode "sum").
        """
        given = ids_of(ids, self.table.name)
        offsets = self._check_given_offsets(given, offsets)
        bags = len(given) if offsets is None else len(offsets)
        if not given.numel():
            return torch.zeros(bags, self.dim, dtype=getattr(torch, self.table.dtype), device=given.device)
        lookup, rows = self._pull_rows(given)
        if lookup.order is not None:  # sort by id: torch then sums in the same order for any number of segments
            rows = rows[lookup.order.to(given.device)]
        numbers = lookup.numbers.to(given.device)
        return functional.embedding_bag(numbers, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights)

    def _check_given_offsets(self, ids: Tensor, offsets: Tensor | None) -> Tensor | None:
        if ids.dim() == 2 and offsets is None:
            return None
        if ids.dim() == 1 and offsets is not None:
            return self._check_offsets(torch.as_tensor(offsets, device=ids.device), len(ids))
        with_offsets = "without" if offsets is None else "with"
        raise WorkloadError(
            f"EmbeddingBag {self.table.name!r} got ids of shape {list(ids.shape)} {with_offsets} offsets: "
            "give [bags, n] without offsets, or [m] with offsets [bags]"
        )

    def _check_offsets(self, offsets: Tensor, ids: int) -> Tensor:
        good = offsets.dim() == 1 and not offsets.is_floating_point()
        if good and len(offsets):
            good = int(offsets[0]) == 0 and int(offsets[-1]) <= ids and bool((offsets.diff() >= 0).all())
        if not good:
            shown = offsets.flatten()[:6].tolist()
            raise WorkloadError(
                f"EmbeddingBag {self.table.name!r} got offsets {shown}{' ...' if offsets.numel() > 6 else ''} of "
                f"shape {list(offsets.shape)} for {ids} ids: give whole numbers [bags] from 0 to {ids}, of which the "
                "first is 0 and none is smaller than the one before"
            )
        return offsets.to(torch.int64)

    def extra_repr(self) -> str:
        """Return the text for print(model)."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


# ---------------------------------------------------------------------------------------------- tables of a model


def rows_of(model: nn.Module) -> Iterator[_Rows]:
    """Return the `Embedding` and `EmbeddingBag` modules of a model."""
    return (module for module in model.modules() if isinstance(module, _Rows))


def tables_of(model: nn.Module) -> tuple[SparseTable, ...]:
    """Return the tables of a model, in the order of their modules, or () if there are none.

    Raises:
        ConfigError: two modules give one table different options.
    """
    found: dict[str, _Rows] = {}
    for module in rows_of(model):
        first = found.setdefault(module.table.name, module)
        for name, one, other in _find_differences(first, module):
            raise ConfigError(
                f"table {module.table.name!r} has {name} {one!r} in one module and {other!r} in another: "
                "give both modules the same options, or tables of different names",
                field=name,
            )
    return tuple(module.table for module in found.values())


def _find_differences(a: _Rows, b: _Rows) -> Iterator[tuple[str, Json, Json]]:
    yield from _compare_tables(a.table, b.table)
    if a.wire != b.wire:
        yield "wire", a.wire, b.wire


def _compare_tables(a: SparseTable, b: SparseTable) -> Iterator[tuple[str, Json, Json]]:
    for field in dataclasses.fields(SparseTable):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if one != other:
            yield field.name, one, other


def bind(
    model: nn.Module,
    session: TableSession,
    space: Space,
    lookups: Callable[[Batch], Mapping[str, GivenIds]] | None = None,
) -> Tables:
    """Connect a model's tables to those of a space on servers.

    `lookups(batch)` returns a dict from each table's name to the batch's ids (see `Workload.lookups`). If `lookups` is
    None, nothing is prefetched.

    Raises:
        ConfigError: the space has no such table, or the table has other options there.
    """
    for table in tables_of(model):
        held, _ = space.table(table.name)
        for name, there, here in _compare_tables(held, dataclasses.replace(table, segments=held.segments)):
            raise ConfigError(
                f"table {table.name!r} has {name} {there!r} on the servers and {here!r} in the model: "
                "change the model, or use another table name",
                field=name,
            )
    tables = Tables(session, space, lookups=lookups)
    for module in rows_of(model):
        module._bind(tables)
    return tables


def local(model: nn.Module) -> Tables | None:
    """Create a model's tables in this process, without rows; return the tables' client, or None without tables."""
    found = tables_of(model)
    if not found:
        return None
    tables = _make_local(found)
    for module in rows_of(model):
        module._bind(tables)
    return tables


def _make_local(found: Iterable[SparseTable]) -> Tables:
    cut = tuple(dataclasses.replace(table, segments=1) for table in found)
    space = Space("local", 0, 1, PlainServers(Servers(update=update_of(0), tables=True)), tables=cut)
    return Tables(InProcess(space), space)


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a model's tables, which are in this process, as Parquet files into `folder`/NAME. `load` reads them."""
    for tables, session in _find_local(model):
        for client in tables.clients.values():
            segment = session.segments[client.first]
            parquet.write(Path(folder) / client.table.name, client.table, [segment.dump()])


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """Create a model's tables in this process with the rows of the Parquet files in `folder`/NAME; return the model.

    The files may contain any number of segments. `folder` can be the folder `tables` of a checkpoint.

    Raises:
        CheckpointError: a table has no files, or files of another table.
    """
    tables = local(model)
    for name, client in tables.clients.items() if tables is not None else ():
        _fill(client, Path(folder) / name)
    return model


def load_states(model: nn.Module, states: Mapping[str, Iterable[Buffer]]) -> nn.Module:
    """Create a model's tables in this process from states of segments; return the model.

    `states` maps a table's name to the states of all its segments (`TableSegment.dump`). A table that is not in
    `states` has no rows.
    """
    tables = local(model)
    for name, client in tables.clients.items() if tables is not None else ():
        if name in states:
            with tempfile.TemporaryDirectory() as folder:
                parquet.write(folder, client.table, states[name])
                _fill(client, Path(folder))
    return model


def _fill(client: TableClient, folder: Path) -> None:
    assert isinstance(client.session, InProcess)
    for index, state in parquet.read(folder, client.table, 1, marks=[0]):
        client.session.segments[client.first + index].load(state)


def step(model: nn.Module) -> None:
    """Apply the gradients of the last backward to the tables. Call it in a plain torch loop after `optimizer.step()`.

    Without this call, the gradients are added to those of the next backward.
    """
    for tables, _ in _find_local(model):
        tables.push(tables.step, 1.0)


def _find_local(model: nn.Module) -> list[tuple[Tables, InProcess]]:
    """Return the clients of a model's tables, each with its session in this process.

    Raises ConfigError if the tables are on servers.
    """
    found = list({id(tables): tables for tables in (module._bound_tables() for module in rows_of(model))}.values())
    local = [(tables, tables.session) for tables in found if isinstance(tables.session, InProcess)]
    if len(local) < len(found):
        raise ConfigError(
            "the model's tables are on servers, not in this process: the job's strategy steps them there, and "
            "checkpoints save them"
        )
    return local


def try_out(workload: Workload, model: nn.Module) -> None:
    """Compute the loss of one batch in this process, to find invalid ids before any worker starts.

    Raises:
        WorkloadError, DataError: e.g. ids are not whole numbers, or one is negative.
    """
    with user_code("data"):
        batch = next(iter(workload.data().batches(rank=0, size=1, seed=0, epoch=0)), None)
    if batch is not None and batch.size:
        with torch.no_grad(), user_code("loss"):
            workload.loss(model, batch)
        with user_code("lookups"):
            given = workload.lookups(batch)
        _check_lookups(given, model)


def _check_lookups(given: Mapping[str, GivenIds], model: nn.Module) -> None:
    known = {table.name for table in tables_of(model)}
    if not isinstance(given, Mapping):
        raise WorkloadError(
            f"lookups(batch) returned {type(given).__name__}: return a dict from each table's name to its ids"
        )
    for name, ids in given.items():
        if name not in known:
            raise WorkloadError(
                f"lookups(batch) returned ids of table {name!r}, but the model's tables are: {', '.join(sorted(known))}"
            )
        ids_of(ids, name)


__all__ = [
    "Embedding",
    "EmbeddingBag",
    "bind",
    "hash_ids",
    "ids_of",
    "load",
    "load_states",
    "local",
    "rows_of",
    "save",
    "step",
    "tables_of",
    "try_out",
]
