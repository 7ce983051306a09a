"""Encoded pushes: their slow twin is one process that encodes, decodes and steps; and several lines at once."""

import threading
import time

import pytest
import static_servers
import torch
from rayps_client.errors import ConfigError, LinkError, PeerLost
from small_work import Small, distance, plain, train
from test_server import every
from torch.optim import SGD

from rayps import AllReduce, ParameterServer
from rayps.cluster.local import LocalCluster, until
from rayps.comm.compress import ErrorFeedback, find_codec
from rayps.ps.client.client import compress
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.protocol.pieces import Extent, make_coded_piece
from rayps.ps.server_group import ServerGroup
from rayps.tensors.flat import Gradient

N = 3001
NAMES = ["fp16", "bf16", "int8", "top_k:0.05"]


class House(static_servers.House):
    """Shards of N zeros, and workers whose pushes may be encoded."""

    def __init__(self, shards, workers, staleness, dtype=torch.float32, prefer="auto", n=N):
        self.prefer = prefer
        layout, strategy = static_servers.vector_layout(n, dtype), ParameterServer(shards, staleness)
        super().__init__(layout, torch.zeros(n, dtype=dtype), shards, workers, strategy, lambda p: SGD(p, lr=1.0))

    def join(self, rank, name=None, **options):
        server = super().join(rank, prefer=self.prefer, **options)
        if name is not None:
            compress(server, name)
        return server

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def gradient(rank, step, dtype=torch.float32, n=N):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)


def through(memory, vector, ranges):
    """What shards hear of a push."""
    return torch.cat([memory.codec.decode(memory.encode(vector[a:b], a), b - a, vector.dtype) for a, b in ranges])


@pytest.mark.parametrize("prefer", ["shm", "tcp"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_in_step_shards_step_by_the_mean_of_what_was_decoded(name, dtype, shards, prefer):
    samples = [3, 0, 5]
    with House(shards, 3, 0, dtype, prefer) as house:

        def work(rank):
            server = house.join(rank, name, defer=True)
            for step in range(5):
                server.pull()
                server.push(
                    Gradient(
                        torch.cat([gradient(rank, step, dtype), torch.zeros(1, dtype=dtype)]),
                        samples[(rank + step) % 3],
                    )
                )
            found = server.pull()
            server.close()
            return found

        found = every(work, 3)
        memories = [ErrorFeedback(find_codec(name), N, dtype) for _ in range(3)]
        law = torch.zeros(N, dtype=dtype)
        for step in range(5):
            heard = [
                (samples[(rank + step) % 3], through(memories[rank], gradient(rank, step, dtype), house.ranges))
                for rank in range(3)
                if samples[(rank + step) % 3]
            ]
            law = law - sum(weight / 8 * value for weight, value in heard)
        digits = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 0}
        assert all(torch.equal(other, found[0]) for other in found)
        assert torch.allclose(found[0], law, **digits)


@pytest.mark.parametrize("name", NAMES)
def test_pushed_ranges_have_their_own_memory(name):
    with House(3, 1, None) as house:
        server, memory = house.join(0, name), ErrorFeedback(find_codec(name), N, torch.float32)
        law = torch.zeros(N)
        for lo, hi in ((0, N), (10, 20), (900, 2100), (N - 1, N), (0, N), (500, 500)):
            vector = gradient(0, lo + hi, n=hi - lo)
            server.push(vector, lo=lo)
            for a, b in house.ranges:
                a, b = max(a, lo), min(b, hi)
                if a < b:
                    data = memory.encode(vector[a - lo : b - lo], a)
                    law[a:b] -= memory.codec.decode(data, b - a, torch.float32)
        assert torch.allclose(server.pull(), law, atol=1e-6)
        server.close()


def test_what_was_pushed_adds_up_but_for_what_is_remembered():
    with House(2, 1, None) as house:
        server = house.join(0, "top_k:0.01", defer=True)
        for step in range(30):
            server.push(gradient(0, step))
        meant = sum(gradient(0, step).double() for step in range(30))
        assert torch.allclose(-server.pull().double(), meant - server.feedback.residual.double(), atol=1e-4)
        server.close()


def test_a_push_without_samples_keeps_what_is_remembered():
    with House(1, 1, None) as house:
        server = house.join(0, "int8")
        server.push(gradient(0, 0))
        rest = server.feedback.residual.clone()
        server.push(torch.full((N,), float("nan")), weight=0.0)
        assert torch.equal(server.feedback.residual, rest)
        assert server.pull().isfinite().all()
        server.close()


@pytest.mark.parametrize(("name", "share"), [("fp16", 0.51), ("int8", 0.27), ("top_k", 0.04)])
@pytest.mark.parametrize("prefer", ["shm", "tcp"])
def test_a_push_is_fewer_bytes(name, share, prefer):
    with House(2, 1, None, prefer=prefer) as house:
        server = house.join(0, name)
        server.push(gradient(0, 0))
        assert server.bytes_moved <= share * 4 * N
        server.close()


def test_a_repeated_push_is_applied_once_and_the_same_bytes():
    with House(1, 1, None) as house:
        server = house.join(0, "int8")
        vector = gradient(0, 0)
        server.push(vector)
        first = server.pull()
        server.step = 0  # as a worker that has not heard of the acknowledgement
        server.push(vector)
        assert torch.equal(server.pull(), first)
        server.close()


def test_payloads_that_are_wrong_are_refused():
    memory, layout = ErrorFeedback(find_codec("fp16"), 4, torch.float32), static_servers.vector_layout(4, torch.float32)
    extent, whole = Extent(layout, 0, 4), bytes(make_coded_piece(memory, torch.ones(4), 0, 0, 1.0, 16))
    assert torch.equal(extent.read_push(memoryview(whole)).value, torch.ones(4))
    with pytest.raises(ValueError):
        extent.read_push(memoryview(bytes(10)))
    with pytest.raises((ConfigError, ValueError)):
        extent.read_push(memoryview(whole[:-2]))
    with pytest.raises(ConfigError, match="unknown code 77"):
        extent.read_push(memoryview(whole[:24] + (77).to_bytes(8, "little") + whole[32:]))
    with House(1, 1, None, n=4) as house:
        server = house.join(0)
        with pytest.raises(LinkError):
            server.session.exchange(GroupMessage.PUSH, {0: whole[:-2]}, step=0, weight=1.0)
        assert torch.equal(server.read(), torch.zeros(4))


def test_auto_leaves_pushes_as_they_are_where_shards_read_them_in_shared_memory():
    with House(2, 1, None) as house:
        server = house.join(0)
        facts = compress(server, "auto")
        assert facts["compression"] == "off"
        assert server.feedback is None
        assert "on this host" in facts["message"]
        server.close()


def test_auto_says_what_it_measured():
    with House(2, 1, None, n=200_000, prefer="tcp") as house:
        server = house.join(0)
        facts = compress(server, "auto")
        assert (server.feedback is None) == (facts["compression"] == "off")
        assert set(facts["seconds"]) == {"off", "fp16", "int8"}
        assert "200000 elements took" in facts["message"]
        server.close()


def test_auto_encodes_where_the_line_is_slow():
    with House(1, 1, None, n=2000, prefer="tcp") as house:
        server = house.join(0)
        read = server.read
        server.read = lambda lo, hi: (time.sleep(0.2), read(lo, hi))[1]
        facts = compress(server, "auto")
        assert facts["compression"] in ("fp16", "int8")
        assert server.feedback is not None
        server.close()


# ---- several lines at once


def test_pushes_and_pulls_larger_than_any_socket_holds():
    n = 6_000_000
    with House(3, 1, None, prefer="tcp", n=n) as house:
        server = house.join(0, defer=True)
        ones = torch.ones(n)
        for _ in range(2):
            server.push(ones)
            server.pull()
        assert torch.equal(server.pull(), -2 * ones)
        server.close()


def test_one_shard_that_dies_among_several_is_named():
    with House(3, 1, None, prefer="tcp", n=300_000) as house:
        server = house.join(0)
        house.loops[1].close()
        with pytest.raises(PeerLost, match="shard-1"):
            for _ in range(5):
                server.push(torch.ones(300_000))
                server.pull()
        server.close()


def test_all_lines_move_while_one_is_slow():
    """A shard that reads slowly keeps the others' requests from nobody: they are served meanwhile."""
    with House(2, 1, None, prefer="tcp", n=4_000_000) as house:
        server = house.join(0)
        free = threading.Event()
        busy = threading.Thread(target=lambda: house.loops[0].do(lambda _: free.wait(60)))
        busy.start()  # its socket takes what it can, and no more
        pushes = threading.Thread(target=lambda: server.push(torch.ones(4_000_000)))
        pushes.start()
        assert until(lambda: house.loops[1].facts().version == 1, 60)
        assert pushes.is_alive()
        free.set()
        for thread in (busy, pushes):
            thread.join(60)
        assert house.loops[0].facts().version == 1


# ---- training


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServer(shards=2, compression="fp16"),
        ParameterServer(compression="int8"),
        ParameterServer(shards=3, compression="top_k:0.2"),
        ParameterServer(staleness=2, compression="int8"),
        ParameterServer(shards=2, staleness=None, compression="bf16"),
    ],
    ids=str,
)
def test_training_stays_near_the_law(strategy):
    work = Small(n=96, batch=4)
    result = train(work, strategy, workers=3, epochs=6)
    model, _, evaluations = plain(work, 3, epochs=6)
    assert result.metrics["loss"] == pytest.approx(evaluations[-1], rel=0.05 if strategy.topology.in_step else 0.25)
    assert distance(result.model(), model) > 0
    chosen = [event for event in result.events if "compression" in event]
    assert [event["compression"] for event in chosen] == [strategy.compression] * 3


def test_in_step_server_and_ring_take_nearly_the_same_course():
    work = Small(n=37, batch=3, optimizer="momentum")
    results = [
        train(work, strategy, workers=4, epochs=3).model()
        for strategy in (AllReduce(compression="fp16"), ParameterServer(shards=2, compression="fp16"))
    ]
    assert distance(*results) < 1e-3


@pytest.mark.parametrize("more", [{}, {"shards": 2, "replicas": 1, "segments": 1}], ids=["fixed", "elastic"])
def test_a_group_of_ones_own_may_compress(more):
    with ServerGroup(torch.zeros(N), staleness=None, compression="int8", cluster=LocalCluster(), **more) as group:
        server = group.join(0)
        vector, memory = gradient(0, 0), ErrorFeedback(find_codec("int8"), N, torch.float32)
        assert torch.equal(server.push_pull(vector), -through(memory, vector, [(0, N)]))
        server.close()
    with pytest.raises(ConfigError, match="zip"):
        ServerGroup(torch.zeros(N), compression="zip", cluster=LocalCluster())
