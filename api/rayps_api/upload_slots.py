"""Slots for the uploads of clients: one upload of each client at a time, and a rate that meets the round's deadline.

A newer upload of a client ends the one before, whose connection may be dead without anybody knowing. Therefore a client
holds one slot at most. An upload that is too slow for its round's deadline is ended, so that it does not hold a slot
until then. What has arrived is retained, and the client continues from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import HTTPException
from rayps_client.errors import Conflict

from rayps_api.update_parts import PartWriter

MOST_UPLOADS = 64  # uploads that are received at one time, on slow lines for minutes; more are answered with 429
GRACE_SECONDS = 15.0  # seconds by which an upload may be behind its least rate
_RETRY = {"Retry-After": "2"}


def ends_after(arrived: int, expected: int | None, seconds: float) -> float:
    """Return after how many seconds an upload is ended unless more of it arrives. Pure.

    `arrived`: the bytes that have arrived since it began, of `expected` (None: unknown). `seconds`: the time from its
    beginning to the deadline. An upload of a constant rate that meets the deadline is never ended.
    """
    part = 1.0 if not expected else min(1.0, arrived / expected)
    return GRACE_SECONDS + part * max(0.0, seconds)


class Upload:
    """One upload of a client: the part into which it is written, and the least rate at which it must arrive."""

    def __init__(self) -> None:
        self.timer = asyncio.timeout(None)
        self.superseded = False
        self._writer: PartWriter | None = None
        self._began, self._expected, self._seconds = 0.0, 0, 0.0

    def open(self, path: Path) -> PartWriter:
        """Return the writer of the upload's part. Raises Conflict if a newer upload of the client has begun."""
        if self.superseded:
            raise superseded()
        self._writer = PartWriter(path)
        return self._writer

    def begin(self, expected: int | None, seconds: float) -> None:
        """Begin to demand the rate at which `expected` bytes (None: unknown) arrive within `seconds`."""
        self._began, self._expected, self._seconds = asyncio.get_running_loop().time(), expected or 0, seconds
        self.advance(0)

    def advance(self, arrived: int) -> None:
        """Give the upload more time, because so many bytes have arrived since it began."""
        if not self.timer.expired() and not self.superseded:
            self.timer.reschedule(self._began + ends_after(arrived, self._expected, self._seconds))

    def complete(self) -> None:
        """Demand nothing more, because all bytes have arrived."""
        if not self.timer.expired() and not self.superseded:
            self.timer.reschedule(None)

    async def supersede(self) -> None:
        """End the upload, because a newer one of its client has begun."""
        self.superseded = True
        if not self.timer.expired():
            self.timer.reschedule(asyncio.get_running_loop().time())
        await self.end()

    async def end(self) -> None:
        """Write nothing more into the part."""
        if self._writer is not None:
            await asyncio.to_thread(self._writer.end)


class UploadSlots:
    """The uploads that are being received, at most one of each client. A client is a job's id and the client's number.

    Example:
        async with slots.take((job, number)) as upload:
            writer = upload.open(path)
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], Upload] = {}

    @property
    def taken(self) -> int:
        """The number of slots that are taken."""
        return len(self._open)

    @asynccontextmanager
    async def take(self, client: tuple[str, int]) -> AsyncIterator[Upload]:
        """Give an upload of a client a slot while the context lasts, and end the client's earlier upload.

        Raises:
            HTTPException: all slots are taken, or the upload was too slow: the client may retry.
            Conflict: a newer upload of the client has begun.
        """
        older = self._open.get(client)
        if older is None and len(self._open) >= MOST_UPLOADS:
            raise HTTPException(429, f"uploads of {MOST_UPLOADS} clients are being received: retry", _RETRY)
        upload = self._open[client] = Upload()
        try:
            async with upload.timer:
                if older is not None:
                    await older.supersede()
                yield upload
        except TimeoutError:
            await upload.end()
            if upload.superseded:
                raise superseded() from None
            if not upload.timer.expired():
                raise
            raise HTTPException(
                429, "this upload is too slow for its deadline: ask what has arrived, and send the rest", _RETRY
            ) from None
        finally:
            if self._open.get(client) is upload:
                del self._open[client]


def superseded() -> Conflict:
    """Return the refusal of an upload after which its client has begun another."""
    return Conflict("a newer request sends this update: this one ends", status=409, code="superseded")
