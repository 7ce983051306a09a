"""Agree on the members of a step with backup workers. Rank 0 decides, by the order in which messages reach it.

A rank tells rank 0 that its gradient is complete. When enough ranks have done so, rank 0 sends the members to all
ranks. Every rank learns the members of every step, in order, because all ranks take part in the sum that follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rayps_client.errors import PeerTimeout

from rayps.comm.link import Message
from rayps.comm.link.wakeup import Wakeup
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.messages import RingMessage
from rayps.core.rows.step_members import Members, StepMembers


class MemberAgreement:
    """One rank's part in the agreements of a ring. One thread calls `agree`; any thread may call `wake`."""

    def __init__(self, mesh: Mesh, first: int) -> None:
        """Prepare the agreement about step `first`."""
        self._mesh = mesh
        self._wakeup = Wakeup()
        self._decides = StepMembers(mesh.size, first) if mesh.rank == 0 else None
        self._found: Members | None = None
        self._since: float | None = None  # when this rank's wait for other ranks has begun; None if it does not wait

    def wake(self) -> None:
        """Let `agree` ask again whether this rank's gradient is complete."""
        self._wakeup.wake()

    def close(self) -> None:
        """Release the wakeup."""
        self._wakeup.close()

    def agree(self, step: int, needed: int, ready: Callable[[], bool]) -> Members:
        """Return the members of a step, of which there are `needed`.

        `ready()` returns whether this rank's gradient of the step is complete. While it is not, nothing limits the time
        of this call.

        Raises:
            PeerTimeout: too few ranks have arrived for the mesh's `timeout` in seconds since the first one has.
            PeerLost: a rank was lost.
        """
        self._found, self._since, told = None, None, False

        def done() -> bool:
            nonlocal told
            self._wakeup.clear()
            if not told and ready():
                told = True
                self._arrive(step, needed)
            self._read(step, needed)
            if self._found is None:
                self._check_time(step, needed)
            return self._found is not None

        self._mesh.await_early(self._wakeup.fileno(), done)
        assert self._found is not None, "the wait ends when the members are known"
        return self._found

    def _arrive(self, step: int, needed: int) -> None:
        self._since = self._since or time.monotonic()
        if self._decides is not None:
            self._record_arrival(0, step, needed)
        else:
            self._send(0, Message(RingMessage.ARRIVED, tag=step, a=needed))

    def _read(self, step: int, needed: int) -> None:
        """Process the messages that have arrived."""
        if self._decides is None:
            for _, message in self._mesh.early.take_all(RingMessage.MEMBERS):
                assert message.tag == step, "rank 0 decides one step after the other"
                self._found = tuple(memoryview(message.payload).cast("B").cast("q").tolist())
            return
        for peer, message in self._mesh.early.take_all(RingMessage.ARRIVED):
            self._since = self._since or time.monotonic()
            self._record_arrival(peer, message.tag, message.a)

    def _record_arrival(self, rank: int, step: int, needed: int) -> None:
        """Record an arrival. If it decides the step, send the members to all ranks."""
        assert self._decides is not None, "rank 0 decides"
        if self._decides.arrive(rank, step, needed):
            self._found = self._decides.since(0, step)[-1]
            payload = memoryview(bytearray(8 * len(self._found))).cast("q")
            for i, member in enumerate(self._found):
                payload[i] = member
            for peer in range(1, self._mesh.size):
                self._send(peer, Message(RingMessage.MEMBERS, tag=step), payload.tobytes())

    def _send(self, peer: int, message: Message, payload: bytes = b"") -> None:
        link = self._mesh.link(peer)
        link.queue(message, payload)
        link.flush()

    def _check_time(self, step: int, needed: int) -> None:
        """Raise PeerTimeout if ranks have waited too long for other ranks, or for rank 0 to answer."""
        seconds = self._mesh.timeout
        if self._since is None or time.monotonic() - self._since < seconds + (self._decides is None):
            return
        if self._decides is None:  # rank 0 names the ranks first, unless it does not answer
            missing: Members = (0,)
            what = f"worker-0 did not say which workers are members of step {step}"
        else:
            missing = self._decides.missing()
            names = ", ".join(f"worker-{rank}" for rank in missing)
            what = f"step {step} needs {needed} of {self._mesh.size} workers, and {names} did not complete a gradient"
        raise PeerTimeout(
            f"{what} within {seconds:g} s (the knob is `timeout`)",
            peer=f"worker-{missing[0]}",
            seconds=seconds,
            ranks=list(missing),
        )
