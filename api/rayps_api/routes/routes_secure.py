"""The routes by which real clients exchange the messages of secure rounds (`rayps.federated.remote.stage_folder`).

The service moves messages between clients and the worker, and signs the worker's answers like orders. A message of a
client that has dropped out is refused before it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from rayps_client.errors import Conflict
from rayps_client.secure.protocol import Stage
from rayps_client.secure.service_stages import MOST_REFUSED, answer_text

from rayps.federated.remote.mailbox import RoundOrder
from rayps_api.receive_parts import receive
from rayps_api.routes.routes_clients import LONGEST_WAIT, Caller, Digest, Joined, Serial, check_accepted, refuse_ended
from rayps_api.schemas import BINARY_BODY, problems
from rayps_api.schemas_clients import PartOut, StageOut, UpdateOut, WithdrawIn
from rayps_api.update_parts import part_size, span_of

_PAUSE = 0.05  # seconds between two looks for an answer

Refuses = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], ...],
    Query(max_length=MOST_REFUSED, description="The numbers of the clients of which a message failed a check."),
]

router = APIRouter(prefix="/api/v1", tags=["clients"], responses=problems(400, 401, 403, 404, 409, 413, 422))


@router.put(
    "/client/rounds/{serial}/stages/{stage}",
    status_code=201,
    response_model=UpdateOut,
    responses={200: {"model": UpdateOut}, **problems(429)},
    openapi_extra=BINARY_BODY,
)
async def message(
    serial: Serial,
    stage: Stage,
    caller: Joined,
    request: Request,
    rayps_sha256: Digest,
    content_range: Annotated[str | None, Header(description="Which bytes of the message the body has.")] = None,
) -> Any:
    """Receive a client's message of a stage. The first complete message counts.

    409 if the client has dropped out, or if the job has ended.

    With `Content-Range: bytes FIRST-LAST/SIZE`, what arrives is retained until the stage is closed if the connection is
    cut, and the next request sends the rest.
    """
    span = span_of(content_range)
    async with caller.service.uploads.take((caller.job, caller.member.number)) as upload:
        order = await asyncio.to_thread(_secure_order, caller, serial)
        stages, number = caller.mailbox.stages(serial), caller.member.number
        if await asyncio.to_thread(stages.has_message, stage, number):
            return JSONResponse({"serial": serial, "again": True}, 200)
        await _check_running(caller)
        if stage is Stage.MASK:
            await check_accepted(caller, serial, rayps_sha256)
        with _void_said(caller, order):
            part = partial(stages.part, stage, number, rayps_sha256)
            path = await receive(request, part, upload, span, order, rayps_sha256, partial(stages.renew, number))
            new = await asyncio.to_thread(stages.deliver, stage, number, path)
    return JSONResponse({"serial": serial, "again": not new}, 201 if new else 200)


@router.get("/client/rounds/{serial}/stages/{stage}/received", response_model=PartOut)
async def received(serial: Serial, stage: Stage, caller: Joined, rayps_sha256: Digest) -> Any:
    """Return how many bytes of the client's message with this hash have arrived: the client sends the rest."""
    order = await asyncio.to_thread(_secure_order, caller, serial)
    stages, number = caller.mailbox.stages(serial), caller.member.number
    found = await asyncio.to_thread(stages.message_bytes, stage, number)
    if found is None:
        with _void_said(caller, order):
            found = part_size(await asyncio.to_thread(stages.part, stage, number, rayps_sha256))
    return {"serial": serial, "received": found}


@router.get("/client/rounds/{serial}/stages/{stage}", response_model=StageOut)
async def answer(
    serial: Serial,
    stage: Stage,
    caller: Joined,
    request: Request,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, allow_inf_nan=False)] = 20.0,
) -> Any:
    """Return the answer after a stage, signed. Wait up to `wait` seconds for it.

    409 if the client has dropped out, or if the job has ended: no stage then gets an answer any more.
    """
    ends, stages = time.monotonic() + wait, caller.mailbox.stages(serial)
    order, version = await asyncio.to_thread(_secure_order, caller, serial), -1
    while True:
        with _void_said(caller, order):
            found = await asyncio.to_thread(stages.answer, stage, caller.member.number)
        if found is not None:
            text = answer_text(caller.job, caller.member.number, serial, stage, found)
            return StageOut(kind="answer", answer=text, signature=caller.service.client_tokens.key.sign(text))
        if version != caller.service.store.version:
            version = caller.service.store.version
            await _check_running(caller)
        if time.monotonic() >= ends or caller.service.closing.is_set() or await request.is_disconnected():
            return StageOut(kind="wait")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(caller.service.closing.wait(), _PAUSE)


@router.post("/client/rounds/{serial}/lease", status_code=204)
async def renew(serial: Serial, caller: Joined) -> Response:
    """Record that a client works on an order now: it is present. In a secure round this renews its lease too."""
    await asyncio.to_thread(caller.mailbox.stages(serial).renew, caller.member.number)
    return Response(status_code=204)


@router.post("/client/rounds/{serial}/withdraw", status_code=204)
async def withdraw(serial: Serial, body: WithdrawIn, caller: Joined, refuses: Refuses = ()) -> Response:
    """Record that a client takes no further part in a secure round, so that no stage waits for it."""
    await asyncio.to_thread(caller.mailbox.stages(serial).withdraw, caller.member.number, body.reason, refuses)
    return Response(status_code=204)


async def _check_running(caller: Caller) -> None:
    """Raise Conflict if the job has ended. The code is that of a late message: the client then asks for work."""
    refuse_ended(await caller.service.store.get(caller.job), "late")


@contextlib.contextmanager
def _void_said(caller: Caller, order: RoundOrder) -> Iterator[None]:
    """Say that the round is void, and why, in place of that a stage is closed."""
    try:
        yield
    except Conflict as error:
        raise caller.mailbox.void(order, caller.member.number) or error from None


def _secure_order(caller: Caller, serial: int) -> RoundOrder:
    """Return this client's order of a secure round.

    Raises:
        Conflict: the round is closed, is not secure, or the order is not for this client.
    """
    order = caller.mailbox.newest()
    if order is None or order.serial != serial or not caller.mailbox.is_open(serial):
        asked = caller.mailbox.order(serial)
        if asked is not None and (void := caller.mailbox.void(asked, caller.member.number)) is not None:
            raise void
        raise Conflict(f"order {serial} is closed: its messages are too late and do not count", status=409, code="late")
    if caller.member.number not in order.sampled or "secure" not in order.facts:
        raise Conflict(
            f"order {serial} is not a secure round for the client {caller.member.name}", status=409, code="not_asked"
        )
    return order
