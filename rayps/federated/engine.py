"""A federated round on a worker: train its part of the cohort, combine the replies of all workers, update the model.

source      draws the clients that train, from the seed and the round; real clients are drawn from the connected clients
train       the worker trains its part of these clients, one after another, in one model, and adds each reply
aggregate   `rayps.federated.combine_replies`: screen, clip, apply the rule; the only exchange of the round
server      the strategy's `server` method, which every worker computes with the same result, without an exchange
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rayps_client.errors import ConfigError
from rayps_client.secure.quantise import SummedNumbers
from torch import Tensor

from rayps.core.metrics import Totals
from rayps.data.clients import Clients
from rayps.federated.buffered_replies import BufferedReplies
from rayps.federated.client import ClientReply, Tensors, Trainer
from rayps.federated.client_states import ClientStates
from rayps.federated.combine_replies import BITS, Aggregate, RoundAggregate
from rayps.federated.population.cohort import home_ranks
from rayps.federated.private_job import private_job
from rayps.federated.private_rounds import PrivateRounds
from rayps.federated.remote_replies import RemoteReplies
from rayps.federated.reply_source import SimulatedReplies, TrainingTask
from rayps.federated.round_events import RoundEvents
from rayps.federated.rules.buffer_statistics import BufferStatistics
from rayps.federated.rules.client_report import UpdateReports
from rayps.federated.strategy_interface import FederatedView
from rayps.tensors.finite import is_finite
from rayps.tensors.flat import square_quickly
from rayps.tensors.learning_rate import Ticks

if TYPE_CHECKING:
    from rayps.worker.loops.federated_rounds import FederatedWorker


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
        self.w, self.strategy, self.federation = w, strategy, strategy.federation
        side, aggregation = self.federation.client_side, self.federation.aggregation
        remote = self.federation.joining is not None
        self.clients: Clients | None = None if remote else w.batches.data.clients
        self.trainer = Trainer(w.flat, w.workload, w.device)
        self.private_layers = self.trainer.private_layers(side)
        self.private = _private_rounds(self)
        self._w_t = torch.empty_like(w.flat.vector)
        stateful = side.stateful and not remote
        self.home_ranks = home_ranks(w.batches.data.clients.sizes, w.size) if stateful else None
        self.states = ClientStates() if stateful else None
        self._losses: list[tuple[int, float, int]] = []  # for each usable reply on this worker: client, loss, samples
        self.stopped: Callable[[], bool] = lambda: False  # whether the driver has ended this worker's plan
        self.source: RemoteReplies | SimulatedReplies = _source_of(self)
        self._events = RoundEvents(w, self.source.names, self.clients, self.private)
        size, dtype = self.private_layers.shared_size, w.flat.layout.dtype
        extras = dict.fromkeys(side.sums, (size, dtype))
        if self.private is not None and self.private.job.spec.adaptive:
            extras[BITS] = (1, torch.float64)
        statistics = BufferStatistics(self.private_layers.without_private(self.trainer.buffers))
        self._statistics = statistics if statistics.size and not side.keeps_buffers else None
        self._reports = UpdateReports(size, dtype, w.plan.seed) if self.federation.report is not None else None
        self._aggregate = Aggregate(
            aggregation.chosen_rule,
            aggregation.clip,
            self.federation.population.attackers,
            size,
            dtype,
            seed=w.plan.seed,
            clients=self.source.count,
            extras=extras,
            least=aggregation.min_replies,
            asynchronous=self.federation.buffered is not None,
            statistics=self._statistics,
            divisor=None if self.private is None else self.private.job.divisor,
            reports=self._reports,
        )

    @property
    def _has_losses(self) -> bool:
        """Whether the clients' losses are reported: not in a private job, and statistics have none."""
        return self.private is None and not self.federation.client_side.answers

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
        if t == 0 or (self.private is not None and not self._events.begun):
            self._events.write_clients()
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
            self._events.write_cohort(known, outcome, rejected, cohort, why)
            if self._reports is not None:
                self._reports.write(w.ring, w.position, self.source.names, None if w.rank else w.event)
        else:
            self._follow(self.private, outcome, clip)
        w.position += 1
        self._events.end_round(why, rejected)

    def _combine(self, summed: tuple[RoundAggregate, SummedNumbers | None] | None, clip: float) -> RoundAggregate:
        """Combine the replies of a round, or take the sum `summed` of a secure round; add the noise of a private job.

        A void secure round releases nothing, so it has no noise and is not charged.
        """
        w = self.w
        if summed is not None and (self.private is None or summed[1] is None):
            if summed[1] is not None and summed[1].counts and self._has_losses:
                w.meter.add_loss(summed[1].loss / summed[1].weight, summed[1].weight, summed[1].samples)
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
            if self.federation.client_side.keeps_buffers:
                state |= {f"buffers/{name}": value.detach().clone() for name, value in reply.buffers.items()}
            if all(map(is_finite, state.values())):
                self.states.put(task.client, state, w.position + 1)
            else:
                self._events.report_dropped_state(task.client)

    def _run_server(self, t: int, outcome: RoundAggregate) -> str:
        """Run the strategy's `server` method, with the same result on every worker.

        Return the reason why the model is unchanged, or "" if the model changed.
        """
        w, strategy = self.w, self.strategy
        if outcome.skipped is not None:
            if outcome.count or outcome.void:
                return outcome.skipped
            return "no reply could be used" if outcome.rejected or self.source.refused else "no client replied"
        if outcome.delta is not None and not self.federation.client_side.answers:
            w.clip.note(norm=math.sqrt(square_quickly(outcome.delta)))
        shared = self.private_layers.cut(w.flat.vector)
        strategy.server(FederatedServer(shared, outcome, self.source.count, w.shared, t))
        self.private_layers.paste(w.flat.vector, shared)
        if self._statistics is not None and outcome.buffers is not None:
            self._statistics.unpack(outcome.buffers, self.trainer.buffers)
        return ""

    def _pack_buffers(self, buffers: Tensors) -> Tensor | None:
        return None if self._statistics is None else self._statistics.pack(buffers)

    def evaluate(self, of_job: Totals) -> Totals:
        """Return a dict from `personal_*` and `client_*` metric to its total. The model does not change.

        `of_job` has the metrics of the model on the job's own evaluation data, whose names real clients use. Simulated
        clients of a private job have none, because they would be computed from clients' rows without noise.
        """
        return self.source.evaluate(of_job)

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


def _source_of(engine: FederatedEngine) -> RemoteReplies | SimulatedReplies:
    """Return what gets the replies. Raises ConfigError if the options do not fit the clients."""
    if engine.federation.joining is None:
        return SimulatedReplies(engine)
    return RemoteReplies(engine) if engine.federation.buffered is None else BufferedReplies(engine)


def _private_rounds(engine: FederatedEngine) -> PrivateRounds | None:
    """Return the private part of the rounds, or None. Raises ConfigError if the options do not fit the clients."""
    w, size = engine.w, engine.private_layers.shared_size
    job = private_job(engine.strategy, None if engine.clients is None else engine.clients.count, size)
    if job is None:
        return None
    assert w.plan.private is not None, "the driver gives private jobs a ledger"
    return PrivateRounds(job, w.ring, Path(w.plan.private.ledger), w.plan.seed)


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
