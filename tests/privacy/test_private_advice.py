"""What a job with privacy refuses or does not claim: each piece of advice is one that is taken next."""

import math
import re

import pytest
import torch
from federated_work import Fed
from rayps_client.errors import ConfigError
from small_work import rows, train
from statistics_work import Pooled
from statistics_work import rows as rows_of_hospitals
from torch import nn
from torch.nn.modules.batchnorm import _LazyNormBase, _NormBase

import rayps
from rayps.core.strategy.nested_options import options_of
from rayps.runtime.checks.preflight import preflight
from rayps.strategies.catalogue import CATALOGUE, parse, parse_for_loop
from rayps.strategies.job import JobSpec
from rayps.workload.norm_by_row import groups_for

DP = {"noise_multiplier": 1.1, "delta": 1e-3}


def accepts(name):
    try:
        parse({"name": name, "privacy": DP})
    except ConfigError:
        return False
    return True


WITH_PRIVACY = [name for name, kind in CATALOGUE.items() if "privacy" in [option.name for option in options_of(kind)]]
PRIVATE = [name for name in WITH_PRIVACY if accepts(name)]


def test_the_private_strategies_are_found():
    assert {"all_reduce", "parameter_server", "fedavg", "statistics"} < set(PRIVATE) < set(CATALOGUE)


# ---- layers


def layers():
    """Return the layers of torch that normalize by statistics, with running ones, and the inputs that each takes."""
    kinds = [kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, _NormBase)]
    found = []
    for kind in kinds:
        if issubclass(kind, _LazyNormBase) or kind in (_NormBase, nn.modules.batchnorm._BatchNorm):
            continue
        for channels in (6, 37, 48):
            layer = kind(channels, track_running_stats=True)
            for shape in ([7, channels], [7, channels, 5], [7, channels, 5, 4], [7, channels, 5, 4, 3]):
                if takes(layer, torch.zeros(shape)):
                    found.append((layer, shape))
    return found


def takes(layer, x):
    if hasattr(layer, "_get_no_batch_dim") and x.dim() == layer._get_no_batch_dim():
        return False  # a single example without the dimension of rows
    try:
        layer._check_input_dim(x)
    except ValueError:
        return False
    return True


LAYERS = layers()
NAMES = [f"{type(layer).__name__}-{'x'.join(map(str, shape))}" for layer, shape in LAYERS]
# all ways to privacy: of rows, of simulated clients, of real clients
WAYS = ["all_reduce:{}", "parameter_server:shards=2,{}", "fedavg:{}", "fedavg:clients=remote(least=3),{}"]


class Normed(Fed):
    """A model with one normalization layer, of 7 rows of the layer's shape; evaluated on rows that are public."""

    def __init__(self, layer, shape):
        super().__init__(clients=7, n=7, batch=1)
        self.layer, self.shape = layer, shape

    def model(self):
        return nn.Sequential(self.layer, nn.Flatten(), nn.Linear(math.prod(self.shape[1:]), 1))

    def data(self):
        return rayps.data.tensors(self.x(), torch.zeros(7, 1), batch_size=1, client=torch.arange(7))

    def x(self):
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(5))

    def evaluation_data(self):
        return rayps.data.tensors(self.x(), torch.zeros(7, 1), batch_size=7)


def check(work, text):
    """Run the checks before a job's start."""
    phases = parse(text.format("privacy=dp(noise_multiplier=1.1,delta=1e-3)"))
    workers = 1 if "remote" in text else 2  # which exchange nothing, or synchronize
    length = {"epochs": 1} if phases[0].strategy.rows.by_client else {"steps": 2}
    preflight(work, phases, JobSpec("x:Y", text, workers, **length))


def offered(told, layer, shape):
    """Return the layer that a refusal offers for such inputs."""
    if "track_running_stats=False" in told:
        assert type(layer).__name__ in told
        return type(layer)(layer.num_features, track_running_stats=False)
    texts = re.findall(r"torch\.nn\.(\w+)\(([\d, ]+)\)(?: for (?:features )?\[rows, (\d+)(, \.\.\.)?\])?", told)
    assert texts, told
    for kind, numbers, channels, more in texts:
        if not channels or bool(more) == (len(shape) > 2):
            return getattr(nn, kind)(*map(int, numbers.split(",")))
    raise AssertionError(told)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=NAMES)
def test_the_layer_that_is_offered_is_taken_and_keeps_its_input(layer, shape, way):
    with pytest.raises(ConfigError, match=rf"layer '0'.* a {type(layer).__name__}") as refused:
        check(Normed(layer, shape), way)
    new = offered(str(refused.value), layer, shape)
    work = Normed(new, shape)
    check(work, way)
    x = work.x()
    y = new(x)
    assert torch.allclose(new(x[:1]), y[:1], atol=1e-5)  # each row alone
    assert y.std(0).min() > 0.1 and len(y.round(decimals=3).unique()) > 10  # neither zero nor signs alone


@pytest.mark.parametrize("way", WAYS)
def test_synchronized_layers_are_refused_once(way):
    class Work(Normed):
        sync_batchnorm = True

    work = Work(nn.BatchNorm1d(6), [7, 6])
    with pytest.raises(ConfigError, match="set sync_batchnorm to False, and use layers that normalize each row alone"):
        check(work, way)
    work.sync_batchnorm, work.layer = False, nn.LayerNorm(6)
    check(work, way)


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (2, 1), (6, 3), (48, 24), (64, 32), (37, 1), (100, 25)])
def test_the_offered_group_norm_divides_the_channels(channels, groups):
    assert groups_for(channels) == groups and nn.GroupNorm(groups, channels)


def test_one_number_is_never_normalized_alone():
    with pytest.raises(ConfigError, match=r"no layer \(one number, normalized alone, is always 0\) for features"):
        check(Normed(nn.BatchNorm1d(1), [7, 1]), WAYS[0])


# ---- strategies of a user's own


class Public(Fed):
    """Evaluated on rows that are public."""

    def evaluation_data(self):
        return rayps.data.tensors(*rows(20, seed=9), batch_size=20)


def own(kind):
    """Return a class of a user's own that is derived from a strategy of rayps."""
    return type("Mine", (kind,), {"__module__": __name__})


def claimed(strategy, **more):
    """Return the claim of a small job, and its warnings."""
    first = strategy[0][1] if isinstance(strategy, list) else strategy
    answers = first.name == "statistics" or isinstance(first, CATALOGUE["statistics"])
    work = Pooled(*rows_of_hospitals()) if answers else Public()
    length = {"epochs": 2} if first.rows.by_client or isinstance(strategy, list) else {"steps": 2}
    result = train(work, strategy, **length, **more)
    return result, [event["message"] for event in result.events if event["kind"] == "warning"]


@pytest.mark.parametrize("name", PRIVATE)
def test_a_strategy_of_a_user_s_own_proves_nothing(name):
    spec = rayps.dp(**DP, **({"sampling": "all"} if CATALOGUE[name]().rows.by_client else {}))
    result, said = claimed(own(CATALOGUE[name])(privacy=spec))
    why = "Mine is a strategy of your own, whose code sees the drawn rows or clients"
    assert not result.privacy["proves"] and result.privacy["claim"].startswith(f"This run proves nothing: {why}")
    assert any(text.startswith(f"this run will prove nothing: {why}") for text in said)
    result, said = claimed(CATALOGUE[name](privacy=spec))
    assert result.privacy["proves"] and result.privacy["not_proven"] is None
    assert not any("prove nothing" in text for text in said)


class Telling(rayps.AllReduce):
    """Says in its metrics how many rows each step has drawn."""

    def round(self, w):
        batch = w.batch()
        w.say(drawn=float(batch.size))
        w.step(w.mean_grad(batch))


@pytest.mark.parametrize("after", [rayps.AllReduce, rayps.ParameterServer])
def test_no_later_phase_proves_what_an_earlier_one_has_told(after):
    result, _ = claimed([(1, Telling(privacy=rayps.dp(**DP))), after(privacy=rayps.dp(**DP))])
    assert result.history.column("drawn").to_pylist()[0] is not None
    assert not result.privacy["proves"] and "Telling is a strategy of your own" in result.privacy["claim"]


@pytest.mark.parametrize("first", ["own", "seeded"])
def test_no_later_phase_of_clients_proves_what_an_earlier_one_has_told(first):
    spec, seeded = rayps.dp(**DP), rayps.dp(**DP, noise="seeded")
    begin = own(rayps.FedAvg)(privacy=spec) if first == "own" else rayps.FedAvg(privacy=seeded)
    result, _ = claimed([(1, begin), rayps.FedAvg(privacy=spec)])
    assert not result.privacy["proves"]


def test_privacy_that_a_topology_of_one_s_own_drops_is_refused():
    class Dropped(rayps.AllReduce):
        topology = rayps.core.strategy.topology.Peers()

    with pytest.raises(ConfigError, match=r"private by only one .*without a topology of its own"):
        train(Public(), Dropped(privacy=rayps.dp(**DP)), steps=1)


# ---- loops of a user's own


@pytest.mark.parametrize("name", WITH_PRIVACY)
@pytest.mark.parametrize("mine", [False, True], ids=["rayps", "own"])
def test_wrap_refuses_privacy_with_one_reason(name, mine):
    remote = {} if accepts(name) else {"clients": "remote(least=3)"}
    kind = type("Mine", (CATALOGUE[name],), {"loop": "sync_gradients"}) if mine else CATALOGUE[name]
    try:
        strategy = kind(privacy=rayps.dp(**DP), **remote)
    except ConfigError:
        assert name in ("scaffold", "fedbuff")  # never private
        return
    with pytest.raises(ConfigError, match=r"with privacy.*use rayps\.train.*or leave out privacy") as refused:
        parse_for_loop(strategy)
    assert "or one of" not in str(refused.value)
