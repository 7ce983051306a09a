"""Simulate an asynchronous run in virtual time: which clients' updates fill each buffer, and from which version.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022: `concurrency` clients train at
any time. When a client ends its training, its update is added to the buffer, and another client starts from the current
parameters. With `size` updates the buffer is full: the round ends, and the parameters get a new version. The next
client is drawn in the round's random order (`cohort.first`). A client starts once from each version. It starts again
from the same version only if no client is training and no other client is available. A round is therefore a round of
FedAvg if `concurrency` and `size` are both the number of clients.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rayps_client.errors import ConfigError, TrainingError

from rayps.federated.population.cohort import Ints, hashes
from rayps.federated.population.population import MOST_CHECKS, REASONS, Plan, Population, Training

STALE = "stale"  # the reason for dropping an update that started too many versions ago


class _RunningTraining(NamedTuple):
    """A running training, as one row of the clock. Running trainings are sorted by `end`, then by `serial`."""

    end: int  # virtual microseconds at which it ends
    serial: int  # number of the training, in the order of starts
    client: int
    version: int  # the version of the parameters at its start
    again: int  # how often the client had already started from this version
    begin: int  # virtual microseconds at which it started
    reason: int  # index in REASONS of why its update is lost; 0 if the update arrives


class AsyncBuffer:
    """The simulation of asynchronous rounds.

    Args:
        population: the clients.
        size: K, the number of updates in a full buffer.
        concurrency: M, the number of clients that train at once; None means the fraction `fraction` of all clients.
        max_staleness: an update that started more versions ago is dropped; None means that no update is dropped.

    Raises:
        ConfigError: `concurrency` is larger than the number of clients.
    """

    def __init__(
        self, population: Population, size: int, concurrency: int | None = None, max_staleness: int | None = None
    ) -> None:
        self.population, self.size, self.max_staleness = population, size, max_staleness
        self.concurrency = population.asked if concurrency is None else concurrency
        if self.concurrency > population.clients:
            raise ConfigError(
                f"concurrency is {concurrency}, but there are {population.clients} clients: give at most "
                f"{population.clients}",
                field="concurrency",
            )

    def round(self, t: int, state: Ints, cohort: Ints | None = None) -> tuple[Plan, Ints]:
        """Simulate round `t`. Return its plan, and the clock after the round (`rayps.federated.population.events`).

        `cohort` must be None: clients start whenever others end. The plan's `trainings` are in the order of arrival.
        Its `sampled` are the clients that started in this round.

        Raises:
            TrainingError: no client is available now or later, or too many updates are lost in this round.
        """
        assert cohort is None, "asynchronous rounds have no cohort"
        now, serial = state[0, :2].tolist()
        running = [_RunningTraining(*each) for each in state[1:].tolist()]
        here = _Round(self, t, now, serial, running)
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
            needed=tuple(sorted({each.version for each in running})),
        )
        head = _RunningTraining(here.now, here.serial, 0, 0, 0, 0, 0)
        return plan, np.asarray([head, *sorted(running)], dtype=np.int64)


class _Round:
    """The simulation of one round."""

    def __init__(self, buffer: AsyncBuffer, t: int, now: int, serial: int, running: list[_RunningTraining]) -> None:
        self.now, self.serial, self.waited = now, serial, 0
        self.trainings: list[Training] = []
        self.dropped: list[tuple[int, str]] = []
        self.started: Counter[int] = Counter()  # how often each client has started from this version
        self._buffer, self._population, self._t, self._running = buffer, buffer.population, t, running
        everyone = np.arange(buffer.population.clients, dtype=np.int64)
        self._order = everyone[np.argsort(hashes(buffer.population.seed, "cohort", everyone, t))]

    def run(self) -> None:
        """Simulate until the buffer is full: start trainings, advance to the next end of a training, and repeat."""
        while len(self.trainings) < self._buffer.size:
            self._start_clients()
            moment = self._running[0].end
            while self._running and self._running[0].end == moment and len(self.trainings) < self._buffer.size:
                self._end_training(heapq.heappop(self._running))
            self.now = moment

    def _end_training(self, training: _RunningTraining) -> None:
        staleness = self._t - training.version
        most = self._buffer.max_staleness
        reason = REASONS[training.reason] or (STALE if most is not None and staleness > most else "")
        if not reason:
            self.trainings.append(
                Training(
                    training.client,
                    training.version,
                    staleness,
                    training.again,
                    training.begin / 1e6,
                    training.end / 1e6,
                )
            )
            return
        self.dropped.append((training.client, reason))
        if len(self.dropped) >= MOST_CHECKS + 100 * self._buffer.size:
            common = ", ".join(f"{count} by {why}" for why, count in Counter(r for _, r in self.dropped).most_common())
            raise TrainingError(
                f"round {self._t}: {len(self.trainings)} of {self._buffer.size} updates arrived, but "
                f"{len(self.dropped)} were lost ({common}): "
                "the buffer may never be full; check the options `deadline`, `available` and `max_staleness`",
                round=self._t,
            )

    def _start_clients(self) -> None:
        """Start clients until `concurrency` are training."""
        free = self._buffer.concurrency - len(self._running)
        if free <= 0:
            return
        busy = {training.client for training in self._running}
        chosen = list(self._next_clients(free, busy))
        if not chosen and not self._running:
            moment, there = self._population.first_available(self._t, self.now, self._order)
            self.waited += moment - self.now
            self.now = moment
            fresh = [client for client in there.tolist() if not self.started[client]]
            chosen = (fresh or there.tolist())[:free]
        fresh = [client for client in chosen if not self.started[client]]
        self._start(np.asarray(fresh, dtype=np.int64), 0)
        for client in chosen:
            if self.started[client] and client not in fresh:
                self._start(np.asarray([client], dtype=np.int64), self.started[client])

    def _next_clients(self, count: int, busy: set[int]) -> Iterator[int]:
        """Yield the first `count` clients that can start, in the round's order.

        A client can start if it is available, is not training (`busy`), and has not started from this version.
        """
        at, found = 0, 0
        while at < len(self._order) and found < count:
            some = self._order[at : at + 4 * count + 60]  # a few at a time: examining all clients would be slow
            at += len(some)
            some = np.asarray(
                [client for client in some.tolist() if client not in busy and not self.started[client]], dtype=np.int64
            )
            for client in some[self._population.are_available(some, self.now, self._t)].tolist():
                if found < count:
                    found += 1
                    yield client

    def _start(self, clients: Ints, again: int) -> None:
        if not len(clients):
            return
        outcomes = self._population.start_trainings(clients, self.now, self._t, again)
        for client, end, reason in zip(clients.tolist(), outcomes.ends.tolist(), outcomes.reasons, strict=True):
            heapq.heappush(
                self._running,
                _RunningTraining(end, self.serial, client, self._t, again, self.now, REASONS.index(reason)),
            )
            self.serial += 1
            self.started[client] += 1
