"""What strategies declare: values of the core; options that stand flat; classes written with the flags of 0.1."""

import dataclasses
import inspect
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
from rayps_client.errors import ConfigError

from rayps.core.strategy.replica import Pipeline
from rayps.core.strategy.strategy import ServerHalf, StrategyView
from rayps.core.strategy.strategy_families import ByClient, Fixed, Rebuild, ReplaceOne, Reshuffled, RestartAll
from rayps.core.strategy.topology import ASP, BSP, SSP, JobFacts, Peers, PerPush, Servers, SharedVector
from rayps.federated.strategy_interface import FederatedView, state_owner
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.base import Strategy
from rayps.strategies.catalogue import CATALOGUE, catalogue, parse, wire
from rayps.strategies.downpour import Downpour
from rayps.strategies.fedavg import FedAvg
from rayps.strategies.fedbuff import FedBuff
from rayps.strategies.fedopt import FedAdam
from rayps.strategies.hybrid import Hybrid
from rayps.strategies.local_sgd import LocalSGD
from rayps.strategies.parallel_sgd import ParallelSGD
from rayps.strategies.parameter_server import ParameterServer

FAMILIES = {  # by strategy: topology, rows, recovery, loop
    "all_reduce": (Peers, Reshuffled, RestartAll, "sync_gradients"),
    "all_reduce:replica=pipeline": (Peers, Reshuffled, Rebuild, "sync_gradients"),
    "parameter_server": (Servers, Reshuffled, RestartAll, "server_steps"),
    "parameter_server:staleness=2": (Servers, Reshuffled, ReplaceOne, "server_steps"),
    "parameter_server:replica=pipeline": (Servers, Reshuffled, Rebuild, "server_steps"),
    "all_reduce:backup=1": (Peers, Reshuffled, RestartAll, "sync_gradients"),
    "parameter_server:backup=1": (Servers, Reshuffled, RestartAll, "server_steps"),
    "hybrid": (Peers, Reshuffled, RestartAll, "sync_gradients"),
    "downpour": (Servers, Reshuffled, ReplaceOne, "server_steps"),
    "hogwild": (SharedVector, Reshuffled, RestartAll, "shared_vector"),
    "local_sgd": (Peers, Reshuffled, RestartAll, "local_updates"),
    "parallel_sgd": (Peers, Reshuffled, RestartAll, "local_updates"),
    "parallel_sgd:shuffle=false": (Peers, Fixed, RestartAll, "local_updates"),
    "diloco": (Peers, Reshuffled, RestartAll, "local_updates"),
    "admm": (Peers, Fixed, RestartAll, "local_updates"),
    "fedavg": (Peers, ByClient, RestartAll, "federated_rounds"),
    "fedbuff": (Peers, ByClient, RestartAll, "federated_rounds"),
}


@pytest.mark.parametrize("text", FAMILIES)
def test_each_strategy_declares_its_family(text):
    strategy = parse(text)[0].strategy
    found = type(strategy.topology), type(strategy.rows), type(strategy.recovery), strategy.loop
    assert found == FAMILIES[text]
    assert isinstance(strategy, StrategyView) and isinstance(strategy.server_half, ServerHalf)
    assert isinstance(strategy, FederatedView) is strategy.rows.by_client


@pytest.mark.parametrize("text", [text for text, family in FAMILIES.items() if ByClient in family])
def test_python_3_12_finds_what_a_federated_strategy_declares(text):
    """From 3.12 on, isinstance with a Protocol does not ask `__getattr__`, by which nested options are read."""
    strategy = parse(text)[0].strategy
    for name in (name for kind in FederatedView.__mro__[:2] for name in vars(kind) if not name.startswith("_")):
        inspect.getattr_static(strategy, name)  # raises AttributeError if it is not there


def test_what_options_become():
    servers = ParameterServer(shards=3, staleness=2, compression="int8", replay_mb=1).topology
    assert (servers.count, servers.consistency, servers.update) == (3, SSP(2), PerPush(borrows=True))
    assert (servers.replay_bytes, servers.group_replay_bytes, servers.shards(5)) == (10**6, 10**6, 5)
    in_step = ParameterServer(replay_mb=1).topology
    assert (in_step.consistency, in_step.update.gathers, in_step.update.means) == (BSP(), True, True)
    assert (in_step.replay_bytes, in_step.group_replay_bytes) == (0, 10**6)
    assert Downpour(n_push=3, adagrad=0.1).topology == Servers(
        1, consistency=ASP(), update=PerPush(borrows=True, spans=True), adagrad=0.1, own_copies=True, push_every=3
    )
    assert Hybrid(servers=3, replicas=1).topology.tables == ParameterServer(3, staleness=None, replicas=1).topology
    assert LocalSGD(compression="fp16").topology == Peers(compression="fp16")
    assert AllReduce(replica=Pipeline()).topology.grid(6).columns == 2
    assert ParallelSGD(shuffle=False).rows == Fixed()
    assert FedAvg(clients="remote").rows == ByClient(remote=True)


REFUSED = [
    ("all_reduce", JobFacts(tables=("t",)), "no servers for them"),
    ("hogwild", JobFacts(tables=("t",)), "no servers for them"),
    ("downpour", JobFacts(tables=("t",)), "no servers for them"),
    ("hybrid", JobFacts(tables=("t",), clip_norm=1.0), "clip_norm is 1.0"),
    ("parameter_server:replica=pipeline", JobFacts(tables=("t",)), "the model has sparse tables"),
    ("all_reduce", JobFacts(branch="b"), "branch is 'b'"),
    ("hogwild", JobFacts(branch="b"), "branch is 'b'"),
    ("parameter_server:backup=1", JobFacts(tables=("t",)), "cannot be combined with sparse tables"),
    ("parameter_server:backup=1", JobFacts(group="g"), "cannot be combined with server group 'g'"),
    ("parameter_server:backup=1", JobFacts(branch="b"), "cannot be combined with branch 'b'"),
]


@pytest.mark.parametrize(("text", "job", "words"), REFUSED)
def test_a_topology_refuses_what_cannot_be_combined(text, job, words):
    strategy = parse(text)[0].strategy
    with pytest.raises(ConfigError, match=words):
        strategy.topology.check(strategy.name, job)


@pytest.mark.parametrize("text", FAMILIES)
def test_a_job_without_servers_and_tables_is_refused_by_none(text):
    strategy = parse(text)[0].strategy
    strategy.topology.check(strategy.name, JobFacts(clip_norm=1.0))


# ---- options that stand flat


def test_nested_options_stand_flat():
    one = FedAvg(0.5, 2, dropout=0.1, rule="median", deadline=3.0)
    assert (one.fraction, one.local.local_epochs, one.population.dropout) == (0.5, 2, 0.1)
    assert (one.dropout, one.rule, one.local_epochs) == (0.1, "median", 2)  # as they are written
    assert one == parse("fedavg:fraction=0.5,local_epochs=2,dropout=0.1,rule=median,deadline=3.0")[0].strategy
    assert one == FedAvg(0.5, local=one.local, aggregation=one.aggregation, population=one.population)
    assert dataclasses.replace(one, dropout=0.2).population.dropout == 0.2
    assert dataclasses.replace(one, dropout=0.2).population.deadline == 3.0
    assert pickle.loads(pickle.dumps(one)) == one and hash(one) == hash(dataclasses.replace(one))
    assert parse(wire(parse(one)))[0].strategy == one
    assert wire(parse(one))["dropout"] == 0.1 and "population" not in wire(parse(one))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedAvg(dropuot=0.1), "no option 'dropuot'"),
        (lambda: FedAvg(0.5, fraction=0.5), "fraction twice"),
        (lambda: FedAvg(*range(30)), "30 were given"),
    ],
)
def test_an_option_that_there_is_not_is_a_type_error(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_a_class_of_ones_own_takes_them_flat_too():
    @dataclass(frozen=True)
    class Mine(FedAvg):
        pull: float = 0.5
        name: ClassVar[str] = "mine"

    one = Mine(local_steps=3, pull=0.25, speed=0.01)
    assert (one.local.local_steps, one.pull, one.population.speed) == (3, 0.25, 0.01)
    assert one.to_wire() | {"local_steps": 3, "pull": 0.25, "speed": 0.01} == one.to_wire()


def test_the_catalogue_lists_what_is_written():
    options = {item["name"]: [option["name"] for option in item["options"]] for item in catalogue()}
    common = {"fraction", "local_epochs", "local_steps", "batch_size", "rule", "clip", "attack", "dropout", "deadline"}
    common |= {"min_replies", "enough", "over_selection", "speed", "available", "evaluate_every", "buffers"}
    common |= {"finetune", "clients", "privacy", "secure", "report", "client_evaluation", "metric_bound"}
    common |= {"upload", "download"}
    assert set(options["fedavg"]) == common and len(options["fedavg"]) == len(common)
    assert set(options["fedadam"]) == common | {"server_lr", "beta1", "tau", "beta2"}
    assert set(options["fedbuff"]) == common | {"buffer", "concurrency", "server_lr", "max_staleness", "decay"}


@pytest.mark.parametrize("kind", CATALOGUE.values(), ids=lambda kind: kind.name)
def test_a_strategy_has_few_fields_of_its_own(kind):
    assert len(dataclasses.fields(kind)) <= 18


def test_a_buffered_strategy_says_so():
    assert FedAdam().buffered is None
    found = FedBuff(buffer=3, concurrency=5, max_staleness=2).buffered
    assert (found.size, found.concurrency, found.max_staleness) == (3, 5, 2)


# ---- classes written with the flags of 0.1


class New(Strategy):
    """A parameter server of one's own, as it is declared now."""

    topology = Servers(2, consistency=ASP(), update=PerPush())

    def round(self, w):
        w.params = w.server.pull()
        w.server.push(w.grad(w.batch()))

    def on_push(self, shard, value, weight):
        shard.step(value, 1 / shard.size)


def test_who_keeps_states_of_clients_on_the_workers():
    kept = {text: state_owner(parse(text)[0].strategy) for text in ("scaffold", "ditto", "fedavg", "all_reduce")}
    assert kept == {"scaffold": "scaffold", "ditto": "ditto", "fedavg": None, "all_reduce": None}
    assert state_owner(parse("fedavg:buffers=keep")[0].strategy) == "fedavg"
    assert state_owner(parse("scaffold:clients=remote")[0].strategy) is None  # real clients keep their own
