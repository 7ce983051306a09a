"""What a job's processes have beside its code: packages, and environment variables. Pure, except for reading files.

A variable's value is a text, or says where the secret is: "@/path" is the content of a file of the service's machine,
and None is the variable of this name in the service's own environment. The service looks these up when the job is
submitted, to refuse one that is not there, and each time that it starts the job's driver. It stores only where they
are. Values are never shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rayps_client.errors import ConfigError
from rayps_client.values import Json, Keywords

from rayps.core.job.requirements import explain_refusal

MOST_VARIABLES, MOST_BYTES = 100, 100_000  # of one job; bytes of names and values together, and of a file
NAMES = ("requirements", "env")  # the fields of a job
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(r"(RAYPS|RAY|LD)_.*|PATH|PYTHONPATH|PYTHONHOME|HOME|TMPDIR|CUDA_VISIBLE_DEVICES", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """The packages and environment variables of a job's processes."""

    requirements: list[str] | None = None  # lines of a requirements file, which pip installs
    env: dict[str, str | None] = field(default_factory=dict, repr=False)  # from a variable's name to its value

    @classmethod
    def of(cls, given: Keywords) -> Self:
        """Return the environment from the fields `NAMES` of a job, of which any may be missing."""
        return cls(given.get("requirements"), {} if given.get("env") is None else given["env"])

    def check(self) -> None:
        """Raise ConfigError if a package or a variable is refused. No value of a variable is in the text."""
        lines = [] if self.requirements is None else self.requirements
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ConfigError(
                f"requirements is {lines!r:.100}: give a list of lines such as ['einops==0.8.1']", field="requirements"
            )
        for line in lines:
            why = explain_refusal(line)
            if why is not None:
                raise ConfigError(f"requirements has {line!r:.200}: {why}", field="requirements")
        if not isinstance(self.env, dict):
            raise ConfigError(
                "env is no mapping from names to values (the service shows the names only): give e.g. "
                "{NCCL_DEBUG: INFO, HF_TOKEN: '@/run/secrets/hf'}",
                field="env",
            )
        for name, value in self.env.items():
            _check_variable(name, value)
        size = sum(len(name) + len(value or "") for name, value in self.env.items())
        if len(self.env) > MOST_VARIABLES or size > MOST_BYTES:
            raise ConfigError(
                f"env has {len(self.env)} variables of {size} characters: give at most {MOST_VARIABLES} of "
                f"{MOST_BYTES}",
                field="env",
            )

    def shown(self) -> list[str]:
        """Return what is shown of the variables: their names."""
        return sorted(self.env)

    def looked_up(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the values of the variables; `own` is the environment of the service.

        A variable is left out if its file cannot be read, or `own` does not have it: see `must_have`.
        """
        found = {name: _find_value(name, value, own) for name, value in self.env.items()}
        return {name: value for name, value in found.items() if value is not None}

    def must_have(self, found: Mapping[str, str]) -> None:
        """Raise ConfigError if `looked_up` has not found a variable. The text says where it was looked for."""
        for name, value in self.env.items():
            if name not in found:
                where = (
                    f"the service's environment has no {name}: set it where `rayps serve` is started"
                    if value is None
                    else f"the file {value[1:]} of the service's machine is no readable text of at most {MOST_BYTES} B"
                )
                raise ConfigError(f"env.{name}: {where}", field=f"env.{name}")


def _check_variable(name: Json, value: Json) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"env has the name {name!r:.100}: give letters, digits and _", field="env")
    if _RESERVED.fullmatch(name):
        raise ConfigError(
            f"env.{name} is refused: RAYPS_*, RAY_*, LD_*, PATH, PYTHONPATH, PYTHONHOME, HOME, TMPDIR and "
            "CUDA_VISIBLE_DEVICES belong to rayps, Ray and Python\nfor code and packages give working_dir and "
            "requirements, for GPUs resources",
            field=f"env.{name}",
        )
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise ConfigError(
            f"env.{name} is no text: give its value in quotes, '@/path' for a file of the service's machine, or null "
            "for the service's own variable",
            field=f"env.{name}",
        )
    if isinstance(value, str) and value.startswith("@") and not value.startswith(("@/", "@@")):
        raise ConfigError(
            f"env.{name} names a file by a relative path: give '@/path', absolute, on the service's machine; a value "
            "that begins with @ is written with @@",
            field=f"env.{name}",
        )


def _find_value(name: str, value: str | None, own: Mapping[str, str]) -> str | None:
    if value is None:
        return own.get(name)
    if not value.startswith("@"):
        return value
    if value.startswith("@@"):
        return value[1:]
    path = Path(value[1:])
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        text = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError):
        return None
    return None if "\0" in text else text
