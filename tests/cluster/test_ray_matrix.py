"""Every strategy, pipeline schedule, robust rule and compression of the catalogues, on real Ray workers, by its law.

All other tests of learning run on threads; here each law is one job of two worker processes, with a phase for each of
its strategies. The laws:

union   in step: the parameters and losses of one process on the union of the workers' batches
twin    deterministic: those of the same job on threads, which other tests compare with the paper
pushes  out of step: every push is applied once
learns  out of step: in each phase the loss falls to a small part
What has no law here fails `test_everything_has_a_law`.
"""

import pytest
import torch
from federated_work import Fed, Normed
from small_work import Small, distance, plain, rows
from small_work import train as on_threads
from statistics_work import Pooled
from statistics_work import rows as patients
from test_exactly_once import ROWS, Tally
from test_hogwild import Rows, serial
from test_hybrid import Films, both, uses_of
from test_hybrid import plain as plain_tables
from test_replica_laws import Deep
from torch import nn

import rayps
from rayps import AllReduce, FedAvg
from rayps.core.strategy.compression import COMPRESSIONS
from rayps.core.strategy.replica import SCHEDULES
from rayps.core.strategy.topology import replica_of
from rayps.federated.rules.robust_rules import RULES
from rayps.strategies.catalogue import CATALOGUE, REPLICAS, parse

pytestmark = pytest.mark.ray
EXACT = 1e-12
WORKERS = 2


def train(cluster, work, strategy, **options):
    """A job of two Ray workers."""
    return rayps.train(
        work, strategy=strategy, cluster=cluster, progress=False, **{"workers": WORKERS, "timeout": 300.0, **options}
    )


def column(result, name):
    return result.history.column(name).to_pylist()


def same(result, other, tolerance=0.0):
    """The same loss, samples and evaluation in each round, the same parameters and buffers."""
    evaluations = [name for name in other.history.schema.names if name.startswith("evaluation_")]
    assert evaluations
    for name in ("loss", "samples", *evaluations):
        expected = pytest.approx(column(other, name), abs=tolerance, rel=0, nan_ok=True)  # private jobs have no loss
        assert column(result, name) == expected, name
    assert result.metrics == pytest.approx(other.metrics, abs=tolerance, rel=0)
    state, expected = result.model().state_dict(), other.model().state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert (value - expected[name]).abs().max() <= tolerance, name


def phases(strategies, epochs):
    return [(epochs, strategy) for strategy in strategies]


class Line(Small):
    """y = x a for an `a` that the model can learn: the loss of the optimum is 0."""

    def model(self):
        return nn.Linear(5, 1, bias=False).double()

    def data(self):
        x, _ = rows(self.n)
        a = torch.tensor([[1.0], [-2.0], [0.5], [3.0], [-1.0]], dtype=torch.float64)
        return rayps.data.tensors(x, x @ a, batch_size=self.batch)


class Evaluated(Small):
    """Has public rows to evaluate on, as private jobs need."""

    def evaluation_data(self):
        return rayps.data.tensors(*rows(10), batch_size=5)


# ---------------------------------------------------------------------------------------------- laws


class Law:
    """What is to hold of strategies, given as texts."""

    def __init__(self, *strategies, **options):
        self.strategies, self.options = strategies, options

    def __repr__(self):
        names = dict.fromkeys(text.partition(":")[0] for text in self.strategies)
        return f"{type(self).__name__.lower()}-{'+'.join(names)}"


class Union(Law):
    """In step: one process on the union of the workers' batches; `replicas` of several workers count as one worker."""

    def holds(self, cluster):
        work, replicas = Deep(n=22, batch=4, optimizer="adam"), self.options.get("replicas", WORKERS)
        result = train(cluster, work, phases(self.strategies, 1), epochs=None, seed=5)
        law, losses, evaluations = plain(work, replicas, epochs=len(self.strategies), seed=5)
        assert column(result, "loss") == pytest.approx(losses, abs=EXACT)
        assert result.metrics["loss"] == pytest.approx(evaluations[-1], abs=EXACT)
        assert distance(result.model(), law) < EXACT


class Twin(Law):
    """The same job on threads. Alone, each strategy gives another model than that of `unlike`, so that it decides."""

    def __init__(self, unlike, work=None):
        super().__init__(*unlike)
        self.unlike, self.work = unlike, work or Small(n=22, batch=3, optimizer="momentum")

    def holds(self, cluster):
        job = {"epochs": None, "seed": 3}
        result = train(cluster, self.work, phases(self.strategies, 2), **job)
        by_client = all(parse(text)[0].strategy.rows.by_client for text in self.strategies)
        expected = on_threads(self.work, phases(self.strategies, 2), workers=WORKERS, **job)
        same(result, expected, 0.0 if by_client else EXACT)
        alone = {
            text: on_threads(self.work, text, workers=WORKERS, epochs=2, seed=3).model()
            for text in {**self.unlike, **dict.fromkeys(self.unlike.values())}
        }
        for text, other in self.unlike.items():
            assert distance(alone[text], alone[other]) > 1e-6, text


class Pushes(Law):
    """Out of step on servers: each row of the data adds 1 to its own slots."""

    def holds(self, cluster):
        (strategy,) = self.strategies
        result = train(cluster, Tally(self.options["scale"]), strategy)
        assert torch.equal(result.snapshot.params, torch.ones(2 * ROWS, dtype=torch.float64))
        assert sum(column(result, "samples")) == ROWS


class Learns(Law):
    """Out of step on servers: in each phase of four epochs a line is learnt further; there is no noise in the data."""

    def holds(self, cluster):
        work = Line(n=64, batch=4)
        result = train(cluster, work, phases(self.strategies, 4), epochs=None)
        losses = [loss for loss in column(result, "evaluation_loss") if loss is not None]
        assert len(losses) == 4 * len(self.strategies)
        before = work.data().y.square().mean().item()
        for text, after in zip(self.strategies, losses[3::4], strict=True):
            assert after < 0.05 * before, text
            before = after


class TablesInStep(Law):
    """Dense part and rows of tables are those of one process on the union of the batches."""

    def holds(self, cluster):
        (strategy,) = self.strategies
        result = train(cluster, Films(told=True, n=30), strategy, epochs=2)
        model, losses = plain_tables(Films(n=30), WORKERS)
        assert (both(result.model()) - both(model)).abs().max() < EXACT
        assert column(result, "loss") == pytest.approx(losses, abs=EXACT)


class TablesOutOfStep(Law):
    """Each row of the data is in two rows of a table once an epoch; the loss falls below that of the best constant."""

    def holds(self, cluster):
        (strategy,) = self.strategies
        work = Films(told=True, n=200, batch=10)
        result = train(cluster, work, strategy, epochs=5)
        assert uses_of(result) == 5 * 200 * 2
        assert result.metrics["loss"] < work.data().y.var()


class NeverMeet(Law):
    """Hogwild: rows that never meet are stepped in shared memory as one process would, to the bit."""

    def holds(self, cluster):
        (strategy,) = self.strategies
        work = Rows(n=30)
        result = train(cluster, work, strategy)
        assert distance(result.model(), serial(work, WORKERS, 1)) == 0


SEEDED = "privacy=dp(noise_multiplier=1,clip=0.1,noise=seeded)"  # a job is private in all of its phases or in none
ASYNC, STALE = "parameter_server:shards=2,staleness=none", "parameter_server:shards=2,staleness=2"
DOWNPOUR = "downpour:n_push=2,n_fetch=2,shards=2"
FED = {"rule": "uneven", "n": 45}
LAWS = [
    Union("all_reduce", "parameter_server:shards=2", "parameter_server:shards=2,replicas=1"),
    Union(
        "pipeline:stages=2,micro_batches=2",
        "pipeline:stages=2,micro_batches=4,schedule=gpipe",
        "pipeline:stages=2,micro_batches=4,schedule=1f1b",
        "pipeline:stages=2,micro_batches=4,schedule=interleaved,chunks=2",
        "pipeline:stages=2,micro_batches=4,schedule=zero_bubble",
        "tensor_parallel:size=2",
        "parameter_server:shards=2,replicas=1,replica=pipeline(stages=2,micro_batches=2)",
        replicas=1,
    ),
    Pushes(ASYNC, scale=WORKERS),
    Pushes(STALE, scale=WORKERS),
    Pushes(DOWNPOUR, scale=1),
    Learns(ASYNC, STALE, DOWNPOUR),
    TablesInStep("hybrid:servers=2,staleness=0"),
    TablesOutOfStep("hybrid:servers=2"),
    NeverMeet("hogwild"),
    Twin({f"all_reduce:{SEEDED}": "all_reduce"}, Evaluated(n=22, batch=3)),
    Twin(
        {
            "local_sgd:period=2": "all_reduce",
            "parallel_sgd:rounds=2": "all_reduce",
            "diloco:period=2": "local_sgd:period=2",
            "admm:local_steps=3": "all_reduce",
        }
    ),
    Twin({f"fedavg:fraction=0.5,{SEEDED}": "fedavg"}, Fed(**FED)),
    Twin(
        {
            "fedavg": "all_reduce",
            "fedprox:mu=0.5,local_epochs=2": "fedavg:local_epochs=2",
            "scaffold": "fedavg",
            "fedavgm:beta=0.5": "fedavg",
            "fedadagrad": "fedavg",
            "fedadam": "fedavg",
            "fedyogi": "fedadam",
            "fedbuff:buffer=3,concurrency=6": "fedavg",
            "ditto:lam=0.5,fraction=0.5": "fedavg",
            "fedper:private=2": "fedavg",
            "fedrep:private=2,head_epochs=2": "fedavg",
        },
        Fed(**FED),
    ),
    Twin({"statistics:by=rows": "statistics"}, Pooled(*patients())),
]
RULED = {
    "mean": "mean",
    "krum": "krum(f=1)",
    "multi_krum": "multi_krum(f=1)",
    "trimmed_mean": "trimmed_mean(f=1)",
    "median": "median",
    "geometric_median": "geometric_median",
    "bulyan": "bulyan(f=1)",
    "centered_clipping": "centered_clipping(tau=1)",
}
COMPRESSED = {"fp16": "fp16", "bf16": "bf16", "int8": "int8", "top_k": "top_k:0.2", "auto": "auto"}


def test_everything_has_a_law():
    strategies = [parse(text)[0].strategy for law in LAWS for text in law.strategies]
    replicas = [replica for replica in map(replica_of, strategies) if replica is not None]
    assert {each.name for each in [*strategies, *replicas]} == {*CATALOGUE, *REPLICAS}
    assert {each.schedule for each in replicas if each.name == "pipeline"} == set(SCHEDULES)
    assert set(RULED) == set(RULES)
    assert set(COMPRESSED) == set(COMPRESSIONS)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_strategy(ray_cluster, law):
    law.holds(ray_cluster)


def test_rules(ray_cluster):
    """One of nine clients lies. The same bits as on threads, buffers too; and not what the mean makes of it."""
    work = Normed(clients=9, optimizer="sgd")
    lying = {name: FedAvg(rule=rule, attack="sign_flip(clients=1,scale=20)") for name, rule in RULED.items()}
    lying["mean"] = lying.pop("mean")  # the last: what the others learn is not lost before
    job = phases(lying.values(), 2)
    same(train(ray_cluster, work, job, epochs=None), on_threads(work, job, workers=WORKERS, epochs=None))
    alone = {name: on_threads(work, each, workers=WORKERS, epochs=2).model() for name, each in lying.items()}
    assert {name for name, model in alone.items() if distance(model, alone["mean"]) > 1e-3} == {*RULED} - {"mean"}


def test_compression(ray_cluster):
    """The same bits as on threads, and near those of one process."""
    work = Small(n=48, batch=4)
    compressed = [AllReduce(compression=each) for each in COMPRESSED.values() if each != "auto"]
    result = train(ray_cluster, work, phases(compressed, 4), epochs=None)
    same(result, on_threads(work, phases(compressed, 4), workers=WORKERS, epochs=None))
    _, _, evaluations = plain(work, WORKERS, epochs=4 * len(compressed))
    assert result.metrics["loss"] == pytest.approx(evaluations[-1], rel=0.05)
    law = plain(work, WORKERS, epochs=1)[0]
    for each in compressed:
        assert distance(on_threads(work, each, workers=WORKERS).model(), law) > EXACT, each


def test_automatic_compression(ray_cluster):
    """It is what it says that it has chosen."""
    work = Small(n=48, batch=4)
    result = train(ray_cluster, work, AllReduce(compression="auto"), epochs=4)
    (chosen,) = [event["compression"] for event in result.events if "compression" in event]
    off = chosen == "off"
    same(
        result,
        on_threads(work, AllReduce(compression=None if off else chosen), workers=WORKERS, epochs=4),
        EXACT if off else 0.0,
    )
    law, _, evaluations = plain(work, WORKERS, epochs=4)
    assert (distance(result.model(), law) > EXACT) != off
    assert result.metrics["loss"] == pytest.approx(evaluations[-1], rel=0.05)


def test_what_a_server_group_serves(ray_cluster):
    """One job in two phases on one group: encoded pushes and pulls of one moment out of step, then Downpour."""
    job = [
        (1, rayps.ParameterServer(shards=2, replicas=1, staleness=2, compression="bf16")),
        (1, rayps.Downpour(shards=2, n_push=3, n_fetch=2)),
    ]
    result = train(ray_cluster, Line(n=96), job, epochs=None)
    assert column(result, "round") == list(range(32))
    assert result.metrics["loss"] < column(result, "loss")[0]
