"""Between two generations: the forming of a ring that ends takes and sends nothing of the next one, at any moment."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch
from rayps_client.errors import LinkError, PeerLost, StaleGeneration

from rayps.comm.link import Listener, Prefer
from rayps.comm.ring import Ring, form_mesh
from rayps.comm.ring.choose_algorithm import NAMES
from rayps.comm.ring.device.choose_gpu_transport import GpuTransport
from rayps.comm.ring.form_mesh import Formation
from rayps.comm.ring.mesh import Mesh

SECRET = b"g" * 32
SECONDS = 30
# each way in which a worker forms a ring; by NCCL only with GPUs: see `test_device_ring`
WAYS = {
    **{f"prefer {each}": {"prefer": each} for each in get_args(Prefer)},
    **{f"algorithm {each}": {"algorithm": each} for each in NAMES},
    **{f"device {each}": {"device_transport": each} for each in get_args(GpuTransport) if each == "staging"},
    "streams measured": {"prefer": "tcp", "streams": 0},
    "gloo": {"backend": "gloo"},
    "stages": {"algorithm": "ring", "streams": 1, "label": "stage#1"},
}
REAL_CHECK = Mesh.check
MOMENTS = 8  # at which a forming is ended, from its first operation to its last


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as made:
        yield made


@contextlib.contextmanager
def listening(n, generation=1):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Listener(f"worker-{i}", SECRET, generation)) for i in range(n)]


def form(listeners, rank, generation=1, timeout=60.0, **options):
    addresses = [each.address for each in listeners]
    options = {"streams": 1} | options
    listener = listeners[rank]
    return Ring.form(rank, addresses, listener, secret=SECRET, generation=generation, timeout=timeout, **options)


def sums(rings):
    with ThreadPoolExecutor(len(rings)) as pool:
        return [each.result() for each in [pool.submit(lambda r: r.sum(torch.ones(1)).item(), r) for r in rings]]


@pytest.mark.parametrize("way", WAYS)
def test_a_thread_between_its_connect_and_its_accept_takes_nothing_of_the_next_generation(way, pool, monkeypatch):
    """Rank 1 has connected to rank 0 and accepts rank 2 only when the ring of the next generation is being formed."""
    real, reached, begun = form_mesh.connect, threading.Event(), threading.Event()
    old = []

    def connect(address, *, name, generation, **options):
        link = real(address, name=name, generation=generation, **options)
        if name.split(":")[1] == "1":
            if generation == 1:
                reached.set()
                assert begun.wait(SECONDS)
            else:  # the connection of rank 2 in the new generation stays for whoever accepts first
                begun.set()
                old[1].exception(SECONDS)
        return link

    with listening(3) as listeners:
        monkeypatch.setattr(form_mesh, "connect", connect)
        old += [pool.submit(form, listeners, rank, **WAYS[way]) for rank in (0, 1)]
        assert reached.wait(SECONDS)
        for listener in listeners:
            listener.begin_generation(2)
        assert isinstance(old[0].exception(SECONDS), StaleGeneration)
        new = [pool.submit(form, listeners, rank, 2, **WAYS[way]) for rank in range(3)]
        rings = [each.result(SECONDS) for each in new]
        assert isinstance(old[1].exception(SECONDS), StaleGeneration)
        assert sums(rings) == [3, 3, 3]
        for ring in rings:
            ring.close()


def watch(monkeypatch, rank, at=0, held=None, free=None):
    """Count the operations of a rank on its mesh while rings are formed, and let it wait in operation `at`."""
    count = [0]

    def check(mesh):
        REAL_CHECK(mesh)
        if mesh.rank == rank and threading.current_thread().name.startswith("ThreadPool"):
            count[0] += 1
            if count[0] == at:
                held.set()
                assert free.wait(SECONDS)

    monkeypatch.setattr(Mesh, "check", check)
    return count


def hold_or_end(held, calls):
    """Wait for the operation to be held; return False if the forming took fewer operations this time."""
    deadline = time.monotonic() + SECONDS
    while not held.wait(0.01):
        if all(call.done() for call in calls):
            return held.is_set()
        assert time.monotonic() < deadline
    return True


@pytest.mark.parametrize("stopped", [0, 1], ids=["between two of its own operations", "while it waits for the other"])
@pytest.mark.parametrize("way", WAYS)
def test_an_abort_reaches_a_forming_at_each_of_its_operations(way, stopped, pool, monkeypatch):
    """Rank `stopped` waits in the operation. Without the abort the forming of rank 0 would last until its timeout."""
    count = watch(monkeypatch, stopped)
    with listening(2) as listeners:
        rings = [each.result(SECONDS) for each in [pool.submit(form, listeners, r, **WAYS[way]) for r in range(2)]]
    whole = count[0]
    for ring in rings:
        ring.close()
    assert whole > 0
    for at in sorted({1 + whole * step // MOMENTS for step in range(MOMENTS)}):
        held, free, formation = threading.Event(), threading.Event(), Formation()
        watch(monkeypatch, stopped, at, held, free)
        with listening(2) as listeners:
            mine = pool.submit(form, listeners, 0, formation=formation, timeout=2 * SECONDS, **WAYS[way])
            other = pool.submit(form, listeners, 1, timeout=SECONDS, **WAYS[way])
            try:
                reached = hold_or_end(held, (mine, other))
                formation.abort()
                if stopped == 0:
                    free.set()
                ended = [mine.exception(SECONDS)]
            finally:
                free.set()
            ended.append(other.exception(SECONDS))
            assert reached or (at > 1 and ended == [None, None])
            for call, error in zip((mine, other), ended, strict=True):
                if error is None:  # this rank had done its part of the forming
                    with pytest.raises(LinkError):
                        call.result().sum(torch.ones(1))
                else:
                    assert isinstance(error, LinkError)


def test_an_abort_reaches_a_thread_that_waits_for_a_peer(pool):
    with listening(2) as listeners, Listener("mute", SECRET, 1) as mute, Listener("dead", SECRET, 1) as dead:
        dead.close()
        waits = {"accept": (listeners, 0), "handshake": ([mute, listeners[1]], 1), "connect": ([dead, listeners[1]], 1)}
        for wait, (those, rank) in waits.items():
            for early in (False, True):
                formation = Formation()
                if early:
                    formation.abort()
                call = pool.submit(form, those, rank, timeout=2 * SECONDS, formation=formation)
                formation.abort()
                assert isinstance(call.exception(SECONDS), StaleGeneration), wait


def test_an_abort_ends_the_rings_that_are_formed(pool):
    formations = [Formation() for _ in range(2)]
    with listening(2) as listeners:
        calls = [pool.submit(form, listeners, rank, formation=formations[rank]) for rank in range(2)]
        rings = [call.result(SECONDS) for call in calls]
    waiting = pool.submit(rings[0].sum, torch.ones(1))
    formations[0].abort()
    assert isinstance(waiting.exception(SECONDS), PeerLost)
    with pytest.raises(PeerLost):
        rings[1].sum(torch.ones(1))
    for ring in rings:
        ring.close()
