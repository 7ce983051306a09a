"""Every strategy, pipeline schedule, robust rule and compression of the catalogues, on real Ray workers, by its law.

All other tests of learning run on threads; here each law is one job of two worker processes, with a phase for each of
its strategies. The laws:

union   in step: the parameters and losses of one process on the union of the workers' batches
twin    deterministic: those of the same job on threads, which other tests compare with the paper
pushes  out of step: every push is applied once
learns  out of step: in each phase the loss falls to a small part
What has no law here fails `test_everything_has_a_law`.
"""

import importlib

import pytest
from federated_work import Fed, Normed
from folders import TESTS
from ray_laws import (
    EXACT,
    WORKERS,
    Evaluated,
    Learns,
    Line,
    NeverMeet,
    Pushes,
    Twin,
    Union,
    column,
    phases,
    same,
    train,
)
from small_work import Small, distance, plain
from small_work import train as on_threads
from statistics_work import Pooled
from statistics_work import rows as patients

import rayps
from rayps import AllReduce, FedAvg
from rayps.core.strategy.compression import COMPRESSIONS
from rayps.core.strategy.replica import SCHEDULES
from rayps.core.strategy.topology import replica_of
from rayps.federated.rules.robust_rules import RULES
from rayps.strategies.catalogue import CATALOGUE, REPLICAS, parse

pytestmark = pytest.mark.ray


# ---------------------------------------------------------------------------------------------- laws


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
    Pushes(ASYNC, STALE, scale=WORKERS),
    Pushes(DOWNPOUR, scale=1),
    Learns(ASYNC, STALE, DOWNPOUR),
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
for found in sorted(TESTS.glob("*/matrix_of_*.py")):  # of rooms that a tree may lack
    LAWS += importlib.import_module(found.stem).LAWS
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
