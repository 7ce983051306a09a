"""Slots for uploads: no client keeps another from sending its update, with however many and however slow requests."""

from __future__ import annotations

import asyncio
import hashlib
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from client_site import Clinic, until
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st
from rayps_api import upload_slots
from rayps_api.upload_slots import GRACE_SECONDS, MOST_UPLOADS, UploadSlots, ends_after
from rayps_client.errors import Conflict

WAYS = {  # the routes that receive bytes of clients: the strategy of a job, and where its clients send in round 1
    "/api/v1/client/rounds/{serial}/update": ("fedavg:clients=remote(least=2,wait=100)", "1/update"),
    "/api/v1/client/rounds/{serial}/stages/{stage}": (
        "fedavg:clients=remote(least=2,wait=100),secure=secagg(clip=1.0)",
        "1/stages/advertise_keys",
    ),
}


class ByHand:
    """A client by hand, with a token of its own, which may send anything."""

    def __init__(self, clinic: Clinic, job: Any, name: str) -> None:
        self.clinic, self.token = clinic, clinic.invite(job, name=name)["token"]
        self.http = httpx2.Client(base_url=clinic.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=60)
        body = {"name": name, "key": name * 20, "samples": 5}
        number = self.http.post("/api/v1/client/join", json=body).raise_for_status().json()["number"]
        self.named = f"{job.id}:{number}:{name * 20}"
        self.http.headers["Rayps-Client"] = self.named

    def work(self) -> str:
        return str(self.http.get("/api/v1/client/work", params={"wait": 5}).json()["kind"])

    def put(self, path: str, raw: bytes, digest: str | None = None) -> httpx2.Response:
        """Send bytes, which have another hash than is said: the service says so when it has them all."""
        headers = {"Rayps-Sha256": digest or "0" * 64}
        return self.http.put(f"/api/v1/client/rounds/{path}", content=raw, headers=headers)

    def begin(self, path: str, digest: str, size: int = 1000) -> socket.socket:
        """Begin to send `size` bytes, of which one is sent."""
        peer = socket.create_connection(("127.0.0.1", self.clinic.port))
        peer.settimeout(60)
        peer.sendall(
            f"PUT /api/v1/client/rounds/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self.token}\r\n"
            f"Rayps-Client: {self.named}\r\nRayps-Sha256: {digest}\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Range: bytes 0-{size - 1}/{size}\r\nContent-Length: {size}\r\n\r\nx".encode()
        )
        return peer


def read_answer(peer: socket.socket) -> bytes:
    """Read an answer up to the end of its body, which is one JSON object."""
    found = b""
    while not found.endswith(b"}"):
        block = peer.recv(65536)
        assert block, found
        found += block
    return found


@pytest.fixture(params=WAYS)
def site(request: pytest.FixtureRequest, clinic: Clinic) -> Iterator[tuple[Clinic, ByHand, ByHand, str]]:
    """Two clients with an order each, and where they send."""
    strategy, path = WAYS[request.param]
    job = clinic.job(strategy, rounds=1)
    slow, other = ByHand(clinic, job, "slow"), ByHand(clinic, job, "other")
    until(lambda: slow.work() == "round" and other.work() == "round")
    yield clinic, slow, other, path
    job.stop().wait(60)


def test_the_ways_are_all_routes_that_receive_bytes_of_clients(clinic: Clinic) -> None:
    paths = clinic.http.get("/openapi.json").json()["paths"]
    found = {
        path
        for path, verbs in paths.items()
        for what in verbs.values()
        if path.startswith("/api/v1/client/")
        and "application/octet-stream" in what.get("requestBody", {}).get("content", {})
    }
    assert found == set(WAYS)


def test_a_client_that_begins_many_uploads_holds_one_slot(site: tuple[Clinic, ByHand, ByHand, str]) -> None:
    """The newest upload of a client is the one that counts: each before it is ended."""
    clinic, slow, other, path = site
    peers = [slow.begin(path, hashlib.sha256(b"%d" % number).hexdigest()) for number in range(MOST_UPLOADS + 6)]
    waiting = set(peers)
    while len(waiting) > 1:
        ready = select.select(waiting, [], [], 20.0)[0]
        assert ready, f"{len(waiting)} uploads of one client are being received"
        for peer in ready:
            waiting.remove(peer)
            answer = read_answer(peer)
            assert answer.startswith(b"HTTP/1.1 409") and b"superseded" in answer, answer
    found = other.put(path, b"y" * 100)
    assert found.status_code == 422 and "hash" in found.json()["detail"], found.text  # received whole
    for peer in peers:
        peer.close()
    until(lambda: clinic.service.uploads.taken == 0)


def test_an_upload_that_is_too_slow_for_the_deadline_is_ended_and_continues(
    site: tuple[Clinic, ByHand, ByHand, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clinic, slow, _, path = site
    monkeypatch.setattr(upload_slots, "GRACE_SECONDS", 0.2)
    whole = b"x" * 1000
    digest = hashlib.sha256(whole).hexdigest()
    peer = slow.begin(path, digest, len(whole))
    answer = read_answer(peer)
    assert answer.startswith(b"HTTP/1.1 429") and b"too slow" in answer and b"etry-" in answer
    peer.close()
    until(lambda: clinic.service.uploads.taken == 0)
    where = path if path.endswith("update") else f"{path}/received"
    named = {"Rayps-Sha256": digest}
    answer = slow.http.get(f"/api/v1/client/rounds/{where}", headers=named)
    assert answer.json()["received"] == 1, "what has arrived is retained"


@given(st.integers(1, 10**6), st.floats(0, 600), st.floats(1.0, 4.0), st.floats(0, 1))
def test_the_rate_that_meets_the_deadline_is_enough(expected: int, seconds: float, faster: float, at: float) -> None:
    """At any moment of an upload of a constant rate; and nothing lasts longer than the deadline and the grace."""
    arrived = int(min(1.0, faster * at) * expected)
    assert (
        ends_after(arrived, expected, seconds)
        >= min(at, 1 / faster) * seconds + GRACE_SECONDS - seconds / expected - 1e-6
    )
    assert ends_after(arrived, expected, seconds) <= seconds + GRACE_SECONDS
    assert ends_after(0, expected, seconds) == GRACE_SECONDS, "a peer that sends nothing is ended soon"
    assert ends_after(arrived, None, seconds) == seconds + GRACE_SECONDS == ends_after(arrived, 0, seconds)
    assert ends_after(arrived, expected, -seconds) == GRACE_SECONDS


def test_slots_are_of_clients(tmp_path: Path) -> None:
    async def check() -> None:
        slots, order = UploadSlots(), list[str]()

        async def hold(client: tuple[str, int], name: str) -> None:
            async with slots.take(client) as upload:
                writer = upload.open(tmp_path / name)
                writer.write(0, b"1")
                upload.begin(10, 60.0)
                order.append(name)
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(hold(("job", number), f"{number}")) for number in range(MOST_UPLOADS)]
        while len(order) < MOST_UPLOADS:
            await asyncio.sleep(0)
        with pytest.raises(HTTPException) as refused:
            async with slots.take(("job", MOST_UPLOADS)):
                pass
        assert refused.value.status_code == 429
        again = asyncio.create_task(hold(("job", 5), "again"))  # this client has one already
        with pytest.raises(Conflict, match="newer request"):
            await tasks[5]
        await asyncio.wait([again], timeout=0.01)
        assert slots.taken == MOST_UPLOADS and order[-1] == "again"
        other = asyncio.create_task(hold(("another job", 5), "of another job"))
        with pytest.raises(HTTPException):
            await other
        for task in (*tasks, again):
            task.cancel()
        await asyncio.gather(*tasks, again, return_exceptions=True)
        assert slots.taken == 0

    asyncio.run(check())
