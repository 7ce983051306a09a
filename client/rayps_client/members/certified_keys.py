"""The keys by which clients check each other in secure rounds, from certificates: `rayps client --members-ca FILE`.

`rayps_client.secure.pinned_keys` needs the keys of all clients beforehand. Here each client sends its certificate with
each signature, and the others check that an authority which they trust themselves has issued it for that name. A
service that lies cannot hand out keys of its own: it would need a certificate of that authority.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from rayps_client.errors import Unauthorized
from rayps_client.members.member_certificates import MemberCertificate, MembersCa
from rayps_client.members.member_key import MemberKey
from rayps_client.members.revocations import Revocations

_DOMAIN = b"rayps: a member to other members, 1\n"
_LENGTH = struct.Struct(">H")


class CertifiedKeys:
    """A member's key, and the authorities that it trusts: `rayps_client.secure.pinned_keys.PeerKeys`.

    A signature is the length of the certificate (2 bytes), the certificate (DER), and the signature proper.
    """

    def __init__(
        self, own: MemberKey, trusted: MembersCa, revoked: Revocations, clock: Callable[[], float] = time.time
    ) -> None:
        self._own, self._trusted, self._revoked, self._clock = own, trusted, revoked, clock

    def sign(self, text: bytes) -> bytes:
        """Return this client's signature, with its certificate."""
        der = self._own.member.der
        return _LENGTH.pack(len(der)) + der + self._own.sign(_DOMAIN + text)

    def verify(self, name: str, text: bytes, signature: bytes) -> bool:
        """Return whether the client `name` has signed `text`, with a trusted certificate for that name."""
        if len(signature) < _LENGTH.size:
            return False
        end = _LENGTH.size + _LENGTH.unpack_from(signature)[0]
        try:
            member = MemberCertificate.read(signature[_LENGTH.size : end])
            self._trusted.check(member, self._clock())
        except Unauthorized:
            return False
        revoked = member.serial in self._revoked.revoked()
        return member.name == name and not revoked and member.verify(_DOMAIN + text, signature[end:])

    def lacks(self, name: str) -> bool:
        """Return False: each signature contains the certificate that it is checked with."""
        return False
