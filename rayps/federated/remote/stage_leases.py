"""Which clients of a secure round are silent: by the leases that they renew, without a clock. Pure.

A client in the stages of a round renews its lease every few seconds, from a thread (`rayps_client.secure.lease`). The
service counts the renewals. Here a *beat* has passed when a client that has renewed in it renews again. A client that
has not renewed for more than `MISSED` beats is silent: another client has renewed so often since. So nobody becomes
silent while the service is away, or while this process looks at nothing; and a client that has never renewed is
never silent.
"""

from __future__ import annotations

from collections.abc import Mapping

MISSED = 5  # a client is silent when it has missed more beats than this


class StageLeases:
    """The leases of the clients of one round."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # per client, its renewals at the last look
        self._newest: dict[int, int] = {}  # per client, the beat of its newest renewal
        self._beat = 0
        self._renewed: set[int] = set()  # the clients that have renewed in this beat

    def silent(self, renewals: Mapping[int, int]) -> set[int]:
        """Return the silent clients. `renewals`: how often each client has renewed its lease so far."""
        changed = {number for number, count in renewals.items() if count > self._counts.get(number, 0)}
        if changed & self._renewed:
            self._beat, self._renewed = self._beat + 1, set()
        self._renewed |= changed
        self._counts = dict(renewals)
        self._newest |= dict.fromkeys(changed, self._beat)
        return {number for number, beat in self._newest.items() if self._beat - beat > MISSED}
