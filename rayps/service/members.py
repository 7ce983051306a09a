"""Which members of the federation the service admits: certificates, proof of the key, replays, revocation.

The service trusts the authorities in a file (`rayps serve --members-ca FILE`), for all of its jobs: who belongs to the
federation is no matter of a single job. A job says with `clients=remote(members=true)` that clients need a certificate.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rayps_client.errors import ServiceError, Unauthorized
from rayps_client.exchange.signed_orders import Key
from rayps_client.members.member_certificates import MemberCertificate, MembersCa
from rayps_client.members.revocations import Revocations
from rayps_client.members.signed_requests import WINDOW_SECONDS, Proof, RequestFacts

from rayps.service.settings import Settings
from rayps.service.tokens.client_tokens import Grant

log = logging.getLogger(__name__)

GRANT = "certificate "  # the id of a member's grant: this, and the certificate's serial number
_LOOK_SECONDS = 0.5  # between two looks at the list of revoked certificates


class SeenNonces:
    """The nonces of the requests of the last minutes, so that a repeated request is refused."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()
        self._ends: list[tuple[float, tuple[str, str]]] = []

    def add(self, serial: str, nonce: str, now: float) -> bool:
        """Record a nonce of a certificate; return False if it was there before. Nonces past the window are dropped."""
        while self._ends and self._ends[0][0] < now:
            self._known.discard(heapq.heappop(self._ends)[1])
        if (serial, nonce) in self._known:
            return False
        self._known.add((serial, nonce))
        heapq.heappush(self._ends, (now + 2 * WINDOW_SECONDS + 1, (serial, nonce)))
        return True


@dataclass(frozen=True, slots=True)
class Members:
    """The members of the federation. `service` is the fingerprint of the key by which the service signs orders."""

    ca: MembersCa
    revocations: Revocations
    service: str
    nonces: SeenNonces
    clock: Callable[[], float]
    started: float  # the time since which nonces are known

    @classmethod
    def load(cls, ca: Path, revoked: Path | None, service: str, clock: Callable[[], float] = time.time) -> Members:
        """Read the authorities' file and the list of revoked certificates. Raises ConfigError if one is invalid."""
        trusted = MembersCa.load(ca)
        return cls(trusted, Revocations(revoked, trusted.authorities, clock), service, SeenNonces(), clock, clock())

    def begin(self, header: str) -> Proof:
        """Read the header of a request, and check what needs no body.

        Raises:
            Unauthorized: the certificate is not trusted or not valid now, was revoked, or the time is wrong.
            ServiceError: the request was signed before the service started; the client sends another.
        """
        proof, now = Proof.read(header), self.clock()
        self.check(proof.member)
        proof.check_time(now)
        if int(proof.at) <= int(self.started):
            raise ServiceError(
                "the service has started after this request was signed, and cannot know whether it is a repeated one: "
                "sign another",
                status=503,
                code="started",
            )
        return proof

    def complete(self, proof: Proof, facts: RequestFacts) -> Grant:
        """Check the signature of a request, and that it is no repeated one; return the member's rights.

        Raises:
            Unauthorized: the signature is of another request, or the request was received before.
        """
        proof.check_signature(facts, self.service)
        member = proof.member
        if not self.nonces.add(member.serial, proof.nonce, self.clock()):
            raise Unauthorized(
                f"this request of {member.name} was received before: somebody repeats it; sign each request anew",
                status=401,
                code="replayed",
            )
        return Grant(f"{GRANT}{member.serial}", None, member.name, self.started, member.ends, None)

    def check(self, member: MemberCertificate) -> None:
        """Check that a certificate is trusted, valid now, and was not revoked. Raises Unauthorized."""
        self.ca.check(member, self.clock())
        if member.serial in self.revocations.revoked():
            raise Unauthorized(
                f"the certificate of {member.name} (serial number {member.serial}) was revoked: ask the federation's "
                "authority",
                status=401,
                code="revoked",
            )

    async def watch(self, withdraw: Callable[[frozenset[str]], Awaitable[None]]) -> None:
        """Call `withdraw` with the ids of the grants of all revoked certificates whenever the list has grown.

        It is called twice, at two looks: a request that was admitted just before may have been carried out in between.
        """
        known: deque[frozenset[str]] = deque([frozenset(), frozenset()], maxlen=2)
        while True:
            found = await asyncio.to_thread(self.revocations.revoked)
            if found - known[0]:
                try:
                    await withdraw(frozenset(f"{GRANT}{serial}" for serial in found))
                    known.append(found)
                except Exception:  # e.g. the store is busy: the next look tries again
                    log.exception("the updates of revoked members could not be withdrawn")
            await asyncio.sleep(_LOOK_SECONDS)


def describe_grant(grant: str) -> str:
    """Return in words what gives a client its rights: "certificate (serial number S)" or "token (ID)"."""
    serial = grant.removeprefix(GRANT)
    return f"token ({grant})" if serial == grant else f"certificate (serial number {serial})"


def members_of(settings: Settings, key: Key) -> Members | None:
    """Return the members of the federation in the settings; None if these name no authority. `key`: the service's.

    Raises ConfigError if a file is invalid.
    """
    if settings.members_ca is None:
        return None
    return Members.load(settings.members_ca, settings.members_revoked, key.fingerprint)
