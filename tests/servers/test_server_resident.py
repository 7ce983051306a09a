"""Workers and shards that share memory: the same bits as by message, no torn pull, nobody spoils what counts."""

import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import static_servers
import torch
from rayps_client.errors import PeerLost, PeerTimeout, StaleGeneration
from torch.optim import SGD, Adam

from rayps.cluster.local import until
from rayps.comm.link.memory import Memory
from rayps.ps.client.whole_exchange import WholeExchangePart
from rayps.ps.protocol import mailbox
from rayps.ps.protocol.messages import GroupMessage
from rayps.ps.server.dense_segment import DenseSegment
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Layout

pytestmark = pytest.mark.skipif(not mailbox.AVAILABLE, reason="memory is shared on Linux on x86 only")


class House(static_servers.House):
    """Some shards of n elements, and the ways to them."""

    def __init__(self, n, shards=2, workers=2, staleness=None, dtype=torch.float32, factory=None, strategy=None):
        self.n, self.dtype = n, dtype
        layout = Layout.of([("a", torch.empty(n // 3, dtype=dtype)), ("b", torch.empty(n - n // 3, dtype=dtype))])
        super().__init__(
            layout,
            torch.arange(n).remainder(64).to(dtype),
            shards,
            workers,
            strategy or ParameterServer(shards=shards, staleness=staleness),
            factory or (lambda p: SGD(p, lr=0.5)),
        )

    def join(self, rank, **options):
        return super().join(rank, **{"defer": True, "consistent": True} | options)


@pytest.fixture
def house():
    with ExitStack() as stack:

        def make(*args, **more):
            made = House(*args, **more)
            stack.callback(made.close)
            return made

        yield make


def numbers(seed, n, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ways(server):
    return list(static_servers.lines(server).values())


# ---- the slow twin: messages


def script(seed, n, steps=25):
    """What one worker does, as (verb, lo, hi, seed of the values)."""
    chance = random.Random(seed)
    for number in range(steps):
        lo, hi = (0, n) if chance.random() < 0.5 else sorted(chance.sample(range(n + 1), 2))
        verb = chance.choice(["push", "pull", "read", "push_pull", "push_pull", "resident"])
        yield verb, lo, hi, 1000 * seed + number


def play(server, n, dtype, seed):
    """Everything that a worker sees in its script."""
    seen, out = [], torch.empty(n, dtype=dtype)
    mine = server.buffer(n, dtype)
    for verb, lo, hi, number in script(seed, n):
        value = numbers(number, hi - lo, dtype)
        if verb == "push":
            server.push(value, lo=lo)
        elif verb == "pull":
            seen.append(server.pull(lo, hi).clone())
        elif verb == "read":
            seen.append(server.read())
        elif verb == "push_pull":
            server.push(value, weight=2.0, lo=lo)
            seen.append(server.pull(out=out).clone())
        else:
            server.settle()
            mine[lo:hi] = value
            server.push(mine[lo:hi], lo=lo)
            seen.append(server.pull().clone())
        if verb != "push":
            value.zero_()  # what was pushed is the server's, once another call has returned
    server.settle()
    return [*seen, server.read(), torch.tensor([server.step, server.lead])]


FACTORIES = {
    "sgd": lambda p: SGD(p, lr=0.25),
    "momentum": lambda p: SGD(p, lr=0.25, momentum=0.5),
    "adam": lambda p: Adam(p, lr=0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("staleness", [0, 2, None])
@pytest.mark.parametrize("shards", [1, 3])
def test_memory_and_messages_show_the_same_bits(house, dtype, staleness, shards):
    for seed, factory in enumerate(FACTORIES.values()):
        found = []
        for shared in (True, False):
            one = house(101, shards, 1, staleness, dtype, factory)
            server = one.join(0, resident=shared)
            assert server.shares_memory is shared
            found.append(play(server, one.n, dtype, seed))
        assert len(found[0]) == len(found[1])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("staleness", [0, 1])
def test_workers_by_memory_and_by_message_learn_together(house, staleness):
    one = house(1000, 2, 3, staleness, torch.float64)

    def work(rank):
        server, seen = one.join(rank, resident=rank != 1, prefer="tcp" if rank == 2 else "auto"), []
        for step in range(15):
            time.sleep(random.random() * 0.003)
            server.push(numbers(100 * step + rank, 1000, torch.float64))
            seen.append(server.pull())
        server.settle()
        return seen

    with ThreadPoolExecutor(3) as pool:
        found = [call.result(60) for call in [pool.submit(work, rank) for rank in range(3)]]
    law = one.start - 0.5 / 3 * sum(
        numbers(100 * step + rank, 1000, torch.float64) for step in range(15) for rank in range(3)
    )
    assert torch.allclose(one.servers[0].read(), law, atol=1e-12, rtol=0)
    if staleness == 0:
        for step in range(15):
            assert all(torch.equal(seen[step], found[0][step]) for seen in found)


def test_more_shards_than_elements(house):
    one = house(3, 5, 1)
    server = one.join(0)
    server.push(torch.ones(3))
    assert torch.equal(server.pull(), one.start - 0.5)


def test_a_gradient_of_another_kind_is_converted_and_one_that_needs_a_gradient_is_taken(house):
    server = house(8, 2, 1).join(0)
    server.push(torch.ones(2, 4, dtype=torch.float64).t(), 1.0)
    server.push(torch.full((8,), 2.0, requires_grad=True) * 1)
    assert torch.equal(server.pull(), torch.arange(8.0) - 1.5)


# ---- no copy where none is needed


def test_what_lies_in_the_buffer_is_not_copied(house, monkeypatch):
    one = house(1000, 2, 1)
    server = one.join(0)
    mine = server.buffer(1001, torch.float32)
    assert torch.equal(mine, torch.zeros(1001))
    lent, own = [], DenseSegment.push
    monkeypatch.setattr(
        DenseSegment,
        "push",
        lambda self, rank, step, weight, data: (lent.append(data), own(self, rank, step, weight, data))[1],
    )
    mine[:1000] = 3.0
    server.push(mine[:1000])
    assert torch.equal(server.pull(), one.start - 1.5)
    assert torch.equal(mine[:1000], torch.full((1000,), 3.0))  # the shards only read it
    mine[:1000] = 5.0
    assert len(lent) == 2 and all((piece == 5.0).all() for piece in lent)  # they were given the memory itself


def test_a_buffer_of_another_kind_is_ordinary_memory(house):
    one = house(10, 1, 1)
    server, far = one.join(0), one.join(0, resident=False)
    for given in (server.buffer(12, torch.float32), server.buffer(4, torch.float64), far.buffer(10, torch.float32)):
        assert (given == 0).all()
        assert not server.session.shared.buffer().holds(given, 0)
    assert far.buffer(10, torch.float32).data_ptr() != server.buffer(10, torch.float32).data_ptr()


def test_the_memory_of_a_gradient_that_is_never_pushed_is_never_taken(house):
    one = house(8_000_000, 1, 1)
    before = resident_bytes()
    server = one.join(0)
    assert resident_bytes() - before < 4_000_000
    out = torch.zeros(one.n)
    before = resident_bytes()
    mine = server.buffer(one.n, torch.float32)
    mine.fill_(1.0)
    server.push(mine)
    server.pull(out=out)
    # the gradient itself, and the shard's parameters, which this process now maps as a worker; no second gradient
    assert resident_bytes() - before < 3 * 32_000_000


def resident_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def descriptors():
    return sorted(str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())


def test_a_worker_cannot_write_the_parameters(house):
    one = house(10, 1, 1)
    server = one.join(0)
    server.push(torch.ones(10))
    server.pull()
    words, params = ways(server)[0].mailbox.slice(0)
    assert not params.flags.writeable
    with pytest.raises((TypeError, ValueError)):
        words[0] = 1
    with pytest.raises(PermissionError):
        Memory.attach(os.dup(one.loops[0].shard.slice.memory.fd), 4096)


# ---- torn pulls


class Alternates(SGD):
    """Its steps write one of two constant vectors, slowly, so that a reader may see both."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                value = 1.0 - p.data[-1].item()
                for part in p.data.chunk(8):
                    part.fill_(value)
                    time.sleep(0.0003)


def tear(one, readers, seconds=1.5, **options):
    """Let rank 0 push while the others pull: of their pulls, how many were mixed and how many there were."""
    until_then = time.monotonic() + seconds
    writer = one.join(0)

    def read(rank):
        server, out, mixed, count = one.join(rank, **options), torch.empty(one.n), 0, 0
        while time.monotonic() < until_then:
            server.pull(out=out)
            mixed += bool(out.min() != out.max())
            count += 1
        return mixed, count

    with ThreadPoolExecutor(readers) as pool:
        calls = [pool.submit(read, rank + 1) for rank in range(readers)]
        while time.monotonic() < until_then:
            writer.push(torch.ones(one.n))
            writer.settle()
        found = [call.result(60) for call in calls]
    return sum(mixed for mixed, _ in found), sum(count for _, count in found)


def alternating(house, staleness):
    one = house(2400, 2, 3, staleness, factory=lambda p: Alternates(p, lr=0.1))
    for loop in one.loops:
        loop.do(lambda shard: shard.params.zero_())
    return one


def test_no_consistent_pull_mixes_two_versions(house):
    one = alternating(house, None)
    mixed, count = tear(one, 2, consistent=True)
    assert mixed == 0 and count > 5
    assert one.loops[0].facts().version > 20


def test_an_inconsistent_pull_may_mix(house):
    mixed, count = tear(alternating(house, None), 2, consistent=False)
    assert 0 < mixed < count  # else the test above would prove nothing


def test_out_of_step_with_a_bound_no_pull_mixes(house):
    one = alternating(house, 1_000_000)
    mixed, count = tear(one, 2, consistent=True)
    assert mixed == 0 and count > 5


def test_a_read_that_the_shard_always_steps_in_the_middle_of_comes_by_message(house, monkeypatch):
    one = house(100, 1, 1)
    server = one.join(0)
    line, asked = ways(server)[0], []
    monkeypatch.setattr(WholeExchangePart, "copy_values", lambda *_: None)
    monkeypatch.setattr(line.mailbox, "read", lambda *_, **more: False)  # as if every try had been mixed
    send = line.send
    monkeypatch.setattr(line, "send", lambda message, payload: (asked.append(message.kind), send(message, payload)))
    server.push(torch.ones(100))
    assert torch.equal(server.pull(), one.start - 0.5)
    assert torch.equal(server.pull(), one.start - 0.5)
    assert asked == [GroupMessage.READ, GroupMessage.READ]


# ---- whose memory it is, and until when


def test_in_step_a_push_that_was_acknowledged_is_the_shards(house):
    """A plain push is answered before its round ends: the worker may write its next gradient there at once."""
    one = house(100, 1, 2, staleness=0)
    first, second = one.join(0), one.join(1)
    mine = first.buffer(100, torch.float32)
    mine.fill_(1.0)
    first.push(mine)
    first.settle()
    mine.fill_(1000.0)
    second.push(torch.full((100,), 3.0))
    assert torch.equal(second.pull(), one.start - 0.5 * 2)


def test_in_step_who_is_replaced_cannot_spoil_what_it_pushed(house):
    one = house(100, 1, 2, staleness=0)
    old, other = one.join(0, timeout=3.0), one.join(1)
    mine = old.buffer(100, torch.float32)
    mine.fill_(1.0)
    errors = []
    old.push(mine)
    waits = threading.Thread(target=lambda: errors.append(error_of(old.pull)))
    waits.start()  # its push lies in its own memory until the round ends
    assert until(lambda: one.loops[0].shard.clock.done[0] == 1, 60)
    new = one.join(0)
    mine.fill_(1000.0)  # the frozen one wakes up
    assert new.step == 1
    other.push(torch.full((100,), 3.0))
    assert torch.equal(other.pull(), one.start - 0.5 * 2)
    assert torch.equal(new.pull(), one.start - 0.5 * 2)
    waits.join(60)
    assert isinstance(errors[0], StaleGeneration)


def test_in_step_who_waited_too_long_may_write_again(house):
    one = house(100, 1, 2, staleness=0)
    impatient, other = one.join(0, timeout=0.3), one.join(1)
    mine = impatient.buffer(100, torch.float32)
    mine.fill_(1.0)
    impatient.push(mine)
    assert isinstance(error_of(impatient.pull), PeerTimeout)
    mine.fill_(1000.0)  # it was told that it waits in vain: its push is the shard's now
    other.push(torch.full((100,), 3.0))
    assert torch.equal(other.pull(), one.start - 0.5 * 2)
    assert torch.equal(impatient.pull(), one.start - 0.5 * 2)


def test_a_vanished_workers_last_push_counts_in_the_round(house):
    one = house(100, 1, 2, staleness=0)
    gone, other = one.join(0), one.join(1)
    gone.push(torch.full((100,), 1.0))
    memory = gone.buffer(100, torch.float32)
    waits = threading.Thread(target=lambda: error_of(gone.pull))
    waits.start()
    assert until(lambda: one.loops[0].shard.clock.done[0] == 1, 60)
    gone.hang_up()
    waits.join(60)
    gone.close()
    assert until(lambda: len(one.loops[0].boxes()) == 1, 60)
    one.loops[0].do(lambda shard: None)  # it has finished with the worker that left
    memory.fill_(1000.0)
    other.push(torch.full((100,), 3.0))
    assert torch.equal(other.pull(), one.start - 0.5 * 2)


class Keeps(ParameterServer):
    """Keeps what it is given and writes into it: a rule of a user's that does not say that it only borrows."""

    @property
    def topology(self):
        servers = super().topology
        return replace(servers, update=replace(servers.update, borrows=False))

    def on_push(self, shard, value, weight):
        value.mul_(2.0)
        self.__dict__.setdefault("kept", []).append(value)
        shard.step(value)


def test_a_rule_that_does_not_say_that_it_borrows_gets_copies(house):
    one = house(10, 1, 1, strategy=Keeps(staleness=None))
    server = one.join(0)
    mine = server.buffer(10, torch.float32)
    for turn in (1.0, 2.0):
        mine.fill_(turn)
        server.push(mine)
        server.pull()
        assert (mine == turn).all()
    assert [value[0].item() for value in one.strategy.kept] == [2.0, 4.0]


def error_of(call):
    try:
        call()
    except Exception as error:
        return error


# ---- losses


def test_a_shard_that_dies_while_it_is_asked_is_a_lost_peer(house):
    one = house(100, 2, 2, staleness=0)
    server = one.join(0)
    server.push(torch.ones(100))
    found = []
    waits = threading.Thread(target=lambda: found.append(error_of(server.pull)))
    waits.start()
    time.sleep(0.1)
    one.loops[0].close()
    waits.join(60)
    assert isinstance(found[0], PeerLost) and "shard-0" in str(found[0])


def test_a_lost_shard_is_found_again_and_memory_is_shared_again(house):
    one = house(100, 2, 1)
    server = one.join(0, relink=True)
    for _ in range(3):
        server.push(torch.ones(100))
    server.settle()
    one.restart(1)
    server.push(torch.ones(100))
    found = server.pull()
    assert torch.equal(found[:50], one.start[:50] - 2.0)
    assert torch.equal(found[50:], one.start[50:] - 0.5)
    assert server.shares_memory


WORKER = """
import pickle, sys, torch
sys.path.insert(0, {root!r})
from rayps.ps.client.client import GroupServer
from rayps.ps.client.connections import take_rank
from rayps.ps.client.session import Session
found, space = pickle.loads(bytes.fromhex({given!r}))
session = Session(found, space, 1, incarnation=take_rank(found, space, 1, 60.0), timeout=60.0, keep=0)
server = GroupServer(session, consistent=False)
mine = server.buffer({n}, torch.float32)
mine.fill_(1.0)
print("ready", flush=True)
while True:
    server.push(mine)
    server.pull()
"""


def spawned(one):
    root = str(Path(__file__).resolve().parents[2])
    code = WORKER.format(root=root, given=pickle.dumps((one.map(final=True), one.space)).hex(), n=one.n)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_worker_killed_while_its_gradient_is_read_leaves_whole_steps(house):
    one = house(2_000_000, 1, 2)
    for _ in range(3):
        process = spawned(one)
        enough = one.loops[0].facts().version + 3
        assert until(lambda enough=enough: one.loops[0].facts().version > enough, 60)
        process.kill()
        process.wait()
        process.stdout.close()
        assert until(lambda: not one.loops[0].boxes(), 60)
    version, params = one.loops[0].do(lambda shard: (shard.version, shard.params.clone()))
    assert torch.equal(params, one.start - 0.25 * version)  # 0.5 / 2 workers for each push, all of ones
    assert one.join(1).step == version  # each push that counts is one step of that rank


def test_a_frozen_worker_holds_nobody_up(house):
    one = house(1000, 1, 2)
    process = spawned(one)
    server = one.join(0)
    process.send_signal(signal.SIGSTOP)
    for _ in range(50):
        server.push(torch.ones(1000))
        server.pull()
    new = one.join(1)  # takes the frozen one's place
    process.send_signal(signal.SIGCONT)
    assert process.wait(10) != 0  # it hears that it does not hold its rank any more
    process.stdout.close()
    step = new.step
    new.push(torch.zeros(1000))
    new.pull()
    assert new.step == step + 1
    assert server.step == 50


def test_many_joins_leave_no_descriptor_and_no_memory(house):
    one = house(1000, 2, 1)

    def come_and_go():
        server = one.join(0)
        server.push(torch.ones(1000))
        server.pull()
        server.close()
        one.servers.clear()
        one.maps.clear()

    come_and_go()
    assert until(lambda: not one.loops[0].boxes() and not one.loops[1].boxes(), 60)
    before = descriptors()
    for _ in range(50):
        come_and_go()
    until(lambda: len(descriptors()) <= len(before), 5)
    assert len(descriptors()) <= len(before), descriptors()


def test_a_link_that_is_closed_on_this_side_is_made_again(house):
    one = house(10, 1, 1)
    server = one.join(0)
    ways(server)[0].link.close()
    server.push(torch.ones(10))
    assert torch.equal(server.pull(), one.start - 0.5)
