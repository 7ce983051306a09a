"""The HTTP connection of a client to its job service: retries, cut transfers that continue, TLS, a proxy, a meter."""

from __future__ import annotations

import contextlib
import hashlib
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2

from rayps_client.errors import Unauthorized, Unreachable
from rayps_client.exchange.service_answers import checked

MOST_PAUSE_SECONDS = 30.0  # longest pause between two attempts
_CALL_SECONDS = 60.0  # time-out of one HTTP call
_BLOCK = 1 << 16  # bytes of a block of an upload
_DAMAGED = (400, 409, 422)  # the answers to bytes that were cut off, changed or crossed on their way, among others
_CROSSED = "superseded"  # the code of a 409 that ends an upload in favour of a newer one of the same bytes
_MOST_SENT = 6  # times that bytes are sent which the service says have arrived damaged
_GIVEN_BY_USER = ("/api/v1/client/key", "/api/v1/client/join", "/api/v1/client/statement")


class Meter(Protocol):
    """Counts the bytes of a connection, and may let it wait."""

    def sent(self, count: int) -> None:
        """Record that `count` bytes were sent."""

    def received(self, count: int) -> None:
        """Record that `count` bytes were received."""


class NoMeter:
    """Counts nothing."""

    def sent(self, count: int) -> None:
        """Do nothing."""

    def received(self, count: int) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Line:
    """How a client reaches its service: which certificates it trusts, its proxy, and what counts its bytes.

    Without `proxy`, the variables HTTPS_PROXY, HTTP_PROXY and NO_PROXY decide. Without `trust`, the certificates of the
    certifi package are trusted.
    """

    trust: ssl.SSLContext | None = None
    proxy: str | None = None
    auth: httpx2.Auth | None = None  # signs requests with a certificate's key, beside the token or in its place
    meter: Meter = field(default_factory=NoMeter)


class ServiceConnection:
    """The HTTP connection of a client. A request is repeated until the service answers, for at most `patience` s."""

    def __init__(
        self,
        url: str,
        token: str,
        patience: float,
        report: Callable[[str], None],
        transport: httpx2.BaseTransport | None = None,
        *,
        line: Line | None = None,
    ) -> None:
        self.url, self.patience, self._report = url, patience, report
        found = line or Line()
        self._meter = found.meter
        self._beside: deque[int] = deque()  # the bytes of requests of other threads
        self._http = httpx2.Client(
            base_url=url,
            timeout=httpx2.Timeout(_CALL_SECONDS, connect=10.0),
            trust_env=True,
            verify=True if found.trust is None else found.trust,
            proxy=found.proxy,
            transport=transport,
            auth=found.auth,
            headers={"User-Agent": "rayps-client", **({"Authorization": f"Bearer {token}"} if token else {})},
        )

    def call(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request until the service answers; return the answer.

        Raises:
            Unreachable: there was no answer for `patience` seconds.
            Unauthorized: the service refused the token, or has another certificate than the trusted one.
            ConfigError: the service refused what the user has given, such as the client's name.
            NotFound, Conflict, ServiceError: the service refused the request.
        """

        def once() -> httpx2.Response:
            answer = self._http.request(method, path, **options)
            self._count(answer)
            self._meter.received(answer.num_bytes_downloaded)
            return answer

        return self._until_answered(once, of_user=path in _GIVEN_BY_USER)

    def download(self, path: str, headers: Mapping[str, str]) -> bytes:
        """Return the bytes at `path`. After a cut the rest alone is requested. Raises the errors of `call`."""
        found = bytearray()

        def once() -> httpx2.Response:
            more = {"Accept-Encoding": "identity", **({"Range": f"bytes={len(found)}-"} if found else {})}
            with self._http.stream("GET", path, headers={**headers, **more}) as answer:
                self._count(answer)
                if not answer.is_success:
                    answer.read()
                    return answer
                if answer.status_code != 206:
                    found.clear()  # the service sends everything again
                for block in answer.iter_raw():
                    found.extend(block)
                    self._meter.received(len(block))
            return answer

        self._until_answered(once)
        return bytes(found)

    def upload(self, path: str, raw: bytes, headers: Mapping[str, str], *, begun: bool = False, ask: str = "") -> None:
        """Send bytes to `path`. After a cut the service is asked what it has, and the rest alone is sent.

        The header Rayps-Sha256 names the bytes. `begun`: the service may have a part of them already. `ask`: the path
        at which it says what it has, if not `path`; an older service has no such path, and gets the whole.

        Bytes that have arrived damaged are sent again, a few times: they were whole here. Raises the errors of `call`.
        """
        named = {**headers, "Rayps-Sha256": hashlib.sha256(raw).hexdigest(), "Content-Type": "application/octet-stream"}
        cut, left = begun, _MOST_SENT

        def once() -> httpx2.Response:
            nonlocal cut, left
            at, left = 0, left - 1
            if cut:
                answer = self._http.get(ask or path, headers=named)
                self._count(answer)
                unknown = bool(ask) and answer.status_code in (404, 405)
                if not answer.is_success and not unknown:
                    return answer
                at = 0 if unknown else min(int(answer.json()["received"]), len(raw))
            cut = True
            span = f"bytes {at}-{len(raw) - 1}/{len(raw)}" if at < len(raw) else f"bytes */{len(raw)}"
            ranged = {**named, "Content-Range": span, "Content-Length": str(len(raw) - at)}
            answer = self._http.put(path, content=self._blocks(raw, at), headers=ranged)
            self._meter.received(_size(answer.headers) + answer.num_bytes_downloaded)
            return answer

        self._until_answered(once, again=lambda answer: left > 0 and _is_damaged(answer))

    def try_once(self, method: str, path: str, seconds: float, **options: Any) -> None:
        """Send a request once and ignore a failure. Another thread may call this: the meter counts it later."""
        with contextlib.suppress(Exception):
            answer = self._http.request(method, path, timeout=seconds, **options)
            self._beside.append(_size(answer.request.headers) + _size(answer.headers) + answer.num_bytes_downloaded)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _until_answered(
        self,
        once: Callable[[], httpx2.Response],
        *,
        of_user: bool = False,
        again: Callable[[httpx2.Response], bool] = lambda answer: False,
    ) -> httpx2.Response:
        """Call `once` until it returns an answer that is not a temporary failure. Raises the errors of `call`.

        `of_user`: whether the request says what the user has given. `again`: which refusals are temporary failures too.
        """
        since, attempt, reported = time.monotonic(), 0, False
        while True:
            cause = ""
            try:
                answer = once()
                if answer.status_code < 500 and answer.status_code != 429 and not again(answer):
                    if reported:
                        self._report("the service answers again")
                    if not answer.is_success:
                        checked(answer, of_user=of_user)
                    return answer
                cause = f"HTTP status {answer.status_code}"
            except httpx2.TransportError as error:
                _refuse_certificate(error, self.url)
                cause = str(error) or type(error).__name__
            silent = time.monotonic() - since
            if silent > self.patience:
                raise Unreachable(
                    f"no rayps service has answered at {self.url} for {silent:.0f} s ({cause}): run the command again "
                    "later to continue,\nor raise --patience SECONDS",
                    url=self.url,
                )
            if not reported and attempt > 1:
                self._report(
                    f"no answer from {self.url} ({cause}): retrying for up to {self.patience:.0f} s (--patience)"
                )
                reported = True
            attempt += 1
            time.sleep(_pause(attempt))

    def _blocks(self, raw: bytes, at: int) -> Iterator[bytes]:
        for low in range(at, len(raw), _BLOCK):
            block = raw[low : low + _BLOCK]
            yield block
            self._meter.sent(len(block))

    def _count(self, answer: httpx2.Response) -> None:
        """Count the headers of a request and its answer, and the request's body if it is in memory.

        Count also the requests of `try_once` since the last call.
        """
        while self._beside:
            self._meter.received(self._beside.popleft())
        body = answer.request.headers.get("Content-Length", "0")
        self._meter.sent(_size(answer.request.headers) + int(body))
        self._meter.received(_size(answer.headers))


def _size(headers: httpx2.Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers.raw)


def _is_damaged(answer: httpx2.Response) -> bool:
    """Return whether the service refused an upload because of what has arrived of it, and not for what it is."""
    if answer.request.method != "PUT" or answer.status_code not in _DAMAGED:
        return False
    return answer.status_code != 409 or _code(answer) == _CROSSED


def _code(answer: httpx2.Response) -> str:
    try:
        return str(answer.json().get("code"))
    except (ValueError, AttributeError):
        return ""


def _refuse_certificate(error: BaseException, url: str) -> None:
    """Raise Unauthorized if a connection failed because of the service's certificate: a retry would not help."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = getattr(cause, "verify_message", None) or cause.args[-1]
            raise Unauthorized(
                f"the certificate of {url} is not trusted: {why}. Check the address; for a "
                "service with a certificate of its own, give --certificate FILE, or --pin SHA256",
                code="certificate",
            ) from error
        cause = cause.__cause__ or cause.__context__


def _pause(attempt: int) -> float:
    return random.uniform(0.5, 1.0) * min(MOST_PAUSE_SECONDS, 0.1 * 2.0 ** min(attempt, 20))
