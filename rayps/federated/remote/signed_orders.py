"""Signed orders: a real client accepts only orders signed by the service whose key its token names.

Nothing is encrypted here: updates and token can be read on the network unless TLS is used. Ed25519 (RFC 8032) signs a
prefix of rayps and the order's text. The token carries the SHA-256 fingerprint of the public key, so a proxy between
service and client cannot give it another model, other options or an old round.
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
from typing import Self, TypedDict

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rayps.core.errors import ConfigError, Unauthorized
from rayps.core.values import JsonObject

_DOMAIN = b"rayps: an order to a federated client, 1\n"
_SCHEME = "rpc"
ANY_JOB = "any"
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 _.-]{0,62}[A-Za-z0-9])?")  # name of a client, and of its folder


class Key:
    """The service's private key; it never leaves the service."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = text_of(private.public_key().public_bytes_raw())
        self.fingerprint = fingerprint(self.public)

    @classmethod
    def kept(cls, path: Path) -> Self:
        """Return the key stored in `path`, a file of mode 0600; create the file if there is none.

        Raises:
            ConfigError: the file holds no key.
        """
        if not path.exists():
            part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(Ed25519PrivateKey.generate().private_bytes_raw())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(part, path)  # if two create one at the same time, one wins
            except FileExistsError:
                pass
            finally:
                part.unlink()
        try:
            return cls(Ed25519PrivateKey.from_private_bytes(path.read_bytes()))
        except ValueError as error:
            raise ConfigError(
                f"{path} holds no key of 32 bytes: move it away, and the service creates a new one (existing client "
                "tokens\nare invalid then)"
            ) from error

    def sign(self, text: str) -> str:
        """Return the signature of an order's text."""
        return text_of(self._private.sign(_DOMAIN + text.encode()))


@dataclass(frozen=True, slots=True)
class ClientToken:
    """A client's token: its secret, its job (None: any), its client (None: any), and the service key's fingerprint."""

    secret: str
    job: str | None
    fingerprint: str
    name: str | None = None

    def __str__(self) -> str:
        named = "" if self.name is None else f".{text_of(self.name.encode())}"
        return f"{_SCHEME}.{self.job or ANY_JOB}.{self.secret}.{self.fingerprint}{named}"

    @classmethod
    def made(cls, job: str | None, key: Key, name: str | None = None) -> Self:
        """Create a new token."""
        return cls(secrets.token_urlsafe(32), job, key.fingerprint, name)

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a token's text. Raises ConfigError: the text is not a client token."""
        parts = text.strip().split(".")
        name = _name(parts[4]) if len(parts) == 5 else None
        well = len(parts) == 4 or name is not None
        if not well or parts[0] != _SCHEME or not all(parts) or not text.strip().isascii():
            raise ConfigError(
                "this is not a client token (rpc.JOB.SECRET.FINGERPRINT): make one with `rayps token create --job ID`, "
                "where the service runs",
                field="token",
            )
        return cls(parts[2], None if parts[1] == ANY_JOB else parts[1], parts[3], name)

    def check(self, public: str) -> None:
        """Check the service's public key.

        Raises Unauthorized: it is not the key of the service that created this token.
        """
        try:
            known = fingerprint(public)
        except ValueError as error:
            raise Unauthorized("the service's key cannot be read: its orders are refused") from error
        if not secrets.compare_digest(known, self.fingerprint):
            raise _wrong_key()


class OrderedParameters(TypedDict):
    """A description of the file of parameters with which a round begins."""

    sha256: str
    bytes: int


class OrderFacts(TypedDict, total=False):
    """The content of an order.

    The service adds `job`, `client`, `name` and `seconds` for each client, and signs the order.
    """

    kind: str
    round: int
    phase: int  # the round with which the phase began
    seed: int
    strategy: JsonObject
    since: int
    starts: list[list[int]]
    tick: int
    parameters: OrderedParameters
    serial: int
    job: str
    client: int
    name: str
    seconds: float  # seconds left until the round's deadline
    trained: float  # set by the client: the seconds of its training
    ends: float  # set by the client: until when its update is in time


def is_client_token(text: str) -> bool:
    """Return whether a bearer token is a client's token."""
    return text.startswith(f"{_SCHEME}.")


def fingerprint(public: str) -> str:
    """Return the SHA-256 of a public key."""
    return text_of(hashlib.sha256(bytes_of(public)).digest())


def order_text(facts: OrderFacts) -> str:
    """Return an order as its canonical text."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def verified(text: str, signature: str, public: str, expected: str) -> OrderFacts:
    """Return the order in `text`, after checking the key's fingerprint and the signature.

    Raises:
        Unauthorized: one of them is wrong; no part of the order may be used.
    """
    try:
        known, key = fingerprint(public), Ed25519PublicKey.from_public_bytes(bytes_of(public))
    except ValueError as error:
        raise Unauthorized("the service's key cannot be read: its orders are refused") from error
    if not secrets.compare_digest(known, expected):
        raise _wrong_key()
    try:
        key.verify(bytes_of(signature), _DOMAIN + text.encode())
        facts: OrderFacts = json.loads(text)
    except (InvalidSignature, ValueError) as error:
        raise Unauthorized(
            "an order without the service's signature was refused. A proxy between here and the service may have "
            "changed it",
            code="forged",
        ) from error
    if not isinstance(facts, dict):
        raise Unauthorized(
            "a signed order cannot be read: the versions of rayps here and at the service differ", code="forged"
        )
    return facts


def _wrong_key() -> Unauthorized:
    return Unauthorized(
        "this is not the service that made this token (its key is another): its orders are refused.\n"
        "Check the address, a proxy on the way, and the token with its issuer",
        code="wrong_key",
    )


def _name(text: str) -> str | None:
    """Return the client's name in a token; None if the token has no name."""
    try:
        found = bytes_of(text).decode()
    except ValueError:
        return None
    return found if NAME.fullmatch(found) else None


def text_of(value: bytes) -> str:
    """Encode bytes as text for URLs."""
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def bytes_of(text: str) -> bytes:
    """Decode the result of `text_of`. Raises ValueError: `text` is not such a text."""
    return base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
