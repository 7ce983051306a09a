"""The objects that the routes share: store, scheduler, groups, tokens, folders, and a cache of jobs' progress."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from rayps_client.errors import ConfigError, Unauthorized

from rayps.core.job.records import read_json
from rayps.federated.remote.mailbox import FOLDER, Mailbox
from rayps.service.code.code_store import CodeStore
from rayps.service.groups import Groups
from rayps.service.members import Members, describe_grant, members_of
from rayps.service.scheduler import Scheduler
from rayps.service.settings import Settings
from rayps.service.store import Holder, JobRecord, Store
from rayps.service.tokens.client_tokens import ClientTokens
from rayps.service.tokens.user_tokens import UserTokens
from rayps_api.rollup import Rollups
from rayps_api.schemas import finite, job_out
from rayps_api.upload_slots import UploadSlots

log = logging.getLogger(__name__)

MOST_STREAMS = 64


@dataclass(slots=True)
class Service:
    """The running service: the objects that its routes share."""

    settings: Settings
    store: Store
    scheduler: Scheduler
    groups: Groups
    client_tokens: ClientTokens
    user_tokens: UserTokens
    code: CodeStore
    rollups: Rollups = field(default_factory=Rollups)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    streams: int = 0
    uploads: UploadSlots = field(default_factory=UploadSlots)
    requests: int = 0
    members: Members | None = field(init=False)  # None: no certificates are trusted
    _progress: OrderedDict[str, tuple[int, dict[str, Any] | None]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.members = members_of(self.settings, self.client_tokens.key)

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return what runs as long as the service: the scheduler, the server groups, the list of revoked members."""
        watch = [] if self.members is None else [self.members.watch(self.withdraw)]
        return [self.scheduler.run(), self.groups.run(), *watch]

    @property
    def cookie(self) -> str:
        """The session cookie's name, unique to this service because browsers send cookies to all ports of a host."""
        return f"rayps_session_{hashlib.sha256(self.client_tokens.key.public.encode()).hexdigest()[:12]}"

    def folder(self, job_id: str) -> Path:
        """Return a job's folder."""
        return self.settings.jobs_dir / job_id

    def mailbox(self, job_id: str) -> Mailbox:
        """Return the mailbox of a job's real clients."""
        return Mailbox(self.folder(job_id) / FOLDER)

    async def withdraw(self, grants: Collection[str]) -> None:
        """Exclude the clients with these grants (ids of tokens, or of certificates) from all jobs that run.

        A job gets one event for each of its clients whose grant was revoked.
        """
        for job in await self.store.unfinished():
            mailbox = self.mailbox(job.id)
            for member in await asyncio.to_thread(mailbox.members):
                if member.token not in grants:
                    continue
                what = describe_grant(member.token)
                await asyncio.to_thread(mailbox.withdraw, member.number, what)
                text = (
                    f"the {what} of the client {member.name} was revoked: no round asks it, and its update of the open "
                    "round does not count"
                )
                if await self.store.add_event(job.id, "revoked", text):
                    log.warning("job %s: %s", job.id, text)

    async def record(self, job_id: str) -> JobRecord:
        """Return a job by its id or the beginning of its id.

        Raises:
            NotFound: there is no such job.
            ConfigError: there are several such jobs.
        """
        return await self.store.find(job_id)

    def progress(self, job_id: str) -> dict[str, Any] | None:
        """Return the newest progress that the driver wrote, or None. The file is read only after it has changed."""
        path = self.folder(job_id) / "progress.json"
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:
            return None
        held = self._progress.get(job_id)
        if held is None or held[0] != stamp:
            held = (stamp, finite(read_json(path)))
            self._progress[job_id] = held
            while len(self._progress) > 512:
                self._progress.popitem(last=False)
        return held[1]

    def show(self, record: JobRecord) -> dict[str, Any]:
        """Return a job as JSON data, as the REST interface shows it."""
        return job_out(replace(record, reason=self.scheduler.reason(record)), self.progress(record.id))


def service(request: Request) -> Service:
    """Return the running service. Raises Unauthorized if the request has no valid token or session of a user."""
    if not request.scope.get("rayps_user"):
        raise Unauthorized("the token is missing, wrong or revoked: send `Authorization: Bearer rps_...`", status=401)
    found: Service = request.app.state.service
    return found


RunningService = Annotated[Service, Depends(service)]


def holder(request: Request, running: RunningService) -> Holder:
    """Return who sent a request of a user: no secret that the request gets may live longer."""
    found: Holder = request.scope["rayps_user"]
    return found


SentBy = Annotated[Holder, Depends(holder)]


def expiry_of(sender: Holder, days: float | None) -> float | None:
    """Return when a new secret expires: after so many days, or (None) when the sender's own does.

    Raises:
        ConfigError: this is later than the sender's own. The error names the field `days`.
    """
    if days is None:
        return sender.expires_at
    found = time.time() + days * 86400
    if not sender.outlives(found):
        left = ((sender.expires_at or 0.0) - time.time()) / 86400
        raise ConfigError(
            f"days is {days:g}, and the token of this request is valid for {left:.3g} days: a token makes none that "
            "lives longer; give fewer days, or none",
            field="days",
        )
    return found


def refuse_longer(sender: Holder, expires_at: float | None, what: str) -> None:
    """Refuse to give the sender a new secret in place of one that lives longer than the sender's own.

    Raises:
        HTTPException: it does (status 403).
    """
    if not sender.outlives(expires_at):
        raise HTTPException(
            403, f"{what} lives longer than the token of this request: rotate it with a token that lives as long"
        )
