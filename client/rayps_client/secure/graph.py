"""Which clients mask each other's vectors: all of them, or k neighbours each on a random ring.

Bonawitz et al. 2017 use the complete graph. Bell et al., CCS 2020 (SecAgg+), place the n clients on a ring in random
order and connect each with the k / 2 nearest ones on either side (a Harary graph), so that a client's work grows with
log n. A client's secrets are shared within its closed neighbourhood (itself and its k neighbours); t shares recover
one. Three events must be rare, with a fraction `corrupt` of clients that collude with the server, and a fraction
`dropped` that drop out:

    broken        t colluding neighbours of one honest client hold t shares        n P[H(n-1, corrupt n, k) >= t]
    disconnected  the honest survivors fall apart, so that sums of parts are seen  n (corrupt + dropped)^(k/2)
    void          fewer than t shares of a client survive                          n P[H(n-1, (1-dropped) n, k) < t]

H is the hypergeometric distribution: a client's neighbours are a random sample of the others. `neighbours_for` returns
the smallest even k for which broken + disconnected is at most 2^-40 and void at most 2^-30, the values of the paper.
These are bounds by the union over clients. `void` costs a round, and nothing else: therefore `least_neighbours`, below
which no k is used, is the smallest one for which broken + disconnected is at most 2^-40.

Whether the survivors of a round fall apart is also looked at exactly (`is_connected`), and the round is then void. That
does not replace the bound, which counts clients that collude with the server: they connect nobody.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Mapping, Sequence

CORRUPT, DROPPED = 0.2, 0.2  # fractions of clients that the choice of k bears
SECURITY, CORRECTNESS = 40, 30  # bits: the events above have at most the probabilities 2^-40 and 2^-30

Graph = dict[int, tuple[int, ...]]  # from each client to its neighbours, in order; symmetric


def shares_needed(holders: int, threshold: float) -> int:
    """Return t, the number of shares that recover a secret held by `holders` clients: more than this fraction."""
    return math.floor(threshold * holders) + 1


def neighbours_for(clients: int, threshold: float) -> int:
    """Return k, the number of neighbours of each of `clients` clients; clients - 1 means the complete graph."""
    if failures(clients, clients - 1, threshold)[1] > 2.0**-CORRECTNESS:
        return clients - 1  # few clients
    return _fewest(clients, threshold, CORRECTNESS)


def least_neighbours(clients: int, threshold: float) -> int:
    """Return the smallest k that keeps every vector masked, whatever it costs in void rounds; at most clients - 1."""
    return _fewest(clients, threshold, 0)


def _fewest(clients: int, threshold: float, correctness: int) -> int:
    """Return the smallest even k for which vectors are seen and rounds are void rarely enough; at most clients - 1."""

    def is_safe(k: int) -> bool:
        broken, void = failures(clients, min(k, clients - 1), threshold)
        return broken <= 2.0**-SECURITY and void <= 2.0**-correctness

    low, high = 1, (clients - 1) // 2
    while low < high:  # the failures fall with k, up to the rounding of t, which the last loop makes good
        middle = (low + high) // 2
        low, high = (low, middle) if is_safe(2 * middle) else (middle + 1, high)
    k = 2 * low
    while k < clients - 1 and not (is_safe(k) and is_safe(k + 2)):
        k += 2
    return min(k, clients - 1)


def is_connected(graph: Mapping[int, Sequence[int]], clients: Collection[int]) -> bool:
    """Return whether these clients are connected in the graph, by edges among themselves."""
    left = set(clients)
    edge = [left.pop()] if left else []
    while edge:
        near = left.intersection(graph[edge.pop()])
        left -= near
        edge.extend(near)
    return not left


def failures(clients: int, k: int, threshold: float) -> tuple[float, float]:
    """Return bounds of the probabilities (a client's vector is seen, the round is void), as in this module's text."""
    t, others = shares_needed(k + 1, threshold), clients - 1
    bad, alive = math.ceil(CORRUPT * clients), others - math.ceil(DROPPED * clients)
    broken = clients * sum(_drawn(others, bad, k, hits) for hits in range(t, min(k, bad) + 1))
    apart = 0.0 if k >= others else clients * (CORRUPT + DROPPED) ** (k / 2)
    void = clients * sum(_drawn(others, alive, k, hits) for hits in range(min(t, k + 1)))
    return min(1.0, broken + apart), min(1.0, void)


def _drawn(population: int, marked: int, sample: int, hits: int) -> float:
    """Return the probability that a sample without replacement contains exactly `hits` marked members."""
    if not max(0, sample - (population - marked)) <= hits <= min(sample, marked):
        return 0.0
    return math.exp(
        _log_choose(marked, hits) + _log_choose(population - marked, sample - hits) - _log_choose(population, sample)
    )


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def draw_graph(clients: Sequence[int], k: int, seed: bytes) -> Graph:
    """Return the graph of these clients, in which each has k neighbours (k + 1, if k is odd and below n - 1).

    `seed` draws the order on the ring. It must not be known before all clients have sent their keys: give
    `seed_of(keys)`.
    """
    n = len(clients)
    if k >= n - 1:
        return {each: tuple(other for other in sorted(clients) if other != each) for each in sorted(clients)}
    ring = sorted(clients)
    random.Random(hashlib.sha256(seed).digest()).shuffle(ring)
    half = (k + 1) // 2
    near = [offset for distance in range(1, half + 1) for offset in (-distance, distance)]
    return {
        ring[at]: tuple(sorted({ring[(at + offset) % n] for offset in near} - {ring[at]}))
        for at in sorted(range(n), key=lambda at: ring[at])
    }


def seed_of(keys: Mapping[int, bytes]) -> bytes:
    """Return a seed that all clients' fresh public keys determine, so that a restarted server draws the same graph."""
    found = hashlib.sha256(b"rayps secure aggregation: the graph of a round\n")
    for number in sorted(keys):
        found.update(number.to_bytes(8, "big") + keys[number])
    return found.digest()
