"""How a real client replies in a secure job: not with its update, but by taking part in the round's sum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rayps_client.errors import ConfigError, Conflict, NotFound, TrainingError, Unauthorized
from rayps_client.secure.lease import LeaseThread
from rayps_client.secure.pinned_keys import PeerKeys
from rayps_client.secure.quantise import ClientNumbers
from rayps_client.secure.release_record import ReleaseRecord
from rayps_client.secure.service_stages import Connection, ServiceStages
from rayps_client.secure.sum_names import name_vector
from rayps_client.secure.take_part import SecureClient, check_verify, take_part

Sending = Callable[[Mapping[str, Any], bytes], None]

_OWN_REASONS = ("begun", "repeated", "refused")  # codes of Conflict by which this client itself takes no part


@dataclass(frozen=True, slots=True)
class JoinedAs:
    """A client in its job, since it has joined."""

    job: str
    number: int
    name: str
    headers: Mapping[str, str]  # which name this client in requests


class SecureReplies:
    """The replies of one client in a secure job."""

    def __init__(
        self, connection: Connection, folder: Path, pinned: PeerKeys | None = None, sending: Sending | None = None
    ) -> None:
        """`folder`: the client's own folder. `pinned`: the keys by which clients check each other, or None.

        `sending` is called with an order and the masked update, before that is sent.
        """
        self._connection, self._pinned, self._sending = connection, pinned, sending
        self._record = ReleaseRecord(folder)
        self.required = False  # whether the job is secure: the client joins without the number of its samples

    def read_key(self, key: Mapping[str, Any]) -> None:
        """Learn whether the job is secure from `key`, the service's answer with its public key.

        Raises:
            ConfigError: this client has pinned keys, but the job is not secure or does not use them, or the reverse.
        """
        self.required = bool(key.get("secure"))
        if self._pinned is not None and not self.required:
            raise ConfigError(
                "this client was started with --peers or --members-ca, but the job would show its updates to the "
                "service: submit the job with\nsecure=secagg(clip=...,verify=true), or leave the option out",
                field="peers",
            )
        if self.required and "verify" in key:  # an older service does not say it
            check_verify(self._pinned, bool(key["verify"]))

    def expects(self, order: Mapping[str, Any]) -> bool:
        """Return whether an order is for a secure round.

        Raises:
            Unauthorized: the order is for a plain round, in a job that was secure when this client joined.
            ConfigError: clients check each other's keys in the round and this client has none, or the reverse.
        """
        found = "secure" in order
        if self.required and not found:
            raise Unauthorized(
                "this client refused an order of the service: it would show the client's update, but the job was "
                "secure when the client joined",
                code="refused",
            )
        if found:
            check_verify(self._pinned, bool(order["secure"]["verify"]))
        return found

    def is_first(self, numbers: bytes) -> bool:
        """Record that these numbers are about to be sent under masks. Return False if they were before.

        So a client adds the metrics of its personal model to one sum only, though that model may stay the same while
        the job's model changes.
        """
        return self._record.add_once(f"numbers {hashlib.sha256(numbers).hexdigest()}")

    def withdraw(self, order: Mapping[str, Any], joined: JoinedAs, reason: str) -> None:
        """Tell the service that this client takes no part in a secure order, so that no stage waits for it."""
        about = (joined.job, joined.number, int(order["serial"]))
        ServiceStages(self._connection, joined.headers, about, _never).withdraw(reason)

    def send(
        self,
        order: Mapping[str, Any],
        numbers: ClientNumbers,
        joined: JoinedAs,
        verify: Callable[[str, str], Mapping[str, Any]],
    ) -> str | None:
        """Take part in the sum of a round. Return None, or why this client's numbers are not in it.

        `verify` checks the service's signature of a text, and returns the facts in the text.

        Raises:
            Unauthorized: the service has not signed an answer.
            ConfigError: the order does not fit this client's options.
        """
        serial = int(order["serial"])
        sending = None if self._sending is None else partial(self._sending, order)
        about = (joined.job, joined.number, serial)
        stages = ServiceStages(self._connection, joined.headers, about, verify, sending=sending)
        client = SecureClient(joined.job, joined.number, joined.name, self._record, self._pinned)
        try:
            with LeaseThread(stages.renew):
                take_part(client, serial, order["secure"], (numbers, name_vector(order)), stages)
        except (Conflict, NotFound, TrainingError) as error:
            if isinstance(error, TrainingError) or error.data.get("code") in _OWN_REASONS:
                stages.withdraw(error.message, error.data.get("refused", ()))
            elif error.data.get("code") not in ("late", "no_order", "not_asked"):
                raise
            return error.message
        return None


def _never(text: str, signature: str) -> Mapping[str, Any]:
    raise AssertionError("a client that takes no part gets no answers")
