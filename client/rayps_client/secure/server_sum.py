"""The server's side of a secure round: what it answers to each client, and the sum in the end. It has no secret.

Everything follows from the messages of the closed stages: a server that is killed and started again with the same
messages gives the same answers. A message that cannot be read counts as not sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rayps_client.errors import ConfigError
from rayps_client.secure import shamir
from rayps_client.secure.graph import (
    Graph,
    draw_graph,
    is_connected,
    least_neighbours,
    neighbours_for,
    seed_of,
    shares_needed,
)
from rayps_client.secure.masks import add_mask, agree, is_key, public_of
from rayps_client.secure.protocol import (
    AdvertisedKeys,
    Answer,
    RoundName,
    VoidRound,
    decode,
    numbered,
    seed_digest,
    texts,
)
from rayps_client.secure.quantise import Words
from rayps_client.secure.secure_turn import pair_purpose

UNREADABLE = "its message cannot be read"
NO_KEYS = "its message has a point that is not a key, or one key twice"


@dataclass(frozen=True, slots=True)
class ServerRules:
    """How a round is summed."""

    round: RoundName
    threshold: float  # more than this fraction of a closed neighbourhood must hold shares of a secret to recover it
    least: int  # with fewer survivors the round is void; at least 2
    neighbours: int | None = None  # k, which `least_neighbours` may raise; None: as many as `neighbours_for` says


class ServerSum:
    """The server in one secure round. The methods are called once each, in the order of the stages.

    Each takes the messages of a closed stage, as a dict from client to message, and returns the answers by client.
    """

    def __init__(self, rules: ServerRules) -> None:
        self._rules = rules
        self.graph: Graph = {}
        self.unusable: dict[int, str] = {}  # clients whose message of a stage could not be used, and why
        self._keys: dict[int, AdvertisedKeys] = {}
        self._digests: dict[int, str] = {}
        self._shared: frozenset[int] = frozenset()  # U2
        self._survivors: frozenset[int] = frozenset()  # U3

    def advertised(self, messages: Mapping[int, bytes]) -> dict[int, Answer]:
        """Return to each client the keys of its neighbours. Draws the graph.

        Raises:
            VoidRound: there are too few clients.
        """
        for number, message in messages.items():
            try:
                keys = AdvertisedKeys.read(decode(message))
            except (KeyError, TypeError, ValueError):
                self.unusable[number] = UNREADABLE
                continue
            if keys.seal != keys.mask and is_key(keys.seal) and is_key(keys.mask):
                self._keys[number] = keys
            else:
                self.unusable[number] = NO_KEYS
        self._check_count(self._keys, "sent their keys")
        count = len(self._keys)
        threshold, given = self._rules.threshold, self._rules.neighbours
        k = neighbours_for(count, threshold) if given is None else max(given, least_neighbours(count, threshold))
        seed = seed_of({number: keys.seal + keys.mask for number, keys in self._keys.items()})
        self.graph = draw_graph(list(self._keys), k, seed)
        return {
            number: {"neighbours": {str(other): self._keys[other].facts() for other in others}}
            for number, others in self.graph.items()
        }

    def shared(self, messages: Mapping[int, bytes]) -> dict[int, Answer]:
        """Return to each client the shares that its neighbours have sealed to it.

        Raises:
            VoidRound: too few clients have sent shares.
        """
        sealed: dict[int, dict[int, bytes]] = {}
        for number, message in messages.items():
            try:
                facts = decode(message)
                given, digest = numbered(facts["sealed"]), str(facts["digest"])
                if given.keys() != set(self.graph[number]):
                    raise ValueError("shares are for a client's neighbours")
            except (KeyError, TypeError, ValueError):
                self.unusable[number] = UNREADABLE
                continue
            sealed[number], self._digests[number] = given, digest
        self._shared = frozenset(sealed)
        self._check_count(self._shared, "sent their shares")
        self._check_neighbourhoods(self._shared, self._shared, "sent their shares")
        return {
            number: {"sealed": texts({each: sealed[each][number] for each in self.graph[number] if each in sealed})}
            for number in sorted(self._shared)
        }

    def masked(self, numbers: Collection[int]) -> dict[int, Answer]:
        """Return to each client the survivors, whose masked vectors came in time.

        Raises:
            VoidRound: too few clients have survived, or the survivors' graph falls apart.
        """
        self._survivors = self._shared & frozenset(numbers)
        self._check_count(self._survivors, "sent their masked update")
        self._check_neighbourhoods(self._shared, self._survivors, "sent their masked update")
        if not is_connected(self.graph, self._survivors):
            raise VoidRound(
                "secure aggregation: so many clients have dropped out that the others do not all mask each other, "
                "directly or through others: the sum of a part of them would be seen"
            )
        answer: Answer = {"survivors": sorted(self._survivors)}
        return dict.fromkeys(sorted(self._survivors), answer)

    def confirmed(self, messages: Mapping[int, bytes]) -> dict[int, Answer]:
        """Return to each client the signatures of the survivors by its neighbours.

        Raises:
            VoidRound: too few clients have signed.
        """
        signed: dict[int, bytes] = {}
        for number in self._survivors & messages.keys():
            try:
                signed[number] = numbered(decode(messages[number]))[number]
            except (KeyError, TypeError, ValueError):
                self.unusable[number] = UNREADABLE
        self._check_neighbourhoods(self._shared, signed, "confirmed the survivors")
        return {
            number: {"signatures": texts({each: signed[each] for each in self.graph[number] if each in signed})}
            for number in sorted(signed)
        }

    def suffices(self, numbers: Collection[int]) -> bool:
        """Return whether the clients that have sent the message of `unmasking` suffice for the sum."""
        there = self._survivors & frozenset(numbers)
        return all(self._holders(each, there) >= self._needed(each) for each in self._shared)

    def total(self, messages: Mapping[int, bytes], vectors: Iterable[Words]) -> Words:
        """Return the sum of the survivors' vectors, without masks. `vectors` are theirs, masked, in any order.

        Raises:
            VoidRound: too few clients have sent shares, or the shares are wrong.
        """
        seeds: dict[int, dict[int, bytes]] = {number: {} for number in self._survivors}
        keys: dict[int, dict[int, bytes]] = {number: {} for number in self._shared - self._survivors}
        for number in self._survivors & messages.keys():
            try:
                self._take_shares(number, messages[number], seeds, keys)
            except (KeyError, TypeError, ValueError):
                self.unusable[number] = UNREADABLE
        for number, shares in (*seeds.items(), *keys.items()):
            if len(shares) < self._needed(number):
                raise VoidRound(
                    f"secure aggregation: {len(shares)} clients have sent their shares for unmasking, and "
                    f"{self._needed(number)} are needed"
                )
        found: Words | None = None
        for vector in vectors:
            found = vector.copy() if found is None else np.add(found, vector, out=found)
        assert found is not None, "`masked` has checked the number of survivors"
        for number, shares in seeds.items():
            add_mask(found, self._seed_of(number, shares), -1)
        for number, shares in keys.items():
            private = self._mask_key_of(number, shares)
            for other in self._survivors & frozenset(self.graph[number]):
                key = agree(private, self._keys[other].mask, pair_purpose(self._rules.round, number, other))
                add_mask(found, key, -1 if other < number else 1)  # takes back what `other` has added
        return found

    def _take_shares(
        self, sender: int, message: bytes, seeds: dict[int, dict[int, bytes]], keys: dict[int, dict[int, bytes]]
    ) -> None:
        facts, near = decode(message), self._shared & frozenset(self.graph[sender])
        given = numbered(facts["seeds"]), numbered(facts["keys"])
        if given[0].keys() != near & self._survivors | {sender} or given[1].keys() != near - self._survivors:
            raise ValueError("shares are about a client's neighbours, one of each")
        for shares, into in zip(given, (seeds, keys), strict=True):
            for number, share in shares.items():
                into[number][sender + 1] = share

    def _seed_of(self, number: int, shares: Mapping[int, bytes]) -> bytes:
        found = self._combined(number, shares)
        if seed_digest(self._rules.round, number, found) != self._digests[number]:
            raise self._wrong(number)
        return found

    def _mask_key_of(self, number: int, shares: Mapping[int, bytes]) -> bytes:
        found = self._combined(number, shares)
        if public_of(found) != self._keys[number].mask:
            raise self._wrong(number)
        return found

    def _combined(self, number: int, shares: Mapping[int, bytes]) -> bytes:
        try:
            return shamir.combine(shares, self._needed(number))
        except ConfigError as error:
            raise self._wrong(number) from error

    def _wrong(self, number: int) -> VoidRound:
        return VoidRound(f"secure aggregation: the shares about the client {self._keys[number].name!r} are wrong")

    def _needed(self, number: int) -> int:
        return shares_needed(len(self.graph[number]) + 1, self._rules.threshold)

    def _holders(self, number: int, there: Collection[int]) -> int:
        return sum(each in there for each in (number, *self.graph[number]))

    def _check_count(self, there: Collection[int], what: str) -> None:
        if len(there) < self._rules.least:
            who = (
                f"1 client has {what.replace('their', 'its')}"
                if len(there) == 1
                else f"{len(there)} clients have {what}"
            )
            raise VoidRound(f"secure aggregation: {who}, and {self._rules.least} are needed")

    def _check_neighbourhoods(self, about: Iterable[int], there: Collection[int], what: str) -> None:
        """Check that enough of `there` hold shares of each client in `about`."""
        for number in about:
            held, needed = self._holders(number, there), self._needed(number)
            if held < needed:
                size = len(self.graph[number]) + 1
                raise VoidRound(
                    f"secure aggregation: {held} of {size} clients that mask each other have {what}, and {needed} are "
                    "needed"
                )
