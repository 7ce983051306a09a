"""Requests of members, which prove their certificate's key (`rayps_client.members.signed_requests`)."""

from __future__ import annotations

import hashlib

from fastapi import HTTPException, Request
from rayps_client.errors import ConfigError, ServiceError, Unauthorized
from rayps_client.members.acceptance import statement_hash
from rayps_client.members.member_certificates import MemberCertificate
from rayps_client.members.signed_requests import COVERED, HEADER, RequestFacts, streamed
from starlette.types import Message, Receive

from rayps.federated.remote.mailbox import JoinedClient
from rayps.service.members import GRANT, Members
from rayps.service.store import JobRecord
from rayps.service.tokens.client_tokens import Grant
from rayps.strategies.job import JobSpec
from rayps_api.client_terms import ClientTerms, terms_of

_RECEIVE = "rayps_receive"
_MEMBER = "rayps_member"


async def admit(request: Request, members: Members | None, token: Grant | None, limit: int) -> Grant:
    """Return the rights of a request with the header Rayps-Member; `token`: those of its token, if it has one.

    The body, unless it is sent in parts, is read here, at most `limit` bytes; `receive_of` gives it to the app again.

    Raises:
        Unauthorized: the request is refused. ServiceError: the client may sign another now.
    """
    if members is None:
        raise Unauthorized(
            "this service admits no certificates: start it with `rayps serve --members-ca FILE`, or join with a token",
            status=401,
            code="no_members",
        )
    proof = members.begin(request.headers.get(HEADER, ""))
    target = request.scope["raw_path"].decode("latin-1")
    query = request.scope["query_string"].decode("latin-1")
    digest = "" if streamed(request.method, target) else await _read_body(request, limit)
    whole = f"{target}?{query}" if query else target
    headers = {name: ",".join(request.headers.getlist(name)) for name in COVERED}  # also one that was added twice
    facts = RequestFacts(request.method, whole, headers, digest)
    grant = members.complete(proof, facts)
    request.scope[_MEMBER] = proof.member
    if token is None:
        return grant
    if token.name not in (None, grant.name):
        raise Unauthorized(
            f"the certificate is of {grant.name}, and the token is for the client {token.name!r}: use those "
            "of one client",
            status=401,
            code="name_mismatch",
        )
    return Grant(grant.id, token.job, grant.name, token.created_at, token.expires_at, None)


def receive_of(request: Request, receive: Receive) -> Receive:
    """Return what the app receives: the body that `admit` has read, or what comes from the connection."""
    found: Receive = request.scope.get(_RECEIVE, receive)
    return found


def member_of(request: Request) -> MemberCertificate | None:
    """Return the certificate that a request has proved, or None if it has none."""
    found: MemberCertificate | None = request.scope.get(_MEMBER)
    return found


def still_valid(request: Request, members: Members | None) -> None:
    """Check during a long request that its certificate was not revoked meanwhile. Raises Unauthorized."""
    member = member_of(request)
    if member is not None and members is not None:
        members.check(member)


def refuse_without_certificate(job: JobRecord, grant: Grant) -> None:
    """Refuse a client without a certificate if the job needs one. Raises HTTPException."""
    if grant.id.startswith(GRANT) or not needs_certificate(job.spec):
        return
    why = "asks for a signed data-use statement" if job.spec.statement is not None else "has members=true"
    raise HTTPException(
        403,
        f"job {job.id} {why}, and a token is not enough: start the client with the certificate of its institution "
        "(--member FILE)",
    )


def refuse_token_of_member(member: JoinedClient, grant: Grant) -> None:
    """Refuse a request with a token alone for a client that has joined with a certificate. Raises HTTPException.

    Otherwise a member whose certificate was revoked could continue with a token.
    """
    if member.token.startswith(GRANT) and not grant.id.startswith(GRANT):
        raise HTTPException(
            403, f"the client {member.name} has joined with its certificate, and a token alone is not enough (--member)"
        )


def refuse_without_authority(spec: JobSpec, terms: ClientTerms, members: Members | None) -> None:
    """Refuse a job whose clients need certificates at a service that admits none: no client could join it.

    Raises:
        ConfigError: the job has a data-use statement, or members=true.
    """
    if members is not None or not (terms.members or spec.statement is not None):
        return
    stated = spec.statement is not None
    why = "has a data-use statement, which clients sign with" if stated else "has members=true: its clients need"
    out = "statement" if stated else "members=true of clients=remote(...)"
    raise ConfigError(
        f"the job {why} certificates of their federation, and this service admits none: start it with "
        f"`rayps serve --members-ca FILE`,\nor leave {out} out",
        field="statement" if stated else "clients",
    )


def needs_certificate(spec: JobSpec) -> bool:
    """Return whether the clients of a job need a certificate: `clients=remote(members=true)`, or a statement."""
    return spec.statement is not None or terms_of(spec).members


def statement_of(job: JobRecord) -> str | None:
    """Return the hash of a job's data-use statement, or None if the job has none."""
    return None if job.spec.statement is None else statement_hash(job.spec.statement)


async def _read_body(request: Request, limit: int) -> str:
    """Read the body of a request for the app, and return its SHA-256. Raises ServiceError if it is too long."""
    receive, found, more = request.receive, bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ServiceError("the request is incomplete: the connection was closed", status=400, code="incomplete")
        found += message.get("body", b"")
        more = bool(message.get("more_body", False))
        if len(found) > limit:
            raise ServiceError(f"a body may have {limit} bytes at most", status=413, code="too_large_body")
    body, given = bytes(found), False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    request.scope[_RECEIVE] = again
    return hashlib.sha256(body).hexdigest()
