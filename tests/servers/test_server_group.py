"""A parameter server of one's own, on a cluster of threads."""

import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rayps_client.errors import ConfigError, PeerLost, PeerTimeout, RaypsError, StaleGeneration, WorkloadError
from torch.optim import SGD, Adafactor, Adam

import rayps
from rayps.cluster.local import LocalCluster, surrounding


def group(params, **options):
    return rayps.ServerGroup(params, cluster=LocalCluster(), timeout=options.pop("timeout", 10.0), **options)


def every(work, count):
    with ThreadPoolExecutor(count) as pool:
        return [call.result(60) for call in [pool.submit(work, rank) for rank in range(count)]]


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_a_tensor_of_any_shape(shards):
    start = torch.arange(6.0).view(2, 3)
    with group(start, shards=shards) as shared:
        one = shared.join(0)
        assert torch.equal(one.pull(), start)
        one.push(torch.ones(2, 3))
        assert torch.equal(one.pull(), start - 1)
        assert torch.equal(one.push_pull(torch.ones(2, 3)), start - 2)
        assert torch.equal(one.read(), start - 2)
        assert one.step == 2
        one.close()
    assert torch.equal(start, torch.arange(6.0).view(2, 3))


def test_a_state_dict():
    model = torch.nn.Linear(3, 2)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with group(model.state_dict(), shards=2, optimizer=lambda p: SGD(p, lr=0.5)) as shared:
        one = shared.join(0)
        model(torch.ones(1, 3)).sum().backward()
        one.push({name: p.grad for name, p in model.named_parameters()})
        found = one.pull()
        assert list(found) == ["weight", "bias"]
        for name, p in model.named_parameters():
            assert torch.allclose(found[name], start[name] - 0.5 * p.grad)
        model.load_state_dict(found)


def test_ranges():
    with group(torch.zeros(10), shards=3) as shared:
        one = shared.join(0)
        one.push(torch.ones(4), lo=3)
        assert torch.equal(one.pull(2, 8), torch.tensor([0.0, -1, -1, -1, -1, 0]))
        assert torch.equal(one.pull(lo=9), torch.zeros(1))
        assert torch.equal(one.pull(hi=4), torch.tensor([0.0, 0, 0, -1]))


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.push(torch.ones(9)),
        lambda one: one.push(torch.ones(11)),
        lambda one: one.push(torch.ones(4), lo=7),
        lambda one: one.push(torch.ones(4), lo=-1),
        lambda one: one.pull(3, 11),
        lambda one: one.pull(-1, 3),
        lambda one: one.push({"w": torch.ones(10)}),
    ],
    ids=range(7),
)
def test_what_does_not_fit(call):
    with group(torch.zeros(10), shards=2) as shared:
        one = shared.join(0)
        with pytest.raises(ConfigError):
            call(one)
        assert torch.equal(one.pull(), torch.zeros(10))
        assert one.step == 0


def test_a_state_dict_that_lacks_something():
    with group({"a": torch.zeros(2), "b": torch.zeros(3)}) as shared:
        one = shared.join(0)
        for wrong in (
            {"a": torch.ones(2)},
            {"a": torch.ones(2), "b": torch.ones(4)},
            {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)},
        ):
            with pytest.raises(ConfigError):
                one.push(wrong)


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_several_workers(staleness):
    with group(torch.zeros(5, dtype=torch.float64), shards=2, staleness=staleness, workers=3) as shared:

        def work(rank):
            one = pickle.loads(pickle.dumps(shared)).join(rank)  # as an actor gets it
            for _ in range(10):
                one.pull()
                time.sleep(random.random() * 0.003)
                one.push(torch.full((5,), float(rank)), weight=2.0)
            return one.pull() if staleness == 0 else None

        found = every(work, 3)
        final = shared.join(0).read()
        assert torch.allclose(final, torch.full((5,), -10.0, dtype=torch.float64))  # ten times the mean of 0, 1, 2
        if staleness == 0:
            assert all(torch.equal(value, final) for value in found)


def test_means_are_weighted():
    with group(torch.zeros(2), workers=2) as shared:

        def work(rank):
            return shared.join(rank).push_pull(torch.full((2,), rank * 4.0), weight=[3.0, 1.0][rank])

        assert all(torch.equal(value, torch.full((2,), -1.0)) for value in every(work, 2))


def test_a_rank_can_be_taken_over():
    with group(torch.zeros(2), staleness=None, workers=2) as shared:
        old = shared.join(1)
        old.push(torch.ones(2))
        new = shared.join(1)
        assert new.step == 1
        with pytest.raises(StaleGeneration):
            old.push(torch.ones(2))
        new.push(torch.ones(2))
        assert torch.equal(new.read(), torch.full((2,), -1.0))


def test_a_pull_names_whom_it_waits_for():
    with group(torch.zeros(2), workers=3, timeout=0.3) as shared:
        one = shared.join(2)
        shared.join(0)
        one.push(torch.ones(2))
        with pytest.raises(PeerTimeout, match="rank 0, rank 1"):
            one.pull()


def test_only_the_maker_ends_it():
    with group(torch.zeros(2)) as shared:
        copy = pickle.loads(pickle.dumps(shared))
        copy.close()
        assert torch.equal(copy.join(0).pull(), torch.zeros(2))
    with pytest.raises(RaypsError):
        copy.timeout = 0.2
        copy.join(0)


def test_the_secret_keeps_strangers_out():
    with group(torch.zeros(2)) as shared:
        other = pickle.loads(pickle.dumps(shared))
        other._fixed.map.secret = b"x" * 32
        other.timeout = 0.5
        with pytest.raises(RaypsError):
            other.join(0)


@pytest.mark.parametrize(
    ("params", "options", "error", "words"),
    [
        (torch.zeros(2), {"shards": 0}, ConfigError, ["shards"]),
        (torch.zeros(2), {"staleness": -1}, ConfigError, ["staleness"]),
        (torch.zeros(2), {"workers": 0}, ConfigError, ["workers"]),
        (torch.zeros(2), {"workers": 1.5}, ConfigError, ["workers"]),
        (torch.zeros(4, 4), {"optimizer": lambda p: Adafactor(p)}, WorkloadError, ["not elementwise"]),
        (torch.zeros(4), {"optimizer": lambda p: None}, WorkloadError, ["NoneType"]),
        (torch.zeros(4), {"optimizer": SGD([torch.zeros(1)], lr=1)}, RaypsError, []),
        (torch.zeros(4, dtype=torch.int64), {}, ConfigError, ["int64", "float"]),
        ({"a": torch.zeros(2), "b": torch.zeros(2).double()}, {}, ConfigError, ["float32", "float64"]),
        ({}, {}, ConfigError, ["params"]),
        (torch.zeros(0), {}, ConfigError, ["params"]),
        ([1, 2], {}, ConfigError, ["params", "list"]),
        ({"a": 3}, {}, ConfigError, ["params", "a"]),
    ],
)
def test_bad_input(params, options, error, words):
    with pytest.raises(error) as caught:
        group(params, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 2, 1.0, None, True])
def test_ranks_that_are_none(rank):
    with group(torch.zeros(2), workers=2) as shared, pytest.raises(ConfigError, match="rank"):
        shared.join(rank)


def test_the_optimizer_is_torchs_own():
    start = torch.randn(9, dtype=torch.float64)
    law = torch.nn.Parameter(start.clone())
    optimizer = Adam([law], lr=0.1)
    with group(start, shards=4, optimizer=lambda p: Adam(p, lr=0.1)) as shared:
        one = shared.join(0)
        for _ in range(5):
            law.grad = torch.randn(9, dtype=torch.float64)
            optimizer.step()
            one.push(law.grad)
        assert torch.allclose(one.pull(), law.detach(), atol=1e-15)


# ---- on an elastic group


@pytest.fixture
def elastic():
    cluster = LocalCluster()

    def make(params, **options):
        return rayps.ServerGroup(
            params, cluster=cluster, timeout=options.pop("timeout", 20.0), **{"shards": 2, "replicas": 1} | options
        )

    yield make
    cluster.close()


def test_elastic_it_is_used_in_the_same_way(elastic):
    start = torch.arange(12.0).view(3, 4)
    with elastic(start, segments=3) as shared:
        one = shared.join(0)
        assert torch.equal(one.pull(), start)
        one.push(torch.ones(3, 4))
        assert torch.equal(one.pull(), start - 1)
        assert torch.equal(one.push_pull(torch.ones(3, 4)), start - 2)
        one.push(torch.ones(5), lo=3)
        expected = (start - 2).reshape(-1)
        expected[3:8] -= 1
        assert torch.equal(one.pull(2, 9), expected[2:9])
        assert torch.equal(one.read(), expected.view(3, 4))
        one.flush()
        assert one.step == 3
        assert torch.equal(one.pull(torch.tensor([2, 0])), expected.view(3, 4)[[2, 0]])
        with pytest.raises(ConfigError):
            one.push(torch.ones(13))
    with elastic({"a": torch.zeros(2), "b": torch.zeros(2, 3)}) as shared:
        found = shared.join(0).push_pull({"a": torch.ones(2), "b": torch.ones(2, 3)})
        assert torch.equal(found["b"], -torch.ones(2, 3))


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_elastic_several_workers_and_means_by_weight(elastic, staleness):
    with elastic(torch.zeros(50, dtype=torch.float64), staleness=staleness, workers=3) as shared:

        def work(rank):
            one = shared.join(rank)
            for _ in range(10):
                one.pull()
                one.push(torch.full((50,), float(rank)), weight=2.0)
            one.flush()

        every(work, 3)
        assert torch.allclose(shared.join(0).read(), torch.full((50,), -10.0, dtype=torch.float64))
    with elastic(torch.zeros(2), workers=2) as shared:

        def weighted(rank):
            return shared.join(rank).push_pull(torch.full((2,), rank * 4.0), weight=[3.0, 1.0][rank])

        assert all(torch.equal(value, torch.full((2,), -1.0)) for value in every(weighted, 2))


def test_elastic_a_rank_can_be_taken_over(elastic):
    with elastic(torch.zeros(9), staleness=None, workers=2) as shared:
        old = shared.join(1)
        old.push(torch.ones(9))
        new = shared.join(1)
        assert new.step == 1
        with pytest.raises(StaleGeneration):
            old.push(torch.ones(9))
        new.push(torch.ones(9))
        assert torch.equal(new.read(), torch.full((9,), -1.0))


def test_elastic_a_pull_names_whom_it_waits_for(elastic):
    with elastic(torch.zeros(9), workers=3, timeout=0.5) as shared:
        one = shared.join(2)
        shared.join(0)
        one.push(torch.ones(9))
        with pytest.raises(PeerTimeout, match="rank 0, rank 1"):
            one.pull()


def test_elastic_it_is_passed_to_actors():
    with rayps.ServerGroup(torch.zeros(9), shards=2, replicas=1, timeout=60.0, cluster=surrounding()) as shared:
        copy = pickle.loads(pickle.dumps(shared))
        copy.close()  # which ends nothing
        assert torch.equal(copy.join(0).push_pull(torch.ones(9)), -torch.ones(9))


def test_what_only_an_elastic_group_can(elastic):
    with group(torch.zeros(4)) as fixed:
        assert fixed.group is None and fixed.space is None
        for call in (lambda: fixed.resize(4), fixed.branch):
            with pytest.raises(ConfigError, match="replicas=1"):
                call()
    with elastic(torch.zeros(40)) as shared:
        with pytest.raises(ConfigError):
            shared.resize(0)
        with pytest.raises(ConfigError):
            shared.resize(1)  # nobody would have the copies
        shared.resize(3)
        shared.wait_settled()
        assert len(shared.facts()["servers"]) == 3


def keys(found):
    """The keys of facts, also of the servers, spaces and segments that they list."""
    lists = {key: value for key, value in found.items() if key in ("servers", "spaces", "segments")}
    return found.keys(), {key: [keys(each) for each in value[:1]] for key, value in lists.items()}


def test_facts_of_fixed_servers_have_the_keys_of_an_elastic_group(elastic):
    with group(torch.zeros(40), shards=2) as fixed, elastic(torch.zeros(40)) as moving:
        found, other = pickle.loads(pickle.dumps(fixed)).facts(), moving.facts()
        assert keys(found) == keys(other)
        assert found["status"] == "ready" and sum(server["bytes"] for server in found["servers"]) == 160
        fixed.wait_settled()
        fixed._cluster.kill(fixed._handles[1])
        found = fixed.facts()
        assert found["status"] == "degraded" and [each["state"] for each in found["servers"]] == ["alive", "dead"]
        with pytest.raises(PeerLost, match=r"shard-1.*replicas=1"):
            fixed.wait_settled()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shards": 1}, "replicas"),
        ({"replicas": -1}, "replicas"),
        ({"replicas": 2}, "replicas"),
        ({"group": "there-is-none"}, "leave out"),
        ({"group": "there-is-none", "replicas": None}, "there-is-none"),
        ({"compression": "zip"}, "compression"),
        ({"segments": 0}, "segments"),
        ({"segments": 99}, "segments"),
        ({"replicas": None, "segments": 3}, "segments is for an elastic group"),
    ],
    ids=str,
)
def test_bad_input_of_an_elastic_group(elastic, options, words):
    with pytest.raises(ConfigError, match=words):
        elastic(torch.zeros(9), **options)
