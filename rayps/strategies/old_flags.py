"""Support strategies written for rayps 0.1, which set flags (`shards = 2`, `apart = True`) instead of a `topology`.

For one release, such a class gets the `topology`, `loop` and `rows` that its flags mean, with a warning when the class
is defined. The next release removes the flags and this file.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from rayps.core.strategy_families import FEDERATED_ROUNDS, LOCAL_UPDATES, Fixed, Reshuffled
from rayps.core.topology import Peers, PerPush, PerRound, Servers, SharedVector, Topology, consistency_of

_TOPOLOGY = {
    "shards": "topology = Servers(count=...)",
    "staleness": "topology = Servers(consistency=BSP() | SSP(s) | ASP())",
    "replay_mb": "topology = Servers(replay_mb=...)",
    "replicas": "topology = Servers(replicas=...)",
    "compression": "topology = Peers(compression=...) or Servers(compression=...)",
    "replica": "topology = Peers(replica=...) or Servers(replica=...)",
    "bucket_mb": "topology = Peers(bucket_mb=...)",
    "gathers": "topology = Servers(update=PerRound() | PerPush())",
    "means": "topology = Servers(update=PerRound(means=True))",
    "borrows": "topology = Servers(update=PerRound(borrows=True))",
    "spans": "topology = Servers(update=PerPush(spans=True))",
    "adagrad": "topology = Servers(adagrad=...)",
    "steps_locally": "topology = Servers(own_copies=True)",
    "in_place": "topology = SharedVector()",
}
_OTHERS = {
    "apart": f'loop = "{LOCAL_UPDATES}"',
    "federated": f'loop = "{FEDERATED_ROUNDS}", or derive from FedAvg',
    "keeps_rows": "rows = Fixed()",
}


def convert_flags(cls: type[Any]) -> None:
    """Give a strategy class that sets old flags the equivalent `topology`, `loop` and `rows`, and warn.

    An attribute that is a dataclass field of a base class is an option of that strategy, not an old flag. In a class
    that declares a topology, no attribute is an old flag.
    """
    fields = getattr(cls, "__dataclass_fields__", {})
    own = [name for name in (*_TOPOLOGY, *_OTHERS) if name in cls.__dict__ and name not in fields]
    if not own or "topology" in cls.__dict__:
        return
    ways = "; ".join(f"{name}: {(_TOPOLOGY | _OTHERS)[name]}" for name in own)
    warnings.warn(
        f"strategy {cls.__name__} declares {', '.join(own)}, a form of rayps 0.1 that the next release removes; "
        f"declare instead {ways}",
        DeprecationWarning,
        stacklevel=4,
    )
    if any(name in _TOPOLOGY for name in own):
        inherited: Any = super(cls, cls)

        def topology(self: Any) -> Topology:
            before: Any = inherited.topology  # of the base class: a property, or a value
            return _topology(self, before.__get__(self) if isinstance(before, property) else before)

        cls.topology = property(topology)
    if "loop" not in cls.__dict__ and (cls.__dict__.get("apart") or cls.__dict__.get("federated")):
        cls.loop = LOCAL_UPDATES if cls.__dict__.get("apart") else FEDERATED_ROUNDS
    if "rows" not in cls.__dict__ and "keeps_rows" in cls.__dict__:
        cls.rows = property(lambda self: Fixed() if self.keeps_rows else Reshuffled())


def _topology(given: Any, before: Topology) -> Topology:
    """Return the topology that a strategy's flags mean. Values without a flag come from the topology `before`."""
    if getattr(given, "in_place", False):
        return SharedVector()
    servers = before if isinstance(before, Servers) else Servers(count=0, update=PerRound(borrows=False))
    shards = getattr(given, "shards", servers.count)
    shared = {name: getattr(given, name) for name in ("replica", "compression", "bucket_mb") if hasattr(given, name)}
    if not shards:
        return replace(before, **shared) if isinstance(before, Peers) else Peers(**shared)
    shared.pop("bucket_mb", None)
    update = servers.update
    borrows = getattr(given, "borrows", update.borrows)
    if getattr(given, "gathers", update.gathers):
        listens = _listens(given) if not isinstance(before, Servers) else update.listens
        new: PerRound | PerPush = PerRound(getattr(given, "means", update.means), borrows, listens)
    else:
        new = PerPush(borrows, getattr(given, "spans", update.spans))
    return replace(
        servers,
        count=shards,
        consistency=consistency_of(getattr(given, "staleness", servers.staleness)),
        update=new,
        replicas=getattr(given, "replicas", servers.replicas),
        replay_mb=getattr(given, "replay_mb", servers.replay_mb),
        adagrad=getattr(given, "adagrad", servers.adagrad),
        own_copies=getattr(given, "steps_locally", servers.own_copies),
        **shared,
    )


def _listens(given: Any) -> bool:
    """Return whether the strategy's class, or a base class below `Strategy`, defines `on_push`."""
    return any("on_push" in kind.__dict__ for kind in type(given).__mro__ if kind.__name__ != "Strategy")
