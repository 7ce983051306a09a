"""Actors on Ray. This is the only module that imports ray.

It joins the cluster at a given address, or starts a private one. It never uses an address that Ray guesses from an
earlier run.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import ray_constants, services
from ray._private import worker as worker_module
from ray._private.state import available_resources_per_node as _available_resources_per_node
from ray._private.state import state as _global_state
from ray._private.worker import global_worker
from ray.experimental import internal_kv
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from rayps_client.errors import ActorDied, ClusterError, NoResources, RaypsError, first_line
from rayps_client.machine.loading import without_collection
from rayps_client.values import JsonObject, Keywords

from rayps.cluster.code_folder import JobCode
from rayps.cluster.last_output import exception_of, last_output
from rayps.cluster.local import (
    WORKER_NICENESS,
    ActorHandle,
    Bundle,
    Reservation,
    Surroundings,
    not_free,
    not_free_there,
    refuse_if_too_large,
    register_provider,
    resolve,
)
from rayps.cluster.notices import PREFIX, Notice, StoredNotice
from rayps.cluster.placement import within
from rayps.cluster.scratch import Scratch, kill_users
from rayps.cluster.termination import REASON, TermHandler, grace_seconds
from rayps.cluster.warm import (
    IDLE_SECONDS,
    MODULES,
    QUIET_SECONDS,
    START_SECONDS,
    WarmFacts,
    WarmState,
    environment_key,
    free_memory,
    memory_share,
    own_memory,
    to_end,
    to_start,
)
from rayps.cluster.which_ray import (
    AUTO,
    RAY_ADDRESS,
    Move,
    Owner,
    busy,
    foreign,
    head,
    move,
    slow_start,
    token_refused,
    too_slow,
)

log = logging.getLogger(__name__)
_Shared = TypeVar("_Shared")
_raylet = ray._raylet  # Ray's token cache and head lookup have no public names

NAMESPACE = "rayps"
_ANSWER_SECONDS = 5.0  # seconds within which a head must accept a connection
_MOVE_SECONDS = 180.0  # seconds to wait while another thread starts, joins or leaves a Ray
_PING_SECONDS = 20.0  # seconds within which the owner of a process that was warm must answer
_TAKE_SECONDS = 5.0  # seconds within which a warm process must answer
_NOTICE_SECONDS = 0.5  # seconds between two readings of the cluster's notices
_WARM, _ALIAS = "warm/", "warm-alias/"  # prefixes of keys: of warm processes by place, of actors that took one
_QUIET: JsonObject = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}


class RayReply:
    """The future result of a Ray call."""

    def __init__(self, ref: ray.ObjectRef, actor: str) -> None:
        self.ref = ref
        self._actor = actor

    def done(self) -> bool:
        """Whether the result has arrived."""
        return bool(ray.wait([self.ref], timeout=0)[0])

    def result(self, timeout: float | None = None) -> Any:
        """Wait at most `timeout` seconds (None: without limit) for the result, and return it.

        Raises TimeoutError if the wait is too long, ActorDied if the actor died, or the error that the method raised.
        """
        try:
            return ray.get(self.ref, timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"actor {self._actor} did not answer within {timeout} s") from error
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            if isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed:
                raise ClusterError(f"actor {self._actor} did not start: {exception_of(str(error))}") from error
            reason = cause_of_death(str(error))
            raise ActorDied(f"actor {self._actor} died: {reason}", actor=self._actor, reason=reason) from error
        except ray.exceptions.RayError as error:
            raise ClusterError(f"Ray lost the answer of {self._actor}: {first_line(error)}") from error


def _cause(error: ray.exceptions.RayTaskError) -> Exception:
    cause = error.cause if isinstance(error.cause, Exception) else error
    return (
        cause
        if isinstance(cause, RaypsError)
        else ClusterError(f"{type(cause).__name__}: {cause}", traceback=str(error))
    )


def _must_answer(address: str) -> None:
    # checked before Ray tries to connect, because Ray's own attempt takes two minutes and prints output
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address!r}: {error}\n"
            "give the head's host:port as `ray start --head` printed it, or leave the address out",
            address=address,
        ) from error


def _silence_death_reports() -> None:
    # Ray prints a paragraph on stderr for every process that dies, but rayps reports the death in an event
    worker = getattr(getattr(ray, "_private", None), "worker", None)
    if worker is not None and hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, ignore_prefix: log.debug("%s", data.get("lines"))


def cause_of_death(text: str) -> str:
    """Return, in one line, the process and the cause of death from Ray's report about a dead actor.

    Ray's list of possible causes is left out. If the report has no details, its first line is returned.
    """
    detail = re.search(
        r"Worker exit detail: (.+?)\.?\s*(?:There are some potential|Some common causes|$)", text, re.MULTILINE
    )
    if detail is None:
        return next((line.strip() for line in text.splitlines() if line.strip()), "Ray gives no reason")
    pid = re.search(r"^\s*pid: (\d+)", text, re.MULTILINE)
    return f"process {pid[1]}: {detail[1]}" if pid else detail[1]


class RayHandle:
    """The handle of a running Ray actor."""

    def __init__(self, name: str, actor: ray.actor.ActorHandle) -> None:
        self.name = name
        self.actor = actor

    def call(self, method: str, *args: Any) -> RayReply:
        """Call a method of the actor, at most once: a failed call is never repeated."""
        return RayReply(self.actor.call.remote(method, *args), self.name)


class _Shell:
    """The Ray actor that contains a rayps actor. It imports the actor's class in the actor's process only."""

    def __init__(self, target: str, *args: Any, **kwargs: Any) -> None:
        TermHandler(_announce_own_end, grace_seconds()).install()  # Ray calls an actor's constructor in the main thread
        code = kwargs.get("code")
        if isinstance(code, JobCode):
            os.environ.update(code.variables)  # torch reads some when it is imported
        with without_collection(freeze=True):
            kind = resolve(target)
        self._actor = kind(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the actor's method."""
        return getattr(self._actor, method)(*args, **kwargs)

    def ping(self) -> None:
        """Do nothing: the answer shows that the process lives."""


class WarmProcess:
    """The Ray actor of a warm process (see `rayps.cluster.warm`). A job takes it, and it then contains a rayps actor.

    It registers itself and its memory in bytes when its imports are done, and ends itself after `idle` seconds if no
    job takes it. Once taken, it ends when the actor that took it has died, or has not used it after `START_SECONDS`.
    """

    def __init__(self, name: str, modules: Sequence[str], idle: float) -> None:
        with without_collection(freeze=True):
            for module in modules:
                importlib.import_module(module)
        self._key = f"{_warm_place(None)}{name}"
        self._lock, self._taken, self._used = threading.Lock(), False, threading.Event()
        self._made = threading.Event()
        self._actor: Any = None
        self._error: Exception | None = None
        TermHandler(_announce_own_end, grace_seconds(), applies=self._used.is_set).install()
        _RayKeyValues().put(self._key, str(own_memory()).encode())
        threading.Thread(target=self._end_if_idle, args=(idle,), daemon=True, name="rayps-warm").start()

    def take(self) -> bool:
        """Return True to the first caller, who has the process then, and False to all others."""
        with self._lock:
            first, self._taken = not self._taken, True
        if first:
            _RayKeyValues().delete(self._key)
        return first

    def start(self, owner: ray.actor.ActorHandle | None, target: str, *args: Any, **kwargs: Any) -> None:
        """Create the rayps actor. `owner` is the actor whose death ends this process; None if there is none.

        Ray replaces references among the arguments by their values, which it does not do inside of a tuple.
        """
        self._used.set()
        if owner is not None:
            threading.Thread(target=self._end_with, args=(owner,), daemon=True, name="rayps-owner").start()
        try:
            self._actor = resolve(target)(*args, **kwargs)
        except Exception as error:
            self._error = error
            raise
        finally:
            self._made.set()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the rayps actor's method."""
        self._made.wait()
        if self._error is not None:
            raise self._error
        return getattr(self._actor, method)(*args, **kwargs)

    def ping(self) -> None:
        """Do nothing: the answer shows that the process lives."""

    def end(self) -> None:
        """End the process unless a job has taken it."""
        if self.take():
            os._exit(0)

    def _end_if_idle(self, idle: float) -> None:
        time.sleep(idle)
        self.end()
        if not self._used.wait(START_SECONDS):  # the actor that took it has died
            os._exit(1)

    def _end_with(self, owner: ray.actor.ActorHandle) -> None:
        while True:
            try:
                ray.get(owner.ping.remote(), timeout=_PING_SECONDS)
            except ray.exceptions.GetTimeoutError:
                continue  # the owner is busy
            except ray.exceptions.RayError:
                os._exit(1)
            time.sleep(_PING_SECONDS / 10)


def _shell(target: str) -> type:
    return type(target.rpartition(":")[2], (_Shell,), {})  # Ray shows the name of the class as the process title


class HeldReservation:
    """Bundles of a placement group that other code has reserved, such as a trial of Ray Tune; it is not released.

    Until `release`, no other reservation of this process gets the same resources of the group.
    """

    def __init__(self, group: PlacementGroup, index: list[int], bundles: Sequence[Bundle]) -> None:
        self.group, self.index = group, index  # for each of our bundles, the index of the group's bundle
        self.bundles = [dict(bundle) for bundle in bundles]

    def hosts(self) -> list[str]:
        """Return the host (its Ray node id) of each bundle."""
        found: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        return [found[i] for i in self.index]

    def release(self) -> None:
        """Let other reservations of this process have the bundles. The code that reserved the group releases it."""
        with _holding:
            _held_now.discard(self)


_holding = threading.Lock()
_held_now: set[HeldReservation] = set()  # of this process


def _surrounding_group() -> PlacementGroup | None:
    """Return the placement group of this process's task or actor, if it captures its children."""
    group = get_current_placement_group()
    captures = group is not None and ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    return group if captures else None


def _free_bundles(group: PlacementGroup) -> list[Bundle]:
    """Return what is free of each bundle of this process's group. Call it under `_holding`."""
    names = {"CPU": "cpu", "GPU": "gpu", "memory": "memory"}
    free = [{names[k]: v for k, v in bundle.items() if k in names} for bundle in group.bundle_specs]
    used = ray.get_runtime_context().get_assigned_resources()  # by this process, in the first bundle
    free[0] = {kind: amount - used.get(kind.upper(), 0.0) for kind, amount in free[0].items()}
    for one in _held_now:
        for at, bundle in zip(one.index, one.bundles, strict=True) if one.group.id == group.id else ():
            for kind, amount in bundle.items():
                free[at][kind] = free[at].get(kind, 0.0) - amount
    return free


def _held(bundles: list[Bundle], avoid: Collection[str]) -> HeldReservation | None:
    """Return our bundles inside the placement group of this process's task or actor, if it captures its children.

    None of them is on a host in `avoid`.

    Raises:
        NoResources: the group is too small.
    """
    group = _surrounding_group()
    if group is None:
        return None
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"] if avoid else {}
    with _holding:
        free = [{} if nodes.get(at) in avoid else has for at, has in enumerate(_free_bundles(group))]
        index = within(free, bundles)
        if index is not None:
            found = HeldReservation(group, index, bundles)
            _held_now.add(found)
            return found
    used = ray.get_runtime_context().get_assigned_resources()
    cpu = bundles[0].get("cpu", 0.0)
    raise NoResources(
        f"the placement group of this task or trial has no room for {len(bundles)} more workers of {cpu:g} CPU beside "
        f"the task itself, which uses {used.get('CPU', 0.0):g}, and its other workers: its bundles are "
        f"{group.bundle_specs}\ngive it one bundle for each worker: "
        f"tune.PlacementGroupFactory([{{'CPU': 1}}] + [{{'CPU': {cpu:g}}}] * {len(bundles)})",
        needed=bundles,
        free=group.bundle_specs,
    )


class RayReservation:
    """A reservation as a Ray placement group. Each bundle is on one host."""

    def __init__(self, group: PlacementGroup, gangs: set[RayReservation]) -> None:
        self.group = group
        self._gangs = gangs
        gangs.add(self)

    def hosts(self) -> list[str]:
        """Return the host (its Ray node id) of each bundle."""
        found: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        return [found[index] for index in sorted(found)]

    def release(self) -> None:
        """Release the bundles."""
        self._gangs.discard(self)
        remove_placement_group(self.group)


_AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class _Environment:
    """The environment variables that Ray and rayps set for one Ray. They are reset when the process leaves that Ray.

    Otherwise the process would send the token of its private Ray to the next Ray that it joins.
    """

    _NAMES = (*_AUTHENTICATION, "RAY_worker_niceness")

    def __init__(self) -> None:
        self._before = self._now()
        self._set: dict[str, str | None] = {}

    def record_changes(self) -> None:
        """Record which variables were set for the Ray. Call it after the Ray was started or joined."""
        self._set = {name: value for name, value in self._now().items() if value != self._before[name]}

    def restore(self) -> None:
        """Reset the variables to their earlier values, except those that other code has changed since."""
        now = self._now()
        for name, value in self._set.items():
            before = self._before[name]
            if now[name] != value:
                continue
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        _read_authentication()

    def _now(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in self._NAMES}


class _Session:
    """A Ray that rayps has joined or started in this process."""

    def __init__(self, owner: Owner, address: str, environment: _Environment, temp: Scratch | None) -> None:
        self.owner, self.address = owner, address
        self.holders = 0  # number of `RayCluster` objects that were opened in this Ray and not closed
        self.gangs: set[RayReservation] = set()  # the reservations of the runs that use this Ray
        self.left = False
        self._environment, self._temp = environment, temp

    def leave(self) -> None:
        """End the Ray if rayps started it, or disconnect from it if rayps joined it."""
        self.left = True
        try:
            if _current() == self.address:
                ray.shutdown()
        finally:
            if self._temp is not None:
                kill_users(self._temp.path)  # what Ray has not ended would write files while the folder is removed
                self._temp.close()
            self._environment.restore()


class _Process:
    """The Ray in which this process is. Only this class changes it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._session: _Session | None = None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside the block, no other thread can start, join or leave a Ray.

        Raises:
            ClusterError: another thread has been starting, joining or leaving a Ray for too long.
        """
        if not self._lock.acquire(timeout=_MOVE_SECONDS):
            raise ClusterError(f"another thread has been starting, joining or leaving a Ray for {_MOVE_SECONDS:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def session(self) -> _Session | None:
        """Return the Ray that rayps joined or started, or None if the process is no longer in that Ray."""
        if self._session is not None and (self._session.left or _current() != self._session.address):
            self._session.left, self._session = True, None
        return self._session

    def owner(self) -> Owner:
        """Return which code brought this process into its Ray."""
        session = self.session()
        return session.owner if session is not None else Owner.FOREIGN if ray.is_initialized() else Owner.NONE

    def record_session(self, owner: Owner, environment: _Environment, temp: Scratch | None = None) -> _Session:
        """Record the Ray that was just started or joined."""
        environment.record_changes()
        self._session = _Session(owner, str(_current()), environment, temp)
        return self._session

    def leave(self) -> None:
        """Leave the Ray that rayps has joined or started."""
        session, self._session = self._session, None
        if session is not None:
            session.leave()


_process = _Process()


def _current() -> str | None:
    """Return the address of the head of the Ray in which this process is, or None if it is in none."""
    if not ray.is_initialized():
        return None
    if ray.util.client.ray.is_connected():
        return "a Ray Client connection"
    return str(ray.get_runtime_context().gcs_address)


def _read_authentication(read: list[dict[str, str | None]] = []) -> None:  # noqa: B006  one per process
    # Ray caches these variables: a changed variable has no effect until Ray reads it again
    now = {name: os.environ.get(name) for name in _AUTHENTICATION}
    if read != [now]:  # only after a change, because threads of Ray may be reading its configuration
        _raylet.Config.initialize("")
        read[:] = [now]
    _raylet.AuthenticationTokenLoader.instance().reset_cache()


def _identity(address: str) -> str:
    """Return the id of the cluster at an address; fail sooner than Ray would (20 s), and with the reason.

    Raises:
        ClusterError: the cluster refuses the token, or no head of a Ray answers at the address.
    """
    _must_answer(address)
    try:
        return str(_raylet.GcsClient(address=services.canonicalize_bootstrap_address(address)).cluster_id.hex())
    except ray.exceptions.AuthenticationError as error:
        sent = _raylet.get_authentication_mode() == _raylet.AuthenticationMode.TOKEN
        raise token_refused(address, sent=sent) from error
    except ray.exceptions.RayError as error:
        raise _no_cluster(address, error) from error


def _same(address: str, current: str) -> bool:
    """Return whether two addresses lead to the same cluster, by its id: a host may have several names."""
    if address == current:
        return True
    try:
        return _identity(address) == _identity(current)
    except ClusterError:
        return False  # `address` does not answer, or refuses the token that the current cluster accepts


def _head(address: str) -> str:
    if address != AUTO:
        return head(address)
    private = _current() if _process.owner() is Owner.STARTED else None
    found = {each for each in services.find_gcs_addresses() if each != private}
    services.find_gcs_addresses.cache_clear()
    return head(
        address,
        inside=None if private is not None else _current(),
        environment=os.environ.get(RAY_ADDRESS),
        last=services.find_bootstrap_address(None),
        found=found,
    )


def _no_cluster(address: str, error: BaseException) -> ClusterError:
    return ClusterError(
        f"no Ray cluster can be joined at {address!r}: {first_line(error)}\n"
        "give the head's host:port as `ray start --head` printed it, or leave the address out",
        address=address,
    )


class RayCluster:
    """A Ray cluster that this process has joined or started. A cluster that it has started ends with `close`.

    If several `RayCluster` objects were opened in one Ray, the process leaves the Ray when the last one is closed.
    """

    def __init__(self, session: _Session | None = None, *, holds: bool = True) -> None:
        self._session = session
        self._gangs: set[RayReservation] = set() if session is None else session.gangs
        self._holds = holds and session is not None
        self._starting: list[ray.ObjectRef] = []  # warm processes that import
        self._warm_ready = 0  # warm processes at the last call of `keep_warm`
        self._warm_taken = -QUIET_SECONDS  # the time at which a warm process was last seen to be gone
        if self._holds and session is not None:
            session.holders += 1

    @classmethod
    def join(cls, address: str, namespace: str = NAMESPACE) -> RayCluster:
        """Join the cluster at `host:port`, or the one that "auto" refers to (see `which_ray.head`).

        A process can be in one Ray. If the process is in this cluster already, nothing is done. If it is in another Ray
        that rayps started or joined, the process leaves that Ray first; a Ray that rayps started then ends.

        Raises:
            ClusterError: nothing answers at the address, the token is refused, or the process is in another Ray that
                rayps does not own or that a run uses.
        """
        with _process.exclusive():
            wanted, owner, current = _head(address), _process.owner(), _current()
            if owner is not Owner.FOREIGN:
                _must_answer(wanted)  # before the process leaves its current Ray
            same = current is not None and _same(wanted, current)
            session = _process.session()
            what = move(owner, named=True, same=same, busy=session is not None and bool(session.gangs))
            if what is Move.REFUSE_FOREIGN:
                raise foreign(address, str(current))
            if what is Move.REFUSE_BUSY:
                raise busy(address, str(current))
            if what is Move.STAY:
                return cls(session)
            _process.leave()
            return cls(_joined(wanted, namespace, auto=address == AUTO))

    @classmethod
    def local(cls, cpus: int, gpus: int | None = None) -> RayCluster:
        """Start a private Ray on this machine with `cpus` logical CPUs. `close` ends this Ray and removes its files.

        It listens on the loopback address only, unless RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 1 in the environment. If
        the process is in a Ray already, that Ray is used.

        Raises:
            ClusterError: Ray took too long to start, also when it was started once more.
        """
        with _process.exclusive():
            if move(_process.owner(), named=False, same=False, busy=False) is Move.STAY:
                return cls(_process.session())
            return cls(_started(cpus, gpus))

    @property
    def address(self) -> str:
        """The address "host:port" of the head of this Ray."""
        self._check()
        return str(_current())

    def _check(self) -> None:
        if self._session is not None and self._session.left:
            raise ClusterError(
                f"this process has left the Ray at {self._session.address}: open the cluster again",
                address=self._session.address,
            )

    def spawn(
        self,
        target: str,
        *args: Any,
        name: str | None = None,
        cpus: float = 0.0,
        gpus: float = 0.0,
        detached: bool = False,
        here: bool = False,
        avoid: Sequence[str] = (),
        gang: Reservation | None = None,
        index: int | None = None,
        restarts: int = 0,
        warm: bool = False,
        node: str | None = None,
        **kwargs: Any,
    ) -> RayHandle:
        """Start an actor in its own process. See `Actors.spawn`."""
        self._check()
        if warm and not gpus and not restarts and node is None and self.node not in avoid:
            taken = self._take_warm(name, detached, _host_of(gang, index))
            if taken is not None:
                owner = None if detached else ray.get_runtime_context().current_actor
                taken.start.remote(owner, target, *args, **kwargs)
                return RayHandle(name or target, taken)
        options: Keywords = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_concurrency": 16,
            "max_restarts": restarts,
            "max_task_retries": 0,
            "namespace": NAMESPACE,
        }
        if name is not None:
            options["name"] = name
        if detached:
            options["lifetime"] = "detached"
        if isinstance(gang, HeldReservation):
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                gang.group, placement_group_bundle_index=-1 if index is None else gang.index[index]
            )
        elif isinstance(gang, RayReservation):
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                gang.group, placement_group_bundle_index=-1 if index is None else index
            )
        elif avoid and node is None and (not here or self.node in avoid):
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(avoid)})"}
        elif here or node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                node or ray.get_runtime_context().get_node_id(), soft=False
            )
        try:
            actor = ray.remote(_shell(target)).options(**options).remote(target, *args, **kwargs)
        except ValueError as error:
            raise ClusterError(f"cannot start actor {name!r}: {first_line(error)}") from error
        return RayHandle(name or target, actor)

    def find(self, name: str) -> RayHandle | None:
        """Return the running actor of this name, or None if there is none."""
        self._check()
        for known in (name, _alias(name)):
            if known is not None and (actor := _named(known)) is not None and not _has_died(actor):
                return RayHandle(name, actor)
        return None

    def keep_warm(self, wanted: int) -> WarmState:
        """Start or end a process that waits for a job, as `warm.to_start` and `warm.to_end` decide; return their state.

        Processes that wait longer than `warm.IDLE_SECONDS` end. If this method is called no more, all of them end.
        """
        self._check()
        ready = _living_warm(_warm_place(None))
        self._starting = [ref for ref in self._starting if not ray.wait([ref], timeout=0)[0]]
        if len(ready) < self._warm_ready:
            self._warm_taken = time.monotonic()
        self._warm_ready = len(ready)
        facts = WarmFacts(
            wanted,
            len(ready),
            len(self._starting),
            time.monotonic() - self._warm_taken,
            free_memory(),
            memory_share(max(ready.values(), default=0)),
        )
        for name in sorted(ready)[: to_end(facts)]:
            if (actor := _named(name)) is not None:
                actor.end.remote()
        for _ in range(to_start(facts)):
            name = f"warm-{secrets.token_hex(8)}"
            where = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            kind = ray.remote(WarmProcess)
            options: Keywords = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
            actor = kind.options(scheduling_strategy=where, max_concurrency=16, max_restarts=0, **options).remote(
                name, MODULES, IDLE_SECONDS
            )
            self._starting.append(actor.ping.remote())
        return WarmState(wanted, len(ready), len(self._starting), sum(ready.values()))

    def _take_warm(self, name: str | None, detached: bool, host: str | None) -> ray.actor.ActorHandle | None:
        """Return a warm process of a host, which this call has taken, or None if there is none.

        The process has the environment that a new process of this program would have.
        """
        if not detached and ray.get_runtime_context().get_actor_id() is None:
            return None  # this process is no actor: the taken process could not see that it has ended
        place = _warm_place(host)
        for found in _warm_at(place):
            actor = _named(found)
            try:
                if actor is not None and not ray.get(actor.take.remote(), timeout=_TAKE_SECONDS):
                    continue
            except ray.exceptions.RayError:
                ray.kill(actor, no_restart=True)  # it is dead, or silent: a process that is taken later would stay
                actor = None
            if actor is None:
                _RayKeyValues().delete(f"{place}{found}")  # it died without a word
                continue
            if name is not None:
                _RayKeyValues().put(f"{_ALIAS}{name}", found.encode())
            return actor
        return None

    def share(self, value: _Shared) -> _Shared:
        """Store a value in Ray's object store; return a reference to pass to calls instead of the value."""
        self._check()
        reference: _Shared = ray.put(value)
        return reference

    def free(self) -> Bundle:
        """Return the cluster's free resources: {"cpu": ..., "gpu": ...}."""
        self._check()
        return _bundle(ray.available_resources())

    def total(self) -> Bundle:
        """Return all resources of the cluster."""
        self._check()
        return _bundle(ray.cluster_resources())

    def hosts(self, free: bool = True) -> dict[str, Bundle]:
        """Return the resources of each running host: the free ones, or all if `free` is False.

        They include the bytes of memory.
        """
        self._check()
        alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        if free:
            now = _available_resources_per_node()
            alive = {name: now.get(name, {}) for name in alive}
        return {name: _bundle(has) | {"memory": has.get("memory", 0.0)} for name, has in alive.items()}

    def last_output(self, handle: ActorHandle) -> str:
        """Return the last lines of an actor's process from Ray's files; "" if they are on another host, or removed."""
        self._check()
        assert isinstance(handle, RayHandle)
        node = worker_module._global_node
        try:
            pid = _record_of(handle.actor).get("Pid")
        except ray.exceptions.RayError as error:
            log.debug("the process of actor %s is not known: %s", handle.name, error)
            return ""
        return last_output(Path(node.get_logs_dir_path()), pid) if isinstance(pid, int) and node is not None else ""

    def held(self) -> list[Bundle] | None:
        """Return the free bundles of the placement group of this process's task or actor, if it captures its children.

        None: reservations are anywhere in the cluster.
        """
        self._check()
        group = _surrounding_group()
        if group is None:
            return None
        with _holding:
            return _free_bundles(group)

    def host_names(self) -> dict[str, tuple[str, ...]]:
        """Return the name and the IP address of each running host, by its Ray node id."""
        self._check()
        alive = [node for node in ray.nodes() if node["Alive"]]
        return {node["NodeID"]: (node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in alive}

    def reserve(
        self, bundles: list[Bundle], timeout: float, avoid: Collection[str] = ()
    ) -> RayReservation | HeldReservation | None:
        """Reserve all bundles or none; return None if no bundle needs anything. `avoid`: Ray node ids.

        In a task or actor whose placement group captures its children, such as a trial of Ray Tune, the bundles are
        those of that group.

        Raises NoResources if the cluster is too small, or too few resources are free within `timeout` seconds.
        """
        held = _held(bundles, avoid)
        if held is not None:
            return held
        refuse_if_too_large(bundles, self.total())
        wanted = [_ray_bundle(bundle) for bundle in bundles]
        if not any(wanted):
            return None  # there is nothing to reserve, and Ray accepts no empty bundle
        others = [{"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}] * len(wanted) if avoid else None
        group = placement_group(wanted, strategy="PACK", bundle_label_selector=others)
        if not group.wait(timeout):
            remove_placement_group(group)
            raise not_free(bundles, self.free(), timeout, avoid)
        return RayReservation(group, self._gangs)

    def reserve_named(self, name: str, bundle: Bundle, node: str, timeout: float, *, detached: bool) -> RayReservation:
        """Reserve one bundle on a host, under a name. See `Cluster.reserve_named`."""
        self._check()
        found = placement_group(
            [_ray_bundle(bundle)],
            name=f"{NAMESPACE}/{name}",
            lifetime="detached" if detached else None,
            bundle_label_selector=[{"ray.io/node-id": node}],
        )
        if not found.wait(timeout):
            remove_placement_group(found)
            raise not_free_there(bundle, node, timeout)
        return RayReservation(found, set())  # not in `_gangs`, which end with this process's session

    def reservation(self, name: str) -> RayReservation | None:
        """Return the reservation of this name, or None if it was released. See `Cluster.reservation`."""
        self._check()
        try:
            return RayReservation(get_placement_group(f"{NAMESPACE}/{name}"), set())
        except ValueError:
            return None

    @property
    def node(self) -> str:
        """The Ray node id of this process's host."""
        self._check()
        return str(ray.get_runtime_context().get_node_id())

    def notices(self) -> tuple[Notice, ...]:
        """Return Ray's draining nodes, and the notices that a process of the cluster has announced. Return at once.

        They are read in a thread, because Ray's gcs may be restarting; the first call may return none.
        """
        self._check()
        return _notice_board.notices()

    def announce(self, notice: Notice) -> None:
        """Add a notice for every process of the cluster; it replaces an earlier one about the same host or process."""
        self._check()
        _RayKeyValues().put(notice.key, StoredNotice.of(notice, time.time()).pack())

    def withdraw(self, notice: Notice) -> None:
        """Remove an announced notice about the host or process of `notice`, if there is one."""
        self._check()
        _RayKeyValues().delete(notice.key)

    def kill(self, handle: ActorHandle) -> None:
        """Kill an actor's process; Ray does not restart it."""
        assert isinstance(handle, RayHandle)
        if self._session is not None and self._session.left:
            return  # the private Ray has ended, and its actors with it
        ray.kill(handle.actor, no_restart=True)

    def close(self) -> None:
        """Leave the Ray if no other `RayCluster` uses it; end the Ray then if rayps started it."""
        session = self._session
        if session is None or not self._holds:
            return
        with _process.exclusive():
            self._holds = False
            session.holders -= 1
            if session.holders == 0 and _process.session() is session:
                _process.leave()


def _started(cpus: int, gpus: int | None) -> _Session:
    """Start a private Ray. If it takes Ray too long, try once more.

    Raises:
        ClusterError: it took too long both times.
    """
    began = time.monotonic()
    for last in (False, True):
        try:
            return _start(cpus, gpus)
        except Exception as error:
            if not too_slow(error):
                raise
            if last:
                seconds, load = time.monotonic() - began, os.getloadavg()[0]
                raise slow_start(seconds, load, os.cpu_count() or 1, first_line(error)) from error
            log.warning("Ray took too long to start (%s): starting it once more", first_line(error))
    raise AssertionError("the last try returns or raises")


def _start(cpus: int, gpus: int | None) -> _Session:
    temp, environment = Scratch(), _Environment()
    _private_token()
    os.environ.setdefault("RAY_worker_niceness", WORKER_NICENESS)
    _read_authentication()
    _silence_death_reports()
    try:
        below = str(temp.path / "r")  # Ray's folder is readable by all users, but the folder above it is private
        with _loopback():
            ray.init(address="local", num_cpus=cpus, num_gpus=gpus, namespace=NAMESPACE, _temp_dir=below, **_QUIET)
    except BaseException:
        ray.shutdown()
        kill_users(temp.path)  # a Ray that did not start in time has processes that nobody else ends
        temp.close()
        environment.record_changes()
        environment.restore()
        raise
    return _process.record_session(Owner.STARTED, environment, temp)


@contextmanager
def _loopback() -> Iterator[None]:
    """Let a Ray that starts inside the block listen on the loopback address only, unless the environment decides.

    With "0", Ray takes 127.0.0.1 as this node's address; Linux reads the variable too. Ray's processes inherit it. In
    this process Ray has read it already.
    """
    name, constants = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants
    if name in os.environ:
        yield
        return
    before, os.environ[name], constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        del os.environ[name]


def _joined(address: str, namespace: str, *, auto: bool) -> _Session:
    """Join the cluster at `host:port`."""
    environment = _Environment()
    _read_authentication()
    if auto and "RAY_AUTH_MODE" not in os.environ:  # as ray.init(address="auto") does
        # for "auto" only: this call loads the token of ~/.ray, and the process then refuses requests without it
        if _raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
            os.environ["RAY_AUTH_MODE"] = "token"
        _read_authentication()
    _silence_death_reports()
    try:
        _identity(address)
        ray.init(address=address, namespace=namespace, **_QUIET)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        environment.record_changes()
        environment.restore()
        raise _no_cluster(address, error) from error
    except BaseException:
        environment.record_changes()
        environment.restore()
        raise
    return _process.record_session(Owner.JOINED, environment)


def pack_objects(refs: Sequence[ray.ObjectRef]) -> bytes:
    """Pickle references to objects, with their owner, so that any process of the cluster can use them.

    The objects stay in the object store as long as the process that owns them lives.
    """
    return bytes(ray.cloudpickle.dumps(list(refs)))


def fetch_objects(packed: bytes, timeout: float) -> Iterator[Any]:
    """Yield the objects of `pack_objects` one by one. Each may take `timeout` seconds to arrive.

    Raises:
        ClusterError: this process is not connected to Ray, or an object is lost or late.
    """
    if not ray.is_initialized():
        raise ClusterError("this process is not connected to the Ray that has the blocks of the Ray Data dataset")
    try:
        for ref in ray.cloudpickle.loads(packed):
            yield ray.get(ref, timeout=timeout)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise ClusterError(
            f"a block of the Ray Data dataset did not arrive: {first_line(error)}\nthe process that called "
            "rayps.data.ray must live until the run has ended"
        ) from error


def is_task_or_actor() -> bool:
    """Return whether this process is a worker process of Ray, not a driver."""
    return bool(ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def _bundle(resources: dict[str, float]) -> Bundle:
    return {"cpu": resources.get("CPU", 0.0), "gpu": resources.get("GPU", 0.0)}


def _ray_bundle(bundle: Bundle) -> dict[str, float]:
    names = {"cpu": "CPU", "gpu": "GPU", "memory": "memory"}
    return {names[key]: amount for key, amount in bundle.items() if amount}


def _private_token() -> None:
    # if the environment, which only this user can read, has a token, a local ray.init() turns token authentication on;
    # otherwise it would write a token file into the home directory that all users can read
    if "RAY_AUTH_MODE" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)


def _host_of(gang: Reservation | None, index: int | None) -> str | None:
    """Return the Ray node id of a reservation's bundle, or None without a reservation."""
    return None if gang is None or index is None else gang.hosts()[index]


def _warm_place(host: str | None) -> str:
    """Return the prefix of the keys of a host's warm processes with this process's environment. None is this host."""
    context = ray.get_runtime_context()
    paths = global_worker.core_worker.get_job_config().py_driver_sys_path
    return f"{_WARM}{host or context.get_node_id()}/{environment_key(context.get_runtime_env_string(), paths)}/"


def _warm_at(place: str) -> list[str]:
    """Return the names of the registered warm processes of a place: some of them may have died."""
    keys = internal_kv._internal_kv_list(place.encode(), namespace=NAMESPACE)
    return sorted(key.decode().removeprefix(place) for key in keys)


def _living_warm(place: str) -> dict[str, int]:
    """Return the bytes of memory of each living warm process of a place; remove the keys of those that died."""
    living = {}
    for name in _warm_at(place):
        if _named(name) is None:
            _RayKeyValues().delete(f"{place}{name}")
        else:
            living[name] = int(_RayKeyValues().get(f"{place}{name}") or 0)
    return living


def _named(name: str) -> ray.actor.ActorHandle | None:
    """Return the actor of Ray with this name, or None: it may have died if this process holds a handle of it."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _has_died(actor: ray.actor.ActorHandle) -> bool:
    """Return whether an actor has died: in a process that holds a handle, Ray still finds it by its name."""
    return bool(_record_of(actor).get("State") == "DEAD")


def _record_of(actor: ray.actor.ActorHandle) -> dict[str, object]:
    """Return what Ray's control service knows of an actor: "State", "Pid", and others; {} if it knows none."""
    found: dict[str, object] = _global_state.actor_table(actor._actor_id.hex())
    return found


def _alias(name: str) -> str | None:
    """Return the name of the warm process that became the actor `name`, or None if none did."""
    found = _RayKeyValues().get(f"{_ALIAS}{name}")
    return None if found is None else found.decode()


class _RayKeyValues:
    def put(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=NAMESPACE)

    def get(self, key: str) -> bytes | None:
        value: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=NAMESPACE)
        return value

    def delete(self, key: str) -> None:
        internal_kv._internal_kv_del(key.encode(), namespace=NAMESPACE)


class _NoticeBoard:
    """The notices of the Ray in which this process is, as last read. A thread reads them, while somebody asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading = False
        self._read_at = -_NOTICE_SECONDS  # the `time.monotonic` of the last reading
        self._found: list[StoredNotice] = []
        self._at: str | None = None  # the address of the Ray from which the notices were read
        self._lists_draining = True

    def notices(self) -> tuple[Notice, ...]:
        """Return the notices of the last reading; if that is old, start another one."""
        with self._lock:
            due = not self._reading and time.monotonic() - self._read_at >= _NOTICE_SECONDS
            self._reading = self._reading or due
            found = self._found if self._at == _current() else []
        if due:
            threading.Thread(target=self._read, daemon=True, name="rayps-notices").start()
        now = time.time()
        return tuple(one.at(now) for one in found)

    def _read(self) -> None:
        found, at = None, None
        try:
            at = _current()
            found = [*self._draining(), *_announced()]
        except Exception as error:  # Ray is ending, or its gcs is restarting: the notices of the last reading stay
            log.debug("the cluster's notices could not be read: %s", error)
        with self._lock:
            self._reading, self._read_at = False, time.monotonic()
            if found is not None:
                self._found, self._at = found, at

    def _draining(self) -> list[StoredNotice]:
        """Return Ray's draining nodes. Ray has no public call for them, and its next version may lack this one."""
        if not self._lists_draining:
            return []
        try:
            deadlines: dict[str, int] = _global_state.get_draining_nodes()  # ms since the epoch, 0: no deadline
        except (AttributeError, TypeError) as error:
            self._lists_draining = False
            log.warning(
                "this Ray (%s) does not list its draining nodes (%s): rayps learns of a preemption by SIGTERM and by "
                "POST /api/v1/notices only",
                ray.__version__,
                error,
            )
            return []
        hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()} if deadlines else {}
        return [
            StoredNotice(Notice(node, hosts.get(node, ""), None, "Ray drains the node"), at / 1000 if at else None)
            for node, at in deadlines.items()
        ]


_notice_board = _NoticeBoard()


def _announced() -> list[StoredNotice]:
    """Return the notices that were announced. Those that are over, or whose node has ended, are removed."""
    keys = internal_kv._internal_kv_list(PREFIX.encode(), namespace=NAMESPACE)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if keys else set()
    found = []
    for key in sorted(keys):
        data = _RayKeyValues().get(key.decode())
        if data is None:
            continue
        one = StoredNotice.unpack(data)
        if one.over(time.time()) or (one.notice.node and one.notice.node not in alive):
            _RayKeyValues().delete(key.decode())
        else:
            found.append(one)
    return found


def _announce_own_end(seconds: float) -> None:
    notice = Notice(ray.get_runtime_context().get_node_id(), socket.gethostname(), seconds, REASON, os.getpid())
    _RayKeyValues().put(notice.key, StoredNotice.of(notice, time.time()).pack())


def _inside_ray() -> Surroundings | None:
    if not ray.is_initialized():
        return None
    alone = sum(node["Alive"] for node in ray.nodes()) == 1
    cluster = RayCluster(_process.session(), holds=False)
    return _RayKeyValues(), cluster, "127.0.0.1" if alone else ray.util.get_node_ip_address()


register_provider(_inside_ray)
