"""What a run may leave behind on this host: processes, shared memory, sockets, temporary folders."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rayps.service.processes import list_descendants, read_command

_SHARED = Path("/dev/shm")
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
_KEPT = ("ray::IDLE", "ray::WarmProcess")  # processes that Ray keeps for its next actor


@contextlib.contextmanager
def use_temporary_folder() -> Iterator[None]:
    """Inside the block, this process and those that it starts have a temporary folder that no other program uses."""
    before, default = os.environ.get("TMPDIR"), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as name:  # short: a unix socket's path has 107 characters
        os.environ["TMPDIR"] = tempfile.tempdir = name
        try:
            yield
        finally:
            tempfile.tempdir = default
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


class Leftovers:
    """Compares what is there now with what was there when this object was created.

    Processes and sockets are those of this process and its descendants, to which a local Ray belongs. Folders are those
    of rayps in the temporary folder.
    """

    def __init__(self) -> None:
        self._before = self._look()

    def left(self, seconds: float = 20.0) -> list[str]:
        """Return what is there and was not before, one text each, after at most `seconds` in which it may disappear."""
        deadline = time.monotonic() + seconds
        gc.collect()  # an object that is only in a cycle still holds its files
        found = self._look() - self._before
        while found and time.monotonic() < deadline:
            time.sleep(0.1)
            found &= self._look()
        return sorted(found)

    def _look(self) -> set[str]:
        children = {pid: " ".join(read_command(pid)).strip() for pid in list_descendants(os.getpid())}
        pids = {os.getpid(), *children}
        return {
            *(f"process {pid} {text}" for pid, text in children.items() if text and not text.startswith(_KEPT)),
            *(f"shared memory {name}" for name in _list_named_memory(pids)),
            *(f"shared memory of process {pid} {name}" for pid in pids for name in _list_anonymous_memory(pid)),
            *(f"socket {address}" for address in _list_sockets()),
            *(f"folder {path}" for path in Path(tempfile.gettempdir()).glob("rayps-*")),
        }


def _list_named_memory(pids: set[int]) -> list[str]:
    """Return the names in /dev/shm, without Ray's object store and the files of other programs that run."""
    if not _SHARED.is_dir():
        return []
    found = []
    for name in os.listdir(_SHARED):  # noqa: PTH208  names
        number = re.search(r"\d+", name)
        pid = number[0] if number else "none"
        if not name.startswith("plasma") and (pid in map(str, pids) or not Path("/proc", pid).exists()):
            found.append(name)
    return found


def _list_anonymous_memory(pid: int) -> list[str]:
    """Return the files of rayps in memory that a process has open, with their inodes."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed in the meantime
                if str(path.readlink()).startswith("/memfd:rayps"):
                    found.append(f"memfd:rayps {path.stat().st_ino}")
    return found


def _list_sockets() -> list[str]:
    """Return the addresses at which this process listens, of TCP, and its named unix sockets."""
    own = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this search
            own.add(str(path.readlink()))
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS and f"socket:[{words[9]}]" in own:
                found.append(f"{name} port {int(words[1].rpartition(':')[2], 16)}")
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and f"socket:[{words[6]}]" in own:
            found.append(words[7])
    return found
