"""Simulate a round's clients in virtual time: which are asked, which reply, which are lost and why, and its end.

Each random draw is a function of (seed, client, round) only: neither the host's load, nor the number of workers, nor an
earlier round changes the draw. A round depends on the previous round only through the moment at which the previous
round ended. Seconds in this module are virtual: no process waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rayps_client.errors import ConfigError, TrainingError
from rayps_client.values import Json

from rayps.federated.population import options
from rayps.federated.population.availability import FOREVER, Availability, availability, micros, read_seconds
from rayps.federated.population.cohort import Ints, cohort_size, first, normals, uniforms

MOST_CHECKS = 10_000  # a round fails after this number of checks without an available client
_LATEST = 1 << 60  # microseconds: the latest moment of virtual time


REASONS = ("", "offline", "dropout", "deadline")  # why a client's reply was lost; "" means that the client replied


class Training(NamedTuple):
    """One training whose reply counts: the client, and the version of the parameters from which it starts."""

    client: int
    version: int  # the training starts from the parameters at the start of this round
    staleness: int  # rounds between `version` and the round that uses the reply
    again: int  # how often this client had already started from this version
    begin: float  # virtual seconds
    end: float  # virtual seconds


@dataclass(frozen=True)
class Plan:
    """The plan of one round: the trainings, and the outcome of every client that was asked. Clients are numbers."""

    round: int
    sampled: Ints  # clients that were asked, sorted
    trains: Ints  # clients whose replies count, sorted
    dropped: list[tuple[int, str]]  # clients whose replies do not count, and why: dropout, offline, deadline, late
    begin: float  # virtual seconds: when the clients were asked
    end: float  # when the round ended
    waited: float = 0.0  # virtual seconds for which no client was available
    # one for each reply that counts: in the order of `trains`, or of arrival in asynchronous rounds
    trainings: tuple[Training, ...] = ()
    needed: tuple[int, ...] = ()  # versions from which clients are still training when this round ends

    @property
    def staleness(self) -> dict[int, int]:
        """The number of replies for each staleness, in rounds."""
        return dict(sorted(Counter(each.staleness for each in self.trainings).items()))


@dataclass(frozen=True)
class TrainingOutcomes:
    """The outcomes of trainings that start at one moment, with one element per client."""

    clients: Ints
    ends: Ints  # the moment (microseconds) at which the client replies, or the round stops waiting for it
    reasons: list[str] = field(default_factory=list)  # why the reply is lost; "" means that the client replies


class Population:
    """N simulated clients, each with a speed, an availability and random losses.

    Args:
        seed: the seed of every draw.
        work: how many samples each client processes in a round (n_k E, or L B); its length is N.
        fraction: the fraction of all clients that a round needs.
        speed, available: one of the forms in `rayps.federated.population.options`.
        dropout: the probability that a client that was asked never replies.
        deadline: virtual seconds after which a round stops waiting for a client; None means that it waits for all.
        enough: a round ends after this number of replies; None means when all replies have arrived or are lost.
        over_selection: s; a round that needs n replies asks (1 + s) n clients, and ends with n replies.

    Raises:
        ConfigError: there are no clients, or an option is invalid.
    """

    def __init__(
        self,
        seed: int,
        work: Sequence[float] | NDArray[np.generic],
        *,
        fraction: float = 1.0,
        speed: Json = None,
        available: Json = None,
        dropout: float = 0.0,
        deadline: float | None = None,
        enough: int | None = None,
        over_selection: float = 0.0,
    ) -> None:
        options.check_fraction(fraction)
        options.check_replies(0, enough, over_selection)
        options.PopulationSpec(None, dropout, deadline, speed, available)  # checks them
        self.seed, self.work = seed, np.asarray(work, dtype=np.float64)
        self.clients = len(self.work)
        if not self.clients:
            raise ConfigError("there are no clients: divide the data into clients with client=...", field="clients")
        needed = cohort_size(self.clients, fraction)
        self.asked = min(self.clients, int(needed * (1 + over_selection) + 0.5))
        self.enough = enough if enough is not None else needed if self.asked > needed else None
        if enough is not None and enough > self.asked:
            raise ConfigError(
                f"enough is {enough}, but a round asks {self.asked} of the {self.clients} clients: no round would "
                f"ever have enough replies; give at most {self.asked}, or a larger fraction",
                field="enough",
            )
        self._dropout = dropout
        self._deadline = None if deadline is None else max(1, micros(deadline))
        self._available: Availability = availability(seed, options.available_of(available))
        self._speed = options.speed_of(speed)
        self._all = np.arange(self.clients, dtype=np.int64)
        self._seconds = self._draw_seconds()

    def round(self, t: int, now: float = 0.0, cohort: Ints | None = None) -> Plan:
        """Return the plan of round `t`. The previous round ended at `now`, in virtual seconds.

        `cohort`: the clients that are asked, which may be none; None: they are drawn from the seed.

        Raises:
            TrainingError: no client is available now or later.
        """
        if cohort is None:
            moment, candidates = self.first_available(t, micros(now), self._all)
            sampled = first(self.seed, t, candidates, self.asked)
        else:
            moment, sampled = micros(now), cohort
        outcomes = self.start_trainings(sampled, moment, t)
        end = int(outcomes.ends.max(initial=moment))
        replies = [at for at, reason in enumerate(outcomes.reasons) if not reason]
        if self.enough is not None and len(replies) >= self.enough:
            replies.sort(key=lambda at: (outcomes.ends[at], at))
            end = int(outcomes.ends[replies[self.enough - 1]])
            replies = replies[: self.enough]
        kept = set(replies)
        trains = sampled[sorted(kept)]
        begin = moment / 1e6
        return Plan(
            round=t,
            sampled=sampled,
            trains=trains,
            trainings=tuple(
                Training(client, t, 0, 0, begin, outcomes.ends[at] / 1e6)
                for client, at in zip(trains.tolist(), sorted(kept), strict=True)
            ),
            dropped=[
                (int(client), outcomes.reasons[at] or "late") for at, client in enumerate(sampled) if at not in kept
            ],
            begin=begin,
            end=end / 1e6,
            waited=(moment - micros(now)) / 1e6,
        )

    def first_available(self, t: int, now: int, among: Ints) -> tuple[int, Ints]:
        """Return the first moment, from `now` on, at which at least one of the clients `among` is available.

        Also return the clients that are available at this moment. Moments are in microseconds.

        Raises:
            TrainingError: none of the clients is available now or later.
        """
        moment: int | None = now
        for attempt in range(MOST_CHECKS):
            if moment is None or moment > _LATEST:
                break
            there = self._available.are_available(among, moment, t, attempt)
            if there.any():
                return moment, among[there]
            moment = self._available.next(among, moment)
        raise TrainingError(
            f"round {t}: none of {len(among)} clients is available at {now / 1e6:g} virtual seconds, nor "
            + (f"in the next {MOST_CHECKS} checks" if moment is not None else "later")
            + ": make clients available more often (available=...), or give the trace a period",
            round=t,
        )

    def are_available(self, clients: Ints, now: int, t: int) -> NDArray[np.bool_]:
        """Return for each of `clients` whether it is available in round `t` at `now` (microseconds)."""
        return self._available.are_available(clients, now, t, 0)

    def start_trainings(self, clients: Ints, now: int, t: int, again: int = 0) -> TrainingOutcomes:
        """Return the outcomes of `clients` that start to train in round `t` at `now` (microseconds).

        `again` is how often the clients have already started in this round. Without a deadline, the round stops waiting
        for a client that is lost by dropout at the moment at which the client's reply was due.
        """
        seconds, place = self._seconds[clients], (t, again) if again else (t,)
        jitter = self._speed.get("jitter", 0.0)
        if jitter:
            seconds = seconds * np.exp(jitter * normals(self.seed, "jitter", clients, *place))
        due = now + np.minimum(np.rint(self.work[clients] * seconds * 1e6), _LATEST).astype(np.int64)
        leaves = self._available.until(clients, now)
        latest = FOREVER if self._deadline is None else now + self._deadline
        lost = uniforms(self.seed, "dropout", clients, *place) < self._dropout
        reasons = [
            "offline" if gone else "dropout" if drop else "deadline" if late else ""
            for gone, drop, late in zip(
                (leaves < np.minimum(due, latest)).tolist(), lost.tolist(), (due > latest).tolist(), strict=True
            )
        ]
        ends = np.minimum(np.minimum(due, leaves), latest)
        if self._deadline is not None:
            ends = np.where(lost & (leaves >= ends), latest, ends)  # the round stops waiting for it at the deadline
        return TrainingOutcomes(clients, ends, reasons)

    def _draw_seconds(self) -> NDArray[np.float64]:
        """Return each client's virtual seconds per sample."""
        spec, name = self._speed, self._speed["name"]
        if name == "lognormal":
            return float(spec["median"]) * np.exp(float(spec["sigma"]) * normals(self.seed, "speed", self._all))
        if name == "uniform":
            low, high = float(spec["low"]), float(spec["high"])
            return low + (high - low) * uniforms(self.seed, "speed", self._all)
        if name == "trace":
            seconds = np.asarray(spec["seconds"] if spec["file"] is None else read_seconds(spec["file"]))
            return seconds[self._all % len(seconds)].astype(np.float64)
        return np.full(self.clients, spec["seconds"])
