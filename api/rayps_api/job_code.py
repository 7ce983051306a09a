"""The code of the jobs in one request: a folder of this machine, or an archive that is read and unpacked once."""

from __future__ import annotations

import asyncio
from typing import Self

from rayps.cluster.scratch import Scratch
from rayps.core.job.code_archive import FOLDER
from rayps.service.code.code_store import CodeStore
from rayps.service.strategy_check import CheckedStrategy
from rayps.strategies.job import JobSpec


class JobCodes:
    """Reads the archives of a request's jobs. Leaving the context deletes what was unpacked.

    Example:
        async with JobCodes(running.code) as codes:
            folder = await codes.folder(spec)
    """

    def __init__(self, store: CodeStore) -> None:
        self._store = store
        self._paths: dict[str, list[str]] = {}
        self._unpacked: dict[str, Scratch] = {}
        self.strategies: dict[str, CheckedStrategy] = {}  # those that a child process has checked, by what was given

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for scratch in self._unpacked.values():
            await asyncio.to_thread(scratch.close)

    async def paths(self, code: str) -> list[str]:
        """Return the paths of an archive's files. Raises NotFound if there is no such archive."""
        if code not in self._paths:
            self._paths[code] = await asyncio.to_thread(self._store.paths, code)
        return self._paths[code]

    async def folder(self, spec: JobSpec) -> str | None:
        """Return the folder on this machine that has a job's code, or None if the job has neither code nor folder.

        Raises:
            NotFound: there is no such archive.
            ConfigError: the archive is damaged.
        """
        if spec.code is None:
            return spec.working_dir
        if spec.code not in self._unpacked:
            self._unpacked[spec.code] = await asyncio.to_thread(self._store.unpacked, spec.code)
        return str(self._unpacked[spec.code].path / FOLDER)
