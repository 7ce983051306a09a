"""Streams of server-sent events about a job (status, metrics, logs, events), all jobs, a server group, or all groups.

Guarantee for a job's stream: a reader that reconnects, also after a restart of the service, misses no message and gets
none twice. The `id:` of each message is the cursor after this message (byte offsets into the job's files). The last
message is `end`. If a job's stream closes before `end`, for example after an hour, the reader has to reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from rayps_client.errors import ConfigError, NotFound

from rayps.core.job.job_status import Status
from rayps.service.store import JobRecord
from rayps_api import folder
from rayps_api.routes.routes_jobs import LONGEST_FILTER
from rayps_api.routes.routes_servers import list_groups, show_group
from rayps_api.schemas import problems
from rayps_api.service import MOST_STREAMS, RunningService, SentBy, Service

TOPICS = ("job", "metrics", "logs", "events")
_PAUSE = 0.25  # seconds between two reads of a job's files
_LIST_PAUSE = 0.5  # seconds between two reads of the list of jobs or of groups
_LONGEST = 3600.0  # seconds; then the stream is closed, and the reader reconnects with its cursor
_LIST = 100  # the jobs in a stream of all jobs, unless the reader asks for more
_MOST_LIST = 2000
_ROWS_AT_ONCE = 100  # jobs that are compared before other requests are answered
ALL_GROUPS = "*"

router = APIRouter(tags=["stream"], responses=problems(401, 403, 404, 422, 429))


@dataclass(slots=True)
class Cursor:
    """A reader's position in a job's files: `m` in the metrics, `l` in the log, `e` in the events."""

    m: int = 0
    l: int = 0  # noqa: E741  the letters are part of the REST interface
    e: int = 0

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Parse a cursor such as `m123.l456.e7`; missing parts are 0.

        Raises:
            ConfigError: the text has another form.
        """
        if not re.fullmatch(r"([mle]\d{1,16}(\.[mle]\d{1,16}){0,2})?", text):
            raise ConfigError(f"cursor is {text[:100]!r}: give a text such as 'm123.l456.e7'", field="cursor")
        return cls(**{part[0]: int(part[1:]) for part in text.split(".") if part})

    def __str__(self) -> str:
        return f"m{self.m}.l{self.l}.e{self.e}"


async def _count_stream(running: RunningService) -> AsyncIterator[None]:
    """Count a stream as open until it ends. Raises HTTPException (429) if MOST_STREAMS streams are open."""
    if running.streams >= MOST_STREAMS:
        raise HTTPException(429, f"{MOST_STREAMS} streams are open: close one", {"Retry-After": "5"})
    running.streams += 1
    try:
        yield
    finally:
        running.streams -= 1


async def _check_request(
    running: RunningService,
    counted: Annotated[None, Depends(_count_stream)],
    job: Annotated[str | None, Query(max_length=100)] = None,
    cursor: Annotated[str, Query(max_length=100)] = "",
    last_event_id: Annotated[str | None, Header(max_length=100)] = None,
    group: Annotated[str | None, Query(max_length=100)] = None,
) -> Cursor:
    """Check the request before the stream starts, because no error status can be sent afterwards; return the cursor."""
    if job is not None:
        await running.record(job)
    if group is not None and group != ALL_GROUPS:
        running.groups.get(group)
    return Cursor.read(last_event_id or cursor)


@router.get("/api/v1/stream", response_class=EventSourceResponse)
async def stream(
    running: RunningService,
    request: Request,
    sender: SentBy,
    at: Annotated[Cursor, Depends(_check_request)],
    job: Annotated[str | None, Query(max_length=100)] = None,
    topics: Annotated[str, Query(max_length=100)] = ",".join(TOPICS),
    group: Annotated[str | None, Query(max_length=100)] = None,
    status: Annotated[list[Status] | None, Query()] = None,
    text: Annotated[str, Query(max_length=LONGEST_FILTER)] = "",
    rows: Annotated[int, Query(ge=1, le=_MOST_LIST)] = _LIST,
) -> AsyncIterator[ServerSentEvent]:
    """Stream the changes of a job, or of the list of jobs if `job` is not given.

    The list has the newest `rows` jobs that `status` and `text` choose, as `/api/v1/jobs` does. The first message has
    all of them, and says so in `whole`; the others have what changed. A job that does not match any more is sent once
    as it is now, or its id in `gone` if it was deleted. `counts` are those of `/api/v1/jobs`.

    With `group`, stream the changes of this server group instead; `*` means all server groups.
    """
    reader = _Reader(running, request.scope["rayps_secret"], sender.expires_at)
    if group is not None:
        messages = _group_messages(reader, group)
    elif job is None:
        messages = _list_messages(reader, status or (), text, rows)
    else:
        chosen = {topic for topic in TOPICS if topic in topics.split(",")}
        messages = _job_messages(reader, (await running.record(job)).id, chosen, at)
    async for message in messages:
        if not await reader.may_read():
            return
        yield message


class _Reader:
    """Who reads a stream, and whether it goes on: every stream asks before it looks again and before it sends."""

    def __init__(self, running: Service, secret: str, expires_at: float | None) -> None:
        self.running, self._secret, self._expires_at = running, secret, expires_at
        self._ends, self._version = time.monotonic() + _LONGEST, running.store.version

    async def may_read(self) -> bool:
        """Return whether the service runs, the stream is not too old, and its token is valid."""
        store = self.running.store
        if self.running.closing.is_set() or time.monotonic() >= self._ends:
            return False
        if self._expires_at is not None and time.time() >= self._expires_at:
            return False
        if self._version != store.version:  # the token may have been revoked since
            self._version = store.version
            return await store.accepts_secret(self._secret)
        return True


async def _job_messages(reader: _Reader, job_id: str, topics: set[str], at: Cursor) -> AsyncIterator[ServerSentEvent]:
    running, shown, version, record = reader.running, "", -1, None
    while await reader.may_read():
        if version != running.store.version or record is None:
            version = running.store.version
            try:
                record = await running.store.get(job_id)
            except NotFound:  # the job had ended and was deleted
                gone = {"status": record.status.value if record else None, "reason": "the job was deleted"}
                yield ServerSentEvent(raw_data=json.dumps(gone), event="end", id=str(at))
                return
        ended = record.status.terminal  # read before the files, so that the files of an ended job are complete
        if "job" in topics:
            text = json.dumps(running.show(record))
            if text != shown:
                shown = text
                yield ServerSentEvent(raw_data=text, event="job", id=str(at))
        found = False
        for topic in TOPICS[1:]:
            data = await _read_new(running, job_id, topic, at) if topic in topics else None
            if data is not None:  # `at` has advanced by the data of this topic only
                found = True
                yield ServerSentEvent(raw_data=json.dumps(data), event=topic, id=str(at))
        if ended and not found:
            end = {"status": record.status.value, "reason": record.reason}
            yield ServerSentEvent(raw_data=json.dumps(end), event="end", id=str(at))
            return
        if not found:
            await _pause(running, _PAUSE)


async def _read_new(running: Service, job_id: str, topic: str, at: Cursor) -> dict[str, Any] | None:
    """Return the next data of one topic, and advance the cursor `at`. Return None if there is no new data."""
    home = running.folder(job_id)
    if topic == "metrics":
        path = home / "metrics.jsonl"
        found, at.m = await asyncio.to_thread(folder.points, path, at.m, 2000)
        return {"points": found, "cursor": at.m, "size": path.stat().st_size} if found else None
    if topic == "logs":
        lines, at.l = await asyncio.to_thread(folder.log_lines, home / "log.txt", at.l, 1000)
        return {"lines": lines} if lines else None
    scheduler_events = await running.store.events(job_id)
    events, at.e = await asyncio.to_thread(folder.events, home / "events.jsonl", scheduler_events, at.e, 500)
    return {"events": events} if events else None


async def _list_messages(
    reader: _Reader, status: Sequence[Status], text: str, rows: int
) -> AsyncIterator[ServerSentEvent]:
    running, version = reader.running, -1
    shown: dict[str, str] = {}  # what was sent, of the jobs that match
    counts: dict[str, int] | None = None
    records: list[JobRecord] = []
    while await reader.may_read():
        news: dict[str, Any] = {"whole": version < 0}
        before = {record.id: record for record in records if record.status.terminal}  # change by transactions only
        if version != running.store.version:
            version = running.store.version
            records = await running.store.page(status=status, text=text, limit=rows)
            left = set(shown) - {record.id for record in records}
            for job_id in left:
                del shown[job_id]
            last = await running.store.get_many(left)
            news["jobs"] = [running.show(record) for record in last]
            news["gone"] = sorted(left - {record.id for record in last})
            if (found := await running.store.counts(text=text)) != counts:
                news["counts"] = counts = found
        due = [record for record in records if before.get(record.id) != record]
        for number, record in enumerate(due, 1):
            if number % _ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
            job = running.show(record)
            seen = json.dumps(job)
            if shown.get(job["id"]) != seen:
                shown[job["id"]] = seen
                news.setdefault("jobs", []).append(job)
        if any(news.values()):
            yield ServerSentEvent(raw_data=json.dumps({"jobs": [], "gone": [], **news}), event="jobs")
        await _pause(running, _LIST_PAUSE)


async def _group_messages(reader: _Reader, name: str) -> AsyncIterator[ServerSentEvent]:
    """Stream one group, or the summary of all groups, after each change. A stream of one group ends with `end`."""
    running, shown = reader.running, ""
    while await reader.may_read():
        try:
            data = await list_groups(running) if name == ALL_GROUPS else await show_group(running, name)
        except NotFound as error:
            yield ServerSentEvent(raw_data=json.dumps({"reason": str(error)}), event="end")
            return
        text = json.dumps(data)
        if text != shown:
            shown = text
            yield ServerSentEvent(raw_data=text, event="groups" if name == ALL_GROUPS else "group")
        await _pause(running, _LIST_PAUSE)


async def _pause(running: Service, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(running.closing.wait(), seconds)
