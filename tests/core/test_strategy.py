import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import yaml
from rayps_client.errors import ConfigError

from rayps.core.strategy.apply_pushes import weighted_mean
from rayps.core.strategy.replica import Pipeline, TensorParallel
from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.text import write_strategy
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.base import Strategy
from rayps.strategies.catalogue import CATALOGUE, REPLICAS, catalogue, parse, phase_ends, wire
from rayps.strategies.job import JobSpec
from rayps.strategies.parameter_server import ParameterServer

GOOD = [
    ("all_reduce", AllReduce()),
    ("all-reduce", AllReduce()),
    (" all_reduce ", AllReduce()),
    (AllReduce(), AllReduce()),
    ({"name": "all_reduce"}, AllReduce()),
    ("parameter_server", ParameterServer()),
    ("parameter-server", ParameterServer()),
    ("parameter_server:", ParameterServer()),
    ("parameter_server:staleness=3,shards=2", ParameterServer(shards=2, staleness=3)),
    ("parameter_server: shards = 2 , staleness = 0", ParameterServer(shards=2)),
    ("parameter_server:staleness=none", ParameterServer(staleness=None)),
    ("parameter_server:staleness=None", ParameterServer(staleness=None)),
    ("parameter_server:staleness=null", ParameterServer(staleness=None)),
    ({"name": "parameter_server", "shards": 4, "staleness": None}, ParameterServer(shards=4, staleness=None)),
    ("all_reduce:compression=fp16", AllReduce(compression="fp16")),
    ("all_reduce:compression=none", AllReduce()),
    ("all_reduce:compression=top_k:0.05", AllReduce(compression="top_k:0.05")),
    ("parameter_server:compression=int8,shards=2", ParameterServer(shards=2, compression="int8")),
    ({"name": "parameter_server", "compression": "top_k"}, ParameterServer(compression="top_k")),
    ({"name": "all_reduce", "compression": None}, AllReduce()),
    (yaml.safe_load("{name: all_reduce, compression: top_k:0.05}"), AllReduce(compression="top_k:0.05")),
    (yaml.safe_load("name: all_reduce\ncompression: auto"), AllReduce(compression="auto")),
]


@pytest.mark.parametrize(("given", "strategy"), GOOD, ids=str)
def test_one_strategy(given, strategy):
    assert parse(given) == [Phase(None, strategy)]


PS = ParameterServer(staleness=None)
PHASES = [
    ([(2, PS), AllReduce()], [Phase(2, PS), Phase(None, AllReduce())]),
    (
        "1*all_reduce:compression=top_k:0.5 > all_reduce:compression=bf16",
        [Phase(1, AllReduce(compression="top_k:0.5")), Phase(None, AllReduce(compression="bf16"))],
    ),
    ([(2, "parameter_server:staleness=none"), (1, "all_reduce")], [Phase(2, PS), Phase(1, AllReduce())]),
    ("2*parameter_server:staleness=none > all_reduce", [Phase(2, PS), Phase(None, AllReduce())]),
    ("2 * parameter_server:staleness=none>3*all_reduce", [Phase(2, PS), Phase(3, AllReduce())]),
    (
        [{"epochs": 2, "strategy": {"name": "parameter_server", "staleness": None}}, {"strategy": "all_reduce"}],
        [Phase(2, PS), Phase(None, AllReduce())],
    ),
    ([{"epochs": 1, "strategy": {"name": "all_reduce"}}], [Phase(1, AllReduce())]),
    (["all_reduce"], [Phase(None, AllReduce())]),
    ((2, "all_reduce"), [Phase(2, AllReduce())]),
]


@pytest.mark.parametrize(("given", "phases"), PHASES, ids=str)
def test_phases(given, phases):
    assert parse(given) == phases
    sent = json.loads(json.dumps(wire(phases)))
    assert parse(sent) == phases


BAD = [
    ("allreduce", ["'allreduce'", "did you mean 'all_reduce'", "parameter_server"]),
    ("", ["''", "all_reduce, parameter_server"]),
    ("gossip", ["gossip", "all_reduce, parameter_server"]),
    ("all_reduce:shards=2", ["all_reduce", "'shards'", "compression"]),
    ("all_reduce:compression=zip", ["compression", "'zip'", "fp16, bf16, int8", "top_k:FRACTION"]),
    ("all_reduce:compression=fp16:2", ["compression", "'fp16:2'"]),
    ("all_reduce:compression=top_k:", ["compression", "'top_k:'", "fraction"]),
    ("all_reduce:compression=top_k:0", ["compression", "'top_k:0'", "above 0"]),
    ("all_reduce:compression=top_k:1.5", ["compression", "'top_k:1.5'", "up to 1"]),
    ("all_reduce:compression=top_k:nan", ["compression", "'top_k:nan'"]),
    ("parameter_server:compression=8", ["compression", "8"]),
    ("parameter_server:compression=true", ["compression", "True"]),
    ("parameter_server:shard=2", ["'shard'", "shards", "staleness"]),
    ("parameter_server:3", ["'3'", "key=value"]),
    ("parameter_server:shards=0", ["shards", "0", "at least 1"]),
    ("parameter_server:shards=-1", ["shards", "-1"]),
    ("parameter_server:shards=1.5", ["shards", "1.5", "whole number"]),
    ("parameter_server:shards=true", ["shards", "True"]),
    ("parameter_server:shards=none", ["shards", "None"]),
    ("parameter_server:shards=two", ["shards", "'two'"]),
    ("parameter_server:staleness=-1", ["staleness", "-1", "none"]),
    ("parameter_server:staleness=0.5", ["staleness", "0.5"]),
    ("parameter_server:staleness=false", ["staleness", "False"]),
    ("parameter_server:staleness=", ["staleness", "''"]),
    ([], ["empty", "all_reduce"]),
    (None, ["None", "all_reduce"]),
    (3, ["3", "all_reduce"]),
    ({}, ["{}", "name"]),
    ({"name": 3}, ["3", "name"]),
    ({"shards": 2}, ["shards", "name"]),
    ({"name": "parameter_server", "stalenes": 2}, ["'stalenes'", "staleness"]),
    ([AllReduce(), AllReduce()], ["last", "epochs"]),
    ("all_reduce > all_reduce", ["last", "epochs"]),
    ([(0, AllReduce())], ["0", "at least 1"]),
    ([(-1, AllReduce())], ["-1", "at least 1"]),
    ([(1.5, AllReduce())], ["1.5", "whole number"]),
    ([(True, AllReduce())], ["True"]),
    ("2*parameter_server >", ["strategy 2 of 2", "is empty", "each side of >"]),
    (" > all_reduce", ["strategy 1 of 2", "is empty"]),
    ("x*all_reduce", ["'x'", "whole number"]),
    ("0*all_reduce", ["0", "at least 1"]),
    ([{"epochs": "2", "strategy": "all_reduce"}], ["'2'", "whole number"]),
    ([{"epoch": 2, "strategy": "all_reduce"}], ["'epoch'", "epochs"]),
    (AllReduce, ["write AllReduce()", "all_reduce"]),
    ("fedavg:bucket=2", ["'bucket'", "rule=trimmed_mean(f=1,bucket=2)"]),
    ("fedavg:scale=2", ["'scale'", "attack=sign_flip(clients=1,scale=2)"]),
    ("fedavg:server_lr=1", ["'server_lr'", "is an option of scaffold, fedavgm, fedadagrad"]),
    ("fedavg:rule=median(5)", ["'5'", "'median'", "key=value"]),
    ([[AllReduce()]], ["cannot be read"]),
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=str)
def test_bad_input(given, words):
    with pytest.raises(ConfigError) as caught:
        parse(given)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert len(message.splitlines()) <= 3
    assert caught.value.data.get("field") in ("strategy", "shards", "staleness", "compression")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ParameterServer(shards=0),
        lambda: ParameterServer(staleness=-2),
        lambda: ParameterServer(shards="2"),
        lambda: ParameterServer(staleness="none"),
    ],
)
def test_bad_options_in_python(make):
    with pytest.raises(ConfigError):
        make()


def test_the_catalogue_tells_everything():
    told = {item["name"]: item for item in catalogue()}
    federated = {"fedavg", "fedprox", "scaffold", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedbuff"}
    federated |= {"ditto", "fedper", "fedrep", "statistics"}
    apart = {"local_sgd", "parallel_sgd", "diloco", "admm"}
    assert set(CATALOGUE) == {"all_reduce", "parameter_server", "hybrid", "downpour", "hogwild"} | apart | federated
    assert {name for name, kind in CATALOGUE.items() if kind.loop == "local_updates"} == apart
    assert {name for name, kind in CATALOGUE.items() if kind.loop == "federated_rounds"} == federated
    assert set(REPLICAS) == {"pipeline", "tensor_parallel"}
    assert list(told) == [*CATALOGUE, *REPLICAS]
    replica = {"name": "replica", "type": "Replica | None", "default": None, "of": ["pipeline", "tensor_parallel"]}
    late = [
        {"name": "backup", "type": "int | None", "default": None},
        {"name": "late_limit", "type": "int | None", "default": None},
        {"name": "replace_late", "type": "bool | None", "default": None},
    ]
    private = {"name": "privacy", "type": "Any", "default": None}
    assert told["all_reduce"]["options"] == [
        {"name": "compression", "type": "str | None", "default": None},
        {"name": "bucket_mb", "type": "float | None", "default": None},
        replica,
        {"name": "shard", "type": "str | None", "default": None},
        {"name": "slice_backup", "type": "bool | None", "default": None},
        *late,
        private,
    ]
    resources = {"name": "shard_resources", "type": "dict[str, float] | None", "default": None}
    consistent = {"name": "consistent", "type": "bool | None", "default": None}
    assert told["parameter_server"]["options"][-7:] == [replica, resources, *late, private, consistent]
    assert [o["of"] for o in told["pipeline"]["options"] if "of" in o] == [["tensor_parallel"]]
    of_any_type = {o["name"] for o in told["fedavg"]["options"] if o["type"] == "Any"}
    assert of_any_type == {"rule", "attack", "speed", "available", "clients", "privacy", "secure"}
    options = {o["name"]: o["default"] for o in told["parameter_server"]["options"]}
    assert options == {
        "shards": 1,
        "staleness": 0,
        "compression": None,
        "replay_mb": None,
        "replicas": None,
        "replica": None,
        "shard_resources": None,
        "backup": None,
        "late_limit": None,
        "replace_late": None,
        "privacy": None,
        "consistent": None,
    }
    assert all(item["summary"] for item in told.values())
    json.dumps(catalogue())


def test_an_option_that_is_none_by_default_is_written_only_where_it_is_given():
    assert wire(parse("all_reduce")) == {"name": "all_reduce"}
    assert wire(parse("all_reduce:compression=int8")) == {"name": "all_reduce", "compression": "int8"}
    assert wire(parse("parameter_server")) == {"name": "parameter_server", "shards": 1, "staleness": 0}
    assert wire(parse("parameter_server:staleness=none"))["staleness"] is None


PIPE = Pipeline(stages=4, micro_batches=8)
BOTH = Pipeline(stages=3, boundaries=(2, 5), stage=TensorParallel(size=2, plan={"up.*": "out", "down": "in"}))
NESTED = [
    (AllReduce(replica=PIPE), AllReduce(replica=PIPE)),
    (PIPE, AllReduce(replica=PIPE)),
    (TensorParallel(), AllReduce(replica=TensorParallel())),
    ("pipeline", AllReduce(replica=Pipeline())),
    ("tensor-parallel:size=4", AllReduce(replica=TensorParallel(size=4))),
    ("pipeline:stages=4,micro_batches=8", AllReduce(replica=PIPE)),
    ("pipeline(stages=4, micro_batches=8)", AllReduce(replica=PIPE)),
    ("all_reduce(replica=pipeline(stages=4,micro_batches=8))", AllReduce(replica=PIPE)),
    ("all_reduce:replica=pipeline(stages=4,micro_batches=8)", AllReduce(replica=PIPE)),
    ("all_reduce: replica = pipeline ( stages = 4 , micro_batches = 8 ) ", AllReduce(replica=PIPE)),
    ("all_reduce:replica=pipeline", AllReduce(replica=Pipeline())),
    ("all_reduce:replica=pipeline()", AllReduce(replica=Pipeline())),
    ("all_reduce:replica=none", AllReduce()),
    (
        "parameter_server:shards=2,replica=tensor_parallel(size=2),staleness=2",
        ParameterServer(shards=2, staleness=2, replica=TensorParallel()),
    ),
    (
        "pipeline:stages=3,boundaries=(2,5),stage=tensor_parallel(size=2,plan=(up.*=out,down=in))",
        AllReduce(replica=BOTH),
    ),
    (
        "all_reduce:replica=pipeline(stages=3,boundaries=(2, 5),stage=tensor_parallel(plan=(up.*=out,down=in)))",
        AllReduce(replica=BOTH),
    ),
    ({"name": "pipeline", "stages": 4, "micro_batches": 8}, AllReduce(replica=PIPE)),
    ({"name": "all_reduce", "replica": {"name": "pipeline", "stages": 4, "micro_batches": 8}}, AllReduce(replica=PIPE)),
    ({"name": "all_reduce", "replica": "pipeline(stages=4,micro_batches=8)"}, AllReduce(replica=PIPE)),
    ({"name": "all_reduce", "replica": PIPE}, AllReduce(replica=PIPE)),
    (
        {"name": "pipeline", "stage": {"name": "tensor_parallel", "size": 3}},
        AllReduce(replica=Pipeline(stage=TensorParallel(3))),
    ),
    ({"name": "pipeline", "stage": TensorParallel(3)}, AllReduce(replica=Pipeline(stage=TensorParallel(3)))),
    (
        yaml.safe_load(
            "name: pipeline\nstages: 3\nboundaries: [2, 5]\nstage:\n  name: tensor_parallel\n"
            "  plan: {up.*: out, down: in}"
        ),
        AllReduce(replica=BOTH),
    ),
]


@pytest.mark.parametrize(("given", "strategy"), NESTED, ids=str)
def test_replicas_nest(given, strategy):
    assert parse(given) == [Phase(None, strategy)]


@pytest.mark.parametrize("strategy", [strategy for _, strategy in [*GOOD, *NESTED]], ids=str)
def test_what_is_written_is_read_again(strategy):
    sent = wire(parse(strategy))
    again = parse(json.loads(json.dumps(sent)))
    assert again == [Phase(None, strategy)]
    assert wire(again) == sent
    assert parse(write_strategy(sent)) == again
    spec = JobSpec(workload="w:W", strategy=sent, workers=12)
    assert JobSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert parse(yaml.safe_load(yaml.safe_dump(sent))) == again


def test_replicas_in_phases():
    given = "2*all_reduce:replica=pipeline(stage=tensor_parallel(plan=(a.*=out))) > 1*pipeline > parameter_server"
    phases = parse(given)
    assert [phase.epochs for phase in phases] == [2, 1, None]
    assert phases[0].strategy.replica.stage.plan == {"a.*": "out"}
    assert phases[1].strategy == AllReduce(replica=Pipeline())
    sent = json.loads(json.dumps(wire(phases)))
    assert parse(sent) == phases == parse(write_strategy(sent))
    starred = parse("pipeline(stage=tensor_parallel(plan=(a.*=out)))")
    assert starred[0].epochs is None and starred[0].strategy.replica == phases[0].strategy.replica


BAD_REPLICAS = [
    ("pipelin", ["'pipelin'", "did you mean 'pipeline'", "all_reduce", "tensor_parallel"]),
    ("pipeline:stage=2", ["stage", "2", "tensor_parallel"]),
    ("pipeline:micro_batch=2", ["pipeline", "'micro_batch'", "did you mean 'micro_batches'", "stages"]),
    ("pipeline:stages=0", ["stages", "0"]),
    ("pipeline:schedule=2f2b", ["'2f2b'", "1f1b", "zero_bubble"]),
    ("pipeline:boundaries=2", ["boundaries", "2"]),
    ("pipeline:boundaries=(2,1)", ["boundaries", "[2, 1]"]),
    ("pipeline:boundaries=(a)", ["boundaries", "'a'"]),
    ("pipeline:stage=pipeline(stages=2)", ["stage", "'pipeline'", "tensor_parallel"]),
    ("all_reduce:replica=pipelines(stages=2)", ["'pipelines'", "did you mean 'pipeline'", "tensor_parallel"]),
    ("all_reduce:replica=parameter_server", ["'parameter_server'", "is a strategy", "pipeline, tensor_parallel"]),
    ("all_reduce:replica=3", ["replica", "3", "pipeline"]),
    ("all_reduce:replica=(2,3)", ["replica", "[2, 3]"]),
    ("all_reduce:replica=pipeline:stages=2,micro_batches=4", ["'micro_batches'", "parentheses"]),
    ("all_reduce:replica=tensor_parallel(sise=2)", ["tensor_parallel", "'sise'", "did you mean 'size'"]),
    ("all_reduce:replica=tensor_parallel(size=two)", ["size", "'two'"]),
    ("all_reduce:replica=tensor_parallel(plan=(a=up))", ["plan", "'up'", "heads"]),
    ("tensor_parallel:plan=out", ["plan", "'out'"]),
    ("all_reduce:replica=pipeline(stages=2", ["parentheses", "pipeline(stages=2"]),
    ("all_reduce:replica=pipeline)stages=2(", ["parentheses"]),
    ("pipeline(stages=2)x", ["parentheses"]),
    ("pipeline(stages=2)(chunks=2)", ["parentheses"]),
    ("pipeline:stages=2,stages=3", ["'stages'", "twice"]),
    ("all_reduce:replica=" + "a(b=" * 5000 + ")" * 5000, ["deep"]),
    ("all_reduce:compression=int8,replica=pipeline", ["compression", "'int8'", "pipeline", "leave out"]),
    ("all_reduce:bucket_mb=4,replica=tensor_parallel", ["bucket_mb", "tensor_parallel"]),
    ("parameter_server:compression=int8,replica=pipeline", ["compression", "pipeline"]),
    ("hybrid:replica=pipeline", ["hybrid", "'replica'", "did you mean 'replicas'"]),
    ({"name": "all_reduce", "replica": {"stages": 2}}, ["replica", "pipeline", "stages=2"]),
    ({"name": "all_reduce", "replica": []}, ["replica", "[]"]),
    ({"name": "all_reduce", "replica": AllReduce()}, ["replica", "AllReduce"]),
    ({"name": "pipeline", "stage": Pipeline()}, ["stage", "TensorParallel"]),
    (Pipeline, ["Pipeline", "all_reduce"]),
]


@pytest.mark.parametrize(("given", "words"), BAD_REPLICAS, ids=lambda given: str(given)[:60])
def test_bad_replicas(given, words):
    with pytest.raises(ConfigError) as caught:
        parse(given)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert len(message.splitlines()) <= 3
    assert caught.value.data.get("field")


@pytest.mark.parametrize(
    "make",
    [
        lambda: AllReduce(replica="pipeline"),
        lambda: AllReduce(replica=2),
        lambda: ParameterServer(replica=AllReduce()),
        lambda: AllReduce(replica=Pipeline),
        lambda: Pipeline(stage=2),
        lambda: Pipeline(boundaries="ab"),
        lambda: TensorParallel(plan={"a": ["out"]}),
        lambda: AllReduce(replica=PIPE, bucket_mb=0),
    ],
)
def test_bad_replicas_in_python(make):
    with pytest.raises(ConfigError):
        make()


def test_a_replica_says_how_workers_are_laid_out():
    grid = parse("pipeline:stages=3,stage=tensor_parallel(size=2)")[0].strategy.grid(12)
    assert (grid.data, grid.stage, grid.tensor) == (2, 3, 2)


def test_what_is_in_step():
    assert AllReduce().topology.in_step
    assert ParameterServer().topology.in_step
    assert not ParameterServer(staleness=1).topology.in_step
    assert not ParameterServer(staleness=None).topology.in_step
    assert ParameterServer().topology.update.gathers
    assert not ParameterServer(staleness=1).topology.update.gathers


def test_a_strategy_must_say_what_a_worker_does():
    class Nothing(Strategy):
        pass

    with pytest.raises(TypeError, match=r"Nothing.*round"):
        Nothing().round(None)


@dataclass(frozen=True)
class Own(Strategy):
    """A user's own."""

    momentum: float = 0.9
    name: ClassVar[str] = "own"


def test_an_own_strategy_is_written_with_its_options():
    assert parse(Own(0.5)) == [Phase(None, Own(0.5))]
    assert wire(parse(Own(0.5))) == {"name": "test_strategy:Own", "momentum": 0.5}  # found again by it


ENDS = [
    # epochs of the phases, epochs, steps, steps per epoch -> ends
    ([None], None, None, 10, [10]),
    ([None], 3, None, 10, [30]),
    ([None], None, 7, 10, [7]),
    ([None], None, 25, 10, [25]),
    ([2], None, None, 10, [20]),
    ([1, None], 3, None, 10, [10, 30]),
    ([1, 2], None, None, 10, [10, 30]),
    ([1, 2], 3, None, 10, [10, 30]),
    ([1, 1, None], 5, None, 4, [4, 8, 20]),
    ([1, None], None, 25, 10, [10, 25]),
]


@pytest.mark.parametrize(("phases", "epochs", "steps", "per_epoch", "ends"), ENDS)
def test_where_phases_end(phases, epochs, steps, per_epoch, ends):
    given = [Phase(count, AllReduce()) for count in phases]
    assert phase_ends(given, per_epoch, epochs=epochs, steps=steps) == ends


def test_weighted_mean():
    values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([100.0, 100.0])]
    assert torch.equal(weighted_mean(values, [1, 3, 0]), torch.tensor([2.5, 3.5]))
    assert torch.equal(values[0], torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="all 3 weights are 0"):
        weighted_mean(values, [0, 0, 0])


@pytest.mark.parametrize(
    ("phases", "epochs", "steps", "words"),
    [
        ([1, 2], 5, None, ["3 epochs", "epochs is 5"]),
        ([2, None], 2, None, ["2 epochs", "20 rounds", "20"]),
        ([2, None], 1, None, ["20 rounds", "10"]),
        ([2, None], None, 7, ["20 rounds", "7"]),
    ],
)
def test_phases_that_do_not_fit(phases, epochs, steps, words):
    given = [Phase(count, AllReduce()) for count in phases]
    with pytest.raises(ConfigError) as caught:
        phase_ends(given, 10, epochs=epochs, steps=steps)
    for word in words:
        assert word in str(caught.value)
