"""The specification of a job, and the check of a specification, which also parses the strategy. No I/O."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Self, TypeGuard

from rayps.core.errors import ConfigError
from rayps.core.values import Json, JsonObject, Keywords
from rayps.strategies.catalogue import StrategySpec, parse


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as it was submitted.

    `strategy` is in wire form: `{"name": ..., option: ...}`, or a list of `{"epochs": n, "strategy": {...}}` (the last
    may leave `epochs` out) for a strategy that changes during the run.
    """

    workload: str
    strategy: StrategySpec = field(default_factory=lambda: {"name": "all_reduce"})
    workers: int = 1
    epochs: int | None = None
    steps: int | None = None
    seed: int = 0
    resources: dict[str, float] = field(default_factory=lambda: {"cpu": 1})
    working_dir: str | None = None
    checkpoint_every: int | None = None
    max_failures: int = 3
    timeout: float = 60.0
    resume: str | None = None
    name: str | None = None
    server_group: str | None = None  # name of a server group of the cluster; None if the job starts its own servers
    branch: str | None = None  # name of another job's space on that group; this job starts with its parameters
    quota: dict[str, float] | None = None  # the job's limits on that group: "bytes", and "operations" per second

    def check(self) -> Self:
        """Refuse a job that can never run.

        Raises:
            ConfigError: a field is invalid. The error names the field, its value and what is expected.
        """
        _positive("workers", self.workers)
        for field_name in ("epochs", "steps", "checkpoint_every"):
            value = getattr(self, field_name)
            if value is not None:
                _positive(field_name, value)
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"epochs is {self.epochs} and steps is {self.steps}: give only one of them", field="epochs"
            )
        if not isinstance(self.workload, str) or ":" not in self.workload:
            raise ConfigError(
                f"workload {self.workload!r} should name a module or file and a class: 'digits:Digits' "
                "or 'examples/digits.py:Digits'",
                field="workload",
            )
        if not _whole(self.max_failures) or self.max_failures < 0:
            raise ConfigError(
                f"max_failures is {self.max_failures!r}: give a whole number of at least 0", field="max_failures"
            )
        if not _whole(self.seed):
            raise ConfigError(f"seed is {self.seed!r}: give a whole number", field="seed")
        if not _number(self.timeout) or not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout is {self.timeout!r}: give a finite number of seconds above 0", field="timeout")
        self._check_resources()
        self._check_group()
        self._check_layout()
        return self

    def _check_layout(self) -> None:
        try:
            phases = parse(self.strategy)
        except ConfigError:
            return  # a user's own strategy is not imported here, but checked before the run
        for number, phase in enumerate(phases, 1):
            try:
                phase.strategy.grid(self.workers)
            except ConfigError as error:
                which = f"strategy {number} of {len(phases)}: " if len(phases) > 1 else ""
                raise ConfigError(f"{which}{error.message}", **error.data) from None

    def _check_group(self) -> None:
        for name in ("server_group", "branch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ConfigError(f"{name} is {value!r}: give a name, or none", field=name)
        for name in ("branch", "quota"):
            if getattr(self, name) is not None and self.server_group is None:
                raise ConfigError(
                    f"{name} was given without server_group: it is only for jobs on a server group; give both",
                    field=name,
                )
        quota = {} if self.quota is None else self.quota
        if not isinstance(quota, dict) or any(
            key not in ("bytes", "operations") or not _number(amount) or not 0 < amount < math.inf
            for key, amount in quota.items()
        ):
            raise ConfigError(
                f'quota is {self.quota!r}: give {{"bytes": ..., "operations": ...}} or one of the two, with numbers '
                "above 0",
                field="quota",
            )

    def _check_resources(self) -> None:
        if not isinstance(self.resources, dict):
            raise ConfigError(f'resources is {self.resources!r}: give e.g. {{"cpu": 1}}', field="resources")
        for key, amount in self.resources.items():
            if key not in ("cpu", "gpu", "memory") or not _number(amount) or not 0 <= amount < math.inf:
                raise ConfigError(
                    f"resources has {key}={amount!r}: give cpu, gpu or memory (bytes) per worker, 0 or more",
                    field="resources",
                )

    def to_dict(self) -> JsonObject:
        """Return the spec as JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Keywords) -> Self:
        """Build a spec from JSON-ready data.

        Raises:
            ConfigError: `data` has an unknown field, or no workload.
        """
        known = set(cls.__dataclass_fields__)
        for key in data:
            if key not in known:
                raise ConfigError(f"a job has no field {key!r}: the fields are {', '.join(sorted(known))}", field=key)
        if "workload" not in data:
            raise ConfigError("a job needs a workload: 'module:Class' or 'file.py:Class'", field="workload")
        return cls(**data).check()


def _whole(value: Json) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Json) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _positive(name: str, value: Json) -> None:
    if not _whole(value) or value < 1:
        raise ConfigError(f"{name} is {value!r}: give a whole number of at least 1", field=name)
