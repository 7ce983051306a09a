"""The handshake of a connection: both sides prove that they know the job's secret, then compare their generations.

Nothing after the handshake is encrypted. The functions `caller` and `listener` are generators without I/O. They yield
bytes to send, or the number of bytes that they need next. A listener can therefore run many handshakes at once without
threads.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass

from rayps_client.errors import LinkError, StaleGeneration

MAGIC = b"rayps-1\n"
NAME_BYTES = 128
_NONCE = 32
_HELLO = struct.Struct(f"<8s{_NONCE}sIB{NAME_BYTES}s")  # magic, nonce, generation, shared, name
_ANSWER = struct.Struct(f"<8s{_NONCE}s32s{NAME_BYTES}s")  # magic, nonce, proof, name
_PROOF = struct.Struct("<32s")
_VERDICT = struct.Struct("<BI")  # accepted or not, the listener's generation

Steps = Generator["bytes | int", bytes, "Greeted"]


@dataclass(frozen=True, slots=True)
class Greeted:
    """The result of a handshake: what one side now knows about the other."""

    peer: str
    generation: int
    accepted: bool  # whether the listener accepted the caller's generation
    shared: bool  # whether the caller asked for shared memory


def pack_name(name: str) -> bytes:
    """Encode a peer's name as at most 128 bytes."""
    return name.encode()[:NAME_BYTES]


def _unpack_name(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _prove(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.new(secret, b"|".join((MAGIC, role, *parts)), hashlib.sha256).digest()


def caller(name: str, secret: bytes, generation: int, shared: bool) -> Steps:
    """Run the connecting side. `shared` asks for shared memory. Raises LinkError if the listener has another secret."""
    nonce, mine = os.urandom(_NONCE), pack_name(name)
    hello = _HELLO.pack(MAGIC, nonce, generation, shared, mine)
    yield hello
    magic, other, proof, raw = _ANSWER.unpack((yield _ANSWER.size))
    peer = _unpack_name(raw)
    if magic != MAGIC or not hmac.compare_digest(proof, _prove(secret, b"listener", hello, other, raw)):
        raise LinkError(f"{peer!r} does not know this job's secret: it belongs to another job", peer=peer)
    yield _prove(secret, b"caller", other, hello)
    accepted, theirs = _VERDICT.unpack((yield _VERDICT.size))
    return Greeted(peer, theirs, bool(accepted), shared)


def listener(name: str, secret: bytes, generation: Callable[[], int]) -> Steps:
    """Run the accepting side.

    Raises LinkError if the caller has another protocol or another secret, StaleGeneration if it has another generation.
    """
    hello = yield _HELLO.size
    magic, _, theirs, shared, raw = _HELLO.unpack(hello)
    peer = _unpack_name(raw)
    if magic != MAGIC:
        raise LinkError(
            f"refused a caller without the protocol {MAGIC.decode().strip()}: it is not rayps, or another version",
            peer=peer,
        )
    nonce, mine = os.urandom(_NONCE), pack_name(name).ljust(NAME_BYTES, b"\0")
    yield _ANSWER.pack(MAGIC, nonce, _prove(secret, b"listener", hello, nonce, mine), mine)
    proof = yield _PROOF.size
    if not hmac.compare_digest(proof, _prove(secret, b"caller", nonce, hello)):
        raise LinkError(f"{peer!r} does not know this job's secret and was refused", peer=peer)
    current = generation()
    yield _VERDICT.pack(theirs == current, current)
    if theirs != current:
        raise StaleGeneration(
            f"refused the connection of {peer!r}: it has generation {theirs}, but this group has generation {current}",
            peer=peer,
            generation=theirs,
            expected=current,
        )
    return Greeted(peer, theirs, True, bool(shared))
