"""A server of a static map: one process that serves one segment and has no manager.

Its owner (a job's driver, or the process that made a `rayps.ServerGroup`) starts and ends the process, starts each
generation of the segment (`begin`), and gives workers the address of the segment (`rayps.ps.protocol.segment_map`).
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field

import torch

from rayps.cluster.code_folder import JobCode, enter_code
from rayps.cluster.local import host_address
from rayps.cluster.members import ActorHost
from rayps.comm.link import Listener
from rayps.core.job.user_module import unpack
from rayps.core.rows.phase_rounds import Boundary
from rayps.core.time.member_times import MemberTimes
from rayps.ps.protocol.members import MemberChange, with_members
from rayps.ps.protocol.space import Space
from rayps.ps.server.assignments import AssignedSegment
from rayps.ps.server.dense_segment import DenseSegment, OptimizerType, ShardFacts, ShardPart, part_of
from rayps.ps.server.device_optimizer import DeviceOptimizer
from rayps.ps.server.server import GroupServerLoop
from rayps.tensors.device import Device
from rayps.tensors.flat import Layout
from rayps.tensors.learning_rate import recipe_of
from rayps.tensors.optim import Factory
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.subset_optimizer import of_some
from rayps.workload.base import Workload

TIMES_SECONDS = 1.0  # seconds between two reports of where the time went


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The order to one shard: serve segment `segment` of `space` in the segment's generation `generation`.

    `boundary`: the rounds after which the shard must retain its state.
    """

    space: Space
    segment: int
    generation: int = 1
    boundary: Boundary = field(default_factory=lambda: Boundary(0, -1))
    members: tuple[MemberChange, ...] = ()  # which ranks take part, if workers join and leave
    whole: Layout | None = None  # the whole model's layout, if the space has only the part of one worker of a replica


def find_optimizer_type(device: str) -> OptimizerType | None:
    """Return what makes a shard's optimizer on a device; None on the CPU. Raises ConfigError if there is no device."""
    return None if device == "cpu" else functools.partial(DeviceOptimizer, device=Device.of(device))


class ShardActor:
    """The actor of one server, which serves its segment of the parameters to workers."""

    def __init__(
        self,
        index: int,
        secret: bytes,
        factory: bytes,
        *,
        code: JobCode | None = None,
        threads: int | None = None,
        host: str | None = None,
        device: str = "cpu",
    ) -> None:
        """Listen at `host`, or at this machine's address; `factory` is a packed workload or optimizer factory.

        `device`: where the parameters are stepped. Raises ConfigError if there is no such device here.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self._code = enter_code(code or JobCode(""))
        self._packed, self._index, self._secret = factory, index, secret
        self._listener = Listener(f"shard-{index}", secret, host=host or host_address())
        self._optimizer = find_optimizer_type(device)
        self._loop: GroupServerLoop | None = None
        self._assigned: AssignedSegment | None = None
        self._times, self._times_due = MemberTimes(), 0.0  # of earlier generations; when the next report is due

    def place(self) -> ActorHost:
        """Return the machine on which this shard runs, and the address for workers."""
        return ActorHost.own(self._listener.address)

    def begin(self, plan: ShardPlan, snapshot: Snapshot) -> None:
        """Serve the plan's segment from now on, beginning with the snapshot's values.

        Raises WorkloadError if the packed factory cannot be unpacked.
        """
        segment = self._make_segment(plan)
        lo, hi = plan.space.cuts[plan.segment]
        ledger = with_members(snapshot.ledger(lo, hi), plan.members)
        segment.begin(snapshot.params[lo:hi], ledger, snapshot.moments, plan.boundary)
        self._serve(plan, segment)

    def resume(self, plan: ShardPlan, state: bytes) -> None:
        """Serve the plan's segment from now on, where the shard stopped whose `hand_over` returned `state`.

        Raises WorkloadError if the packed factory cannot be unpacked.
        """
        segment = self._make_segment(plan)
        segment.resume(state, plan.boundary)
        self._serve(plan, segment)

    def _make_segment(self, plan: ShardPlan) -> DenseSegment:
        """Stop serving, and return the plan's segment without values."""
        if self._loop is not None:
            self._times = self._times.plus(self._loop.times())
            self._loop.close()
        found, space = unpack(self._packed), plan.space
        factory: Factory = recipe_of(found) if isinstance(found, Workload) else found
        if plan.whole is not None:
            assert space.layout is not None, "a shard serves a vector"
            factory = of_some(factory, plan.whole, [entry.name for entry in space.layout.entries])
        segment = DenseSegment(space, plan.segment, factory, optimizer=self._optimizer)
        segment.copied = False
        segment.share()
        return segment

    def _serve(self, plan: ShardPlan, segment: DenseSegment) -> None:
        self._loop = loop = GroupServerLoop(f"shard-{self._index}", self._listener, None, self._secret)
        self._assigned = loop.do(lambda: loop.serve(plan.space, plan.segment, plan.generation, segment))

    def hand_over(self) -> bytes | None:
        """Stop serving the segment, and return its whole state, or None before `begin`.

        Later requests are refused without effect, and their workers wait for a newer map.
        """
        loop, assigned = self._loop, self._assigned
        return None if loop is None or assigned is None else loop.do(lambda: loop.hand_over(assigned))

    def poll(self, wanted: int) -> ShardFacts | None:
        """Return the shard's facts, or None before `begin`; retain the state after round `wanted`."""
        segment = self._segment
        if self._loop is None or segment is None:
            return None
        facts = self._loop.do(lambda: segment.facts(self._index, wanted))
        if time.monotonic() >= self._times_due:
            self._times_due, facts.times = time.monotonic() + TIMES_SECONDS, self.times()
        return facts

    def times(self) -> MemberTimes | None:
        """Return where the time of this shard went until now, over all generations; None before `begin`."""
        if self._loop is None:
            return None
        return self._times.plus(self._loop.times())

    def move_bound(self, space: Space) -> None:
        """Serve the space with its new staleness bound. Nothing happens if the shard serves another generation."""
        loop, assigned = self._loop, self._assigned
        if loop is not None and assigned is not None and assigned.space.space.name == space.name:
            loop.do(lambda: loop.change(space))

    def part(self, rounds: int) -> ShardPart | None:
        """Return the shard's share of the checkpoint after `rounds` rounds, or None if this state is not retained."""
        segment = self._segment
        if self._loop is None or segment is None:
            return None
        state = self._loop.do(lambda: segment.part(rounds))
        return None if state is None else part_of(state, rounds, segment.extent.lo)

    def saved(self, rounds: int) -> None:
        """Record that the snapshot after `rounds` rounds is stored elsewhere, so that the pushes in it are durable."""
        part, assigned = self.part(rounds), self._assigned
        if part is not None and assigned is not None:
            assigned.saved = dict(
                part.ledger.marks
            )  # atomic: the loop's thread reads either the old marks or the new ones

    def leave_code(self) -> None:
        """Remove the job's code from this host if no other process uses it. The driver then ends this process."""
        self._code.close()

    def close(self) -> None:
        """Stop serving."""
        self._code.close()
        if self._loop is not None:
            self._loop.close()
        self._listener.close()

    @property
    def _segment(self) -> DenseSegment | None:
        found = None if self._assigned is None else self._assigned.segment
        return found if isinstance(found, DenseSegment) else None
