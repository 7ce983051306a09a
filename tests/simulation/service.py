"""The scenario of the job service: its scheduler and its store, the jobs' drivers, and simulated workers.

A user submits jobs and stops some of them. The service, drivers and workers die or stop, the cluster does not answer,
forgets actors or loses messages, clocks jump, and an operator restores an old copy of the store.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from rayps_client import parameters
from rayps_client.errors import ClusterError, Conflict, NotFound, RaypsError
from torch import nn

import rayps
import rayps.runtime.driver.driver_actor
import rayps.runtime.driver.worker_actor
import rayps.service.scheduler
from rayps.core.job.job_status import Status
from rayps.core.job.records import read_json
from rayps.core.job.user_module import pack
from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.strategy_families import Rebuild
from rayps.runtime.checks import preflight as preflight_module
from rayps.service import adoption, job_folders
from rayps.service.liveness import QuietTimes
from rayps.service.scheduler import Scheduler
from rayps.service.state_disk import is_full
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.job import JobSpec
from rayps.tensors.checkpoints import checkpoint
from rayps.tensors.checkpoints.checkpoint_manifest import explain_unwritten
from simulation import asyncio_loop
from simulation.cluster import TARGETS, SimCluster, World
from simulation.disk import Disk, SimPath, rmtree
from simulation.kernel import Broken, Process, Simulation, enter, leave, simulation
from simulation.network import Network
from simulation.store import Database
from simulation.substitutes import SimTime, installed

FAULT_SECONDS = 25.0  # virtual seconds in which faults happen
FAULTS_PER_SECOND = 0.7
LIMIT_SECONDS = 4000.0  # virtual seconds within which everything must have ended
END_SECONDS = 60.0  # seconds from the end of the last job until nothing of a job runs any more
STALL_SECONDS = 60.0
CRASHES = ("OSError: [Errno 28]", "ClusterError", "Killed")  # errors with which a fault may end a driver
KINDS = ["kill", "freeze", "away", "forget", "clock", "cut", "copy", "restore", "full"]
JOBS = SimPath("/state/jobs")
TARGETS["rayps.runtime.driver.worker_actor:WorkerActor"] = "simulation.worker:SimWorker"


ROWS = 32  # of an epoch


class Counting(rayps.Workload):
    """A model with one parameter; the simulated workers do not train it."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False).double()

    def data(self) -> Any:
        return rayps.data.tensors(torch.zeros(ROWS, 1).double(), torch.zeros(ROWS, 1).double(), batch_size=1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch.x).sum()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"value": model(batch.x).sum()}


class Mended(AllReduce):
    """All-reduce whose workers hold copies of each other's states, so that no failure returns to a checkpoint."""

    recovery = Rebuild()


STRATEGIES = {"all_reduce": AllReduce, "all_reduce:bucket_mb=1": Mended}


def parse(text: Any, folder: Any = None) -> list[Phase]:
    """Stand in for the driver's `parse`, which would import the file of a strategy such as `Mended`."""
    return [Phase(None, STRATEGIES[str(text)]())]


@functools.cache
def _packed() -> bytes:
    return pack(Counting())


_known: dict[Any, Any] = {}


def preflight(workload: Any, phases: Any, spec: JobSpec, begin: Any = None) -> Any:
    """Stand in for the driver's `preflight`, whose result for equal jobs is the same."""
    key = (str(spec.strategy), spec.workers, spec.elastic is None)
    if key not in _known:
        _known[key] = preflight_module.preflight(workload, phases, spec, begin)
    return copy.copy(_known[key])


class NoTrial:
    """Stands in for `Trial`, which trains a batch in a child process while the workers start."""

    def begin(self, *_: Any) -> None:
        pass

    check = end = close = begin


class SimCheckpoints:
    """Stands in for `checkpoints.checkpoint`, as drivers use it: complete checkpoints by job and round."""

    TABLES = checkpoint.TABLES
    tables_of = staticmethod(contextlib.nullcontext)
    must_be_finite = staticmethod(checkpoint.must_be_finite)

    @staticmethod
    def save(folder: SimPath, step: int, state: Any, keep: int = 2, *, write_tables: Any = None) -> SimPath:
        sim = simulation()
        final, part = folder / f"step-{step}", folder / f".step-{step}"
        job, value = folder.parent.name, float(state.tensors["model/weight"])
        if value != step:
            raise Broken(f"I4: the checkpoint of round {step} of job {job} has the state of round {value:g}")
        newest = max(_rounds(folder), default=-1)
        if step <= newest:
            raise Broken(f"job {job} saves round {step} after round {newest}: checkpoints go back")
        try:
            part.write(str(step).encode())
            sim.saved[str(final)] = copy.deepcopy(state)
            part.rename(final)
        except OSError as error:
            raise explain_unwritten(error, str(final)) from error
        for old in sorted(_rounds(folder))[:-keep]:
            (folder / f"step-{old}").unlink(missing_ok=True)
        sim.log("checkpoint", f"job {job}: round {step}")
        return final

    @staticmethod
    def usable(folder: SimPath) -> tuple[SimPath | None, list[str]]:
        found = _rounds(folder)
        return (folder / f"step-{max(found)}" if found else None), []

    @staticmethod
    def load(path: SimPath) -> Any:
        return copy.deepcopy(simulation().saved[str(path)])

    @staticmethod
    def meta_of(path: SimPath) -> Any:
        return SimCheckpoints.load(path).meta

    def __getattr__(self, name: str) -> Any:
        return getattr(checkpoint, name)


def _rounds(folder: SimPath) -> list[int]:
    start = f"{folder}/step-"
    return [int(name[len(start) :]) for name in simulation().disk.files if name.startswith(start)]


class _Places:
    @staticmethod
    def of(folder: Any, seconds: float = 0.0) -> Any:
        return folder


class SimProcesses:
    """Stands in for `rayps.service.processes`."""

    @staticmethod
    def is_alive(pid: int, since: int | None) -> bool:
        return any(each.pid == pid == since and each.dead is None for each in simulation().processes)

    @staticmethod
    def kill_all(pids: list[int]) -> None:
        simulation().alive()
        for process in simulation().processes:
            if process.pid in pids and process.dead is None:
                process.kill("the service has killed it by its process id")


class Home:
    """The Ray that the service has joined."""

    owned = False
    address = "ray"

    def __init__(self) -> None:
        self._cluster = SimCluster()

    def capacity(self) -> None:
        return None

    def cluster(self) -> SimCluster:
        sim = simulation()
        sim.park(0.001 + sim.rng.random() * 0.01)
        if sim.world.away:
            self._cluster = SimCluster()
            raise ClusterError("Ray does not answer")
        return self._cluster

    def renew_lease(self) -> None:
        pass

    def disconnect(self, *, end: bool) -> None:
        pass


class Service:
    """One process of the service, from its start to its death."""

    def __init__(self, database: Database) -> None:
        sim = simulation()
        self.process = Process(sim, "service", "host-a")
        self.ready = False
        self._database = database
        self.loop: Any = None
        self.process.start("main", self._main)

    def _main(self) -> None:
        try:
            asyncio_loop.run(self._serve)
        except OSError as error:
            self.process.kill(f"it cannot start: {error}")

    async def _serve(self, loop: Any) -> None:
        sim = simulation()
        self.loop = loop
        store = self.store = self._database.open()
        sim.adopting = True
        try:
            await adoption.adopt(store, JOBS)
        finally:
            sim.adopting = False
        self.scheduler = Scheduler(store, Home(), JOBS, interval=2.0, view_seconds=10.0, stall=STALL_SECONDS)
        self.ready = True
        sim.log("service", "the service is ready")
        await self.scheduler.run()

    # ---- requests, as `rayps_api.routes.routes_jobs` handles them

    async def submit(self, spec: JobSpec, key: str) -> str:
        """Store a job, write its folder, and acknowledge it."""
        sim = simulation()
        sim.place("submit: checked, not stored")
        record, created = await self.store.add(spec, name="job", key=key)
        if created:
            sim.place("submit: stored, folder not written")
            try:
                row = await self.store.json_row(record.id)
                await self.loop.run_in_executor(None, job_folders.write_row, JOBS / record.id, row)
            except OSError:
                sim.unwritten.add(record.id)  # the job is in the store: the service's next start writes the file
        sim.place("submit: stored, not acknowledged")
        self.scheduler.wake()
        return record.id

    async def stop(self, job: str) -> None:
        """Store a request to stop."""
        await self.store.request_stop(job)
        simulation().place("stop: stored, not acknowledged")
        self.scheduler.wake()

    def request(self, handle: Callable[[Service], Any], answer: Callable[[bool, Any], None]) -> None:
        """Handle a request that has arrived; `answer(good, value)` sends the reply."""

        async def work() -> None:
            try:
                good, value = True, await handle(self)
            except Exception as error:
                good, value = False, error
            simulation().alive()
            answer(good, value)

        if self.ready and self.process.dead is None:
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(work()))


class Jobs:
    """One run of the scenario."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        sim = self.sim = Simulation(seed, keep_trace=keep_trace)
        sim.network, sim.disk, sim.ring, sim.saved = Network(sim), Disk(), {}, {}
        sim.adopting, sim.unwritten = False, set()
        rng = sim.rng
        self.world = World(sim, dict.fromkeys(["host-a", "host-b"][: rng.choice([1, 2, 2])], rng.choice([2.0, 3.0])))
        self.database = Database()
        self.operator = Process(sim, "operator", "host-a", root=True)
        self.service: Service | None = None
        self.acknowledged: dict[str, JobSpec] = {}
        self.stopped: set[str] = set()
        self.given_up: set[str] = set()  # jobs that were nowhere but in a store that the operator has replaced
        self.quiet = self.done = False
        self.submitting = self.submitted = 0
        self._owners: dict[str, int] = {}  # job -> process of the driver that has begun last
        self._attempts: dict[str, int] = {}
        self._outcomes: set[str] = set()
        sim.disk.watch.append(self._written)
        sim.crash_at_places = rng.choice([0.0, 0.0005, 0.002])
        sim.may_crash = self._may_crash
        sim.network.scale = rng.choice([1.0, 1.0, 50.0, 200.0])
        self.kinds = ["kill", *rng.sample(KINDS, rng.randint(2, len(KINDS)))]
        sim.expects = lambda error: is_full(error) or isinstance(error, ClusterError)

    def run(self) -> None:
        """Run the scenario to its end. Raises Broken if an invariant does not hold."""
        sim = self.sim
        self.operator.start("operator", self._operate)
        if not sim.run(lambda: self.done, LIMIT_SECONDS):
            raise Broken(f"I8: not at its end after {LIMIT_SECONDS:g} s of virtual time: {self.state()}")
        if sim.unexpected:
            raise Broken(f"a thread of the product ended with an error: {sim.unexpected[0]}")

    def state(self) -> str:
        """Return the status of each job."""
        return ", ".join(f"{job[-4:]} {self.database.statuses.get(job)}" for job in self.acknowledged) or "no job"

    # ---- invariants of the disk

    def _written(self, path: str, data: bytes) -> None:
        """Check each write into a job's folder: one driver acts at a time, and an outcome is written once."""
        sim, parts = self.sim, path.split("/")
        if sim.current is None or parts[:3] != ["", "state", "jobs"] or parts[-1].startswith("."):
            return
        process, job = sim.current.process, parts[3]
        if not process.name.startswith("driver-"):
            return
        if parts[4] == "driver.json":
            attempt = int(data.partition(b'"attempt": ')[2].partition(b",")[0])
            if attempt < self._attempts.get(job, 0):
                raise Broken(f"I6: attempt {attempt} of job {job} begins after attempt {self._attempts[job]}")
            self._attempts[job], self._owners[job] = attempt, process.pid
            if crash := json.loads(data).get("crash"):
                sim.log("crash", f"the driver of job {job} ends: {crash}")
                if not crash.startswith(CRASHES):
                    raise Broken(f"the driver of job {job} ends with an error that no fault explains: {crash}")
        elif self._owners.get(job) != process.pid:
            raise Broken(f"I6: a driver of job {job} writes {parts[-1]} after a later one has begun")
        if parts[4] == "outcome.json":
            if job in self._outcomes:
                raise Broken(f"job {job} has a second outcome")
            self._outcomes.add(job)
            found = json.loads(data)
            sim.log("outcome", f"job {job}: {found['status']}: {str(found['message'])[:300]}")
            if found["message"].startswith("rayps failed"):
                raise Broken(f"the driver of job {job} has a defect: {found['message']}")

    # ---- the operator

    def _operate(self) -> None:
        sim = self.sim
        rng = sim.rng
        self.service = Service(self.database)
        self.operator.start("keeper", self._keep_service)
        for number in range(rng.randint(1, 4)):
            self.submitting += 1
            self.submitted += 1
            self.operator.start("user", functools.partial(self._use, number))
        self.operator.start("faults", self._faults)
        while not (self.quiet and not self.submitting and self._all_ended()):
            sim.park(5.0)
        self._check_end()
        end = sim.now + END_SECONDS
        while self.world.names and sim.now < end:
            sim.park(5.0)
        if self.world.names:
            raise Broken(f"I7: all jobs have ended, and {sorted(self.world.names)} still run")
        self.done = sim.changed = True

    def _keep_service(self) -> None:
        sim = self.sim
        while True:
            sim.park(1.0)
            if self.service is not None and self.service.process.dead is not None:
                sim.park(sim.rng.choice([0.1, 2.0, 15.0]))
                self.service = Service(self.database)

    def _all_ended(self) -> bool:
        statuses = self.database.statuses
        for job in self.given_up:
            self.acknowledged.pop(job, None)
        missing = [job for job in self.acknowledged if job not in statuses]
        if missing and self.service is not None and self.service.ready and self.service.process.dead is None:
            raise Broken(f"I3: job {missing[0]} was acknowledged, and the store does not have it")
        return not missing and all(status.terminal for status in statuses.values())

    def _rounds_of(self, job: str, spec: JobSpec) -> int | None:
        """Return the rounds of a job that has succeeded."""
        return spec.steps

    def _check_end(self) -> None:
        rows = len(self.database.statuses)
        if rows > self.submitted and not self.database.restored:
            raise Broken(
                f"I3: {self.submitted} jobs were submitted, and {rows} are in the store: a request was stored twice"
            )
        for job, spec in self.acknowledged.items():
            status, outcome = self.database.statuses[job], read_json(JOBS / job / "outcome.json")
            if outcome is not None and outcome["status"] != status and status is not Status.STOPPED:
                raise Broken(f"I3: job {job} is {status}, and its outcome says {outcome['status']}")
            if status is Status.SUCCEEDED:
                value = (outcome or {}).get("metrics", {}).get("value")
                rounds = self._rounds_of(job, spec)
                if value != rounds:
                    raise Broken(f"I4: job {job} ended with value {value} after {rounds} rounds")
            if status is Status.STOPPED and job not in self.stopped:
                raise Broken(f"job {job} is STOPPED, and nobody has asked for this")

    # ---- the user

    def _use(self, number: int) -> None:
        sim = self.sim
        rng = sim.rng
        sim.park(rng.random() * 12.0)
        spec = JobSpec(
            workload="counting:Counting",
            strategy=rng.choice(list(STRATEGIES)),
            workers=rng.randint(1, 3 if sum(self.world.hosts.values()) >= 3 else 2),
            steps=rng.randint(5, 20),
            checkpoint_every=rng.randint(2, 8),
            timeout=10.0,
            max_failures=rng.choice([1, 3, 6]),
            resources={"cpu": 1.0, "gpu": 0.0},
        )
        job = self._ask(lambda service: service.submit(spec, f"key-{number}"), 2.0)
        sim.log("acknowledged", f"job {job}: {spec.workers} workers, {spec.steps} rounds, {spec.strategy}")
        if job not in self.given_up:
            self.acknowledged[job] = spec
        if rng.random() < 0.3:
            sim.park(rng.random() * 30.0)
            try:
                self.stopped.add(job)
                self._ask(lambda service: service.stop(job), 2.0)
                sim.log("user", f"stop of job {job} is acknowledged")
            except (Conflict, NotFound) as error:
                sim.log("user", f"stop of job {job} is refused: {str(error).splitlines()[0]}")
        self.submitting -= 1

    def _ask(self, handle: Callable[[Service], Any], timeout: float) -> Any:
        """Send a request to the service until there is an answer."""
        sim = self.sim
        while True:
            answers: list[tuple[bool, Any]] = []
            service = self.service
            if service is not None and service.ready and not sim.chance(0.1):
                # the request or the answer may be lost, and the request may be carried out nevertheless
                lost = sim.chance(0.2)

                def reply(good: bool, value: Any, into: Any = None if lost else answers) -> None:
                    if into is not None:
                        into.append((good, value))

                service.request(handle, reply)
            end = sim.now + timeout
            while not answers and sim.now < end:
                sim.park(0.2)
            if answers:
                good, value = answers[0]
                if good:
                    return value
                if isinstance(value, RaypsError):
                    raise value
            sim.park(sim.rng.random())

    # ---- faults

    def _may_crash(self, process: Process, place: str) -> bool:
        return not self.quiet and not process.root

    def _faults(self) -> None:
        sim = self.sim
        while sim.now < FAULT_SECONDS:
            sim.park(sim.rng.expovariate(FAULTS_PER_SECOND))
            self._one_fault(sim.rng)
        sim.network.heal()
        self.world.away, sim.disk.full = False, False
        for process in sim.processes:
            process.frozen_until = 0.0
        self.quiet = True
        sim.log("quiet", "no more faults")

    def _one_fault(self, rng: Any) -> None:
        sim = self.sim
        kind = rng.choice(self.kinds)
        running = [p for p in sim.processes if p.dead is None and not p.root]
        if not running:
            return
        process = rng.choice(running)
        if kind == "kill":
            process.kill("a fault")
        elif kind == "freeze":
            seconds = rng.choice([1.0, 8.0, 30.0])
            sim.log("fault", f"{process.name} is stopped for {seconds:g} s")
            process.frozen_until = sim.now + seconds
        elif kind == "away":
            seconds = rng.choice([1.0, 10.0, 40.0])
            sim.log("fault", f"Ray does not answer for {seconds:g} s")
            self.world.away = True
            sim.after(seconds, lambda: setattr(self.world, "away", False))
        elif kind == "forget":
            names = [name for name in sorted(self.world.names) if name.startswith("driver-")]
            if names:
                name = rng.choice(names)
                sim.log("fault", f"Ray forgets the actor {name}, whose process still runs")
                self.world.names.pop(name)
        elif kind == "clock":
            process.wall_offset = rng.uniform(-7200, 7200)
            sim.log("fault", f"the wall clock of {process.name} jumps by {process.wall_offset:.0f} s")
        elif kind == "cut" and len(self.world.hosts) > 1:
            seconds = rng.choice([1.0, 5.0, 20.0])
            sim.log("fault", f"host-a and host-b cannot reach each other for {seconds:g} s")
            sim.network.cut("host-a", "host-b")
            sim.network.cut("host-b", "host-a")
            sim.after(seconds, sim.network.heal)
        elif kind == "copy":
            self.database.copy()
            sim.log("operator", "a copy of the store is made")
        elif kind == "restore" and self.database.copies and self.service is not None:
            self.service.process.kill("the operator stops it")
            self.database.restore(rng.randrange(len(self.database.copies)))
            # a job whose folder could not be written, because the disk was full, is in the store alone
            alone = [job for job in sim.unwritten if f"{JOBS}/{job}/job.json" not in sim.disk.files]
            self.given_up.update(alone)
            sim.log("operator", "an old copy of the store is put in place")
        elif kind == "full":
            sim.log("fault", "the disk is full for 3 s")
            sim.disk.full = True
            sim.after(3.0, lambda: setattr(sim.disk, "full", False))


def scenario(seed: int, *, keep_trace: bool = False) -> Jobs:
    """Return the scenario of a seed."""
    return Jobs(seed, keep_trace=keep_trace)


def play(chosen: Jobs) -> None:
    """Run a scenario to its end, inside `substituted()`. Raises Broken if an invariant does not hold."""
    enter(chosen.sim)
    try:
        chosen.run()
    finally:
        leave()


MORE = [
    ("rayps.runtime.driver.driver_actor", "Path", SimPath),
    ("rayps.runtime.driver.driver_actor", "load", lambda *_: Counting()),
    ("rayps.runtime.driver.driver_actor", "checkpoint", SimCheckpoints()),
    ("rayps.runtime.driver.workload_job", "Path", SimPath),
    ("rayps.runtime.driver.workload_job", "Trial", NoTrial),
    ("rayps.runtime.driver.workload_job", "parse", parse),
    ("rayps.runtime.driver.make_group", "pack", lambda _: _packed()),
    ("rayps.runtime.driver.prepare_run", "pack", lambda _: _packed()),
    ("rayps.runtime.driver.prepare_run", "preflight", preflight),
    ("rayps.runtime.driver.workload_job", "POLL_SECONDS", 1.0),
    ("rayps.runtime.driver.workload_job", "STOPPING_SECONDS", 0.1),
    ("rayps.runtime.driver.driver_move", "_LOOK_SECONDS", 2.0),
    ("rayps.worker.exchange.round_gate", "_CHECK_SECONDS", 0.5),
    ("rayps.cluster.room", "RoomWatch.__init__.__defaults__", (3.0,)),
    ("rayps.cluster.local", "until.__defaults__", (0.1,)),
    ("rayps.runtime.results.snapshots", "Path", SimPath),
    ("rayps.runtime.results.snapshots", "checkpoint", SimCheckpoints()),
    ("rayps.runtime.results.snapshots", "CheckpointPlace", _Places),
    ("rayps.runtime.results.snapshots", "report_unfinished", lambda *_: None),
    ("rayps.runtime.records.journal", "PROGRESS_SECONDS", 2.0),
    ("rayps.strategies.catalogue", "FINDER.forget", lambda: None),
    ("rayps_client.parameters", "declared", functools.cache(parameters.declared)),
    ("rayps.service.drivers", "processes", SimProcesses),
    ("rayps.service.adoption", "processes", SimProcesses),
    ("rayps.service.job_folders", "shutil.rmtree", rmtree),
    ("rayps.service.scheduler", "ThreadPoolExecutor", asyncio_loop.SimExecutor),
    ("rayps.service.scheduler", "QuietTimes", functools.partial(QuietTimes, SimTime.monotonic)),
]


def substituted() -> Any:
    """Return the context in which `run` may be called."""
    return installed(MORE)
