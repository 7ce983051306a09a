"""The servers of a model on a device: pushes leave while backward goes on, and pulls arrive before they are used.

A push is cut by segment. `begin` starts it, `send` copies one segment from the device into pinned memory on a stream of
its own, and a thread sends each segment's request as soon as its copy is done (`SegmentFeed`). If servers of this host
read the worker's gradient, its shared memory itself is pinned, so that the copy from the device is the only one.

The pull of the next round is asked for together with each segment's push if that cannot change what the pull may
return. Let step k be pushed. Under staleness 0, a pull of round k + 1 returns the state after round k, whenever it is
asked for. Without a bound, it returns any state that contains this worker's push k, and a server applies the push
before it serves the pull. With another bound, a pull that is asked for early could wait for workers that have stopped,
so it is asked for when it is needed. Pulled values are copied to a second vector on the device. `pull` copies them from
there to the model, whose parameters do not change before.

The host's memory of a push must not change until the servers have acknowledged the push: servers read it there, and a
push that is lost is sent again from it. `begin` therefore waits for all answers to the push before.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable

import torch
from rayps_client.errors import PeerTimeout
from torch import Tensor

from rayps.comm.link.socket_link import EMPTY
from rayps.ps.client.client import GroupServer
from rayps.ps.client.segment_feed import SegmentFeed
from rayps.ps.client.session import GRACE_SECONDS, SegmentReplies
from rayps.ps.protocol.mailbox import Landing
from rayps.ps.protocol.rows import Bytes, PieceBytes
from rayps.tensors.device import Device, DeviceEvent
from rayps.tensors.flat import Gradient
from rayps.tensors.packing import view_bytes


class DeviceServer:
    """A worker's access to servers, for parameters in `vector` on `device`. Implements `ServerView`.

    `more()` returns whether this worker will pull again after the present push; else no pull is asked for early. Each
    method but `send` and `end` waits until the push before is complete. Pushes of a range of the vector, and compressed
    pushes, go through `GroupServer.push`.
    """

    def __init__(self, server: GroupServer, device: Device, vector: Tensor, more: Callable[[], bool]) -> None:
        space = server.session.space
        self.vector, self.device, self.cuts = vector, device, space.cuts
        self._server, self._more = server, more
        self._early = space.servers.staleness in (0, None)
        self._memory = PushMemory(server, device)
        self._down = device.stream()
        self._pulls = PulledVector(device, vector, self.cuts)
        self._checks = device.stream()
        self._largest = torch.zeros(max(1, len(self.cuts)), dtype=vector.dtype, device=device.place)
        self._largest_host = device.pinned(max(1, len(self.cuts)), vector.dtype)  # see `SegmentFeed.largest`
        self._source = vector[:0]
        self._push: _PushThread | None = None
        self._pulled = False  # whether `_pulls` has, or will have, the values of the next pull
        self._waited = 0.0

    # ---- pushes

    def begin(self, source: Tensor, weight: float, rounds: int = 1, *, checked: bool = True) -> None:
        """Begin a push of the vector `source`, whose segments are complete when they are given to `send`.

        Waits until the push before is acknowledged. `source` must not change until `settle` or `pull` has returned.
        With `checked`, a segment with a number that is not finite does not leave, and no other segment after it.
        """
        self.settle()
        server, item = self._server, self.vector.element_size()
        places: dict[int, PieceBytes | Landing] | None = None
        if self._early and self._more():
            places = self._pulls.places()
        server.step += rounds
        server.bytes_moved += server.size * item * (1 if places is None else 2)
        self._source, self._pulled = source, places is not None
        feed = SegmentFeed(
            server.step - 1,
            weight,
            self._memory.pieces(self.cuts),
            places,
            largest=self._largest_host if checked else None,
            mixed_versions=not server.consistent,
        )
        self._push = _PushThread(feed, server)

    def send(self, segment: int) -> DeviceEvent:
        """Send a segment, whose values the work of this thread's stream computes; return the event after its copy.

        Any thread may call this.
        """
        assert self._push is not None, "begin() comes first"
        (a, b), ready = self.cuts[segment], self.device.current().record()
        source = self._source[a:b]
        self._down.after(ready)
        done = self._down.copy(self._memory.host[a:b], source)
        if self._push.feed.largest is not None:  # computed beside the copy, and copied after it
            found, host = self._largest[segment : segment + 1], self._largest_host[segment : segment + 1]
            self._checks.after(ready)
            self._down.after(self._checks.run(lambda: _find_largest(source, found[0])))
            done = self._down.copy(host, found)
        self._push.feed.copied(segment, done)
        return done

    def end(self, *, refused: bool = False) -> None:
        """End the push, after all segments were sent. If `refused`, the segments that have not left do not leave."""
        if self._push is None:
            return
        extras, space = self._server.extras, self._server.session.space
        others: dict[int, PieceBytes] = dict.fromkeys(range(len(self.cuts), space.segments), EMPTY)
        if extras is not None and not refused:
            others |= extras()
        self._push.feed.end(others, refused=refused)

    def push(self, value: Tensor | Gradient, weight: float = 1.0, lo: int = 0, rounds: int = 1) -> None:
        """Push as `GroupServer.push`. `value` must not change until `settle` or `pull` has returned."""
        whole = value.vector if isinstance(value, Gradient) else value.detach().reshape(-1)
        skipped = isinstance(value, Gradient) and value.skipped
        plain = whole.device == self.vector.device and whole.dtype == self.vector.dtype
        if skipped or not plain or whole.numel() != self._server.size or self.compresses:
            self.settle()
            self._server.push(value, weight, lo, rounds)
            self._server.settle()  # the value was copied to memory of the host that the next push uses again
            self._pulled = False
            return
        weight = float(value.samples) if isinstance(value, Gradient) else float(weight)
        self.begin(whole, weight, rounds, checked=False)
        for segment in reversed(range(len(self.cuts))):
            self.send(segment)
        self.end()

    # ---- pulls

    def pull(self) -> Tensor:
        """Wait until the staleness bound allows the pull; return the model's parameters, with the pulled values."""
        self.settle()
        if not self._pulled:
            self._server.pull_to(self._pulls.places())
        self._pulled = False
        self._pulls.copy_to(self.vector)
        return self.vector

    def read(self) -> Tensor:
        """Return the parameters on the servers as they are now, on the CPU, without waiting for other workers."""
        self.settle()
        return self._server.read()

    # ---- waits

    def settle(self) -> None:
        """Wait until the servers have acknowledged every push. Raises LinkError if one has failed."""
        push, self._push = self._push, None
        if push is not None:
            began = time.monotonic()
            try:
                self._server.note(push.wait(), pulled=self._pulled)
            finally:
                self._waited += time.monotonic() - began
                self._source = self.vector[:0]
        self._server.settle()

    def wait(self, rank: int, rounds: int) -> None:
        """Wait as `GroupServer.wait`."""
        self.settle()
        self._server.wait(rank, rounds)

    def close(self) -> None:
        """Release the pinned memory, and end a push in progress together with the session. Then close `GroupServer`."""
        push, self._push = self._push, None
        if push is not None:
            push.stop()
        self._down.wait()
        self._checks.wait()
        self._memory.close()
        self._pulls.close()

    # ---- facts

    @property
    def step(self) -> int:
        """The number of the next push."""
        return self._server.step

    @step.setter
    def step(self, step: int) -> None:
        self._server.step = step

    @property
    def compresses(self) -> bool:
        """Whether pushes are compressed, which is done on the CPU."""
        return self._server.feedback is not None

    @property
    def lead(self) -> int:
        """The number of rounds that this worker was ahead of the slowest at its last pull."""
        return self._server.lead

    @property
    def version(self) -> int:
        """The number of the servers' steps that the last pulled values contain."""
        return self._server.version

    @property
    def seconds_waiting(self) -> float:
        """The seconds for which this worker has waited for answers."""
        return self._server.seconds_waiting + self._waited

    @property
    def bytes_moved(self) -> int:
        """Bytes of parameters and gradients, sent and received."""
        return self._server.bytes_moved


class PulledVector:
    """The pulled values on the device, in a vector beside the model's, and the pinned memory through which they come.

    If a server of this host holds a segment, the device reads the segment in the server's memory, where that can be
    pinned.
    """

    def __init__(self, device: Device, vector: Tensor, cuts: tuple[tuple[int, int], ...]) -> None:
        self._device, self._cuts = device, cuts
        self._values = torch.empty_like(vector)
        self._host = device.pinned(vector.numel(), vector.dtype)
        self._stream = device.stream()
        self._stream.after(device.current().record())  # earlier work may still use the memory of `_values`
        self._done: DeviceEvent = self._stream.record()
        self._copied: dict[int, DeviceEvent] = {}  # by segment: done once the device has read `_host`
        self._pins: dict[int, tuple[int, Tensor | None]] = {}  # by segment: the server's memory; None: it is not pinned

    def places(self) -> dict[int, PieceBytes | Landing]:
        """Return the place of each segment's pulled values. The host waits until earlier values have been read."""
        self._done.wait()
        return {
            segment: _SegmentLanding(self, segment, self._count_bytes(segment)) for segment in range(len(self._cuts))
        }

    def receive(self, segment: int, values: Bytes, *, lasting: bool) -> DeviceEvent | None:
        """Copy a segment's values to the device: see `Landing.receive`."""
        lo, hi = self._cuts[segment]
        pinned = self._pin(segment, values) if lasting and len(values) else None
        if pinned is not None:
            self._done = self._stream.copy(self._values[lo:hi], pinned)
            return self._done
        before = self._copied.get(segment)
        if before is not None:
            before.wait()  # the device may still read the values of an earlier attempt
        self._host[lo:hi].copy_(make_tensor_over(values, self._host.dtype))
        self._done = self._copied[segment] = self._stream.copy(self._values[lo:hi], self._host[lo:hi])
        return None

    def copy_to(self, vector: Tensor) -> None:
        """Let this thread's stream copy the values to `vector`, after they have arrived on the device."""
        current = self._device.current()
        current.after(self._done)
        self._stream.after(current.copy(vector, self._values))

    def close(self) -> None:
        """Unpin the servers' memory."""
        self._stream.wait()
        for _, pinned in self._pins.values():
            if pinned is not None:
                self._device.unpin(pinned)
        self._pins.clear()

    def _count_bytes(self, segment: int) -> int:
        lo, hi = self._cuts[segment]
        return (hi - lo) * self._host.element_size()

    def _pin(self, segment: int, values: Bytes) -> Tensor | None:
        """Return the server's memory as a pinned tensor, or None if the system does not pin it."""
        address = int(values.__array_interface__["data"][0])
        known = self._pins.get(segment)
        if known is None or known[0] != address:
            if known is not None and known[1] is not None:
                self._device.unpin(known[1])
            found = make_tensor_over(values, self._host.dtype)
            known = self._pins[segment] = address, found if self._device.pin(found, read_only=True) else None
        return known[1]


class _SegmentLanding(Landing):
    def __init__(self, vector: PulledVector, segment: int, size: int) -> None:
        self._vector, self._segment, self._size = vector, segment, size

    def __len__(self) -> int:
        return self._size

    def receive(self, values: Bytes, *, lasting: bool) -> DeviceEvent | None:
        return self._vector.receive(self._segment, values, lasting=lasting)


def make_tensor_over(values: Bytes, dtype: torch.dtype) -> Tensor:
    """Return a tensor over an array of bytes, which may be read-only memory: the tensor must not be written to."""
    if not len(values):
        return torch.empty(0, dtype=dtype)
    block = (ctypes.c_char * len(values)).from_address(int(values.__array_interface__["data"][0]))
    block.held = values  # type: ignore[attr-defined]  # the tensor keeps `block`, and `block` keeps the memory
    return torch.frombuffer(block, dtype=dtype)


class PushMemory:
    """The host's memory of a push, into which a device copies: pinned, and read by servers of this host if possible."""

    def __init__(self, server: GroupServer, device: Device) -> None:
        self.host = torch.empty(0, dtype=server.dtype)
        self._server, self._device = server, device
        self._shared: Tensor | None = None  # the session's memory of the gradient, which `host` is a part of
        self._own: Tensor | None = None
        self._known: tuple[Tensor, dict[int, PieceBytes]] | None = None

    def pieces(self, cuts: tuple[tuple[int, int], ...]) -> dict[int, PieceBytes]:
        """Choose the memory `host` of a push; return the piece of each segment in it. All pushes before are complete.

        The session has new memory after a request was given up, because a server may still read the old one.
        """
        found = self._server.session.shared.buffer()
        shared = None if found is None else found.whole
        if self._shared is not shared or not self.host.numel():
            self.close()
            if shared is not None and self._device.pin(shared):
                self._shared = self.host = shared
            elif self._own is None:  # the session copies its pieces into the memory that servers read
                self._own = self.host = self._device.pinned(self._server.size, self._server.dtype)
            else:
                self.host = self._own
        if self._known is None or self._known[0] is not self.host:
            laid, item = view_bytes(self.host), self.host.element_size()
            self._known = self.host, {i: laid[a * item : b * item] for i, (a, b) in enumerate(cuts)}
        return self._known[1]

    def close(self) -> None:
        """Unpin the session's memory. No copy into it may be in progress."""
        if self._shared is not None:
            self._device.unpin(self._shared)
        self._shared, self._known = None, None
        self.host = self.host[:0]


def _find_largest(values: Tensor, found: Tensor) -> None:
    """Write the largest magnitude of the values to `found`: it is finite exactly if all values are."""
    with torch.no_grad():
        if len(values):
            torch.linalg.vector_norm(values, ord=math.inf, out=found)
        else:
            found.zero_()


class _PushThread:
    """The thread that sends one push, from its `begin` until all requests are answered."""

    def __init__(self, feed: SegmentFeed, server: GroupServer) -> None:
        self.feed = feed
        self._server = server
        self._answers = SegmentReplies({}, 0, 0, 0)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="rayps-push")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answers = self._server.session.stream(self.feed)
        except Exception as error:  # raised by `wait`
            self._error = error

    def stop(self) -> None:
        """End the push, although requests may not be answered. The session cannot be used afterwards."""
        self.feed.end(refused=True)
        self._server.hang_up()
        self._thread.join(GRACE_SECONDS)

    def wait(self) -> SegmentReplies:
        """Wait until all requests are answered, after `SegmentFeed.end`; return the answers.

        Raises the error of the session, or PeerTimeout if it takes too long.
        """
        seconds = 2 * (self._server.session.timeout + GRACE_SECONDS)  # the session's own error comes first
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise PeerTimeout(
                f"the servers did not answer a push within {seconds:g} s: raise `timeout` if they need longer",
                peer="servers",
                seconds=seconds,
            )
        self.feed.close()
        if self._error is not None:
            raise self._error
        return self._answers
