"""Actors on Ray: the only module that imports ray, and the one place for Ray's quirks.

Always a named address or a private local cluster, never Ray's own guess from an earlier run.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from typing import Any

import ray
from ray._private.state import available_resources_per_node as _available_resources_per_node
from ray.experimental import internal_kv
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayps.cluster import (
    WORKER_NICENESS,
    Bundle,
    Gang,
    Handle,
    Surroundings,
    not_free,
    provide,
    refuse_if_too_large,
    resolve,
)
from rayps.errors import ActorDied, ClusterError, RaypsError
from rayps.scratch import Scratch

log = logging.getLogger(__name__)

NAMESPACE = "rayps"
_ANSWER_SECONDS = 5.0  # for a head to take a connection
_QUIET: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}


class RayReply:
    """An answer that Ray will bring."""

    def __init__(self, ref: Any, actor: str) -> None:
        self.ref = ref
        self._actor = actor

    def done(self) -> bool:
        """Whether the answer is here."""
        return bool(ray.wait([self.ref], timeout=0)[0])

    def result(self, timeout: float | None = None) -> Any:
        """The answer. Raises TimeoutError, ActorDied, or what the method raised."""
        try:
            return ray.get(self.ref, timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"actor {self._actor} did not answer within {timeout} s") from error
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            reason = _first_line(error)
            raise ActorDied(f"actor {self._actor} died: {reason}", actor=self._actor, reason=reason) from error
        except ray.exceptions.RayError as error:
            raise ClusterError(f"Ray lost the answer of {self._actor}: {_first_line(error)}") from error


def _cause(error: ray.exceptions.RayTaskError) -> Exception:
    cause = error.cause if isinstance(error.cause, Exception) else error
    return (
        cause
        if isinstance(cause, RaypsError)
        else ClusterError(f"{type(cause).__name__}: {cause}", traceback=str(error))
    )


def _must_answer(address: str) -> None:
    # Ray itself would try for two minutes, and say so in lines of its own
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster answers at {address!r}: {error}\n"
            "give the head's host:port as `ray start --head` printed it, or leave the address out",
            address=address,
        ) from error


def _hush() -> None:
    # Ray prints a paragraph on stderr for every process that dies; the run's own event says it in one line
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, ignore_prefix: log.debug("%s", data.get("lines"))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class RayHandle:
    """A running Ray actor."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor

    def call(self, method: str, *args: Any, **kwargs: Any) -> RayReply:
        """Call a method; at most once, never retried."""
        return RayReply(self.actor.call.remote(method, *args, **kwargs), self.name)


class _Shell:
    """An actor's process: the class at a dotted name is imported here, and not by who starts the actor."""

    def __init__(self, target: str, *args: Any, **kwargs: Any) -> None:
        self._actor = resolve(target)(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the actor's method gives."""
        return getattr(self._actor, method)(*args, **kwargs)


def _shell(target: str) -> type:
    return type(target.rpartition(":")[2], (_Shell,), {})  # Ray shows the class's name as the process's title


class RayGang:
    """A placement group, whose bundles are inside one host each."""

    def __init__(self, group: PlacementGroup) -> None:
        self.group = group

    def hosts(self) -> list[str]:
        """See Gang."""
        found: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        return [found[index] for index in sorted(found)]

    def release(self) -> None:
        """Give the bundles back."""
        remove_placement_group(self.group)


class RayCluster:
    """A Ray cluster that this process has joined, or started and will end."""

    def __init__(self, temp: Scratch | None = None, *, joined_here: bool = True) -> None:
        self._temp = temp
        self._joined_here = joined_here

    @classmethod
    def join(cls, address: str, namespace: str = NAMESPACE) -> RayCluster:
        """Join the cluster at `host:port` (or be in it already, inside one of its actors).

        Raises:
            ClusterError: nothing answers there, or it refused.
        """
        if ray.is_initialized():
            return cls(joined_here=False)
        _hush()
        _must_answer(address)
        try:
            ray.init(address=address, namespace=namespace, **_QUIET)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise ClusterError(
                f"no Ray cluster can be joined at {address!r}: {_first_line(error)}\n"
                "give the head's host:port as `ray start --head` printed it, or leave the address out",
                address=address,
            ) from error
        return cls()

    @classmethod
    def local(cls, cpus: int, gpus: int | None = None) -> RayCluster:
        """Start a private Ray on this machine with so many logical CPUs; `close()` ends it without a trace."""
        if ray.is_initialized():
            return cls(joined_here=False)
        temp = Scratch()
        _private_token()
        os.environ.setdefault("RAY_worker_niceness", WORKER_NICENESS)
        _hush()
        try:
            below = str(temp.path / "r")  # Ray opens its folder to everyone; the one above is ours alone
            ray.init(
                address="local", num_cpus=cpus, num_gpus=gpus, namespace=NAMESPACE, _temp_dir=below, **_QUIET
            )
        except BaseException:
            temp.close()
            raise
        return cls(temp)

    def spawn(
        self,
        target: str,
        *args: Any,
        name: str | None = None,
        cpus: float = 0.0,
        gpus: float = 0.0,
        detached: bool = False,
        here: bool = False,
        gang: Gang | None = None,
        index: int | None = None,
        restarts: int = 0,
        **kwargs: Any,
    ) -> RayHandle:
        """See Cluster."""
        options: dict[str, Any] = {
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
        if isinstance(gang, RayGang):
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                gang.group, placement_group_bundle_index=-1 if index is None else index
            )
        elif here:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
        try:
            actor = ray.remote(_shell(target)).options(**options).remote(target, *args, **kwargs)
        except ValueError as error:
            raise ClusterError(f"cannot start actor {name!r}: {_first_line(error)}") from error
        return RayHandle(name or target, actor)

    def find(self, name: str) -> RayHandle | None:
        """See Cluster."""
        try:
            return RayHandle(name, ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            return None

    def share(self, value: Any) -> Any:
        """See Cluster."""
        return ray.put(value)

    def free(self) -> Bundle:
        """See Cluster."""
        return _bundle(ray.available_resources())

    def total(self) -> Bundle:
        """See Cluster."""
        return _bundle(ray.cluster_resources())

    def hosts(self, free: bool = True) -> dict[str, Bundle]:
        """See Cluster."""
        alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        if free:
            now = _available_resources_per_node()
            alive = {name: now.get(name, {}) for name in alive}
        return {name: _bundle(has) | {"memory": has.get("memory", 0.0)} for name, has in alive.items()}

    def reserve(self, bundles: list[Bundle], timeout: float) -> RayGang | None:
        """See Cluster."""
        refuse_if_too_large(bundles, self.total())
        wanted = [_ray_bundle(bundle) for bundle in bundles]
        if not any(wanted):
            return None  # nothing to hold, and Ray takes no empty bundle
        group = placement_group(wanted, strategy="PACK")
        if not group.wait(timeout):
            remove_placement_group(group)
            raise not_free(bundles, self.free(), timeout)
        return RayGang(group)

    def kill(self, handle: Handle) -> None:
        """See Cluster."""
        assert isinstance(handle, RayHandle)
        ray.kill(handle.actor, no_restart=True)

    def close(self) -> None:
        """See Cluster."""
        if self._joined_here:
            ray.shutdown()
        if self._temp is not None:
            self._temp.close()


def _bundle(resources: dict[str, float]) -> Bundle:
    return {"cpu": resources.get("CPU", 0.0), "gpu": resources.get("GPU", 0.0)}


def _ray_bundle(bundle: Bundle) -> dict[str, float]:
    names = {"cpu": "CPU", "gpu": "GPU", "memory": "memory"}
    return {names[key]: amount for key, amount in bundle.items() if amount}


def _private_token() -> None:
    # with a token in the environment, which only we can read, a local ray.init() turns token authentication
    # on with it; without one it would write a world-readable token file into the home directory
    if "RAY_AUTH_MODE" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)


class _RayKeyValues:
    def put(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=NAMESPACE)

    def get(self, key: str) -> bytes | None:
        value: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=NAMESPACE)
        return value

    def delete(self, key: str) -> None:
        internal_kv._internal_kv_del(key.encode(), namespace=NAMESPACE)


def _inside_ray() -> Surroundings | None:
    if not ray.is_initialized():
        return None
    alone = sum(node["Alive"] for node in ray.nodes()) == 1
    return _RayKeyValues(), RayCluster(joined_here=False), "127.0.0.1" if alone else ray.util.get_node_ip_address()


provide(_inside_ray)
