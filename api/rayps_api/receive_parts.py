"""Receive the body of a request into a part: an update of a client, or its message of a stage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from fastapi import HTTPException, Request
from rayps_client.errors import Conflict
from starlette.requests import ClientDisconnect

from rayps.federated.remote.mailbox import RoundOrder
from rayps_api.update_parts import PartWriter, Span
from rayps_api.upload_slots import Upload

_ALIVE_SECONDS = 2.0  # seconds between two calls of `alive`


async def receive(
    request: Request,
    part: Callable[[], Path],
    upload: Upload,
    span: Span,
    order: RoundOrder,
    digest: str,
    alive: Callable[[], None],
) -> Path:
    """Write the request's body into the part at `part()`, block by block, and check that its SHA-256 is `digest`.

    Return the part's path.

    `part` raises Conflict if the round or stage is closed. When it closes, what has arrived is deleted, which must not
    look like a fault of the client: `part` is asked again before a body is refused.

    `alive` is called every few seconds as blocks arrive, which they must do at a rate that meets the order's deadline.

    Raises:
        HTTPException: the body is too long or incomplete, does not begin where the part ends, or has another hash.
        Conflict: the round or stage is closed, or a newer request of the client has begun.
    """
    writer = upload.open(await asyncio.to_thread(part))
    upload.begin(_expected(request, span), order.begun + order.deadline - time.time())
    try:
        await _write(request, writer, upload, span, order.most_bytes, alive)
        upload.complete()
        await _seal(writer, span, digest)
    except HTTPException:
        try:
            await asyncio.to_thread(part)
        except Conflict:
            await asyncio.to_thread(writer.drop)
            raise
        raise
    return writer.path


def _expected(request: Request, span: Span) -> int | None:
    """Return how many bytes the request's body has, or None if it does not say so."""
    if span.whole is not None:
        return span.whole - span.begin
    length = request.headers.get("content-length")
    return None if length is None else int(length)


async def _write(
    request: Request, writer: PartWriter, upload: Upload, span: Span, most: int, alive: Callable[[], None]
) -> None:
    limit = most if span.whole is None else span.whole
    if limit > most:
        raise HTTPException(413, f"an update or message of this round has {most} bytes at most")
    if span.begin == 0:
        await asyncio.to_thread(writer.drop)
    elif span.begin > writer.size:
        raise HTTPException(422, f"{writer.size} bytes of this update have arrived: send the rest from there on")
    at, seen = span.begin, time.monotonic()
    try:
        async for block in request.stream():
            if at + len(block) > limit:
                await asyncio.to_thread(writer.drop)
                raise HTTPException(413, f"this update has more than {limit} bytes")
            await asyncio.to_thread(writer.write, at, block)
            at += len(block)
            upload.advance(at - span.begin)
            if time.monotonic() - seen > _ALIVE_SECONDS:
                seen = time.monotonic()
                await asyncio.to_thread(alive)
    except FileNotFoundError:
        raise _late() from None
    except ClientDisconnect:
        if span.whole is None:
            await asyncio.to_thread(writer.drop)
        raise HTTPException(400, "the update is incomplete: the connection was closed") from None


async def _seal(writer: PartWriter, span: Span, digest: str) -> None:
    if span.whole is not None and writer.size < span.whole:
        raise HTTPException(400, f"the update is incomplete: {writer.size} of {span.whole} bytes have arrived")
    try:
        whole = await asyncio.to_thread(writer.seal, digest)
    except FileNotFoundError:
        raise _late() from None
    if not whole:
        writer.path.unlink(missing_ok=True)
        raise HTTPException(
            422, "the update's hash is not the one in Rayps-Sha256: it was cut off or changed on the way; send it again"
        )


def _late() -> Conflict:
    return Conflict("the round is closed: the update is too late", status=409, code="late")
