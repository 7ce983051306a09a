"""Decide what follows in an asynchronous round of real clients, after each look at the mailbox. Pure.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, algorithm 1, in real time:

    counts   a round takes the first K updates (`size`) that have arrived; further ones wait for the next round
    lost     an update whose order is more than `max_staleness` rounds old; a client that has left, that has said that
             it takes part in no round now, or that has not replied by its deadline
    starts   up to M clients (`concurrency`) train at once. Clients that have replied least often from the newest
             parameters start first, in the round's random order; a client whose deadline has passed in this round
             starts after the others. A client may start again from the same parameters, so that none waits for a slow
             one.

With fewer than `least` clients that are connected or train, no client starts. A round with K counted updates ends
before any client starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rayps.federated.population.async_events import STALE
from rayps.federated.population.cohort import cohort_size, hashes
from rayps.federated.remote.client_state import GONE, WHY_SILENT

# connected; sends no request; says that it is away; has left; its token or certificate was revoked; is asked no more
ClientStatus = Literal["here", "silent", "away", "left", "revoked", "excluded"]


@dataclass(frozen=True, slots=True)
class AsyncRules:
    """The options of asynchronous rounds of real clients."""

    size: int  # K, the number of updates that end a round
    concurrency: int | None  # M, the number of clients that train at once; None: `fraction` of those that are there
    max_staleness: int | None  # in rounds; None: no update is too old
    fraction: float
    least: int  # number of clients that must be connected or train
    seed: int


@dataclass(frozen=True, slots=True)
class RunningOrder:
    """An order that is neither counted nor lost."""

    serial: int
    client: int
    version: int  # the round in which the client started
    ends: float  # the deadline, in seconds since the epoch
    arrived: bool  # whether the update has arrived


@dataclass(frozen=True, slots=True)
class Look:
    """What the worker knows at one moment of round `round`."""

    round: int
    now: float  # seconds since the epoch
    running: Sequence[RunningOrder]
    clients: Mapping[int, ClientStatus]  # of all clients that have joined
    counted: Sequence[tuple[int, int]] = ()  # (client, version) of each update that counts in this round
    late: Collection[int] = ()  # clients whose deadline has passed in this round


@dataclass(slots=True)
class AsyncStep:
    """What follows from a look."""

    counts: list[int] = field(default_factory=list)  # serial numbers of orders whose updates count in this round
    lost: list[tuple[int, str]] = field(default_factory=list)  # (serial number, reason)
    starts: list[tuple[int, int]] = field(default_factory=list)  # (client, replies from the newest parameters so far)
    missing: int = 0  # number of clients for which the round waits before any client starts


def decide(look: Look, rules: AsyncRules) -> AsyncStep:
    """Return what follows from a look."""
    step, running = AsyncStep(), list[RunningOrder]()
    counted = list(look.counted)
    for order in sorted(look.running, key=lambda order: order.serial):
        status = look.clients.get(order.client, "left")
        if order.arrived:
            if rules.max_staleness is not None and look.round - order.version > rules.max_staleness:
                step.lost.append((order.serial, STALE))
            elif len(counted) < rules.size:
                step.counts.append(order.serial)
                counted.append((order.client, order.version))
            else:
                running.append(order)
        elif status in GONE or status == "away" or look.now >= order.ends:
            step.lost.append((order.serial, WHY_SILENT["away" if status == "silent" else status]))
        else:
            running.append(order)
    if len(counted) >= rules.size:
        return step
    busy = {order.client for order in running}
    here = {number for number, status in look.clients.items() if status == "here"}
    there = len(here | busy)
    step.missing = max(0, rules.least - there)
    if step.missing:
        return step
    most = cohort_size(there, rules.fraction) if rules.concurrency is None else rules.concurrency
    lost = {serial for serial, reason in step.lost if reason != STALE}
    late = {*look.late, *(order.client for order in look.running if order.serial in lost)}
    again = Counter(client for client, version in counted if version == look.round)
    free = np.asarray(sorted(here - busy), dtype=np.int64)
    keys = hashes(rules.seed, "cohort", free, look.round).tolist()
    ranked = sorted(
        (number in late, again[number], key, number) for number, key in zip(free.tolist(), keys, strict=True)
    )
    step.starts = [(number, again[number]) for *_, number in ranked[: max(0, most - len(running))]]
    return step
