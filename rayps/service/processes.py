"""Find processes and their descendants in /proc, and kill whole trees of them.

A process is identified by its id and its start time, because the system reuses ids.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None if it has ended or is a zombie."""
    fields = _read_stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, since: int | None) -> bool:
    """Return whether the process with this id and start time is alive."""
    return since is not None and start_time(pid) == since


def read_command(pid: int) -> list[str]:
    """Return the command line or title of a process as a list of arguments; an empty list if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def list_descendants(root: int) -> list[int]:
    """Return the ids of all living descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _read_stat(int(entry.name))) is not None and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    todo = [root]
    while todo:
        more = children.get(todo.pop(), [])
        found += more
        todo += more
    return found


def find_left_by_ray(folder: str, session: int | None) -> list[int]:
    """Return the ids of the processes that a killed Ray left.

    Such a process has Ray's folder in its command line. Or it belongs to Ray's process session and has a file of the
    folder open, because some processes change their title. Clients of that Ray open such files too, but belong to other
    sessions, and are not included.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            named = folder.encode() in (entry / "cmdline").read_bytes()
            if named or (_read_session(int(entry.name)) == session and _has_file_open(entry, folder)):
                found.append(int(entry.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found


def _has_file_open(entry: Path, folder: str) -> bool:
    return any(str(link.readlink()).startswith(folder) for link in (entry / "fd").iterdir())


def _read_session(pid: int) -> int | None:
    fields = _read_stat(pid)
    return None if fields is None else int(fields[3])


def kill_descendants(root: int) -> None:
    """Kill all descendants of process `root`, which must be this process, after `adopt_orphans`."""
    deadline = time.monotonic() + 15.0
    while time.monotonic() < deadline and ((pids := list_descendants(root)) or _has_children()):
        kill_all(pids)
        reap()
        time.sleep(0.02)


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes. First stop all of them with SIGSTOP, so that none reacts to the end of another."""
    pids = list(pids)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue  # the process has ended, or its id now belongs to another user's process


def reap() -> list[int]:
    """Collect the children, including adopted ones, that have ended; return their ids."""
    gone: list[int] = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return gone
        if pid == 0:
            return gone
        gone.append(pid)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def adopt_orphans() -> None:
    """Make this process the new parent of each descendant whose parent ends."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Call it in the child after a fork."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if hasattr(ctypes, "CDLL") and Path("/proc").exists():
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _read_stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name in parentheses may contain any character
