"""Mends a grid that a death has torn: the lost are replaced, and everyone goes on from a round that all still have.

Nobody goes back to a snapshot. A lost worker's state comes from its twin in another replica, or else from the
neighbour that keeps its mirror; survivors go back by one round where they were ahead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rayps.core.metrics import Rounds
from rayps.recovery.backup_assignment import Mending
from rayps.recovery.commit import CommitCost
from rayps.runtime.decide import Mend, Replace, Restart
from rayps.runtime.journal import Journal
from rayps.runtime.worker_actor import WorkerFacts
from rayps.runtime.worker_group import WorkerGroup
from rayps.tensors.snapshot import Snapshot


@dataclass(slots=True)
class _Wound:
    """A death and what is being done about it."""

    reason: str
    lost: list[str]
    mending: Mending
    seen: float  # when it was, as time.monotonic


@dataclass(slots=True)
class Mender:
    """What a driver knows of deaths within replicas."""

    journal: Journal
    cost: CommitCost | None = None  # of being able to mend, in the generation under way
    _seen: float | None = None  # the first sign of a death
    _wound: _Wound | None = None
    _told: CommitCost | None = None
    _rejoining: list[tuple[list[int], list[str], float]] = field(default_factory=list)  # ranks, the lost, since when

    def saw(self, anything: bool) -> None:
        """Whether a member is dead or misses another one, as of now."""
        if anything and self._seen is None:
            self._seen = time.monotonic()

    def may_replace(self, group: WorkerGroup) -> bool:
        """Whether in step with servers a replica may begin anew alone; not again where that has just failed."""
        return group.rejoins and not self._rejoining

    def mend(self, group: WorkerGroup, decision: Restart | Mend, rounds: Rounds, generation: int) -> Mending | None:
        """End the generation and find the round from which the next one goes on; None: back to the snapshot.

        `generation` is the next one's number.
        """
        for member in group.members:
            if member.name in decision.lost and not member.dead:
                member.dead = "silent"
        self._rejoining = []
        if isinstance(decision, Restart):
            self._seen = self._wound = None
            return None
        seen = self._seen or time.monotonic()
        lost = list(decision.lost)
        if self._wound is not None:  # another death before the first new round
            seen = self._wound.seen
            lost = sorted({*lost, *self._wound.lost})
        found = group.halt()
        self._seen = None
        if found is None:
            self._wound = None
            self.journal.event(
                "warning",
                f"{decision.reason}: nobody else has its state (from the first round on a twin or a neighbour does), "
                "so everyone goes back to the snapshot",
                lost=list(decision.lost),
            )
            return None
        reason, sources = decision.reason, dict(found.sources)
        if self._wound is not None:
            reason, sources = f"{self._wound.reason}; {reason}", self._wound.mending.sources | sources
        self._wound = _Wound(reason, lost, Mending(found.round, sources), seen)
        rounds.again(generation, found.round)
        self.journal.event(
            "mending",
            f"{decision.reason}: {_sources(found) or 'everyone keeps its state'}, going on from round {found.round}",
            lost=list(decision.lost),
            round=found.round,
            generation=generation,
        )
        return found

    def restarted(self, decision: Restart | Mend, what: str, begin: int, generation: int) -> None:
        """Tell that everyone begins again from a snapshot, which is of round `begin`."""
        self.journal.event(
            "restarted",
            f"{decision.reason}: everyone {what}",
            lost=list(decision.lost),
            round=begin,
            generation=generation,
        )

    def replace(self, group: WorkerGroup, decision: Replace, snapshot: Snapshot) -> None:
        """New processes for the lost, whose replicas begin anew from the servers; the others are not disturbed."""
        numbers = [(name.partition("-")[0], int(name.partition("-")[2])) for name in decision.lost]
        seen, self._seen = self._seen or time.monotonic(), None
        for index in [number for kind, number in numbers if kind == "shard"]:
            group.replace_shard(index, snapshot)
            message = f"shard-{index} was restored from round {snapshot.round}"
            self._replaced(decision, [f"shard-{index}"], message, snapshot)
        gone = [number for kind, number in numbers if kind == "worker"]
        for ranks in group.replicas_of(gone):
            group.replace_workers(ranks, snapshot)
            lost = [f"worker-{rank}" for rank in ranks if rank in gone]
            message = f"{' and '.join(lost)} was replaced"
            if len(ranks) > 1:
                message += f", and worker-{ranks[0]} to worker-{ranks[-1]}, its replica, began anew from the servers"
                self._rejoining = [each for each in self._rejoining if each[0] != ranks] + [(ranks, lost, seen)]
            self._replaced(decision, lost, message, snapshot)

    def _replaced(self, decision: Replace, lost: list[str], message: str, snapshot: Snapshot) -> None:
        self.journal.event(
            "replaced", f"{decision.reason}: {message}, the others went on", lost=lost, round=snapshot.round
        )

    def _look_for_those_who_rejoin(self, group: WorkerGroup) -> None:
        for ranks, lost, seen in list(self._rejoining):
            facts = [group.workers[rank].facts for rank in ranks]
            if all(isinstance(f, WorkerFacts) and f.position > 0 and f.status != "failed" for f in facts):
                self._rejoining.remove((ranks, lost, seen))
                at, seconds = min(f.position for f in facts) - 1, time.monotonic() - seen
                self.journal.event(
                    "rejoined",
                    f"the replica of {' and '.join(lost)} has learnt again, from round {at} on, "
                    f"{seconds:.2f} s after the death was seen",
                    lost=lost,
                    round=at,
                    seconds=seconds,
                )

    def look(self, group: WorkerGroup, generation: int) -> None:
        """Take in the workers as they are now; tells of a mending once the first new round is there."""
        known = [w.facts for w in group.workers if isinstance(w.facts, WorkerFacts)]
        facts = [f for f in known if f.generation == generation]
        self.cost = CommitCost.most(f.cost for f in facts if f.cost is not None) or self.cost
        self._look_for_those_who_rejoin(group)
        wound = self._wound
        if wound is None or len(facts) < len(group.workers):
            return
        if all(f.position > wound.mending.round or f.status == "finished" for f in facts):
            self._wound = None
            self._tell(wound, generation)

    def _tell(self, wound: _Wound, generation: int) -> None:
        seconds = time.monotonic() - wound.seen
        origin = f"{_sources(wound.mending)}; " if wound.mending.sources else ""
        self.journal.event(
            "mended",
            f"{wound.reason}: {origin}everyone went on from round {wound.mending.round}, "
            f"{seconds:.2f} s after the death was seen",
            lost=wound.lost,
            round=wound.mending.round,
            generation=generation,
            seconds=seconds,
            sources={f"worker-{rank}": f"worker-{s.giver}" for rank, s in sorted(wound.mending.sources.items())},
            twins=[f"worker-{rank}" for rank, s in sorted(wound.mending.sources.items()) if s.twin],
            **self._upkeep(),
        )

    def tell_cost(self) -> None:
        """File what it costs to be able to mend, at the end of a phase."""
        if self.cost is not None and self.cost != self._told:
            self._told = self.cost
            self.journal.event(
                "upkeep", f"so that a death costs no more than a round, workers {self.cost}", **self.cost.to_dict()
            )

    def _upkeep(self) -> dict[str, Any]:
        return {} if self.cost is None else {"upkeep": self.cost.to_dict()}


def _sources(mending: Mending) -> str:
    words = []
    for rank, source in sorted(mending.sources.items()):
        kind = "its twin" if source.twin else "its mirror on"
        words.append(f"worker-{rank} has the state of {kind} worker-{source.giver}")
    return ", ".join(words)
