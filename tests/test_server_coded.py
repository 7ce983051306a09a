"""Encoded pushes: their slow twin is one process that encodes, decodes and steps; and several lines at once."""

import socket
import time

import pytest
import torch
from small_work import Small, distance, plain, train
from test_server import SECRET, every
from torch.optim import SGD

from rayps import AllReduce, ParameterServer
from rayps.cluster.local import LocalCluster
from rayps.comm.compress import ErrorFeedback, codec
from rayps.comm.link import Listener, Message, connect
from rayps.core.calendar import Boundary
from rayps.core.errors import ConfigError, PeerLost
from rayps.core.partition import slices
from rayps.ps.client.compressed import compress
from rayps.ps.fixed import Server, ShardLoop
from rayps.ps.fixed.coded import coded, value_of
from rayps.ps.fixed.messages import ShardMessage
from rayps.ps.fixed.shard import Shard
from rayps.ps.server_group import ServerGroup
from rayps.tensors.flat import Gradient, Layout

N = 3001
NAMES = ["fp16", "bf16", "int8", "top_k:0.05"]


class House:
    """Shards of N zeros, and workers whose pushes may be encoded."""

    def __init__(self, shards, workers, staleness, dtype=torch.float32, prefer="auto", n=N):
        self.ranges = [(cut.start, cut.stop) for cut in slices(n, shards)]
        self.dtype, self.prefer = dtype, prefer
        layout = Layout.of([("w", torch.empty(n, dtype=dtype))])
        self.listeners = [Listener(f"shard-{i}", SECRET, 1) for i in range(shards)]
        self.loops = [
            ShardLoop(
                Shard(
                    i,
                    layout,
                    lo,
                    hi,
                    params=torch.zeros(hi - lo, dtype=dtype),
                    factory=lambda p: SGD(p, lr=1.0),
                    strategy=ParameterServer(shards, staleness),
                    start=[0] * workers,
                    boundary=Boundary(0, -1),
                ),
                listener,
            )
            for i, ((lo, hi), listener) in enumerate(zip(self.ranges, self.listeners, strict=True))
        ]

    def join(self, rank, name=None, **options):
        links = [
            connect(door.address, name=f"worker-{rank}", secret=SECRET, generation=1, timeout=60.0, prefer=self.prefer)
            for door in self.listeners
        ]
        server = Server(rank, self.dtype, self.ranges, links, timeout=60.0, **options)
        if name is not None:
            compress(server, name)
        return server

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for loop in self.loops:
            loop.close()
        for listener in self.listeners:
            listener.close()


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
        memories = [ErrorFeedback(codec(name), N, dtype) for _ in range(3)]
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
        server, memory = house.join(0, name), ErrorFeedback(codec(name), N, torch.float32)
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
    memory = ErrorFeedback(codec("fp16"), 4, torch.float32)
    whole = coded(memory, torch.ones(4), 0, 1.0)
    assert torch.equal(value_of(memoryview(whole.numpy()), torch.float32), torch.ones(4))
    with pytest.raises(ValueError, match="10 bytes"):
        value_of(bytearray(10), torch.float32)
    with pytest.raises(ConfigError, match="do not hold"):
        value_of(bytearray(whole[:-1].numpy().tobytes()), torch.float32)
    with pytest.raises(ConfigError, match="unknown code 77"):
        value_of(bytearray((77).to_bytes(8, "little") + bytes(8)), torch.float32)
    with House(1, 1, None) as house:
        link = connect(house.listeners[0].address, name="worker-0", secret=SECRET, generation=1, timeout=60.0)
        link.send(Message(ShardMessage.JOIN, tag=1, a=0, b=-1, weight=5.0), timeout=60.0)
        assert link.recv(timeout=60.0).kind == ShardMessage.ACK
        link.send(Message(ShardMessage.PUSH_CODED, tag=2, a=0, weight=1.0), whole.numpy()[:-1], timeout=60.0)
        assert link.recv(timeout=60.0).kind == ShardMessage.ERROR
        link.close()


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
        for way in server._turns._ways:
            way.link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        slow, versions = server._turns._ways[0], []
        advance = slow.advance

        def late(tag, into):
            versions.append(house.loops[1].facts().version)
            if len(versions) < 200 and not versions[-1]:
                time.sleep(0.01)
                return False
            return advance(tag, into)

        slow.advance = late
        server.push(torch.ones(4_000_000))
        assert versions[-1] == 1  # the second shard had its push whole before the first line moved on
        server.close()


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
        vector, memory = gradient(0, 0), ErrorFeedback(codec("int8"), N, torch.float32)
        assert torch.equal(server.push_pull(vector), -through(memory, vector, [(0, N)]))
        server.close()
    with pytest.raises(ConfigError, match="zip"):
        ServerGroup(torch.zeros(N), compression="zip", cluster=LocalCluster())
