"""Call all actors of a benchmark at once: on the cluster, in network namespaces, or in plain processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayps.bench.netns import NamespaceActor
    from rayps.bench.plain_processes import PlainActor
    from rayps.cluster.local import ActorHandle


def call_all(
    actors: Sequence[ActorHandle] | Sequence[NamespaceActor] | Sequence[PlainActor],
    method: str,
    *args: Any,
    timeout: float,
) -> list[Any]:
    """Call a method of all actors at once; return their results in the actors' order. `timeout` is in seconds."""
    replies = [actor.call(method, *args) for actor in actors]
    return [reply.result(timeout) for reply in replies]
