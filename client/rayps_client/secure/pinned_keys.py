"""The long-term keys of clients, pinned on each client: against a server that lies.

An honest-but-curious server needs none of this. An active server could hand out keys of its own in the place of a
neighbour's, or tell clients different survivors and so collect both kinds of shares about one client. Clients therefore
sign their fresh keys and the survivors with Ed25519 keys (RFC 8032) whose public halves reached the others by another
way than the server: in a file, `rayps client --peers FILE`, with one line `NAME KEY` for each client; or by
certificates (`rayps_client.members.certified_keys`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rayps_client.errors import ConfigError
from rayps_client.secure.protocol import bytes_of, text_of


class PeerKeys(Protocol):
    """A client's own long-term key, and the means to check the signatures of the others."""

    def sign(self, text: bytes) -> bytes:
        """Return this client's signature."""

    def verify(self, name: str, text: bytes, signature: bytes) -> bool:
        """Return whether the client `name` has signed `text`."""

    def lacks(self, name: str) -> bool:
        """Return whether no signature of the client `name` can be checked, because its key is not known."""


@dataclass(frozen=True, slots=True)
class PinnedKeys:
    """A client's own long-term key, and the public keys of the clients with which it aggregates, by name."""

    private: Ed25519PrivateKey
    peers: Mapping[str, Ed25519PublicKey]

    def sign(self, text: bytes) -> bytes:
        """Return this client's signature."""
        return self.private.sign(text)

    def verify(self, name: str, text: bytes, signature: bytes) -> bool:
        """Return whether the client `name` has signed `text`. False too if its key is not pinned."""
        try:
            self.peers[name].verify(signature, text)
        except (KeyError, InvalidSignature):
            return False
        return True

    def lacks(self, name: str) -> bool:
        """Return whether the key of the client `name` is not pinned."""
        return name not in self.peers


def pinned_keys(peers: Path, name: str, own: Path) -> PinnedKeys:
    """Return the keys of the client `name`: its own, from the file `own`, which is created, and those in `peers`.

    Raises:
        ConfigError: there is no file `peers`, or it lacks this client's own key, which the error shows, or it cannot
            be read.
    """
    private = _load_or_create(own)
    line = f"{name} {public_text(private)}"
    if not peers.exists():
        raise ConfigError(
            f"there is no file {peers}: make it, with one line for each client. Send this client's own line to all of "
            f"them by a way that\nthe service cannot change:\n{line}",
            field="peers",
        )
    known = read_peers(peers)
    if name not in known or known[name].public_bytes_raw() != private.public_key().public_bytes_raw():
        raise ConfigError(
            f"{peers} lacks this client's own key: send this line to all clients by a way that the service cannot "
            f"change, and put it there with theirs:\n{line}",
            field="peers",
        )
    return PinnedKeys(private, known)


def _load_or_create(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(Ed25519PrivateKey.generate().private_bytes_raw())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    try:
        return Ed25519PrivateKey.from_private_bytes(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} does not contain a key of 32 bytes: move the file away", field="peers") from error


def read_peers(path: Path) -> dict[str, Ed25519PublicKey]:
    """Return the public keys in a file with one line `NAME KEY` for each client; a line may be empty or a # comment.

    Raises:
        ConfigError: the file cannot be read, a line has another form, or two lines have different keys for one name.
    """
    found: dict[str, Ed25519PublicKey] = {}
    where: dict[str, int] = {}  # the line of each name
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"the keys of the other clients cannot be read from {path}: {error}", field="peers"
        ) from error
    for count, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        text, _, encoded = line.strip().rpartition(" ")
        name = text.strip()
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes_of(encoded))
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {count}: {line!r} is not `NAME KEY`, with the key that that client shows at its start",
                field="peers",
            ) from error
        if name in found and found[name].public_bytes_raw() != key.public_bytes_raw():
            raise ConfigError(
                f"{path}, lines {where[name]} and {count}: there are two different keys for the client {name!r}: ask "
                "it for the key that it shows\nat its start, and delete the other line",
                field="peers",
            )
        found[name] = key
        where.setdefault(name, count)
    return found


def public_text(private: Ed25519PrivateKey) -> str:
    """Return the public half of a long-term key, as it stands in a file of peers."""
    return text_of(private.public_key().public_bytes_raw())
