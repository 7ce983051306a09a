"""Keys that two clients agree on, and the masks that these keys and seeds expand to.

X25519 (RFC 7748) -> HKDF-SHA256 (RFC 5869) -> AES-256 in counter mode, whose output is read as words of the modulus.
Two neighbours derive the same mask; the one with the lower number adds it and the other subtracts it. Each client also
adds a mask of its own, from a random seed. A key is used for one round, and for one purpose: HKDF's info names it.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from rayps_client.secure.quantise import Words

KEY_BYTES = 32
_BLOCK = 1 << 18  # words that are expanded at once


def agree(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return the key [32 bytes] that the owners of two X25519 keys [32 bytes each] share for one purpose.

    Raises:
        ValueError: `public` is not a key.
    """
    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=purpose).derive(secret)


def is_key(public: bytes) -> bool:
    """Return whether `public` [32 bytes] is an X25519 key. A point of low order is none: it would give zeros."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def new_private() -> bytes:
    """Return a new private X25519 key [32 bytes]."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    """Return the public X25519 key [32 bytes] of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


class Keystream:
    """The output of AES-256 in counter mode under one key, from the counter 0."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        return self._cipher.update(bytes(count))


def add_mask(vector: Words, key: bytes, sign: int) -> None:
    """Add (`sign` 1) or subtract (`sign` -1) the mask of `key`, in place, modulo 2^32 or 2^64."""
    stream, size = Keystream(key), vector.dtype.itemsize
    for lo in range(0, len(vector), _BLOCK):
        part = vector[lo : lo + _BLOCK]
        mask = np.frombuffer(stream.read(len(part) * size), dtype=vector.dtype)
        if sign > 0:
            np.add(part, mask, out=part)
        else:
            np.subtract(part, mask, out=part)
