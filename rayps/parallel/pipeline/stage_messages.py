"""Messages between the stages of a pipeline: outputs, stashed values, and the gradients of both."""

from __future__ import annotations

import enum

from torch import Tensor

from rayps.comm.ring import Ring
from rayps.comm.ring.p2p import TensorMessage
from rayps.core.errors import LinkError
from rayps.core.user_code import peers_awaited

_NO_GRADIENT = "0"  # marks, in a message's form, a tensor whose gradient is None


class StageMessage(enum.IntEnum):
    """Kinds of messages between stages."""

    OUTPUT = 0  # the output of a chunk
    GRADIENT = 1  # the gradient of a chunk's output
    STASH = 2  # the stashed value of a skip connection
    STASH_GRADIENT = 3  # the gradient of that value

    @property
    def words(self) -> str:
        """The kind of message in words, for errors."""
        return {
            0: "the output",
            1: "the gradient of the output",
            2: "a skip connection",
            3: "the gradient of a skip connection",
        }[int(self)]


class StageMessages:
    """Sends and receives messages between chunks: over the ring, or within this worker if both chunks are on it."""

    def __init__(self, ring: Ring | None) -> None:
        self._parcels = None if ring is None or ring.size == 1 else ring.parcels
        self.rank = 0 if ring is None else ring.rank
        self.stages = 1 if ring is None else ring.size
        self._here: dict[tuple[int, int, int], TensorMessage] = {}

    def give(self, chunk: int, sort: StageMessage, index: int, micro: int, parcel: TensorMessage) -> None:
        """Send a message of the kind `sort` to the worker of `chunk`. Raises LinkError.

        `index` is the number of the chunk that computed the output, or of the skip connection.
        """
        to = chunk % self.stages
        if to == self.rank:
            self._here[sort, index, micro] = parcel
        else:
            assert self._parcels is not None
            self._parcels.give(to, _tag(sort, index, micro), parcel.tensors, parcel.form)

    def take(self, chunk: int, sort: StageMessage, index: int, micro: int) -> TensorMessage:
        """Receive from the worker of `chunk` the message that it sent with these arguments. Raises LinkError."""
        frm = chunk % self.stages
        if frm == self.rank:
            return self._here.pop((sort, index, micro))
        try:
            with peers_awaited():
                assert self._parcels is not None
                found: TensorMessage = self._parcels.take(frm, _tag(sort, index, micro))
        except LinkError as error:
            raise type(error)(
                f"{error.message}\nstage {self.rank} waited for {sort.words} of micro-batch {micro} of chunk {chunk} "
                f"from stage {frm}",
                **error.data,
            ) from error
        return found

    def give_grads(self, chunk: int, sort: StageMessage, index: int, micro: int, grads: list[Tensor | None]) -> None:
        """Send gradients to the worker of `chunk`; a gradient is None if the tensor was not used."""
        there = [g for g in grads if g is not None]
        form = "".join(_NO_GRADIENT if g is None else "1" for g in grads) if len(there) < len(grads) else ""
        self.give(chunk, sort, index, micro, TensorMessage(there, [False] * len(there), form))

    def take_grads(self, chunk: int, sort: StageMessage, index: int, micro: int) -> list[Tensor | None]:
        """Receive the gradients that `give_grads` sent."""
        parcel = self.take(chunk, sort, index, micro)
        if not parcel.form:
            return list(parcel.tensors)
        there = iter(parcel.tensors)
        return [None if mark == _NO_GRADIENT else next(there) for mark in parcel.form]

    def settle(self) -> None:
        """Wait until all messages have been sent. Raises LinkError."""
        if self._parcels is not None:
            self._parcels.settle()

    def clear(self) -> None:
        """Drop the messages that are stored on this worker."""
        self._here.clear()

    @property
    def counts(self) -> tuple[int, int, float]:
        """The bytes and messages sent since construction, and the seconds spent waiting."""
        return (
            (0, 0, 0.0)
            if self._parcels is None
            else (self._parcels.bytes, self._parcels.messages, self._parcels.seconds)
        )


def _tag(sort: StageMessage, index: int, micro: int) -> int:
    return (micro << 24) | (index << 2) | sort
