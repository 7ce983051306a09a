"""Write a worker's part of a checkpoint in the background, while the worker continues to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rayps.tensors.checkpoints.background_write import BackgroundWrite
from rayps.tensors.checkpoints.checkpoint_parts import PartFacts, part_name, write_part
from rayps.tensors.snapshot import WrittenFacts, hash_of
from rayps.tensors.state_pieces import StatePieces
from rayps.worker.plan import PartsPlan, WorkerPlan

WRITE_SECONDS = 600.0  # seconds for a part to be written, unless the job's timeout is longer
Stopped = Callable[[], bool]  # returns whether the write must end before its next block


@dataclass(frozen=True, slots=True)
class BackgroundPart:
    """A part that is being written: see `PendingPart`."""

    write: BackgroundWrite[WrittenFacts]
    timeout: float  # seconds

    def done(self) -> bool:
        """Return whether the write has ended, with or without an error, or has not ended in time."""
        return self.write.done() or self.write.seconds > self.timeout

    def facts(self) -> WrittenFacts:
        """Return what was written. Raises the error of the write, or PlaceError if it has not ended in time."""
        return self.write.result(0)


class PartWriter:
    """Writes the parts of one worker of a generation, one after the other."""

    def __init__(self, plan: PartsPlan, number: int, count: int, timeout: float) -> None:
        """Prepare. The worker writes part `number` of `count`. `timeout`: seconds for the write before to end."""
        self._plan, self._number, self._count, self._timeout = plan, number, count, max(timeout, WRITE_SECONDS)
        self._last: BackgroundWrite[WrittenFacts] | None = None
        self._frozen_hash = ""

    @classmethod
    def of(cls, plan: WorkerPlan) -> PartWriter | None:
        """Return the writer of a worker's parts, or None if the plan has no place for them."""
        parts = plan.snapshots.parts
        return None if parts is None else cls(parts, plan.rank, plan.size, plan.timeout)

    def start(self, round: int, pieces: StatePieces, frozen: dict[str, Tensor]) -> BackgroundPart:
        """Start to write the part after `round` rounds. The tensors must not change any more.

        `frozen` are the frozen parameters that this worker writes, by name. Wait first until the part before is
        written, or has failed, which the driver learns. Raises PlaceError if that takes too long.
        """
        if self._last is not None and not self._last.wait(self._timeout):
            self._last.result(0)
        write = BackgroundWrite(partial(self._write, round, pieces, frozen), f"part {self._number} of round {round}")
        self._last = write.start()
        return BackgroundPart(write, self._timeout)

    def _write(self, round: int, pieces: StatePieces, frozen: dict[str, Tensor], stopped: Stopped) -> WrittenFacts:
        plan = self._plan
        tensors = pieces.tensors | {f"frozen/{name}": value for name, value in frozen.items()}
        name = part_name(self._number, self._count)
        file: PartFacts = write_part(
            plan.place, round, plan.token, name, tensors, offsets=pieces.offsets, stopped=stopped
        )
        if frozen and not self._frozen_hash:
            self._frozen_hash = hash_of(frozen)
        names = frozenset(frozen) | pieces.frozen.keys()
        return WrittenFacts(file, pieces.numbers, names, self._frozen_hash, pieces.frozen)

    def close(self) -> None:
        """Stop the write that is under way, whose file is removed."""
        if self._last is not None:
            self._last.cancel()
