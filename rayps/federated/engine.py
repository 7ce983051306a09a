"""A federated round on a worker: train its part of the cohort, combine the replies of all workers, update the model.

source      draws the clients that train, from the seed and the round; real clients are drawn from the connected clients
train       the worker trains its part of these clients, one after another, in one model, and adds each reply
aggregate   `rayps.federated.combine_replies`: screen, clip, apply the rule; the only exchange of the round
server      the strategy's `server` method, which every worker computes with the same result, without an exchange
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rayps_client.secure.quantise import SummedNumbers
from torch import Tensor

from rayps.core.errors import ConfigError
from rayps.core.metrics import Totals
from rayps.core.strategy_families import has_remote_clients
from rayps.data.base import Data
from rayps.data.clients import Clients
from rayps.federated.buffer_statistics import BufferStatistics
from rayps.federated.buffered_replies import BufferedReplies
from rayps.federated.client import ClientReply, Tensors, Trainer
from rayps.federated.client_report import UpdateReports
from rayps.federated.client_states import ClientStates
from rayps.federated.combine_replies import BITS, Aggregate, RoundAggregate
from rayps.federated.personal_metrics import personal
from rayps.federated.population.cohort import home_ranks
from rayps.federated.private_job import private_job
from rayps.federated.private_rounds import PrivateRounds
from rayps.federated.remote_replies import RemoteReplies
from rayps.federated.reply_source import Round, SimulatedReplies, TrainingTask
from rayps.federated.strategy_interface import FederatedView, attackers_of, is_buffered
from rayps.tensors.finite import is_finite
from rayps.tensors.learning_rate import Ticks

if TYPE_CHECKING:
    from rayps.worker.federated_rounds import FederatedWorker

NAMES_IN_DATA = 50  # the largest number of client names in an event's data
NAMES_IN_MESSAGE = 3  # the largest number of client names in an event's message


class FederatedEngine:
    """Runs the federated rounds of one worker. The worker's strategy calls `round`."""

    def __init__(self, w: FederatedWorker) -> None:
        """Prepare the clients, the trainer and the aggregation.

        Raises ConfigError if an option does not fit the clients.
        """
        strategy = w.plan.strategy
        if not isinstance(strategy, FederatedView):
            raise ConfigError(
                f"strategy {strategy.name} declares rows=ByClient, but lacks the options and methods of a federated "
                "strategy: derive it from rayps.FedAvg",
                field="strategy",
            )
        self.w, self.strategy, self.side = w, strategy, strategy.client_side
        remote = has_remote_clients(strategy)
        self.clients: Clients | None = None if remote else w.batches.data.clients
        self.trainer = Trainer(w.flat, w.workload, w.device)
        self.private_layers = self.trainer.private_layers(strategy)
        self.private = _private_rounds(self)
        self._w_t = torch.empty_like(w.flat.vector)
        stateful = self.side.stateful and not remote
        self.home_ranks = home_ranks(w.batches.data.clients.sizes, w.size) if stateful else None
        self.states = ClientStates() if stateful else None
        self._losses: list[tuple[int, float, int]] = []  # for each usable reply on this worker: client, loss, samples
        self._reported: set[int] = set()  # clients whose dropped states were reported
        self._begun, self._counted = 0, False  # number of rounds so far, and whether any of them changed the model
        self.stopped: Callable[[], bool] = lambda: False  # whether the driver has ended this worker's plan
        self.evaluation_data: Data | None = None  # the evaluation data, once it has been loaded
        self.source: RemoteReplies | SimulatedReplies = _source_of(self, remote)
        size, dtype = self.private_layers.shared_size, w.flat.layout.dtype
        extras = dict.fromkeys(self.side.sums, (size, dtype))
        if self.private is not None and self.private.job.spec.adaptive:
            extras[BITS] = (1, torch.float64)
        statistics = BufferStatistics(self.private_layers.without_private(self.trainer.buffers))
        self._statistics = statistics if statistics.size and not self.side.keeps_buffers else None
        aggregation = strategy.aggregation
        self._reports = UpdateReports(size, dtype, w.plan.seed) if strategy.report is not None else None
        self._aggregate = Aggregate(
            aggregation.chosen_rule,
            aggregation.clip,
            attackers_of(strategy),
            size,
            dtype,
            seed=w.plan.seed,
            clients=self.source.count,
            extras=extras,
            least=aggregation.min_replies,
            asynchronous=is_buffered(strategy),
            statistics=self._statistics,
            divisor=None if self.private is None else self.private.job.divisor,
            reports=self._reports,
        )

    @property
    def _has_losses(self) -> bool:
        """Whether the clients' losses are reported: not in a private job, and statistics have none."""
        return self.private is None and not self.strategy.client_side.answers

    def at(self, position: int) -> int:
        """Return the number, within its phase, of the round at `position` of the run."""
        return position - self.w.plan.origin[0]

    def tick(self, number: int) -> int:
        """Return the step of the workload's schedule for round `number` of the phase."""
        origin = self.w.plan.origin
        return Ticks(origin, self.w.batches.steps_per_epoch).of(self.w.workload.schedule_every, origin[0] + number)

    def base(self, version: int) -> Tensor:
        """Return the parameters at the start of round `version`."""
        return self.source.base(version, self._w_t)

    def round(self) -> None:
        """Run one round of the strategy, on this worker."""
        w, t = self.w, self.at(self.w.position)
        if t == 0 or (self.private is not None and not self._begun):
            self._write_clients_event()
        if self.private is not None and self._ends(self.private):
            return
        w_t, buffers = self._w_t.copy_(w.flat.vector), self.trainer.copy_buffers()
        known = self.source.round(t, w_t, w.shared, buffers)
        cohort = list(known.sampled) if known.cohort is None else known.cohort
        self._aggregate.begin(t, cohort, self.private_layers.cut(w_t), self._pack_buffers(buffers))
        self._losses = []
        if self._reports is not None:
            self._reports.begin(cohort)
        clip = 0.0
        if self.private is not None:
            clip = self._aggregate.clip = self.private.clip(w.shared)
        began, read = time.perf_counter(), self.trainer.reading
        for task, reply in self.source.replies():
            self._add_reply(task if isinstance(task, TrainingTask) else TrainingTask(task, t), reply)
        reading = self.trainer.reading - read
        w.meter.data += reading
        w.meter.compute += time.perf_counter() - began - reading
        outcome = self._combine(self.source.summed(w_t), clip)
        outcome.noise = 0.0 if self.private is None else self.private.noise(clip)
        chosen = None if outcome.chosen is None else frozenset(outcome.chosen)
        for client, loss, n in self._losses if self._has_losses else ():
            if chosen is None or client in chosen:
                w.meter.add_loss(loss, n, n)
        self.trainer.load(w_t, buffers)
        why = self._run_server(t, outcome)
        if self.states is not None:
            self.states.commit(keep=not why)
        rejected = [*self.source.refused, *outcome.rejected]
        self.source.report_rejected(rejected)
        if self.private is None:
            self._write_cohort_event(known, outcome, rejected, cohort, why)
            if self._reports is not None:
                self._reports.write(w.ring, w.position, self.source.names, None if w.rank else w.event)
        else:
            self._follow(self.private, outcome, clip)
        w.position += 1
        self._begun, self._counted = self._begun + 1, self._counted or not why
        if w.position >= w.plan.end and not self._counted and w.rank == 0:
            self._warn(why, rejected)

    def _combine(self, summed: tuple[RoundAggregate, SummedNumbers | None] | None, clip: float) -> RoundAggregate:
        """Combine the replies of a round, or take the sum `summed` of a secure round; add the noise of a private job.

        A void secure round releases nothing, so it has no noise and is not charged.
        """
        w = self.w
        if summed is not None and (self.private is None or summed[1] is None):
            if summed[1] is not None and self._has_losses:
                w.meter.add_loss(summed[1].loss / summed[1].weight, summed[1].samples, summed[1].samples)
            return summed[0]
        if summed is not None and summed[1] is not None:
            self._aggregate.add_noise(torch.from_numpy(summed[1].update), {})  # the sum itself; the noise follows
        if self.private is not None:
            self.private.release(self._aggregate, clip, w.position)
        return self._aggregate.combine(w.ring, w.shared)

    def _ends(self, private: PrivateRounds) -> bool:
        """Return whether the budget allows no more release: the phase then ends without this round."""
        why = private.exhausted()
        if why is None:
            return False
        self.w.done, self.w.reason = True, why
        return True

    def _follow(self, private: PrivateRounds, outcome: RoundAggregate, clip: float) -> None:
        """After a private round, report epsilon and the clip, and end the phase if the budget is spent."""
        private.follow(outcome, self.w.shared)
        self._ends(private)
        self.w.say(epsilon=private.epsilon, releases=private.releases, clip=clip)

    def _add_reply(self, task: TrainingTask, reply: ClientReply) -> None:
        """Add one reply to the sum, or reject it."""
        w, strategy = self.w, self.strategy
        weight = strategy.weight(reply.n, task.staleness) if self.private is None else 1.0
        why = self._aggregate.add_reply(
            task.client,
            reply.w,
            self.private_layers.cut(self.base(task.version)),
            weight,
            reply.sums,
            buffers=self._pack_buffers(reply.buffers),
            samples=reply.n,
        )
        if why is not None:
            return
        self._losses.append((task.client, reply.loss, reply.samples))
        if self._reports is not None:
            self._reports.accept(task.client, reply.loss)
        if self.states is not None:
            state = dict(reply.state)
            if self.side.keeps_buffers:
                state |= {f"buffers/{name}": value.detach().clone() for name, value in reply.buffers.items()}
            if all(map(is_finite, state.values())):
                self.states.put(task.client, state, w.position + 1)
            else:
                self._report_dropped_state(task.client)

    def _report_dropped_state(self, client: int) -> None:
        """Report that a client's new state is not finite and was dropped, for at most `NAMES_IN_MESSAGE` clients."""
        if self.private is not None or client in self._reported or len(self._reported) >= NAMES_IN_MESSAGE:
            return
        self._reported.add(client)
        who = self.source.names([client])[0]
        self.w.event(
            "warning",
            f"round {self.w.position}: the new state of client {who!r} contains values that are not finite, and was "
            "dropped; the client keeps its earlier state. Lower the learning rate, or a penalty's weight (ditto: lam)",
            round=self.w.position,
            client=who,
        )

    def _run_server(self, t: int, outcome: RoundAggregate) -> str:
        """Run the strategy's `server` method, with the same result on every worker.

        Return the reason why the model is unchanged, or "" if the model changed.
        """
        w, strategy = self.w, self.strategy
        if outcome.skipped is not None:
            if outcome.count or outcome.void:
                return outcome.skipped
            return "no reply could be used" if outcome.rejected or self.source.refused else "no client replied"
        shared = self.private_layers.cut(w.flat.vector)
        strategy.server(FederatedServer(shared, outcome, self.source.count, w.shared, t))
        self.private_layers.paste(w.flat.vector, shared)
        if self._statistics is not None and outcome.buffers is not None:
            self._statistics.unpack(outcome.buffers, self.trainer.buffers)
        return ""

    def _pack_buffers(self, buffers: Tensors) -> Tensor | None:
        return None if self._statistics is None else self._statistics.pack(buffers)

    def _write_clients_event(self) -> None:
        """Write the event `clients`: the number of clients, and the number of samples that they have.

        In a private job, write the event `privacy` instead: what is claimed.
        """
        if self.private is not None:
            if self.w.rank == 0:
                claim = self.private.claim()
                self.w.event("privacy", self.private.summary(self.w.plan.end - self.w.position), **claim)
        elif self.clients is not None and self.w.rank == 0:
            summary = self.clients.summary()
            self.w.event(
                "clients", f"{summary['clients']} clients with {summary['rows']} samples ({summary['rule']})", **summary
            )

    def _write_cohort_event(
        self, known: Round, outcome: RoundAggregate, rejected: list[tuple[int, str]], cohort: list[int], why: str
    ) -> None:
        """Write metrics and the event `cohort`: how many clients replied, and which were dropped or rejected."""
        w, names, asked = self.w, self.source.names, len(known.sampled)
        w.say(sampled=asked, replied=outcome.count, dropped=len(known.dropped), rejected=len(rejected))
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
        message += "".join(f"; {n} {key}: {name_clients(away[key], n)}" for key, n in counts.items() if n)
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

    def _warn(self, why: str, rejected: list[tuple[int, str]]) -> None:
        """Write a warning at the end of a run in which no round changed the model; `why` is the last round's reason."""
        only = self._begun == 1
        rounds = (
            "the only round did not count"
            if only
            else f"none of {self._begun} rounds counted; the last round did not count"
        )
        if rejected:
            client, reason = rejected[0]
            who = self.source.names([client])[0]
            why += f" (client {who!r}: {reason}); lower the learning rate, or look for bad values"
        self.w.event("warning", f"the model was not trained: {rounds}, because {why}")

    def evaluate(self, of_job: Totals) -> Totals:
        """Return a dict from `personal_*` and `client_*` metric to its total. The model does not change.

        `of_job` has the metrics of the model on the job's own evaluation data, whose names real clients use. Simulated
        clients of a private job have none, because they would be computed from clients' rows without noise.
        """
        if isinstance(self.source, RemoteReplies):
            return self.source.evaluate(of_job)
        return personal(self) if self.private is None else {}

    def state_of(self, client: int) -> tuple[Tensors, Tensors]:
        """Return a client's stored state, and the buffers in this state, on the model's device."""
        if self.states is None:
            return {}, {}
        held = {name: value.to(self.w.device) for name, value in self.states.get(client).items()}
        own = {name.removeprefix("buffers/"): value for name, value in held.items() if name.startswith("buffers/")}
        return held, own

    def keep_states(self, round: int) -> None:
        """Keep the states as of `round`, because the driver may still take a snapshot of this round."""
        if self.states is not None:
            self.states.kept = round

    def adopt_states(self, states: ClientStates) -> None:
        """Replace the stored states of this worker's clients by `states`."""
        if self.states is not None:
            self.states.close()
            self.states = states


def _source_of(engine: FederatedEngine, remote: bool) -> RemoteReplies | SimulatedReplies:
    """Return what gets the replies. Raises ConfigError if the options do not fit the clients."""
    if not remote:
        return SimulatedReplies(engine)
    return BufferedReplies(engine) if is_buffered(engine.strategy) else RemoteReplies(engine)


def _private_rounds(engine: FederatedEngine) -> PrivateRounds | None:
    """Return the private part of the rounds, or None. Raises ConfigError if the options do not fit the clients."""
    w, strategy = engine.w, engine.strategy
    size = engine.private_layers.shared_size
    job = private_job(strategy, None if engine.clients is None else engine.clients.count, size)
    if job is None:
        return None
    assert w.plan.private is not None, "the driver gives private jobs a ledger"
    return PrivateRounds(job, w.ring, Path(w.plan.private.ledger), w.plan.seed)


def name_clients(away: list[list[str]], count: int) -> str:
    """Return up to three of `count` clients as text with their reasons, such as "a (deadline), b (left) and 4 more"."""
    more = count - NAMES_IN_MESSAGE
    return ", ".join(f"{name} ({why})" for name, why in away[:NAMES_IN_MESSAGE]) + (
        f" and {more} more" if more > 0 else ""
    )


class FederatedServer:
    """The argument of a strategy's `server` method: the parameters, and the combined replies of a round.

    `w` is w_t without private parameters, which the method changes in place to w_(t+1). `memory` is the server's state
    between rounds. `noise` is the standard deviation of the noise on each element of `delta`; 0 without privacy.
    """

    def __init__(self, w: Tensor, outcome: RoundAggregate, clients: int, memory: dict[str, Tensor], round: int) -> None:
        self.w, self.clients, self.memory, self.round = w, clients, memory, round
        self.count, self.weight, self.noise = outcome.count, outcome.weight, outcome.noise
        self.mean = None if outcome.mean is None else outcome.mean.to(w.device)
        assert outcome.delta is not None, "the server steps only if a round has a result"
        self.delta = outcome.delta.to(w.device)
        self.sums = {name: value.to(w.device) for name, value in outcome.sums.items()}
