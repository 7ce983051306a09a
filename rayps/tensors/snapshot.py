"""The state of a run between two rounds, from which a restart, a resume or the next strategy starts.

A snapshot contains the parameters as one vector, the optimizer's state and the buffers by name, and each worker's
position in the data and random state. `rayps.tensors.checkpoints.checkpoint` writes it to disk and reads it back.

Each worker has its own buffers (BatchNorm statistics) while it trains. Rank 0's buffers are evaluated, saved, returned,
and copied to all workers when a run starts or restarts. Parameters that need no gradient are stored with the buffers.
Those that no step has changed (`frozen`) are sent to each worker process once, and written to a folder of checkpoints
once.

Under the loop `local_updates`, `params` is the consensus (`Strategy.consensus`), and `own` contains the state from
which each worker continues.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from rayps_client.errors import CheckpointError
from rayps_client.values import JsonObject
from torch import Tensor, nn

from rayps.core.job.records import Point, RingTable
from rayps.core.job.repeated_pushes import Ledger, merge_ledgers
from rayps.core.rows.leases import rounds_of
from rayps.core.rows.phase_rounds import OPEN, Calendar, PhaseSpan
from rayps.core.rows.row_shares import RowShares
from rayps.core.urls import Location
from rayps.tensors import loss_scale, weight_average
from rayps.tensors.checkpoints import checkpoint, checkpoint_parts
from rayps.tensors.checkpoints.checkpoint import SavedState
from rayps.tensors.checkpoints.checkpoint_parts import PartFacts
from rayps.tensors.flat import Layout
from rayps.tensors.optim import Moments, ParamState, moments_of, split_moments
from rayps.tensors.training_state import TrainingState, below
from rayps.tensors.weight_average import Average


@dataclass(frozen=True, slots=True)
class WrittenFacts:
    """What a worker has written: the file, the optimizer's numbers by parameter, and the frozen parameters.

    `frozen` are the names of the frozen parameters in the file, and `frozen_hash` is of their values. If workers have
    pieces of them, `shapes` has their whole shapes by name, and there is no hash.
    """

    file: PartFacts
    numbers: dict[str, ParamState] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    frozen_hash: str = ""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateSource:
    """Where the tensors are that a snapshot stands for.

    They are in the checkpoint `path`, or in the files that workers have `written` for the next one. If there is
    neither, workers draw them.
    """

    path: Location | None = None
    written: tuple[WrittenFacts, ...] = ()


_RETAINED = 2  # number of parts that are retained: the newest ones
P = TypeVar("P")


@dataclass(slots=True)
class Snapshot:
    """All state from which a run continues.

    `positions[i]` is the number of batches that replica i has consumed. `rng` maps each worker's rank to its random
    state.
    """

    layout: Layout
    params: Tensor
    moments: Moments = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rng: dict[int, Tensor] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)
    steps_per_epoch: int = 1
    # the ring's `choices` of algorithms: with the same choices, sums have the same bits. If a replica has several
    # workers, the choices of each ring, by `Point.line`
    ring: RingTable | None = None
    # for each shard: the bounds lo and hi of its elements, and the ledger of the pushes that these elements include
    ledgers: list[tuple[int, int, Ledger]] = field(default_factory=list)
    # `Division.key` of the division whose order of elements lo and hi in `ledgers` refer to; "" for the vector's order
    divided: str = ""
    columns: int = 1  # number of workers of one replica
    origin: tuple[int, int] = (0, 0)  # the phase's first round and first epoch
    strategy: str = ""  # the strategy of `own` and `shared`
    own: dict[int, TrainingState] = field(default_factory=dict)  # each worker's state, if workers train separately
    shared: dict[str, Tensor] = field(default_factory=dict)  # the strategy's state that is equal on all workers
    # for each phase that ended early by its stop rule: the planned and the actual round of its end
    ended: list[tuple[int, int]] = field(default_factory=list)
    frozen: frozenset[str] = frozenset()  # the names in `buffers` of parameters that the run has never changed
    frozen_hash: str = ""  # of the values of `frozen`; "" if there are none
    # from where each replica continues in data without a length: see `rayps.worker.rows.batches.Cursor`
    cursors: dict[int, JsonObject] = field(default_factory=dict)
    # where the parameters, moments and frozen parameters are if the snapshot has none; None if it has them. `params` is
    # then on the meta device
    source: StateSource | None = None
    row_shares: RowShares | None = None  # how rows were dealt when it was taken; None if the workers do not change
    leases: JsonObject | None = None  # which blocks of rows were not done: see `Leases.to_json`; None without leases

    @classmethod
    def without_tensors(cls, layout: Layout, source: StateSource) -> Snapshot:
        """Return the snapshot that stands for the state at `source`, for workers that read or draw it themselves."""
        return cls(layout, torch.empty(layout.size, dtype=layout.dtype, device="meta"), source=source)

    @classmethod
    def standing_for(cls, path: Location) -> Snapshot:
        """Return the snapshot of a checkpoint without parameters, moments and frozen parameters.

        Raises CheckpointError if the checkpoint is missing or damaged.
        """
        meta, shapes = checkpoint.meta_of(path), checkpoint_parts.read_contents(path)
        small = [key for key in shapes if key.partition("/")[0] in ("rng", "buffer", "shared")]
        tensors: dict[str, Tensor] = dict(checkpoint_parts.read_pieces(path, dict.fromkeys(small)))
        for name, shape in meta["parameters"]:
            dtype = getattr(torch, shapes[f"model/{name}"]["dtype"])
            tensors[f"model/{name}"] = torch.empty(shape, dtype=dtype, device="meta")
        apart = meta.get("apart", {}) | {"numbers": {}}
        found = cls.from_state(SavedState(tensors, meta | {"optimizer_numbers": {}, "apart": apart}))
        found.source = StateSource(path)
        return found

    def loaded(self) -> Snapshot:
        """Return the snapshot with all tensors: this one, or the checkpoint that it stands for.

        Raises CheckpointError if the checkpoint is missing or damaged.
        """
        if self.source is None:
            return self
        assert self.source.path is not None, "workers have drawn the state, and no checkpoint has it"
        whole = Snapshot.from_state(checkpoint.load(self.source.path))
        return replace(
            self,
            params=whole.params,
            moments=whole.moments,
            buffers=whole.buffers,
            frozen=whole.frozen,
            frozen_hash=whole.frozen_hash,
            source=None,
        )

    @property
    def round(self) -> int:
        """The number of complete rounds: those of the slowest worker or, if rows are leased, of the blocks done."""
        counted = None if self.leases is None else rounds_of(self.leases)
        return self.clock if counted is None else counted

    @property
    def clock(self) -> int:
        """The slowest worker's clock, by which servers know the state."""
        return min(self.positions, default=0)

    def ledger(self, lo: int, hi: int) -> Ledger:
        """Return the ledger of the pushes that elements lo to hi include.

        If several shards held these elements, a push that only some of the shards had applied counts as applied. Some
        elements then lack the push, but no element includes it twice. If no shard has counted the steps that were
        skipped in fp16, the count of worker 0 is used for all ranks, as its scale is.
        """
        held = [ledger for a, b, ledger in self.ledgers if a < hi and lo < b]
        found = merge_ledgers(held) if held else Ledger(self.positions)
        if found.skipped is None and loss_scale.KEY in self.shared:
            found.skipped = dict.fromkeys(found.marks, loss_scale.count_skipped(self.shared))
        return found

    @property
    def skipped(self) -> int:
        """The number of the slowest worker's rounds that were skipped in fp16, and that a schedule does not count.

        If servers follow a schedule, they have counted these rounds; with staleness 0, those that all workers skipped.
        Otherwise this is the count of worker 0.
        """
        held = [ledger for lo, hi, ledger in self.ledgers if lo < hi]
        found = merge_ledgers(held) if held else Ledger([])
        if self.leases is not None and found.active is not None:
            counted = rounds_of(self.leases, found.active.pushes.done)
            return 0 if counted is None else max(0, self.round - counted)
        if found.skipped is None:
            return loss_scale.count_skipped(self.shared)
        return found.skipped[min(found.marks, key=found.marks.__getitem__)]

    def _record_skipped(self) -> None:
        """Store the number of skipped rounds with the scale, for workers and servers that continue without ledgers."""
        self.shared = loss_scale.with_skipped(self.shared, self.skipped)

    def align(self) -> None:
        """Set all positions to the slowest worker's, for a strategy whose workers are always in the same round."""
        self._record_skipped()
        self.positions = [self.round] * len(self.positions)
        self.ledgers = []

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, for `model.load_state_dict` (strict=False if some are frozen)."""
        named = {e.name: self.params[e.lo : e.hi].view(e.shape).clone() for e in self.layout.entries}
        return named | {name: value.clone() for name, value in self.buffers.items()}

    def after(self, round: int, state: TrainingState) -> Snapshot:
        """Return this snapshot, continued by a worker's state after `round`."""
        return replace(
            self,
            params=state.params,
            moments=state.moments,
            buffers=self.buffers | state.buffers,
            positions=[round] * len(self.positions),
            source=None,
        )

    def averaged(self, average: Average | None) -> Snapshot:
        """Return the snapshot with the workload's average of parameters and buffers, if there is one by now."""
        step = self.clock - loss_scale.count_skipped_by_all(
            self.shared
        )  # workers count the steps of their averages alone
        own = {name: value for name, value in self.buffers.items() if name not in self.frozen}
        found = weight_average.read_average(average, self.shared, self.params, own, step)
        return self if found is None else replace(self, params=found[0], buffers=self.buffers | found[1])

    def fill(self, model: nn.Module) -> nn.Module:
        """Copy parameters and buffers into a model of the same kind; return the model."""
        model.load_state_dict(self.state_dict(), strict=False)
        return model

    def to_state(self, **facts: Any) -> SavedState:
        """Return the snapshot as tensors and JSON data, for a checkpoint. `facts` are added to the JSON data."""
        tensors: dict[str, Tensor] = {
            f"model/{e.name}": self.params[e.lo : e.hi].view(e.shape) for e in self.layout.entries
        }
        for name, value in self.buffers.items():
            tensors[f"{'frozen' if name in self.frozen else 'buffer'}/{name}"] = value
        tensors |= {f"rng/{rank}": value for rank, value in self.rng.items()}
        moments, numbers = split_moments(self.moments)
        tensors |= moments | {f"shared/{name}": value for name, value in self.shared.items()}
        if self.source is not None:  # workers write the other tensors
            tensors = {name: value for name, value in tensors.items() if not value.is_meta}
        own_numbers = dict[str, dict[str, ParamState]]()
        for rank, own in self.own.items():
            found, own_numbers[str(rank)] = own.named()
            tensors |= {f"own/{rank}/{name}": value for name, value in found.items()}
        meta = {
            "parameters": [[e.name, list(e.shape)] for e in self.layout.entries],
            "optimizer_numbers": numbers,
            "positions": self.positions,
            "steps_per_epoch": self.steps_per_epoch,
            "ring": self.ring,
            "divided": self.divided,
            "columns": self.columns,
            "origin": list(self.origin),
            "ledgers": [[lo, hi, ledger.to_json()] for lo, hi, ledger in self.ledgers],
            "frozen": self.frozen_hash,
            "apart": {"strategy": self.strategy, "numbers": own_numbers, "ended": self.ended},
            "cursors": {str(rank): cursor for rank, cursor in self.cursors.items()},
            "leases": self.leases,
            "row_shares": None if self.row_shares is None else self.row_shares.to_json(),
            **facts,
        }
        return SavedState(tensors, meta)

    @classmethod
    def from_state(cls, state: SavedState) -> Snapshot:
        """Rebuild the snapshot from the result of `to_state`."""
        shapes = {name: tuple(shape) for name, shape in state.meta["parameters"]}
        layout = Layout.of((name, state.tensors[f"model/{name}"]) for name in shapes)
        params = torch.cat([state.tensors[f"model/{name}"].reshape(-1) for name in shapes])
        apart = state.meta.get("apart", {})
        frozen = below("frozen/", state.tensors)
        return cls(
            layout,
            params,
            moments_of(state.tensors, state.meta["optimizer_numbers"]),
            positions=list(state.meta["positions"]),
            buffers=below("buffer/", state.tensors) | frozen,
            rng={int(k.removeprefix("rng/")): v for k, v in state.tensors.items() if k.startswith("rng/")},
            steps_per_epoch=state.meta["steps_per_epoch"],
            ring=state.meta.get("ring"),
            ledgers=[(lo, hi, Ledger.from_json(data)) for lo, hi, data in state.meta.get("ledgers", [])],
            divided=state.meta.get("divided", ""),
            columns=state.meta.get("columns", 1),
            origin=tuple(state.meta.get("origin", (0, 0))),
            strategy=apart.get("strategy", ""),
            own={
                int(rank): TrainingState.of(below(f"own/{rank}/", state.tensors), numbers)
                for rank, numbers in apart.get("numbers", {}).items()
            },
            shared=below("shared/", state.tensors),
            ended=[(planned, at) for planned, at in apart.get("ended", [])],
            frozen=frozenset(frozen),
            frozen_hash=state.meta.get("frozen", ""),
            cursors={int(rank): cursor for rank, cursor in state.meta.get("cursors", {}).items()},
            leases=state.meta.get("leases"),
            row_shares=None if (shares := state.meta.get("row_shares")) is None else RowShares.from_json(shares),
        )

    def check(self, layout: Layout, way_out: str = "give a checkpoint of this model, or start without resume") -> None:
        """Refuse a snapshot of another model. `way_out` ends the error.

        Raises:
            CheckpointError: the model has other parameters. The error names the first parameter that differs.
        """
        mine, other = _read_shapes(self.layout), _read_shapes(layout)
        for name in sorted(mine.keys() | other.keys()):
            if mine.get(name) != other.get(name):
                raise CheckpointError(
                    f"the checkpoint is of another model: parameter {name!r} has shape {mine.get(name)} in the "
                    f"checkpoint and {other.get(name)} in this model\n{way_out}"
                )

    def without_frozen(self) -> Snapshot:
        """Return the snapshot without the values of frozen parameters, for a worker that has them."""
        held = {name: value for name, value in self.buffers.items() if name not in self.frozen}
        if self.source is not None:  # workers draw or read the frozen parameters too
            return replace(self, buffers=held, frozen=frozenset(), frozen_hash="")
        return replace(self, buffers=held)

    def only_frozen(self) -> Snapshot:
        """Return a snapshot that has no state except frozen parameters, for workers that have the state."""
        held = {name: value for name, value in self.buffers.items() if name in self.frozen}
        empty = torch.empty(self.layout.size, dtype=self.layout.dtype, device="meta")
        return replace(
            self, params=empty, moments={}, buffers=held, rng={}, own={}, shared={}, cursors={}, ledgers=[], source=None
        )

    def thaw(self, changed: Collection[str]) -> None:
        """Treat the parameters `changed` as buffers from now on, because a step has changed them."""
        if self.frozen & set(changed):
            self.frozen -= set(changed)
            self.frozen_hash = hash_of({name: self.buffers[name] for name in self.frozen})

    def record_ring_choices(self, point: Point) -> None:
        """Record the rings' choices of algorithms if a worker's point contains them."""
        if "ring" in point:
            self.ring = point["ring"]
        elif "rings" in point:
            self.ring = (self.ring or {}) | point["rings"]

    def resume(self, calendar: Calendar) -> None:
        """Adapt the snapshot to a run with the rounds of `calendar`.

        The run may have another number of replicas or of rounds per epoch than the one that wrote the snapshot.

        Raises:
            CheckpointError: one of these numbers differs, and the snapshot is in the middle of an epoch.
        """
        self.ended = [(planned, at) for planned, at in self.ended if calendar.cut(planned, at)]
        span = calendar.at(self.round)
        if any(at == self.round for _, at in self.ended):  # the end of a phase, at any point of an epoch
            self.enter_phase(span)
            return
        began, epoch = self.origin
        counts_alike = epoch * self.steps_per_epoch - began == span.epoch * span.steps - span.begin
        if not counts_alike or (len(self.positions), self.steps_per_epoch) != (span.replicas, span.steps):
            done = self.round - began
            if self.steps_per_epoch >= OPEN:
                raise CheckpointError(
                    f"the checkpoint was written by {self._describe_workers()} on data without a length, whose items "
                    "depend on "
                    f"the number of workers:\nresume with {self._describe_workers()} and the same data, or start "
                    "without resume"
                )
            if len(set(self.positions)) != 1 or done % self.steps_per_epoch:
                raise CheckpointError(
                    f"the checkpoint was written in the middle of an epoch by {self._describe_workers()}:\n"
                    "resume with the same number of workers and the same batch size, or from a checkpoint at an "
                    "epoch's end"
                )
            self._record_skipped()
            self.positions = [calendar.after(epoch + done // self.steps_per_epoch)] * len(self.positions)
            self.ledgers = []
            if self.steps_per_epoch != span.steps:
                self.rng = {}
        self.enter_phase(calendar.at(self.round))

    def check_passes(self, name: str) -> None:
        """Refuse a snapshot whose replicas are in different passes over data without a length.

        `name` is the strategy that continues, under which the replicas end each pass together.

        Raises:
            CheckpointError: the replicas have ended their passes at different positions.
        """
        origins = [cursor["origins"] for cursor in self.cursors.values()]
        if origins and (len(origins) < len(self.positions) or any(each != origins[0] for each in origins)):
            raise CheckpointError(
                f"the checkpoint is of round {self.round} of a strategy whose workers end their passes over the data "
                f"alone, and they are in different passes: {name} ends each pass on all workers together\n"
                "resume with the strategy that wrote the checkpoint and steps=, or start a new run from its parameters "
                "with start_from="
            )

    def _describe_workers(self) -> str:
        count = len(self.positions)
        return f"{count} workers" if self.columns == 1 else f"{count} replicas of {self.columns} workers each"

    def enter_strategy(self, strategy: str, workers: int) -> None:
        """Adapt the snapshot to the strategy of this name, on `workers` workers.

        If another strategy or another number of workers wrote the snapshot, each worker's own state is dropped. All
        workers then continue from the consensus.
        """
        if self.strategy != strategy:  # the average of the weights and the loss scale are the job's, not the strategy's
            self._record_skipped()
            scale = {key: self.shared[key] for key in self.shared if key == loss_scale.KEY}
            self.shared = weight_average.select_average(self.shared) | scale
        if self.strategy != strategy or len(self.own) != workers:
            self.own = {}
        self.strategy = strategy

    def enter_phase(self, span: PhaseSpan) -> None:
        """Adapt the snapshot to a phase's numbers of replicas, of workers per replica and of rounds per epoch.

        If the phase has another number of replicas, all positions become that of the slowest worker.
        """
        if len(self.positions) != span.replicas:
            self._record_skipped()
            self.positions = [self.round] * span.replicas
            self.ledgers, self.ring, self.rng, self.cursors = [], None, {}, {}
        if self.columns != span.columns:
            self.ring, self.rng = None, {}
        if span.columns == 1 and self.divided:  # the ledgers count the elements in another order
            held = [ledger for _, _, ledger in self.ledgers]
            self.ledgers, self.divided = ([(0, self.layout.size, merge_ledgers(held))] if held else []), ""
        self.columns, self.steps_per_epoch, self.origin = span.columns, span.steps, span.origin


def hash_of(values: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors: their names, shapes, dtypes and bytes. It is "" if there are none."""
    if not values:
        return ""
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(plain.numpy().data)
    return digest.hexdigest()


def _read_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.shape for entry in layout.entries}


class RetainedParts(dict[int, P]):
    """A dict from round to a process's part of the snapshot of that round.

    It retains the two newest parts, the part of the round for which the driver waits, and a pinned part.
    """

    wanted = 0  # the round for which the driver waits: see `rayps.runtime.results.snapshots`
    pinned = 0  # the round whose part stays until the driver has it; 0 if there is none

    def retain(self, rounds: int, part: P) -> None:
        """Retain the part after `rounds` rounds, and drop older parts."""
        self[rounds] = part
        for old in sorted(self)[:-_RETAINED]:
            if old not in (self.wanted, self.pinned):
                del self[old]
