"""Processes that die in their first seconds: a cluster of threads that kills them, and a job of every kind.

The moments of a process's start are what its driver asks it to do, in order. They are recorded from a job without
deaths, so that a new kind of job, and a new step of a start, join by themselves.
"""

import importlib
import threading
from dataclasses import dataclass, field
from functools import partial

import torch
from federated_work import Fed
from small_work import Small, vector
from statistics_work import Pooled
from torch import nn

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.strategy.strategy_families import learns_by_client
from rayps.core.strategy.topology import backup_in, replica_of, runs_in_step
from rayps.runtime.own_loop.world import LoopPlace
from rayps.strategies.catalogue import CATALOGUE, parse

AFTER_START = (
    "last_lines",
    "loss",
    "poll",
    "calls",
    "output",
    "part",
    "saved",
    "stop",
    "times",
    "evaluate",
    "release_files",
    "leave_code",
)
ROLES = {"WorkerActor": "worker", "LoopActor": "worker", "ShardActor": "shard", "ServerActor": "server"}
ROLES["ManagerActor"] = "manager"
SPAWNED, LEARNS = ("spawned", ""), ("learns", "")  # moments: it exists; it computes its first loss
RUN = ("after", "run")
HOOKS = {}  # by tag: called with the name of each worker that computes a loss


class Newborn(LocalCluster):
    """Kills the first process of a role, and each that is started in its place, at the next of `moments`.

    A moment is (when, method): before or after the driver's first call of a method. A worker whose number is at least
    `newcomers` takes the place of a dead one, too.
    """

    def __init__(self, role="", moments=(), newcomers=1000):
        super().__init__()
        self.role, self.moments, self._newcomers = role, list(moments), newcomers
        self.asked, self.killed = [], []  # (role, method) as first asked; moments at which a process was killed
        self.spawned = []  # (role, number) of each process
        self._lock, self._armed = threading.Lock(), []

    def spawn(self, target, *args, **options):
        handle = super().spawn(target, *args, **options)
        role, number = process_of(target, args)
        with self._lock:
            self.spawned.append((role, number))
            due = role == self.role and self.moments and (number == 0 or number >= self._newcomers)
            moment = self.moments.pop(0) if due else None
        real, asked = handle.call, set()

        def end():
            self.killed.append(moment)
            self.kill(handle)

        def call(method, *given):
            with self._lock:
                new = method not in asked
                asked.add(method)
                if (role, method) not in self.asked:
                    self.asked.append((role, method))
            if new and moment == ("before", method):
                end()
            reply = real(method, *given)
            if new and moment == ("after", method):
                reply.exception(60)  # wait for the answer, whatever it is
                end()
            return reply

        handle.call = call
        if moment == SPAWNED:
            end()
        elif moment == LEARNS:
            self._armed.append((handle, end))
        return handle

    def learns(self, thread):
        """A worker computes a loss in the thread of this name: it ends if it is due."""
        if thread_rank(thread) is not None and ("worker", "loss") not in self.asked:
            self.asked.append(("worker", "loss"))
        for handle, end in list(self._armed):
            if getattr(handle.actor, "_rank", None) == thread_rank(thread):
                self._armed.remove((handle, end))
                threading.Thread(target=end, daemon=True).start()  # it waits for the thread that computes
                assert handle.dead.wait(60)


def process_of(target, args):
    """The role and the number of a process."""
    role = ROLES.get(target.rpartition(":")[2], "")
    match role, args:
        case ("worker", (_, LoopPlace(rank=rank))) | ("worker" | "shard", (int(rank), *_)):
            return role, rank
    return role, 0


def thread_rank(name):
    return int(name[7:]) if name.startswith("worker-") and name[7:].isdigit() else None


def moments_of(asked, role):
    """The moments of the start of a process of this role."""
    methods = [method for each, method in asked if each == role and method not in AFTER_START]
    # a loop of the user's own is over when `run` answers
    found = [SPAWNED, *((when, each) for each in methods for when in ("before", "after") if (when, each) != RUN)]
    return [*found, LEARNS] if (role, "loss") in asked else found


# ---------------------------------------------------------------------------------------------- kinds


def told(self, *_):
    hook = importlib.import_module("newborn_site").HOOKS.get(self.tag)
    if hook is not None:
        hook(threading.current_thread().name)


class Plain(Small):
    def loss(self, model, batch):
        told(self)
        return super().loss(model, batch)


class Deep(Plain):
    def model(self):
        return nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)
        ).double()


class Clients(Fed):
    def loss(self, model, batch):
        told(self)
        return super().loss(model, batch)


GIVEN = {"fedper": "fedper:private=2", "fedrep": "fedrep:private=2", "fedbuff": "fedbuff:buffer=3,concurrency=6"}
FORMS = [  # what options make another kind of job of a strategy
    "all_reduce:backup=1 of 3",
    "all_reduce:shard=optimizer",
    "all_reduce:shard=gradients",
    "parameter_server:shards=2,backup=1 of 3",
    "parameter_server:shards=2,staleness=2",
    "parameter_server:shards=2,staleness=none",
    "parameter_server:shards=2,replicas=1",
    "parameter_server:shards=2,replicas=1,staleness=none",
    "pipeline:stages=2,micro_batches=2",
    "tensor_parallel:size=2",
]
ELASTIC = [
    "all_reduce",
    "all_reduce:shard=optimizer",
    "parameter_server:shards=2",
    "parameter_server:shards=2,staleness=none",
]
LOOPS = ["all_reduce", "parameter_server:shards=2", "local_sgd:period=2"]


@dataclass(frozen=True)
class Kind:
    """A kind of job: what runs it, and whether two runs give equal bits. `elastic`: workers join and leave."""

    name: str
    run: object = field(repr=False)
    exact: bool = True
    elastic: bool = False

    @property
    def newcomers(self):
        return 2 if self.elastic else 1000

    def __str__(self):
        return self.name


def trained(text, cluster, tag, *, workers=2, **options):
    """`rayps.train`; return the result's parameters, or metrics, and its rounds."""
    text, _, more = text.partition(" of ")
    workers = int(more) if more else workers
    strategy = parse(text)[0].strategy
    if strategy.name == "statistics":
        x = torch.arange(60.0, dtype=torch.float64).reshape(20, 3).numpy()
        work = Pooled(x, (x[:, 0] % 4).astype(int))
    elif learns_by_client(strategy):
        work = Clients(tag=tag)
    else:
        work = (Plain if replica_of(strategy) is None else Deep)(n=36, batch=6, tag=tag)
    result = rayps.train(
        work, strategy=text, workers=workers, epochs=2, cluster=cluster, progress=False, **{"timeout": 10.0, **options}
    )
    rounds = [round for round in result.history.column("round").to_pylist() if round is not None]
    if strategy.name == "statistics":
        return torch.tensor([result.metrics[name] for name in sorted(result.metrics)]), rounds
    return vector(result.model()), rounds


def looped(text, cluster, tag, **options):
    """`rayps.run` with a loop of one's own; return the parameters, and the ranks of the results."""

    def train_fn():
        work = Plain(n=36, batch=6, tag=tag)
        model, world, data = work.model(), rayps.world(), work.data()
        for p in model.parameters():  # threads share torch's random numbers
            nn.init.constant_(p, 0.1)
        optimizer = work.optimizer(list(model.parameters()))
        rayps.wrap(model, optimizer, text)
        for batch in data.batches(rank=world.rank, size=world.size, seed=0, epoch=0):
            optimizer.zero_grad()
            work.loss(model, batch).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    given = {"max_failures": 3, "timeout": 10.0, **options}
    found = rayps.run(train_fn, workers=2, cluster=cluster, progress=False, **given)
    return found[0], list(range(len(found)))


def exact(text):
    strategy = parse(text.partition(" of ")[0])[0].strategy
    drops = backup_in(strategy) > 0
    return (
        (runs_in_step(strategy) or learns_by_client(strategy))
        and not drops
        and strategy.name not in ("fedbuff", "hogwild")
    )


KINDS = [
    *(Kind(text, partial(trained, text), exact(text)) for text in [GIVEN.get(name, name) for name in CATALOGUE]),
    *(Kind(text, partial(trained, text), exact(text)) for text in FORMS),
    *(Kind(f"elastic {text}", partial(trained, text, workers=(2, 3)), exact=False, elastic=True) for text in ELASTIC),
    *(Kind(f"own loop {text}", partial(looped, text)) for text in LOOPS),
]
