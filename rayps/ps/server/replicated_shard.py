"""A shard that can be a copy: it writes down how its rounds are closed, and closes them as another one did."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayps.core.calendar import Boundary
from rayps.core.failpoint import passing
from rayps.core.retained_parts import RetainedParts
from rayps.core.server_updates import weighted_mean
from rayps.core.strategy import ServerHalf
from rayps.core.topology import servers_of
from rayps.ps.protocol.pieces import DensePiece, Extent, area_piece
from rayps.ps.protocol.rows import Area
from rayps.ps.server.shard import Shard, padded
from rayps.tensors.optim import Moments
from rayps.tensors.packing import flat_bytes, full_moments, pack_state, plain_moments, tensor_of

CHANGE = struct.Struct("<qqqd")  # what it is; then rank, step, weight, or round, number of values, 0
ONE = struct.Struct("<qqd")  # rank, bytes and weight of one value of a round
PUSHED, MEAN, VALUES = 1, 2, 3
NEVER = Boundary(0, -1)


def changes_by(strategy: ServerHalf) -> int:
    """What a change of a segment is under this strategy: PUSHED, MEAN or VALUES."""
    servers = servers_of(strategy)
    if servers is None or servers.update.listens:
        return PUSHED
    return MEAN if servers.update.means else VALUES


class ReplicatedShard(Shard):
    """A shard that writes down how its rounds are closed, and can close them as another one did."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.writes = False  # whether the closes of rounds are written down
        self.changes: list[bytes] = []
        self.by = changes_by(self.strategy)
        self.wanted: set[int] = set()
        self.kept: RetainedParts[bytes] = RetainedParts()
        self.seq = 0
        self._mean: bytes = b""

    @property
    def spans(self) -> bool:
        """Whether a push stands for every step up to its own."""
        return self._spans

    @property
    def closed(self) -> int:
        """Rounds that are closed."""
        return self._slowest

    def step(self, grad: Tensor, scale: float = 1.0, decays: float | None = None) -> None:
        """Step as `Shard.step`; retain the mean gradient of a round where the backups apply it."""
        if self.writes and self.by == MEAN:
            self._mean = area_piece(grad, self._touched, self._count)
        super().step(grad, scale, decays)

    def step_mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Step with the weighted mean of `values`, over the part of the shard that the pushes touched."""
        whole = self._touched == self._whole
        self.step(self._optimizer.mean(values, weights) if whole else weighted_mean(list(values), list(weights)))

    def _close(self, finished: int) -> None:
        write = self.writes and self.by != PUSHED
        if write and self.by == VALUES:
            self.changes.append(self._values(finished))
        super()._close(finished)
        if write and self.by == MEAN:
            self.changes.append(CHANGE.pack(MEAN, finished, bool(self._mean), 0.0) + self._mean)
            self._mean = b""
        if self.by != PUSHED:
            self.seq += 1
        self._keep(finished + 1)

    def _values(self, finished: int) -> bytes:
        held = sorted(self._inbox.get(finished, {}).items())
        values = [area_piece(value, area, self._count) for _, (value, _, area) in held]
        heads = [ONE.pack(rank, len(value), weight) for (rank, (_, weight, _)), value in zip(held, values, strict=True)]
        return b"".join([CHANGE.pack(VALUES, finished, len(held), 0.0), *heads, *values])

    def close_as(self, finished: int, mean: DensePiece | None) -> None:
        """Close a round with the mean that the primary made."""
        for rank in self.ledger.marks:
            self.ledger.skip(rank, finished + 1)
        self._inbox.pop(finished, None)
        self._slowest = finished + 1  # a state may have brought later rounds along: they are closed by later changes
        if mean is not None:
            value, self._touched = self.filed(mean)
            if self._pace is not None:
                self._pace.at(finished)
            self.step(value)
        self.seq += 1
        self._keep(finished + 1)

    def filed(self, piece: DensePiece) -> tuple[Tensor, Area]:
        """A piece as it lies in the inbox: its elements, with zeros where it says nothing, and its area."""
        value, offset, rows = piece
        if rows is None and value.numel() < self._count:
            value = padded(value, offset, self._count)
        return value, piece.area if piece.area != self._whole else self._whole

    def catch_up(self) -> None:
        """Close what nobody else will close now."""
        self.writes = False
        self._finish()

    def _keep(self, rounds: int) -> None:
        if rounds in self.wanted or rounds in self._boundary:
            self.kept.keep(rounds, self.state(parts=False))
            passing("host: state kept, not collected")
            self.wanted = {wanted for wanted in self.wanted if wanted > rounds}

    def state(self, parts: bool = True) -> bytes:
        """All of it; without `parts`, as it is kept."""
        tensors = [self.params]
        moments = plain_moments(self._optimizer.moments(), tensors)
        inbox = []
        for step, of_step in self._inbox.items():
            for rank, (value, weight, area) in of_step.items():
                inbox.append([step, rank, weight, len(tensors)])
                tensors.append(tensor_of(area_piece(value, area, self._count), torch.uint8))
        kept = {}
        for rounds in sorted(self.kept) if parts else []:
            kept[str(rounds)] = len(tensors)
            tensors.append(tensor_of(self.kept[rounds], torch.uint8))
        head = {
            "seq": self.seq,
            "version": self.version,
            "ledger": self.ledger.to_json(),
            "moments": moments,
            "groups": plain_groups(self._optimizer.optimizer.param_groups),
            "inbox": inbox,
            "kept": kept,
            "wanted": sorted(self.wanted),
        }
        return pack_state(head, tensors)

    def restore(self, head: dict[str, Any], tensors: list[Tensor]) -> None:
        """Take over the rest of what `state` gave: all but parameters and ledger."""
        self.seq, self.version = head["seq"], head["version"]
        self._optimizer.restore(full_moments(head["moments"], tensors))
        for mine, given in zip(self._optimizer.optimizer.param_groups, head.get("groups", []), strict=False):
            mine.update({key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})
        extent = Extent(self.layout, self.lo, self.hi)
        for step, rank, weight, number in head["inbox"]:
            value, area = self.filed(extent.read_push(flat_bytes(tensors[number].clone()).data))
            self._inbox.setdefault(step, {})[rank] = (value, weight, area)
        for rounds, number in head["kept"].items():
            self.kept[int(rounds)] = flat_bytes(tensors[number]).tobytes()
        self.wanted = set(head["wanted"])

    def moments(self) -> Moments:
        """The optimizer's state by parameter name; copies."""
        return self._optimizer.moments()

    def groups(self) -> list[dict[str, Any]]:
        """The numbers of the optimizer's groups."""
        return plain_groups(self._optimizer.optimizer.param_groups)

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and optimizer state."""
        held = [t for state in self._optimizer.optimizer.state.values() for t in state.values()]
        return sum(t.numel() * t.element_size() for t in [self.params, *held] if isinstance(t, Tensor))


def plain_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of an optimizer's groups, JSON-ready."""
    plain = (int, float, str, bool, type(None), tuple)
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)} for group in groups
    ]
