"""The readers of one shard who want several shards as of one moment: who holds it, who is next, which pushes wait.

`rayps.ps.protocol.consistent_cut` says which pushes may be applied meanwhile. A reader that vanishes, or holds the
shard past its deadline, lets it go.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from rayps.core.errors import PeerTimeout
from rayps.ps.fixed.connection import ShardPeer, ShardRequest
from rayps.ps.fixed.messages import ShardMessage
from rayps.ps.fixed.shard import Shard
from rayps.ps.protocol.consistent_cut import ConsistentCut

BEHIND_SECONDS = 0.5  # what has been applied elsewhere is here at once, or must be said again by somebody who waits


class ShardReaders:
    """The turns of a shard's readers. `reply`, `refuse` and `serve` are the loop's, for requests of any guest."""

    def __init__(
        self,
        shard: Shard,
        reply: Callable[[ShardRequest, ShardMessage, Tensor | None], None],
        refuse: Callable[[ShardRequest, Exception], None],
        serve: Callable[[ShardRequest], None],
    ) -> None:
        self._shard, self._reply, self._refuse, self._serve = shard, reply, refuse, serve
        self._cut = ConsistentCut(shard.ledger)
        self._waiting: list[ShardRequest] = []  # to hold the shard
        self._aimed: ShardRequest | None = None  # of the reader who holds it, until the shard has come far enough
        self._delayed: list[ShardRequest] = []  # pushes

    @property
    def busy(self) -> bool:
        """Whether somebody holds the shard, or waits for it."""
        return self._cut.holder is not None or bool(self._waiting)

    def admit(self, push: ShardRequest) -> bool:
        """Whether a push may be applied now; else it is served later."""
        if self._cut.admits(push.guest.rank, push.a):
            return True
        self._delayed.append(push)
        return False

    def hold(self, request: ShardRequest) -> None:
        """Answer how far the shard has come with each rank, once it is this reader's turn; then hold it."""
        # whom the first shard let in need not wait at the others, unless the first one died and two hold what they can
        request.deadline = time.monotonic() + (request.guest.patience if request.a else BEHIND_SECONDS)
        self._waiting.append(request)
        self._grant()

    def aim(self, request: ShardRequest) -> None:
        """Answer once the shard has come so far. Raises PeerTimeout: the reader does not hold it (any more)."""
        if self._cut.holder is not request.guest:
            raise PeerTimeout(
                f"worker-{request.guest.rank} does not hold shard-{self._shard.index}: it was held for longer than "
                f"{request.guest.patience:g} s (the knob is `timeout`) and let go, or is a replacement of the one held",
                peer=request.guest.link.peer,
                seconds=request.guest.patience,
                behind=True,
            )
        self._cut.aim(request.numbers().tolist())
        self._aimed = request
        self._cut.deadline = min(self._cut.deadline, time.monotonic() + BEHIND_SECONDS)
        self._again()
        self.look()

    def release(self, request: ShardRequest) -> None:
        """The reader has read; there is no answer."""
        if self._cut.holder is request.guest:
            self._let_go()

    def look(self) -> None:
        """After a push: perhaps the shard has come far enough, or the clock lets the next reader in."""
        aimed = self._aimed
        if aimed is not None and not self._cut.missing():
            self._aimed = None
            self._cut.deadline = time.monotonic() + aimed.guest.patience  # to read
            self._reply(aimed, ShardMessage.ACK, None)
        if self._waiting:
            self._grant()

    def forget(self, guest: ShardPeer) -> None:
        """A guest has gone, and whatever it asked for."""
        self._delayed = [request for request in self._delayed if request.guest is not guest]
        self._waiting = [request for request in self._waiting if request.guest is not guest]
        if self._cut.holder is guest:
            self._let_go()

    def expire(self) -> None:
        """Refuse who has waited too long, and take the shard back from who has held it too long."""
        now = time.monotonic()
        for request in [waiting for waiting in self._waiting if waiting.deadline < now]:
            self._waiting.remove(request)
            self._refuse(request, too_late(self._shard, request, behind=not request.a))
        if self._cut.holder is not None and self._cut.deadline < now:
            aimed, missing = self._aimed, self._cut.missing()
            self._let_go()
            if aimed is not None:
                self._refuse(aimed, self._cut_off(aimed, missing))

    def _grant(self) -> None:
        """Let the next reader hold the shard, if nobody does and the clock lets it pull."""
        for request in self._waiting if self._cut.holder is None else []:
            if not request.a or self._shard.may_pull(request.guest.rank):
                self._waiting.remove(request)
                reached = self._cut.hold(request.guest, time.monotonic() + request.guest.patience)
                self._reply(request, ShardMessage.VALUE, torch.tensor(reached))
                return

    def _let_go(self) -> None:
        self._cut.release()
        self._aimed = None
        self._again()
        self._grant()

    def _again(self) -> None:
        """Serve the pushes that waited, in the order in which they came."""
        waiting, self._delayed = self._delayed, []
        for push in waiting:
            self._serve(push)

    def _cut_off(self, aimed: ShardRequest, missing: list[int]) -> PeerTimeout:
        return PeerTimeout(
            f"worker-{aimed.guest.rank} waited for a push of rank {', '.join(map(str, missing))} that another shard "
            f"has and shard-{self._shard.index} has not: did it die between two shards?\n"
            "raise timeout if it may take longer, or pull with consistent=False",
            peer=f"worker-{missing[0]}",
            seconds=aimed.guest.patience,
            behind=True,
        )


def too_late(shard: Shard, request: ShardRequest, behind: bool = False) -> PeerTimeout:
    """Whom a pull has waited for in vain: the slowest ranks. `behind` = it is to be tried again."""
    late, patience = shard.clock.laggards(), request.guest.patience
    return PeerTimeout(
        f"worker-{request.guest.rank} waited {patience:g} s for rank {', '.join(map(str, late))} to push step "
        f"{shard.clock.slowest}: raise timeout if a step may take longer",
        peer=f"worker-{late[0]}",
        seconds=patience,
        behind=behind,
    )
