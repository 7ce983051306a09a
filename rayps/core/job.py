"""A job's status, its legal transitions, and the form of a workload's name. Pure; no I/O."""

from __future__ import annotations

import enum
import re

LOCAL_CPUS = 16  # logical CPUs of a Ray that rayps starts, if the machine has fewer cores


class Status(enum.StrEnum):
    """The status of a job."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    STOPPING = "STOPPING"
    UNKNOWN = "UNKNOWN"  # a failed poll is not a failed job
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def terminal(self) -> bool:
        """Whether the job has ended; such a status is written once."""
        return not MOVES[self]


_ENDS = {Status.SUCCEEDED, Status.FAILED, Status.STOPPED}
_ALIVE = {Status.STARTING, Status.RUNNING, Status.RECOVERING, Status.STOPPING, Status.UNKNOWN}

MOVES: dict[Status, set[Status]] = {
    Status.QUEUED: {Status.STARTING, Status.STOPPED, Status.FAILED},
    Status.STARTING: (_ALIVE | _ENDS) - {Status.STARTING},
    Status.RUNNING: (_ALIVE | _ENDS) - {Status.RUNNING, Status.STARTING},
    Status.RECOVERING: (_ALIVE | _ENDS) - {Status.RECOVERING},
    Status.STOPPING: _ENDS | {Status.UNKNOWN},
    Status.UNKNOWN: (_ALIVE | _ENDS) - {Status.UNKNOWN},
    Status.SUCCEEDED: set(),
    Status.FAILED: set(),
    Status.STOPPED: set(),
}


def may_move(old: Status, new: Status) -> bool:
    """Return whether a job may change from `old` to `new`."""
    return new in MOVES[old]


def misnamed(workload: str) -> str | None:
    """Return why a text cannot name a workload's class, and how to fix it; None if it can.

    A name is `module:Class` (of a module such as `package.digits`) or `file.py:Class`. It cannot carry arguments: the
    class is created without any.
    """
    place, colon, name = workload.rpartition(":")
    module = all(part.isidentifier() for part in place.split("."))
    if colon and name.isidentifier() and (module or place.endswith(".py")):
        return None
    called = re.match(r"(.+?):(\w+)\(", workload)
    if called is None:
        return f"workload {workload!r} should name a module or file and a class: 'digits:Digits' or 'digits.py:Digits'"
    place, name = called.groups()
    return (
        f"workload {workload!r} has arguments, and a workload is named by its class alone: write {place}:{name}\n"
        f"and give the arguments of {name}.__init__ defaults, or derive a class that sets them; in Python, rayps.train "
        f"takes an instance such as {name}(...)"
    )
