"""Silent and slow connections: what they are allowed, who is closed first, and that a token holder is answered."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from folders import TESTS
from rayps_api.connections import ConnectionFacts, Limits, Phase, admit, limits, overdue
from rayps_api.log_limit import LogLimit
from service_site import Site

HEADS = [  # what a silent connection has said: nothing, half a head, half a body
    b"",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ",
    b"POST /api/v1/session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n{",
]
MOST = Limits(total=8, unknown=6, per_address=4)


# decisions


def test_limits_leave_descriptors_for_the_service() -> None:
    for most, used in itertools.product((64, 96, 256, 1024, 65536, 1 << 20), (10, 40)):
        found = limits(most, used)
        assert 0 < found.per_address < found.unknown < found.total <= 1000
        assert found.total + used <= most - 16


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("held", range(9))
@pytest.mark.parametrize("addresses", ["one", "many"])
def test_a_newcomer_takes_the_place_of_the_oldest_unknown_one_that_waits(
    phase: Phase, known: bool, held: int, addresses: str
) -> None:
    there = [ConnectionFacts("a" if addresses == "one" else f"a{i}", 10.0, known, phase) for i in range(held)]
    found = admit("a", there, MOST, 20.0)
    most = MOST.total if known else MOST.per_address if addresses == "one" else MOST.unknown
    if held < most:
        assert found.accepted and found.closed is None
    elif known:
        assert not found.accepted and found.closed is None and found.wait is None and str(most) in found.reason
    elif phase is Phase.ANSWER:
        assert not found.accepted and found.closed is None and found.wait == MOST.grace
    else:
        early = admit("a", there, MOST, 10.0 + MOST.grace - 0.125)
        assert not early.accepted and early.closed is None and early.wait == 0.125
        assert found.accepted and found.closed is there[0]


def test_one_address_does_not_close_the_connections_of_another() -> None:
    there = [ConnectionFacts("other"), *(ConnectionFacts("a") for _ in range(MOST.per_address))]
    assert admit("a", there, MOST, 20.0).closed is there[1]
    assert admit("third", there, MOST, 20.0).closed is None


@pytest.mark.parametrize(
    ("held", "closed"),
    [
        (ConnectionFacts("a", phase=Phase.HEADER, waited=10.1), True),
        (ConnectionFacts("a", phase=Phase.HEADER, waited=9.9), False),
        (ConnectionFacts("a", phase=Phase.HEADER, waited=10.1, received=10**6), True),  # a head byte by byte
        (ConnectionFacts("a", phase=Phase.BODY, silent=30.1, waited=30.1, received=10**6), True),
        (ConnectionFacts("a", phase=Phase.BODY, silent=1.0, waited=40.0, received=9_000), True),  # 225 bytes/s
        (ConnectionFacts("a", phase=Phase.BODY, silent=1.0, waited=40.0, received=11_000), False),
        (
            ConnectionFacts("a", phase=Phase.BODY, silent=29.0, waited=7200.0, received=16 * 2**30),
            False,
        ),  # a large update
        (ConnectionFacts("a", phase=Phase.IDLE, waited=15.1), True),
        (ConnectionFacts("a", phase=Phase.IDLE, waited=14.9), False),
        (ConnectionFacts("a", phase=Phase.ANSWER, waited=7200.0, silent=7200.0), False),  # a stream
        (ConnectionFacts("a", phase=Phase.WRITE, waited=7200.0, silent=59.0), False),
        (ConnectionFacts("a", phase=Phase.WRITE, silent=61.0), True),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_who_is_overdue(held: ConnectionFacts, closed: bool, known: bool) -> None:
    held.known = known
    assert (overdue(held, MOST) is not None) is closed


def test_a_kind_of_message_is_logged_a_few_times_and_then_counted() -> None:
    limit, kind = LogLimit(most=3, seconds=60.0), ("uvicorn.error", logging.WARNING, "Invalid %s")
    assert [limit.count_message(kind, 100.0 + i) for i in range(10)] == [0, 0, 0, *[None] * 7]
    assert limit.count_message(("uvicorn.error", logging.WARNING, "other"), 105.0) == 0
    assert limit.count_message(kind, 161.0) == 7
    assert limit.count_message(kind, 162.0) == 0
    record = logging.LogRecord("rayps.service", logging.INFO, "", 0, "said by the service itself", None, None)
    assert all(limit.filter(record) for _ in range(100))


# a server


def connect(port: int, text: bytes) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port))
    found.sendall(text)
    return found


def read_all(peer: socket.socket) -> bytes:
    """Until the service closes."""
    peer.settimeout(60)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while block := peer.recv(65536):
            found += block
    return found


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    most = Limits(total=40, unknown=30, per_address=30, header=0.6, body=0.6, idle=0.6)
    site = Site(tmp_path_factory.mktemp("hasty"), limits=most)
    yield site
    site.close()


@pytest.mark.parametrize("said", HEADS)
def test_a_connection_that_says_nothing_more_is_closed(hasty: Site, said: bytes) -> None:
    answer = read_all(connect(hasty.port, said))
    if said:
        assert answer.startswith(b"HTTP/1.1 408 ") and json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "timeout"
    else:
        assert answer == b""


def test_an_idle_connection_is_closed_after_its_answer(hasty: Site) -> None:
    answer = read_all(connect(hasty.port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1") == 1


def test_a_body_that_is_not_sent_is_closed_though_the_answer_was_given(hasty: Site) -> None:
    request = b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"
    answer = read_all(connect(hasty.port, request))
    assert answer.startswith(b"HTTP/1.1 401 ") and answer.count(b"HTTP/1.1") == 1


def test_a_stream_outlives_the_time_outs(hasty: Site) -> None:
    job = hasty.add()
    with hasty.http.stream("GET", f"/api/v1/stream?job={job}&topics=job", timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("event")) == "event: job"
        closed = connect(hasty.port, b"")  # opened after the stream, and closed for its silence
        assert read_all(closed) == b""
        assert read_all(connect(hasty.port, HEADS[1])).startswith(b"HTTP/1.1 408 ")
        hasty.store("request_stop", job)
        assert next(line for line in lines if line.startswith("event"))


def test_an_answer_that_is_not_read_is_closed(tmp_path: Path) -> None:
    site = Site(tmp_path, limits=Limits(total=40, unknown=30, per_address=30, write=0.2))
    try:
        job = site.add()
        home = site.start(job)
        (home / "log.txt").write_text(f"2026-11-21T06:41:00.000Z worker-0 {'x' * 900_000}\n" * 20)
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", site.port))
        peer.sendall(
            f"GET /api/v1/stream?job={job} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {site.token}\r\n\r\n".encode()
        )
        until(lambda: site.service.streams == 1)
        until(lambda: site.service.streams == 0)
        assert len(read_all(peer)) < 18_000_000
    finally:
        site.close()


def test_the_parts_of_an_answer_are_sent_at_once(hasty: Site) -> None:
    """Else the body waits some 40 ms until the client has acknowledged the headers, in each answer."""
    assert hasty.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_of_two_hundred_streams_at_once_no_more_than_the_limit_are_open(tmp_path: Path) -> None:
    site = Site(tmp_path, limits=Limits(total=400, unknown=300, per_address=300))
    request = f"GET /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {site.token}\r\n\r\n".encode()
    try:
        peers = [connect(site.port, request) for _ in range(200)]
        for peer in peers:
            peer.settimeout(60)
        answers = [peer.recv(12) for peer in peers]
        assert answers.count(b"HTTP/1.1 200") == 64 and answers.count(b"HTTP/1.1 429") == 136
        assert site.service.streams == 64
        for peer in peers:
            peer.close()
        until(lambda: site.service.streams == 0)
        assert connect(site.port, request).recv(12) == b"HTTP/1.1 200"
    finally:
        site.close()


def until(ready: Any) -> Any:
    end = time.monotonic() + 60
    while not (found := ready()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
    return found


class Attack:
    """Keeps `count` silent connections open, in a thread: one that is closed is opened again, `most` times in all."""

    def __init__(self, port: int, count: int, most: int) -> None:
        self._port, self._count, self._most = port, count, most
        self._open: list[socket.socket] = []
        self.opened = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set() and self.opened < self._most:
            while len(self._open) < self._count and self.opened < self._most:
                with contextlib.suppress(OSError):
                    peer = socket.socket()
                    self._open.append(peer)
                    peer.settimeout(5)
                    self.opened += 1
                    peer.connect(("127.0.0.1", self._port))
                    peer.sendall(HEADS[self.opened % 3])
                    peer.setblocking(False)
            self._open = [peer for peer in self._open if self._lives(peer)]
            time.sleep(0.05)

    def _lives(self, peer: socket.socket) -> bool:
        try:
            if peer.recv(4096):
                return True
        except BlockingIOError:
            return True
        except OSError:
            pass
        peer.close()
        return False

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        for peer in self._open:
            peer.close()


@pytest.mark.parametrize("descriptors", [96, 256])
def test_a_token_holder_is_answered_among_silent_connections_and_the_log_stays_small(
    tmp_path: Path, descriptors: int
) -> None:
    state, log = tmp_path / "state", tmp_path / "service.log"
    with log.open("w") as file:
        serve = subprocess.Popen(
            [sys.executable, str(TESTS / "serve_without_ray.py"), str(state), str(descriptors)],
            stdout=file,
            stderr=file,
        )
    attack = None
    try:
        until(lambda: (state / "service.json").exists() or serve.poll() is not None)
        assert serve.poll() is None, log.read_text()
        url = json.loads((state / "service.json").read_text())["url"]
        head = {"Authorization": f"Bearer {(state / 'token').read_text().strip()}"}
        with httpx2.stream("GET", f"{url}/api/v1/stream", headers=head, timeout=60) as stream:
            assert stream.status_code == 200
            messages = (line for line in stream.iter_lines() if line.startswith("data"))
            attack = Attack(int(url.rpartition(":")[2]), count=2 * descriptors, most=50_000)
            until(lambda: attack.opened > 2 * descriptors)
            for number in range(4):
                answer = httpx2.post(
                    f"{url}/api/v1/jobs", headers=head, timeout=60, json={"workload": "a:B", "name": f"job-{number}"}
                )
                assert answer.status_code == 201, answer.text
            with httpx2.Client(base_url=url, headers=head, timeout=60) as client:
                assert {client.get("/api/v1/jobs").status_code for _ in range(20)} == {200}
            assert any('"job-3"' in line for line in messages)  # a stream that was open goes on
    finally:
        if attack is not None:
            attack.close()
        serve.terminate()
        serve.wait(60)
    assert serve.returncode == 0
    assert log.stat().st_size < 20_000, log.read_text()[:4000]
