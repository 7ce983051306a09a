"""A worker's turns with all of its shards: asks several at once, hears them all, finds lost ones again.

What a worker pushed to a shard since that was last saved is kept, and said again to the shard that replaces it. Several
shards are read as of one moment while they are held (`rayps.ps.protocol.consistent_cut`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rayps.comm.link import Link
from rayps.comm.link.memory import Fence, Memory
from rayps.comm.link.shared_memory_link import SharedLink
from rayps.core.errors import LinkError, PeerLost, PeerTimeout
from rayps.core.failpoint import passing
from rayps.ps.fixed.messages import PUSHES, ShardMessage
from rayps.ps.fixed.replay_buffer import FixedReplayBuffer
from rayps.ps.fixed.transport import (
    MemoryTransport,
    MessageTransport,
    Place,
    ShardAnswer,
    ShardCall,
    Transport,
    together,
)
from rayps.ps.protocol.consistent_cut import furthest
from rayps.ps.protocol.shared_memory import AVAILABLE, SLICE, GradientBuffer

LOSSES = 4  # in a row of one shard, until its worker gives up


class ShardSession:
    """The connections of one worker to its shards. `step` is the rank's next step."""

    def __init__(
        self,
        rank: int,
        dtype: torch.dtype,
        ranges: list[tuple[int, int]],
        links: list[Link],
        *,
        timeout: float,
        step: int,
        relink: Callable[[int], Link] | None,
        resident: bool,
        keep: int,
    ) -> None:
        self.desk: GradientBuffer | None = None
        self.pieces: list[Tensor] = []  # the desk's gradient, by shard
        self.told: list[set[int]] = [set() for _ in links]  # by shard: the numbers of the ids that it knows
        self.seconds_waiting = 0.0
        self._rank, self._dtype, self._ranges = rank, dtype, ranges
        self._timeout, self._relink, self._resident = timeout, relink, resident
        self._tag = 0
        self._kept = FixedReplayBuffer(len(links), keep if relink is not None else 0)
        self._rejoining = [threading.Lock() for _ in links]
        self._rejoined = 0  # times that a lost shard was found again
        self._acknowledged = max(step, 0)  # steps that all shards have acknowledged
        self._quiet = False  # whether all shards have answered
        self._fence = Fence()
        self._ways: list[Transport] = []
        self._boxes: list[MemoryTransport] | None = None
        steps = [self._join(i, link, step) for i, link in enumerate(links)]
        boxes = [way for way in self._ways if isinstance(way, MemoryTransport)]
        if relink is None and len(boxes) == len(links):
            self._boxes = boxes
        # a push that its former holder cut off between shards is completed by pushing that step again
        self.step = self._acknowledged = min(steps)

    def exchange(self, asks: list[ShardCall], consistent: bool = True) -> list[ShardAnswer]:
        """Ask several shards at once, then hear them all; the answers are in the order of `asks`.

        Raises:
            PeerTimeout, PeerLost: a shard was silent or is lost, and cannot be found again.
        """
        began = time.monotonic()
        self._quiet = False
        self._tag = tag = self._tag + 1
        ways, lost = self._ways, set[int]()
        for ask in asks:
            try:
                ways[ask.shard].ask(tag, ask)
            except LinkError:
                if self._relink is None:
                    raise
                lost.add(ask.shard)
            passing("worker: between shards")
        for way in ways:
            way.ring()
        passing("worker: pushed, not heard")
        lines = [(way, ask.place) for ask in asks if isinstance(way := ways[ask.shard], MessageTransport)]
        if len(lines) > 1:
            together(lines, tag)
        answers = [self._hear(tag, ask, consistent, ask.shard in lost) for ask in asks]
        if asks and asks[0].kind in PUSHES:
            self._acknowledged = asks[0].a + 1
        passing("worker: acknowledged")
        self.seconds_waiting += time.monotonic() - began
        return answers

    @property
    def swift(self) -> bool:
        """Whether `push_pull` may be used: memory is shared with all shards, and nothing is said again."""
        return self._boxes is not None

    def push_pull(self, step: int, weight: float, places: list[Place], consistent: bool) -> int:
        """Push what lies in the desk and pull the whole vector; by how many rounds this worker leads.

        As `exchange` with a request for each shard, in fewer calls. Raises PeerTimeout, PeerLost.
        """
        began = time.monotonic()
        boxes = self._boxes
        assert boxes is not None
        if not self._quiet:
            self.rest()
        self._quiet = False
        self._tag = tag = self._tag + 1
        for way, (a, b) in zip(boxes, self._ranges, strict=True):
            way.put(tag, ShardMessage.PUSH_PULL, step, 0, b - a, weight)
            passing("worker: between shards")
        self._fence()
        for way in boxes:
            way.ring()
        passing("worker: pushed, not heard")
        lead = 0
        for way, place in zip(boxes, places, strict=True):
            lead = max(lead, way.take(tag, place, consistent))
        self._quiet = True
        passing("worker: acknowledged")
        self.seconds_waiting += time.monotonic() - began
        return lead

    def _hear(self, tag: int, ask: ShardCall, consistent: bool, lost: bool) -> ShardAnswer:
        try:
            if lost:
                raise PeerLost(f"shard-{ask.shard} was lost", peer=f"shard-{ask.shard}")
            answer = self._ways[ask.shard].hear(tag, ask, consistent)
        except PeerLost:
            if self._relink is None:
                raise
            answer = self._recover(ask, consistent)
        self._kept.durable(ask.shard, answer.durable)
        return answer

    def shares(self, shard: int) -> bool:
        """Whether memory is shared with a shard."""
        return isinstance(self._ways[shard], MemoryTransport)

    def rest(self) -> None:
        """Return once no shard has a use for the payload of an earlier request. Raises PeerTimeout, PeerLost."""
        if not self._quiet:
            for way in self._ways:
                way.rest()
            self._quiet = True

    def hang_up(self) -> None:
        """Make whoever waits in here, and the shards, see this worker as lost. Any thread may call it."""
        for way in self._ways:
            way.hang_up()

    def close(self) -> None:
        """Leave, and give up what is shared."""
        for way in self._ways:
            way.close()
        if self.desk is not None:
            self.desk.close()
            self.desk = None

    # ---- what is said again

    def keep(self, step: int, said: list[list[ShardCall]]) -> None:
        """Keep a push, as what is said to each shard, until it is durable there; payloads are copied."""
        if self._kept.limit:
            for shard, asks in enumerate(said):
                copies = [ask._replace(piece=None if ask.piece is None else ask.piece.clone()) for ask in asks]
                size = sum(ask.piece.numel() * ask.piece.element_size() for ask in copies if ask.piece is not None)
                self._kept.keep(shard, step, copies, size)

    def replay(self, shard: int, link: Callable[[], Link], wanted: Callable[[], bool]) -> None:
        """Say again to a replaced shard what it lacks, over a link of its own; from any thread, if still `wanted`.

        This worker may wait for another shard meanwhile, and the others for what this one lacks of it.
        Raises PeerTimeout, PeerLost.
        """
        with self._rejoining[shard]:
            if wanted():
                way, tag = MessageTransport(link(), self._timeout), 0
                try:
                    joining = ShardCall(shard, ShardMessage.JOIN, self._rank, self._first(shard), self._timeout)
                    said = self._kept.since(shard, _once(way, tag, joining).version)
                    for tag, ask in enumerate((ask for _, asks in said for ask in asks), 1):
                        _once(way, tag, ask)
                finally:
                    way.close()

    def _rejoin(self, shard: int) -> None:
        """Find a lost shard again, and say again what it lacks."""
        assert self._relink is not None
        self._ways[shard].close()
        self._rejoined += 1
        with self._rejoining[shard]:
            mark = self._join(shard, self._relink(shard), self._first(shard))
            way = self._ways[shard].by_message  # the desk holds another push by now
            for _, asks in self._kept.since(shard, mark):
                for ask in asks:
                    self._one(way, ask, True)
        self.told[shard].clear()

    def _first(self, shard: int) -> int:
        """The earliest step that can be said again: what is kept, or is not acknowledged yet."""
        return self._kept.first(shard, self._acknowledged)

    def _recover(self, ask: ShardCall, consistent: bool) -> ShardAnswer:
        """Find a lost shard again and repeat a request; one that had applied it knows, and does not do so again."""
        for left in reversed(range(LOSSES)):
            try:
                self._rejoin(ask.shard)
                return self._one(self._ways[ask.shard], ask, consistent)
            except PeerLost:
                if not left:
                    raise
        raise AssertionError("the last loss is raised")

    def _one(self, way: Transport, ask: ShardCall, consistent: bool) -> ShardAnswer:
        self._tag += 1
        way.ask(self._tag, ask)
        way.ring()
        return way.hear(self._tag, ask, consistent)

    # ---- several shards as of one moment

    def read_together(self, asks: list[ShardCall]) -> list[ShardAnswer]:
        """As `exchange`, while all shards hold the same pushes and apply no other; nothing may be unacknowledged.

        Raises:
            PeerTimeout: a push that one shard has did not reach another, or the shards were held for too long.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            rejoined, began = self._rejoined, time.monotonic()
            try:
                with self._held():
                    answers = self.exchange(asks)
            except PeerTimeout as error:
                if not error.data.get("behind") or time.monotonic() > deadline:
                    raise
                continue  # whoever must say something again may wait for a shard that was held here
            if self._rejoined == rejoined and time.monotonic() - began < self._timeout:
                return answers  # else a shard was not the one that was held, or has gone on meanwhile
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"the shards could not be held and read within {self._timeout:g} s: raise timeout, or pull with "
                    "consistent=False",
                    peer="shard-0",
                    seconds=self._timeout,
                )

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        first, *others = [ShardCall(i, ShardMessage.HOLD, 0, 0) for i in range(len(self._ways))]
        try:
            answers = self.exchange([first._replace(a=1)]) + self.exchange(others)
            reached = [torch.frombuffer(answer.payload, dtype=torch.int64).tolist() for answer in answers]
            target = furthest(reached)
            if len({steps[self._rank] for steps in reached}) > 1:
                # a push of this rank was cut off between shards: no moment has it in all, until it is pushed again
                late = []
            else:
                late = [i for i, steps in enumerate(reached) if steps != target]
            self.exchange([ShardCall(i, ShardMessage.AIM, 0, 0, piece=torch.tensor(target)) for i in late])
            yield
        finally:
            for i, way in enumerate(self._ways):
                with contextlib.suppress(LinkError):  # a shard lets go when it loses the link
                    way.by_message.ask(0, ShardCall(i, ShardMessage.RELEASE, 0, 0))

    # ---- joining

    def _join(self, i: int, link: Link, step: int) -> int:
        """Say who this is to a shard, and offer it what can be shared; this rank's next step there."""
        box: Memory | None = None
        if self._resident and AVAILABLE and isinstance(link, SharedLink):
            if self.desk is None:
                self.desk = GradientBuffer(self._ranges[-1][1], self._dtype)
                self.pieces = [self.desk.gradient[a:b] for a, b in self._ranges]
            box = self.desk.offer(link)
        way: Transport = MessageTransport(link, self._timeout)
        self._ways[i : i + 1] = [way]
        joined = self._one(way, ShardCall(i, ShardMessage.JOIN, self._rank, step, self._timeout), True)
        if box is not None and self.desk is not None and isinstance(link, SharedLink) and SLICE in link.memories:
            self._ways[i] = MemoryTransport(link, box, self.desk, self._timeout)
        self._kept.durable(i, joined.durable)
        return joined.version


def _once(way: MessageTransport, tag: int, ask: ShardCall) -> ShardAnswer:
    way.ask(tag, ask)
    return way.hear(tag, ask, True)
