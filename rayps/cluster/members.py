"""The actors of a job: on which hosts they run, and how the driver polls them without blocking.

A member is one of these actors. Each member has at most one pending call. A member that does not answer a call before
its deadline counts as dead.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayps_client.errors import ActorDied, ClusterError

from rayps.cluster.local import ActorHandle, ActorReply, surrounding, until
from rayps.cluster.notices import Notice, earliest
from rayps.cluster.reservation import WorkerResources
from rayps.core.job.user_code import START_SECONDS, explain_overdue

LEAVE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ActorHost:
    """The host and process of an actor, and the address at which its peers reach it."""

    host: str
    pid: int
    address: str
    node: str = ""  # the host's id in the cluster, a Ray node id; "" in a cluster of threads

    @classmethod
    def own(cls, address: str) -> ActorHost:
        """Return the host and process of the caller, whose peers reach it at `address`."""
        return cls(socket.gethostname(), os.getpid(), address, surrounding().node)

    def notice(self, notices: tuple[Notice, ...]) -> Notice | None:
        """Return the notice that this process will end, the earliest if there are several, or None."""
        own = (one for one in notices if one.concerns(self.node, self.host, self.address, self.pid))
        return earliest(tuple(own))


@dataclass(slots=True)
class GroupMember:
    """One actor of a job, as its driver knows it: its handle, newest facts and pending call, and whether it is dead."""

    name: str
    handle: ActorHandle
    place: ActorHost | None = None
    facts: Any = None  # WorkerFacts or ShardFacts of the last poll
    dead: str | None = None  # why the member counts as dead; None if it is alive
    pending: ActorReply | None = None  # the reply of the pending call
    frozen: str = ""  # hash of the frozen parameters that the member's process was sent; "" if there are none
    called_at: float = 0.0  # the `time.monotonic` at which the pending call began
    incarnation: int = 0  # of its rank, with which it joins the servers of this generation
    resources: WorkerResources | None = None  # what is reserved for this member alone; None if it shares a reservation
    spawned: float = field(default_factory=time.monotonic)  # the `time.monotonic` at which its process was started

    @property
    def rank(self) -> int:
        """The number in the member's name: the rank of a worker."""
        return int(self.name.rpartition("-")[2])

    @property
    def address(self) -> str:
        """The address at which the member's peers reach it."""
        assert self.place is not None
        return self.place.address

    def poll(self, wanted: int, timeout: float, *more: int) -> Any:
        """Call the member's `poll`; return its new facts, or None while the member has not answered.

        `wanted` is the round whose state the member must retain for a snapshot. `timeout` is in seconds. `more` are
        further arguments of the member's `poll`.
        """
        facts = self._answer(timeout, "poll", wanted, *more)
        if facts is not None:
            self.facts = facts
        return facts

    def check_user_calls(self, timeout: float, round: int) -> None:
        """Mark the member as dead if a call of the user's code has exceeded its time limit.

        Calls of the user's code within a round are not checked here. `timeout` is in seconds.
        """
        answer = self._answer(timeout, "calls")
        if answer is not None:
            found = (explain_overdue(call, timeout, round, answer.ends) for call in answer.calls)
            self.dead = next((reason for reason in found if reason is not None), None)

    def _answer(self, timeout: float, method: str, *args: Any) -> Any:
        if self.dead:
            return None
        if self.pending is None:
            self.pending, self.called_at = self.handle.call(method, *args), time.monotonic()
            return None
        silent = time.monotonic() - self.called_at
        if not self.pending.done():
            if silent > timeout:
                self.dead = f"{self.name} did not answer for {silent:.0f} s (timeout {timeout:g} s)"
            return None
        reply, self.pending = self.pending, None
        try:
            return reply.result(0)
        except ClusterError as error:
            self.dead = str(error.data.get("reason", error))
            return None

    def await_reply(self, reply: ActorReply) -> None:
        """Wait until a call of this member has returned. If the call fails, the member counts as dead."""
        try:
            reply.result(START_SECONDS)
        except ClusterError as error:
            self.dead = str(error.data.get("reason", error))
        except TimeoutError as error:
            self.dead = str(error)


def place(
    members: Sequence[GroupMember], check: Callable[[], None] = lambda: None, *, seconds: float = START_SECONDS
) -> None:
    """Set `place`, the host and address, of new members. A member that does not start within `seconds` is dead.

    `check` is called repeatedly during the wait. If it raises an exception, the wait ends. An error of an actor's
    constructor is raised: another process would get it, too.
    """
    asked = [(member, member.handle.call("place")) for member in members]

    def ready() -> bool:
        check()
        return all(reply.done() for _, reply in asked)

    until(ready, seconds)
    for member, reply in asked:
        try:
            member.place = reply.result(0)
        except TimeoutError:
            member.dead = (
                f"it did not start within {seconds:g} s: is the cluster overloaded? "
                "`rayps doctor` shows memory and cores"
            )
        except ActorDied as error:
            member.dead = str(error.data.get("reason", error))


def settle(replies: Sequence[ActorReply], members: Sequence[GroupMember]) -> None:
    """Wait until the calls that start a new generation have returned, and drop the members' facts of earlier polls."""
    for reply, member in zip(replies, members, strict=True):
        member.pending, member.facts = None, None
        member.await_reply(reply)


def leave(members: Sequence[GroupMember], method: str) -> None:
    """Let members remove files from their hosts, by the method of this name, before their processes are ended.

    A member that does not answer within 2 s is not waited for; a later process on its host removes the files.
    """
    replies = [member.handle.call(method) for member in members if member.dead is None]
    until(lambda: all(reply.done() for reply in replies), LEAVE_SECONDS)
