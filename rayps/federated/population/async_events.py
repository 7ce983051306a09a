"""The events of an asynchronous run in virtual time: which clients fill each buffer, and from which version. Pure.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022: `concurrency` clients train at
any time. When one ends, its update is added to the buffer, and another client starts from the current parameters. With
`size` updates the buffer is full: a round ends, and the parameters have a new version. The next client is drawn in the
round's order (`cohort.first`), each client once from one version; only if no client is training and no other one is
available, one starts again. So with concurrency = size = all clients, a round is one of FedAvg.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rayps.core.errors import ConfigError, TrainingError
from rayps.federated.population.cohort import Ints, hashes
from rayps.federated.population.population import LOOKS, REASONS, Plan, Population, Training

STALE = "stale"  # the reason for an update that started too many versions ago


class _Trip(NamedTuple):
    """A training that is running, as stored in the clock's state; sorted by its end, then by its start."""

    end: int
    serial: int
    client: int
    version: int
    again: int
    begin: int
    reason: int  # index in REASONS: the outcome


class AsyncBuffer:
    """The asynchronous rounds of a population.

    Args:
        world: its `fraction` is the share of all clients that train at once, where `concurrency` is None.
        size: K, updates of a buffer.
        concurrency: M, clients that train at once.
        max_staleness: an update of an older version is dropped; None = none is.

    Raises:
        ConfigError: there are fewer clients than are to train at once.
    """

    def __init__(
        self, world: Population, size: int, concurrency: int | None = None, max_staleness: int | None = None
    ) -> None:
        self.world, self.size, self.max_staleness = world, size, max_staleness
        self.concurrency = world.asked if concurrency is None else concurrency
        if self.concurrency > world.clients:
            raise ConfigError(
                f"concurrency is {concurrency}, and there are {world.clients} clients: give at most so many",
                field="concurrency",
            )

    def round(self, t: int, state: Ints) -> tuple[Plan, Ints]:
        """Return round `t`, and the clock's state after it; see `rayps.federated.population.events`.

        The plan's `trainings` are in the order of arrival; its `sampled` are the clients that started in this round.

        Raises:
            TrainingError: no client is available now or later; or every update is lost.
        """
        now, serial = state[0, :2].tolist()
        flight = [_Trip(*each) for each in state[1:].tolist()]
        here = _Round(self, t, now, serial, flight)
        here.run()
        plan = Plan(
            round=t,
            sampled=np.asarray(sorted(here.started), dtype=np.int64),
            trains=np.asarray(sorted({each.client for each in here.trainings}), dtype=np.int64),
            dropped=here.dropped,
            begin=now / 1e6,
            end=here.now / 1e6,
            waited=here.waited / 1e6,
            trainings=tuple(here.trainings),
            needed=tuple(sorted({each.version for each in flight})),
        )
        head = _Trip(here.now, here.serial, 0, 0, 0, 0, 0)
        return plan, np.asarray([head, *sorted(flight)], dtype=np.int64)


class _Round:
    """The simulation of one round."""

    def __init__(self, buffer: AsyncBuffer, t: int, now: int, serial: int, flight: list[_Trip]) -> None:
        self.now, self.serial, self.waited = now, serial, 0
        self.trainings: list[Training] = []
        self.dropped: list[tuple[int, str]] = []
        self.started: Counter[int] = Counter()  # how often each client has started from this version
        self._buffer, self._world, self._t, self._flight = buffer, buffer.world, t, flight
        everyone = np.arange(buffer.world.clients, dtype=np.int64)
        self._order = everyone[np.argsort(hashes(buffer.world.seed, "cohort", everyone, t))]

    def run(self) -> None:
        """Simulate until the buffer is full. At each moment, first trainings end, then other trainings start."""
        while len(self.trainings) < self._buffer.size:
            self._begin()
            moment = self._flight[0].end
            while self._flight and self._flight[0].end == moment and len(self.trainings) < self._buffer.size:
                self._arrive(heapq.heappop(self._flight))
            self.now = moment

    def _arrive(self, trip: _Trip) -> None:
        staleness = self._t - trip.version
        most = self._buffer.max_staleness
        reason = REASONS[trip.reason] or (STALE if most is not None and staleness > most else "")
        if not reason:
            self.trainings.append(
                Training(trip.client, trip.version, staleness, trip.again, trip.begin / 1e6, trip.end / 1e6)
            )
            return
        self.dropped.append((trip.client, reason))
        if len(self.dropped) >= LOOKS + 100 * self._buffer.size:
            common = ", ".join(f"{count} by {why}" for why, count in Counter(r for _, r in self.dropped).most_common())
            raise TrainingError(
                f"round {self._t}: {len(self.trainings)} of {self._buffer.size} updates arrived, and "
                f"{len(self.dropped)} were lost ({common}): "
                "the buffer may never fill; look at deadline, available and max_staleness",
                round=self._t,
            )

    def _begin(self) -> None:
        """Start clients until `concurrency` are training."""
        free = self._buffer.concurrency - len(self._flight)
        if free <= 0:
            return
        busy = {trip.client for trip in self._flight}
        chosen = list(self._next(free, busy))
        if not chosen and not self._flight:
            moment, there = self._world.someone(self._t, self.now, self._order)
            self.waited += moment - self.now
            self.now = moment
            fresh = [client for client in there.tolist() if not self.started[client]]
            chosen = (fresh or there.tolist())[:free]
        fresh = [client for client in chosen if not self.started[client]]
        self._send(np.asarray(fresh, dtype=np.int64), 0)
        for client in chosen:
            if self.started[client] and client not in fresh:
                self._send(np.asarray([client], dtype=np.int64), self.started[client])

    def _next(self, count: int, busy: set[int]) -> Iterator[int]:
        """Return the first `count` clients that can start, in the round's order.

        A client can start if it is available, is not training, and has not started from this version.
        """
        at, found = 0, 0
        while at < len(self._order) and found < count:
            some = self._order[at : at + 4 * count + 60]  # examining all would be slow with many clients
            at += len(some)
            some = np.asarray(
                [client for client in some.tolist() if client not in busy and not self.started[client]], dtype=np.int64
            )
            for client in some[self._world.there(some, self.now, self._t)].tolist():
                if found < count:
                    found += 1
                    yield client

    def _send(self, clients: Ints, again: int) -> None:
        if not len(clients):
            return
        sent = self._world.send(clients, self.now, self._t, again)
        for client, end, reason in zip(clients.tolist(), sent.ends.tolist(), sent.reasons, strict=True):
            heapq.heappush(
                self._flight, _Trip(end, self.serial, client, self._t, again, self.now, REASONS.index(reason))
            )
            self.serial += 1
            self.started[client] += 1
