"""A simulated worker of a job: it answers the driver as `driver.worker_actor` does, and its rounds only count.

After round k each parameter is k, so that a state shows which rounds it contains. A worker holds its last two states,
and backups of another worker's, as `rayps.recovery` does. Its messages to its peers carry the generation.
"""

from __future__ import annotations

from typing import Any

import torch
from rayps_client.errors import LinkError, PeerLost, PeerTimeout

from rayps.cluster.members import ActorHost
from rayps.core.job.continuation import Continuation
from rayps.core.metrics import Total
from rayps.core.time.member_times import MemberTimes
from rayps.recovery.backup_assignment import HeldRounds
from rayps.runtime.driver.worker_actor import OpenCalls
from rayps.tensors.flat import Layout
from rayps.tensors.snapshot import RetainedParts, Snapshot
from rayps.worker.exchange.round_gate import RoundGate
from rayps.worker.plan import WorkerFacts, WorkerPart
from simulation.kernel import Broken, Waiters, simulation

LAYOUT = Layout.of([("weight", torch.zeros(1, 1, dtype=torch.float64))])


class Run:
    """One generation on one worker."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.status, self.error, self.position = "running", None, plan.start
        self.value = float(plan.start)
        self.parts: RetainedParts[WorkerPart] = RetainedParts()
        self.ended = False
        self.lost: str | None = None  # the peer whose connection broke
        elastic = plan.elastic
        self.gate = RoundGate(plan.start, None if elastic is None else elastic.stop)


class SimWorker:
    """The actor of a worker."""

    def __init__(self, rank: int, secret: bytes, workload: bytes, **_: Any) -> None:
        sim = self._sim = simulation()
        self._process = sim.alive().process
        self._rank, self._began = rank, sim.now
        self.address = f"worker-{rank}@{self._process.host}:{sim.network.port()}/"
        sim.ring[self.address] = self
        self._run: Run | None = None
        self._inbox: dict[tuple[int, int], set[int]] = {}  # (generation, round) -> ranks whose gradients came
        self._waiters = Waiters()
        self._generation = 0
        self._own: dict[int, dict[int, float]] = {}  # base generation -> round -> value
        self._held: dict[tuple[int, int], dict[int, float]] = {}  # (base generation, owner) -> round -> value
        self.kept: tuple[int, float] | None = None  # round and value of the newest state, if workers may change
        self._process.on_death.append(self._leave)

    # ---- calls of the driver

    def place(self) -> ActorHost:
        return ActorHost(self._process.host, self._process.pid, self.address, self._process.host)

    def backup_address(self) -> str:
        return self.address

    def layout(self) -> Layout:
        return LAYOUT

    def initial(self, seed: int) -> Snapshot:
        return Snapshot(LAYOUT, torch.zeros(1, dtype=torch.float64))

    def halt(self, base_generation: int) -> dict[int, HeldRounds]:
        self._abort()
        found = {}
        if base_generation in self._own:
            found[self._rank] = HeldRounds(tuple(sorted(self._own[base_generation])))
        for (base, owner), states in self._held.items():
            if base == base_generation:
                found[owner] = HeldRounds(tuple(sorted(states)))
        return found

    def begin(self, plan: Any, snapshot: Snapshot, own: Any = None) -> bool:
        self._abort()
        self._generation, self._rank = plan.generation, plan.rank
        if plan.elastic is None or plan.elastic.handover is None:
            self.kept = None
        self._run = run = Run(plan)
        self._process.start("rounds", lambda: self._work(run, snapshot))
        return True

    def prepare(self) -> Layout:
        return LAYOUT

    def hold(self) -> int | None:
        return None if self._run is None else self._run.gate.hold()

    def stop_after(self, rounds: int) -> None:
        self._run.gate.stop_after(rounds)

    def train_until(self, rounds: int, retained: int) -> None:
        self._run.gate.train_until(rounds, retained)

    def resume(self) -> None:
        if self._run is not None:
            self._run.gate.resume()

    def kept_round(self) -> int | None:
        self._abort()
        return None if self._run is None or self.kept is None else self.kept[0]

    def poll(self, wanted: int, taken: int = 0) -> WorkerFacts:
        run = self._run
        if run is None:
            return WorkerFacts(self._rank, 0, "idle")
        run.parts.wanted = wanted
        return WorkerFacts(
            self._rank, run.plan.generation, run.status, run.position, run.error, parts=sorted(run.parts)
        )

    def last_lines(self) -> list[tuple[float, str]]:
        return []

    def times(self) -> MemberTimes:
        wall = self._sim.now - self._began
        return MemberTimes({"idle": wall})

    def calls(self) -> OpenCalls:
        return OpenCalls((), [])

    def part(self, rounds: int | None) -> WorkerPart | None:
        run = self._run
        if run is None:
            return None
        return run.parts.get(max(run.parts, default=0) if rounds is None else rounds)

    def evaluate(self, vector: torch.Tensor, buffers: Any, share: Any = None) -> dict[str, Total]:
        self._sim.park(0.2 + self._sim.rng.random())
        return {"value": Total(float(vector[0]), 1.0)}

    def release_files(self) -> None:
        pass

    leave_code = release_files

    # ---- rounds

    def _work(self, run: Run, snapshot: Snapshot) -> None:
        sim, plan = self._sim, run.plan
        assignment = plan.backup_assignment
        base = plan.generation if assignment is None else assignment.base_generation
        try:
            run.value = self._first(run, snapshot)
            if run.value != plan.start:
                raise Broken(f"I4: {self.address} starts round {plan.start} with the state of round {run.value:g}")
            self._own = {base: {plan.start: run.value}}
            self._held = {key: states for key, states in self._held.items() if key[0] == base}
            self._keep(run)
            while run.position < plan.end and not run.ended:
                if not run.gate.begin(run.position, lambda: run.ended):
                    run.status = "running" if run.ended else "paused"
                    return
                sim.park(sim.pace * (0.1 + sim.rng.random() * 0.4))
                self._take_rows(run)
                self._exchange(run)
                if run.ended:
                    return
                run.value += 1.0
                at = run.position + 1
                mine = self._own[base]
                mine[at] = run.value
                for old in sorted(mine)[:-2]:
                    del mine[old]
                if assignment is not None:
                    self._back_up(assignment, base, at, run.value)
                if at < plan.end and at in (run.parts.wanted, run.gate.retained):
                    run.parts.retain(at, self._part(at, run.value))
                run.position = at
                self._keep(run)
            if not run.ended:
                run.parts.retain(plan.end, self._part(plan.end, run.value))
                run.status = "finished"
        except LinkError as error:
            run.status, run.error = "failed", error

    def _keep(self, run: Run) -> None:
        """Keep the newest state in memory, from which a group of other workers may continue."""
        if run.plan.elastic is not None and not run.ended:
            self.kept = run.position, run.value

    def _take_rows(self, run: Run) -> None:
        """Record which rows of the data this worker takes in its next round."""
        if run.plan.elastic is not None and not run.ended:
            self._sim.rows.take(self._process.owner, run.plan, run.position)

    def _part(self, at: int, value: float) -> WorkerPart:
        params = torch.full((1,), value, dtype=torch.float64) if self._rank == 0 else None
        return WorkerPart(at, params, {}, {}, torch.zeros(1, dtype=torch.uint8))

    def _first(self, run: Run, snapshot: Snapshot) -> float:
        """Return the state from which a generation starts: the snapshot, an own state, or another worker's copy."""
        plan, assignment = run.plan, run.plan.backup_assignment
        if plan.elastic is not None and plan.elastic.handover is not None:
            return self._handed_over(plan.elastic.handover, plan)
        if assignment is None or not assignment.restores_state:
            return float(snapshot.params[0])
        base = assignment.base_generation
        if assignment.source is None:
            return self._own[base][plan.start]
        source = assignment.source
        address = assignment.addresses[source.holder]
        sim = self._sim
        sim.park(2 * sim.network.delay(self._process.host, address))
        holder = sim.ring.get(address)
        if holder is None:
            raise PeerLost(f"worker-{source.holder} died", peer=f"worker-{source.holder}")
        states = holder._own if source.counterpart else {base: holder._held.get((base, source.owner), {})}
        if plan.start not in states.get(base, {}):
            raise PeerLost(f"worker-{source.holder} has dropped the state", peer=f"worker-{source.holder}")
        return states[base][plan.start]

    def _handed_over(self, handover: Continuation, plan: Any) -> float:
        """Return the state that this worker or another one has kept, as `rayps.worker.handover` does."""
        sim, holder = self._sim, self
        if plan.rank not in handover.holders:
            address = plan.peers.ring[handover.holders[0]]
            sim.park(2 * sim.network.delay(self._process.host, _host(address)))
            holder = sim.ring.get(address)
        kept = None if holder is None else holder.kept
        if kept is None or kept[0] != handover.round:
            raise PeerLost("a worker has lost the state that is handed over", peer=f"worker-{handover.holders[0]}")
        return kept[1]

    def _back_up(self, assignment: Any, base: int, at: int, value: float) -> None:
        if assignment.holder is None:
            return
        address = assignment.addresses[assignment.holder]
        sim, rank = self._sim, self._rank

        def arrive() -> None:
            holder = sim.ring.get(address)
            if holder is not None:
                states = holder._held.setdefault((base, rank), {})
                states[at] = value
                for old in sorted(states)[:-2]:
                    del states[old]

        sim.network.deliver(self._process.host, _host(address), arrive)

    def _exchange(self, run: Run) -> None:
        """Send this round's gradient to all peers, and wait for theirs."""
        sim, plan = self._sim, run.plan
        key, size = (plan.generation, run.position), len(plan.peers.ring)
        for rank, address in enumerate(plan.peers.ring):
            if rank != self._rank:
                self._send(address, key)
                sim.place("worker: gradient sent, not to all")
        end = sim.now + plan.timeout
        while len(self._inbox.get(key, ())) < size - 1:
            if run.ended:
                return
            if run.lost is not None:
                raise PeerLost(f"{run.lost} closed the connection", peer=run.lost)
            if sim.now >= end:
                there = self._inbox.get(key, set())
                silent = next(rank for rank in range(size) if rank != self._rank and rank not in there)
                raise PeerTimeout(f"worker-{silent} is silent", peer=f"worker:{silent}", seconds=plan.timeout)
            self._waiters.wait(end - sim.now)
        self._inbox.pop(key, None)

    def _send(self, address: str, key: tuple[int, int]) -> None:
        sim, rank, process = self._sim, self._rank, self._process

        def arrive() -> None:
            peer = sim.ring.get(address)
            if peer is None:
                lost = address.partition("@")[0]
                sim.network.deliver(_host(address), process.host, lambda: self._hear_of_loss(key[0], lost))
            elif key[0] >= peer._generation:  # a message of an earlier generation is refused
                peer._inbox.setdefault(key, set()).add(rank)
                peer._waiters.wake_all()

        sim.network.deliver(process.host, _host(address), arrive)

    def _hear_of_loss(self, generation: int, peer: str) -> None:
        run = self._run
        if run is not None and run.plan.generation == generation and not run.ended:
            run.lost = peer
            self._waiters.wake_all()

    # ---- the end

    def _abort(self) -> None:
        run = self._run
        if run is not None:
            run.ended = True
            self._tell_peers(run)
            self._waiters.wake_all()

    def _leave(self) -> None:
        self._sim.ring.pop(self.address, None)
        if self._run is not None:
            self._tell_peers(self._run)

    def _tell_peers(self, run: Run) -> None:
        """Let the peers of a generation learn that this worker has left it: its connections close."""
        sim, name, generation = self._sim, f"worker-{self._rank}", run.plan.generation
        if run.status == "finished":
            return
        for rank, address in enumerate(run.plan.peers.ring):
            if rank != self._rank:

                def arrive(address: str = address) -> None:
                    if (peer := sim.ring.get(address)) is not None:
                        peer._hear_of_loss(generation, name)

                sim.network.deliver(self._process.host, _host(address), arrive)


def _host(address: str) -> str:
    return address.partition("@")[2].partition(":")[0]
