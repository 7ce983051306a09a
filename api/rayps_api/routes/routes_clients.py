"""The routes of real federated clients, and the routes by which a user admits them.

Guarantees: a client can use only the routes under /api/v1/client, and sees only its own orders. The service can be
restarted at any moment, because all state is in files in the job's folder (`rayps.federated.remote.mailbox`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import JSONResponse, StreamingResponse
from rayps_client.errors import ConfigError, Conflict
from rayps_client.exchange.signed_orders import JOB_ID, OrderFacts, order_text
from rayps_client.secure.protocol import Stage
from rayps_client.values import JsonObject

from rayps.federated.remote.mailbox import JoinedClient, Mailbox, RoundOrder
from rayps.service.store import JobRecord
from rayps.service.tokens.client_tokens import Grant
from rayps_api.client_model import model_facts, model_file
from rayps_api.client_terms import terms_of
from rayps_api.membership import refuse_token_of_member, refuse_without_certificate, statement_of, still_valid
from rayps_api.receive_parts import receive
from rayps_api.schemas import BINARY_BODY, problems, timestamp
from rayps_api.schemas_clients import (
    JOB,
    ClientsOut,
    JoinIn,
    JoinOut,
    KeyOut,
    ModelOut,
    NewToken,
    PartOut,
    TokenIn,
    TokenOut,
    TokensOut,
    UpdateOut,
    WorkOut,
)
from rayps_api.service import RunningService, SentBy, Service, expiry_of, refuse_longer
from rayps_api.update_parts import begin_of_range, part_size, span_of

LONGEST_WAIT = 30.0  # seconds that a request for work may wait
_PAUSE = 0.1  # seconds between two checks for an order
_EXCLUDED_SECONDS = 2.0  # longest wait for work of a client that is asked no more, and is told so
_SEEN_SECONDS = 2.0  # seconds between two records that a client was seen
_BLOCK = 1 << 20  # bytes

router = APIRouter(prefix="/api/v1", tags=["clients"], responses=problems(400, 401, 403, 404, 409, 413, 422))

Digest = Annotated[str, Header(pattern=r"^[0-9a-f]{64}$", description="The SHA-256 hash of the whole update.")]
Serial = Annotated[int, InPath(ge=1, lt=2**53, description="The order's serial number.")]


# ---- authentication


def _granted(request: Request) -> Grant:
    grant = request.scope.get("rayps_grant")
    if not isinstance(grant, Grant):
        raise HTTPException(403, "this route is for clients: send a client token (`rayps token create`), not a user's")
    return grant


Granted = Annotated[Grant, Depends(_granted)]


@dataclass(frozen=True, slots=True)
class Caller:
    """The joined client that sent a request."""

    service: Service
    job: str
    mailbox: Mailbox
    member: JoinedClient
    token: str  # the text of the token; "" if the client has a certificate alone


async def _joined(
    request: Request,
    grant: Granted,
    rayps_client: Annotated[
        str,
        Header(
            pattern=rf"^{JOB_ID.pattern}:\d{{1,8}}:[A-Za-z0-9_-]{{16,200}}$",
            description="JOB:NUMBER:KEY, as the client got them when it joined.",
        ),
    ],
) -> Caller:
    job, number, key = rayps_client.split(":")
    if grant.job not in (None, job):
        raise HTTPException(403, f"this token is for job {grant.job}")
    running: Service = request.app.state.service
    mailbox = running.mailbox(job)
    member = await asyncio.to_thread(mailbox.member, int(number), key)
    if grant.name not in (None, member.name):
        raise HTTPException(403, f"this token is for the client {grant.name!r}")
    refuse_token_of_member(member, grant)
    mailbox.record_request(member.number)
    return Caller(running, job, mailbox, member, request.headers.get("authorization", "").partition(" ")[2].strip())


Joined = Annotated[Caller, Depends(_joined)]


# ---- routes of users


@router.post("/client-tokens", status_code=201, response_model=NewToken)
async def create_token(body: TokenIn, running: RunningService, sender: SentBy) -> Any:
    """Create a token for clients, which lives at most as long as the token of this request.

    The answer is the only one that shows the token.
    """
    job = None if body.job is None else await running.record(body.job)
    if job is not None:
        _check_remote(job)
    ends = expiry_of(sender, body.days)
    grant, text = await running.client_tokens.create(job.id if job else None, body.name, ends)
    return {**_token(grant), "token": text}


@router.get("/client-tokens", response_model=TokensOut)
async def tokens(running: RunningService, job: Annotated[str | None, Query(max_length=100)] = None) -> Any:
    """List the tokens of clients, newest first."""
    job_id = None if job is None else (await running.record(job)).id
    return {"tokens": [_token(grant) for grant in await running.client_tokens.all(job_id)]}


@router.delete("/client-tokens/{token_id}", response_model=TokenOut)
async def revoke(token_id: Annotated[str, InPath(min_length=1, max_length=100)], running: RunningService) -> Any:
    """Revoke a token at once. Updates that its clients have sent in an open round do not count."""
    grant = await running.client_tokens.revoke(token_id)
    await running.withdraw([grant.id])
    return _token(grant)


@router.post("/client-tokens/{token_id}/rotate", status_code=201, response_model=NewToken)
async def rotate(
    token_id: Annotated[str, InPath(min_length=1, max_length=100)], running: RunningService, sender: SentBy
) -> Any:
    """Replace a token by a new one for the same job, client and expiry. The old token is revoked."""
    old = await running.client_tokens.get(token_id)
    refuse_longer(sender, old.expires_at, f"client token {old.id}")
    if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= time.time()):
        raise Conflict(
            f"client token {old.id} was revoked or has expired: create another with `rayps token create`", status=409
        )
    grant, text = await running.client_tokens.create(old.job, old.name, old.expires_at)
    await revoke(token_id, running)
    return {**_token(grant), "token": text}


@router.get("/jobs/{job_id}/clients", response_model=ClientsOut)
async def clients(job_id: str, running: RunningService) -> Any:
    """List the clients that have joined a job, and what the job waits for, or how it has ended."""
    record = await running.record(job_id)
    return JSONResponse(await asyncio.to_thread(_shown, running.mailbox(record.id), record))


# ---- routes of clients


@router.get("/client/key", response_model=KeyOut)
async def key(grant: Granted, request: Request, job: Annotated[str | None, Query(pattern=JOB)] = None) -> Any:
    """Show the public key of the orders' signatures, and whether `job` is secure, and lets clients check each other.

    A client checks the key before it joins. A client of a secure job joins without the number of its samples.
    """
    running: Service = request.app.state.service
    wanted = grant.job or job
    record = None if wanted is None else await running.store.get(wanted)
    found: JsonObject = {"secure": False, "verify": False, "statement": None}
    if record is not None:
        terms = terms_of(record.spec)
        found = {"secure": bool(terms.secure), "verify": terms.verify}
        found["statement"] = statement_of(record)
    return {"public_key": running.client_tokens.key.public, **found}


@router.post("/client/join", response_model=JoinOut)
async def join(body: JoinIn, grant: Granted, request: Request) -> Any:
    """Join a job, or join it again."""
    running: Service = request.app.state.service
    wanted = grant.job or body.job
    if wanted is None:
        raise ConfigError("this token is valid for any job: choose one with --job ID", field="job")
    if body.job not in (None, wanted):
        raise ConfigError(f"this token is for job {wanted}, not for {body.job}", field="job")
    name = grant.name or body.name
    if name is None:
        raise ConfigError("the client has no name: give --name, e.g. hospital-a", field="name")
    if body.name not in (None, name):
        raise ConfigError(f"this token is for the client {name!r}, not for {body.name!r}", field="name")
    job = await running.store.get(wanted)
    _check_remote(job)
    refuse_without_certificate(job, grant)
    refuse_ended(job, "ended")
    samples = 0 if terms_of(job.spec).secure else body.samples  # a secure round counts samples under its masks
    if samples is None:
        raise ConfigError("the client's number of samples is missing: give samples", field="samples")
    mailbox = running.mailbox(job.id)
    await asyncio.to_thread(mailbox.prepare)
    member = await asyncio.to_thread(mailbox.join, name, body.key, grant.id, samples)
    return {
        "job": job.id,
        "name": name,
        "number": member.number,
        "public_key": running.client_tokens.key.public,
        "workload": job.spec.workload,
    }


@router.get("/client/work", response_model=WorkOut)
async def work(
    caller: Joined,
    request: Request,
    after: Annotated[int, Query(ge=0, lt=2**53)] = 0,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, allow_inf_nan=False)] = 20.0,
    away: Annotated[bool, Query(description="The client takes part in no round now: none waits for it.")] = False,
) -> Any:
    """Return the first order after order `after`, or the job's end. Wait up to `wait` seconds for one of them."""
    running, begun = caller.service, time.monotonic()
    ends = begun + wait
    await asyncio.to_thread(caller.mailbox.set_away, caller.member.number, away)
    seen, version, record = time.monotonic(), -1, None

    async def answer(**found: Any) -> WorkOut:
        """Add why the update of order `after` did not count, read now because the round may have closed just before."""
        verdict = await asyncio.to_thread(caller.mailbox.verdict, after, caller.member.number) if after else None
        return WorkOut(verdict=verdict, **found)

    while True:
        if version != running.store.version or record is None:
            version = running.store.version
            record = await running.store.get(caller.job)
            if caller.token and await running.client_tokens.grant(caller.token) is None:
                raise HTTPException(401, "this client token was revoked or has expired")
        still_valid(request, running.members)
        if record.status.terminal:
            return await answer(kind="end", status=record.status.value, reason=record.reason)
        order = await asyncio.to_thread(caller.mailbox.newest_for, caller.member.number)
        if order is not None and order.serial > after and not away and _is_for(caller, order):
            text = _signed_text(caller, order, statement_of(record))
            signature = running.client_tokens.key.sign(text)
            return await answer(kind="round", order=text, signature=signature)
        excluded = await asyncio.to_thread(caller.mailbox.exclusion, caller.member.number)
        over = time.monotonic() >= (ends if excluded is None else min(ends, begun + _EXCLUDED_SECONDS))
        if over or running.closing.is_set() or await request.is_disconnected():
            why = f"this client is asked no more: {excluded}"
            reason = await asyncio.to_thread(caller.mailbox.standing) if excluded is None else why
            return await answer(kind="wait", status=record.status.value, reason=reason or record.reason)
        if time.monotonic() - seen > _SEEN_SECONDS:
            seen = time.monotonic()
            caller.mailbox.record_request(caller.member.number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.closing.wait(), _PAUSE)


@router.get(
    "/client/rounds/{serial}/parameters",
    response_class=Response,
    responses={code: {"content": {"application/octet-stream": {}}} for code in (200, 206)},
)
async def parameters(
    serial: Serial, caller: Joined, range: Annotated[str | None, Header(description="From which byte on.")] = None
) -> Response:
    """Send the parameters of an open round, as safetensors; their hash is in the order. `Range: bytes=N-` resumes."""
    order = await asyncio.to_thread(open_order, caller, serial)
    file = await asyncio.to_thread(_open, caller.mailbox, order.serial)
    size = os.fstat(file.fileno()).st_size
    begin = begin_of_range(range, size)
    file.seek(begin)
    headers = {"Content-Length": str(size - begin), "Accept-Ranges": "bytes"}
    if begin:
        headers["Content-Range"] = f"bytes {begin}-{size - 1}/{size}"
    return StreamingResponse(
        _blocks(file), 206 if begin else 200, media_type="application/octet-stream", headers=headers
    )


@router.get("/client/rounds/{serial}/update", response_model=PartOut)
async def received(serial: Serial, caller: Joined, rayps_sha256: Digest) -> Any:
    """Return how many bytes of the client's update with this hash have arrived: an upload continues from there."""
    mailbox, number = caller.mailbox, caller.member.number
    if await asyncio.to_thread(order_without_update, caller, serial) is None:
        found = await asyncio.to_thread(mailbox.update_bytes, serial, number)
    else:
        found = await asyncio.to_thread(lambda: part_size(mailbox.part(serial, number, rayps_sha256)))
    return {"serial": serial, "received": found}


@router.put(
    "/client/rounds/{serial}/update",
    status_code=201,
    response_model=UpdateOut,
    responses={200: {"model": UpdateOut}, **problems(429)},
    openapi_extra=BINARY_BODY,
)
async def update(
    serial: Serial,
    caller: Joined,
    request: Request,
    rayps_sha256: Digest,
    content_range: Annotated[str | None, Header(description="Which bytes of the update the body has.")] = None,
) -> Any:
    """Receive a client's update of a round, as safetensors. The first complete update counts. 409 if it is late.

    With `Content-Range: bytes FIRST-LAST/SIZE`, what arrives is retained if the connection is cut, and the next request
    sends the rest.
    """
    span = span_of(content_range)
    async with caller.service.uploads.take((caller.job, caller.member.number)) as upload:
        order = await asyncio.to_thread(order_without_update, caller, serial)
        if order is not None and "secure" in order.facts:
            raise Conflict(
                f"order {serial} is a secure round: its updates are sent masked, in stages; use a newer rayps client",
                status=409,
                code="secure",
            )
        if order is None:
            return JSONResponse({"serial": serial, "again": True}, 200)
        await check_accepted(caller, serial, rayps_sha256)
        part = partial(caller.mailbox.part, serial, caller.member.number, rayps_sha256)
        alive = partial(caller.mailbox.record_request, caller.member.number)
        path = await receive(request, part, upload, span, order, rayps_sha256, alive)
        still_valid(request, caller.service.members)
        new = await asyncio.to_thread(caller.mailbox.deliver, serial, caller.member.number, path)
    return JSONResponse({"serial": serial, "again": not new}, 201 if new else 200)


@router.get("/client/model", response_model=ModelOut)
async def model(caller: Joined) -> Any:
    """Show the facts of the job's newest checkpoint, signed. 404 if there is none yet."""
    facts = await asyncio.to_thread(model_facts, caller.service.folder(caller.job))
    member, starts = caller.member, await asyncio.to_thread(caller.mailbox.known_starts)
    facts |= {"starts": starts, "job": caller.job, "client": member.number, "name": member.name}
    text = order_text(facts)
    return {"model": text, "signature": caller.service.client_tokens.key.sign(text)}


@router.get(
    "/client/model/{step}/{name}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def model_content(
    step: Annotated[int, InPath(ge=0, lt=2**53)], name: Annotated[str, InPath(max_length=100)], caller: Joined
) -> Response:
    """Send the parameters or the buffers of a checkpoint, as safetensors; their hashes are in the facts."""
    path = await asyncio.to_thread(model_file, caller.service.folder(caller.job), step, name)
    file = await asyncio.to_thread(path.open, "rb")
    size = os.fstat(file.fileno()).st_size
    return StreamingResponse(
        _blocks(file), media_type="application/octet-stream", headers={"Content-Length": str(size)}
    )


@router.post("/client/leave", status_code=204)
async def leave(caller: Joined) -> Response:
    """Record that the client leaves the job. The client may join again."""
    await asyncio.to_thread(caller.mailbox.leave, caller.member.number)
    return Response(status_code=204)


def order_without_update(caller: Caller, serial: int) -> RoundOrder | None:
    """Return this client's open order, or None if the client's update was already received.

    Raises:
        Conflict: the round is closed, or the order is not for this client.
    """
    if caller.mailbox.has_update(serial, caller.member.number):
        return None
    return open_order(caller, serial)


def open_order(caller: Caller, serial: int) -> RoundOrder:
    """Return this client's open order.

    Raises:
        Conflict: the round is closed, or the order is not for this client.
    """
    mailbox, number = caller.mailbox, caller.member.number
    mailbox.parameters(serial)
    order = mailbox.order(serial)
    if order is None or number not in order.sampled:
        raise Conflict(f"order {serial} is not for the client {caller.member.name}", status=409, code="not_asked")
    return order


async def check_accepted(caller: Caller, serial: int, digest: str) -> None:
    """Check that the client has signed the job's statement for an update with this hash, if the job has a statement.

    Raises:
        Conflict: it has not.
    """
    if statement_of(await caller.service.store.get(caller.job)) is None:
        return
    if not await asyncio.to_thread(caller.mailbox.has_acceptance, serial, caller.member.number, digest):
        raise Conflict(
            f"the client {caller.member.name} has not signed the job's data-use statement for this update of order "
            f"{serial}: use a newer rayps client, with --accept-statement",
            status=409,
            code="statement",
        )


def _is_for(caller: Caller, order: RoundOrder) -> bool:
    mailbox, number = caller.mailbox, caller.member.number
    return mailbox.is_open(order.serial) and not mailbox.has_update(order.serial, number)


def _signed_text(caller: Caller, order: RoundOrder, statement: str | None) -> str:
    left = max(0.0, order.begun + order.deadline - time.time())
    facts: OrderFacts = {
        **order.facts,
        "job": caller.job,
        "client": caller.member.number,
        "name": caller.member.name,
        "seconds": round(left, 3),
    }
    return order_text(facts if statement is None else {**facts, "statement": statement})


def _open(mailbox: Mailbox, serial: int) -> BinaryIO:
    try:
        return mailbox.parameters(serial).open("rb")
    except FileNotFoundError:
        raise Conflict("the round is closed: its parameters were deleted", status=409, code="late") from None


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while block := file.read(_BLOCK):
            yield block


def refuse_ended(job: JobRecord, code: str) -> None:
    """Raise Conflict with this code if a job has ended. Its data say how."""
    if job.status.terminal:
        raise Conflict(
            f"job {job.id} has ended: {job.status}: {job.reason or ''}",
            status=409,
            code=code,
            ended={"status": job.status.value, "reason": job.reason or ""},
        )


def _check_remote(job: JobRecord) -> None:
    if not terms_of(job.spec).remote:
        raise ConfigError(
            f"job {job.id} ({job.name}) has no real clients: submit it with a federated strategy and clients=remote, "
            "e.g. fedavg:clients=remote",
            field="job",
            code="not_remote",
        )


def _shown(mailbox: Mailbox, job: JobRecord) -> JsonObject:
    ended = job.status.terminal
    return {
        "clients": [_client(mailbox, member, ended) for member in mailbox.members()],
        "waits": None if ended else mailbox.standing(),
        "ended": f"the job has ended: {job.status}: {job.reason or ''}" if ended else None,
    }


def _client(mailbox: Mailbox, member: JoinedClient, ended: bool) -> JsonObject:
    seen, order = mailbox.last_seen(member.number), mailbox.newest_for(member.number)
    excluded, state = mailbox.exclusion(member.number), mailbox.state(member.number)
    doing = ""
    if order is not None:
        at = f"round {order.round}"
        unfinished = f"works on {at}" if state == "here" else f"has sent nothing in {at}"
        doing = _doing(mailbox, order, member.number, f"sent nothing in {at}" if ended else unfinished)
    return {
        "number": member.number,
        "name": member.name,
        "state": "ended" if ended and state in ("here", "away") else state,
        "samples": member.samples,
        "joined_at": timestamp(member.joined_at),
        "seen_seconds": seen if seen < float("inf") else None,
        "doing": doing if excluded is None else f"is asked no more: {excluded}",
    }


def _doing(mailbox: Mailbox, order: RoundOrder, number: int, unfinished: str) -> str:
    """Return what a client does, or has done, for its newest order.

    `unfinished` says it of a client that has sent nothing for an order that is open.
    """
    at, is_open = f"round {order.round}", mailbox.is_open(order.serial)
    if "secure" not in order.facts:
        if mailbox.has_update(order.serial, number):
            return f"has sent {at}"
        return unfinished if is_open else f"sent nothing in {at}"
    outcome = mailbox.outcome(order.serial)  # the messages of a secure round are deleted when it ends
    if outcome is None:
        if not is_open:
            return f"{at} was broken off"
        stages = mailbox.stages(order.serial)
        why = stages.withdrawn().get(number)
        if why is not None:
            return f"dropped out of {at}: {why}"
        return f"has sent {at}" if stages.has_message(Stage.MASK, number) else unfinished
    if number in outcome.dropped:
        return f"dropped out of {at}: {outcome.dropped[number]}"
    return f"has sent {at}" if outcome.void is None else f"took part in {at}, which is void"


def _token(grant: Grant) -> JsonObject:
    return {
        "id": grant.id,
        "job": grant.job,
        "name": grant.name,
        "created_at": timestamp(grant.created_at),
        "expires_at": timestamp(grant.expires_at),
        "revoked_at": timestamp(grant.revoked_at),
    }
