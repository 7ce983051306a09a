"""Where checkpoints are: a local folder, or a place behind a URL of fsspec such as `s3://bucket/run`.

In a local folder a checkpoint is written as `step-00000171.tmp-TOKEN`, and renamed when it is complete. A folder
without ".tmp-" is complete.

An object store cannot rename. There a checkpoint's files are written under `step-00000171/`, with the token of the
attempt in their names, and the manifest is put last, in one request. A checkpoint is complete exactly if it has a
manifest, and a manifest names the files of one attempt only. Other file systems behind a URL (HDFS, SFTP) get the same
files; a process that is killed while it writes the manifest itself leaves one that is refused.

A file of more than one block is sent to S3 as a multipart upload. A failed write aborts its upload. The upload of a
killed process remains, invisible, until `abort_unfinished` removes it.

Every request to a remote place has a deadline. Source of the rules of multipart uploads: Amazon S3 User Guide,
"Uploading and copying objects using multipart upload".
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import fsspec
from rayps_client.errors import CheckpointError, PlaceError, first_line

from rayps.core.failpoint import passing
from rayps.core.urls import Location, is_url, is_web

MANIFEST = "manifest.json"
BLOCK = 8 << 20  # bytes that are read, hashed, written or sent at a time
SECONDS = 120.0  # the default deadline of one request to a remote place: a block of `BLOCK` bytes at 70 kB/s

_MOST_BLOCKS = 9_000  # of one file: S3 takes at most 10,000 parts of a multipart upload
_ABORT_SECONDS = 10.0  # for the abort of an upload whose place has just failed
_PATH_OF_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # a Path has one slash of "//"
_STEP = re.compile(r"step-(\d{8,})")
_DRAFT = re.compile(r"step-(\d{8,})\.tmp-.*")
_QUERY = re.compile(r"\?[^\s\"']*")  # of a URL in the text of an error
_S3 = ("s3", "s3a")
_OBJECT_STORES = (*_S3, "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory")
_Value = TypeVar("_Value")


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> object:
        """Append `data`. Raise OSError or PlaceError if that fails."""


class _File(Protocol):
    """A file of fsspec that is open for writing."""

    closed: bool

    def write(self, data: bytes) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CutUpload:
    """A multipart upload that was begun and not completed: the object's URL, its id, and when it was begun."""

    url: str
    id: str
    begun: datetime.datetime


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step, e.g. "step-00000171"."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's name, or None if the name is not one of a checkpoint."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])


class CheckpointPlace(ABC):
    """A folder with checkpoints, or the folder of one checkpoint. Plain data, which survives pickling.

    The methods of a local place raise OSError. Those of a remote place raise FileNotFoundError if the file is not
    there, and PlaceError otherwise.
    """

    __slots__ = ()

    @staticmethod
    def of(given: Location | CheckpointPlace, seconds: float = SECONDS) -> CheckpointPlace:
        """Return the place at a path or URL. `seconds` is the deadline of one request to a remote place.

        Nothing is read: the first request finds out whether the place can be reached.
        """
        if isinstance(given, CheckpointPlace):
            return given
        if not is_url(given):
            if isinstance(given, Path) and _PATH_OF_URL.match(str(given)):
                raise CheckpointError(
                    f"{given} was a URL before it became a Path: give the URL as a text", path=str(given)
                )
            return LocalFolder(Path(given))
        if str(given).lower().startswith("file://"):
            return LocalFolder(Path(str(given)[len("file://") :]))
        if is_web(str(given)):
            raise CheckpointError(
                f"{given} is an address of a web server, which is no place for checkpoints: give a folder, or a URL of "
                "an object store such as s3://bucket/run",
                place=str(given),
            )
        return ObjectStore(str(given).rstrip("/"), seconds)

    @property
    @abstractmethod
    def location(self) -> Location:
        """The path or the URL."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last component of the location."""

    @property
    @abstractmethod
    def parent(self) -> CheckpointPlace:
        """The place that contains this one."""

    @abstractmethod
    def at(self, name: str) -> CheckpointPlace:
        """Return the place `name` within this one."""

    # ------------------------------------------------------------------------------------------ files

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file's bytes."""

    @abstractmethod
    def fill(self, name: str, offset: int, into: memoryview) -> None:
        """Read bytes from `offset` of a file on into `into`, until it is full.

        Raises EOFError if the file ends before.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Return a file's size in bytes."""

    @abstractmethod
    def writer(self, name: str, size: int) -> AbstractContextManager[Sink]:
        """Write a new file of `size` bytes: inside the block, pieces of at most `BLOCK` bytes are appended.

        At the end of the block the file is durable. If the block raises, no file is left.
        """

    # ------------------------------------------------------------------------------------------ checkpoints

    @abstractmethod
    def is_there(self) -> bool:
        """Return whether the folder exists, or any object of the place."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in descending order. It is [] if the place is not there."""

    @abstractmethod
    def draft(self, step: int, token: str) -> CheckpointPlace:
        """Return the place into which the attempt `token` writes the files of a checkpoint."""

    @abstractmethod
    def stored_name(self, name: str, token: str) -> str:
        """Return the name under which the attempt `token` writes the file `name` of a checkpoint."""

    @abstractmethod
    def publish(self, step: int, token: str, manifest: bytes) -> None:
        """Write the manifest of the attempt `token`: from now on the checkpoint is complete, in place of an earlier."""

    @abstractmethod
    def discard(self, step: int, token: str) -> None:
        """Remove the files of an attempt that has no manifest, as far as that is possible."""

    @abstractmethod
    def delete(self, step: int) -> None:
        """Remove a checkpoint. It is incomplete before its first file is removed."""

    @abstractmethod
    def delete_drafts(self, upto: int | None = None, complete: tuple[int, Collection[str]] | None = None) -> None:
        """Remove files of attempts without a manifest: those of steps up to `upto`, or all if `upto` is None.

        `complete` is the step of a checkpoint and the names of its files: in a remote place, other files of this step
        are removed too, as those of another attempt.
        """


# ---------------------------------------------------------------------------------------------- local


@dataclass(frozen=True, slots=True)
class LocalFolder(CheckpointPlace):
    """A folder of a local or shared file system."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def location(self) -> Path:
        """The path."""
        return self.path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def parent(self) -> LocalFolder:
        """The folder that contains this one."""
        return LocalFolder(self.path.parent)

    def at(self, name: str) -> LocalFolder:
        """Return the folder `name` within this one."""
        return LocalFolder(self.path / name)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        return (self.path / name).read_bytes()

    def fill(self, name: str, offset: int, into: memoryview) -> None:
        """Read bytes from `offset` of a file on into `into`; raise EOFError if the file ends before."""
        with (self.path / name).open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < len(into):
                count = file.readinto(into[done : done + BLOCK])
                if not count:
                    raise EOFError(f"{name} ends after {offset + done} bytes")
                done += count

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        return (self.path / name).stat().st_size

    @contextlib.contextmanager
    def writer(self, name: str, size: int) -> Iterator[Sink]:
        """Write a new file, which is on the disk at the end of the block."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("wb", buffering=0) as file:
                yield _UnbufferedSink(file.write)
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def is_there(self) -> bool:
        """Return whether the folder exists."""
        return self.path.is_dir()

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in descending order."""
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        return sorted((step for name in names if (step := step_of(name)) is not None), reverse=True)

    def draft(self, step: int, token: str) -> LocalFolder:
        """Return the folder that becomes the checkpoint when it is renamed."""
        return self.at(f"{name_of(step)}.tmp-{token}")

    def stored_name(self, name: str, token: str) -> str:
        """Return `name`: each attempt has a folder of its own."""
        return name

    def publish(self, step: int, token: str, manifest: bytes) -> None:
        """Write the manifest into the draft, and rename the draft."""
        draft, final = self.draft(step, token), self.path / name_of(step)
        with draft.writer(MANIFEST, len(manifest)) as file:
            file.write(memoryview(manifest))
        sync(draft.path)
        passing("checkpoint: manifest written, draft not renamed")
        if final.exists():
            final.rename(self.path / f"{final.name}.tmp-{uuid.uuid4().hex}")
        draft.path.rename(final)
        passing("checkpoint: draft renamed, not synced")
        sync(self.path)

    def discard(self, step: int, token: str) -> None:
        """Remove the draft."""
        shutil.rmtree(self.draft(step, token).path, ignore_errors=True)

    def delete(self, step: int) -> None:
        """Rename a checkpoint to a draft, and remove that."""
        path = self.path / name_of(step)
        gone = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
        path.rename(gone)
        shutil.rmtree(gone)

    def delete_drafts(self, upto: int | None = None, complete: tuple[int, Collection[str]] | None = None) -> None:
        """Remove the drafts of steps up to `upto`, or all if `upto` is None."""
        for path in self.path.glob("step-*.tmp-*"):
            found = _DRAFT.fullmatch(path.name)
            if upto is None or (found is not None and int(found[1]) <= upto):
                shutil.rmtree(path)


class _UnbufferedSink:
    """A sink over an unbuffered file, whose `write` may write only a part of the data."""

    def __init__(self, write: Callable[[memoryview], int]) -> None:
        self._write = write

    def write(self, data: memoryview) -> None:
        while len(data):
            data = data[self._write(data) :]


def sync(path: Path) -> None:
    """Wait until a file's or folder's present state is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------- remote


@dataclass(frozen=True, slots=True)
class ObjectStore(CheckpointPlace):
    """A prefix of an object store, or a folder of another file system of fsspec. No operation renames."""

    url: str
    seconds: float = SECONDS

    def __str__(self) -> str:
        return self.url

    @property
    def location(self) -> str:
        """The URL."""
        return self.url

    @property
    def name(self) -> str:
        """The last component of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectStore:
        """The prefix that contains this one."""
        return ObjectStore(self.url.rpartition("/")[0], self.seconds)

    def at(self, name: str) -> ObjectStore:
        """Return the prefix `name` within this one."""
        return ObjectStore(f"{self.url}/{name}", self.seconds)

    def read(self, name: str) -> bytes:
        """Return an object's bytes."""
        files, path = self._open_files()
        found: bytes = self._ask(f"read {name}", partial(files.cat_file, f"{path}/{name}"))
        return found

    def fill(self, name: str, offset: int, into: memoryview) -> None:
        """Read bytes from `offset` of an object on into `into`; raise EOFError if the object ends before."""
        files, path = self._open_files()
        for at in range(0, len(into), BLOCK):
            block = into[at : at + BLOCK]
            first = offset + at
            found = self._ask(
                f"read {name}", partial(files.cat_file, f"{path}/{name}", start=first, end=first + len(block))
            )
            if len(found) != len(block):
                raise EOFError(f"{name} ends after {first + len(found)} bytes")
            block[:] = found

    def size(self, name: str) -> int:
        """Return an object's size in bytes."""
        files, path = self._open_files()
        files.invalidate_cache()
        return int(self._ask(f"read the size of {name}", partial(files.info, f"{path}/{name}"))["size"])

    @contextlib.contextmanager
    def writer(self, name: str, size: int) -> Iterator[Sink]:
        """Write a new object, in one request or as a multipart upload, which is aborted if the block raises."""
        files, path = self._open_files()
        doing, block = f"write {name}", max(BLOCK, -(-size // _MOST_BLOCKS))
        self._make_folder(files, f"{path}/{name}".rpartition("/")[0])
        try:
            file: _File = self._ask(doing, partial(files.open, f"{path}/{name}", "wb", block_size=block))
        except FileNotFoundError as error:
            raise self._explain_failure(doing, error) from error
        try:
            yield _Remote(lambda data: self._put(doing, partial(file.write, data)))
            self._put(doing, file.close)
        except BaseException:
            self._abort(file, files, f"{path}/{name}")
            raise

    def _make_folder(self, files: Any, path: str) -> None:
        """Create a folder where files need one. Object stores have none, and would create the bucket."""
        if self.url.partition("://")[0].lower() not in _OBJECT_STORES:
            self._put(f"create the folder {path}", partial(files.makedirs, path, exist_ok=True))

    def _put(self, doing: str, request: Callable[[], object]) -> None:
        try:
            self._ask(doing, request)
        except FileNotFoundError as error:  # the bucket is missing
            raise self._explain_failure(doing, error) from error

    def _abort(self, file: _File, files: Any, path: str) -> None:
        """Abort an upload, and remove what other file systems have written. `unfinished` lists what remains."""

        def abort() -> None:
            discard: Callable[[], None] | None = getattr(file, "discard", None)
            if discard is not None:
                discard()
            _set_closed(file)
            with contextlib.suppress(FileNotFoundError):
                files.rm_file(path)

        _set_closed(file)
        with contextlib.suppress(FileNotFoundError, PlaceError):
            self._ask(f"abort the upload of {path}", abort, _ABORT_SECONDS)

    def is_there(self) -> bool:
        """Return whether there is any object below the prefix."""
        return bool(self._list_objects())

    def steps(self) -> list[int]:
        """Return the steps of the prefixes that have a manifest, in descending order."""
        found = {parts[0] for parts in self._list_objects() if len(parts) == 2 and parts[1] == MANIFEST}
        return sorted((step for name in found if (step := step_of(name)) is not None), reverse=True)

    def _list_objects(self) -> list[tuple[str, ...]]:
        """Return the components of the name of each object below this prefix."""
        files, path = self._open_files()
        files.invalidate_cache()
        try:
            found: list[str] = self._ask("list checkpoints", partial(files.find, path))
        except FileNotFoundError:
            return []
        below = f"{path.rstrip('/')}/"
        return [tuple(each.removeprefix(below).split("/")) for each in found if each.startswith(below)]

    def draft(self, step: int, token: str) -> ObjectStore:
        """Return the checkpoint's own prefix."""
        return self.at(name_of(step))

    def stored_name(self, name: str, token: str) -> str:
        """Return `name` with the token before its suffix, so that files of two attempts never have one name."""
        stem, dot, suffix = name.rpartition(".")
        return f"{stem}-{token}{dot}{suffix}" if dot else f"{name}-{token}"

    def publish(self, step: int, token: str, manifest: bytes) -> None:
        """Put the manifest, in one request. The objects of an earlier checkpoint of this step are left."""
        place = self.at(name_of(step))
        files, path = place._open_files()
        place._make_folder(files, path)
        place._put(f"write {MANIFEST}", partial(files.pipe_file, f"{path}/{MANIFEST}", manifest))

    def discard(self, step: int, token: str) -> None:
        """Remove the objects of an attempt, as far as that is possible."""
        with contextlib.suppress(PlaceError, FileNotFoundError):
            mark = f"-{token}."
            quick = ObjectStore(self.url, min(self.seconds, _ABORT_SECONDS))  # the place may have just failed
            quick._remove([p for p in quick._list_objects() if p[0] == name_of(step) and mark in p[-1]])

    def delete(self, step: int) -> None:
        """Remove the manifest of a checkpoint, and then its other objects."""
        name = name_of(step)
        self._remove([(name, MANIFEST)])
        passing("checkpoint: old manifest removed, files not")
        self._remove([parts for parts in self._list_objects() if parts[0] == name and parts[1:] != (MANIFEST,)])

    def delete_drafts(self, upto: int | None = None, complete: tuple[int, Collection[str]] | None = None) -> None:
        """Remove the objects of steps up to `upto` that belong to no complete checkpoint."""
        found = self._list_objects()
        sealed = {parts[0] for parts in found if len(parts) == 2 and parts[1] == MANIFEST}
        gone = []
        for parts in found:
            step = step_of(parts[0])
            if step is None or len(parts) < 2:
                continue
            if complete is not None and step == complete[0]:
                if parts[1:] != (MANIFEST,) and "/".join(parts[1:]) not in complete[1]:
                    gone.append(parts)
            elif parts[0] not in sealed and (upto is None or step <= upto):
                gone.append(parts)
        self._remove(gone)

    def _remove(self, names: list[tuple[str, ...]]) -> None:
        files, path = self._open_files()
        for parts in names:
            with contextlib.suppress(FileNotFoundError):
                self._ask(f"remove {'/'.join(parts)}", partial(files.rm_file, "/".join((path, *parts))))

    def probe(self) -> None:
        """Write and remove a small object, so that a place that refuses writes is known before any training."""
        name = f"probe-{uuid.uuid4().hex}"
        files, path = self._open_files()
        self._make_folder(files, path)
        self._put("write", partial(files.pipe_file, f"{path}/{name}", b"rayps"))
        self._put("remove objects", partial(files.rm_file, f"{path}/{name}"))

    def copy(self, name: str, target: ObjectStore, new: str) -> None:
        """Copy the object `name` to the object `new` of `target`, within the store."""
        files, path = self._open_files()
        _, other = target._open_files()
        self._make_folder(files, f"{other}/{new}".rpartition("/")[0])
        self._put(f"copy {name} to {target}", partial(files.cp_file, f"{path}/{name}", f"{other}/{new}"))

    # ------------------------------------------------------------------------------------------ requests

    def uploads(self) -> list[CutUpload]:
        """Return the multipart uploads below this prefix that were begun and not completed. It is [] outside of S3."""
        files, path = self._open_files()
        if not _is_s3(self.url):
            return []
        bucket, key, _ = files.split_path(path)
        found: list[CutUpload] = []
        marks: dict[str, str] = {}
        while True:
            call = partial(files.call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/", **marks)
            try:
                answer = self._ask("list unfinished uploads", call)
            except FileNotFoundError as error:
                raise self._explain_failure("list unfinished uploads", error) from error
            for each in answer.get("Uploads", []):
                if each["Key"].startswith(f"{key}/"):
                    found.append(CutUpload(f"s3://{bucket}/{each['Key']}", each["UploadId"], each["Initiated"]))
            if not answer.get("IsTruncated"):
                return found
            marks = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def abort(self, upload: CutUpload) -> None:
        """Abort a multipart upload; its parts are removed. Do nothing if it has ended by now."""
        files, _ = self._open_files()
        bucket, key, _ = files.split_path(upload.url)
        call = partial(files.call_s3, "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.id)
        with contextlib.suppress(FileNotFoundError):
            self._ask(f"abort the upload of {upload.url}", call)

    def _open_files(self) -> tuple[Any, str]:
        """Return the file system of fsspec (untyped there), and this place's path in it."""
        options: dict[str, Any] = {"use_listings_cache": False} if _is_s3(self.url) else {}
        try:
            files, path = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            package = "rayps[s3]" if _is_s3(self.url) else first_line(error)
            way = f'pip install "{package}"' if _is_s3(self.url) else package
            raise PlaceError(f"{self.url} needs a package that is not installed here: {way}", place=self.url) from error
        except ValueError as error:
            raise CheckpointError(
                f"{self.url} is no place for checkpoints: {first_line(error)}\ngive a folder, or a URL of fsspec such "
                "as s3://bucket/run",
                path=self.url,
            ) from error
        return files, str(path)

    def _ask(self, doing: str, request: Callable[[], _Value], seconds: float | None = None) -> _Value:
        """Return the result of a request to the store.

        Raises:
            FileNotFoundError: the object or the bucket is not there.
            PlaceError: the store refused the request, cannot be reached, or did not answer before the deadline.
        """
        seconds = self.seconds if seconds is None else seconds
        answer = _Answer(request)
        threading.Thread(target=answer.run, daemon=True, name="rayps-place").start()
        if not answer.done.wait(seconds):
            raise PlaceError(
                f"{self.url} did not answer for {seconds:g} s: cannot {doing}\ncheck the network and the endpoint "
                "(AWS_ENDPOINT_URL), or give a larger timeout",
                place=self.url,
                seconds=seconds,
            )
        if answer.error is None:
            return answer.value
        if isinstance(answer.error, FileNotFoundError) or not isinstance(answer.error, Exception):
            raise answer.error
        raise self._explain_failure(doing, answer.error) from answer.error

    def _explain_failure(self, doing: str, error: Exception) -> PlaceError:
        """Return the error of a request that failed, with the way out."""
        kinds = {kind.__name__ for each in _yield_causes(error) for kind in type(each).__mro__}
        if isinstance(error, FileNotFoundError):
            way = "the bucket or folder is not there: create it, or correct the URL"
        elif isinstance(error, PermissionError) or kinds & _CREDENTIALS:
            way = (
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or a profile, or a role) on every host, and allow "
                "them to list, get, put and delete here"
                if _is_s3(self.url)
                else "check the credentials of this place"
            )
        else:
            way = "check the network" + (" and the endpoint (AWS_ENDPOINT_URL)" if _is_s3(self.url) else "")
        return PlaceError(
            f"cannot {doing} in {self.url}: {_QUERY.sub('', first_line(error))}\n{way}",
            place=self.url,
            cause=type(error).__name__,
        )


_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}


def _set_closed(file: _File) -> None:
    """Mark a file as closed: else fsspec completes it when it is collected. Files that need it allow it."""
    with contextlib.suppress(AttributeError):
        file.closed = True


def _yield_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_s3(url: str) -> bool:
    return url.partition("://")[0].lower() in _S3


class _Remote:
    """A sink of which each write is one request, or is added to the next one."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def write(self, data: memoryview) -> None:
        self._write(bytes(data))


class _Answer(Generic[_Value]):
    """The result of a request that runs in a thread of its own, or the error that it raised."""

    value: _Value

    def __init__(self, request: Callable[[], _Value]) -> None:
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._request = request

    def run(self) -> None:
        try:
            self.value = self._request()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


def unfinished(place: CheckpointPlace) -> list[CutUpload]:
    """Return the multipart uploads in a place that processes began and neither completed nor aborted.

    They are invisible in a listing and cost storage until they are aborted. A local place has none: `steps` does not
    list its drafts, and the next checkpoint removes them.

    Raises:
        PlaceError: the place cannot be reached, or refuses to list uploads.
    """
    return place.uploads() if isinstance(place, ObjectStore) else []


def abort_unfinished(place: CheckpointPlace, older: float, now: datetime.datetime | None = None) -> list[CutUpload]:
    """Abort the multipart uploads in a place that were begun more than `older` seconds ago; return them.

    The age is by this host's clock (or `now`): choose `older` above the difference of the clocks and the longest upload
    that another process may be sending.

    Raises:
        PlaceError: the place cannot be reached, or refuses to list or abort uploads.
    """
    if not isinstance(place, ObjectStore):
        return []
    now = now or datetime.datetime.now(datetime.UTC)
    old = [upload for upload in place.uploads() if (now - upload.begun).total_seconds() > older]
    for upload in old:
        place.abort(upload)
    return old
