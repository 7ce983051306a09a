"""The stages of a round of secure aggregation, their messages, and when a round is void.

The stages, with the names of Bonawitz et al. 2017, figure 4. A stage is closed by the server; who has not sent its
message by then has dropped out. U1 to U5 are the clients whose messages of the stages came in time.

    advertise_keys     client: two fresh public keys                     server: to each client the keys of its
    neighbours share_keys         client: shares of its mask key and its seed,      server: to each client the shares
    that are
                       each sealed to one neighbour                              sealed to it
    masked_input       client: its vector, with all masks added          server: to each client the survivors U3
    consistency_check  client: its signature of U3 (with pinned keys)    server: to each client these signatures
    unmasking          client: per neighbour in U3 the share of its      server: the sum of the vectors of U3
                       seed, per dropped neighbour that of its mask key

The server learns the seed of a client that survived, and the mask key of a client that dropped out before its vector
came, never both of one client: either one alone leaves its vector masked.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from rayps_client.errors import TrainingError
from rayps_client.values import Json, JsonObject

Answer: TypeAlias = JsonObject  # what the server answers one client after a stage; JSON-ready
_DOMAIN = b"rayps secure aggregation, 1\n"


class Stage(StrEnum):
    """A stage of a round, as it is named in routes and files."""

    ADVERTISE = "advertise_keys"
    SHARE = "share_keys"
    MASK = "masked_input"
    CONFIRM = "consistency_check"
    UNMASK = "unmasking"


class VoidRound(TrainingError):
    """A round cannot end with a sum: the model stays as it is. The message says why.

    `data["refused"]`, if it exists, has the numbers of the clients of which a message failed a check.
    """


@dataclass(frozen=True, slots=True)
class RoundName:
    """Which round keys, shares and signatures belong to."""

    job: str
    serial: int  # number of the order; used once in a job

    def purpose(self, kind: str, *numbers: int) -> bytes:
        """Return the text, for HKDF, associated data and signatures, that names one use of a key in this round."""
        return _DOMAIN + json.dumps([self.job, self.serial, kind, *numbers]).encode()


@dataclass(frozen=True, slots=True)
class AdvertisedKeys:
    """A client's message of `advertise_keys`: its public keys for sealing and for masks, and their signature or b""."""

    name: str
    seal: bytes
    mask: bytes
    signature: bytes = b""

    def facts(self) -> JsonObject:
        """Return the message as JSON-ready data."""
        return {
            "name": self.name,
            "seal": text_of(self.seal),
            "mask": text_of(self.mask),
            "signature": text_of(self.signature),
        }

    @classmethod
    def read(cls, facts: Mapping[str, Json]) -> AdvertisedKeys:
        """Read what `facts` returned. Raises KeyError, TypeError or ValueError if it is malformed."""
        found = cls(str(facts["name"]), bytes_of(facts["seal"]), bytes_of(facts["mask"]), bytes_of(facts["signature"]))
        if len(found.seal) != 32 or len(found.mask) != 32:
            raise ValueError("a public key has 32 bytes")
        return found

    def signed_text(self, round: RoundName, number: int) -> bytes:
        """Return the text that the client signs with its long-term key."""
        keys = f"{self.name}\n{text_of(self.seal)}\n{text_of(self.mask)}"
        return round.purpose("keys", number) + keys.encode()


def survivors_text(round: RoundName, survivors: Iterable[int]) -> bytes:
    """Return the text that a client signs in the consistency check: the survivors U3 of the round."""
    return round.purpose("survivors", *sorted(survivors))


def seed_digest(round: RoundName, number: int, seed: bytes) -> str:
    """Return the digest of a client's seed, by which the server notices shares of another seed."""
    return hashlib.sha256(round.purpose("seed", number) + seed).hexdigest()


def encode(facts: Mapping[str, Json]) -> bytes:
    """Return a message as bytes."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def decode(message: bytes) -> dict[str, Json]:
    """Return the facts of a message. Raises ValueError if it is not a JSON object."""
    found = json.loads(message)
    if not isinstance(found, dict):
        raise ValueError("a message is a JSON object")
    return found


def numbered(facts: Json) -> dict[int, bytes]:
    """Return a mapping from client to bytes that `texts` has written. Raises ValueError if it is another value."""
    if not isinstance(facts, Mapping):
        raise ValueError("a mapping from client to text was expected")
    return {int(number): bytes_of(value) for number, value in facts.items()}


def texts(values: Mapping[int, bytes]) -> JsonObject:
    """Return a mapping from client to bytes as JSON-ready data."""
    return {str(number): text_of(value) for number, value in sorted(values.items())}


def text_of(value: bytes) -> str:
    """Encode bytes as text (base64)."""
    return base64.b64encode(value).decode()


def bytes_of(text: Json) -> bytes:
    """Decode a text that `text_of` returned. Raises ValueError if it is not base64."""
    if not isinstance(text, str):
        raise ValueError("a text was expected")
    return base64.b64decode(text.encode(), validate=True)
