"""Get the replies of real clients for the engine: write orders into the job's mailbox, and read updates from it.

Like simulated clients, the clients of a round are drawn by the seed and the round, but only connected clients are
drawn. Time is real: a round ends when all asked clients have replied, or at its deadline. Later updates are refused. An
update is rejected, before the rule is applied, if it has another shape or more samples than the client reported when it
joined.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rayps_client.errors import ConfigError, StaleGeneration, TrainingError
from rayps_client.exchange.signed_orders import EVALUATION, ROUND, OrderFacts
from rayps_client.secure.quantise import SummedNumbers
from torch import Tensor

from rayps.core.metrics import Totals
from rayps.core.time.member_times import CLIENTS
from rayps.data.clients import ClientSummary
from rayps.federated import remote_codec
from rayps.federated.client import ClientReply
from rayps.federated.client_evaluation import MOST_SECONDS, ClientEvaluation, cut_metrics
from rayps.federated.combine_replies import RoundAggregate
from rayps.federated.population.cohort import Ints, cohort_size, first
from rayps.federated.remote.client_state import WHY_SILENT
from rayps.federated.remote.excluded_clients import COMPARE_KEYS, exclude_blamed, refusals_text
from rayps.federated.remote.join_options import JoinOptions
from rayps.federated.remote.mailbox import FOLDER, JoinedClient, Mailbox, RoundOrder
from rayps.federated.reply_source import Round, TrainingTask
from rayps.federated.round_codings import RoundCodings
from rayps.federated.secure_rounds import SecureRounds, SecureTotal, aggregate_of, listed, secure_rounds_of

if TYPE_CHECKING:
    from rayps.federated.engine import FederatedEngine

PAUSE = 0.05  # seconds between two polls
_VOID_PAUSE, _MOST_VOID_PAUSE = 1.0, 60.0  # seconds after the first of void rounds in a row, and at most
_LISTED = 60  # the largest number of clients in a summary


class RemoteReplies:
    """The real clients of a job, for its worker. `round` sends an order and waits; `replies` yields the updates."""

    rule = "real clients, with data of their own"

    def __init__(self, engine: FederatedEngine) -> None:
        """Open the mailbox.

        Raises ConfigError if there is no service, or if this machine cannot use the mailbox's folder.
        """
        self._engine, w = engine, engine.w
        # counts the time inside a block as a wait for the peer with this name
        self.waits_for: Callable[[str], AbstractContextManager[object]] = nullcontext
        self._given = engine.federation
        self._mailbox = mailbox_of(w.plan.peers.mailbox)
        self._members: list[JoinedClient] = self._mailbox.members()
        self._first = True
        self._reported: list[tuple[str, int]] = []  # names and samples of the clients in the last event `clients`
        self.refused: list[tuple[int, str]] = []  # clients whose updates of this round cannot be used, and why
        self._open: RoundOrder | None = None
        self._files: dict[int, Path] = {}  # from client to the file of its update
        self._usable: list[int] = []  # clients whose updates have the right form
        # w_t and buffers of the open round, which have the expected form of an update
        self._like: tuple[Tensor, Mapping[str, Tensor]] = engine.w.flat.vector, {}
        self._codings = RoundCodings(self._given.real)
        self._secure = secure_rounds_of(engine, self._mailbox)  # None: the service sees each update
        self._voids = 0  # void rounds in a row, up to now

    # ---- clients

    @property
    def _joining(self) -> JoinOptions:
        """How the job waits for clients."""
        assert self._given.joining is not None, "its clients are remote"
        return self._given.joining

    @property
    def count(self) -> int:
        """The number of clients that have joined."""
        return len(self._members)

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of the clients with these numbers."""
        return [self._members[number].name for number in numbers]

    def _summary(self) -> ClientSummary:
        """Return a summary of the clients that have joined, in the form of `Clients.summary`, without labels."""
        sizes = np.asarray([member.samples for member in self._members], dtype=np.int64)
        names = [member.name for member in self._members[:_LISTED]]
        return {
            "clients": self.count,
            "rows": int(sizes.sum()),
            "rule": self.rule,
            "names": names,
            "sizes": sizes[:_LISTED].tolist(),
            "labels": [],
            "counts": [],
            "smallest": int(sizes.min()),
            "median": float(np.median(sizes)),
            "largest": int(sizes.max()),
        }

    # ---- a round

    def round(self, t: int, w_t: Tensor, shared: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Round:
        """Send an order to the clients of round `t`, and wait until they have replied or the deadline has passed.

        Raises:
            TrainingError: too few clients connected within `wait` seconds.
        """
        self._pause_after_void(t)
        with self.waits_for(CLIENTS):
            there = self._wait_for_clients(t)
        w, fraction, private = self._engine.w, self._given.fraction, self._engine.private
        if private is None:
            chosen = first(w.plan.seed, t, there, cohort_size(len(there), fraction)).tolist()
        else:  # the number that is asked is fixed, as the divisor is
            there = private.eligible(there)
            chosen = first(w.plan.seed, t, there, cohort_size(self._joining.least, fraction)).tolist()
            private.asked(chosen)
        raw, most = self._prepare(w_t, shared, buffers)
        facts = self._facts(ROUND, t, self._mailbox.starts(w.position, self._first))
        self._first = False
        asked = dict(zip(chosen, self.names(chosen), strict=True))
        if self._secure is not None:
            return self._secure_round(self._secure, facts, asked, raw)
        order = self._mailbox.open_round(facts, asked, self._given.deadline, most, raw)
        with self.waits_for(CLIENTS):
            self._wait_for(order)
        self._files, self._open = self._mailbox.close_round(order.serial), order
        self._mailbox.write_waits(None)
        return self._check_updates(order)

    def _prepare(self, w_t: Tensor, shared: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> tuple[bytes, int]:
        """Return the parameters that clients receive, encoded, and the largest size of an update in bytes."""
        side, part = self._given.client_side, self._engine.private_layers
        given = {name: value for name, value in shared.items() if name in side.sums}
        layout, codings = self._engine.w.flat.layout, self._codings
        raw = remote_codec.encode_parameters(w_t, layout, given, buffers, coding=codings.download)
        self._like = part.cut(w_t), {} if side.keeps_buffers else part.without_private(buffers)
        return raw, remote_codec.most_bytes(self._like[0], side.sums, self._like[1], codings.update)

    def _facts(self, kind: str, t: int, starts: list[list[int]]) -> OrderFacts:
        """Return the facts of the orders of round `t`, by which clients train or evaluate."""
        w = self._engine.w
        facts: OrderFacts = {
            "kind": kind,
            "round": t,
            "phase": w.plan.origin[0],
            "seed": w.plan.seed,
            "strategy": self._engine.strategy.to_wire(),
            "since": self._since(w.position),
            "starts": starts,
            "personal": self._given.client_side.measured,
        }
        if self._engine.trainer.scheduled:
            facts["tick"] = self._engine.tick(t)
        return facts

    def evaluate(self, of_job: Totals) -> Totals:
        """Let the connected clients evaluate the model on their own rows, if the strategy says so.

        Return a dict from `client_*` and `personal_*` metric to its total.
        """
        engine, private = self._engine, self._engine.private
        if not self._given.real.client_evaluation:
            return {}
        self._members = self._mailbox.members()
        asked = {each.number: each.name for each in self._members if self._mailbox.state(each.number) == "here"}
        if private is not None and len(asked) >= private.job.drawn and private.exhausted() is None:
            there = np.asarray(sorted(asked), dtype=np.int64)
            chosen = first(engine.w.plan.seed, engine.w.position, there, private.job.drawn).tolist()
            asked = {number: asked[number] for number in chosen}
        elif private is not None:
            asked = {}
        if not asked:
            return {}
        facts = self._facts(EVALUATION, engine.at(engine.w.position), self._mailbox.known_starts())
        raw = remote_codec.encode_parameters(
            engine.w.flat.vector, engine.w.flat.layout, {}, engine.trainer.copy_buffers()
        )
        evaluation = ClientEvaluation(self._mailbox, self._given, min(self._given.deadline, MOST_SECONDS), private)
        found, void = evaluation.run(facts, asked, raw, of_job, (self._wait_with, self._wait_for))
        self._mailbox.write_waits(None)
        if void:
            engine.w.event("warning", f"round {engine.w.position}: no metrics of clients, because {void}")
        bound = self._given.real.metric_bound
        if (self._given.secure is not None or private is not None) and (cut := cut_metrics(of_job, found, bound)):
            engine.w.event("warning", f"round {engine.w.position}: {cut}")
        return found

    def _secure_round(self, secure: SecureRounds, facts: OrderFacts, asked: dict[int, str], raw: bytes) -> Round:
        """Run a secure round, or take the stored sum of an earlier round from the same parameters."""
        begun, refused = time.time(), ""
        total, order = secure.sum_of(facts, asked, self._given.deadline, raw, self._wait_with)
        if order is not None:
            begun = order.begun
            for notice in exclude_blamed(self._mailbox, order, total.refusals, frozenset(total.survivors)):
                self._engine.w.event("warning", notice.text, **notice.facts)
            self._open, refused = order, refusals_text(total.refusals, order.sampled)
        self._mailbox.write_waits(None)
        self._mailbox.record_secure_round(total.void, refused)
        secure.total, self.refused = total, []
        self._voids = 0 if total.void is None else self._voids + 1
        if total.void is not None and self._engine.private is not None:  # other jobs have the event `cohort`
            self._report_void(total)
        return Round(total.sampled, sorted(total.dropped.items()), begun, time.time(), total.survivors)

    def _report_void(self, total: SecureTotal) -> None:
        """Write the event that a round of a private job is void.

        It has no reason that a client has given: that may depend on the client's rows (values that are not finite).
        """
        position, dropped = self._engine.w.position, self.names(total.dropped)
        who = f"; {len(dropped)} of {len(total.sampled)} clients dropped out: {listed(dropped)}" if dropped else ""
        self._engine.w.event(
            "warning",
            f"round {position} is void, and the model is unchanged, because {total.void}{who}",
            round=position,
            void=total.void,
            dropped=dropped[:_LISTED],
        )

    def summed(self, w_t: Tensor) -> tuple[RoundAggregate, SummedNumbers | None] | None:
        """Return the result of a secure round, and its sums unless it is void. None: the rounds are not secure."""
        total = None if self._secure is None else self._secure.total
        if total is None:
            return None
        return aggregate_of(total, self._engine.private_layers.cut(w_t)), total.numbers

    def base(self, version: int, w_t: Tensor) -> Tensor:
        """Return the parameters from which the clients of the round have started: `w_t`, those of the round."""
        return w_t

    def replies(self) -> Iterator[tuple[int | TrainingTask, ClientReply]]:
        """Yield the usable replies, in the order of clients. Only one reply is in memory at a time."""
        for number in self._usable:
            reply = self._read(number, self._open)
            assert not isinstance(reply, str), "`_check_updates` has checked the update"
            yield number, reply

    def report_rejected(self, rejected: list[tuple[int, str]]) -> None:
        """Write the reason for each rejected client into the mailbox, then delete all updates of the round."""
        if self._open is not None:
            self._mailbox.write_verdicts(self._open.serial, dict(rejected))
        self._open, self._files, self._usable = None, {}, []

    def _check_updates(self, order: RoundOrder) -> Round:
        found: dict[int, str] = {}  # per client, why its update cannot be used
        for number in self._files:
            reply = self._read(number, order)
            found[number] = reply if isinstance(reply, str) else ""
        self._usable = [number for number, why in found.items() if not why]
        self.refused = [(number, why) for number, why in found.items() if why]
        asked = sorted(order.sampled)
        dropped = [(number, self._why_silent(number)) for number in asked if number not in self._files]
        return Round(asked, dropped, order.begun, time.time(), list(self._usable))

    def _read(self, number: int, order: RoundOrder | None) -> ClientReply | str:
        assert order is not None, "updates are read between the end of a round and its verdicts"
        return self._decode(order, number, self._files[number].read_bytes(), self._like[0])

    def _decode(self, order: RoundOrder, number: int, raw: bytes, w_t: Tensor) -> ClientReply | str:
        """Decode a client's update for an order, which started from `w_t`. Return the reason if it cannot be used."""
        buffers, most, sums = self._like[1], self._members[number].samples, self._given.client_side.sums
        code = self._codings.update_code(order.facts, number)
        return remote_codec.decode_update(raw, w_t, sums, buffers, most, code=code)

    def _since(self, position: int) -> int:
        """Return the earliest round to which the job may return: the round of the second newest checkpoint."""
        boundary, found = self._engine.w.plan.snapshots.boundary, 0
        for at in range(position, 0, -1):
            if at in boundary:
                found += 1
                if found == 2:
                    return at
        return 0

    # ---- waiting

    def _pause_after_void(self, t: int) -> None:
        """After void rounds, wait before round `t`: a job must not use up its rounds while clients are away."""
        seconds = pause_after(self._voids)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            rounds = "a round was" if self._voids == 1 else f"{self._voids} rounds were"
            self._wait_with(f"round {t} begins {_seconds(seconds)} after the last one, because {rounds} void")

    def _wait_for_clients(self, t: int) -> Ints:
        """Wait until enough clients are connected. Return the numbers of the connected clients."""
        began = time.monotonic()
        while True:
            self._members = self._mailbox.members()
            there = [member.number for member in self._members if self._state(member) == "here"]
            if len(there) >= self._joining.least:
                self._mailbox.write_waits(None)
                self._report_clients()
                return np.asarray(there, dtype=np.int64)
            self._wait_for_more(t, there, began)

    def _wait_for_more(self, t: int, there: list[int], began: float) -> None:
        """Write which clients the round waits for, and pause. `there`: the clients that need not be waited for.

        Raises:
            TrainingError: the wait has begun more than `wait` seconds ago, at `began` by the monotonic clock.
        """
        least, wait = self._joining.least, self._joining.wait
        away = [each.name for each in self._members if each.number not in there and self._state(each) == "away"]
        here = listed([self._members[n].name for n in there])
        waits = f"round {t} waits for {least - len(there)} more of {_clients(least)}; connected: {here or 'none'}"
        waits += f"; away: {listed(away)}" if away else ""
        excluded = [each.name for each in self._members if self._state(each) == "excluded"]
        waits += f"; excluded: {listed(excluded)}" if excluded else ""
        if time.monotonic() - began > wait:
            raise TrainingError(
                f"{waits}; it has waited {wait:g} s: let clients join with `rayps client`, or raise `wait` in\n"
                "clients=remote(least=...,wait=...), or lower `least`",
                waited=wait,
            )
        self._mailbox.write_waits(f"{waits}; the job fails after {_seconds(wait)} of waiting")
        self._pause()

    def _state(self, member: JoinedClient) -> str:
        return self._mailbox.state(member.number)

    def _wait_for(self, order: RoundOrder) -> None:
        """Wait until all asked clients have replied, have left or are away, or the deadline has passed."""
        while True:
            arrived = self._mailbox.arrived(order.serial)
            missing = [n for n in order.sampled if n not in arrived and not self._mailbox.takes_no_part(n)]
            left = order.begun + order.deadline - time.time()
            if not missing or left <= 0:
                return
            names = listed([order.sampled[n] for n in sorted(missing)])
            self._mailbox.write_waits(
                f"round {order.round} waits for {names}: {len(arrived)} of {len(order.sampled)} have "
                f"replied; the deadline is {_seconds(order.deadline)} after the round's start"
            )
            self._pause()

    def _wait_with(self, waits: str) -> None:
        self._mailbox.write_waits(waits)
        self._pause()

    def _pause(self) -> None:
        if self._engine.stopped():
            raise StaleGeneration("the driver has replaced or ended this worker", peer="driver")
        with self.waits_for(CLIENTS):
            time.sleep(PAUSE)

    def _why_silent(self, number: int) -> str:
        return WHY_SILENT[self._mailbox.state(number)]

    def _report_clients(self) -> None:
        known = [(member.name, member.samples) for member in self._members]
        if known != self._reported:
            self._reported = known
            if self._engine.private is not None:
                return
            facts = self._summary()
            joined = f"{_clients(self.count)} {'has' if self.count == 1 else 'have'} joined"
            rows = "their numbers of samples are not sent" if self._secure else f"with {facts['rows']} samples"
            self._engine.w.event("clients", f"{joined}, {rows}", **facts)


def pause_after(voids: int) -> float:
    """Return for how many seconds a job waits after so many void rounds in a row."""
    return min(_MOST_VOID_PAUSE, _VOID_PAUSE * 2.0 ** min(voids - 1, 20)) if voids else 0.0


def create_mailbox(folder: Path | None) -> str:
    """Create the mailbox of a job with real clients in the job's folder. Return the mailbox's path.

    Raises:
        ConfigError: the job has no folder, so real clients could not reach it.
    """
    if folder is None:
        raise _no_service()
    Mailbox(folder / FOLDER).prepare()
    return str(folder / FOLDER)


def untrained(folder: str | None) -> TrainingError | None:
    """Return the error of a job of which every secure round was void, as `folder`, its mailbox, says; else None."""
    found = None if folder is None else Mailbox(Path(folder)).never_summed()
    if found is None:
        return None
    why, refused = found
    begin = f"every round was void, and the model was not trained; the last one because {why}:\n"
    if refused:
        return TrainingError(f"{begin}clients refuse each other: {refused}. {COMPARE_KEYS}")
    return TrainingError(
        f"{begin}`rayps events` names the clients that dropped out of each round. Let more clients join before a round "
        "starts (least in clients=remote(least=...)), or raise deadline"
    )


def mailbox_of(folder: str | None) -> Mailbox:
    """Open the job's mailbox on this machine.

    Raises:
        ConfigError: the job has no folder, or this machine cannot read and write it.
    """
    if folder is None:
        raise _no_service()
    found = Mailbox(Path(folder))
    if not found.reachable():
        raise ConfigError(
            f"the worker on {socket.gethostname()} cannot read and write {folder}, in which the service stores the "
            "clients' updates: run the job on\nthe service's machine, or put the service's state (--state-dir) on a "
            "file system that all machines share",
            field="clients",
        )
    return found


def _no_service() -> ConfigError:
    return ConfigError(
        "clients is remote, but the job was not submitted to a job service, which real clients need to reach it: start "
        "`rayps serve`, and submit the job there\n(`rayps submit`, POST /api/v1/jobs); to simulate the clients of the "
        "data on this machine, leave clients out",
        field="clients",
    )


def _clients(count: int) -> str:
    return f"{count} client{'' if count == 1 else 's'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s"
