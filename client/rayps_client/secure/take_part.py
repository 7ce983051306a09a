"""A client's secure round, from its numbers to the last message: the stages one after another, over any transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rayps_client.errors import ConfigError
from rayps_client.secure.noise import NoiseSource, add_share
from rayps_client.secure.noise_sizes import margin_of
from rayps_client.secure.pinned_keys import PeerKeys
from rayps_client.secure.protocol import RoundName, Stage
from rayps_client.secure.quantise import ClientNumbers, Quantiser
from rayps_client.secure.release_record import ReleaseRecord
from rayps_client.secure.secure_facts import SecureFacts
from rayps_client.secure.secure_turn import SecureTurn, TurnRules
from rayps_client.values import Json


class StageExchange(Protocol):
    """The transport of a round's messages. Both methods retry until the service answers."""

    def put(self, stage: Stage, message: bytes) -> None:
        """Send this client's message of a stage. Raises Conflict if the stage is closed."""

    def get(self, stage: Stage) -> Mapping[str, Json]:
        """Wait for the server's answer after a stage. Raises Conflict if this client or the round has dropped out."""


@dataclass(frozen=True, slots=True)
class SecureClient:
    """A client in a job's secure rounds."""

    job: str
    number: int
    name: str
    record: ReleaseRecord
    pinned: PeerKeys | None = None

    def rules(self, serial: int, facts: SecureFacts) -> TurnRules:
        """Return this client's rules for a round.

        Raises:
            ConfigError: this client has pinned keys, but the round has no consistency check, or the reverse.
        """
        check_verify(self.pinned, facts["verify"])
        name = RoundName(self.job, serial)
        return TurnRules(name, self.number, self.name, facts["threshold"], max(2, facts["least"]), self.pinned)


def check_verify(pinned: PeerKeys | None, verify: bool) -> None:
    """Check that a client has keys exactly if its secure rounds let clients check each other (`verify`).

    Raises:
        ConfigError: it has pinned keys, but the rounds have no check, or it has none, and the others would refuse it.
    """
    if pinned is not None and not verify:
        raise ConfigError(
            "this client was started with --peers or --members-ca, but the job does not let clients check each other: "
            "give\nverify=true in the job's secure=secagg(...), or leave the option out",
            field="peers",
        )
    if pinned is None and verify:
        raise ConfigError(
            "in this job clients check each other's keys (verify=true), and this client was started without such keys: "
            "the others would refuse what it sends,\nand each round with it would be void. Start it with --peers FILE, "
            "or with --members-ca FILE and its certificate (--member FILE)",
            field="peers",
        )


def quantiser_of(facts: SecureFacts) -> Quantiser:
    """Return how a round's numbers are written. Raises ConfigError if their sum might wrap."""
    clients = facts["clients"]
    return Quantiser(
        facts["clip"],
        facts["bits"],
        facts["max_weight"],
        clients,
        norm=facts["norm"],
        counts=facts["counts"],
        margin=margin_of(facts["noise"], clients),
    )


def take_part(
    client: SecureClient, serial: int, facts: SecureFacts, trained: tuple[ClientNumbers, str], exchange: StageExchange
) -> None:
    """Add this client's numbers to the sum of a round, and its share of the noise if the round has such noise.

    `trained` has the numbers, and the name of what they were trained from (`ReleaseRecord.send_update`).

    Raises:
        Conflict: the client is too late, or has begun this round or sent this update before.
        VoidRound: too few clients are left, or a check of another client's message has failed.
        TrainingError: the numbers are not finite.
        Unauthorized: the service has not signed an answer.
        ConfigError: `facts` do not fit this client.
    """
    quantiser, (numbers, update) = quantiser_of(facts), trained
    integers = quantiser.integers(numbers)
    add_share(integers, facts["noise"], NoiseSource())
    turn = SecureTurn(client.rules(serial, facts), client.record)
    exchange.put(Stage.ADVERTISE, turn.advertise())
    exchange.put(Stage.SHARE, turn.share(exchange.get(Stage.ADVERTISE)))
    answer = exchange.get(Stage.SHARE)
    vector = turn.mask(answer, quantiser.words(integers), update)
    exchange.put(Stage.MASK, vector.tobytes())
    survivors = exchange.get(Stage.MASK)
    confirmed = None
    if facts["verify"]:
        exchange.put(Stage.CONFIRM, turn.confirm(survivors))
        confirmed = exchange.get(Stage.CONFIRM)
    exchange.put(Stage.UNMASK, turn.unmask(survivors, confirmed))
