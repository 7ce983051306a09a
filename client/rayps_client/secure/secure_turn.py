"""A client's side of a secure round: each method takes the server's answer and returns the next message.

The methods are called once each, in the order of the stages. All secrets are made here, live in this object, and end
with it. Nothing is released that `ReleaseRecord` has not written before.

A check of another client's message that fails makes the round void for this client: it sends nothing more in it. It
does not end, because one client with wrong keys would otherwise end all others; a service that lies gains nothing by
another round, in which all keys are new.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rayps_client.secure import shamir
from rayps_client.secure.graph import shares_needed
from rayps_client.secure.masks import add_mask, agree, is_key, new_private, public_of
from rayps_client.secure.pinned_keys import PeerKeys
from rayps_client.secure.protocol import (
    AdvertisedKeys,
    RoundName,
    Stage,
    VoidRound,
    encode,
    numbered,
    seed_digest,
    survivors_text,
    texts,
)
from rayps_client.secure.quantise import Words
from rayps_client.secure.release_record import ReleaseRecord
from rayps_client.values import Json

_NONCE = 12  # bytes
_TWO_SHARES = 2 * shamir.SHARE_BYTES


@dataclass(frozen=True, slots=True)
class TurnRules:
    """Who this client is in a round, and what it insists on."""

    round: RoundName
    number: int
    name: str
    threshold: float  # more than this fraction of a closed neighbourhood must hold shares of a secret to recover it
    least: int  # with fewer survivors the client releases nothing
    pinned: PeerKeys | None = None  # None: the server is trusted to hand out the clients' own keys


class SecureTurn:
    """One client in one secure round."""

    def __init__(self, rules: TurnRules, record: ReleaseRecord) -> None:
        self._rules, self._record = rules, record
        self._stage: Stage | None = None
        self._seal, self._mask, self._seed = new_private(), new_private(), secrets.token_bytes(shamir.SECRET_BYTES)
        self._neighbours: dict[int, AdvertisedKeys] = {}
        self._own_share = b""  # this client's share of its own seed
        self._held: dict[int, tuple[bytes, bytes]] = {}  # from neighbour in U2 to shares of its mask key and its seed

    @property
    def _threshold(self) -> int:
        return shares_needed(len(self._neighbours) + 1, self._rules.threshold)

    def advertise(self) -> bytes:
        """Return the message of `advertise_keys`.

        Raises:
            Conflict: this round was begun before.
        """
        self._enter(None, Stage.ADVERTISE)
        rules = self._rules
        self._record.begin(rules.round.serial)
        keys = AdvertisedKeys(rules.name, public_of(self._seal), public_of(self._mask))
        if rules.pinned is not None:
            signature = rules.pinned.sign(keys.signed_text(rules.round, rules.number))
            keys = AdvertisedKeys(keys.name, keys.seal, keys.mask, signature)
        return encode(keys.facts())

    def share(self, answer: Mapping[str, Json]) -> bytes:
        """Return the message of `share_keys`, from the keys of the neighbours.

        Raises:
            VoidRound: there are too few neighbours, two of them have one key, one is no key, or a neighbour's keys are
                not signed with its pinned key.
        """
        self._enter(Stage.ADVERTISE, Stage.SHARE)
        rules, given = self._rules, answer["neighbours"]
        assert isinstance(given, Mapping)
        for other, facts in given.items():
            assert isinstance(facts, Mapping)
            self._neighbours[int(other)] = AdvertisedKeys.read(facts)
        self._check_neighbours()
        points = {number: number + 1 for number in (*self._neighbours, rules.number)}
        parts = [shamir.split(secret, self._threshold, points.values()) for secret in (self._mask, self._seed)]
        self._own_share = parts[1][points[rules.number]]
        sealed = {
            number: self._sealed(number, parts[0][points[number]] + parts[1][points[number]])
            for number in self._neighbours
        }
        return encode({"sealed": texts(sealed), "digest": seed_digest(rules.round, rules.number, self._seed)})

    def _check_neighbours(self) -> None:
        """Check the keys of the neighbours. Signatures come first: they tell who has copied another's name or keys."""
        rules, known = self._rules, self._neighbours
        if rules.number in known or not known:
            raise VoidRound("the neighbours' keys are not keys of other clients")
        if rules.pinned is not None:
            self._refuse_unsigned(rules.pinned)
            names = Counter([rules.name, *(each.name for each in known.values())])
            twice = [n for n, each in known.items() if names[each.name] > 1]
            self._refuse(twice, "{0} has a name that another client has too: one client's keys count once")
        points = [n for n, each in known.items() if not is_key(each.seal) or not is_key(each.mask)]
        self._refuse(points, "{0} has sent a point that is not a key")
        keys = Counter(key for each in known.values() for key in (each.seal, each.mask))
        twice = [n for n, each in known.items() if keys[each.seal] > 1 or keys[each.mask] > 1]
        self._refuse(twice, "{0} has sent a key that is not its alone")

    def _refuse_unsigned(self, pinned: PeerKeys) -> None:
        """Refuse the neighbours whose keys are not signed. The reason names one whose key is known, if there is one."""
        unsigned = [n for n, each in self._neighbours.items() if not self._is_signed(pinned, n, each)]
        absent = [n for n in unsigned if pinned.lacks(self._neighbours[n].name)]
        if len(absent) == len(unsigned):
            self._refuse(absent, "the file of --peers has no line for {0}, so that its keys cannot be checked")
        self._refuse(
            [n for n in unsigned if n not in absent] + absent,
            "the keys of {0} are not signed with its key in the file of --peers, or that of a certificate of "
            "--members-ca",
        )

    def _is_signed(self, pinned: PeerKeys, number: int, keys: AdvertisedKeys) -> bool:
        return pinned.verify(keys.name, keys.signed_text(self._rules.round, number), keys.signature)

    def _refuse(self, numbers: Sequence[int], why: str) -> None:
        """Raise VoidRound, with the numbers of all refused clients, if there are any. `why` names the first at {0}."""
        if numbers:
            more = f" (and {len(numbers) - 1} more)" if len(numbers) > 1 else ""
            who = f"the client {self._neighbours[numbers[0]].name!r:.80}{more}"
            raise VoidRound(f"{why.format(who)}: this client sends nothing more in this round", refused=list(numbers))

    def mask(self, answer: Mapping[str, Json], vector: Words, update: str) -> Words:
        """Add all masks to `vector`, in place, and return it: the message of `masked_input`.

        `update` names what was trained from what (`ReleaseRecord.send_update`).

        Raises:
            VoidRound: too few neighbours have sent shares, or a share was not sealed by its neighbour for this client
                and round.
            Conflict: a vector of this update was sent before.
        """
        self._enter(Stage.SHARE, Stage.MASK)
        sealed = numbered(answer["sealed"])
        if not sealed.keys() <= self._neighbours.keys() or len(sealed) + 1 < self._threshold:
            raise VoidRound(f"{len(sealed)} neighbours have sent shares, and {self._threshold - 1} are needed")
        opened = {number: self._opened(number, raw) for number, raw in sealed.items()}
        wrong = [number for number, shares in opened.items() if shares is None]
        self._refuse(wrong, "the shares of {0} were not sealed by it for this client and round, or have a wrong length")
        self._held = {number: shares for number, shares in opened.items() if shares is not None}
        self._record.send_update(self._rules.round.serial, update)
        add_mask(vector, self._seed, 1)
        for number in self._held:
            key = agree(
                self._mask, self._neighbours[number].mask, pair_purpose(self._rules.round, self._rules.number, number)
            )
            add_mask(vector, key, 1 if self._rules.number < number else -1)
        return vector

    def confirm(self, answer: Mapping[str, Json]) -> bytes:
        """Return the message of `consistency_check`: the signature of the survivors."""
        self._enter(Stage.MASK, Stage.CONFIRM)
        pinned = self._rules.pinned
        text = survivors_text(self._rules.round, _numbers(answer["survivors"]))
        return encode(texts({self._rules.number: b"" if pinned is None else pinned.sign(text)}))

    def unmask(self, answer: Mapping[str, Json], confirmed: Mapping[str, Json] | None) -> bytes:
        """Return the message of `unmasking`, from the survivors in `answer` and the signatures in `confirmed`.

        `confirmed` is None if the round has no consistency check.

        Raises:
            VoidRound: too few clients have survived, or, with pinned keys, too few neighbours have signed the same
                survivors.
            Conflict: shares were released in this round before.
        """
        self._enter(Stage.MASK if confirmed is None else Stage.CONFIRM, Stage.UNMASK)
        rules, survivors = self._rules, frozenset(_numbers(answer["survivors"]))
        near = survivors & self._held.keys()
        if rules.number not in survivors or len(near) + 1 < self._threshold or len(survivors) < rules.least:
            raise VoidRound(
                f"{len(near)} neighbours of this client have survived, and {self._threshold - 1} are needed"
            )
        if rules.pinned is not None:
            self._check_signatures(rules.pinned, survivors, {} if confirmed is None else confirmed)
        seeds = {number: self._held[number][1] for number in near}
        keys = {number: held[0] for number, held in self._held.items() if number not in survivors}
        self._record.release(rules.round.serial, seeds, keys)
        return encode({"seeds": texts({**seeds, rules.number: self._own_share}), "keys": texts(keys)})

    def _check_signatures(self, pinned: PeerKeys, survivors: frozenset[int], confirmed: Mapping[str, Json]) -> None:
        text = survivors_text(self._rules.round, survivors)
        signed = numbered(confirmed.get("signatures", {}))
        known = signed.keys() & self._held.keys()
        wrong = [n for n in sorted(known) if not pinned.verify(self._neighbours[n].name, text, signed[n])]
        valid = len(known) - len(wrong)
        if valid + 1 < self._threshold:
            raise VoidRound(
                f"{valid} neighbours have signed the survivors that the service names, and {self._threshold - 1} are "
                "needed: this client releases no share",
                refused=wrong,
            )

    def _sealed(self, to: int, shares: bytes) -> bytes:
        nonce, purpose = os.urandom(_NONCE), self._rules.round.purpose("shares", self._rules.number, to)
        return nonce + AESGCM(self._shared_key(to)).encrypt(nonce, shares, purpose)

    def _opened(self, sender: int, sealed: bytes) -> tuple[bytes, bytes] | None:
        """Return the shares that a neighbour has sealed for this client, or None if they cannot be opened."""
        purpose = self._rules.round.purpose("shares", sender, self._rules.number)
        try:
            found = AESGCM(self._shared_key(sender)).decrypt(sealed[:_NONCE], sealed[_NONCE:], purpose)
        except (InvalidTag, ValueError):
            return None
        if len(found) != _TWO_SHARES:
            return None
        return found[: shamir.SHARE_BYTES], found[shamir.SHARE_BYTES :]

    def _shared_key(self, other: int) -> bytes:
        low, high = sorted((self._rules.number, other))
        return agree(self._seal, self._neighbours[other].seal, self._rules.round.purpose("seal", low, high))

    def _enter(self, before: Stage | None, stage: Stage) -> None:
        assert self._stage is before, f"{stage} follows {before}, not {self._stage}"
        self._stage = stage


def pair_purpose(round: RoundName, one: int, other: int) -> bytes:
    """Return the purpose of the key from which two clients expand their common mask."""
    return round.purpose("mask", *sorted((one, other)))


def _numbers(value: Json) -> Sequence[int]:
    assert isinstance(value, Sequence)
    return [int(str(number)) for number in value]
