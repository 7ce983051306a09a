"""Requests that a member signs: proof that it holds its certificate's key, bound to one request at one time.

TLS often ends at a proxy, so the certificate cannot be that of the TLS connection. Instead each request has a header
`Rayps-Member: CERTIFICATE.TIME.NONCE.SIGNATURE`: the signature covers the service's key, the method, the path with its
query, the time, the nonce, the headers that name the client and its content, and the hash of the body. A request that
is repeated, late, or has another body is refused. A body that is sent in parts (`streamed`) is named by the header
`Rayps-Sha256`, the hash of the whole, which the service checks before the content counts.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Self

import httpx2

from rayps_client.errors import Unauthorized
from rayps_client.exchange.signed_orders import bytes_of, text_of
from rayps_client.members.member_certificates import MemberCertificate
from rayps_client.members.member_key import MemberKey

HEADER = "Rayps-Member"
WINDOW_SECONDS = 300.0  # how far the clocks of a member and of the service may differ
_DOMAIN = b"rayps: a request of a member, 1\n"
COVERED = ("rayps-client", "rayps-sha256", "content-range", "range")  # headers that the signature covers
_ROOT = "/api/v1/"


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a member signs of a request."""

    method: str
    target: str  # path and query; what stands before /api/v1/ does not count, because proxies may remove it
    headers: Mapping[str, str]  # by names in small letters
    body: str  # SHA-256 of the body in hex; "" for a body that is sent in parts

    def text(self, service: str, at: str, nonce: str) -> bytes:
        """Return the text that is signed. `service` is the fingerprint of the key by which the service signs orders."""
        target = self.target[max(0, self.target.find(_ROOT)) :]
        covered = [self.headers.get(name, "") for name in COVERED]
        facts = [service, self.method.upper(), target, at, nonce, *covered, self.body]
        return _DOMAIN + json.dumps(facts, ensure_ascii=True).encode()


@dataclass(frozen=True, slots=True)
class Proof:
    """The content of the header: who signed, when, and the signature."""

    member: MemberCertificate
    at: str  # seconds since the epoch
    nonce: str
    signature: bytes

    @classmethod
    def read(cls, header: str) -> Self:
        """Parse the header. Raises Unauthorized if it has another form, or its certificate is not a member's."""
        parts = header.strip().split(".")
        if len(parts) != 4 or not parts[1].isdecimal() or len(parts[1]) > 12 or not 16 <= len(parts[2]) <= 64:
            raise _malformed()
        try:
            der, signature = bytes_of(parts[0]), bytes_of(parts[3])
        except ValueError as error:
            raise _malformed() from error
        return cls(MemberCertificate.read(der), parts[1], parts[2], signature)

    def check_time(self, now: float) -> None:
        """Check that the request was signed at most `WINDOW_SECONDS` before or after `now`. Raises Unauthorized."""
        late = now - int(self.at)
        if abs(late) > WINDOW_SECONDS:
            raise Unauthorized(
                f"the request of {self.member.name} was signed {abs(late):.0f} s {'ago' if late > 0 else 'ahead'} by "
                f"this service's clock, and {WINDOW_SECONDS:.0f} s are allowed: set the clock of the client's machine",
                status=401,
                code="clock",
            )

    def check_signature(self, facts: RequestFacts, service: str) -> None:
        """Check the signature of a request. Raises Unauthorized if it is of another request or service."""
        if not self.member.verify(facts.text(service, self.at, self.nonce), self.signature):
            raise Unauthorized(
                f"the signature does not belong to this request of {self.member.name}: it was made for another "
                "service, or its body, path or headers were changed on the way.\nCompare the client's --service-key "
                "with what `rayps members service` shows where the service runs, and check any proxy in between",
                status=401,
                code="request_changed",
            )


class SignedRequests(httpx2.Auth):
    """Signs each request of a connection, also a repeated one: each has a time and a nonce of its own."""

    def __init__(self, key: MemberKey, service: str, clock: Callable[[], float] = time.time) -> None:
        """`service`: the fingerprint of the service's key."""
        self._key, self._service, self._clock = key, service, clock
        self._certificate = text_of(key.member.der)

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Add the header to a request."""
        target = request.url.raw_path.decode()
        parts = streamed(request.method, target)
        body = "" if parts else hashlib.sha256(request.read()).hexdigest()
        headers = {name.lower(): value for name, value in request.headers.items()}
        at, nonce = str(int(self._clock())), secrets.token_urlsafe(18)
        text = RequestFacts(request.method, target, headers, body).text(self._service, at, nonce)
        request.headers[HEADER] = f"{self._certificate}.{at}.{nonce}.{text_of(self._key.sign(text))}"
        yield request


def streamed(method: str, target: str) -> bool:
    """Return whether a body is content that the header Rayps-Sha256 names: an update, or the message of a stage."""
    path = target.partition("?")[0]
    return method.upper() == "PUT" and f"{_ROOT}client/rounds/" in path


def _malformed() -> Unauthorized:
    return Unauthorized(
        f"the header {HEADER} is not CERTIFICATE.TIME.NONCE.SIGNATURE: use the same version of rayps as the service",
        status=401,
        code="malformed",
    )
