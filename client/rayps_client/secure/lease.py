"""A thread that tells the service every few seconds that this client is in the stages of a secure round.

A client that is killed, or whose line is cut, cannot say so. The stages wait for it no longer than until the other
clients have renewed their leases several times (`rayps.federated.remote.stage_leases`). The thread renews while the
client computes its masks or sends them.

The same thread, at longer intervals, tells the service that a client is present while it trains or evaluates, in rounds
of every kind: a client that sends no request for 20 s is absent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

RENEW_SECONDS = 2.0  # between two renewals
PRESENT_SECONDS = 6.0  # between two renewals of a client that trains


class LeaseThread:
    """Calls a function at once and every `seconds`, within a `with` block."""

    def __init__(self, renew: Callable[[], object], seconds: float | None = None) -> None:
        """`renew` ends within a few seconds and raises nothing. `seconds`: None means `RENEW_SECONDS`."""
        self._renew, self._over = renew, threading.Event()
        self._seconds = RENEW_SECONDS if seconds is None else seconds
        self._thread = threading.Thread(target=self._run, daemon=True, name="rayps-lease")

    def __enter__(self) -> LeaseThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(RENEW_SECONDS)

    def _run(self) -> None:
        while not self._over.is_set():
            self._renew()
            self._over.wait(self._seconds)
