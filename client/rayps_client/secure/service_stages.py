"""The messages of a secure round over HTTP: a client's side of the routes under /api/v1/client/rounds/SERIAL/stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rayps_client.errors import Conflict, Unauthorized
from rayps_client.secure.lease import RENEW_SECONDS
from rayps_client.secure.protocol import Answer, Stage
from rayps_client.values import Json, JsonObject

MOST_REFUSED = 500  # clients that one client can refuse in a round
_LONG_POLL_SECONDS = 20.0  # how long the service may wait for an answer


class HttpAnswer(Protocol):
    """The answer to a request."""

    def json(self) -> Any:
        """Return the body, which is JSON."""


class Connection(Protocol):
    """A connection that repeats a request until the service answers, and raises the errors of its answers."""

    def call(self, method: str, path: str, **options: Any) -> HttpAnswer:
        """Send a request and return the answer."""

    def upload(self, path: str, raw: bytes, headers: Mapping[str, str], *, begun: bool = False, ask: str = "") -> None:
        """Send bytes, and the rest alone after a cut; `ask`: where the service says what has arrived."""

    def try_once(self, method: str, path: str, seconds: float, **options: Any) -> None:
        """Send a request once, with this time-out, and ignore a failure."""


class ServiceStages:
    """The stages of one round: `rayps_client.secure.take_part.StageExchange`."""

    def __init__(
        self,
        connection: Connection,
        headers: Mapping[str, str],
        about: tuple[str, int, int],
        verify: Callable[[str, str], Mapping[str, Any]],
        *,
        sending: Callable[[bytes], None] | None = None,
    ) -> None:
        """`headers` name this client; `about` is (job, number of the client, serial number of the order).

        `verify` takes a text and its signature, and returns the facts in the text. It raises Unauthorized if the
        service has not signed the text. `sending` is called with the masked update before that is sent.
        """
        self._sending = sending
        self._connection, self._headers, self._about, self._verify = connection, dict(headers), about, verify
        self.sent, self.received = 0, 0  # bytes of messages and answers

    def put(self, stage: Stage, message: bytes) -> None:
        """Send this client's message of a stage. Raises Conflict if the client has dropped out.

        After a cut the rest of the same bytes is sent: they are made once, so that an update has one mask.
        """
        if stage is Stage.MASK and self._sending is not None:
            self._sending(message)
        path = self._path(stage)
        try:
            self._connection.upload(path, message, self._headers, ask=f"{path}/received")
        except Conflict:
            if stage is not Stage.UNMASK:
                raise  # the others' shares have sufficed for the sum, which has this client's update
        self.sent += len(message)

    def get(self, stage: Stage) -> Answer:
        """Wait for the server's answer after a stage.

        Raises:
            Conflict: this client or the round has dropped out.
            Unauthorized: the answer is not signed by the service, or is for another client, round or stage.
        """
        params = {"wait": _LONG_POLL_SECONDS}
        while True:
            found = self._connection.call("GET", self._path(stage), params=params, headers=self._headers).json()
            if found["kind"] == "answer":
                break
        facts = self._verify(str(found["answer"]), str(found["signature"]))
        job, client, serial = self._about
        if any(facts.get(key) != value for key, value in _named(job, client, serial, stage).items()):
            raise Unauthorized(
                "this client refused an answer of the service that is for another client, round or stage",
                code="refused",
            )
        self.received += len(found["answer"])
        answer: Answer = facts["answer"]
        return answer

    def withdraw(self, reason: str, refused: Sequence[int] = ()) -> None:
        """Tell the service that this client takes no further part, so that no stage waits for it.

        `refused`: the clients of which a message failed a check. They are in the query, which an older service ignores.
        """
        path = f"/api/v1/client/rounds/{self._about[2]}/withdraw"
        query = {"refuses": list(refused[:MOST_REFUSED])}
        self._connection.call("POST", path, params=query, json={"reason": reason[:300]}, headers=self._headers)

    def renew(self) -> None:
        """Tell the service, once, that this client is in the stages of the round. A failure is ignored."""
        self._connection.try_once("POST", lease_path(self._about[2]), RENEW_SECONDS, headers=self._headers)

    def _path(self, stage: Stage) -> str:
        return f"/api/v1/client/rounds/{self._about[2]}/stages/{stage}"


def lease_path(serial: int) -> str:
    """Return the path by which a client says that it works on an order, secure or not: each request says it."""
    return f"/api/v1/client/rounds/{serial}/lease"


def answer_text(job: str, client: int, serial: int, stage: Stage, answer: Json) -> str:
    """Return the canonical text of an answer, which the service signs. It differs from the text of every order."""
    facts: JsonObject = {**_named(job, client, serial, stage), "answer": answer}
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _named(job: str, client: int, serial: int, stage: Stage) -> JsonObject:
    return {"kind": "stage", "job": job, "client": client, "serial": serial, "stage": str(stage)}
