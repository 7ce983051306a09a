"""Processes with a real ring for the loop of `shard="parameters"`, and the plain loop that is its law."""

import dataclasses
import multiprocessing
import os
import pickle
import traceback

import torch
from torch import nn

import rayps
from rayps.comm.link import Listener
from rayps.core.rows.phase_rounds import Boundary
from rayps.tensors.flat import Layout, find_outside_vector
from rayps.tensors.snapshot import Snapshot, StateSource
from rayps.worker.connections import WorkerConnections
from rayps.worker.loops.sharded_parameters import ShardedParameters
from rayps.worker.plan import EvaluationPlan, PeerAddresses, SnapshotPlan, WorkerPlan
from rayps.workload.deferred_init import deferred

CONTEXT = multiprocessing.get_context("forkserver")  # imports torch's FSDP once, not in each process
CONTEXT.set_forkserver_preload(["sharded_site", "torch._dynamo"])
SECRET = b"secret"


class Block(nn.Module):
    def __init__(self, wide, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(wide), nn.Linear(wide, 3 * wide + 1), nn.Linear(3 * wide + 1, wide)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks between layers whose rows do not divide evenly, with a tied head, a frozen layer and a buffer."""

    def __init__(self, wide=5, tied=True, frozen=True, dropout=0.0):
        super().__init__()
        self.words = nn.Embedding(7, wide)
        self.layers = nn.ModuleList(Block(wide, dropout) for _ in range(2))
        self.head = nn.Linear(wide, 7)
        if tied:
            self.head.weight = self.words.weight
        self.last = nn.Linear(7, 1)
        if frozen:
            self.layers[1].up.weight.requires_grad_(False)
            self.last.bias.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(0, 1, wide))

    def forward(self, ids):
        x = self.words(ids).mean(1) + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.last(torch.tanh(self.head(x)))


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02),
}


class Words(rayps.Workload):
    """A regression on ids, in float64. With `pairs`, a loss is a sum and the number of rows whose first id is not 0."""

    def __init__(self, optimizer="adam", rows=22, batch=4, pairs=False, net=None, **fields):
        self.kind, self.rows, self.batch, self.pairs, self.net = optimizer, rows, batch, pairs, net or {}
        for name, value in fields.items():
            setattr(self, name, value)

    def model(self):
        return Net(**self.net).double()

    def data(self):
        generator = torch.Generator().manual_seed(5)
        x = torch.randint(7, (self.rows, 3), generator=generator)
        return rayps.data.tensors(x, torch.randn(self.rows, 1, generator=generator).double(), batch_size=self.batch)

    def loss(self, model, batch):
        errors = (model(batch.x) - batch.y) ** 2
        if self.pairs:
            kept = batch.x[:, :1] != 0
            return (errors * kept).sum(), kept.sum()
        return errors.mean()

    def optimizer(self, params):
        return OPTIMIZERS[self.kind](params)

    def schedule(self, optimizer):
        return lambda step: 0.9**step

    def evaluate(self, model, batch):
        return {"error": rayps.Sum((model(batch.x) - batch.y).abs().sum())}


def plain(workload, size, steps, seed=0):
    """One process: the union of all workers' batches, from the deferred initial values. Return the model's state."""
    first = deferred(workload, seed)
    model = workload.model()
    first.fill(model)
    optimizer = workload.optimizer([p for p in model.parameters() if p.requires_grad])
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, workload.schedule(optimizer))
    data, done = workload.data(), 0
    per_epoch = -(-len(list(data.batches(rank=0, size=size, seed=seed, epoch=0))) // workload.accumulate)
    while done < steps:
        dealt = [list(data.batches(rank=r, size=size, seed=seed, epoch=done // per_epoch)) for r in range(size)]
        for step in range(min(per_epoch, steps - done)):
            k = workload.accumulate
            batches = [b for mine in dealt for b in mine[step * k : step * k + k] if b.size]
            optimizer.zero_grad()
            losses, weights = [], []
            for batch in batches:
                found = workload.loss(model, batch)
                losses.append(found[0] if workload.pairs else found * batch.size)
                weights.append(int(found[1]) if workload.pairs else batch.size)
            (sum(losses) / sum(weights)).backward()
            if workload.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
            optimizer.step()
            rates.step()
            done += 1
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plan_of(rank, size, addresses, strategy, end, **fields):
    return WorkerPlan(
        generation=fields.pop("generation", 1),
        rank=rank,
        size=size,
        strategy=strategy,
        peers=PeerAddresses(SECRET, addresses),
        seed=0,
        start=0,
        end=end,
        snapshots=SnapshotPlan(Boundary(0, 0)),
        evaluation=EvaluationPlan(0),
        timeout=fields.pop("timeout", 60.0),
        **fields,
    )


def loop_on(rank, size, addresses, listener, workload, steps, snapshot=None, **fields):
    """Connect a worker of a generation of its own; return its loop with the state loaded, and its connections."""
    plan = plan_of(rank, size, addresses, rayps.AllReduce(shard="parameters"), steps, **fields)
    layout = Layout.of((n, p) for n, p in deferred(workload, 0).module.named_parameters() if p.requires_grad)
    state = snapshot or Snapshot.without_tensors(layout, StateSource())
    peers = WorkerConnections(None)
    peers.form(plan, state, listener)
    loop = ShardedParameters(workload, plan, peers)
    loop.load_state_dict(state)
    loop.begin(lambda: False)
    return loop, peers


def whole_snapshot(workload, seed=0):
    """The whole first state, as a checkpoint of another layout has it."""
    model = workload.model()
    deferred(workload, seed).fill(model)
    named = [(n, p.detach()) for n, p in model.named_parameters() if p.requires_grad]
    buffers = {n: v.clone() for n, v in find_outside_vector(model).items()}
    return Snapshot(Layout.of(named), torch.cat([p.reshape(-1) for _, p in named]), buffers=buffers)


def rounds(loop, steps):
    for _ in range(steps):
        loop.w.meter.begin()
        loop.begin_round()
        loop.run_round()
        loop.end_round()


def _main(work, rank, size, pipe):
    try:
        torch.set_num_threads(1)
        listener = Listener(f"worker-{rank}", SECRET)
        pipe.send(listener.address)
        addresses = pipe.recv()
        with listener:
            found = work(rank, size, addresses, listener)
        pipe.send(("done", pickle.dumps(found)))
    except BaseException as error:
        pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))
    finally:
        pipe.close()


@dataclasses.dataclass
class Ended:
    """What a process returned, or its error: the name of its class, and its text."""

    value: object = None
    error: str = ""
    text: str = ""


def in_processes(work, size, timeout=120):
    """Run `work(rank, size, addresses, listener)` in processes of their own, and return how each has ended.

    `work` must be picklable: a function of a module, or a `functools.partial` of one.
    """
    members = []
    for rank in range(size):
        here, there = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_main, args=(work, rank, size, there), daemon=True)
        process.start()
        there.close()
        members.append((process, here))
    try:
        addresses = [pipe.recv() for _, pipe in members]
        for _, pipe in members:
            pipe.send(addresses)
        ended = []
        for process, pipe in members:
            try:
                assert pipe.poll(timeout), f"rank {len(ended)} has not ended within {timeout} s"
                kind, given = pipe.recv()
            except (EOFError, ConnectionResetError):
                process.join(10)
                ended.append(Ended(error="exited", text=str(process.exitcode)))
                continue
            ended.append(Ended(pickle.loads(given)) if kind == "done" else Ended(None, *given[:2]))
            if kind == "error":
                ended[-1].value = given[2]
        return ended
    finally:
        for process, pipe in members:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)


def results(work, size):
    """The values of all processes, which must end without an error. One process is this one."""
    if size == 1:
        with Listener("worker-0", SECRET) as listener:
            return [work(0, 1, [listener.address], listener)]
    ended = in_processes(work, size)
    assert not any(each.error for each in ended), "\n".join(f"{e.error}: {e.text}\n{e.value}" for e in ended if e.error)
    return [each.value for each in ended]


def exit_now():
    """End this process as a crash does."""
    os._exit(7)
