"""Decide on which hosts workers run: each replica of the model on one host if it fits, else on several. No I/O.

The workers of one replica exchange activations several times a step; different replicas exchange gradients once a step.
Therefore as many replicas as possible are each placed on one host. Every other replica is spread over few hosts, with
neighbouring ranks on the same host. For each replica on several hosts the decision contains the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayps.core.grid import Grid

Bundle = Mapping[str, float]
_WORDS = {"cpu": "CPU", "gpu": "GPU", "memory": "bytes of memory"}
_EPSILON = 1e-6  # tolerance, as amounts are sums of floats; Ray's own resolution is 1e-4


@dataclass(frozen=True, slots=True)
class Placement:
    """The host of each rank, and `reasons`, a dict from each replica on several hosts to the reason for it."""

    hosts: list[str]
    reasons: dict[int, str] = field(default_factory=dict)


def slots(free: Bundle, bundle: Bundle) -> int:
    """Return how many workers that each need `bundle` fit into a host's free resources."""
    counts = [_fitting(kind, free.get(kind, 0.0), amount) for kind, amount in bundle.items() if amount]
    return min(counts, default=2**31)


def _fitting(kind: str, free: float, amount: float) -> int:
    if kind == "gpu" and amount < 1:  # a worker's share cannot span two devices
        whole = math.floor(free + _EPSILON)
        return whole * math.floor(1 / amount + _EPSILON) + math.floor((free - whole + _EPSILON) / amount)
    return math.floor((free + _EPSILON) / amount)


def together(bundle: Bundle, count: int) -> dict[str, float]:
    """Return the resources that `count` workers, which each need `bundle`, need together on one host.

    If a worker needs a part of a GPU, and the workers need more than one GPU together, whole GPUs are counted.
    """
    found = {kind: round(amount * count, 4) for kind, amount in bundle.items()}
    gpu = bundle.get("gpu", 0.0)
    if 0 < gpu < 1:
        each = math.floor(1 / gpu + _EPSILON)
        found["gpu"] = found["gpu"] if count <= each else float(math.ceil(count / each))
    return found


def place_ranks(hosts: Mapping[str, Bundle], grid: Grid, bundle: Bundle) -> Placement | None:
    """Place the ranks of a grid on hosts, or return None if they do not fit.

    `hosts` maps each host to its free resources; each rank needs `bundle`. No other placement has more replicas that
    are on one host.
    """
    size, room = grid.columns, {name: slots(free, bundle) for name, free in hosts.items()}
    if sum(room.values()) < grid.size:
        return None
    placed: list[str] = []
    reasons: dict[int, str] = {}
    for replica in range(grid.data):
        fits = [name for name in room if room[name] >= size]
        if fits:
            chosen = [
                min(fits, key=lambda name: (room[name], name))
            ] * size  # the host with the least room that is enough, so that larger hosts stay free
        else:
            reasons[replica] = _reason(hosts, bundle, size, taken=bool(replica))
            chosen = []
            while len(chosen) < size:
                most = max((name for name in room), key=lambda name: (room[name] - chosen.count(name), name))
                chosen += [most] * min(room[most], size - len(chosen))
        for name in chosen:
            room[name] -= 1
        placed += chosen
    return Placement(placed, reasons)


def _reason(hosts: Mapping[str, Bundle], bundle: Bundle, size: int, taken: bool) -> str:
    """Return a text that names the resources of which no host has enough for a replica of `size` workers.

    `taken`: other replicas have been placed already.
    """
    needed = together(bundle, size)
    lacking = [kind for kind, amount in bundle.items() if amount and not _one_has(hosts, kind, amount, size)]
    kinds = lacking or [kind for kind, amount in bundle.items() if amount]
    many = {kind: "s" * (kind != "memory" and needed[kind] != 1) for kind in kinds}
    amounts = [f"{needed[kind]:g} free {_WORDS[kind]}{many[kind]}" for kind in kinds]
    return f"no host has {' and '.join(amounts)}{' left' if taken and not lacking else ''}"


def _one_has(hosts: Mapping[str, Bundle], kind: str, amount: float, size: int) -> bool:
    return any(_fitting(kind, free.get(kind, 0.0), amount) >= size for free in hosts.values())


def bundles(hosts: Sequence[str], grid: Grid, bundle: Bundle) -> tuple[list[dict[str, float]], list[int]]:
    """Group workers into bundles to reserve: consecutive ranks of one replica on one host are one bundle.

    Return the bundles, and for each rank the index of its bundle.
    """
    runs: list[tuple[tuple[str, int], int]] = []
    index = []
    for rank, host in enumerate(hosts):
        key = host, grid.at(rank).data
        if runs and runs[-1][0] == key:
            runs[-1] = key, runs[-1][1] + 1
        else:
            runs.append((key, 1))
        index.append(len(runs) - 1)
    return [together(bundle, count) for _, count in runs], index


def within(held: Sequence[Bundle], wanted: Sequence[Bundle]) -> list[int] | None:
    """Return, for each wanted bundle, the index of the bundle of an existing reservation that contains it.

    Return None if they do not fit. The first bundle of `held` is used last, because its owner runs in it, such as the
    trial of Ray Tune that starts these workers.
    """
    free = [dict(bundle) for bundle in held]
    order = [*range(1, len(free)), *range(min(1, len(free)))]
    found = []
    for bundle in wanted:
        fitting = [i for i in order if slots(free[i], bundle) >= 1]
        if not fitting:
            return None
        for kind, amount in bundle.items():
            free[fitting[0]][kind] = free[fitting[0]].get(kind, 0.0) - amount
        found.append(fitting[0])
    return found


def describe(hosts: Sequence[str], grid: Grid, reasons: Mapping[int, str]) -> str:
    """Return a text that states how many replicas are on one host, and why others are on several hosts."""
    counts = [len({hosts[rank] for rank in grid.replica(data)}) for data in range(grid.data)]
    spread = [data for data, count in enumerate(counts) if count > 1]
    inside, size = grid.data - len(spread), f"{grid.columns} workers"
    parts = []
    if inside:
        some = f"{inside} of {grid.data} replicas" if spread else f"each of {grid.data} replicas"
        which = "the replica" if grid.data == 1 else some
        parts.append(f"{which} of {size} {'are' if spread and inside > 1 else 'is'} inside one host")
    for data in spread[:3]:
        why = reasons.get(data, "placed by the cluster")
        parts.append(f"replica {data} is spread over {counts[data]} hosts: {why}")
    if len(spread) > 3:
        parts.append(f"so are {len(spread) - 3} more")
    return "; ".join(parts)
