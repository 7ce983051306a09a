"""The archives of jobs' code in a state directory: `code/SHA256.tar`, each verified before it gets its name.

An archive is deleted with the last job that needs it. An uploaded archive that no job uses is deleted after a day.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path

from rayps_client.errors import ConfigError, NotFound

from rayps.cluster.code_folder import read_archive
from rayps.cluster.scratch import Scratch
from rayps.core.job.code_archive import FOLDER, is_hash, locate_archive, read, unpack

log = logging.getLogger(__name__)

ORIGIN_FILE = "code.json"  # in a job's folder: where its code comes from, a `CodeOrigin`
MOST_UPLOADS = 4  # archives that are received at one time
_UNUSED_SECONDS = 86400.0
_PART = ".part-"


class CodeStore:
    """The archives of a state directory. `most_bytes` limits the files of one archive."""

    def __init__(self, state_dir: Path, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.receiving = 0  # number of archives that are being received
        self.lock = asyncio.Lock()  # held while a job begins or ceases to need an archive
        self._state_dir = state_dir
        self._folder = state_dir / FOLDER

    @property
    def most_archive_bytes(self) -> int:
        """The most bytes of an archive: its files and their headers."""
        return self.most_bytes + 64_000_000

    def has(self, code: str) -> bool:
        """Return whether the archive is there. It is then not regarded as unused for a day."""
        path = locate_archive(self._state_dir, code)
        try:
            os.utime(path)
        except OSError:
            return False
        return True

    def path(self, code: str) -> Path:
        """Return the archive's file. Raises NotFound if it is not there."""
        path = locate_archive(self._state_dir, code)
        if not path.is_file():
            raise NotFound(f"there is no code {code}: upload it first", code="no_code", status=404)
        return path

    def paths(self, code: str) -> list[str]:
        """Return the paths of an archive's files. Raises NotFound if there is no such archive."""
        with self.path(code).open("rb") as file:
            return read(file, self.most_archive_bytes)

    def unpacked(self, code: str) -> Scratch:
        """Unpack an archive into a temporary folder, whose `path` has its files; the caller closes it.

        Raises:
            NotFound: there is no such archive.
            ConfigError: the archive is damaged.
        """
        archive = read_archive(self.path(code), code)
        scratch = Scratch()
        try:
            (scratch.path / FOLDER).mkdir(mode=0o700)
            unpack(archive, scratch.path / FOLDER)
        except BaseException:
            scratch.close()
            raise
        return scratch

    async def receive(self, code: str, blocks: AsyncIterator[bytes]) -> bool:
        """Receive an archive and store it under its name; return False if it was there.

        Raises:
            ConfigError: the archive is too large, its SHA-256 is another, or it contains a path or member that is
                refused. Nothing is stored then.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        part = self._folder / f"{_PART}{secrets.token_hex(8)}"
        found, size = hashlib.sha256(), 0
        try:
            with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
                async for block in blocks:
                    size += len(block)
                    if size > self.most_archive_bytes:
                        raise ConfigError(self._explain_too_large(), field=FOLDER, code="too_large")
                    found.update(block)
                    await asyncio.to_thread(file.write, block)
                if found.hexdigest() != code:
                    raise ConfigError(
                        f"the SHA-256 of the received archive is {found.hexdigest()}, and not {code}: it was cut off "
                        "or changed on the way; send it again",
                        field=FOLDER,
                    )
                await asyncio.to_thread(self._check, part)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            target = locate_archive(self._state_dir, code)
            known = target.exists()
            part.replace(target)
            return not known
        finally:
            part.unlink(missing_ok=True)

    def _check(self, part: Path) -> None:
        with part.open("rb") as file:
            read(file, self.most_bytes)

    def _explain_too_large(self) -> str:
        return (
            f"an archive of code may have files of {self.most_bytes} bytes here: list data in .raypsignore, or set "
            "RAYPS_CODE_MB at the service"
        )

    def remove(self, code: str) -> None:
        """Delete an archive that no job needs."""
        locate_archive(self._state_dir, code).unlink(missing_ok=True)

    def remove_unused(self, needed: Collection[str]) -> list[str]:
        """Delete the archives that no job needs and that were not used for a day, and the rest of broken uploads."""
        removed = []
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            old = time.time() - path.stat().st_mtime > _UNUSED_SECONDS
            if old and (path.name.startswith(_PART) or (is_hash(path.stem) and path.stem not in needed)):
                path.unlink(missing_ok=True)
                removed.append(path.name)
        if removed:
            log.info("%d archives of code that no job needs were deleted", len(removed))
        return removed
