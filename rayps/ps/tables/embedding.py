"""Embeddings without a dense weight: modules of a torch model whose rows live in a sparse table.

A forward looks the ids up, once each, and gives their rows; a backward leaves the rows' gradients with the table, those
of an id that came several times added up. In a run of rayps the table is on servers (`bind`); elsewhere each module
has a table in its own process, which takes a step by `step(model)`: the law that distributed runs are held against.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayps.core.errors import ConfigError, WorkloadError
from rayps.core.server_updates import PlainServers, update_of
from rayps.core.topology import Servers
from rayps.core.user_code import peers_awaited, user_code
from rayps.ps.protocol.space import Space, SparseTable
from rayps.ps.tables import parquet
from rayps.ps.tables.client import TableClient, Tables
from rayps.ps.tables.ids import hash_ids, ids_of
from rayps.ps.tables.local import InProcess
from rayps.ps.tables.lookup import Lookup
from rayps.ps.tables.table_options import made_table, wire_of
from rayps.workload.base import Workload

MODES = ("sum", "mean")


class _Rows(nn.Module):
    """A view of a sparse table: what `Embedding` and `EmbeddingBag` have in common."""

    def __init__(
        self,
        dim: int,
        table: str,
        *,
        seed: int = 0,
        init: str | Mapping[str, Any] = "normal:scale=0.01",
        optimizer: str | Mapping[str, Any] = "adagrad:lr=0.1",
        policy: Any = None,
        dtype: str | torch.dtype = "float32",
        wire: str | None = None,
        segments: int = 16,
    ) -> None:
        super().__init__()
        self.table = made_table(dim, table, seed, init, optimizer, policy, dtype, segments)
        self.wire = wire_of(wire)
        self._tables: Tables | None = None

    @property
    def dim(self) -> int:
        """Numbers in a row."""
        return self.table.dim

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{self.table.dim}, table={self.table.name!r}"

    def step(self) -> None:
        """In a loop of plain torch: let the table's own optimizer apply what backward has left; see `step`."""
        step(self)

    def _bind(self, tables: Tables) -> None:
        self._tables = tables
        tables.clients[self.table.name].half = self.wire == "bf16"

    def _bound(self) -> TableClient:
        return self._bound_tables().clients[self.table.name]

    def _bound_tables(self) -> Tables:
        if self._tables is None:
            self._bind(_local([self.table]))
        assert self._tables is not None
        return self._tables

    def _look(self, ids: Tensor) -> tuple[Lookup, Tensor]:
        """Which rows the ids need, and these, once each [n, dim]; a backward to them goes into the coming push."""
        client, learns = self._bound(), torch.is_grad_enabled()
        with peers_awaited():
            lookup, rows = client.rows(ids, learns=learns)
        rows = rows.to(ids.device)
        if learns:
            rows = rows.detach().requires_grad_()
            rows.register_post_accumulate_grad_hook(_taker(client, lookup))  # type: ignore[no-untyped-call]
        return lookup, rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": None}  # links and rows stay where they are


def _taker(client: TableClient, lookup: Lookup) -> Callable[[Tensor], None]:
    def take(rows: Tensor) -> None:
        if rows.grad is not None:
            client.gradient(lookup, rows.grad.cpu())
            rows.grad = None

    return take


class Embedding(_Rows):
    """`torch.nn.Embedding` over a sparse table: any 64-bit id has a row, made on first use from seed and id.

    `dim` is the length of a row and `table` the table's name: modules of one model with the same name share its rows,
    and must agree on everything else. `init` says how a row begins: "normal:scale=0.01", "uniform:scale=0.05",
    "zeros", or a dict {"name": ..., ...}. `optimizer` steps single rows: "sgd:lr=0.1", "adagrad:lr=0.1",
    "adam:lr=0.001", or a dict. `policy` is the life of a row (`rayps.ps.tables.row_lifecycle`), e.g. {"admit": 3}.
    `dtype` is
    that of the rows; `wire="bf16"` halves what travels. The table is cut into `segments`: it can be spread over as
    many servers.

    Raises:
        ConfigError: an argument cannot be.

    Example:
        users = rayps.Embedding(16, table="users")
        rows = users(torch.tensor([3, 17, 3]))  # [3, 16]
    """

    def forward(self, ids: Any) -> Tensor:
        """The rows of `ids`, [*ids.shape, dim]. Ids are int64 of any shape, 0 or more, or strings (see `ids_of`)."""
        given = ids_of(ids, self.table.name)
        if not given.numel():
            return torch.zeros(*given.shape, self.dim, dtype=getattr(torch, self.table.dtype), device=given.device)
        lookup, rows = self._look(given)
        return functional.embedding(lookup.inverse.to(given.device), rows)


class EmbeddingBag(_Rows):
    """`torch.nn.EmbeddingBag` over a sparse table: the sum or the mean of the rows of each bag of ids.

    `mode` is "sum" or "mean"; an empty bag gives zeros. The other arguments are those of `Embedding`.

    Raises:
        ConfigError: an argument cannot be.

    Example:
        words = rayps.EmbeddingBag(16, table="words", mode="mean")
        bags = words(torch.tensor([[1, 2], [3, 4]]))  # [2, 16]
    """

    def __init__(self, dim: int, table: str, *, mode: str = "mean", **options: Any) -> None:
        super().__init__(dim, table, **options)
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}: give one of {', '.join(MODES)}", field="mode")
        self.mode = mode

    def forward(self, ids: Any, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """One row for each bag, [bags, dim].

        `ids` [bags, n] has a bag in each row; `ids` [m] with `offsets` [bags] has the bags one behind another, bag i
        from offsets[i] on. `per_sample_weights`, of the ids' shape, multiply the rows (mode "sum").
        """
        given = ids_of(ids, self.table.name)
        offsets = self._offsets(given, offsets)
        bags = len(given) if offsets is None else len(offsets)
        if not given.numel():
            return torch.zeros(bags, self.dim, dtype=getattr(torch, self.table.dtype), device=given.device)
        lookup, rows = self._look(given)
        if lookup.order is not None:  # torch adds up in the order of the rows' numbers: however many segments there are
            rows = rows[lookup.order.to(given.device)]
        numbers = lookup.numbers.to(given.device)
        return functional.embedding_bag(numbers, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights)

    def _offsets(self, ids: Tensor, offsets: Tensor | None) -> Tensor | None:
        if ids.dim() == 2 and offsets is None:
            return None
        if ids.dim() == 1 and offsets is not None:
            return self._checked(torch.as_tensor(offsets, device=ids.device), len(ids))
        with_offsets = "without" if offsets is None else "with"
        raise WorkloadError(
            f"EmbeddingBag {self.table.name!r} was given ids of shape {list(ids.shape)} {with_offsets} offsets: "
            "give [bags, n] without offsets, or [m] with offsets [bags]"
        )

    def _checked(self, offsets: Tensor, ids: int) -> Tensor:
        good = offsets.dim() == 1 and not offsets.is_floating_point()
        if good and len(offsets):
            good = int(offsets[0]) == 0 and int(offsets[-1]) <= ids and bool((offsets.diff() >= 0).all())
        if not good:
            shown = offsets.flatten()[:6].tolist()
            raise WorkloadError(
                f"EmbeddingBag {self.table.name!r} was given offsets {shown}{' ...' if offsets.numel() > 6 else ''} of "
                f"shape {list(offsets.shape)} for {ids} ids: give whole numbers [bags] that begin with 0, never fall, "
                f"and end with at most {ids}"
            )
        return offsets.to(torch.int64)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


# ---------------------------------------------------------------------------------------------- tables of a model


def rows_of(model: nn.Module) -> Iterator[_Rows]:
    """The modules of a model whose rows live in tables."""
    return (module for module in model.modules() if isinstance(module, _Rows))


def tables_of(model: nn.Module) -> tuple[SparseTable, ...]:
    """The tables of a model, in the order of their first use; () where there are none.

    Raises:
        ConfigError: two modules say different things about one table.
    """
    found: dict[str, _Rows] = {}
    for module in rows_of(model):
        first = found.setdefault(module.table.name, module)
        for name, one, other in _differences(first, module):
            raise ConfigError(
                f"table {module.table.name!r} is used with {name} {one!r} and with {name} {other!r} in one model: "
                "give both modules the same, or two tables by other names",
                field=name,
            )
    return tuple(module.table for module in found.values())


def _differences(a: _Rows, b: _Rows) -> Iterator[tuple[str, Any, Any]]:
    yield from _unlike(a.table, b.table)
    if a.wire != b.wire:
        yield "wire", a.wire, b.wire


def _unlike(a: SparseTable, b: SparseTable) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(SparseTable):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if one != other:
            yield field.name, one, other


def bind(
    model: nn.Module, talk: Any, space: Space, lookups: Callable[[Any], Mapping[str, Any]] | None = None
) -> Tables:
    """Let a model's tables be those of a space on servers, seen through `talk` (`rayps.ps.client.session.Session`).

    `lookups(batch)` foretells the ids of a batch by table, see `Workload.lookups`; None = no prefetch.

    Raises:
        ConfigError: the space has no such table, or another one by that name.
    """
    for table in tables_of(model):
        held, _ = space.table(table.name)
        for name, there, here in _unlike(held, dataclasses.replace(table, segments=held.segments)):
            raise ConfigError(
                f"table {table.name!r} has {name} {there!r} on the servers and {here!r} in the model: "
                "change the model, or begin under another name",
                field=name,
            )
    tables = Tables(talk, space, lookups=lookups)
    for module in rows_of(model):
        module._bind(tables)
    return tables


def local(model: nn.Module) -> Tables | None:
    """Let a model's tables be in this process, new and empty; those of one name are one. None where there are none."""
    found = tables_of(model)
    if not found:
        return None
    tables = _local(found)
    for module in rows_of(model):
        module._bind(tables)
    return tables


def _local(found: Any) -> Tables:
    cut = tuple(dataclasses.replace(table, segments=1) for table in found)
    space = Space("local", 0, 1, PlainServers(Servers(update=update_of(0), tables=True)), tables=cut)
    return Tables(InProcess(space), space)


def save(model: nn.Module, folder: str | Path) -> None:
    """Write the tables of a model in this process as Parquet, each into `folder`/NAME; `load` reads them."""
    for tables in _locals(model):
        for client in tables.clients.values():
            segment = tables.talk.segments[client.first]
            parquet.write(Path(folder) / client.table.name, client.table, [segment.dump()])


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """Let a model's tables be in this process, with the rows that Parquet files in `folder`/NAME hold, e.g. of a
    checkpoint in its folder `tables`, by whatever number of segments.

    Raises:
        CheckpointError: there are none, or they are of another table.
    """
    tables = local(model)
    for name, client in tables.clients.items() if tables is not None else ():
        _fill(client, Path(folder) / name)
    return model


def load_states(model: nn.Module, states: Mapping[str, Iterable[Any]]) -> nn.Module:
    """As `load`, from the states of all segments of a table (`TableSegment.dump`), by its name; others are empty."""
    tables = local(model)
    for name, client in tables.clients.items() if tables is not None else ():
        if name in states:
            with tempfile.TemporaryDirectory() as folder:
                parquet.write(folder, client.table, states[name])
                _fill(client, Path(folder))
    return model


def _fill(client: TableClient, folder: Path) -> None:
    for index, state in parquet.read(folder, client.table, 1, marks=[0]):
        client.talk.segments[client.first + index].load(state)


def step(model: nn.Module) -> None:
    """In a loop of plain torch: let the tables' own optimizers apply what backward has left; after `optimizer.step()`.

    What is not applied is kept and added to the next backward's.
    """
    for tables in _locals(model):
        tables.push(tables.step, 1.0)


def _locals(model: nn.Module) -> list[Tables]:
    """The tables of a model that are in this process, once each. Raises ConfigError where they are on servers."""
    found = list({id(tables): tables for tables in (module._bound_tables() for module in rows_of(model))}.values())
    if any(not isinstance(tables.talk, InProcess) for tables in found):
        raise ConfigError("the model's tables are on servers: there the strategy takes the step, and checkpoints save")
    return found


def try_out(workload: Workload, model: nn.Module) -> None:
    """Compute the loss of one batch here, so that what is wrong with ids is said before any worker starts.

    Raises:
        WorkloadError, DataError: e.g. ids are no whole numbers, or one is negative.
    """
    with user_code("data"):
        batch = next(iter(workload.data().batches(rank=0, size=1, seed=0, epoch=0)), None)
    if batch is not None and batch.size:
        with torch.no_grad(), user_code("loss"):
            workload.loss(model, batch)
        with user_code("lookups"):
            given = workload.lookups(batch)
        _check_lookups(given, model)


def _check_lookups(given: Any, model: nn.Module) -> None:
    known = {table.name for table in tables_of(model)}
    if not isinstance(given, Mapping):
        raise WorkloadError(f"lookups(batch) gave {type(given).__name__}: return a dict of ids by table")
    for name, ids in given.items():
        if name not in known:
            raise WorkloadError(f"lookups(batch) names table {name!r}; the model's are {', '.join(sorted(known))}")
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
