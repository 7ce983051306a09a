import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import yaml

from rayps.errors import ConfigError
from rayps.strategies.all_reduce import AllReduce
from rayps.strategies.base import Strategy, weighted_mean
from rayps.strategies.parameter_server import ParameterServer
from rayps.strategy import CATALOGUE, Phase, catalogue, parse, phase_ends, wire

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
    ("1*all_reduce:compression=top_k:0.5 > all_reduce:compression=bf16",
     [Phase(1, AllReduce(compression="top_k:0.5")), Phase(None, AllReduce(compression="bf16"))]),
    ([(2, "parameter_server:staleness=none"), (1, "all_reduce")], [Phase(2, PS), Phase(1, AllReduce())]),
    ("2*parameter_server:staleness=none > all_reduce", [Phase(2, PS), Phase(None, AllReduce())]),
    ("2 * parameter_server:staleness=none>3*all_reduce", [Phase(2, PS), Phase(3, AllReduce())]),
    ([{"epochs": 2, "strategy": {"name": "parameter_server", "staleness": None}}, {"strategy": "all_reduce"}],
     [Phase(2, PS), Phase(None, AllReduce())]),
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
    ("x*all_reduce", ["'x'", "whole number"]),
    ("0*all_reduce", ["0", "at least 1"]),
    ([{"epochs": "2", "strategy": "all_reduce"}], ["'2'", "whole number"]),
    ([{"epoch": 2, "strategy": "all_reduce"}], ["'epoch'", "epochs"]),
    (AllReduce, ["AllReduce", "all_reduce"]),
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


@pytest.mark.parametrize("make", [lambda: ParameterServer(shards=0), lambda: ParameterServer(staleness=-2),
                                  lambda: ParameterServer(shards="2"), lambda: ParameterServer(staleness="none")])
def test_bad_options_in_python(make):
    with pytest.raises(ConfigError):
        make()


def test_the_catalogue_tells_everything():
    told = {item["name"]: item for item in catalogue()}
    assert set(told) == set(CATALOGUE) == {"all_reduce", "parameter_server", "hybrid"}
    assert told["all_reduce"]["options"] == [{"name": "compression", "type": "str | None", "default": None},
                                             {"name": "bucket_mb", "type": "float | None", "default": None}]
    options = {o["name"]: o["default"] for o in told["parameter_server"]["options"]}
    assert options == {"shards": 1, "staleness": 0, "compression": None, "replay_mb": None, "replicas": None}
    assert all(item["summary"] for item in told.values())
    json.dumps(catalogue())


def test_an_option_that_is_none_by_default_is_written_only_where_it_is_given():
    assert wire(parse("all_reduce")) == {"name": "all_reduce"}
    assert wire(parse("all_reduce:compression=int8")) == {"name": "all_reduce", "compression": "int8"}
    assert wire(parse("parameter_server")) == {"name": "parameter_server", "shards": 1, "staleness": 0}
    assert wire(parse("parameter_server:staleness=none"))["staleness"] is None


def test_what_is_in_step():
    assert AllReduce().lockstep
    assert ParameterServer().lockstep
    assert not ParameterServer(staleness=1).lockstep
    assert not ParameterServer(staleness=None).lockstep
    assert ParameterServer().gathers
    assert not ParameterServer(staleness=1).gathers


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
    assert wire(parse(Own(0.5))) == {"name": "own", "momentum": 0.5}


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
    assert weighted_mean(values, [0, 0, 0]) is None


@pytest.mark.parametrize(("phases", "epochs", "steps", "words"), [
    ([1, 2], 5, None, ["3 epochs", "epochs is 5"]),
    ([2, None], 2, None, ["2 epochs", "20 rounds", "20"]),
    ([2, None], 1, None, ["20 rounds", "10"]),
    ([2, None], None, 7, ["20 rounds", "7"]),
])
def test_phases_that_do_not_fit(phases, epochs, steps, words):
    given = [Phase(count, AllReduce()) for count in phases]
    with pytest.raises(ConfigError) as caught:
        phase_ends(given, 10, epochs=epochs, steps=steps)
    for word in words:
        assert word in str(caught.value)
