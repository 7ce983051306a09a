"""The worker's side of secure rounds: open and close the stages in the mailbox, and unmask the sum.

Clients train first and exchange keys afterwards: a client that fails or is late in training then has no keys, and costs
the others nothing; and keys live for seconds, not for the hours of a training. No client's update exists on this side:
the worker reads messages of which only the sum of all masked vectors can be unmasked.

A worker that is lost is replaced by one that continues with the same messages (`ServerSum` has no secret). A sum is
stored before it is used: whenever the job comes back to the same parameters, from a checkpoint or after void rounds,
the stored sum is used again. A second sum over other clients would show, by its difference, the number of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from rayps_client.errors import ConfigError
from rayps_client.exchange.signed_orders import ROUND, OrderFacts
from rayps_client.secure.protocol import Answer, RoundName, Stage, VoidRound
from rayps_client.secure.quantise import EXTRAS, Quantiser, SummedNumbers, Words
from rayps_client.secure.secure_facts import SecureFacts
from rayps_client.secure.server_sum import ServerRules, ServerSum
from rayps_client.secure.sum_names import name_sum
from rayps_client.secure.take_part import quantiser_of
from rayps_client.values import JsonObject
from torch import Tensor

from rayps.federated.combine_replies import RoundAggregate
from rayps.federated.remote.blamed_clients import Refusal, Refusals
from rayps.federated.remote.client_state import WHY_SILENT
from rayps.federated.remote.mailbox import Mailbox, RoundOrder, SecureOutcome, write_json
from rayps.federated.remote.secure_options import SecureOptions
from rayps.federated.remote.stage_leases import StageLeases
from rayps.federated.rules.buffer_statistics import BufferStatistics
from rayps.federated.strategy_interface import Federation

if TYPE_CHECKING:
    from rayps.federated.engine import FederatedEngine
    from rayps.federated.private_rounds import PrivateRounds

# the seconds that each stage may take, as fractions of the round's deadline; the first includes the training
SHARES_OF_DEADLINE = {Stage.ADVERTISE: 0.6, Stage.SHARE: 0.1, Stage.MASK: 0.15, Stage.CONFIRM: 0.05, Stage.UNMASK: 0.1}
_MESSAGE_BYTES = 1 << 16  # largest message of a stage, except for what grows with the clients and the vector
_BYTES_PER_CLIENT = 512
_LOOK_SECONDS = 0.5  # between two looks at the clients' leases
_SHOWN = 5  # the largest number of names in a message
_OTHER_SUM = "another sum of the clients' numbers from the same parameters was released before"

Pause: TypeAlias = Callable[[str], None]


@dataclass(slots=True)
class SecureTotal:
    """The result of a secure round."""

    sampled: list[int]  # the asked clients
    survivors: list[int] = field(default_factory=list)  # whose updates are in the sum
    numbers: SummedNumbers | None = None  # None: the round is void
    void: str | None = None  # why the round is void
    dropped: dict[int, str] = field(default_factory=dict)  # the other asked clients, and why
    refusals: Refusals = field(default_factory=Refusals)  # which clients have refused others' messages

    @property
    def has_no_update(self) -> bool:
        """Whether the sum of the updates is 0, so that the parameters stay as they are."""
        return self.numbers is not None and not self.numbers.update.any()


class SecureRounds:
    """The secure rounds of a job with real clients."""

    def __init__(
        self,
        mailbox: Mailbox,
        options: SecureOptions,
        least: int,
        size: int,
        *,
        private: PrivateRounds | None = None,
        losses: bool = True,
    ) -> None:
        """`least`: the fewest clients with which a round counts. `size`: the number of parameters that clients send.

        `losses`: whether the sums have the clients' losses and processed samples.

        `private`: the noise, which makes the sensitivity of the sums count, or None. If the clients add the noise, the
        release of a sum is recorded before they are asked to unmask it.
        """
        self.options, self._private, self._losses = options, private, losses
        self.total: SecureTotal | None = None  # the result of the newest round; None before the first
        self._mailbox, self._least, self._size = mailbox, least, size

    def facts(self, clients: int) -> SecureFacts:
        """Return what the order of a round of `clients` clients says. Raises ConfigError if their sum might wrap."""
        if self._private is None:
            return self.options.facts(clients, self._least)
        return self.options.facts(clients, self._least, self._size, self._private.shares)

    def most_bytes(self, facts: SecureFacts) -> int:
        """Return the largest number of bytes of a message of a round."""
        words = (self._size + EXTRAS) * quantiser_of(facts).word.itemsize
        return max(words, _MESSAGE_BYTES + _BYTES_PER_CLIENT * facts["clients"])

    def sum_of(
        self, facts: OrderFacts, asked: dict[int, str], deadline: float, parameters: bytes, pause: Pause
    ) -> tuple[SecureTotal, RoundOrder | None]:
        """Return the sum over the clients of a training or an evaluation that starts from `parameters`.

        `facts`: those of the order without its entry `secure`. `asked`: names of clients by number. `deadline`: seconds
        for all stages. `pause` is called with what is waited for, and pauses for a moment.

        Returns:
            The result, and the order by which the clients were asked; None: the sum is the stored one of an earlier
            order from the same parameters, and nobody is asked.

        Raises:
            ConfigError: the sum of so many clients might wrap.
        """
        earlier = self._stored(facts, parameters)
        if earlier is not None and not (earlier.has_no_update and facts["kind"] == ROUND):
            return earlier, None
        secure = self.facts(len(asked))
        if earlier is not None or not self._losses:  # after a round of the rate 0 they would be released twice
            secure["counts"] = False
        given: OrderFacts = {**facts, "secure": secure}
        order = self._mailbox.open_round(given, asked, deadline, self.most_bytes(secure), parameters)
        found = self._run(order, pause)
        self._mailbox.close_round(order.serial)
        return found, order

    def _run(self, order: RoundOrder, pause: Pause) -> SecureTotal:
        """Run the stages of a round until its sum is known or the round is void, and store the sum."""
        facts, stages = order.facts["secure"], self._mailbox.stages(order.serial)
        name, quantiser = RoundName(self._mailbox.job, order.serial), quantiser_of(facts)
        server = ServerSum(ServerRules(name, facts["threshold"], facts["least"], self.options.degree))
        run, found = _StageRun(order, self._mailbox, server, pause, self._record), SecureTotal(sorted(order.sampled))
        try:
            masked = self._run_stages(run, facts["verify"], quantiser)
            total = server.total(_read(run.collect(Stage.UNMASK)), _vectors(masked, quantiser))
            found.numbers, found.survivors = quantiser.read_sum(total), sorted(masked)
        except VoidRound as void:
            found.void = void.message
        near = {number: frozenset(others) for number, others in server.graph.items()}
        found.refusals = Refusals(near, run.refused)
        lost = {**run.lost, **stages.withdrawn(), **server.unusable}
        found.dropped = {number: why for number, why in sorted(lost.items()) if number not in found.survivors}
        if found.numbers is not None:
            self._store(order.facts, found, total)
        self._mailbox.write_outcome(order.serial, SecureOutcome(found.void, found.dropped))
        stages.delete()
        return found

    def _run_stages(self, run: _StageRun, verify: bool, quantiser: Quantiser) -> dict[int, Path]:
        """Run all stages but the last. Return the files of the survivors' masked vectors."""
        server = run.server
        run.finish(Stage.ADVERTISE, server.advertised(_read(run.collect(Stage.ADVERTISE))), Stage.SHARE)
        run.finish(Stage.SHARE, server.shared(_read(run.collect(Stage.SHARE))), Stage.MASK)
        length = (self._size + EXTRAS) * quantiser.word.itemsize
        whole = {}
        for number, path in run.collect(Stage.MASK).items():
            if path.stat().st_size == length:
                whole[number] = path
            else:
                server.unusable[number] = f"its masked update has {path.stat().st_size} bytes, {length} were expected"
        answers = server.masked(whole)
        masked = {number: whole[number] for number in answers}
        run.finish(Stage.MASK, answers, Stage.CONFIRM if verify else Stage.UNMASK)
        if verify:
            run.finish(Stage.CONFIRM, server.confirmed(_read(run.collect(Stage.CONFIRM))), Stage.UNMASK)
        return masked

    def _record(self, order: RoundOrder) -> None:
        """Record the release of a sum whose noise is in it, before anybody is asked to unmask it."""
        if self._private is not None and self._private.shares is not None:
            self._private.charge(order.facts["phase"] + order.round)

    # ---- the sums of past rounds

    def _stored(self, facts: OrderFacts, parameters: bytes) -> SecureTotal | None:
        """Return the result of an earlier order of this kind from the same parameters, or None if there was no sum.

        A sum of other numbers than those of `facts` is no sum for it, and no other one is released: the result is void.
        """
        name = _hash_of(facts["kind"], hashlib.sha256(parameters).hexdigest())
        found = self._file(name)
        if found is None:
            return None
        about = json.loads(self._about(name).read_bytes())
        path, at = found
        now = facts["phase"] + facts["round"]
        if now > at:  # it is deleted when the job can no longer return to the newest round that uses it
            path = path.rename(path.with_name(f"{now}-{name}.sum"))
        quantiser = quantiser_of(about["secure"])
        words = quantiser.read_words(path.read_bytes())
        dropped = {int(number): why for number, why in about["dropped"].items()}
        if len(words) != self._size + EXTRAS or about["what"] != _what(facts):
            return SecureTotal(about["sampled"], void=_OTHER_SUM)
        return SecureTotal(about["sampled"], about["survivors"], quantiser.read_sum(words), None, dropped)

    def _store(self, facts: OrderFacts, found: SecureTotal, total: Words) -> None:
        """Store the sum of a round, and delete the sums of rounds to which the job never returns."""
        name, at = _hash_of(facts["kind"], facts["parameters"]["sha256"]), facts["phase"] + facts["round"]
        before, about = self._file(name), self._about(name)
        about.parent.mkdir(exist_ok=True, mode=0o700)
        write_json(
            about,
            {
                "sampled": found.sampled,
                "survivors": found.survivors,
                "dropped": found.dropped,
                "secure": facts["secure"],
                "what": _what(facts),
            },
        )
        part = about.with_suffix(".part")
        with part.open("wb") as file:
            file.write(total.tobytes())
            file.flush()
            os.fsync(file.fileno())
        newest = at if before is None else max(at, before[1])
        path = part.replace(about.with_name(f"{newest}-{name}.sum"))  # last: a sum without this file does not exist
        if before is not None and before[0] != path:
            before[0].unlink(missing_ok=True)
        for old in about.parent.glob("*.sum"):
            last, _, named = old.stem.partition("-")
            if int(last) < facts["since"]:
                old.unlink(missing_ok=True)
                self._about(named).unlink(missing_ok=True)

    def _file(self, name: str) -> tuple[Path, int] | None:
        """Return the file of the sum with this name, and the newest round that has used it; None if there is none."""
        found = [(int(path.name.partition("-")[0]), path) for path in self._about(name).parent.glob(f"*-{name}.sum")]
        if not found:
            return None
        at, path = max(found)  # there are two if a worker was killed in `_store`
        return path, at

    def _about(self, name: str) -> Path:
        """Return the file of what is known about the sum with this name."""
        return self._mailbox.folder / "sums" / f"{name}.json"


def _hash_of(kind: str, parameters: str) -> str:
    return hashlib.sha256(name_sum(kind, parameters).encode()).hexdigest()


def _what(facts: OrderFacts) -> JsonObject:
    """Return which numbers are summed, as far as this changes in a job."""
    metrics = facts.get("metrics")
    return {"metrics": None if metrics is None else list(metrics["names"]), "personal": facts["personal"]}


def secure_rounds_of(engine: FederatedEngine, mailbox: Mailbox) -> SecureRounds | None:
    """Return the secure rounds of a job, or None if its strategy has no option `secure`.

    Raises:
        ConfigError: the model has buffers that clients would send.
    """
    if engine.federation.secure is None:
        return None
    part = engine.private_layers
    sent = {} if engine.federation.client_side.keeps_buffers else part.without_private(engine.trainer.buffers)
    if BufferStatistics(sent).size:
        raise ConfigError(
            "secure aggregation sums updates of bounded norm, but this model has buffers without a bound (BatchNorm's "
            "statistics):\ngive buffers=keep, by which each client keeps its own, or use GroupNorm or LayerNorm in the "
            "model",
            field="secure",
        )
    return secure_rounds(engine.federation, mailbox, part.shared_size, engine.private)


def secure_rounds(given: Federation, mailbox: Mailbox, size: int, private: PrivateRounds | None = None) -> SecureRounds:
    """Return the secure rounds of a strategy that has the option `secure`, for `size` parameters.

    If clients evaluate too, the sums of rounds have no losses: the loss of a training that has one step is that of an
    evaluation of the same parameters on the same rows.
    """
    assert given.secure is not None, "`secure_rounds_of` has asked"
    least, losses = given.aggregation.min_replies, not given.real.client_evaluation
    return SecureRounds(mailbox, given.secure, least, size, private=private, losses=losses)


def aggregate_of(total: SecureTotal, w_t: Tensor) -> RoundAggregate:
    """Return the result of a secure round as the strategy's `server` method takes it.

    `w_t`: the parameters that clients share, from which they have started.
    """
    found = RoundAggregate(None, None, {}, len(total.survivors), 0.0, skipped=total.void, void=total.void is not None)
    if total.numbers is not None:
        delta = torch.from_numpy(total.numbers.mean)
        found.delta, found.weight = delta.to(w_t.dtype).cpu(), float(total.numbers.weight)
        found.mean = (w_t.detach().cpu().double() + delta).to(w_t.dtype)
    return found


class _StageRun:
    """The stages of one round, one after another."""

    def __init__(
        self,
        order: RoundOrder,
        mailbox: Mailbox,
        server: ServerSum,
        pause: Pause,
        before_unmasking: Callable[[RoundOrder], None],
    ) -> None:
        self.server, self._order, self._mailbox, self._pause = server, order, mailbox, pause
        self._before_unmasking = before_unmasking
        self._stages = mailbox.stages(order.serial)
        self._asked = sorted(order.sampled)  # who may send the message of the current stage
        self._leases, self._gone, self._looked = StageLeases(), set[int](), 0.0
        self.lost: dict[int, str] = {}  # why clients have dropped out
        self.refused: dict[int, Refusal] = {}  # from client to the clients whose messages it has refused

    def collect(self, stage: Stage) -> dict[int, Path]:
        """Wait for the messages of a stage, then close it. Return a dict from client to the file of its message.

        It is closed when the clients have sent theirs of which this can be expected: who has withdrawn, takes no part
        any more or is silent is not waited for. A later message of theirs is late, as after the deadline.
        """
        deadline = SHARES_OF_DEADLINE[stage] * self._order.deadline
        ends = (self._order.begun if stage is Stage.ADVERTISE else time.time()) + deadline
        while not self._stages.is_closed(stage):
            arrived = self._stages.arrived(stage)
            silent = arrived | self._stages.withdrawn().keys()
            if stage is not Stage.ADVERTISE:  # before it clients train, and renew no lease
                silent = silent | self._silent()
            missing = [n for n in self._asked if n not in silent and not self._mailbox.takes_no_part(n)]
            enough = stage is Stage.UNMASK and self.server.suffices(arrived)
            if not missing or enough or time.time() >= ends:
                break
            self._pause(
                f"round {self._order.round} waits for {listed([self._order.sampled[n] for n in missing])}: "
                f"{len(arrived)} of {len(self._asked)} have sent the message of the stage {stage}; this stage has "
                f"{deadline:g} s of the round's deadline of {self._order.deadline:g} s"
            )
        found = self._stages.close(stage)
        refused = self._stages.refused()
        self.refused |= {n: Refusal(stage, refused[n]) for n in self._asked if n in refused and n not in found}
        self.lost |= {n: self._why_silent(n, stage) for n in self._asked if n not in found and n not in self.lost}
        return {number: path for number, path in found.items() if number in self._asked}

    def finish(self, stage: Stage, answers: Mapping[int, Answer], following: Stage) -> None:
        """Open the following stage, then publish the answers of this one."""
        self._asked = sorted(answers)
        if following is Stage.UNMASK and not self._stages.has_begun(following):  # else a lost worker has recorded it
            self._before_unmasking(self._order)
        self._stages.open(following)
        self._stages.publish(stage, answers)

    def _silent(self) -> set[int]:
        """Return the clients that do not renew their leases; looks at most every `_LOOK_SECONDS`."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            renewals = self._stages.renewals()
            self._gone = self._leases.silent({n: renewals[n] for n in self._order.sampled if n in renewals})
        return self._gone

    def _why_silent(self, number: int, stage: Stage) -> str:
        if number in self._gone:
            return f"silent at {stage}"
        return f"{WHY_SILENT[self._mailbox.state(number)]} at {stage}"


def listed(names: list[str]) -> str:
    """Return up to five names as text."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _read(paths: Mapping[int, Path]) -> dict[int, bytes]:
    return {number: path.read_bytes() for number, path in paths.items()}


def _vectors(paths: Mapping[int, Path], quantiser: Quantiser) -> Iterator[Words]:
    """Yield masked vectors, so that one of them is in memory at a time."""
    for path in paths.values():
        yield quantiser.read_words(path.read_bytes())
