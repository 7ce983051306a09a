"""The table of what a user's code may do: each deed under every strategy of `rayps.train`, and in a wrapped loop.

A deed is a workload whose code does something that plain torch allows. A cell of the table is the deed under one
strategy, in one of two forms: as a workload in `rayps.train`, or as a loop of the user's own with `rayps.wrap`. It ends
right, or with an error of rayps that names the parameter or module and a way out. To add a row, derive from `Deed`, and
add the deed to `DEEDS` of test_user_code.py. A new strategy of the catalogue joins by itself.
"""

import re

import torch
from rayps_client.errors import ConfigError, RaypsError
from small_work import rows, vector
from torch import nn

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.strategy.strategy_families import SERVER_STEPS, SYNC_GRADIENTS
from rayps.core.strategy.topology import backup_in, compression_in, replica_of, runs_in_step, servers_of
from rayps.strategies.catalogue import CATALOGUE, parse, parse_for_loop

EXACT = 1e-9
WORKERS = 2
# what a strategy needs to have several rounds in a small job; None: it trains no workload
GIVEN = {
    "fedbuff": "fedbuff:buffer=2,concurrency=4",
    "local_sgd": "local_sgd:period=2",
    "diloco": "diloco:period=2",
    "parallel_sgd": "parallel_sgd:rounds=2",
    "statistics": None,
}
FORMS = [  # options that keep the parameters in another place
    "all_reduce:bucket_mb=0",
    "all_reduce:compression=int8",
    "all_reduce:shard=optimizer",
    "all_reduce:shard=gradients",
    "parameter_server:shards=2",
    "parameter_server:shards=2,staleness=none",
    "downpour:n_push=2,n_fetch=2",
    "hybrid:servers=1",
    "pipeline:stages=2,micro_batches=1",
    "tensor_parallel:size=2",
]
STRATEGIES = [text for text in (GIVEN.get(name, name) for name in CATALOGUE) if text is not None] + FORMS


def wraps(text):
    """Whether `rayps.wrap` takes the strategy."""
    try:
        parse_for_loop(text)
    except ConfigError:
        return False
    return True


def exact(text):
    """Whether a step is that of one process on the union of the batches, to rounding."""
    strategy = parse(text)[0].strategy
    return (
        runs_in_step(strategy)
        and strategy.loop in (SYNC_GRADIENTS, SERVER_STEPS)
        and compression_in(strategy) is None
        and not backup_in(strategy)
    )


class Deed(rayps.Workload):
    """A small regression of 24 rows, 2 workers and 6 steps, in whose code something is done.

    Override `layers`, `loss`, `optimizer` for both forms, and `loop` for what only a loop of one's own can do. `named`
    and `way` are what the text of a refusal must have, as regular expressions.
    """

    forms = ("train", "wrap")  # the forms in which it can be done
    named = r"weight"
    way = r"all_reduce"
    divided = True  # whether pipeline and tensor_parallel can divide the model between two workers
    private = "2"  # the layers that fedper and fedrep leave with each client
    without = ()  # strategies that take no such workload, for another reason
    rate = 0.1
    epochs = 1
    strategy = None  # the strategy of a wrapped loop

    def __init__(self, clients=0):
        self.clients = clients

    def layers(self):
        """Return the model. Its parameters are then drawn anew, without torch's random state."""
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    def model(self):
        made, generator = self.layers(), torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in made.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3)
        return made

    def table(self):
        """Return x and y of all rows."""
        return rows(24)

    def data(self):
        x, y = self.table()
        client = {"client": rayps.data.iid(self.clients)} if self.clients else {}
        return rayps.data.tensors(x, y, batch_size=2, **client)

    def loss(self, model, batch):
        return ((model(batch.x) - batch.y) ** 2).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.rate)

    def loop(self, model, optimizer, batches):
        """Train in a loop of one's own. The default is the loop that `rayps.train` runs."""
        for batch in batches:
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            optimizer.step()

    def plain(self, workers=WORKERS, *, trains=False):
        """Return the model after the same code in one process, on the union of the batches of so many workers.

        `trains`: the loop is that of `rayps.train`.
        """
        model, data = self.model(), self.data()
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        run = Deed.loop if trains else type(self).loop
        run(self, model, optimizer, union(data, self.epochs, workers))
        return model

    def holds(self, model):
        """Assert what is right for a strategy out of step, or with compression."""
        raise NotImplementedError

    def compare(self, model, law):
        """Assert that `model` is that of plain torch."""
        assert torch.equal(torch.isfinite(vector(model)), torch.isfinite(vector(law)))
        assert (vector(model) - vector(law)).abs().max() < EXACT


def union(data, epochs, workers):
    """Yield the batches of all workers, joined."""
    for epoch in range(epochs):
        dealt = [data.batches(rank=rank, size=workers, seed=0, epoch=epoch) for rank in range(workers)]
        for parts in zip(*dealt, strict=True):
            joined = [torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y")]
            yield rayps.data.Batch(*joined, sum(part.size for part in parts))


def own_batches(data, epochs):
    """Yield this worker's batches."""
    here = rayps.world()
    for epoch in range(epochs):
        yield from data.batches(rank=here.rank, size=here.size, seed=0, epoch=epoch)


def trained(deed, text, cluster):
    """Return the model of a job under this strategy."""
    clients = 4 if parse(text)[0].strategy.rows.by_client else 0
    if deed.private and text in ("fedper", "fedrep"):
        text = f"{text}:private={deed.private}"
    result = rayps.train(
        deed(clients), strategy=text, workers=WORKERS, epochs=deed.epochs, cluster=cluster, progress=False, timeout=60.0
    )
    first, second = result.model(), result.model()
    assert torch.equal(vector(first), vector(second)), "two calls of result.model() differ"
    return [first]


def wrapped(deed, text, cluster):
    """Return the model of each rank after a loop of one's own under this strategy."""

    def train_fn():
        work = deed()
        work.strategy = text
        model, data = work.model(), work.data()
        optimizer = work.optimizer([p for p in model.parameters() if p.requires_grad])
        rayps.wrap(model, optimizer, text, steps=deed.epochs * data.steps(WORKERS))
        work.loop(model, optimizer, own_batches(data, deed.epochs))
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    models = []
    for state in rayps.run(train_fn, workers=WORKERS, cluster=cluster, progress=False, timeout=60.0):
        models.append(deed().model())
        models[-1].load_state_dict(state)
    return models


def judge(deed, text, form, cluster=None):
    """Run a cell, and assert that it is right, or refused by name with a way out."""
    own = cluster or LocalCluster()
    try:
        models = {"train": trained, "wrap": wrapped}[form](deed, text, own)
    except RaypsError as error:
        told = str(error)
        assert re.search(deed.named, told), f"the error names nothing of the model ({deed.named}):\n{told}"
        assert re.search(deed.way, told), f"the error names no way out ({deed.way}):\n{told}"
        return "refused"
    finally:
        if cluster is None:
            own.close()
    servers = servers_of(parse(text)[0].strategy)
    for model in models:
        if servers is None:  # else each worker has what it has read last
            assert (vector(model) - vector(models[0])).abs().max() < EXACT, "the workers' models differ at the end"
        if exact(text):
            replicas = 1 if replica_of(parse(text)[0].strategy) is not None else WORKERS
            deed().compare(model, deed().plain(replicas, trains=form == "train"))
        else:
            deed().holds(model)
    return "right"


def kind_of(text):
    """Who holds the parameters and steps them: strategies of a kind have one loop, in step or not."""
    strategy = parse(text)[0].strategy
    replica = replica_of(strategy)
    return type(strategy.topology), strategy.loop, runs_in_step(strategy), replica and replica.name


def cells(deeds, strategies=STRATEGIES):
    """Return the cells (deed, strategy, form) of the table, with a name for each."""
    found = [(deed, text, form) for deed in deeds for form in deed.forms for text in strategies]
    found = [
        (deed, text, form)
        for deed, text, form in found
        if text not in deed.without
        and (form == "train" or wraps(text))
        and (deed.divided or replica_of(parse(text)[0].strategy) is None)
    ]
    return found, [f"{deed.__name__}-{form}-{text}" for deed, text, form in found]
