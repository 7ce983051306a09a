"""A workload that counts how often the servers have applied each row, for elastic jobs whose workers are not in step.

Parameter i is minus the number of pushes that have contained row i. What a workload here shares with its test is looked
up by import when it runs.
"""

import importlib
import threading
import time
from dataclasses import dataclass

import torch
from small_work import Watched
from torch import nn

import rayps
from rayps.cluster.local import LocalCluster, until
from rayps.core.strategy.elastic import ElasticWorkers
from rayps.runtime.driver.driver import Driver
from rayps.runtime.driver.workload_job import WorkloadJob
from rayps.runtime.records.journal import Journal
from rayps.strategies.catalogue import parse
from rayps.strategies.job import JobSpec

SECONDS = 240.0
LOG = []  # (tag, worker, row) of the first row of each batch, in the order of computation
HOOKS = {}  # by tag: what is called with a worker's rank and number of rounds before each loss


def worker_rank():
    """The rank whose plan runs in this thread, or None."""
    name = threading.current_thread().name
    return int(name[7:]) if name.startswith("worker-") and name[7:].isdigit() else None


@dataclass(frozen=True)
class Counting(rayps.ParameterServer):
    """Servers that do not scale pushes, so that a parameter counts."""

    def on_push(self, shard, value, weight):
        if weight:
            shard.step(value)


class Rows(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(n, dtype=torch.float64))


class Counted(rayps.Workload):
    """Each batch adds 1 to the gradient of each of its rows."""

    def __init__(self, n=120, batch=2, pause=0.002, tag="counted"):
        self.n, self.batch, self.pause, self.tag = n, batch, pause, tag

    def model(self):
        return Rows(self.n)

    def data(self):
        return rayps.data.tensors(torch.arange(self.n), batch_size=self.batch)

    def loss(self, model, batch):
        here, rank = importlib.import_module("leased_work"), worker_rank()
        if rank is not None and len(batch.x):
            here.LOG.append((self.tag, rank, int(batch.x[0])))
            hook = here.HOOKS.get(self.tag)
            if hook is not None:
                hook(rank)
        if self.pause:
            time.sleep(self.pause)
        return model.counts[batch.x].sum()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=1.0)


def rounds_of(tag, *ranks):
    """How many rounds these workers have begun; all if none is named."""
    return sum(1 for each, rank, _ in list(LOG) if each == tag and (not ranks or rank in ranks))


class Job:
    """A driver of an elastic job on threads, in a thread of its own."""

    def __init__(
        self, work, strategy, workers=(2, 4), epochs=1, folder=None, cluster=None, start=None, close=True, **more
    ):
        elastic = ElasticWorkers.of({"most": workers[1], "cooldown": 0.0})
        options = {"phases": parse(strategy)} | more.pop("options", {})
        self.spec = JobSpec(
            "leased_work:Counted", "parameter_server", workers[0], epochs=epochs, elastic=elastic, **more
        )
        self.cluster, self.journal = cluster or Watched(), Journal(folder)
        checkpoints = None if folder is None else folder / "checkpoints"
        self.driver = Driver(
            WorkloadJob(work, self.spec, self.journal, checkpoints=checkpoints, capture=False, **options)
        )
        self.driver.allow(start or workers[0], "the test begins")
        self.outcome, self._close = None, close
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        self.outcome = self.driver.run(self.cluster)

    @property
    def group(self):
        return self.driver.job._started

    def resized(self):
        return [(event["from"], event["to"]) for event in list(self.journal.events) if event["kind"] == "resized"]

    def wait(self, condition):
        ended = until(lambda: condition() or self.outcome is not None, SECONDS)
        assert ended and self.outcome is None, (ended, self.outcome, self.journal.events)

    def end(self):
        self.thread.join(SECONDS)
        assert self.outcome is not None, self.journal.events
        self.journal.close()
        if self._close and isinstance(self.cluster, LocalCluster):
            self.cluster.close()
        return self.outcome

    def counts(self):
        """How often the servers have applied each row."""
        return (-self.end().snapshot.params).round().long().tolist()
