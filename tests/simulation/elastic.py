"""The scenario of elastic jobs: their number of workers follows room, waiting jobs, requests and notices.

It is the scenario of the service with other jobs, other hosts and other faults. Hosts get notices with deadlines, by
the service's store of notices, end at these deadlines, and new ones come. A driver gets SIGTERM, and moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from rayps_client.errors import Conflict, NotFound

from rayps.cluster.notices import LINGER_SECONDS, Notice, StoredNotice
from rayps.core.job.job_status import Status
from rayps.core.rows.row_shares import deal_places
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.strategies.job import JobSpec
from simulation import service
from simulation.cluster import Actor, World
from simulation.kernel import EPOCH, Broken, Process, Simulation, simulation
from simulation.service import ROWS, Jobs, play
from simulation.store import Database

KINDS = ["kill", "away", "sigterm", "freeze"]
FAULTS_PER_SECOND = 0.25
COOLDOWN = 5.0
WAIT_SECONDS = 20.0  # seconds without faults within which a job that could have its least number of workers starts
HEARD_SECONDS = 12.0  # seconds after which no reservation is made by a decision from before a notice
LEAVE_SECONDS = 20.0  # seconds within which workers leave that replacements have made superfluous
QUIET_BEFORE = 25.0  # seconds without faults, and at least so long a notice, for which its host must be left in time


class RowLedger:
    """Which rows each job has learned from, by round. A generation that repeats a round replaces its rows."""

    def __init__(self) -> None:
        self._rounds: dict[str, dict[int, dict[int, tuple[int, list[int]]]]] = {}  # job -> round -> rank -> epoch, rows
        self._newest: dict[str, tuple[int, int]] = {}  # job -> driver's process id and generation
        self.begun: list[Callable[[str, int], None]] = []  # called with the job and the size of each new generation

    def take(self, driver: Process, plan: Any, at: int) -> None:
        """Record the rows that a worker takes in the round after `at` rounds."""
        job, order = driver.name.removeprefix("driver-"), (driver.pid, plan.generation)
        newest = self._newest.get(job, (0, 0))
        if order < newest:
            return  # its gradient reaches no worker that still counts
        rounds = self._rounds.setdefault(job, {})
        if order > newest:
            self._newest[job] = order
            for later in [each for each in rounds if each >= plan.start]:
                del rounds[later]
            for call in self.begun:
                call(job, plan.size)
        shares = plan.elastic.rows
        epoch, taken = shares.after(at, ROWS)
        own = [taken + place for place in deal_places(shares.shares, plan.rank) if taken + place < ROWS]
        rounds.setdefault(at, {})[plan.rank] = epoch, own

    def check(self, job: str, epochs: int) -> int:
        """Check that the job has learned once from each row of each epoch; return the number of its rounds."""
        rounds = self._rounds.get(job, {})
        seen = Counter((epoch, row) for ranks in rounds.values() for epoch, rows in ranks.values() for row in rows)
        for epoch in range(epochs):
            for row in range(ROWS):
                if seen.pop((epoch, row), 0) != 1:
                    raise Broken(f"row {row} of epoch {epoch} does not occur once in job {job}")
        if seen:
            raise Broken(f"job {job} has learned from rows beyond its last epoch: {min(seen)}")
        return len(rounds)


class ElasticDatabase(Database):
    """The store, whose numbers of workers are checked after each commit."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed: dict[str, tuple[int, float]] = {}  # job -> number, and when it has changed

    def committed(self) -> None:
        """Check the statuses, the range of each job's number of workers, and the pause before it grows."""
        super().committed()
        sim = simulation()
        for job, allowed in self.raw.execute("SELECT id, allowed FROM jobs WHERE allowed IS NOT NULL"):
            before, at = self._allowed.get(job, (None, -COOLDOWN))
            if allowed == before:
                continue
            self._allowed[job] = allowed, sim.now
            sim.log("allowed", f"job {job}: {before} -> {allowed} workers")
            least, most = sim.ranges.get(job, (allowed, allowed))
            if not least <= allowed <= most:
                raise Broken(f"job {job} may have {allowed} workers, and its range is {least} to {most}")
            if before is not None and allowed > before and sim.now - at < COOLDOWN - 0.01:
                raise Broken(f"job {job} may grow {sim.now - at:.1f} s after its last change, within its cooldown")


class ElasticWorld(World):
    """A cluster whose hosts get notices. No worker is placed on such a host while another one has room."""

    def __init__(self, sim: Simulation, hosts: dict[str, float]) -> None:
        super().__init__(sim, hosts)
        self.heard: dict[str, float] = {}  # from the key of a notice to when the cluster got it

    def place(self, bundles: list[dict[str, float]], avoid: Collection[str] = ()) -> list[str] | None:
        found, now = super().place(bundles, avoid), self.sim.now
        ending = {
            each.notice.node
            for key, each in self.notices.items()
            if each.notice.pid is None and now - self.heard.get(key, now) > HEARD_SECONDS
        }
        if found is not None and ending & {*found} and super().place(bundles, ending) is not None:
            raise Broken(f"a worker is placed on {found}, and {sorted(ending)} will end")
        return found


class ElasticJobs(Jobs):
    """One run of the scenario."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        super().__init__(seed, keep_trace=keep_trace)
        sim, rng = self.sim, self.sim.rng
        sim.rows, sim.ranges = RowLedger(), {}
        sim.rows.begun.append(self._check_size)
        self.kinds = rng.sample(KINDS, rng.randint(0, len(KINDS)))
        sim.crash_at_places = rng.choice([0.0, 0.0, 0.0005]) if self.kinds else 0.0
        sim.network.scale, sim.pace = 1.0, 5.0
        self.world = ElasticWorld(sim, dict.fromkeys(["host-a", "host-b", "host-c"][: rng.choice([2, 3])], 2.0))
        self.database = ElasticDatabase()
        self._hosts = len(self.world.hosts)
        self._announced: list[tuple[str, float]] = []  # acknowledged notices: key, and when they are over
        self._noticed = -1e9  # when the cluster last had a notice
        self._sizes: dict[str, int] = {}  # by job, of its newest generation
        self._could_start: tuple[str, float] = "", 0.0  # the oldest waiting job, and since when it could have started
        self._disturbed = 0.0  # when the last fault ended

    # ---- the user

    def _use(self, number: int) -> None:
        sim, rng = self.sim, self.sim.rng
        sim.park(rng.random() * 25.0)
        least = rng.randint(1, 2)
        elastic = ElasticWorkers(rng.randint(least, 4), cooldown=COOLDOWN, gain=0.0) if rng.random() < 0.8 else None
        spec = JobSpec(
            workload="counting:Counting",
            strategy="all_reduce",
            workers=least if elastic is not None else 2,
            elastic=elastic,
            epochs=rng.randint(1, 2),
            checkpoint_every=rng.randint(2, 8),
            timeout=10.0,
            max_failures=8,
            resources={"cpu": 1.0, "gpu": 0.0},
        )
        most = spec.workers if elastic is None else elastic.most
        job = self._ask(lambda each: self._submit(each, spec, number, most), 2.0)
        sim.log("acknowledged", f"job {job}: {spec.workers} to {most} workers, {spec.epochs} epochs")
        self.acknowledged[job] = spec
        for _ in range(rng.choice([0, 0, 1, 2])):
            sim.park(rng.random() * 15.0)
            wanted = rng.randint(spec.workers, most)
            try:
                if elastic is not None:
                    self._ask(lambda each, wanted=wanted: each.store.scale(job, wanted), 2.0)
                    sim.log("user", f"job {job} is to have at most {wanted} workers")
            except (Conflict, NotFound):
                break
        self.submitting -= 1

    async def _submit(self, each: service.Service, spec: JobSpec, number: int, most: int) -> str:
        job = await each.submit(spec, f"key-{number}")
        self.sim.ranges[job] = spec.workers, most
        return job

    # ---- hosts

    def _operate(self) -> None:
        self.operator.start("hosts", self._change_hosts)
        self.operator.start("watch", self._watch)
        super()._operate()

    def _change_hosts(self) -> None:
        """Announce that a host will end, end it, and let another one come."""
        sim, rng = self.sim, self.sim.rng
        for _ in range(rng.choice([0, 1, 2])):
            sim.park(5.0 + rng.random() * 20.0)
            host, seconds = rng.choice(sorted(set(self.world.hosts) - {"host-a"})), rng.choice([8.0, 30.0, 40.0])
            notice = Notice(host, host, seconds, "the cloud takes the host back")
            began = sim.now
            self._ask(lambda each, notice=notice: each.scheduler.notices.add(notice), 2.0)
            sim.log("notice", f"{host} ends in {seconds:g} s")
            self._announced.append((notice.key, sim.now + seconds + LINGER_SECONDS))
            if "kill" in self.kinds and rng.random() < 0.5:
                self._disturb(45.0)
                self.service.process.kill("a fault, just after it has acknowledged a notice")
            if rng.random() < 0.25:
                sim.park(rng.random() * 5.0)
                self._withdraw(host, notice)
                continue
            sim.park(max(0.0, seconds - (sim.now - began)))
            self._check_left(host, seconds)
            self.world.end_host(host)
            self._disturb()
            sim.park(rng.random() * 10.0)
            self._hosts += 1
            self.world.hosts[f"host-{chr(96 + self._hosts)}"] = 2.0

    def _withdraw(self, host: str, notice: Notice) -> None:
        sim = self.sim
        try:
            self._ask(lambda each: each.scheduler.notices.withdraw(host, host), 2.0)
        except NotFound:
            sim.log("user", "the notice was withdrawn before")  # by a request whose answer was lost
        sim.log("notice", f"{host} does not end")
        self._announced = [each for each in self._announced if each[0] != notice.key]

        def check() -> None:
            if notice.key in self.world.notices and self.quiet_for(60.0):
                raise Broken(f"the notice of {host} was withdrawn, and the cluster still has it")

        sim.after(200.0, check)

    def _check_left(self, host: str, seconds: float) -> None:
        """Check that a running job has left a host before its end, if it had the time and other hosts have the room."""
        here = [each for each in self._workers() if each.host == host]
        if seconds < QUIET_BEFORE or not self.quiet_for(seconds):
            return
        for actor in here:
            job = actor.owner.name.removeprefix("driver-")
            group = [each for each in self._workers() if each.owner is actor.owner]
            others = sum(each.host != host for each in group)
            least = self.sim.ranges.get(job, (9, 9))[0]
            if self._elastic(job) and others >= least and self.sim.now - actor.process.began > QUIET_BEFORE:
                raise Broken(f"{host} ends, and {actor.name} of job {job} is there, with {others} workers elsewhere")

    def _elastic(self, job: str) -> bool:
        spec = self.acknowledged.get(job)
        return spec is not None and spec.elastic is not None

    def _workers(self) -> list[Actor]:
        """Return the living workers whose driver lives."""
        found = [each for each in self.world.actors.values() if each.name.startswith("WorkerActor")]
        return [each for each in found if _lives(each.process) and _lives(each.owner)]

    # ---- the invariants in time

    def quiet_for(self, seconds: float) -> bool:
        """Whether no fault has happened for so many seconds."""
        return self.sim.now - self._disturbed >= seconds

    def _disturb(self, seconds: float = 0.0) -> None:
        self._disturbed = max(self._disturbed, self.sim.now + seconds)

    def _watch(self) -> None:
        sim, seen = self.sim, dict[str, float]()
        while True:
            sim.park(1.0)
            if self.world.notices:
                self._noticed = sim.now
            for key in self.world.notices:
                self.world.heard.setdefault(key, sim.now)
            for key, over in self._announced:
                if key in self.world.notices:
                    seen[key] = sim.now
                elif key not in seen and sim.now > over:
                    raise Broken(f"the notice {key} was acknowledged, and the cluster never got it")
            self._check_waiting()

    def _check_waiting(self) -> None:
        """Check that the oldest waiting job starts if the other jobs' least numbers of workers leave room for it."""
        statuses, ranges = self.database.statuses, self.sim.ranges
        waiting = next((job for job in sorted(statuses) if statuses[job] is Status.QUEUED), None)
        started = [job for job, status in statuses.items() if not status.terminal and status is not Status.QUEUED]
        ending = {each.notice.node for each in self.world.notices.values() if each.notice.pid is None}
        total = sum(cpus for host, cpus in self.world.hosts.items() if host not in ending)
        could = (
            waiting in ranges
            and all(statuses[job] is Status.RUNNING for job in started)
            and sum(ranges.get(job, (9, 9))[0] for job in [*started, waiting]) <= total
        )
        if not could or not self.quiet_for(0.0):
            self._could_start = "", 0.0
        elif self._could_start[0] != waiting:
            self._could_start = str(waiting), self.sim.now
        elif self.sim.now - self._could_start[1] > WAIT_SECONDS:
            raise Broken(f"job {waiting} waits for {WAIT_SECONDS:g} s, although elastic jobs could give it room")

    def _check_size(self, job: str, size: int) -> None:
        """Check a new generation. Replacements of workers under notice join before these leave, or come too late."""
        least, most = self.sim.ranges.get(job, (1, 9))
        self.sim.log("generation", f"job {job} trains with {size} workers")
        self._sizes[job] = size
        if size > most:
            if self.sim.now - self._noticed > LEAVE_SECONDS:
                raise Broken(f"job {job} has {size} workers, and its range is {least} to {most}")
            self.sim.after(LEAVE_SECONDS, lambda: self._check_left_group(job, most))
        if size < least and self.quiet_for(0.0) and not self.world.notices:
            raise Broken(f"job {job} has {size} workers without a fault, and its range is {least} to {most}")

    def _check_left_group(self, job: str, most: int) -> None:
        """Check that a job has no more workers than its range allows, some time after replacements have joined."""
        running = self.database.statuses.get(job) is Status.RUNNING and self.quiet_for(LEAVE_SECONDS)
        if running and self.sim.now - self._noticed > LEAVE_SECONDS and self._sizes[job] > most:
            raise Broken(f"job {job} still has {self._sizes[job]} workers, and may have {most} at most")

    def _rounds_of(self, job: str, spec: JobSpec) -> int | None:
        return spec.epochs * ROWS // spec.workers if spec.elastic is None else self.sim.rows.check(job, spec.epochs)

    # ---- faults

    def _one_fault(self, rng: Any) -> None:
        if not self.kinds or rng.random() > FAULTS_PER_SECOND / service.FAULTS_PER_SECOND:
            return
        if rng.choice(self.kinds) == "sigterm":
            drivers = [each for each in self.sim.processes if each.name.startswith("driver-") and _lives(each)]
            if drivers:
                self._terminate(rng.choice(drivers), rng.choice([3.0, 8.0]))
            return
        self._disturb(45.0)
        super()._one_fault(rng)

    def _terminate(self, driver: Process, seconds: float) -> None:
        """Announce the end of a driver's process, as `rayps.cluster.termination` does, and end it."""
        sim = self.sim
        sim.log("fault", f"{driver.name} gets SIGTERM, and ends in {seconds:g} s")
        self._disturb(45.0)
        notice = Notice(driver.host, driver.host, seconds, "SIGTERM", driver.pid)
        self.world.notices[notice.key] = StoredNotice.of(notice, EPOCH + sim.now)
        sim.after(seconds, lambda: _lives(driver) and driver.kill("SIGKILL after SIGTERM"))


def _lives(process: Process | None) -> bool:
    return process is not None and process.dead is None


def scenario(seed: int, *, keep_trace: bool = False) -> ElasticJobs:
    """Return the scenario of a seed."""
    return ElasticJobs(seed, keep_trace=keep_trace)


def substituted() -> Any:
    """Return the context in which `play` may be called."""
    return service.substituted()


__all__ = ["play", "scenario", "substituted"]
