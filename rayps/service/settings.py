"""The settings of the job service: RAYPS_* variables and options, read once and checked. Imports no Ray.

There is no global settings object. The command line and the service call `Settings.read()` and pass the result on.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from rayps_client.errors import ConfigError
from rayps_client.machine.private_file import private_write as private_write
from rayps_client.values import Keywords

from rayps.cluster.local import LOCAL_CPUS
from rayps.service.plan import STALL_SECONDS

SERVICE_LOCK = "service.lock"  # locked by the service of a state directory
_MARKER_FILES = ("rayps.db", SERVICE_LOCK)  # one of these files marks the state directory of a rayps service
_RAYPS_NAMES = re.compile(
    r"jobs|servers|code|backup\.json|lost\+found|\.?(token|clients|rayps\.db|ray[._]|service\.).*"
)

_MOST_CODE_MB = 2000  # an archive is held in memory

Value = str | int | float | bool | Path | tuple[str, ...] | None  # the value of a setting
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the job service: its state directory, its address and its Ray."""

    state_dir: Path = field(default_factory=lambda: Path("~/.rayps").expanduser())
    host: str = "127.0.0.1"
    port: int = 8420
    address: str | None = None  # the address of a Ray cluster to join; None means that rayps runs its own Ray
    cpus: int | None = None  # how many CPUs jobs may reserve in rayps's own Ray; None: see `logical_cpus` and `cores`
    idle: float = 600.0  # rayps's own Ray stops after this many seconds without activity of the service and of jobs
    warm: int = 0  # processes that are started before a job needs them: see `rayps.cluster.warm`
    shared_state: bool = False  # whether every host of the cluster has the state directory at this path
    stall: float = STALL_SECONDS  # seconds that a starting or recovering job may show no progress
    code_mb: float = 100.0  # most megabytes of the files of a working directory that is packed and uploaded
    members_ca: Path | None = None  # certificates (PEM) of the authorities whose members may be clients
    members_revoked: Path | None = None  # the revoked ones of these members' certificates
    allowed_hosts: tuple[str, ...] = ()  # names that a Host header may have, in addition to the loopback names
    url: str | None = None  # the service's address, for clients
    token: str | None = None  # the bearer token, for clients

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None, **overrides: Path | str | float | None) -> Self:
        """Read RAYPS_* variables. An override that is not None replaces the variable of its name.

        Raises:
            ConfigError: a value is invalid. The error names the variable or option, its value and what is expected.
        """
        env = os.environ if environ is None else environ
        found: Keywords = {}
        for name, read in _READERS.items():
            text = env.get(f"RAYPS_{name.upper()}", "").strip()
            if text:
                found[name] = read(f"RAYPS_{name.upper()}", text)
        for name, value in overrides.items():
            if value is not None:
                found[name] = _READERS[name](f"--{name.replace('_', '-')}", str(value))
        return replace(cls(), **found)

    @property
    def loopback(self) -> bool:
        """Whether the service listens on the loopback interface only."""
        return self.host in LOOPBACK or self.host.startswith("127.")

    @property
    def logical_cpus(self) -> int:
        """The logical CPUs of rayps's own Ray: how many one job may reserve that runs alone."""
        return max(LOCAL_CPUS, os.cpu_count() or 1) if self.cpus is None else self.cpus

    @property
    def cores(self) -> int | None:
        """How many CPUs jobs that run side by side may reserve in rayps's own Ray; None: all its logical CPUs."""
        return (os.cpu_count() or 1) if self.cpus is None else None

    @property
    def database(self) -> Path:
        """The store's SQLite file."""
        return self.state_dir / "rayps.db"

    @property
    def jobs_dir(self) -> Path:
        """The folder that holds a folder per job."""
        return self.state_dir / "jobs"

    @property
    def code_bytes(self) -> int:
        """The most bytes of the files of a packed working directory."""
        return int(self.code_mb * 1_000_000)

    @property
    def servers_dir(self) -> Path:
        """The folder that holds a folder per server group."""
        return self.state_dir / "servers"

    @property
    def token_file(self) -> Path:
        """The local client's bearer token, mode 0600."""
        return self.state_dir / "token"

    @property
    def client_key(self) -> Path:
        """The private key that signs the service's messages to federated clients, mode 0600."""
        return self.state_dir / "clients.key"

    @property
    def service_file(self) -> Path:
        """The file with the address and process of the running service."""
        return self.state_dir / "service.json"

    def prepare(self) -> Self:
        """Create the state directory, accessible by its owner only.

        Raises:
            ConfigError: the directory cannot be written, belongs to another user, or has files of another program.
        """
        try:
            self._refuse_foreign()
            self.jobs_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.state_dir.chmod(0o700)
            self.jobs_dir.chmod(0o700)
        except OSError as error:
            raise self._explain_unusable(f"cannot be used: {error.strerror or error}") from error
        return self

    def _refuse_foreign(self) -> None:
        for folder in (self.state_dir, self.jobs_dir):
            if folder.exists() and (owner := folder.stat().st_uid) != os.geteuid():
                raise self._explain_unusable(
                    f"cannot be used: {folder} belongs to user {_name_user(owner)}, and this process runs "
                    f"as {_name_user(os.geteuid())}"
                )
        if not self.state_dir.exists() or any((self.state_dir / name).exists() for name in _MARKER_FILES):
            return
        foreign = sorted(path.name for path in self.state_dir.iterdir() if not _RAYPS_NAMES.fullmatch(path.name))
        if foreign:
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            raise self._explain_unusable(f"was not made by a rayps service: it contains {', '.join(foreign[:3])}{more}")

    def _explain_unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"the state directory {self.state_dir} {why}\nGive another directory with --state-dir or RAYPS_STATE_DIR.",
            field="state_dir",
        )


def _name_user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def _parse_whole(name: str, text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ConfigError(f"{name} is {text!r}: give a whole number from {low} to {high}", field=name)
    return value


def _parse_port(name: str, text: str) -> int:
    return _parse_whole(name, text, 0, 65535)


def _count(name: str, text: str) -> int:
    return _parse_whole(name, text, 1, 1_000_000)


def _parse_count(name: str, text: str) -> int:
    return _parse_whole(name, text, 0, 1000)


def _parse_megabytes(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _MOST_CODE_MB:
        raise ConfigError(f"{name} is {text!r}: give megabytes, above 0 and at most {_MOST_CODE_MB}", field=name)
    return value


def _parse_seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise ConfigError(f"{name} is {text!r}: give a number of seconds above 0", field=name)
    return value


def _parse_folder(name: str, text: str) -> Path:
    path = Path(text).expanduser()
    path = path if path.is_absolute() else Path.cwd() / path
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{name} is {text!r}, which is a file: give a directory", field=name)
    return path


def _parse_file(name: str, text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(f"{name} is {text!r}, which is no file: give a file", field=name)
    return path.resolve()


def _parse_word(name: str, text: str) -> str:
    if any(c.isspace() or not c.isprintable() for c in text):
        raise ConfigError(f"{name} is {text!r}: give a value without whitespace or control characters", field=name)
    return text


def _parse_token(name: str, text: str) -> str:
    return text if text.startswith("@") else _parse_word(name, text)  # @FILE; the path of a file may have spaces


def _parse_cluster(name: str, text: str) -> str:
    host, _, port = _parse_word(name, text).rpartition(":")
    if text == "auto" or not host or not port.isdigit():
        raise ConfigError(f"{name} is {text!r}: give host:port of a Ray cluster's head, e.g. 10.0.0.5:6379", field=name)
    return text


def _parse_url(name: str, text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ConfigError(f"{name} is {text!r}: give an address such as http://127.0.0.1:8420", field=name)
    return _parse_word(name, text).rstrip("/")


def _parse_flag(name: str, text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ConfigError(f"{name} is {text!r}: give 1 or 0", field=name)
    return text.lower() in ("1", "true")


def _parse_names(name: str, text: str) -> tuple[str, ...]:
    return tuple(_parse_word(name, part.strip()) for part in text.split(",") if part.strip())


_READERS: dict[str, Callable[[str, str], Value]] = {
    "state_dir": _parse_folder,
    "host": _parse_word,
    "port": _parse_port,
    "address": _parse_cluster,
    "cpus": _count,
    "idle": _parse_seconds,
    "warm": _parse_count,
    "shared_state": _parse_flag,
    "stall": _parse_seconds,
    "code_mb": _parse_megabytes,
    "members_ca": _parse_file,
    "members_revoked": _parse_file,
    "allowed_hosts": _parse_names,
    "url": _parse_url,
    "token": _parse_token,
}
