"""Every strategy, pipeline schedule, robust rule and compression of the catalogues, on real Ray workers, by its law.

All other tests of learning run on threads; each of these is one short job of two worker processes. The laws:

union   in step: the parameters and losses of one process on the union of the workers' batches
twin    deterministic: those of the same job on threads, which other tests compare with the paper
pushes  out of step: every push is applied once, and the loss falls below a bound that the data gives
The rows come from the catalogues: what has no law here fails `test_everything_has_a_law`.
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
from rayps.core.compression import COMPRESSIONS
from rayps.core.replica import SCHEDULES
from rayps.core.topology import replica_of
from rayps.federated.robust_rules import RULES
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
    """The same parameters and buffers, the same loss and samples in each round, the same evaluation."""
    state, expected = result.model().state_dict(), other.model().state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert (value - expected[name]).abs().max() <= tolerance, name
    losses = pytest.approx(column(other, "loss"), abs=tolerance, rel=0, nan_ok=True)  # private jobs have none
    assert column(result, "loss") == losses
    assert column(result, "samples") == column(other, "samples")
    assert result.metrics == pytest.approx(other.metrics, abs=tolerance, rel=0)


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
    """What is to hold of one strategy, given as text."""

    def __init__(self, strategy, **options):
        self.strategy, self.options = strategy, options

    def __repr__(self):
        return f"{type(self).__name__.lower()}-{self.strategy}"


class Union(Law):
    """In step: one process on the union of the workers' batches; `replicas` of several workers count as one worker."""

    def holds(self, cluster):
        work, replicas = Deep(n=22, batch=4, optimizer="adam"), self.options.get("replicas", WORKERS)
        result = train(cluster, work, self.strategy, epochs=2, seed=5)
        law, losses, evaluations = plain(work, replicas, epochs=2, seed=5)
        assert distance(result.model(), law) < EXACT
        assert column(result, "loss") == pytest.approx(losses, abs=EXACT)
        assert result.metrics["loss"] == pytest.approx(evaluations[-1], abs=EXACT)


class Twin(Law):
    """The same job on threads. The second job differs, so that the strategy's name alone decides something."""

    def holds(self, cluster):
        work = self.options.get("work", Small(n=22, batch=3, optimizer="momentum"))
        result = train(cluster, work, self.strategy, epochs=2, seed=3)
        same(
            result,
            on_threads(work, self.strategy, workers=WORKERS, epochs=2, seed=3),
            0.0 if parse(self.strategy)[0].strategy.rows.by_client else EXACT,
        )
        other = on_threads(work, self.options["unlike"], workers=WORKERS, epochs=2, seed=3)
        assert distance(result.model(), other.model()) > 1e-6


class Pushes(Law):
    """Out of step on servers: each row of the data adds 1 to its own slots, and a line is learnt."""

    def holds(self, cluster):
        result = train(cluster, Tally(self.options["scale"]), self.strategy)
        assert torch.equal(result.snapshot.params, torch.ones(2 * ROWS, dtype=torch.float64))
        assert sum(column(result, "samples")) == ROWS
        work = Line(n=64, batch=4)
        y = work.data().y
        assert train(cluster, work, self.strategy, epochs=4).metrics["loss"] < 0.05 * y.square().mean()


class TablesInStep(Law):
    """Dense part and rows of tables are those of one process on the union of the batches."""

    def holds(self, cluster):
        result = train(cluster, Films(told=True, n=30), self.strategy, epochs=2)
        model, losses = plain_tables(Films(n=30), WORKERS)
        assert (both(result.model()) - both(model)).abs().max() < EXACT
        assert column(result, "loss") == pytest.approx(losses, abs=EXACT)


class TablesOutOfStep(Law):
    """Each row of the data is in two rows of a table once an epoch; the loss falls below that of the best constant."""

    def holds(self, cluster):
        work = Films(told=True, n=200, batch=10)
        result = train(cluster, work, self.strategy, epochs=5)
        assert uses_of(result) == 5 * 200 * 2
        assert result.metrics["loss"] < work.data().y.var()


class NeverMeet(Law):
    """Hogwild: rows that never meet are stepped in shared memory as one process would, to the bit."""

    def holds(self, cluster):
        work = Rows(n=30)
        result = train(cluster, work, self.strategy)
        assert distance(result.model(), serial(work, WORKERS, 1)) == 0


def federated(strategy, unlike="fedavg"):
    return Twin(strategy, unlike=unlike, work=Fed(rule="uneven", n=45))


IN_STEP = "all_reduce"
SEEDED = "privacy=dp(noise_multiplier=1,clip=0.1,noise=seeded)"
LAWS = {
    "all_reduce": [
        Union("all_reduce"),
        Twin(f"all_reduce:{SEEDED}", unlike="all_reduce", work=Evaluated(n=22, batch=3)),
    ],
    "parameter_server": [
        Union("parameter_server:shards=2"),
        Union("parameter_server:shards=2,replicas=1"),
        Union("parameter_server:shards=2,replicas=1,replica=pipeline(stages=2,micro_batches=2)", replicas=1),
        Pushes("parameter_server:shards=2,staleness=none", scale=WORKERS),
        Pushes("parameter_server:shards=2,staleness=2", scale=WORKERS),
    ],
    "hybrid": [TablesInStep("hybrid:servers=2,staleness=0"), TablesOutOfStep("hybrid:servers=2")],
    "downpour": [Pushes("downpour:n_push=2,n_fetch=2,shards=2", scale=1)],
    "hogwild": [NeverMeet("hogwild")],
    "local_sgd": [Twin("local_sgd:period=2", unlike=IN_STEP)],
    "parallel_sgd": [Twin("parallel_sgd:rounds=2", unlike=IN_STEP)],
    "diloco": [Twin("diloco:period=2", unlike="local_sgd:period=2")],
    "admm": [Twin("admm:local_steps=3", unlike=IN_STEP)],
    "fedavg": [federated("fedavg", unlike=IN_STEP), federated(f"fedavg:fraction=0.5,{SEEDED}")],
    "fedprox": [federated("fedprox:mu=0.5,local_epochs=2", unlike="fedavg:local_epochs=2")],
    "scaffold": [federated("scaffold")],
    "fedavgm": [federated("fedavgm:beta=0.5")],
    "fedadagrad": [federated("fedadagrad")],
    "fedadam": [federated("fedadam")],
    "fedyogi": [federated("fedyogi", unlike="fedadam")],
    "fedbuff": [federated("fedbuff:buffer=3,concurrency=6")],
    "ditto": [federated("ditto:lam=0.5,fraction=0.5", unlike="fedavg")],
    "fedper": [federated("fedper:private=2")],
    "fedrep": [federated("fedrep:private=2,head_epochs=2")],
    "statistics": [Twin("statistics:by=rows", unlike="statistics", work=Pooled(*patients()))],
    "pipeline": [Union("pipeline:stages=2,micro_batches=2", replicas=1)],
    "tensor_parallel": [Union("tensor_parallel:size=2", replicas=1)],
}
SCHEDULED = {"gpipe": {}, "1f1b": {}, "interleaved": {"chunks": 2}, "zero_bubble": {}}
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
    assert set(LAWS) == {*CATALOGUE, *REPLICAS}
    assert set(SCHEDULED) == set(SCHEDULES)
    assert set(RULED) == set(RULES)
    assert set(COMPRESSED) == set(COMPRESSIONS)
    for name, laws in LAWS.items():
        for law in laws:
            strategy = parse(law.strategy)[0].strategy
            replica = replica_of(strategy)
            assert name in (strategy.name, replica and replica.name), law


@pytest.mark.parametrize(("name", "law"), [(name, law) for name, laws in LAWS.items() for law in laws], ids=str)
def test_strategy(ray_cluster, name, law):
    law.holds(ray_cluster)


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_pipeline_schedule(ray_cluster, schedule):
    options = "".join(f",{key}={value}" for key, value in SCHEDULED[schedule].items())
    Union(f"pipeline:stages=2,micro_batches=4,schedule={schedule}{options}", replicas=1).holds(ray_cluster)


@pytest.mark.parametrize("rule", RULED)
def test_rule(ray_cluster, rule):
    """One of nine clients lies. The same bits as on threads, buffers too; and not what the mean makes of it."""
    work = Normed(clients=9, optimizer="sgd")
    strategy = FedAvg(rule=RULED[rule], attack="sign_flip(clients=1,scale=20)")
    result = train(ray_cluster, work, strategy, epochs=2)
    same(result, on_threads(work, strategy, workers=WORKERS, epochs=2))
    mean = on_threads(work, FedAvg(attack=strategy.attack), workers=WORKERS, epochs=2)
    assert (distance(result.model(), mean.model()) > 1e-3) == (rule != "mean")


@pytest.mark.parametrize("compression", COMPRESSED)
def test_compression(ray_cluster, compression):
    """The same bits as on threads, near those of one process; `auto` is what it says that it has chosen."""
    work = Small(n=48, batch=4)
    result = train(ray_cluster, work, AllReduce(compression=COMPRESSED[compression]), epochs=4)
    chosen = COMPRESSED[compression]
    if compression == "auto":
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
    phases = [
        (1, rayps.ParameterServer(shards=2, replicas=1, staleness=2, compression="bf16")),
        (1, rayps.Downpour(shards=2, n_push=3, n_fetch=2)),
    ]
    result = train(ray_cluster, Line(n=96), phases, epochs=None)
    assert column(result, "round") == list(range(32))
    assert result.metrics["loss"] < column(result, "loss")[0]
