"""The client of a job service: submit, list, follow, stop. Imports neither torch nor ray.

Guarantees: a call that changes nothing, or that carries an Idempotency-Key, is repeated when the connection fails, and
takes effect once. After a restart of the service a stream continues from its cursor, without a gap and without
repetition. A stream ends only when the service reports that the job has ended.

    client = rayps.Client()                                   # RAYPS_URL and RAYPS_TOKEN, or this machine's service
    job = client.submit("digits:Digits", strategy="all_reduce", workers=2, epochs=3)
    job.wait()
"""

from __future__ import annotations

import json
import logging
import random
import re
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from urllib.parse import quote

import httpx2
from rayps_client.errors import ConfigError, NotFound, Unauthorized, Unreachable
from rayps_client.exchange.service_answers import checked as checked
from rayps_client.machine.private_file import read_token
from rayps_client.values import Json, JsonObject, is_json

from rayps.core.job.job_status import Status
from rayps.core.job.records import Event, Point
from rayps.core.job.requirements import read_requirements
from rayps.core.job.returned_rounds import select_counted
from rayps.service.code.code_files import PackedCode, must_be_project
from rayps.service.code.code_upload import prepare_upload, prepare_value, write_code
from rayps.service.remote_group import RemoteGroup, make_size_fields
from rayps.service.rest_answers import ClusterAnswer, GroupRow, JobAnswer, JobsAnswer, SweepAnswer
from rayps.service.settings import Settings
from rayps.service.sweeps.sweep_client import Sweep, listed
from rayps.strategies.catalogue import StrategySpec, sendable

if TYPE_CHECKING:
    from rayps.strategies.catalogue import StrategyDescription

CURRENT = "."  # the working directory of a job that names none
_RETRIES = 4
_CODE_SECONDS = 600.0  # seconds to send or receive an archive of code
_PATIENCE = 60.0  # seconds that a stream waits for a service that does not answer
StreamEvent: TypeAlias = tuple[str, Any]  # the kind of an event of the stream, and its JSON data
log = logging.getLogger(__name__)


def log_left_out(packed: PackedCode) -> None:
    """Log a warning that names the files that were left out of a job's code because they hold a secret."""
    if packed.secrets:
        log.warning("%s", packed.left_out())


class Client:
    """A connection to a job service: the one that RAYPS_URL and RAYPS_TOKEN name, or that of this machine and user.

    `token`, or RAYPS_TOKEN, is the token or @FILE, a file that holds it.
    `timeout`: seconds to wait for each answer of the service. `on_packed` is called with a job's packed code before it
    is sent; by default it logs a warning that names the files that were left out because they hold a secret.

    Example:
        with rayps.Client() as client:
            job = client.submit("digits.py:Digits", strategy="all_reduce", workers=2, working_dir="examples")
            job.wait()
            job.result["accuracy"]
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        on_packed: Callable[[PackedCode], None] = log_left_out,
    ) -> None:
        settings = Settings.read(url=url)
        self.url = settings.url or _find_running_address(settings) or f"http://127.0.0.1:{settings.port}"
        self._token = _read_token(settings) if token is None else read_token(token, "token")
        self._state_dir, self._most_code, self._on_packed = settings.state_dir, settings.code_bytes, on_packed
        self._http = httpx2.Client(
            base_url=self.url,
            timeout=timeout,
            trust_env=False,
            headers={"Authorization": f"Bearer {self._token or 'none'}", "User-Agent": "rayps"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def submit(
        self,
        workload: str | None = None,
        *,
        working_dir: str | Path | None = CURRENT,
        upload: bool = True,
        requirements: str | Path | Sequence[str] | None = None,
        strategy: StrategySpec | None = None,
        **spec: Json,
    ) -> Job:
        """Submit a job and return at once; `rayps.strategies.job.JobSpec` lists the fields of `spec`.

        `workload` is "file.py:Class". In place of it, `run="file.py:train_fn"` names a function with a loop of its own.
        `strategy` is as in `rayps.train`: a text with options, a dict, an object, or a list of phases. `working_dir` is
        the directory from which the workload, and a strategy class of your own, are imported. Its files are packed now
        and sent to the service, unless it has them: see `rayps.service.code.code_files` for which. Keys and tokens are
        left out, and a warning names them. The default, the current folder, is refused if it is the home directory, `/`
        or a folder for temporary files; any other value names the folder on purpose. The job, also after a restart,
        runs these files on every host. With `upload=False`, `working_dir` is a folder of the service's machine, and the
        job runs what is there when it starts. `requirements` is a requirements file or a list of its lines; pip
        installs them for the job's processes. `env` has environment variables by name: a text, "@/path" of a file of
        the service's machine, or None for the service's own variable; their values are never shown. `code`, the SHA-256
        of an archive that the service has, takes the place of `working_dir`.

        Raises:
            ConfigError: the service refused the job, the class of a strategy object is not defined in a file, or the
                working directory cannot be packed.
            Unreachable: no service answers.
            Unauthorized: the token is missing, wrong or revoked.
        """
        fields: dict[str, Json] = {**spec, "workload": workload}
        body, packed = self._prepare(fields, working_dir, strategy, requirements, upload=upload)
        return Job(self, self._post("/api/v1/jobs", body, packed))

    def _prepare(
        self,
        spec: Mapping[str, Json],
        working_dir: str | Path | None,
        strategy: StrategySpec | None,
        requirements: str | Path | Sequence[str] | None,
        *,
        upload: bool,
    ) -> tuple[dict[str, Json], PackedCode | None]:
        """Return a job as it is sent, without empty fields, and the working directory if it was packed and uploaded."""
        body: dict[str, Json] = {key: value for key, value in spec.items() if value is not None}
        if strategy is not None:
            body["strategy"] = sendable(strategy, working_dir)
        if requirements is not None:
            body["requirements"] = read_requirements(requirements)
        for field, value in body.items():
            _check_json(field, value)
        if working_dir is None or "code" in body:
            return body, None
        place = Path(working_dir).expanduser().resolve()
        if not upload:
            return body | {"working_dir": str(place)}, None
        if working_dir == CURRENT:
            must_be_project(place)
        found = prepare_upload(place, body, self._most_code)
        self._on_packed(found.packed)
        self._send_code(found.packed)
        return found.fields | {"origin": json.loads(json.dumps(found.origin))}, found.packed

    def submit_again(self, job_id: str, **changes: Json) -> Job:
        """Submit a job with the specification and the code of another job; `changes` replaces fields.

        If that job has environment variables, `env` must be given, because the service does not tell their values.

        Raises:
            NotFound: there is no such job.
            ConfigError: the service refused the job.
        """
        first = self.job(job_id)
        origin = self.call("GET", f"/api/v1/jobs/{first.id}/code")["origin"]
        names = first.data["spec"].get("env")
        if names and "env" not in changes:
            raise ConfigError(
                f"job {first.id} has the variables {', '.join(names)}, whose values the service does not tell: give "
                "env (--env NAME=VALUE for each)",
                field="env",
            )
        body: dict[str, Any] = {key: value for key, value in first.data["spec"].items() if value is not None} | changes
        body |= {} if origin is None else {"origin": {k: v for k, v in origin.items() if v is not None}}
        return Job(self, self._post("/api/v1/jobs", body))

    def download_code(self, code: str) -> bytes:
        """Return the archive with this SHA-256: a tar file. Raises NotFound if the service does not have it."""
        return bytes(self._check(self._sent("GET", f"/api/v1/code/{code}", timeout=_CODE_SECONDS), raw=True))

    def _send_code(self, packed: PackedCode) -> None:
        """Upload an archive unless the service has it."""
        path = f"/api/v1/code/{packed.hash}"
        try:
            self.call("HEAD", path)
        except NotFound:
            key = {"Idempotency-Key": packed.hash, "Content-Type": "application/x-tar"}  # it may be sent again
            self.call("PUT", path, content=packed.archive, headers=key, timeout=_CODE_SECONDS)

    def _post(self, path: str, body: dict[str, Json], packed: PackedCode | None = None) -> Any:
        """Send a request once, also if it is repeated; upload the packed code again if the service lacks it."""
        key = {"Idempotency-Key": uuid.uuid4().hex}
        try:
            return self.call("POST", path, json=body, headers=key)
        except NotFound as error:
            if packed is None or error.data.get("code") != "no_code":
                raise
        self._send_code(packed)  # the last other job with this code was deleted a moment ago
        return self.call("POST", path, json=body, headers=key)

    def sweep(
        self,
        spec: Mapping[str, Json],
        *,
        name: str | None = None,
        over: Mapping[str, Iterable[Json]] | None = None,
        upload: bool = True,
        **values: Iterable[Json],
    ) -> Sweep[Job]:
        """Submit a job once for each combination of values, all or none, and return at once.

        `spec` has the fields of the job, as for `submit`; its working_dir is packed and sent once, unless `upload` is
        False. A keyword is a field of the job (such as seed, workers, strategy, epochs), or else a parameter of the
        workload or an argument of the function of `run`. `over` takes the names that no keyword can have: "params.seed"
        is the parameter and "job.seed" the field. `name` is the sweep's name; the default is the name of the workload
        or function and a number.

        Raises:
            ConfigError: the service refused a job, and no job was submitted.
            Conflict: there is a sweep of that name.
            Unreachable: no service answers.
            Unauthorized: the token is missing, wrong or revoked.

        Example:
            sweep = client.sweep({"workload": "digits.py:Digits"}, lr=[0.1, 0.3], seed=range(3))
            sweep.wait().best("loss").data["params"]["lr"]
        """
        fields: dict[str, Any] = dict(spec)
        target = fields.get("run") or fields.get("workload")
        if not isinstance(target, str) or not target:
            raise ConfigError(
                "spec has no workload: give e.g. {'workload': 'digits.py:Digits'} or {'run': 'train.py:train_fn'}",
                field="workload",
            )
        place, requirements = fields.pop("working_dir", CURRENT), fields.pop("requirements", None)
        chosen = listed({**(over or {}), **values})
        for key in ("strategy", "job.strategy"):
            if key in chosen:
                each: list[Json] = chosen[key]
                chosen[key] = [sendable(value, place) for value in each]
        job, packed = self._prepare(fields, place, fields.pop("strategy", None), requirements, upload=upload)
        if packed is not None:
            folder = Path(place).expanduser().resolve()
            for key, held in chosen.items():
                chosen[key] = [prepare_value(key.removeprefix("job."), value, folder) for value in held]
        label = re.sub(r"[^A-Za-z0-9_.-]", "-", target.rpartition(":")[2]).strip("-_.")[:48] or "sweep"
        body: dict[str, Json] = {"name": name or f"{label}-{secrets.token_hex(3)}", "job": job, "over": dict(chosen)}
        return self._make_sweep(self._post("/api/v1/sweeps", body, packed))

    def open_sweep(self, name: str) -> Sweep[Job]:
        """Return the sweep of this name. Raises NotFound if there is none."""
        return self._make_sweep(self.call("GET", f"/api/v1/sweeps/{quote(name, safe='')}"))

    def _make_sweep(self, found: SweepAnswer) -> Sweep[Job]:
        return Sweep(self.call, found["name"], [Job(self, data) for data in found["jobs"]])

    def job(self, job_id: str) -> Job:
        """Return the job with this id, or whose id begins with this text.

        Raises:
            NotFound: no job has such an id.
            ConfigError: the ids of several jobs begin with the text.
        """
        return Job(self, self.call("GET", f"/api/v1/jobs/{_check_id(job_id)}"))

    def jobs(
        self, *, status: Status | str | None = None, limit: int = 50, sweep: str | None = None, text: str | None = None
    ) -> list[Job]:
        """List the newest `limit` jobs, newest first; with `status` or `sweep`, only the jobs with this one.

        With `text`, only those in which each of its words is found, in any case: in the id, name, status, reason,
        strategy, workload, function or sweep.
        """
        found: list[Job] = []
        cursor: str | None = None
        while len(found) < limit:
            size = min(200, limit - len(found))
            page = self._fetch_page(limit=size, status=status, cursor=cursor, sweep=sweep, text=text)
            found += [Job(self, data) for data in page["jobs"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        return found

    def count_jobs(self, *, sweep: str | None = None, text: str | None = None) -> dict[Status, int]:
        """Return the number of jobs with each status, of all jobs or of those that `sweep` and `text` choose."""
        counts = self._fetch_page(limit=1, sweep=sweep, text=text)["counts"]
        return {status: counts.get(status, 0) for status in Status}

    def _fetch_page(self, **params: str | int | None) -> JobsAnswer:
        given = {key: value for key, value in params.items() if value is not None}
        found: JobsAnswer = self.call("GET", "/api/v1/jobs", params=given)
        return found

    def start_servers(
        self,
        name: str,
        *,
        servers: int | tuple[int, int] = 2,
        replicas: int = 1,
        silence: float | None = None,
        cpus: float | None = None,
    ) -> RemoteGroup:
        """Start a server group and return at once; `.wait()` waits until its servers are ready.

        If `servers` is a pair, the least and the most, the load chooses the number. Each server reserves `cpus` CPUs
        (default: 1 in a joined cluster, 0 in the Ray that the service has started). A server that sends nothing for
        `silence` seconds (default 10) is replaced. A server whose process has ended is replaced at once.

        Raises:
            ConfigError: the group is larger than the service allows.
            Conflict: a group of that name exists.
            Unreachable: no service answers.
            Unauthorized: the token is missing, wrong or revoked.
        """
        body = {"name": name, **make_size_fields(servers), "replicas": replicas}
        body |= {key: value for key, value in (("silence", silence), ("cpus", cpus)) if value is not None}
        return RemoteGroup(self.call, self.call("POST", "/api/v1/server-groups", json=body))

    def servers(self, name: str) -> RemoteGroup:
        """Return the server group of that name. Raises NotFound if there is none; the error lists the groups."""
        return RemoteGroup(self.call, {"name": name}).refresh()

    def server_groups(self) -> list[GroupRow]:
        """List the server groups, one dict for each."""
        found: list[GroupRow] = self.call("GET", "/api/v1/server-groups")["groups"]
        return found

    def strategies(self) -> list[StrategyDescription]:
        """List the strategies of the service, with their options."""
        found: list[StrategyDescription] = self.call("GET", "/api/v1/strategies")
        return found

    def cluster(self) -> ClusterAnswer:
        """Describe the Ray cluster of the service: address, resources, state."""
        found: ClusterAnswer = self.call("GET", "/api/v1/cluster")
        return found

    def page_address(self) -> str:
        """Return the dashboard's address with a login code that is valid once, for five minutes."""
        return f"{self.url}/#code={self.call('POST', '/api/v1/codes')['code']}"

    def call(self, method: str, path: str, **kwargs: Any) -> Any:
        """Send a request and return the answer's JSON.

        If the connection fails, a request that is a GET or has an Idempotency-Key is sent again, at most three times.

        Raises:
            Unreachable: no service answers.
            ConfigError: the argument `json` has a value that JSON cannot hold (NaN, infinity, an object), and nothing
                was sent; or the service refused a value.
            Unauthorized, NotFound, Conflict, ServiceError: the service answered with the HTTP status of this error.
        """
        for field, value in (kwargs.get("json") or {}).items():
            _check_json(field, value)
        return self._check(self._sent(method, path, **kwargs))

    def _sent(self, method: str, path: str, **kwargs: Any) -> httpx2.Response:
        repeatable = method in ("GET", "HEAD") or "Idempotency-Key" in kwargs.get("headers", {})
        failure: Exception | None = None
        for attempt in range(_RETRIES if repeatable else 1):
            if attempt:
                time.sleep(_pause(attempt))
            try:
                answer = self._http.request(method, path, **kwargs)
            except httpx2.TransportError as error:
                failure = error
                continue
            if answer.status_code in (502, 503, 504) and repeatable and attempt < _RETRIES - 1:
                failure = None
                continue
            return answer
        raise self._explain_unreachable(failure)

    def download(self, path: str, params: dict[str, str], file: Path) -> None:
        """Write the bytes of the answer to a GET into a new file.

        Raises:
            Unreachable: no service answers, or the connection failed before the end.
            Unauthorized, NotFound, ServiceError: the service answered with the HTTP status of this error.
        """
        try:
            with self._http.stream("GET", path, params=params) as answer, file.open("xb") as out:
                if answer.status_code != 200:
                    answer.read()
                    self._check(answer)
                for block in answer.iter_bytes():
                    out.write(block)
        except httpx2.TransportError as error:
            raise self._explain_unreachable(error) from error

    def stream(self, job_id: str, topics: str, cursor: str = "") -> Iterator[StreamEvent]:
        """Yield (event, data) as events happen, until the job has ended. A lost connection is opened again.

        `topics` is a text such as "job,logs,metrics,events". `cursor` is the position after which to start.

        Raises:
            Unreachable: the service did not answer for a minute.
            NotFound: there is no such job.
            Unauthorized: the token is missing, wrong or revoked.
        """
        silent_since: float | None = None
        attempt = 0
        while True:
            try:
                params = {"job": job_id, "topics": topics, "cursor": cursor}
                with self._http.stream("GET", "/api/v1/stream", params=params) as answer:
                    if answer.status_code >= 500 or answer.status_code == 429:
                        raise httpx2.ReadError(f"the service answered {answer.status_code}")
                    if answer.status_code != 200:
                        answer.read()
                        self._check(answer)
                    silent_since, attempt = None, 0
                    for event, data, at in _parse_events(answer.iter_lines()):
                        cursor = at or cursor
                        yield event, data
                        if event == "end":
                            return
            except httpx2.TransportError as error:
                silent_since = silent_since if silent_since is not None else time.monotonic()
                if time.monotonic() - silent_since > _PATIENCE:
                    raise self._explain_unreachable(error) from error
            attempt += 1
            time.sleep(_pause(attempt))

    def _check(self, answer: httpx2.Response, *, raw: bool = False) -> Any:
        if answer.status_code == 401 and not self._token:
            raise Unauthorized(
                f"there is no token in {self._state_dir}: set RAYPS_STATE_DIR to the service's state directory (the "
                "--state-dir of `rayps serve`),\nor RAYPS_TOKEN to the service's token",
                status=401,
            )
        return answer.content if raw and answer.is_success else checked(answer)

    def _explain_unreachable(self, error: Exception | None) -> Unreachable:
        cause = f" ({error})" if error is not None and str(error) else ""
        return Unreachable(
            f"no rayps service answers at {self.url}{cause}:\nstart one with `rayps serve`, or give its address "
            "in RAYPS_URL",
            url=self.url,
        )


def _check_json(field: str, value: Json) -> None:
    """Raise ConfigError, with the field and the value, if JSON cannot hold the value."""
    if not is_json(value):
        raise ConfigError(
            f"{field} is {value!r}, which JSON cannot hold: give finite numbers, text, lists and dicts of them",
            field=field,
        )


class Job:
    """A job of a service. `data` is a dict: the service's newest answer about the job."""

    def __init__(self, client: Client, data: JobAnswer) -> None:
        self._client = client
        self.data = data

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {self.data['status']})"

    @property
    def id(self) -> str:
        """The job's id."""
        return str(self.data["id"])

    @property
    def status(self) -> Status:
        """The job's status now, read from the service unless the job had ended at the last answer."""
        if not Status(self.data["status"]).terminal:
            self.refresh()
        return Status(self.data["status"])

    @property
    def params(self) -> dict[str, Json]:
        """The workload's parameters: all of them after the job has started; before, those that were given."""
        return dict(self.data["params"])

    @property
    def strategies(self) -> list[Json]:
        """The job's strategy, as a dict or a list of phases; of a function those that it gave to `rayps.wrap`."""
        return list(self.data["strategies"])

    @property
    def result(self) -> dict[str, float]:
        """The final metrics; empty until the job has ended."""
        return dict(self.data.get("metrics") or {})

    def refresh(self) -> Self:
        """Read the service's newest answer about the job into `data`."""
        self.data = self._client.call("GET", f"/api/v1/jobs/{self.id}")
        return self

    def write_code(self, folder: str | Path) -> Path:
        """Write the job's code, byte for byte, into a new or empty folder; return the folder.

        Raises:
            ConfigError: the folder is not empty, or the job ran in a folder of the service's machine.
        """
        code, target = self.data["spec"].get("code"), Path(folder).expanduser().absolute()
        if code is None:
            where = self.data["spec"].get("working_dir") or "an installed package"
            raise ConfigError(f"job {self.id} has no packed code: it ran {where} of the service's machine", field="job")
        write_code(self._client.download_code(code), code, target)
        return target

    def stop(self) -> Self:
        """Request the job to stop. The job ends as STOPPED after the current round.

        Raises:
            Conflict: the job has ended.
        """
        self.data = self._client.call("POST", f"/api/v1/jobs/{self.id}/stop")
        return self

    def scale(self, workers: int) -> Self:
        """Set the most workers that an elastic job should have now. It grows as resources are free.

        Raises:
            ConfigError: the job has a fixed number of workers, or `workers` is outside of its range.
            Conflict: the job has ended or is stopping.
        """
        self.data = self._client.call("PATCH", f"/api/v1/jobs/{self.id}", json={"workers": workers})
        return self

    def delete(self) -> None:
        """Delete the job with its logs, metrics and checkpoints.

        Raises:
            Conflict: the job has not ended, or another job that has not ended resumes one of this job's checkpoints.
        """
        self._client.call("DELETE", f"/api/v1/jobs/{self.id}")

    def wait(self, timeout: float | None = None, pause: float = 0.5) -> Self:
        """Wait until the job has ended, also during a restart of the service; read the status every `pause` seconds.

        Raises:
            TimeoutError: the job had not ended within `timeout` seconds.
            Unreachable: the service did not answer for a minute.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        silent_since: float | None = None
        while True:
            try:
                if self.status.terminal:
                    return self
                silent_since = None
            except Unreachable:
                silent_since = silent_since if silent_since is not None else time.monotonic()
                if time.monotonic() - silent_since > _PATIENCE:
                    raise
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"job {self.id} is {self.data['status']} after {timeout:g} s: wait longer with timeout=, or stop it"
                )
            time.sleep(pause)

    def logs(self, *, follow: bool = False) -> Iterator[dict[str, str]]:
        """Yield the log lines, as {"time", "source", "text"}; with `follow` until the job has ended."""
        return self._yield_entries("logs", "lines", follow)

    def metrics(self, *, follow: bool = False) -> Iterator[Point]:
        """Yield the metric points: one for each round and one for each evaluation.

        With `follow`, a point of the kind "returned" says that the run has returned to an earlier state: points of its
        `round` and of later rounds that were yielded before do not count, and others follow.
        """
        found: Iterator[Point] = self._yield_entries("metrics", "points", follow)
        return found if follow else iter(select_counted(found))

    def events(self, *, follow: bool = False) -> Iterator[Event]:
        """Yield the job's events, as {"time", "kind", "message", ...}."""
        return self._yield_entries("events", "events", follow)

    def report(self) -> JsonObject:
        """Return where the time of the job went, what costs most of it, and what to change.

        The result is that of `rayps.core.time.time_report.report_of`: `goodput`, `shares`, `members`, `timeline`,
        `verdict`. Raises NotFound if the job has not started.
        """
        found: JsonObject = self._client.call("GET", f"/api/v1/jobs/{self.id}/report")
        return found

    def files(self) -> dict[str, int]:
        """Return the job's files that can be downloaded, from path to size: checkpoints, and traces of `profile`."""
        found = self._client.call("GET", f"/api/v1/jobs/{self.id}/files")["files"]
        return {each["path"]: each["size"] for each in found}

    def download(self, path: str, folder: str | Path) -> list[Path]:
        """Download one file, or all files below a path such as "checkpoints/step-00000100", into a folder.

        The files keep their paths below `path`. Return the files.

        Raises:
            NotFound: the job has no such file.
            ConfigError: a file exists already; nothing is overwritten.
        """
        names = [name for name in self.files() if name == path or name.startswith(f"{path}/")]
        if not names:
            raise NotFound(f"job {self.id} has no file {path!r}: `job.files()` lists them", status=404)
        found = []
        for name in names:
            file = Path(folder) / (name.removeprefix(f"{path}/") if name != path else name.rpartition("/")[2])
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._client.download(f"/api/v1/jobs/{self.id}/file", {"path": name}, file)
            except FileExistsError:
                raise ConfigError(f"{file} exists: nothing is overwritten; give another folder") from None
            except BaseException:
                file.unlink(missing_ok=True)
                raise
            found.append(file)
        return found

    def follow(self) -> Iterator[StreamEvent]:
        """Yield (kind, data) as data arrives; the kinds are "job", "logs", "events", and last "end"."""
        for event, data in self._client.stream(self.id, "job,logs,events"):
            if event == "job":
                self.data = data
            yield event, data
        self.refresh()

    def _yield_entries(self, topic: str, key: str, follow: bool) -> Iterator[Any]:
        if follow:
            for event, data in self._client.stream(self.id, topic):
                if event == topic:
                    yield from data[key]
            return
        cursor: int = 0
        while True:
            page = self._client.call("GET", f"/api/v1/jobs/{self.id}/{topic}", params={"cursor": cursor})
            yield from page[key]
            if page["cursor"] == cursor:
                return
            cursor = page["cursor"]


def _parse_events(lines: Iterator[str]) -> Iterator[tuple[str, Any, str]]:
    """Parse a stream of server-sent events into (name, data, id)."""
    event, data, at = "message", "", ""
    for line in lines:
        if line == "":
            if data:
                yield event, json.loads(data), at
            event, data, at = "message", "", ""
            continue
        key, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if key == "event":
            event = value
        elif key == "data":
            data += value
        elif key == "id":
            at = value


def _pause(attempt: int) -> float:
    return random.uniform(0.5, 1.0) * min(5.0, 0.1 * 2.0**attempt)


def _check_id(text: str) -> str:
    if not text or not text.isascii() or not text.isalnum():
        raise NotFound(f"there is no job {text!r}: `rayps ls` lists them", status=404)
    return text


def _find_running_address(settings: Settings) -> str | None:
    try:
        return str(json.loads(settings.service_file.read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_token(settings: Settings) -> str:
    if settings.token is not None:
        return read_token(settings.token, "RAYPS_TOKEN")
    try:
        return settings.token_file.read_text().strip()
    except OSError:
        return ""  # the service's error says that the token is missing
