"""The kinds of faults that `rayps chaos` injects, and the processes that they can hit. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from rayps_client.errors import ConfigError

from rayps.core.spelling import near


class FaultRole(enum.StrEnum):
    """What a process does for a job."""

    WORKER = "worker"
    SERVER = "server"  # of the job's own servers, or of its server group
    DRIVER = "driver"
    MANAGER = "manager"  # of the job's server group
    SERVICE = "service"
    RAYLET = "raylet"
    GCS = "gcs"
    MACHINE = "machine"  # all cores of this machine


class Scope(enum.StrEnum):
    """Whom a fault may disturb. Faults of the job alone need no permission; the others need `--allow`."""

    JOB = "job"
    GROUP = "group"  # a server group that other jobs may use too
    SERVICE = "service"
    RAY = "ray"
    MACHINE = "machine"


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault. `seconds` is the shortest and longest duration; (0, 0) for a fault without a duration."""

    name: str
    roles: tuple[FaultRole, ...]
    words: str  # what happens to the target, after the target's name
    seconds: tuple[float, float] = (0.0, 0.0)


_PROCESSES = (
    FaultRole.WORKER,
    FaultRole.SERVER,
    FaultRole.DRIVER,
    FaultRole.MANAGER,
    FaultRole.SERVICE,
    FaultRole.RAYLET,
    FaultRole.GCS,
)
_STARTED = (FaultRole.WORKER, FaultRole.SERVER, FaultRole.MANAGER, FaultRole.DRIVER)
_LINES = (FaultRole.WORKER, FaultRole.SERVER)
NEWBORN = "newborn"
NEWBORN_SECONDS = 8.0  # the age up to which a process is newborn
KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("kill", _PROCESSES, "is killed (SIGKILL)"),
        FaultKind("newborn", _STARTED, "is killed (SIGKILL) in its first seconds"),
        FaultKind("stop", _PROCESSES, "is stopped (SIGSTOP), and continued afterwards", (1.0, 5.0)),
        FaultKind(
            "throttle",
            (FaultRole.WORKER, FaultRole.SERVER, FaultRole.DRIVER),
            "gets a fifth of its time (SIGSTOP and SIGCONT in turn)",
            (2.0, 8.0),
        ),
        FaultKind("burn", (FaultRole.MACHINE,), "computes in one more process on each core", (2.0, 8.0)),
        FaultKind("slow_line", _LINES, "sends at most 1 Mbit/s on each connection to the job's processes", (2.0, 8.0)),
        FaultKind("cut_line", _LINES, "loses its connections to the job's processes", (0.2, 2.0)),
        FaultKind("full_disk", (FaultRole.DRIVER, FaultRole.SERVICE), "can write no more to disk", (1.0, 5.0)),
        FaultKind("clock", (FaultRole.SERVICE,), "has a wall clock that is shifted by up to an hour", (2.0, 8.0)),
    )
}
THROTTLED_SHARE = 0.2  # of the time, in which a throttled process runs
SLOW_BYTES = 125_000  # bytes per second of each connection on a slow line
SHIFTS = (-3600.0, -60.0, 60.0, 3600.0)  # seconds by which a clock is shifted


@dataclass(frozen=True, slots=True, order=True)
class FaultOn:
    """A kind of fault on a role, such as kill:worker."""

    kind: str
    role: FaultRole

    def __str__(self) -> str:
        return f"{self.kind}:{self.role}"


# the faults on a job that trains; a job has newborn processes when it is submitted, and after each other fault
ALL_FAULTS = tuple(FaultOn(kind.name, role) for kind in KINDS.values() for role in kind.roles if kind.name != NEWBORN)


def scope_of(role: FaultRole, *, shared_group: bool) -> Scope:
    """Return whom a fault on this role may disturb. `shared_group`: the job's servers belong to a group of others."""
    if role in (FaultRole.RAYLET, FaultRole.GCS):
        return Scope.RAY
    if role in (FaultRole.SERVER, FaultRole.MANAGER):
        return Scope.GROUP if shared_group else Scope.JOB
    return {FaultRole.SERVICE: Scope.SERVICE, FaultRole.MACHINE: Scope.MACHINE}.get(role, Scope.JOB)


def parse_faults(text: str) -> tuple[FaultOn, ...]:
    """Parse faults such as `kill,stop:server`; a kind without a role means all its roles.

    `all` means every kind except newborn, which is given alone.

    Raises:
        ConfigError: there is no such kind, the kind cannot hit the role, or newborn is given with other kinds.
    """
    found: list[FaultOn] = []
    for part in (part.strip() for part in text.split(",")):
        name, colon, role = part.partition(":")
        if name == "all" and not colon:
            found += ALL_FAULTS
            continue
        kind = KINDS.get(name)
        if kind is None:
            raise ConfigError(
                f"there is no fault {part!r}{near(name, KINDS)}: the kinds are {', '.join(KINDS)}; "
                "a role may follow, as in kill:worker",
                field="faults",
            )
        if colon and role not in kind.roles:
            raise ConfigError(
                f"the fault {name} cannot hit {role!r}: give one of {', '.join(kind.roles)}", field="faults"
            )
        found += [FaultOn(name, each) for each in kind.roles if not colon or each == role]
    if hits_newborn(found) and any(fault.kind != NEWBORN for fault in found):
        raise ConfigError(
            f"--faults {text} has newborn and other faults: give newborn alone, because it begins when the job is "
            "submitted, and the others begin when it trains",
            field="faults",
        )
    return tuple(dict.fromkeys(found))


def hits_newborn(faults: Iterable[FaultOn]) -> bool:
    """Return whether one of these faults kills processes in their first seconds."""
    return any(fault.kind == NEWBORN for fault in faults)


def parse_scopes(text: str) -> frozenset[Scope]:
    """Parse what faults may disturb beside the job, such as `ray,service`. Raises ConfigError if a word is unknown."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := [word for word in words if word not in tuple(Scope)]:
        raise ConfigError(f"--allow {wrong[0]!r}: give some of {', '.join(Scope)}", field="allow")
    return frozenset(map(Scope, words)) | {Scope.JOB}
