"""The scenario of a server group: the product's own manager, servers and sessions of workers.

Workers push one-hot gradients, so that each push adds exactly 1 to a slot of its own in every segment. Servers and the
manager die, stop, lose connections and are resized meanwhile.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from rayps_client.errors import RaypsError

import rayps.ps.group as elastic
from rayps.core.job.user_module import pack
from rayps.ps.manager.launcher import ActorStarter
from rayps.ps.server.assignments import SegmentReport
from rayps.ps.server.server_actor import ALONE_SECONDS
from rayps.ps.server_group import ServerGroup
from simulation.cluster import SimCluster, World, surrounding
from simulation.disk import Disk, SimPath
from simulation.kernel import Broken, Process, Simulation, enter, leave, simulation
from simulation.network import Network
from simulation.substitutes import installed

FAULT_SECONDS = 8.0  # virtual seconds in which faults happen
FAULTS_PER_SECOND = 2.5
RECOVER_SECONDS = 4.0  # seconds after a fault until its server counts as one that can be relied on
LIMIT_SECONDS = 400.0  # virtual seconds within which everything must have ended
GROUP = "g"
KINDS = ["kill", "freeze", "reset", "reset", "clock", "resize", "resize", "drain"]


class Ledger:
    """What the workers' pushes have been, as the workers know it; and which server was primary of which generation."""

    def __init__(self, workers: int, steps: int, segments: int, staleness: int | None) -> None:
        self.workers, self.steps, self.segments, self.staleness = workers, steps, segments, staleness
        self.sent = [0] * workers  # by rank: the steps that a process has begun to push
        self.acknowledged = [0] * workers  # by rank: all steps below are acknowledged
        self.primaries: dict[tuple[int, int, int], str] = {}
        self.vector: torch.Tensor | None = None  # what a reader found at the end

    def gradient(self, rank: int, step: int) -> torch.Tensor:
        """Return the gradient that adds 1 to the slot of this push in each segment."""
        found = torch.zeros(self.segments, self.workers, self.steps, dtype=torch.float64)
        found[:, rank, step] = -float(self.workers)
        return found.reshape(-1)

    def check(self, vector: torch.Tensor, rank: int, who: str) -> None:
        """Check a pull of `rank`: no push was applied twice, and no acknowledged push of the rank is missing."""
        slots = vector.reshape(self.segments, self.workers, self.steps)
        if bool((slots > 1).any()):
            raise Broken(f"I1: {who} pulled {slots.max():g} in a slot: a push was applied more than once")
        if bool((slots[:, rank, : self.acknowledged[rank]] != 1).any()):
            raise Broken(f"I1: {who} pulled values without a push of rank {rank} that was acknowledged")

    def check_staleness(self, rank: int, step: int) -> None:
        """Check that a pull of `rank` after `step` pushes was not served too early."""
        if self.staleness is not None and step - min(self.sent) > self.staleness:
            raise Broken(f"I5: rank {rank} got values after {step} pushes, and the slowest has sent {min(self.sent)}")


class LedgerWorker:
    """A worker of the group: it pushes and pulls until its last step, and continues where its rank was."""

    def __init__(self, group: ServerGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self.finished = False
        simulation().alive().process.start("work", self._run)

    def ping(self) -> bool:
        return self.finished

    def _run(self) -> None:
        sim, rank = simulation(), self._rank
        ledger: Ledger = sim.ledger
        process = sim.alive().process
        try:
            server = self._group.server(rank)
            step = server.step
            if ledger.staleness == 0:  # an acknowledged push is durable once its round is complete
                ledger.acknowledged[rank] = min(step, ledger.acknowledged[rank])
            if step < ledger.acknowledged[rank]:
                raise Broken(f"I1: rank {rank} is to continue at step {step}, and {ledger.acknowledged[rank]} are done")
            while step < ledger.steps:
                ledger.sent[rank] = max(ledger.sent[rank], step + 1)
                server.push(ledger.gradient(rank, step))
                vector = server.pull(consistent=False)
                step += 1
                ledger.acknowledged[rank] = max(ledger.acknowledged[rank], step)
                sim.log("acknowledged", f"rank {rank}: step {step - 1}")
                ledger.check(vector, rank, process.name)
                ledger.check_staleness(rank, step)
                sim.park(sim.rng.random() * 1.0)
            server.session.flush()
            server.session.close()
            self.finished = True
            sim.changed = True
            sim.log("finished", f"rank {rank}")
        except RaypsError as error:
            sim.log("worker", f"{process.name} ends: {type(error).__name__}: {str(error)[:200]}")
            process.kill(f"{type(error).__name__}")


def _report(space: int, event: str, segment: int, generation: int, name: str = "") -> SegmentReport:
    """Stand in for `SegmentReport`, and check that one generation of a segment has one primary."""
    sim = simulation()
    server = sim.alive().process.name
    sim.log("report", f"{server}: segment {segment} of generation {generation}: {event} {name}".rstrip())
    if event == "ready":
        first = sim.ledger.primaries.setdefault((space, segment, generation), server)
        if first != server:
            raise Broken(f"I6: segment {segment}, generation {generation}: {server} is primary, and so was {first}")
    return SegmentReport(space, event, segment, generation, name)


@functools.cache
def _packed(factory: Any) -> bytes:
    return pack(factory)


def _starter(group: str, cluster: Any, *, cpus: float, detached: bool) -> ActorStarter:
    """Stand in for `HostStarter`, whose servers are children of one process on each host."""
    return ActorStarter(group, cluster, {"cpus": cpus, "detached": detached})


MORE = [
    ("rayps.ps.manager.manager", "HostStarter", _starter),
    ("rayps.ps.server_group", "pack", _packed),
    ("rayps.ps.manager.record", "Path", SimPath),
    ("rayps.ps.server.assignments", "SegmentReport", _report),
    ("rayps.ps.manager.manager", "POLL_SECONDS", 1.0),
    ("rayps.ps.manager.publisher", "HEARTBEAT_SECONDS", 2.0),
    ("rayps.ps.server.server", "NAP_SECONDS", 2.0),
    ("rayps.ps.server.outbound", "AGAIN_SECONDS", 0.5),
]


class Servers:
    """One run of the scenario."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        sim = self.sim = Simulation(seed, keep_trace=keep_trace)
        sim.network, sim.disk = Network(sim), Disk()
        rng = sim.rng
        self.world = World(sim, dict.fromkeys(["host-a", "host-b", "host-c"][: rng.choice([1, 3, 3])], 16.0))
        workers, self.replicas = rng.randint(1, 3), rng.choice([1, 1, 1, 2])
        self.count = rng.randint(self.replicas + 1, 4)
        staleness = rng.choice([None, None, 0, 1, 2])
        self.ledger = sim.ledger = Ledger(workers, rng.randint(5, 20), rng.randint(1, 3), staleness)
        self.operator = Process(sim, "operator", "host-a", root=True)
        self.done = False
        self.quiet = False  # whether no more faults happen
        self.harmed: dict[str, float] = {}  # server -> when a fault last hit it
        sim.crash_at_places = rng.choice([0.0, 0.002, 0.01])
        sim.may_crash = self._may_crash
        sim.network.scale = rng.choice([1.0, 1.0, 20.0, 60.0])
        self.kinds = ["kill", *rng.sample(KINDS, rng.randint(2, len(KINDS)))]

    def run(self) -> None:
        """Run the scenario to its end. Raises Broken if an invariant does not hold."""
        sim = self.sim
        self.operator.start("operator", self._operate)
        if not sim.run(lambda: self.done, LIMIT_SECONDS):
            raise Broken(f"I8: not at its end after {LIMIT_SECONDS:g} s of virtual time: {self._state()}")
        if sim.unexpected:
            raise Broken(f"a thread of the product ended with an error: {sim.unexpected[0]}")

    def _state(self) -> str:
        return f"acknowledged {self.ledger.acknowledged} of {self.ledger.steps} steps"

    # ---- the operator

    def _operate(self) -> None:
        sim, ledger, cluster = self.sim, self.ledger, surrounding()
        client = elastic.start(cluster, GROUP, self.count, self.replicas, folder="/groups/g", balance=None)
        group = ServerGroup(
            torch.zeros(ledger.segments * ledger.workers * ledger.steps, dtype=torch.float64),
            group=client,
            name="space",
            segments=ledger.segments,
            staleness=ledger.staleness,
            workers=ledger.workers,
        )
        sim.log("open", f"{self.count} servers, {self.replicas} backups, {ledger.segments} segments")
        for rank in range(ledger.workers):
            self._spawn(cluster, group, rank)
        self.operator.start("faults", lambda: self._faults(client))
        ended = [False] * ledger.workers
        while not (self.quiet and all(ended)):
            sim.park(1.0)
            for rank in range(ledger.workers):
                handle = cluster.find(f"worker-{rank}")
                if handle is None:
                    if not ended[rank]:
                        self._spawn(cluster, group, rank)
                elif not ended[rank] and handle.actor.object is not None:
                    ended[rank] = handle.actor.object.finished
        client.wait_settled(200.0)
        self._check_end(client, group)
        client.stop()
        sim.park(3.0)
        end = sim.now + ALONE_SECONDS + 20.0  # a server without a manager ends by itself
        while sim.now < end and any(not name.startswith("worker-") for name in self.world.names):
            sim.park(1.0)
        left = sorted(name for name in self.world.names if not name.startswith("worker-"))
        if left:
            raise Broken(f"I7: the group was stopped, and {left} still run")
        self.done = sim.changed = True

    def _spawn(self, cluster: SimCluster, group: ServerGroup, rank: int) -> None:
        cluster.spawn("simulation.servers:LedgerWorker", group, rank, name=f"worker-{rank}")

    def _check_end(self, client: Any, group: ServerGroup) -> None:
        ledger, facts = self.ledger, client.facts()
        if facts["counts"]["lost"]:
            raise Broken("I1: a segment was lost although one of its servers in sync was up all the time")
        server = group.server(0)
        vector = server.read()
        server.session.close()
        slots = vector.reshape(ledger.segments, ledger.workers, ledger.steps)
        if bool((slots > 1).any()):
            raise Broken("I1: a push was applied more than once")
        if bool((slots != 1).any()):
            raise Broken(f"I1: {int((slots != 1).sum())} pushes that were acknowledged are missing at the end")

    # ---- faults

    def _may_crash(self, process: Process, place: str) -> bool:
        return not (self.quiet or process.root or self.sim.now < 2.0) and self._may_harm(process)

    def _may_harm(self, process: Process) -> bool:
        """Return whether a fault may hit this process now: of no segment may all servers in sync be away at once."""
        sim, name = self.sim, process.name.removeprefix(f"rayps-server-{GROUP}-")
        if name == process.name:
            return True
        manager = self.world.names.get(elastic.manager_actor(GROUP))
        if manager is None or manager.object is None or manager.process.frozen_until > sim.now:
            return False  # what the manager knows may be out of date
        state = manager.object._state
        up = {
            other
            for other, member in state.members.items()
            if member.connected and sim.now - self.harmed.get(other, -math.inf) > RECOVER_SECONDS and other != name
        }
        if not all(up.intersection({each.primary, *each.synced}) for each in state.segments.values()):
            return False
        self.harmed[name] = sim.now
        return True

    def _faults(self, client: Any) -> None:
        sim = self.sim
        while sim.now < FAULT_SECONDS:
            sim.park(sim.rng.expovariate(FAULTS_PER_SECOND))
            self._one_fault(sim.rng, client)
        sim.network.heal()
        for process in sim.processes:
            process.frozen_until = 0.0
        self.quiet = True
        sim.log("quiet", "no more faults")

    def _one_fault(self, rng: Any, client: Any) -> None:
        sim = self.sim
        running = [p for p in sim.processes if p.dead is None and not p.root]
        kind = rng.choice(self.kinds)
        if kind == "kill" and running:
            process = rng.choice(running)
            if self._may_harm(process):
                process.kill("a fault")
        elif kind == "freeze" and running:
            process, seconds = rng.choice(running), rng.choice([0.5, 3.0, 12.0])
            if self._may_harm(process):
                sim.log("fault", f"{process.name} is stopped for {seconds:g} s")
                process.frozen_until = sim.now + seconds
                self.harmed[process.name.removeprefix(f"rayps-server-{GROUP}-")] = process.frozen_until
        elif kind == "reset" and sim.network.connections:
            broken = rng.choice(sim.network.connections)
            if all(self._may_harm(end.process) for end in broken.ends):
                sim.log("fault", f"the connection of {broken.ends[1].peer} to {broken.ends[0].peer} breaks")
                broken.break_now()
        elif kind == "clock" and running:
            process = rng.choice(running)
            process.wall_offset = rng.uniform(-7200, 7200)
            sim.log("fault", f"the wall clock of {process.name} jumps by {process.wall_offset:.0f} s")
        elif kind in ("resize", "drain"):
            self.operator.start("resize", lambda: self._resize(rng, client, kind))

    def _resize(self, rng: Any, client: Any, kind: str) -> None:
        try:
            if kind == "resize":
                count = rng.randint(self.replicas + 1, 5)
                self.sim.log("fault", f"the group is resized to {count} servers")
                client.resize(count)
            else:
                names = [server["name"] for server in client.facts()["servers"] if server["state"] == "alive"]
                if names:
                    name = rng.choice(names)
                    self.sim.log("fault", f"{name} is drained")
                    client.drain(name)
        except RaypsError as error:
            self.sim.log("refused", f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")


def scenario(seed: int, *, keep_trace: bool = False) -> Servers:
    """Return the scenario of a seed."""
    return Servers(seed, keep_trace=keep_trace)


def play(chosen: Servers) -> None:
    """Run a scenario to its end, inside `substituted()`. Raises Broken if an invariant does not hold."""
    enter(chosen.sim)
    try:
        chosen.run()
    finally:
        leave()


def substituted() -> Any:
    """Return the context in which `run` may be called."""
    return installed(MORE)
