"""The routes of data-use statements: clients read one and sign it for each update; users read what was signed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from rayps_client.errors import Conflict
from rayps_client.members.acceptance import Acceptance
from rayps_client.members.acceptance_file import AcceptanceFile, receipt_text
from rayps_client.members.member_certificates import MemberCertificate

from rayps.federated.remote.mailbox import FOLDER
from rayps_api.membership import member_of, statement_of
from rayps_api.routes.routes_clients import Caller, Granted, Joined, Serial, open_order
from rayps_api.schemas import problems
from rayps_api.schemas_clients import JOB, AcceptancesIn, AcceptancesOut, ReceiptsOut, StatementOut
from rayps_api.service import RunningService, Service

router = APIRouter(prefix="/api/v1", tags=["clients"], responses=problems(400, 401, 403, 404, 409, 413, 422))

RECORDS = "acceptances"  # the folder of the clients' records, in the job's mailbox


@router.get("/client/statement", response_model=StatementOut)
async def statement(grant: Granted, request: Request, job: Annotated[str | None, Query(pattern=JOB)] = None) -> Any:
    """Show the data-use statement of a job. Each order has its SHA-256 hash."""
    running: Service = request.app.state.service
    wanted = grant.job or job
    if wanted is None:
        raise HTTPException(422, "which job: give job")
    return {"statement": (await running.store.get(wanted)).spec.statement}


@router.post("/client/rounds/{serial}/acceptances", status_code=201, response_model=ReceiptsOut)
async def accept(serial: Serial, body: AcceptancesIn, caller: Joined, request: Request) -> Any:
    """Record a member's acceptances, the last of which is for its update of this round, and give signed receipts.

    409 if the round is closed.
    """
    record = await caller.service.store.get(caller.job)
    order = await asyncio.to_thread(open_order, caller, serial)
    try:
        found = [Acceptance.of_json(each.model_dump()) for each in body.acceptances]
    except ValueError as error:
        raise HTTPException(422, f"an acceptance cannot be read: {error}") from error
    signers = [await asyncio.to_thread(_check, each, caller, statement_of(record)) for each in found]
    last, sender = found[-1].facts(), member_of(request)
    if sender is None or sender.key != signers[-1].key:
        raise Conflict(
            "the acceptance is signed with another key than the request: a member signs for itself only",
            status=409,
            code="acceptance",
        )
    if last.serial != serial or last.parameters != order.facts["parameters"]["sha256"]:
        raise Conflict(
            f"the acceptance is not for order {serial} and its parameters: the client signs what it was asked for",
            status=409,
            code="acceptance",
        )
    file = AcceptanceFile(record_path(caller.service.folder(caller.job), caller.member.number))
    await asyncio.to_thread(file.add, found)
    await asyncio.to_thread(caller.mailbox.record_acceptance, serial, caller.member.number, last.sent)
    key, now = caller.service.client_tokens.key, round(time.time(), 3)
    texts = [receipt_text(each, now, key.public) for each in found]
    return {"receipts": [{"receipt": text, "signature": key.sign(text)} for text in texts]}


@router.get("/jobs/{job_id}/acceptances", response_model=AcceptancesOut)
async def acceptances(job_id: str, running: RunningService) -> Any:
    """Show a job's statement, and all acceptances of it, by client."""
    record = await running.record(job_id)
    found = await asyncio.to_thread(_records, running.folder(record.id))
    return JSONResponse({"job": record.id, "statement": record.spec.statement, "clients": found})


def record_path(job_folder: Path, number: int) -> Path:
    """Return the path of the record of a client's acceptances, in the job's folder."""
    return job_folder / FOLDER / RECORDS / f"{number:08}.jsonl"


def _records(job_folder: Path) -> list[list[dict[str, Any]]]:
    paths = sorted((job_folder / FOLDER / RECORDS).glob("*.jsonl"))
    return [[each.to_json() for each in AcceptanceFile(path).acceptances()] for path in paths]


def _check(acceptance: Acceptance, caller: Caller, statement: str | None) -> MemberCertificate:
    """Check that an acceptance is the caller's own, for this job; return the certificate of its key.

    Raises:
        Unauthorized: the signature is wrong, or the certificate was not valid at that time.
        Conflict: it is for something else.
    """
    facts, member = acceptance.checked()
    own, members = caller.member, caller.service.members
    if members is not None:
        members.ca.check(member, facts.time)
    if (facts.job, facts.client, facts.name) != (caller.job, own.number, own.name):
        raise Conflict(
            f"the acceptance is of client {facts.client} ({facts.name}) in job {facts.job}: a member signs for itself "
            "only",
            status=409,
            code="acceptance",
        )
    if facts.statement != statement:
        raise Conflict(
            f"the acceptance is of the statement {facts.statement}, and that of the job is {statement or 'none'}",
            status=409,
            code="acceptance",
        )
    return member
