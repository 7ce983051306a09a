"""Messages between the stages of a pipeline: outputs, stashed values, and the gradients of both."""

from __future__ import annotations

import enum

from rayps_client.errors import LinkError
from torch import Tensor

from rayps.comm.ring import Ring
from rayps.comm.ring.p2p import TensorMessage
from rayps.core.job.user_code import pause_clock

_NO_GRADIENT = "0"  # marks, in a message's form, a tensor whose gradient is None


class StageMessage(enum.IntEnum):
    """Kinds of messages between stages."""

    OUTPUT = 0  # the output of a chunk
    GRADIENT = 1  # the gradient of a chunk's output
    STASH = 2  # the stashed value of a skip connection
    STASH_GRADIENT = 3  # the gradient of a stashed value

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
        self._ring_messages = None if ring is None or ring.size == 1 else ring.parcels
        self.rank = 0 if ring is None else ring.rank
        self.stages = 1 if ring is None else ring.size
        self._local: dict[tuple[int, int, int], TensorMessage] = {}

    def send(self, chunk: int, kind: StageMessage, index: int, micro: int, message: TensorMessage) -> None:
        """Send a message to the worker of `chunk`. Raises LinkError if that worker is lost.

        `index` is the number of the chunk that computed the output, or the number of the skip connection.
        """
        to = chunk % self.stages
        if to == self.rank:
            self._local[kind, index, micro] = message
        else:
            assert self._ring_messages is not None
            self._ring_messages.give(to, _tag(kind, index, micro), message.tensors, message.form)

    def receive(self, chunk: int, kind: StageMessage, index: int, micro: int) -> TensorMessage:
        """Receive the message of this kind, index and micro-batch from the worker of `chunk`.

        Raises LinkError if that worker is lost or does not answer.
        """
        frm = chunk % self.stages
        if frm == self.rank:
            return self._local.pop((kind, index, micro))
        try:
            with pause_clock():
                assert self._ring_messages is not None
                found: TensorMessage = self._ring_messages.take(frm, _tag(kind, index, micro))
        except LinkError as error:
            raise type(error)(
                f"{error.message}\nstage {self.rank} waited for {kind.words} of micro-batch {micro} of chunk {chunk} "
                f"from stage {frm}",
                **error.data,
            ) from error
        return found

    def send_grads(self, chunk: int, kind: StageMessage, index: int, micro: int, grads: list[Tensor | None]) -> None:
        """Send gradients to the worker of `chunk`. A gradient may be None: its tensor was not used."""
        there = [g for g in grads if g is not None]
        form = "".join(_NO_GRADIENT if g is None else "1" for g in grads) if len(there) < len(grads) else ""
        self.send(chunk, kind, index, micro, TensorMessage(there, [False] * len(there), form))

    def receive_grads(self, chunk: int, kind: StageMessage, index: int, micro: int) -> list[Tensor | None]:
        """Receive the gradients that `send_grads` sent."""
        message = self.receive(chunk, kind, index, micro)
        if not message.form:
            return list(message.tensors)
        there = iter(message.tensors)
        return [None if mark == _NO_GRADIENT else next(there) for mark in message.form]

    def wait_sent(self) -> None:
        """Wait until all messages have been sent. Raises LinkError if a receiving worker is lost."""
        if self._ring_messages is not None:
            self._ring_messages.settle()

    def clear(self) -> None:
        """Drop the messages between two chunks of this worker that were not received yet."""
        self._local.clear()

    @property
    def counts(self) -> tuple[int, int, float]:
        """The bytes sent, the messages sent, and the seconds spent waiting, all since construction."""
        return (
            (0, 0, 0.0)
            if self._ring_messages is None
            else (self._ring_messages.bytes, self._ring_messages.messages, self._ring_messages.seconds)
        )


def _tag(kind: StageMessage, index: int, micro: int) -> int:
    return (micro << 24) | (index << 2) | kind
