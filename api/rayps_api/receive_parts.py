"""Receive the body of a request into a part: an update of a client, or its message of a stage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

from rayps.core.errors import Conflict
from rayps_api.update_parts import PartWriter, Span

_ALIVE_SECONDS = 2.0  # seconds between two calls of `alive`


async def receive_whole(
    request: Request,
    writer: PartWriter,
    span: Span,
    most: int,
    digest: str,
    *,
    alive: Callable[[], object],
    still_open: Callable[[], object],
) -> None:
    """Write the request's body into a part, and check that the part is complete: `receive`, then `seal`.

    `still_open` raises Conflict if the round or stage is closed. When it closes, what has arrived is deleted, which
    must not look like a fault of the client.

    Raises:
        HTTPException: the body is too long, incomplete or changed, or does not begin where the part ends.
        Conflict: the round or stage is closed, or a newer request sends the same.
    """
    try:
        await receive(request, writer, span, most, alive)
        await seal(writer, span, digest)
    except HTTPException:
        try:
            await asyncio.to_thread(still_open)
        except Conflict:
            await asyncio.to_thread(writer.drop)
            raise
        raise


async def receive(request: Request, writer: PartWriter, span: Span, most: int, alive: Callable[[], object]) -> None:
    """Write the request's body into a part, block by block. `alive` is called every few seconds as blocks arrive.

    Raises:
        HTTPException: the body is too long or incomplete, or does not begin where the part ends.
        Conflict: the round or stage is closed, or a newer request sends the same.
    """
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
            if time.monotonic() - seen > _ALIVE_SECONDS:
                seen = time.monotonic()
                await asyncio.to_thread(alive)
    except FileNotFoundError:
        raise _late() from None
    except ClientDisconnect:
        if span.whole is None:
            await asyncio.to_thread(writer.drop)
        raise HTTPException(400, "the update is incomplete: the connection was closed") from None


async def seal(writer: PartWriter, span: Span, digest: str) -> None:
    """Check that the part is complete and has this hash. Raises HTTPException if not, or Conflict if it is late."""
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
