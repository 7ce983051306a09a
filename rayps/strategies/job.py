"""The specification of a job, and the check of a specification, which also parses the strategy. No I/O."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self, TypeGuard

from rayps_client.errors import ConfigError
from rayps_client.values import Json, JsonObject, Keywords
from rayps_client.workload_name import misnamed_function

from rayps.core.job.code_archive import is_hash
from rayps.core.job.job_environment import NAMES, JobEnvironment
from rayps.core.job.job_fields import FIELDS, MOST_PARAMS
from rayps.core.job.statement import check_statement
from rayps.core.job.warm_start import StartFrom
from rayps.core.refusals.of_jobs import NOT_IN_LOOPS
from rayps.core.refusals.table import refuse
from rayps.core.strategy.elastic import ElasticWorkers, explain_misplaced, range_of, workers_of_text
from rayps.core.strategy.elastic_support import check_phases
from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.topology import shard_bundles
from rayps.strategies.catalogue import StrategySpec, check_for_loop, parse
from rayps.strategies.job_features import features_of_phase

MOST_PARAMS_BYTES = 100_000  # of all values as JSON
# the fields that exclude others
_OF_PAIRS = ("workload", "run", *NOT_IN_LOOPS, "resume", "branch", "quota")
LOOP_TIMEOUT = 600.0  # seconds, of a loop of the user's own unless it is given: rank 0 may validate alone in a step


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as it was submitted: of a `workload`, or `run`, of a user's own loop; exactly one of the two.

    `strategy` is in wire form: `{"name": ..., option: ...}`, or a list of `{"epochs": n, "strategy": {...}}` (the last
    may leave `epochs` out) for a strategy that changes during the run.
    """

    workload: str = ""  # "file.py:Class"
    strategy: StrategySpec = field(default_factory=lambda: {"name": "all_reduce"})
    workers: int = 1
    epochs: int | None = None
    steps: int | None = None
    seed: int = 0  # of parameters and the order of rows; of torch's random numbers in a loop of the user's own
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
    start_from: str | JsonObject | None = None  # files with the first parameters: see `rayps.core.job.warm_start`
    profile: bool = False  # whether each worker writes a trace of a few steps into the job's folder
    # values of the workload's parameters, or of the loop's arguments, by name; types are checked when it is imported
    params: JsonObject = field(default_factory=dict)
    evaluate_every: int | None = None  # rounds between two evaluations; None: an evaluation after each epoch
    keep_checkpoints: int = 2  # the number of newest checkpoints, or saved states of a loop, that are kept
    code: str | None = None  # the SHA-256 of the uploaded archive of the working directory
    environment: JobEnvironment = field(default_factory=JobEnvironment)  # the fields requirements and env
    run: str | None = None  # "file.py:train_fn": a function with a loop of its own, which rayps calls on each worker
    # for an elastic job, whose least number of workers is `workers`: what else it states; None: the number is fixed
    elastic: ElasticWorkers | None = None
    statement: str | None = None  # the text of the data-use statement, which real clients accept and sign

    @property
    def target(self) -> str:
        """The name of the job's code: of its workload, or of its function."""
        return self.workload if self.run is None else self.run

    @property
    def most_workers(self) -> int:
        """The most workers that the job may have."""
        return self.workers if self.elastic is None else self.elastic.most

    def check(self, phases: Sequence[Phase] | None = None) -> Self:
        """Refuse a job that can never run. `phases`: those of `strategy`, if it has been parsed.

        Raises:
            ConfigError: a field is invalid. The error names the field, its value and what is expected.
        """
        _positive("workers", self.workers)
        if self.elastic is not None:
            self.elastic.check(self.workers)
        for field_name in ("epochs", "steps", "checkpoint_every", "evaluate_every", "keep_checkpoints"):
            value = getattr(self, field_name)
            if value is not None:
                _positive(field_name, value)
        refuse(self._features())
        if self.run is not None:
            self._check_loop(self.run)
        elif not isinstance(self.workload, str) or ":" not in self.workload:
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
        self._check_params()
        self._check_group()
        self._check_start()
        self._check_code()
        self._check_layout(phases)
        return self

    def _features(self) -> dict[str, Json]:
        """Return the fields that are given, as `rayps.core.refusals` names them."""
        found = {name: value for name in _OF_PAIRS if (value := getattr(self, name)) not in (None, False, "")}
        return found if "server_group" in found else found | {"no server_group": True}

    def _check_loop(self, target: str) -> None:
        """Check the name of the function that a job runs."""
        reason = misnamed_function(target) if isinstance(target, str) else f"run is {target!r}: give 'file.py:train_fn'"
        if reason is not None:
            raise ConfigError(reason, field="run")

    def _check_layout(self, given: Sequence[Phase] | None) -> None:
        try:
            phases = parse(self.strategy) if given is None else given
        except ConfigError:
            return  # a user's own strategy is not imported here, but checked before the run
        check_statement(self.statement, any(phase.strategy.rows.remote for phase in phases))
        if self.run is not None:
            check_for_loop(phases)
        elif self.elastic is not None:
            check_phases(phases, self.elastic)
        own: dict[str, Json] = {"profile": True} if self.profile else {}
        own |= {} if self.server_group is None else {"server_group": self.server_group}
        for number, phase in enumerate(phases, 1):
            first = {"branch": self.branch} if number == 1 and self.branch is not None else {}
            refuse(features_of_phase(phase) | own | first)
            try:
                phase.strategy.grid(self.workers)
            except ConfigError as error:
                which = f"strategy {number} of {len(phases)}: " if len(phases) > 1 else ""
                raise ConfigError(f"{which}{error.message}", **error.data) from None

    def _check_start(self) -> None:
        if not isinstance(self.profile, bool):
            raise ConfigError(f"profile is {self.profile!r}: give true or false", field="profile")
        if self.start_from is not None:
            StartFrom.parse(self.start_from)

    def _check_group(self) -> None:
        for name in ("server_group", "branch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ConfigError(f"{name} is {value!r}: give a name, or none", field=name)
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

    def _check_params(self) -> None:
        if not isinstance(self.params, dict):
            raise ConfigError(f'params is {self.params!r}: give names with values, e.g. {{"lr": 0.1}}', field="params")
        for name, value in self.params.items():
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
                raise ConfigError(
                    f"params has the name {name!r}: give names of the workload's fields, such as lr", field="params"
                )
            if not _is_parameter_value(value):
                raise ConfigError(
                    f"params.{name} is {value!r}: give a finite number, text, true, false, null, or a list or "
                    "mapping of these",
                    field=f"params.{name}",
                )
        if len(self.params) > MOST_PARAMS or len(json.dumps(self.params)) > MOST_PARAMS_BYTES:
            raise ConfigError(
                f"params has {len(self.params)} values in {len(json.dumps(self.params))} bytes of JSON: give at most "
                f"{MOST_PARAMS} in {MOST_PARAMS_BYTES} bytes, and read larger tables from a file",
                field="params",
            )

    def _check_code(self) -> None:
        if self.code is not None and not (isinstance(self.code, str) and is_hash(self.code)):
            raise ConfigError(
                f"code is {self.code!r:.100}: give the SHA-256 of an uploaded archive, 64 digits from 0 to f",
                field="code",
            )
        self.environment.check()

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
        """Return the spec as JSON-ready data, with the values of `env`: only to store it, and for the job's driver."""
        found: JsonObject = asdict(self)
        del found["environment"]
        return found | asdict(self.environment) | {"elastic": None if self.elastic is None else self.elastic.to_json()}

    @classmethod
    def from_dict(cls, data: Keywords, phases: Sequence[Phase] | None = None) -> Self:
        """Build a spec from JSON-ready data. `phases`: those of its strategy, if it has been parsed.

        Raises:
            ConfigError: `data` has an unknown field, or neither a workload nor a function to run.
        """
        for key in data:
            if key not in FIELDS:
                reason = (
                    explain_misplaced(key) or f"a job has no field {key!r}: the fields are {', '.join(sorted(FIELDS))}"
                )
                raise ConfigError(reason, field=key)
        given = {key: value for key, value in data.items() if key != "workload" or value is not None}
        if "workload" not in given and given.get("run") is None:
            raise ConfigError(
                "a job needs a workload: 'module:Class' or 'file.py:Class'; or run: 'file.py:train_fn'",
                field="workload",
            )
        return cls.of_stored({"workers": 1, **given}).check(phases)

    @classmethod
    def of_stored(cls, data: Keywords) -> Self:
        """Build a spec from what `to_dict` returned, without checking it again."""
        plain = {key: value for key, value in data.items() if key not in NAMES}
        found = plain | elastic_fields(data["workers"], data.get("elastic"))
        return cls(**found, environment=JobEnvironment.of(data))


def elastic_fields(workers: object, elastic: object) -> Keywords:
    """Return the fields `workers` and `elastic` of a job from what a user gives for them.

    `workers` is a number, a pair (least, most), or the text "2..8" for such a pair. `elastic` is None or a mapping, in
    which `most` may be left out if `workers` is a pair. With one number, `global_batch` and `balance` are for
    that number of workers.

    Raises:
        ConfigError: the two contradict each other, or are not valid.
    """
    if elastic is not None and not isinstance(elastic, (Mapping, ElasticWorkers)):
        raise ConfigError(f"elastic is {elastic!r:.100}: give a mapping, e.g. {{global_batch: 256}}", field="elastic")
    if isinstance(workers, str) and ".." in workers:
        workers = workers_of_text(workers)
    pair = range_of(workers) if isinstance(workers, (tuple, list)) else None
    if pair is None:
        if isinstance(elastic, Mapping) and not {"global_batch", "balance"}.isdisjoint(elastic):
            elastic = {"most": workers} | dict(elastic)
        held = ElasticWorkers.of(elastic) if isinstance(elastic, Mapping) else elastic
        return {"workers": workers, "elastic": held}
    least, most = pair
    given = elastic.to_json() if isinstance(elastic, ElasticWorkers) else dict(elastic or {})
    if given.setdefault("most", most) != most:
        raise ConfigError(
            f"workers is ({least}, {most}) and elastic.most is {given['most']!r}: leave out elastic.most",
            field="elastic",
        )
    return {"workers": least, "elastic": ElasticWorkers.of(given)}


def gpus_of_servers(spec: JobSpec, phases: Sequence[Phase] | None = None) -> float:
    """Return how many GPUs the servers of a job need together; 0 if its strategy is a user's own, in a file.

    `phases`: those of its strategy, if it has been parsed. It is parsed here only if it names `shard_resources`.
    """
    if phases is None:
        try:
            phases = parse(spec.strategy) if "shard_resources" in json.dumps(spec.strategy) else []
        except ConfigError:
            return 0.0
    strategies = [phase.strategy for phase in phases]
    return sum(bundle["gpu"] for bundle in shard_bundles(strategies, spec.workers))


def _is_parameter_value(value: Json) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_parameter_value(each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_parameter_value(each) for each in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def _whole(value: Json) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Json) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _positive(name: str, value: Json) -> None:
    if not _whole(value) or value < 1:
        raise ConfigError(f"{name} is {value!r}: give a whole number of at least 1", field=name)
