"""Every error that rayps raises, as one tree.

    RaypsError
    ├── UserError                invalid input; a retry does not help
    │   ├── ConfigError          an argument, option, setting or job file
    │   ├── WorkloadError        the user's model, loss, optimizer or module
    │   ├── DataError            a file, a column, a value
    │   └── CheckpointError      a checkpoint that is missing, damaged or of another model
    │       └── PlaceError       the place of checkpoints cannot be reached, read or written
    ├── TrainingError            the training failed: a loss that is not finite, ...
    ├── LinkError                the connection between two peers failed
    │   ├── PeerLost             the peer closed the connection or died
    │   ├── PeerTimeout          the peer did not answer within the timeout
    │   └── StaleGeneration      the message belongs to an earlier generation of a group of peers
    ├── ClusterError             actors and resources
    │   ├── ActorDied            an actor's process has ended
    │   └── NoResources          the cluster lacks the requested resources
    └── ServiceError             a request to the job service failed
        ├── Unreachable          no service answers at the address
        ├── Unauthorized         the token is missing, wrong or revoked
        ├── NotFound             no such job
        └── Conflict             the job's state does not allow the request

A message says what happened and how to fix it; `error.data` holds the facts. Errors survive pickling between actors.
"""

from __future__ import annotations

import linecache
from typing import Any

from rayps_client.values import Keywords


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class RaypsError(Exception):
    """The base class of all errors of rayps. `message` says what happened and how to fix it; `data` holds the facts.

    Example:
        try:
            rayps.train(work, strategy="parameter_server:staleness=-1")
        except rayps.RaypsError as error:
            print(error, error.data)
    """

    exit_code = 1

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.data)

    def __str__(self) -> str:
        return self.message

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows of this error: its message, and the user's line that led to it.

        IPython calls this method. The whole traceback is in `sys.last_value`, which `traceback.print_last()` prints.
        """
        from rayps_client.machine.file_owner import (
            is_users_code,  # it takes as long to import as this module, for notebooks only
        )

        shown = [
            f"{type(self).__name__}: {line}" if at == 0 else line for at, line in enumerate(self.message.split("\n"))
        ]
        found, place = self.__traceback__, None
        while found is not None:
            file = found.tb_frame.f_code.co_filename
            if is_users_code(file):
                place = file, found.tb_lineno
            found = found.tb_next
        if place is not None:
            text = linecache.getline(*place).strip()
            where = (
                f"line {place[1]}" if place[0].startswith("<") or "ipykernel" in place[0] else f"{place[0]}:{place[1]}"
            )
            shown.append(f"  at {where}: {text}")
        return [*shown, "  (traceback.print_last() prints the whole traceback)"]


def _rebuild(kind: type[RaypsError], message: str, data: Keywords) -> RaypsError:
    return kind(message, **data)


class UserError(RaypsError):
    """Invalid input from the user; a retry does not help."""

    exit_code = 2


class ConfigError(UserError):
    """An argument, an option, a setting or a job file is wrong."""


class WorkloadError(UserError):
    """The user's model, loss, optimizer or module cannot be used."""


class DataError(UserError):
    """A file, a column or a value in the data is wrong. Carries `file`, `column` and `row` if they are known."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class PlaceError(CheckpointError):
    """A place of checkpoints cannot be reached, read or written. Carries `place`; a retry may help."""

    exit_code = 1  # not the user's input, but the state of another system


class TrainingError(RaypsError):
    """The training failed, e.g. its loss is not finite."""


class LinkError(RaypsError):
    """The connection between two peers failed. Carries `peer`, the name of the other side."""


class PeerLost(LinkError):
    """The peer closed the connection or died."""


class PeerTimeout(LinkError):
    """The peer did not answer within the timeout. Carries `peer` and `seconds`; the option is `timeout`."""


class StaleGeneration(LinkError):
    """The message belongs to an earlier generation of a group of peers, and had no effect."""


class ClusterError(RaypsError):
    """An actor could not be started, reached or placed on the cluster."""

    exit_code = 4


class ActorDied(ClusterError):
    """An actor's process has ended."""


class NoResources(ClusterError):
    """The cluster lacks the requested resources. Carries `needed` and `free`."""


class ServiceError(RaypsError):
    """The job service refused a client's request, or failed. Carries `status`, the HTTP status."""


class Unreachable(ServiceError):
    """No service answers at the address."""

    exit_code = 4


class Unauthorized(ServiceError):
    """The token is missing, wrong or revoked."""

    exit_code = 4


class NotFound(ServiceError):
    """There is no such job."""

    exit_code = 3


class Conflict(ServiceError):
    """The job's state does not allow the request."""

    exit_code = 5
