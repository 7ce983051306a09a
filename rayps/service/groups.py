"""Start, find, watch and stop the server groups of this service, one idempotent tick at a time.

A group runs in the Ray cluster: a detached actor named `rayps-servers-NAME` (its manager) and the servers that the
manager starts. The group's folder holds the manager's record, and a small file with the wanted state of the group. A
restarted service finds the managers by name. If a manager has ended, the service starts a new one from the record.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rayps_client.errors import ActorDied, ClusterError, ConfigError, Conflict, NotFound, RaypsError, first_line
from rayps_client.values import Json

from rayps.cluster.local import FIRST_PROTOCOL, PROTOCOL, ActorHandle, Actors
from rayps.core.job.job_fields import GROUP_NAME
from rayps.core.job.records import GroupFacts, read_json
from rayps.service.scheduler import Scheduler
from rayps.service.settings import private_write
from rayps.service.store import FEWEST_LETTERS
from rayps.strategies.job import JobSpec

log = logging.getLogger(__name__)

MANAGER = "rayps.ps.manager.manager:ManagerActor"
MOST_SERVERS, MOST_REPLICAS = 1000, 8
SILENCE, LEAST_SILENCE, MOST_SILENCE = 10.0, 0.5, 3600.0  # seconds: the default, least and largest `silence`
_WATCHED_SECONDS, _QUIET_SECONDS = 0.5, 3.0  # seconds between two ticks, while clients read the facts and otherwise
_ATTENTION = 10.0  # seconds after a client's last read of the facts in which ticks are _WATCHED_SECONDS apart
_FRESH_SECONDS = 15.0  # facts older than this are not shown
_ANSWER_SECONDS = 10.0  # seconds in which a manager must answer
_CHECK_SECONDS = 1.0  # seconds that a tick waits for the threads that it has started
_END_SECONDS = 30.0  # seconds in which a manager must stop; then it is killed
_MOST_PAUSE = 30.0  # seconds: the longest pause between two attempts to start a manager that does not answer


def name_manager(name: str) -> str:
    """Return the name of a group's manager in the cluster."""
    return f"rayps-servers-{name}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted state of a group: the content of the file in the group's folder."""

    name: str
    servers: int
    replicas: int
    created_at: float
    stopping: bool = False
    launched: bool = False  # the group's manager was started at least once
    silence: float = SILENCE  # seconds after which a silent server is replaced
    protocol: int = FIRST_PROTOCOL  # protocol number of the group's manager, valid once `launched`
    most: int | None = None  # the most servers, if load chooses the number; `servers` is the least one at the start
    cpus: float = 0.0  # CPUs that each server reserves

    @property
    def size(self) -> int | tuple[int, int]:
        """The argument `servers` of a new manager: the number, or the least and the most."""
        return self.servers if self.most is None else (min(self.servers, self.most), self.most)

    @property
    def version_conflict(self) -> str | None:
        """Why the service must not call the group's manager, or None if both have the same protocol."""
        if not self.launched or self.protocol == PROTOCOL:
            return None
        return (
            f"another version of rayps started the manager: the manager has protocol {self.protocol!r:.20} and this "
            f"service has protocol {PROTOCOL}. Jobs that use the group continue; when they have ended, stop the group "
            "and start it again"
        )

    def write(self, folder: Path) -> None:
        """Write the wanted state into the group's folder."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_write(folder / "wanted.json", json.dumps(asdict(self)))


@dataclass(slots=True)
class GroupView:
    """The newest facts about a group, and the handle of its manager."""

    facts: GroupFacts | None = None
    at: float = -1e9
    handle: ActorHandle | None = None
    reason: str | None = None
    changes: int = 0  # number of changes made so far; facts that were requested before the newest one are dropped
    failures: int = 0
    retry_at: float = 0.0


@dataclass(slots=True)
class _Entry:
    wanted: Wanted
    view: GroupView = field(default_factory=GroupView)
    written: bool = True  # whether the wanted state is on disk; the manager is started only then
    join_count: int = 0  # number of the connection to Ray that returned the view's handle
    checking: asyncio.Future[None] | None = None
    # each group has threads of its own: a manager that does not answer delays no other group
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "rayps-group"))


class Groups:
    """The server groups of this service: starts, finds, watches and stops them, and answers the routes about them."""

    def __init__(self, scheduler: Scheduler, folder: Path, *, manager: str = MANAGER) -> None:
        self._scheduler = scheduler
        self._folder = folder
        self._manager = manager
        self._wake = asyncio.Event()
        self._attention = -1e9
        self._entries = {wanted.name: _Entry(wanted) for wanted in _read(folder)}

    # for the routes

    @property
    def names(self) -> list[str]:
        """The names of the groups that are not being stopped."""
        return sorted(name for name, entry in self._entries.items() if not entry.wanted.stopping)

    def all(self) -> list[GroupFacts]:
        """List every group, as `get` returns it."""
        return [self.get(name) for name in sorted(self._entries)]

    def get(self, name: str) -> GroupFacts:
        """Describe a group: its manager's newest facts, or the wanted state and the reason why there are no new facts.

        Raises:
            NotFound: there is no such group; the error lists the existing groups.
        """
        self._attention = time.monotonic()
        entry = self._find_entry(name)
        wanted, view = entry.wanted, entry.view
        facts = dict(view.facts or {})
        fresh = view.facts is not None and time.monotonic() - view.at < _FRESH_SECONDS
        status = str(facts.get("status", "ready")) if fresh else "unreachable" if view.facts else "starting"
        if not fresh and wanted.launched and view.facts is None and view.reason in (None, wanted.version_conflict):
            status = "unreachable"  # an earlier service or another version of rayps started the manager: it may run
        reason = (
            None
            if fresh
            else view.reason
            or self._scheduler.view.reason
            or (
                "the service has just started and is searching for the group's manager"
                if wanted.launched
                else "the group's manager is starting"
            )
        )
        return {
            "name": name,
            "status": "stopping" if wanted.stopping else status,
            "reason": reason,
            "wanted": facts.get("wanted", wanted.servers) if fresh else wanted.servers,
            "replicas": wanted.replicas,
            "range": facts.get("range", None if wanted.most is None else list(wanted.size)),  # type: ignore[arg-type]
            "pinned": bool(facts.get("pinned", False)),
            "created_at": wanted.created_at,
            "settled": fresh and not wanted.stopping and _is_settled(facts),
            **{key: facts.get(key, []) for key in ("servers", "spaces", "moves", "events")},
            "counts": facts.get("counts", {}),
        }

    def spaces(self, name: str) -> list[str] | None:
        """Return the names of a group's spaces, or None if its manager does not answer.

        Raises NotFound if there is no such group.
        """
        view = self._find_entry(name).view
        if view.facts is None or time.monotonic() - view.at >= _FRESH_SECONDS:
            return None
        return [str(each.get("name")) for each in view.facts.get("spaces", [])]

    def space(self, name: str, text: str) -> str:
        """Return the full name of the space whose name begins with `text` (at least 4 letters, in any case).

        Raises:
            NotFound: no space's name begins with `text`.
            ConfigError: the names of several spaces begin with `text`.
        """
        there = self.spaces(name)
        found = (
            [text]
            if there is None or text in there
            else [each for each in there if len(text) >= FEWEST_LETTERS and each.upper().startswith(text.upper())]
        )
        # JOB/COLUMN is a further space of the job whose space JOB was found too: it does not make `text` ambiguous
        found = [each for each in found if each == text or each.rpartition("/")[0] not in found]
        if len(found) > 1:
            raise ConfigError(
                f"several spaces begin with {text!r}: {', '.join(found)}: give more of the name",
                field="space",
                code="ambiguous",
            )
        if not found:
            known = ", ".join(there or []) or "none"
            raise NotFound(f"server group {name!r} has no space {text[:100]!r}: it has {known}", status=404)
        return found[0]

    def must_exist(self, name: str) -> None:
        """Check that a group exists, for a job that names it.

        Raises:
            ConfigError: the group does not exist; the error lists the existing groups.
        """
        if name not in self.names:
            raise ConfigError(
                f"there is no server group {name!r}: {self._list_known()}", field="server_group", code="no_such_group"
            )

    def end_reason(self, spec: JobSpec) -> str | None:
        """Return why a job can never continue: its server group was stopped. Return None if this is not so."""
        if spec.server_group is None or spec.server_group in self.names:
            return None
        return f"the server group {spec.server_group!r} was stopped with --force"

    def wait_reason(self, spec: JobSpec) -> str | None:
        """Return why a job has to wait for its server group, or None if the job can start."""
        name = spec.server_group
        if name is None:
            return None
        if name not in self.names:
            return f"waits for server group {name!r}, which does not exist: {self._list_known()}"
        group = self.get(name)
        if any(each.get("state") == "alive" for each in group["servers"]):
            return None
        return f"waits for server group {name!r}: {group['reason'] or 'none of its servers is ready yet'}"

    async def start(
        self,
        name: str,
        servers: int,
        replicas: int,
        silence: float = SILENCE,
        *,
        most: int | None = None,
        cpus: float | None = None,
    ) -> None:
        """Request a new group, which the next tick starts. A server that is silent for `silence` seconds is replaced.

        With `most`, the load chooses the number of servers, from `servers` to `most`. `cpus`: CPUs that each server
        reserves; None means 1 in a joined cluster, and 0 in the Ray of this service, where jobs may need all of them.
        A group that is larger than a joined cluster waits until the cluster has grown.

        Raises:
            ConfigError: the sizes are not valid; with code too_large, the group is larger than this service's Ray.
            Conflict: a group of that name exists.
        """
        if not re.fullmatch(GROUP_NAME, name):
            raise ConfigError(f"name {name[:100]!r} should be letters, digits, - and _, at most 40", field="name")
        _check_size(servers, replicas)
        _check_most(servers, most)
        if name in self._entries:
            raise Conflict(
                f"there is a server group {name!r} already: give another name, resize this group with `rayps servers "
                f"resize {name} {servers}`, or stop it first with `rayps servers stop {name}`",
                status=409,
            )
        if self._scheduler.place.owned:
            self._refuse_too_large(name, servers)
        reserved = cpus if cpus is not None else 0.0 if self._scheduler.place.owned else 1.0
        wanted = Wanted(name, servers, replicas, time.time(), silence=silence, most=most, cpus=reserved)
        self._entries[name] = entry = _Entry(wanted, written=False)
        try:
            await asyncio.to_thread(wanted.write, self._folder / name)
        except OSError:
            del self._entries[name]
            raise
        entry.written = True
        log.info("server group %s was requested: %d servers, %d replicas", name, servers, replicas)
        self.wake()

    async def resize(self, name: str, servers: int, most: int | None = None) -> None:
        """Grow or shrink a group. This method returns before the segments have migrated.

        With `most`, the load chooses the number of servers from now on, from `servers` to `most`. Without it, the
        number stays as given.

        Raises:
            NotFound: there is no such group.
            Conflict: the group is not ready, or is resizing already.
            ConfigError: too few servers for the replicas; with code too_large, more than the cluster has room for now.
        """
        entry = self._find_entry(name)
        _check_size(servers, entry.wanted.replicas)
        _check_most(servers, most)
        if servers > entry.wanted.servers:
            self._refuse_too_large(name, servers)
        await self._call_manager(entry, "resize", servers if most is None else (servers, most))

    async def drain(self, name: str, server: str) -> None:
        """Migrate all segments from a server to the other servers, then stop the server.

        Raises:
            NotFound: there is no such group or server.
            ConfigError, Conflict: as for `resize`.
        """
        entry = self._find_entry(name)
        there = [str(each.get("name")) for each in (entry.view.facts or {}).get("servers", [])]
        if entry.view.facts is not None and server not in there:
            raise NotFound(
                f"server group {name!r} has no server {server[:100]!r}: it has {', '.join(there) or 'none'}", status=404
            )
        await self._call_manager(entry, "drain", server)

    async def set_quota(self, name: str, space: str, quota: dict[str, float | None]) -> None:
        """Set a space's quota: {"bytes": ..., "operations": ... per second}; a value of None means no limit.

        Raises the errors of `drain`.
        """
        await self._call_manager(self._find_entry(name), "set_quota", self.space(name, space), quota)

    async def drop_space(self, name: str, space: str) -> None:
        """Delete a space and free its memory. Raises the errors of `drain`."""
        await self._call_manager(self._find_entry(name), "drop", self.space(name, space))

    async def stop(self, name: str) -> None:
        """Request a group to stop. The group's parameters are lost."""
        entry = self._find_entry(name)
        if not entry.wanted.stopping:
            entry.wanted = replace(entry.wanted, stopping=True)
            await asyncio.to_thread(entry.wanted.write, self._folder / name)
        self.wake()

    # the loop

    def wake(self) -> None:
        """Run the next tick now."""
        self._wake.set()

    async def run(self) -> None:
        """Run ticks until this task is cancelled. If a tick fails, log the error and run the next tick."""
        while True:
            try:
                await self.tick()
            except Exception:  # after any error the groups must still be watched
                log.exception("a tick of the server groups failed; the next one tries again")
            watched = time.monotonic() - self._attention < _ATTENTION
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _WATCHED_SECONDS if watched else _QUIET_SECONDS)
            self._wake.clear()

    async def tick(self) -> None:
        """Check every group; start missing managers, and stop the groups whose stop was requested.

        Each group is checked in its own thread. A tick waits at most `_CHECK_SECONDS` for the checks; the next ticks
        skip a group until its check has returned.
        """
        loop = asyncio.get_running_loop()
        started = []
        for name, entry in list(self._entries.items()):
            if entry.checking is None or entry.checking.done():
                entry.checking = loop.run_in_executor(entry.threads, self._check, name, entry, self._scheduler.cluster)
                started.append(entry.checking)
        if started:
            done, _ = await asyncio.wait(started, timeout=_CHECK_SECONDS)
            for check in done:
                check.result()

    def close(self) -> None:
        """Disconnect from the groups' managers. The groups continue until they are stopped or the cluster ends."""
        for entry in self._entries.values():
            entry.threads.shutdown(wait=False, cancel_futures=True)

    def _refuse_too_large(self, name: str, servers: int) -> None:
        """Raise ConfigError if the groups would have more servers than the cluster has CPUs: each server needs one."""
        too_many = self._lacks_cpus(name, servers)
        if too_many is not None:
            owned = self._scheduler.place.owned
            remedy = "start `rayps serve` with more --cpus" if owned else "try again when the cluster has grown"
            raise ConfigError(
                f"servers is {servers}: {too_many}:\nlower servers, stop another group, or {remedy}",
                field="servers",
                code="too_large",
            )

    def _lacks_cpus(self, name: str, servers: int) -> str | None:
        """Return why the cluster has too few CPUs for the servers, or None if it has enough or its size is unknown."""
        total = {**(self._scheduler.place.capacity() or {}), **(self._scheduler.view.total or {})}.get("cpu")
        others = sum(entry.wanted.servers for other, entry in self._entries.items() if other != name)
        if total is None or servers + others <= total:
            return None
        has = "this service's Ray" if self._scheduler.place.owned else "the whole cluster"
        others_too = f", and other groups use {others}" if others else ""
        return f"group {name!r} needs a CPU for each of {servers} servers{others_too}; {has} has {total:g}"

    def _check(self, name: str, entry: _Entry, cluster: Actors | None) -> None:
        if (
            entry.join_count != self._scheduler.join_count
        ):  # a new connection: the handle of an earlier connection is invalid
            entry.join_count, entry.view.handle = self._scheduler.join_count, None
        try:
            if entry.wanted.stopping:
                self._stop_group(name, entry, cluster)
            elif cluster is not None and entry.written:
                self._refresh(entry, cluster)
        except (RaypsError, OSError, RuntimeError, TimeoutError) as error:
            late = (
                "the group's manager did not answer in time"
                if isinstance(error, TimeoutError)
                else type(error).__name__
            )
            text = str(error) or late
            first = text.splitlines()[0]
            if first != entry.view.reason:
                log.warning("server group %s: %s", name, text)
            entry.view.reason = first

    def _refresh(self, entry: _Entry, cluster: Actors) -> None:
        """Find or start the group's manager, and read the manager's facts."""
        wanted, view = entry.wanted, entry.view
        view.handle = cluster.find(name_manager(wanted.name))
        if view.handle is not None and wanted.version_conflict is not None:
            view.handle = view.facts = None
            raise ClusterError(wanted.version_conflict)
        if view.handle is None:
            if time.monotonic() < view.retry_at:
                return
            waits = None if wanted.launched else self._lacks_cpus(wanted.name, wanted.servers)
            if waits is not None:  # a joined cluster may grow
                view.reason = waits
                return
            view.retry_at = time.monotonic() + min(_MOST_PAUSE, 1.0 * 2.0**view.failures)
            view.failures += 1
            if view.facts is not None:
                log.warning("server group %s: the manager is lost and is restarted from its record", wanted.name)
            entry.wanted = replace(wanted, launched=True, protocol=PROTOCOL)
            entry.wanted.write(self._folder / wanted.name)
            view.reason = "the group's manager is starting"
            view.handle = cluster.spawn(
                self._manager,
                wanted.name,
                wanted.size,
                wanted.replicas,
                str(self._folder / wanted.name),
                options={"silence": wanted.silence, "cpus": wanted.cpus},
                name=name_manager(wanted.name),
                detached=True,
                here=True,
                cpus=0.0,
            )
        try:
            changes = view.changes
            facts = view.handle.call("facts").result(timeout=_ANSWER_SECONDS)
        except ActorDied:
            view.handle = None
            raise
        if changes == view.changes:
            view.facts, view.at = facts, time.monotonic()
            if facts["wanted"] != entry.wanted.servers:  # the load has changed the number
                entry.wanted = replace(entry.wanted, servers=facts["wanted"])
        view.reason, view.failures = None, 0

    def _stop_group(self, name: str, entry: _Entry, cluster: Actors | None) -> None:
        if cluster is None and entry.wanted.launched:
            entry.view.reason = f"the group ends when Ray answers: {self._scheduler.view.reason}"
            return
        handle = None if cluster is None else cluster.find(name_manager(name))
        if handle is not None and cluster is not None:
            try:
                # the manager is not called, but killed; its servers end some time later
                if entry.wanted.version_conflict is not None:
                    raise ClusterError(entry.wanted.version_conflict)
                handle.call("stop").result(timeout=_END_SECONDS)
            except (RaypsError, TimeoutError) as error:
                log.warning("server group %s did not stop by itself and is killed: %s", name, error)
            cluster.kill(handle)
        shutil.rmtree(self._folder / name, ignore_errors=True)
        self._entries.pop(name, None)
        entry.threads.shutdown(wait=False)
        log.info("server group %s has ended", name)

    async def _call_manager(self, entry: _Entry, method: str, *args: Json) -> None:
        """Call a method by which a group's manager begins a change.

        Raises the manager's error, or Conflict if the manager cannot be called now or does not answer in time.
        """
        name, handle = entry.wanted.name, entry.view.handle
        if entry.wanted.stopping or handle is None:
            why = "it is stopping" if entry.wanted.stopping else self.get(name)["reason"]
            raise Conflict(
                f"server group {name!r} cannot {method.replace('_', ' ')} now: {why};\n"
                f"`rayps servers show {name}` shows the status of the group",
                status=409,
            )

        def ask() -> None:
            handle.call(method, *args).result(timeout=_ANSWER_SECONDS)
            entry.view.changes += 1
            entry.view.facts = handle.call("facts").result(timeout=_ANSWER_SECONDS)
            entry.wanted = replace(entry.wanted, servers=entry.view.facts["wanted"], most=_read_most(entry.view.facts))
            entry.wanted.write(self._folder / name)

        try:
            await asyncio.get_running_loop().run_in_executor(entry.threads, ask)
        except TimeoutError as error:
            raise Conflict(
                f"server group {name!r} did not {method.replace('_', ' ')} yet: its manager has not answered within "
                f"{_ANSWER_SECONDS:g} s\n`rayps servers show {name}` shows the group's state; when the manager "
                "answers, repeat the request if it had no effect",
                status=409,
            ) from error
        except (ActorDied, ClusterError) as error:
            raise Conflict(
                f"server group {name!r} cannot {method.replace('_', ' ')} now: {first_line(error)}\n"
                "the group's manager is being restarted; repeat the request in some seconds",
                status=409,
            ) from error

    def _find_entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise NotFound(f"there is no server group {name[:100]!r}: {self._list_known()}", status=404)
        return self._entries[name]

    def _list_known(self) -> str:
        if not self.names:
            return "there is none yet; start one with `rayps servers start NAME --servers 3 --replicas 1`"
        return f"give one of {', '.join(self.names)}, or start another with `rayps servers start`"


def _check_size(servers: int, replicas: int) -> None:
    if not 1 <= servers <= MOST_SERVERS:
        raise ConfigError(f"servers is {servers}: give a number from 1 to {MOST_SERVERS}", field="servers")
    if not 0 <= replicas <= MOST_REPLICAS:
        raise ConfigError(f"replicas is {replicas}: give a number from 0 to {MOST_REPLICAS}", field="replicas")
    if servers < replicas + 1:
        raise ConfigError(
            f"servers is {servers} and replicas is {replicas}: a segment's primary and its "
            f"{'backup' if replicas == 1 else 'backups'} need different servers; give at least {replicas + 1} "
            "servers, or fewer --replicas",
            field="servers",
        )


def _check_most(servers: int, most: int | None) -> None:
    if most is not None and not servers <= most <= MOST_SERVERS:
        raise ConfigError(
            f"most is {most} and servers is {servers}: give a number from servers to {MOST_SERVERS}", field="most"
        )


def _read_most(facts: GroupFacts) -> int | None:
    found = facts.get("range")
    return None if found is None else int(found[1])


def _is_settled(facts: GroupFacts) -> bool:
    alive = sum(each.get("state") == "alive" for each in facts.get("servers", []))
    all_ready = all(
        segment.get("state") == "ready" for space in facts.get("spaces", []) for segment in space["segments"]
    )
    return facts.get("status") == "ready" and not facts.get("moves") and alive == facts.get("wanted") and all_ready


def _read(folder: Path) -> list[Wanted]:
    found = []
    for path in sorted(folder.glob("*/wanted.json")):
        data = read_json(path)
        with contextlib.suppress(TypeError):
            if data is not None and data.get("name") == path.parent.name:
                found.append(Wanted(**data))
    return found
