"""The routes of jobs' code: upload an archive once, download it, and show where a job's code comes from."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi import Path as InPath
from fastapi.responses import FileResponse, JSONResponse
from rayps_client.errors import NotFound
from starlette.requests import ClientDisconnect

from rayps.core.job.code_archive import HASH
from rayps.core.job.records import read_json
from rayps.service.code.code_store import MOST_UPLOADS, ORIGIN_FILE
from rayps_api.schemas import CodeOut, StoredCode, problems
from rayps_api.service import RunningService

router = APIRouter(prefix="/api/v1", tags=["code"], responses=problems(400, 401, 403, 404, 409, 413, 422, 503, 507))

Hash = Annotated[str, InPath(pattern=HASH, description="The SHA-256 of the archive, in hexadecimal digits.")]
_TAR = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}


@router.head("/code/{code}", status_code=204, response_class=Response)
async def has_code(code: Hash, running: RunningService) -> Response:
    """Answer 204 if the service has this archive, or else 404."""
    if not await asyncio.to_thread(running.code.has, code):
        raise NotFound(f"there is no code {code}: upload it with PUT", code="no_code", status=404)
    return Response(status_code=204)


@router.get("/code/{code}", response_class=FileResponse, responses={200: {"content": _TAR}})
async def get_code(code: Hash, running: RunningService) -> FileResponse:
    """Download an archive: a tar file whose SHA-256 is its name."""
    return FileResponse(running.code.path(code), media_type="application/x-tar")


@router.put(
    "/code/{code}",
    status_code=201,
    response_model=StoredCode,
    responses={200: {"model": StoredCode}},
    openapi_extra={"requestBody": {"required": True, "content": _TAR}},
)
async def put_code(code: Hash, request: Request, running: RunningService) -> Any:
    """Upload an archive. The service verifies its SHA-256 and refuses paths and links that leave its folder."""
    store = running.code
    if store.receiving >= MOST_UPLOADS:
        raise HTTPException(429, f"{MOST_UPLOADS} archives are being received: retry", {"Retry-After": "2"})
    store.receiving += 1
    try:
        created = await store.receive(code, request.stream())
    except ClientDisconnect:
        raise HTTPException(400, "the archive is incomplete: the connection was closed") from None
    finally:
        store.receiving -= 1
    return JSONResponse({"code": code}, 201 if created else 200)


@router.get("/jobs/{job_id}/code", response_model=CodeOut)
async def job_code(job_id: str, running: RunningService) -> Any:
    """Show a job's code: its archive's SHA-256, and the Git commit and difference of the folder that was packed."""
    record = await running.record(job_id)
    origin = await asyncio.to_thread(read_json, running.folder(record.id) / ORIGIN_FILE)
    return JSONResponse({"code": record.spec.code, "origin": origin or None})
