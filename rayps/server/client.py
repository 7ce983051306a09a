"""Talk to the shared parameters: what a worker's `pull` and `push` do.

With `defer`, a push leaves with whatever is said next, so that a round of push and pull is one message to each shard
and one back. A shard that is lost is found again where the strategy allows it, and what it did not acknowledge is
said again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from rayps import errors
from rayps.errors import LinkError, PeerLost
from rayps.flat import Gradient
from rayps.link import Link, Message
from rayps.server.messages import Kind, as_bytes, error_of

Requests = dict[int, tuple[Message, memoryview | None]]  # by shard: what is asked, and its payload


class Server:
    """The shared parameters as one worker sees them: pull and push, whole or by range."""

    def __init__(
        self,
        rank: int,
        dtype: torch.dtype,
        ranges: list[tuple[int, int]],
        links: list[Link],
        *,
        timeout: float,
        step: int = -1,
        relink: Callable[[int], Link] | None = None,
        defer: bool = False,
    ) -> None:
        self.rank = rank
        self.size = ranges[-1][1]
        self.home: Tensor | None = None  # where whole pulls land, e.g. the model's own vector; None = in a new tensor
        self.seconds_waiting = 0.0
        self.bytes_moved = 0  # of parameters and gradients, sent and received
        self.lead = 0  # by how many rounds this worker led the slowest at its last pull
        self._dtype, self._ranges, self._links, self._timeout, self._relink = dtype, ranges, links, timeout, relink
        self._tag, self._defer = 0, defer
        self._posted: Requests = {}  # pushes that have not left yet
        steps = [self._join(i, step) for i in range(len(links))]
        # a push that its former holder cut off between shards is completed by pushing that step again
        self.step = min(steps)

    def pull(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """The elements lo to hi of the vector; waits while the clock says so.

        Raises:
            PeerTimeout: the slowest worker, or a shard, was silent past the deadline.
            PeerLost: a shard died.
        """
        return self._fetch(Kind.PULL, lo, hi)

    def read(self) -> Tensor:
        """The whole vector as it is now, outside the clock."""
        return self._fetch(Kind.READ, 0, None)

    def push(self, value: Tensor | Gradient, weight: float = 1.0, lo: int = 0) -> None:
        """Push a gradient, or a range of it that begins at element lo; the push counts as one step.

        A Gradient brings its number of samples as its weight. Every shard applies the push once, whatever is
        retried. Deferred, `value` must not change before the next call here has returned (`settle` if there is none).
        """
        vector, weight = (value.vector, float(value.samples)) if isinstance(value, Gradient) else (value, weight)
        vector = vector.detach().reshape(-1).to("cpu", self._dtype)
        self._must_fit(lo, lo + vector.numel())
        self.settle()
        requests: Requests = {}
        for i, (a, b) in enumerate(self._ranges):
            start, stop = max(a, lo), min(b, lo + vector.numel())
            piece = vector[start - lo : stop - lo] if start < stop else vector[:0]
            message = Message(Kind.PUSH, a=self.step, b=max(start - a, 0) if start < stop else 0, weight=weight)
            requests[i] = (message, as_bytes(piece))
            self.bytes_moved += piece.numel() * piece.element_size()
        self._posted = requests
        self.step += 1
        if not self._defer:
            self.settle()

    def settle(self) -> None:
        """Return once every push is acknowledged."""
        if self._posted:
            self._exchange({}, {})

    def close(self) -> None:
        """Leave; the shards forget the connection, not the rank's clock."""
        for link in self._links:
            link.close()

    def _fetch(self, kind: Kind, lo: int, hi: int | None) -> Tensor:
        hi = self.size if hi is None else hi
        self._must_fit(lo, hi)
        whole = kind is Kind.PULL and hi - lo == self.size
        out = self.home if whole and self.home is not None else torch.empty(hi - lo, dtype=self._dtype)
        requests: Requests = {}
        places: dict[int, memoryview] = {}
        for i, (a, b) in enumerate(self._ranges):
            start, stop = max(a, lo), min(b, hi)
            if start < stop:
                requests[i] = (Message(kind, a=start - a, b=stop - a), None)
                places[i] = as_bytes(out[start - lo : stop - lo])
        replies = self._exchange(self._merged(requests) if whole else requests, places)
        if kind is Kind.PULL:
            self.lead = max((reply.b for reply in replies.values()), default=0)
        self.bytes_moved += out.numel() * out.element_size()
        return out

    def _must_fit(self, lo: int, hi: int) -> None:
        if not 0 <= lo <= hi <= self.size:
            raise errors.ConfigError(f"range {lo} to {hi} is not within the {self.size} parameters")

    # ---- turns

    def _merged(self, pulls: Requests) -> Requests:
        """A pull of everything and the push before it, where that was whole too, as one request to each shard."""
        sizes = [(b - a) * self._dtype.itemsize for a, b in self._ranges]
        if any(payload is None or len(payload) != sizes[i] for i, (_, payload) in self._posted.items()):
            return pulls
        posted, self._posted = self._posted, {}
        for i, (push, payload) in posted.items():
            pulls[i] = (Message(Kind.PUSH_PULL, a=push.a, weight=push.weight), payload)
        return pulls

    def _join(self, i: int, step: int) -> int:
        """Say who this is to a shard; this rank's next step there."""
        return self._ask(i, (Message(Kind.JOIN, a=self.rank, b=step, weight=self._timeout), None)).a

    def _exchange(self, requests: Requests, places: dict[int, memoryview]) -> dict[int, Message]:
        """Ask several shards at once, hear what was posted before and what is asked now."""
        began = time.monotonic()
        posted, self._posted = self._posted, {}
        lost = self._send(posted)
        lost |= self._send({i: request for i, request in requests.items() if i not in lost})
        replies: dict[int, Message] = {}
        for said, into in ((posted, dict[int, memoryview]()), (requests, places)):
            for i, (message, _) in said.items():
                if i in lost:
                    continue
                try:
                    replies[i] = self._reply(i, message.tag, into.get(i))
                except PeerLost:
                    if self._relink is None:
                        raise
                    lost.add(i)
        for i in lost:
            if i in posted:
                self._recover(i, posted[i])  # a shard that had applied it knows its step, and does not do so again
            if i in requests:
                replies[i] = self._recover(i, requests[i], places.get(i), rejoin=i not in posted)
        self.seconds_waiting += time.monotonic() - began
        return replies

    def _send(self, requests: Requests) -> set[int]:
        """Say all; the shards that were lost meanwhile, where the strategy lets one be found again."""
        lost = set()
        for i, (message, payload) in requests.items():
            self._tag += 1
            message.tag = self._tag
            try:
                self._links[i].send(message, payload, timeout=self._timeout)
            except LinkError:
                if self._relink is None:
                    raise
                lost.add(i)
        return lost

    def _recover(
        self, i: int, request: tuple[Message, memoryview | None], into: memoryview | None = None, *, rejoin: bool = True
    ) -> Message:
        """Find a lost shard again and repeat a request."""
        assert self._relink is not None
        if rejoin:
            self._links[i].close()
            self._links[i] = self._relink(i)
            pushes = request[0].kind in (Kind.PUSH, Kind.PUSH_PULL)
            self._join(i, request[0].a if pushes else self.step)
        return self._ask(i, request, into)

    def _ask(self, i: int, request: tuple[Message, memoryview | None], into: memoryview | None = None) -> Message:
        message, payload = request
        self._tag += 1
        message.tag = self._tag
        self._links[i].send(message, payload, timeout=self._timeout)
        return self._reply(i, message.tag, into)

    def _reply(self, i: int, tag: int, into: memoryview | None = None) -> Message:
        # the shard answers a pull that waits too long itself, naming the slowest rank: give it time to
        link, patience = self._links[i], self._timeout + 5.0
        while True:
            try:
                reply = link.recv(timeout=patience, into=into)
            except LinkError as error:
                if into is None or type(error) is not LinkError:
                    raise
                reply = link.recv(timeout=patience)  # of another size than the answer: a refusal
            if reply.tag != tag:
                continue  # the answer to a request that was given up
            if reply.kind == Kind.ERROR:
                raise error_of(reply)
            return reply
