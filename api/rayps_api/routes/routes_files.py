"""The routes of a job's files: list and download checkpoints and traces."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse, JSONResponse

from rayps_api import job_files
from rayps_api.schemas import FilesOut, problems
from rayps_api.service import RunningService

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], responses=problems(400, 401, 403, 404, 422))


@router.get("/{job_id}/files", response_model=FilesOut)
async def files(job_id: str, running: RunningService) -> Any:
    """List the files of a job that can be downloaded: complete checkpoints, and traces of `profile`."""
    record = await running.record(job_id)
    found = await asyncio.to_thread(job_files.downloads, running.folder(record.id))
    return JSONResponse({"files": [{"path": path, "size": size} for path, size in found.items()]})


@router.get(
    "/{job_id}/file",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The bytes of the file."}},
)
async def download(
    job_id: str, running: RunningService, path: Annotated[str, Query(min_length=1, max_length=1000)]
) -> Any:
    """Download one file of a job; `path` is as `files` lists it."""
    record = await running.record(job_id)
    found = await asyncio.to_thread(job_files.downloadable, running.folder(record.id), path)
    return FileResponse(found, media_type="application/octet-stream")
