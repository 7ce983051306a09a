"""Write the events of a worker's federated rounds: who the clients are, the cohort of each round, and warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rayps.data.clients import Clients
from rayps.federated.combine_replies import RoundAggregate
from rayps.federated.private_rounds import PrivateRounds
from rayps.federated.reply_source import Round

if TYPE_CHECKING:
    from rayps.worker.loops.federated_rounds import FederatedWorker

NAMES_IN_DATA = 50  # the largest number of client names in an event's data
NAMES_IN_MESSAGE = 3  # the largest number of client names in an event's message


class RoundEvents:
    """The events of one worker's rounds. A private job has none about single clients."""

    def __init__(
        self,
        w: FederatedWorker,
        names: Callable[[Iterable[int]], list[str]],
        clients: Clients | None,
        private: PrivateRounds | None,
    ) -> None:
        """`names` returns the names of clients by number. `clients` are those of the data; None: they are real."""
        self._w, self._names, self._clients, self._private = w, names, clients, private
        self._reported: set[int] = set()  # clients whose dropped states were reported
        self.begun, self._counted = 0, False  # number of rounds so far, and whether any of them changed the model

    def write_clients(self) -> None:
        """Write the event `clients`: the number of clients, and the number of samples that they have.

        In a private job, write the event `privacy` instead: what is claimed.
        """
        if self._private is not None:
            if self._w.rank == 0:
                claim = self._private.claim()
                self._w.event("privacy", self._private.summary(self._w.plan.end - self._w.position), **claim)
        elif self._clients is not None and self._w.rank == 0:
            summary = self._clients.summary()
            self._w.event(
                "clients", f"{summary['clients']} clients with {summary['rows']} samples ({summary['rule']})", **summary
            )

    def write_cohort(
        self, known: Round, outcome: RoundAggregate, rejected: list[tuple[int, str]], cohort: list[int], why: str
    ) -> None:
        """Write metrics and the event `cohort`: how many clients replied, and which were dropped or rejected."""
        w, names, asked = self._w, self._names, len(known.sampled)
        w.say(sampled=asked, replied=outcome.count, dropped=len(known.dropped), rejected=len(rejected))
        if outcome.void:
            w.say(void=1)  # that is why the round has no loss
        if w.rank:
            return
        message = f"round {w.position}: {outcome.count} of {asked} clients replied"
        if known.staleness is not None:  # most updates are of clients that started in earlier rounds
            message = f"round {w.position}: {outcome.count} updates arrived, {asked} clients started"
        ages = {} if known.staleness is None else {"staleness": {str(age): n for age, n in known.staleness.items()}}
        away = {
            key: [
                [name, why] for name, (_, why) in zip(names([k for k, _ in some[:NAMES_IN_DATA]]), some, strict=False)
            ]
            for key, some in (("dropped", known.dropped), ("rejected", rejected))
        }
        counts = {"dropped": len(known.dropped), "rejected": len(rejected)}
        message += "".join(f"; {n} {key}: {_name_clients(away[key], n)}" for key, n in counts.items() if n)
        w.event(
            "cohort",
            f"{message}: the model is unchanged, because {why}" if why else message,
            round=w.position,
            sampled=asked,
            replied=outcome.count,
            trained=names(cohort[:NAMES_IN_DATA]),
            seconds=known.end - known.begin,
            skipped=bool(why),
            **away,
            **ages,
        )

    def report_dropped_state(self, client: int) -> None:
        """Report that a client's new state is not finite and was dropped, for at most `NAMES_IN_MESSAGE` clients."""
        if self._private is not None or client in self._reported or len(self._reported) >= NAMES_IN_MESSAGE:
            return
        self._reported.add(client)
        who = self._names([client])[0]
        self._w.event(
            "warning",
            f"round {self._w.position}: the new state of client {who!r} contains values that are not finite, and was "
            "dropped; the client keeps its earlier state. Lower the learning rate, or a penalty's weight (ditto: lam)",
            round=self._w.position,
            client=who,
        )

    def end_round(self, why: str, rejected: list[tuple[int, str]]) -> None:
        """Count a round: `why` says why it did not change the model, or is "". At the run's end, warn if none did."""
        w = self._w
        self.begun, self._counted = self.begun + 1, self._counted or not why
        if w.position >= w.plan.end and not self._counted and w.rank == 0:
            self._warn(why, rejected)

    def _warn(self, why: str, rejected: list[tuple[int, str]]) -> None:
        """Write a warning at the end of a run in which no round changed the model; `why` is the last round's reason."""
        only = self.begun == 1
        rounds = (
            "the only round did not count"
            if only
            else f"none of {self.begun} rounds counted; the last round did not count"
        )
        if rejected:
            client, reason = rejected[0]
            who = self._names([client])[0]
            why += f" (client {who!r}: {reason}); lower the learning rate, or look for bad values"
        self._w.event("warning", f"the model was not trained: {rounds}, because {why}")


def _name_clients(away: list[list[str]], count: int) -> str:
    """Return up to three of `count` clients as text with their reasons, such as "a (deadline), b (left) and 4 more"."""
    more = count - NAMES_IN_MESSAGE
    return ", ".join(f"{name} ({why})" for name, why in away[:NAMES_IN_MESSAGE]) + (
        f" and {more} more" if more > 0 else ""
    )
