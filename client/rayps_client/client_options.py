"""The options of the commands `rayps client` and `rayps-client`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rayps_client.members.membership_options import MembershipOptions
from rayps_client.values import Json

PATIENCE = 3600.0  # default of --patience, in seconds


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The options of the command. None means that an option is not given."""

    target: str  # file.py:Class or module:Class
    url: str | None = None
    token: str | None = None  # the token, or @FILE
    name: str | None = None
    job: str | None = None
    data: str | None = None  # a Parquet file or folder, in place of that of the workload
    state: Path | None = None
    patience: float = PATIENCE
    device: str = "cpu"
    params: Mapping[str, Json] = field(default_factory=dict)
    certificate: Path | None = None
    pins: Sequence[str] = ()
    proxy: str | None = None
    between: Sequence[str] = ()
    on_charge: bool = False
    cpus: int | None = None
    memory: float | None = None  # MB
    traffic: float | None = None  # MB a day
    rate: float | None = None  # KB/s
    peers: Path | None = None  # the keys of all clients, a line `NAME KEY` each
    membership: MembershipOptions = field(default_factory=MembershipOptions)
