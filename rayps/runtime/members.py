"""An actor of a job as its driver sees it. Asking never blocks: each member has at most one question open, and one that
leaves its question unanswered past the deadline counts as dead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayps.cluster import Handle, Reply
from rayps.errors import ActorDied, ClusterError, LinkError
from rayps.metrics import means
from rayps.runtime.actors import Place

START_SECONDS = 180.0  # a process has this long to start and to import torch


@dataclass(slots=True)
class Member:
    """One actor of the job."""

    name: str
    handle: Handle
    place: Place | None = None
    facts: Any = None  # WorkerFacts or ShardFacts of the last poll
    dead: str | None = None  # why it counts as dead
    question: Reply | None = None
    asked_at: float = 0.0

    @property
    def address(self) -> str:
        """Where its peers reach it."""
        assert self.place is not None
        return self.place.address

    def ask(self, wanted: int, timeout: float) -> Any:
        """The member's new facts, or None while it has not answered."""
        if self.dead:
            return None
        if self.question is None:
            self.question, self.asked_at = self.handle.call("poll", wanted), time.monotonic()
            return None
        silent = time.monotonic() - self.asked_at
        if not self.question.done():
            if silent > timeout:
                self.dead = f"{self.name} was silent for {silent:.0f} s (timeout {timeout:g} s)"
            return None
        question, self.question = self.question, None
        try:
            self.facts = question.result(0)
        except ClusterError as error:
            self.dead = str(error.data.get("reason", error))
            return None
        return self.facts

    def heard(self, reply: Reply) -> None:
        """Wait for an order to be taken; a member that does not take it counts as dead."""
        try:
            reply.result(START_SECONDS)
        except ClusterError as error:
            self.dead = str(error.data.get("reason", error))
        except TimeoutError as error:
            self.dead = str(error)


def place(members: Sequence[Member]) -> None:
    """Learn where new members are; one that did not start counts as dead."""
    for member, reply in [(member, member.handle.call("place")) for member in members]:
        try:
            member.place = reply.result(START_SECONDS)
        except TimeoutError:
            member.dead = (
                f"it did not start within {START_SECONDS:g} s: is the cluster overloaded? "
                "`rayps doctor` shows memory and cores"
            )
        except ClusterError as error:
            member.dead = str(error.data.get("reason", error))


def settle(replies: Sequence[Reply], members: Sequence[Member]) -> None:
    """Wait until these members have taken a new generation's orders; what they said before is forgotten."""
    for reply, member in zip(replies, members, strict=True):
        member.question, member.facts = None, None
        member.heard(reply)


def evaluated(members: Sequence[Member], replies: Sequence[Reply], timeout: float) -> dict[str, float] | None:
    """The means of every metric from everyone's answers; None when one was lost meanwhile: it counts as dead."""
    found, torn = [], list[tuple[Member, str]]()
    for member, reply in zip(members, replies, strict=True):
        try:
            found.append(reply.result(timeout))
        except ActorDied as error:
            member.dead = str(error.data.get("reason", error))
        except TimeoutError:
            member.dead = f"it did not evaluate within {timeout:g} s"
        except LinkError as error:  # within its replica
            torn.append((member, str(error)))
    if torn and not any(member.dead for member in members):  # else the dead one is why
        torn[0][0].dead = torn[0][1]
    return means(found) if len(found) == len(members) else None
