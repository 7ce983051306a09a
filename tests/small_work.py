"""Small workloads in float64 for the tests, and the plain torch loop that is their law.

What a workload here shares with its test (counters, gates) is looked up by import when it runs: a workload
travels to its workers by value, its module's variables with it.
"""

import importlib
import os
import random
import threading
import time
from collections import Counter

import torch
from torch import nn

import rayps
from rayps.cluster.local import LocalCluster

DEVICE = os.environ.get("RAYPS_TEST_DEVICE", "cpu")  # of workers on threads: cpu, or cuda for the same laws on a GPU
GPUS = 64.0 if DEVICE == "cuda" else 0.0  # of a cluster of threads
SEEN: Counter = Counter()  # calls of loss, by tag
GATES: dict[str, threading.Event] = {}


def rows(n, seed=0, width=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(dim=1, keepdim=True)) + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return x, y


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw_groups": lambda params: torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.03},
        ],
        lr=0.01,
    ),
}


lrs = torch.optim.lr_scheduler
SCHEDULES = {
    "cosine": lambda o: lrs.CosineAnnealingLR(o, T_max=20),
    "onecycle": lambda o: lrs.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "warm": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=5), lrs.ExponentialLR(o, 0.95)], milestones=[5]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, total_iters=3), lrs.StepLR(o, 4, 0.5)]),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=4),
    "function": lambda o: lambda step: 0.9**step,
}


class Small(rayps.Workload):
    """A regression by a small network."""

    def __init__(self, n=36, batch=3, optimizer="sgd", pause=0.0, jitter=0.0, tag="small"):
        self.n, self.batch, self.kind = n, batch, optimizer
        self.pause, self.jitter, self.tag = pause, jitter, tag

    def model(self):
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    def data(self):
        return rayps.data.tensors(*rows(self.n), batch_size=self.batch)

    def loss(self, model, batch):
        importlib.import_module("small_work").SEEN[self.tag] += 1
        if self.pause or self.jitter:
            time.sleep(self.pause + self.jitter * random.random())
        return ((model(batch.x) - batch.y) ** 2).mean()

    def optimizer(self, params):
        return OPTIMIZERS[self.kind](params)

    def evaluate(self, model, batch):
        return {"error": (model(batch.x) - batch.y).abs().mean()}


class Paced(Small):
    """The same with a schedule, by name."""

    def __init__(self, schedule="cosine", every="step", **options):
        super().__init__(**options)
        self.by, self.schedule_every = schedule, every

    def schedule(self, optimizer):
        return SCHEDULES[self.by](optimizer)


def train(workload, strategy="all_reduce", cluster=None, **options):
    """`rayps.train` on threads, on the tests' device."""
    own = cluster or LocalCluster(gpus=GPUS)
    if DEVICE == "cuda" and own.total()["gpu"]:
        options.setdefault("resources", {"cpu": 1, "gpu": 1})
    try:
        return rayps.train(workload, strategy=strategy, cluster=own, progress=options.pop("progress", False), **options)
    finally:
        if cluster is None:
            own.close()


def plain(workload, workers=1, *, epochs=1, steps=None, seed=0):
    """One process, no platform, the union of everyone's batches: model, loss of every round, evaluations."""
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer([p for p in model.parameters() if p.requires_grad])
    data = workload.data()
    scheduler = workload.schedule(optimizer)
    if scheduler is not None and not hasattr(scheduler, "step"):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scheduler)
    losses, evaluations, done = [], [], 0
    for epoch in range(10_000 if steps else epochs):
        dealt = [list(data.batches(rank=r, size=workers, seed=seed, epoch=epoch)) for r in range(workers)]
        for parts in zip(*dealt, strict=True):
            if steps is not None and done == steps:
                return model, losses, evaluations
            whole = [b for b in parts if b.size]
            batch = rayps.data.Batch(
                torch.cat([b.x for b in whole]), torch.cat([b.y for b in whole]), sum(b.size for b in whole)
            )
            optimizer.zero_grad()
            loss = ((model(batch.x) - batch.y) ** 2).mean()
            loss.backward()
            optimizer.step()
            if scheduler is not None and workload.schedule_every == "step":
                scheduler.step()
            losses.append(loss.item())
            done += 1
        if scheduler is not None and workload.schedule_every == "epoch":
            scheduler.step()
        with torch.no_grad():
            x, y = data.x, data.y
            evaluations.append(((model(x) - y) ** 2).mean().item())
    return model, losses, evaluations


def vector(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def distance(a, b):
    a, b = (v if isinstance(v, torch.Tensor) else vector(v) for v in (a, b))
    return (a - b).abs().max().item()


class Watched(LocalCluster):
    """A cluster of threads whose actors can be found by what they are, to end them while they run."""

    def __init__(self):
        super().__init__(gpus=GPUS)
        self.actors = {}
        self.spawned = Counter()

    def spawn(self, target, *args, **kwargs):
        handle = super().spawn(target, *args, **kwargs)
        self.actors[target.rpartition(":")[2], args[0]] = handle
        self.spawned[target.rpartition(":")[2], args[0]] += 1
        return handle

    def kill_when(self, tag, seen, *victims):
        """End the victims, such as ("WorkerActor", 1), once they exist and so many losses have been computed."""

        def wait():
            while SEEN[tag] < seen or not all(victim in self.actors for victim in victims):
                time.sleep(0.002)
            # all at once: an actor takes its time to end, and the others would be of the next generation by then
            enders = [threading.Thread(target=self.kill, args=(self.actors[victim],)) for victim in victims]
            for ender in enders:
                ender.start()

        thread = threading.Thread(target=wait, daemon=True, name=f"killer-{tag}")
        thread.start()
        return thread


def kinds(result):
    return [event["kind"] for event in result.events]


SENT_MODULE_COUNT = 0


def sent_module_count():
    return SENT_MODULE_COUNT
