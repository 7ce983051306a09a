"""For whom a rank of a ring has waited, and what the kernel counts for its TCP connections."""

import contextlib
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rayps.comm.link import Listener
from rayps.comm.link.tcp_facts import parse, read_tcp_facts
from rayps.comm.ring import Ring
from rayps.core.time.member_times import LineFacts

SECRET = b"t" * 32


@contextlib.contextmanager
def ring_of(n, prefer):
    """The rings of n ranks, each used by one thread of a pool."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(Listener(f"worker-{i}", SECRET, 0)) for i in range(n)]
        addresses = [listener.address for listener in listeners]
        pool = stack.enter_context(ThreadPoolExecutor(n))
        options = {"secret": SECRET, "generation": 0, "timeout": 60.0, "prefer": prefer, "streams": 1}
        calls = [pool.submit(Ring.form, i, addresses, each, **options) for i, each in enumerate(listeners)]
        rings = [call.result() for call in calls]
        try:
            yield rings, pool
        finally:
            for ring in rings:
                ring.close()


def wait_for_last(rings, pool, last, seconds):
    """All ranks but `last` wait in a barrier for at least `seconds`; return how much longer each waited for each."""
    entered, before = threading.Event(), [ring.waits for ring in rings]

    def work(ring):
        if ring.rank == last:
            assert not entered.wait(seconds)
        ring.barrier()

    for call in [pool.submit(work, ring) for ring in rings]:
        call.result(60)
    return [
        [now - then for now, then in zip(ring.waits, old, strict=True)] for ring, old in zip(rings, before, strict=True)
    ]


@pytest.mark.parametrize("prefer", ["shm", "tcp"])
@pytest.mark.parametrize("last", [0, 2])
def test_a_wait_in_a_barrier_is_for_the_rank_that_enters_last(prefer, last):
    with ring_of(3, prefer) as (rings, pool):
        for _ in range(3):  # even and odd barriers
            found = wait_for_last(rings, pool, last, 0.05)
            for rank, waits in enumerate(found):
                assert waits[rank] == 0
                if rank != last:
                    assert waits[last] == max(waits) > 0.04


def test_the_waits_for_single_ranks_are_all_of_the_waits_by_tcp():
    with ring_of(3, "tcp") as (rings, pool):
        before = [(ring.seconds_waiting, sum(ring.waits)) for ring in rings]
        for call in [pool.submit(ring.sum, torch.ones(1000)) for ring in rings]:
            call.result(60)
        for ring, (seconds, named) in zip(rings, before, strict=True):
            assert sum(ring.waits) - named == pytest.approx(ring.seconds_waiting - seconds, abs=1e-6)


def test_a_ring_counts_its_tcp_connections_by_rank():
    with ring_of(2, "tcp") as (rings, pool):
        for call in [pool.submit(ring.sum, torch.ones(50_000)) for ring in rings]:
            call.result(60)
        for ring in rings:
            [(peer, line)] = ring.lines.items()
            assert peer == 1 - ring.rank and line.bytes >= 100_000 and line.busy > 0 and line.rtt > 0
    assert rings[0].lines == {}  # after the end


def test_a_ring_in_shared_memory_has_no_lines():
    with ring_of(2, "shm") as (rings, _):
        assert rings[0].lines == {} and rings[0].waits[0] == 0


def test_the_facts_of_a_socket_are_the_kernels():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            here.sendall(bytes(30_000))
            got = 0
            while got < 30_000:
                got += len(there.recv(65536))
            found = read_tcp_facts(here)
            assert found is not None and found.bytes <= 30_001 and found.rtt > 0
    assert read_tcp_facts(here) is None  # closed


def test_a_struct_is_read_at_its_offsets():
    raw = bytearray(256)
    struct.pack_into("<I", raw, 68, 1500)
    struct.pack_into("<I", raw, 100, 3)
    struct.pack_into("<Q", raw, 120, 1 << 33)
    struct.pack_into("<QQ", raw, 168, 5_000_000, 1_000_000)
    assert parse(bytes(raw)) == LineFacts(1 << 33, 4.0, 3, 0.0015)
    assert parse(bytes(raw)[:183]) is None  # an older kernel


def test_lines_of_several_streams_and_generations():
    first, second = LineFacts(10, 1.0, 1, 0.1), LineFacts(20, 3.0, 2, 0.2)
    assert first.plus(second) == LineFacts(30, 3.0, 3, 0.2)  # at the same time
    assert second.after(first) == LineFacts(30, 4.0, 3, 0.2)  # one after the other
    assert second.since(first) == LineFacts(10, 2.0, 1, 0.2)
