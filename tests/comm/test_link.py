import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from rayps_client.errors import ConfigError, LinkError, PeerLost, PeerTimeout, StaleGeneration

from rayps.comm.link import Listener, Message, connect, parse_address
from rayps.comm.link.memory import Memory
from rayps.comm.link.socket_link import WAKE_BYTES

SECRET = b"s" * 32
TRANSPORTS = ["shm", "unix", "tcp"]


@contextlib.contextmanager
def pair(prefer="auto", generation=0):
    """Two ends of one link: (of "server" at the caller, of "client" at the listener)."""
    with Listener("server", SECRET, generation) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, generation, 10)
        near = connect(listener.address, name="client", secret=SECRET, generation=generation, timeout=60, prefer=prefer)
        far = accepted.result()
        try:
            yield near, far
        finally:
            near.close()
            far.close()


@contextlib.contextmanager
def connected(listener, generation, timeout=60):
    """The call of "c" for a connection, as a future: its handshake needs somebody who accepts."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(connect, listener.address, name="c", secret=SECRET, generation=generation, timeout=timeout)


def descriptors():
    """The open descriptors, each with what it is of: a number may be used again."""
    gc.collect()  # what tests before this one left in cycles
    return {(file.name, file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}


@pytest.mark.parametrize("prefer", TRANSPORTS)
def test_a_message_arrives_whole_and_names_its_peer(prefer):
    with pair(prefer) as (near, far):
        assert (near.peer, far.peer, near.transport) == ("server", "client", prefer)
        x = np.arange(1000, dtype=np.float64)
        near.send(Message(3, tag=-5, a=2**40, b=-1, weight=0.5), x, timeout=60)
        got = far.recv(10)
        assert (got.kind, got.tag, got.a, got.b, got.weight) == (3, -5, 2**40, -1, 0.5)
        assert np.array_equal(np.frombuffer(got.payload, np.float64), x)
        assert far.bytes_received == near.bytes_sent >= x.nbytes
        far.send(Message(4), timeout=60)
        assert len(near.recv(10).payload) == 0


@pytest.mark.parametrize("prefer", TRANSPORTS)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 3_000_001])
def test_payloads_of_every_size_land_in_a_buffer(prefer, size):
    data = np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)
    with pair(prefer) as (near, far), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(near.send, Message(1), data, timeout=60)
        out = np.zeros_like(data)
        far.recv(10, into=out)
        sent.result()
        assert np.array_equal(out, data)


def test_a_payload_that_arrives_in_small_parts_wakes_its_reader_rarely():
    def low():
        return far._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    with pair("tcp") as (near, far), ThreadPoolExecutor(1) as pool:
        payload = bytes(range(256)) * (3 * WAKE_BYTES // 256)
        near._append(Message(1), payload)
        whole = b"".join(near._out)
        near._sock.setblocking(True)
        poll = select.poll()
        poll.register(far, select.POLLIN)
        assert low() == 1
        near._sock.sendall(whole[:1000])
        assert poll.poll(10_000) and far.try_recv() is None
        assert low() == WAKE_BYTES
        near._sock.sendall(whole[1000:2000])
        assert not poll.poll(50)
        sent = pool.submit(near._sock.sendall, whole[2000:-1])
        while (left := len(whole) - 1 - far.bytes_received) and poll.poll(10_000):
            far.try_recv()
            assert low() == max(1, min(WAKE_BYTES, len(whole) - far.bytes_received)), left
        sent.result()
        near._sock.sendall(whole[-1:])
        assert far.recv(10).payload == payload
        assert low() == 1


def test_a_buffer_of_another_size_is_refused_and_the_message_kept():
    with pair() as (near, far):
        near.send(Message(1), b"abcd", timeout=60)
        with pytest.raises(LinkError, match="'client' sent 4 bytes where 5 were expected"):
            far.recv(10, into=bytearray(5))
        assert bytes(far.recv(10).payload) == b"abcd"


def test_auto_takes_shared_memory_and_tcp_where_there_is_none():
    with Listener("server", SECRET) as listener, ThreadPoolExecutor(1) as pool:
        for address, transport in (
            (listener.address, "shm"),
            (listener.address.rsplit("/", 1)[0] + "/rayps-nobody", "tcp"),
            (listener.address.rsplit("/", 1)[0] + "/", "tcp"),
        ):
            far = pool.submit(listener.accept, 0, 10)
            with connect(address, name="c", secret=SECRET, generation=0, timeout=60) as near, far.result():
                assert near.transport == transport


@pytest.mark.parametrize("prefer", TRANSPORTS)
def test_a_silent_peer_is_a_named_timeout(prefer):
    with pair(prefer) as (near, _):
        with pytest.raises(PeerTimeout, match=r"'server' did not send .* within 0.05 s.*timeout") as info:
            near.recv(0.05)
        assert info.value.data == {"peer": "server", "seconds": 0.05}
        assert pickle.loads(pickle.dumps(info.value)).data == info.value.data


@pytest.mark.parametrize("prefer", TRANSPORTS)
def test_a_peer_that_does_not_read_is_a_named_timeout(prefer):
    with pair(prefer) as (near, _), pytest.raises(PeerTimeout, match="'server' did not accept"):
        for _ in range(100):
            near.send(Message(1), bytes(1 << 20), timeout=0.05)


@pytest.mark.parametrize("prefer", TRANSPORTS)
def test_a_lost_peer_is_named_after_what_it_sent_was_read(prefer):
    with pair(prefer) as (near, far):
        far.send(Message(7), timeout=60)
        far.close()
        assert near.recv(10).kind == 7
        with pytest.raises(PeerLost, match="'server' closed the connection or died"):
            near.recv(10)
        with pytest.raises(PeerLost):
            for _ in range(100):
                near.send(Message(1), bytes(1 << 20), timeout=60)
        with pytest.raises(PeerLost, match="closed on this side"):
            far.recv(10)


@pytest.mark.parametrize("prefer", TRANSPORTS)
def test_what_a_peer_sent_before_it_left_is_read_whole(prefer):
    data = np.random.default_rng(3).integers(0, 255, 10_000_000, dtype=np.uint8)
    with pair(prefer) as (near, far), ThreadPoolExecutor(1) as pool:

        def leave():
            near.send(Message(1), data, timeout=60)
            near.close()

        gone = pool.submit(leave)
        assert np.array_equal(np.frombuffer(far.recv(10).payload, np.uint8), data)
        gone.result()


def test_a_message_of_another_generation_has_no_effect_and_its_sender_is_told():
    with pair() as (near, far):
        near.send(Message(1), b"old", timeout=60)
        far.generation = 1
        with pytest.raises(StaleGeneration, match="'client' has generation 0, but the group is at generation 1"):
            far.recv(10, into=bytearray(3))
        with pytest.raises(
            StaleGeneration, match=r"'server' refused a message.*generation 0, because 'server' is at generation 1"
        ):
            near.recv(10)
        near.generation = 1
        near.send(Message(2), b"new", timeout=60)
        assert bytes(far.recv(10).payload) == b"new"


def test_feed_drops_the_outdated_and_keeps_the_rest():
    with pair() as (near, far):
        near.send(Message(1), timeout=60)
        near.generation = 5
        near.send(Message(2), timeout=60)
        near.generation = 0
        near.send(Message(3), timeout=60)
        far.wait(select.POLLIN, 10)
        assert [m.kind for m in far.feed()] == [1, 3]
        with pytest.raises(StaleGeneration):
            near.recv(10)


@pytest.mark.parametrize("prefer", TRANSPORTS)
def test_feed_and_flush_never_wait_and_lose_nothing(prefer):
    rng = np.random.default_rng(0)
    with pair(prefer) as (near, far):
        want = [rng.bytes(int(n)) for n in rng.integers(0, 300_000, 40)]
        assert far.feed() == []
        for i, payload in enumerate(want):
            near.queue(Message(1, tag=i), payload)
        got = []
        while len(got) < len(want):
            near.flush()
            assert near.feed() == []
            far.wait(select.POLLIN, 10)
            got += far.feed()
        assert near.flush() and near.queued == 0
        assert [m.tag for m in got] == list(range(len(want)))
        assert all(bytes(m.payload) == w for m, w in zip(got, want, strict=True))


def test_what_is_queued_is_safe_from_later_writes():
    with pair() as (near, far):
        data = np.ones(4_000_000, dtype=np.uint8)
        near.queue(Message(1), data)
        data[:] = 2
        with ThreadPoolExecutor(1) as pool:
            got = pool.submit(far.recv, 10)
            while near.queued:
                near.wait(near.interest, 10)
                near.feed()
                near.flush()
        assert set(bytes(got.result().payload)) == {1}


@pytest.mark.parametrize("prefer", TRANSPORTS)
def test_back_pressure_is_counted_in_bytes(prefer):
    with pair(prefer) as (near, _):
        near.queue_limit = 5 << 20
        with pytest.raises(PeerTimeout, match=r"'server' has not read \d+ bytes.*queue_limit"):
            for _ in range(4):
                near.queue(Message(1), bytes(4 << 20))


def test_shared_memory_is_used_both_ways_at_once_and_in_any_order():
    """Both sides have more under way than fits, with small messages between; each reads while it sends."""
    rng = np.random.default_rng(1)
    sizes = [int(s) for s in rng.choice([0, 1, 64, 2048, 2049, 70_000, 5_000_001, 9_000_000], 30)]
    payloads = [rng.integers(0, 255, size, dtype=np.uint8) for size in sizes]
    with pair("shm") as (near, far):

        def work(link):
            for i, payload in enumerate(payloads):
                link.queue(Message(1, tag=i), payload, copy=False)
            got = []
            while len(got) < len(payloads) or link.queued:
                got += link.feed()
                link.flush()
                if len(got) < len(payloads) or link.queued:
                    link.wait(link.interest if link.queued else select.POLLIN, 10)
            return got

        near.queue_limit = far.queue_limit = 1 << 30
        with ThreadPoolExecutor(2) as pool:
            for call in [pool.submit(work, near), pool.submit(work, far)]:
                got = call.result()
                assert [m.tag for m in got] == list(range(len(payloads)))
                assert all(
                    np.array_equal(np.frombuffer(m.payload, np.uint8), p) for m, p in zip(got, payloads, strict=True)
                )


def test_memory_can_be_offered_to_the_peer():
    with pair("shm") as (near, far):
        memory = Memory.create(10_000)
        near.offer(7, memory)
        near.send(Message(1), b"x" * 64, timeout=60)
        near.send(Message(2), bytes(100_000), timeout=60)
        assert far.recv(10).kind == 1
        memory.view[123] = 45
        assert far.memories[7].view[123] == 45
        assert far.recv(10).kind == 2
        memory.close()


@pytest.mark.parametrize("prefer", TRANSPORTS)
def test_a_wrong_secret_is_refused_on_both_sides(prefer):
    with Listener("server", SECRET) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 0, 0.3)
        with pytest.raises(LinkError, match="'server' does not know this job's secret"):
            connect(listener.address, name="c", secret=b"other", generation=0, timeout=60, prefer=prefer)
        with pytest.raises(PeerTimeout, match="no peer connected to 'server'"):
            accepted.result()


def test_an_outdated_caller_is_refused():
    with Listener("server", SECRET, generation=1) as listener, ThreadPoolExecutor(1) as pool:
        listener.begin_generation(2)
        accepted = pool.submit(listener.accept, 2, 0.3)
        with pytest.raises(StaleGeneration, match="'server' is at generation 2 and refused generation 1"):
            connect(listener.address, name="c", secret=SECRET, generation=1, timeout=60)
        with pytest.raises(PeerTimeout):
            accepted.result()


def test_a_caller_that_is_ahead_waits_for_the_listener_to_catch_up():
    with Listener("server", SECRET, generation=1) as listener, ThreadPoolExecutor(1) as pool:
        near = pool.submit(connect, listener.address, name="c", secret=SECRET, generation=2, timeout=60)
        with pytest.raises(PeerTimeout):
            listener.accept(1, 0.2)
        listener.begin_generation(2)
        with listener.accept(2, 10) as far, near.result():
            assert far.generation == 2


def test_strangers_and_silent_callers_do_not_keep_others_out():
    with Listener("server", SECRET) as listener, ThreadPoolExecutor(1) as pool:
        address = parse_address(listener.address)
        where = (address.host, address.port)
        with socket.create_connection(where), socket.create_connection(where) as loud:
            loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 40)
            far = pool.submit(listener.accept, 0, 10)
            with connect(listener.address, name="c", secret=SECRET, generation=0, timeout=60), far.result():
                pass


def test_accept_can_wait_for_one_name_and_keeps_the_others():
    with Listener("server", SECRET) as listener, ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(connect, listener.address, name=n, secret=SECRET, generation=0, timeout=60)
            for n in ("one", "two")
        ]
        with listener.accept(0, 10, lambda peer: peer == "two") as two, listener.accept(0, 10) as one:
            assert (two.peer, one.peer) == ("two", "one")
        for call in calls:
            call.result().close()


def test_who_accepts_for_an_ended_generation_takes_no_connection_of_the_next_one():
    with Listener("server", SECRET, 1) as listener:
        listener.begin_generation(2)
        with connected(listener, generation=2) as near:
            for _ in range(3):  # a caller of generation 1 that had not begun to accept when that generation ended
                with pytest.raises(StaleGeneration, match="no connection of generation 1: it is at generation 2"):
                    listener.accept(1, 20, lambda peer: peer == "c")
            with listener.accept(2, 20, lambda peer: peer == "c") as link, near.result():
                assert link.generation == 2


def test_who_waits_for_a_peer_of_an_ended_generation_takes_no_connection_of_the_next_one():
    for _ in range(20):  # whichever of the two threads looks first
        with Listener("server", SECRET, 1) as listener, ThreadPoolExecutor(1) as pool:
            old = pool.submit(listener.accept, 1, 20, lambda peer: peer == "c")
            time.sleep(0.002)
            listener.begin_generation(2)
            with connected(listener, generation=2) as near:
                with listener.accept(2, 20, lambda peer: peer == "c") as link, near.result():
                    assert link.generation == 2
                with pytest.raises(StaleGeneration):
                    old.result()


def test_a_connection_that_nobody_took_does_not_outlive_its_generation():
    with Listener("server", SECRET, 1) as listener:
        with connected(listener, generation=1) as near, pytest.raises(PeerTimeout):
            listener.accept(1, 0.3, lambda peer: peer == "another")
        listener.begin_generation(2)
        with pytest.raises(PeerTimeout):
            listener.accept(2, 0.1)
        with near.result() as link, pytest.raises(PeerLost):
            link.recv(20)


def test_a_generation_that_has_ended_does_not_begin_again():
    with Listener("server", SECRET, 2) as listener:
        with pytest.raises(StaleGeneration):
            listener.begin_generation(1)
        with connected(listener, generation=2) as near, listener.accept(2, 20), near.result():
            pass


def test_nobody_there_is_named_after_the_deadline():
    with Listener("ghost", SECRET) as listener:
        address = listener.address
    with pytest.raises(PeerLost, match=r"no listener of 'ghost' at 127.0.0.1:\d+"):
        connect(address, name="c", secret=SECRET, generation=0, timeout=0.1)
    with Listener("mute", SECRET) as listener, pytest.raises(PeerTimeout, match=r"'mute' at .* did not"):
        connect(listener.address, name="c", secret=SECRET, generation=0, timeout=0.1)


@pytest.mark.parametrize("address", ["", "host", "a@b", "a@b:c/d", "a@b:1"])
def test_bad_addresses_are_refused(address):
    with pytest.raises(ConfigError, match="not the address of a listener"):
        connect(address, name="c", secret=SECRET, generation=0, timeout=1)


def test_links_and_listeners_leave_no_descriptor_and_no_thread():
    with pair():
        pass
    before, running = descriptors(), set(threading.enumerate())
    for _ in range(20):
        with pair() as (near, far):
            near.send(Message(1), b"x", timeout=60)
            far.recv(10)
        with Listener("server", SECRET) as listener:
            with pytest.raises(LinkError):
                connect(listener.address, name="c", secret=b"?", generation=0, timeout=0.01)
            listener.close()
    # what earlier tests left may end meanwhile; nothing may be new
    assert descriptors() <= before and set(threading.enumerate()) <= running


def _echo(address):
    with connect(address, name="child", secret=SECRET, generation=0, timeout=60) as link:
        while True:
            message = link.recv(60)
            link.send(message, timeout=60)


def test_a_frozen_process_is_a_timeout_and_a_killed_one_is_lost():
    with Listener("parent", SECRET) as listener:
        child = get_context("spawn").Process(target=_echo, args=(listener.address,), daemon=True)
        child.start()
        with listener.accept(0, 30) as link:
            link.send(Message(1), b"hello", timeout=60)
            assert bytes(link.recv(10).payload) == b"hello"
            os.kill(child.pid, signal.SIGSTOP)
            link.send(Message(1), timeout=60)
            with pytest.raises(PeerTimeout, match="'child'"):
                link.recv(0.2)
            os.kill(child.pid, signal.SIGCONT)
            assert link.recv(10).kind == 1
            os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(PeerLost, match="'child'"):
                link.recv(10)
        child.join()


CROWDED = """
import os, resource, select, socket, sys
from rayps.comm.link import Listener, connect, parse_address

listener = Listener("shard", b"s" * 32)
where = parse_address(listener.address)
callers = [socket.socket() for _ in range(5)]
kept = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        kept.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for caller in callers:
    caller.connect((where.host, where.port))
looks = 0
while select.select([listener.fileno()], [], [], 0)[0]:
    assert listener.accept_ready() is None
    looks += 1
    assert looks < 100, "the listener is readable for ever"
for caller in callers:
    caller.settimeout(60)
    try:
        assert caller.recv(1) == b""
    except ConnectionResetError:
        pass
for descriptor in kept:
    os.close(descriptor)
child = os.fork()
if not child:
    connect(listener.address, name="worker", secret=b"s" * 32, generation=0, timeout=60, prefer="tcp").close()
    os._exit(0)
assert listener.accept(0, 60).peer == "worker"
assert os.waitpid(child, 0)[1] == 0
print(looks)
"""


def test_a_listener_without_descriptors_turns_callers_away_and_rests():
    found = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    assert 1 <= int(found.stdout) <= 10
