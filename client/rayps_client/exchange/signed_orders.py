"""Signed orders: a real client accepts only orders that are signed with the key whose fingerprint is in its token.

Nothing is encrypted here: updates and tokens can be read on the network unless TLS is used. The signature is Ed25519
(RFC 8032), over a fixed prefix and the order's text. The token contains the SHA-256 fingerprint of the service's public
key, so a proxy between service and client cannot give the client another model, other options or an old round.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypedDict, cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rayps_client.errors import ConfigError, Unauthorized
from rayps_client.secure.secure_facts import SecureFacts
from rayps_client.values import JsonObject, Keywords

_DOMAIN = b"rayps: an order to a federated client, 1\n"
_SCHEME = "rpc"
ANY_JOB = "any"
ROUND, EVALUATION = "round", "evaluation"  # kinds of orders
DEADLINE = 600.0  # the deadline of a round of real clients, in seconds, if the strategy has no option `deadline`
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 _.-]{0,62}[A-Za-z0-9])?")  # the form of a client's name
JOB_ID = re.compile(r"[0-9A-Z]{26}")  # the form of a job's id


class Key:
    """The service's private key, with which the service signs orders. The key never leaves the service."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = text_of(private.public_key().public_bytes_raw())
        self.fingerprint = fingerprint(self.public)

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Return the key stored in the file `path`. If there is no file, create it with a new key and mode 0600.

        Raises:
            ConfigError: the file does not contain a key.
        """
        if not path.exists():
            part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(Ed25519PrivateKey.generate().private_bytes_raw())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(part, path)  # if two processes create the file at the same time, the first one's key is used
            except FileExistsError:
                pass
            finally:
                part.unlink()
        try:
            return cls(Ed25519PrivateKey.from_private_bytes(path.read_bytes()))
        except ValueError as error:
            raise ConfigError(
                f"{path} does not contain a key of 32 bytes: move the file away, and the service creates a new key "
                "(existing client tokens\nare then invalid)"
            ) from error

    def sign(self, text: str) -> str:
        """Return the signature of an order's text."""
        return text_of(self._private.sign(_DOMAIN + text.encode()))


@dataclass(frozen=True, slots=True)
class ClientToken:
    """A client's token: a secret, and the job and client name for which the token is valid."""

    secret: str
    job: str | None  # None means any job
    fingerprint: str  # fingerprint of the service's public key
    name: str | None = None  # None means any name

    def __str__(self) -> str:
        named = "" if self.name is None else f".{text_of(self.name.encode())}"
        return f"{_SCHEME}.{self.job or ANY_JOB}.{self.secret}.{self.fingerprint}{named}"

    @classmethod
    def create(cls, job: str | None, key: Key, name: str | None = None) -> Self:
        """Create a new token, with a random secret."""
        return cls(secrets.token_urlsafe(32), job, key.fingerprint, name)

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a token's text. Raises ConfigError if the text is not a client token."""
        parts = text.strip().split(".")
        name = _name(parts[4]) if len(parts) == 5 else None
        well = len(parts) == 4 or name is not None
        if not well or parts[0] != _SCHEME or not all(parts) or not text.strip().isascii():
            raise ConfigError(
                "this is not a client token (rpc.JOB.SECRET.FINGERPRINT): create one with `rayps token create --job "
                "ID`, on the machine of the service",
                field="token",
            )
        return cls(parts[2], None if parts[1] == ANY_JOB else parts[1], parts[3], name)

    def check(self, public: str) -> None:
        """Check a public key that a service has sent.

        Raises Unauthorized if it is not the key of the service that created this token.
        """
        try:
            known = fingerprint(public)
        except ValueError as error:
            raise Unauthorized(
                "the public key that the service sent cannot be decoded: this client refuses its orders"
            ) from error
        if not secrets.compare_digest(known, self.fingerprint):
            raise _wrong_key() if self.secret else _other_service(known, self.fingerprint)


class OrderedParameters(TypedDict):
    """The checksum and size of the file with a round's parameters, which clients download."""

    sha256: str
    bytes: int


class EvaluationFacts(TypedDict):
    """What the vector of a client has in an evaluation under masks: see `rayps_client.trainers.own_metrics`."""

    names: list[str]
    bound: float


class OrderFacts(TypedDict, total=False):
    """The content of an order, by which a client trains in one round.

    The worker writes the order. For each client, the service adds `job`, `client`, `name` and `seconds`, and signs it.
    """

    kind: str  # "round", or "evaluation": the model is evaluated and not trained
    round: int  # number of the round in its phase
    phase: int  # the round with which the phase began
    seed: int
    strategy: JsonObject
    since: int  # the earliest round to which the job may still return
    starts: list[list[int]]  # each start of the job: (its first round, the serial of its first order)
    tick: int  # step of the workload's learning-rate schedule; left out without a schedule
    personal: bool  # whether the job's clients have personal models
    parameters: OrderedParameters
    metrics: EvaluationFacts  # of an evaluation under masks
    secure: SecureFacts  # left out unless updates are aggregated securely
    statement: str  # SHA-256 of the job's data-use statement; left out without one
    serial: int  # number of the order in the job
    job: str
    client: int  # the client's number
    name: str  # the client's name
    seconds: float  # seconds left until the round's deadline
    trained: float  # set by the client: the seconds of its training
    ends: float  # set by the client: the time until which its update counts


class ModelFacts(TypedDict, total=False):
    """The facts of a job's newest checkpoint, signed for one client: see `rayps_client.exchange.global_model`."""

    kind: str  # "model"
    step: int  # the checkpoint's number
    round: int  # the number of rounds that the job had completed
    origin: list[int]  # the first round and epoch of the phase
    steps_per_epoch: int
    strategy: JsonObject
    seed: int
    starts: list[list[int]]  # as in an order
    files: dict[str, OrderedParameters]  # the checkpoint's files that the client downloads
    job: str
    client: int
    name: str


def is_client_token(text: str) -> bool:
    """Return whether a bearer token has the form of a client's token."""
    return text.startswith(f"{_SCHEME}.")


def fingerprint(public: str) -> str:
    """Return the SHA-256 of a public key, as text."""
    return text_of(hashlib.sha256(bytes_of(public)).digest())


def order_text(facts: OrderFacts | ModelFacts) -> str:
    """Return the canonical text of an order, or of facts of a checkpoint, which the service signs."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def verified(text: str, signature: str, public: str, expected: str) -> OrderFacts:
    """Check the fingerprint of the key `public` and the signature of `text`, then return the order in `text`.

    Raises:
        Unauthorized: the fingerprint or the signature is wrong. No part of the order may be used.
    """
    return cast(OrderFacts, _verified(text, signature, public, expected))


def verified_model(text: str, signature: str, public: str, expected: str) -> ModelFacts:
    """Check `text` as `verified` does, then return the facts of a checkpoint in it."""
    return cast(ModelFacts, _verified(text, signature, public, expected))


def _verified(text: str, signature: str, public: str, expected: str) -> Keywords:
    try:
        known, key = fingerprint(public), Ed25519PublicKey.from_public_bytes(bytes_of(public))
    except ValueError as error:
        raise Unauthorized(
            "the public key that the service sent cannot be decoded: this client refuses its orders"
        ) from error
    if not secrets.compare_digest(known, expected):
        raise _wrong_key()
    try:
        key.verify(bytes_of(signature), _DOMAIN + text.encode())
        facts: Keywords = json.loads(text)
    except (InvalidSignature, ValueError) as error:
        raise Unauthorized(
            "this client refused an order without the service's signature. A proxy between client and service may have "
            "changed the order",
            code="forged",
        ) from error
    if not isinstance(facts, dict):
        raise Unauthorized(
            "a signed order has another form than expected: use the same version of rayps as the service", code="forged"
        )
    return facts


def _wrong_key() -> Unauthorized:
    return Unauthorized(
        "this is not the service that made this token (its key differs): this client refuses its orders.\n"
        "Check the service's address, any proxy in between, and the token with its issuer",
        code="wrong_key",
    )


def _other_service(found: str, given: str) -> Unauthorized:
    """Return the error of a client without a token, which knows the service by the option --service-key."""
    return Unauthorized(
        f"--service-key is sha256:{given}, and the service at this address has the key sha256:{found}: this client "
        "refuses its orders.\nCheck the address, any proxy in between, and what `rayps members service` shows where "
        "the service runs",
        code="wrong_key",
    )


def _name(text: str) -> str | None:
    """Decode the client's name in a token. Return None if the name is not valid."""
    try:
        found = bytes_of(text).decode()
    except ValueError:
        return None
    return found if NAME.fullmatch(found) else None


def text_of(value: bytes) -> str:
    """Encode bytes as text that may stand in a URL (base64)."""
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def bytes_of(text: str) -> bytes:
    """Decode a text that `text_of` returned. Raises ValueError if `text` is not base64."""
    return base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
