"""Every error that rayps raises, as one small tree.

    RaypsError
    ├── UserError                what was given cannot work; trying again will not help
    │   ├── ConfigError          an argument, option, setting or job file
    │   ├── WorkloadError        the user's model, loss, optimizer or module
    │   ├── DataError            a file, a column, a value
    │   └── CheckpointError      a checkpoint that is missing, torn or of another model
    ├── TrainingError            the run itself went wrong: a loss that is not finite, ...
    ├── LinkError                two peers lost each other
    │   ├── PeerLost             the peer closed the connection or died
    │   ├── PeerTimeout          the peer was silent past its deadline
    │   └── StaleGeneration      the message belongs to a group that has been replaced
    ├── ClusterError             where actors live
    │   ├── ActorDied            an actor's process is gone
    │   └── NoResources          the cluster cannot hold what was asked for
    └── ServiceError             the job service, seen from a client
        ├── Unreachable          no answer at that address
        ├── Unauthorized         the token is missing, wrong or revoked
        ├── NotFound             no such job
        └── Conflict             the job's state does not allow it

Errors carry data (`error.data`), say the way out in their message, and survive pickling between actors.
"""

from __future__ import annotations

from typing import Any

from rayps.core.values import Keywords


class RaypsError(Exception):
    """The root: a message that names the way out, and the facts as data.

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


def _rebuild(kind: type[RaypsError], message: str, data: Keywords) -> RaypsError:
    return kind(message, **data)


class UserError(RaypsError):
    """What was given cannot work; trying again will not help."""

    exit_code = 2


class ConfigError(UserError):
    """An argument, an option, a setting or a job file is wrong."""


class WorkloadError(UserError):
    """The user's model, loss, optimizer or module cannot be used."""


class DataError(UserError):
    """A file, a column or a value in the data is wrong. Carries file, column, row where they are known."""


class CheckpointError(UserError):
    """A checkpoint is missing, torn, or belongs to another model."""


class TrainingError(RaypsError):
    """The run itself went wrong, e.g. its loss is not finite."""


class LinkError(RaypsError):
    """Two peers lost each other. Carries `peer`, the name of the other side."""


class PeerLost(LinkError):
    """The peer closed the connection or died."""


class PeerTimeout(LinkError):
    """The peer was silent past the deadline. Carries `peer`, `seconds`, and the knob `timeout`."""


class StaleGeneration(LinkError):
    """The message belongs to a group that has been replaced; it had no effect."""


class ClusterError(RaypsError):
    """Something about where actors live."""

    exit_code = 4


class ActorDied(ClusterError):
    """An actor's process is gone."""


class NoResources(ClusterError):
    """The cluster cannot hold what was asked for. Carries `needed` and `free`."""


class ServiceError(RaypsError):
    """The job service refused or failed, seen from a client. Carries `status`, the HTTP status."""


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
    """The job's state does not allow what was asked."""

    exit_code = 5
