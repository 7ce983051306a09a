"""A job's status, and the allowed changes of the status. Pure."""

from __future__ import annotations

import enum


class Status(enum.StrEnum):
    """The status of a job."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    STOPPING = "STOPPING"
    UNKNOWN = "UNKNOWN"  # the service cannot reach the job's driver; the job may still run
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def terminal(self) -> bool:
        """Whether a job with this status has ended; its status does not change again."""
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
