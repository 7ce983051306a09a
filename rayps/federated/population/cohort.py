"""Choose the clients that a round asks, and the worker on which each client trains, with the same result on all hosts.

Random numbers are computed by a hash (the finalizer of SplitMix64, Steele, Lea and Flood 2014), not by a library's
generator. They depend neither on the version of a library nor on the order of calls. A round can be drawn without the
earlier rounds.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray
from rayps_client.errors import ConfigError
from rayps_client.exchange.random_numbers import number as number
from rayps_client.exchange.random_numbers import numbers

from rayps.federated.population.cohort_size import cohort_size as cohort_size

Ints = NDArray[np.int64]


def hashes(seed: int, purpose: str, clients: Ints, *at: int) -> NDArray[np.uint64]:
    """Return 64 random bits for each client: a function of seed, purpose, client and `at` (such as round, attempt).

    Two clients never have the same bits for the same `at`. The bits therefore also define an order of the clients.
    """
    return numbers(seed, purpose, clients, *at)


def uniforms(seed: int, purpose: str, clients: Ints, *at: int) -> NDArray[np.float64]:
    """Return for each client a random number, uniform from 0 to below 1. The arguments are those of `hashes`."""
    return np.asarray((hashes(seed, purpose, clients, *at) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def normals(seed: int, purpose: str, clients: Ints, *at: int) -> NDArray[np.float64]:
    """Return for each client a random number of the standard normal distribution (Box and Muller 1958)."""
    radius = np.sqrt(-2 * np.log1p(-uniforms(seed, purpose + ":radius", clients, *at)))
    return np.asarray(radius * np.cos(2 * np.pi * uniforms(seed, purpose + ":angle", clients, *at)), dtype=np.float64)


def cohort(seed: int, round: int, clients: int, fraction: float) -> Ints:
    """Return the sorted numbers of the clients that round `round` asks: `cohort_size` of `clients` clients.

    Raises:
        ConfigError: there is no client, or the fraction is outside (0, 1].
    """
    if clients < 1:
        raise ConfigError(
            "there are no clients that a round could ask: divide the data into clients with client=...", field="clients"
        )
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction is {fraction!r}: give a number above 0 and up to 1", field="fraction")
    return first(seed, round, np.arange(clients, dtype=np.int64), cohort_size(clients, fraction))


def first(seed: int, round: int, candidates: Ints, count: int) -> Ints:
    """Return, sorted, the `count` candidates that come first in the round's random order, or all if there are fewer.

    Whether one candidate comes before another does not depend on the other clients.
    """
    if count >= len(candidates):
        return np.sort(candidates)
    keys = hashes(seed, "cohort", candidates, round)
    return np.sort(candidates[np.argpartition(keys, count)[:count]])


def pack(costs: Ints, workers: int) -> list[Ints]:
    """Divide trainings with these `costs` among workers. Return for each worker its positions in `costs`, sorted.

    In descending order of cost, each training is assigned to the least loaded worker (Graham 1969). The assignment has
    no effect on a round's result, only on the time of the slowest worker.
    """
    loads = [(0.0, rank) for rank in range(workers)]
    divided: list[list[int]] = [[] for _ in range(workers)]
    costs = np.asarray(costs, dtype=np.float64)
    for position in np.argsort(-costs, kind="stable").tolist():
        load, rank = loads[0]
        divided[rank].append(position)
        heapq.heapreplace(loads, (load + float(costs[position]), rank))
    return [np.sort(np.asarray(positions, dtype=np.int64)) for positions in divided]


def home_ranks(costs: Ints, workers: int) -> Ints:
    """Return for each client the rank of the worker that stores the client's state and trains it in every round."""
    found = np.zeros(len(costs), dtype=np.int64)
    for rank, positions in enumerate(pack(costs, workers)):
        found[positions] = rank
    return found
