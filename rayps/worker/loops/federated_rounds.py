"""Rounds of federated strategies: each worker trains its part of the cohort. Then all results are combined once."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from rayps.core.metrics import Totals
from rayps.federated.client_states import WORKER_STATES
from rayps.federated.engine import FederatedEngine
from rayps.federated.remote_replies import RemoteReplies
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import Worker
from rayps.worker.loops.loop import Companions, Loop
from rayps.worker.plan import WorkerPlan
from rayps.worker.ring_worker import RingWorker
from rayps.workload.base import Workload


class FederatedWorker(RingWorker):
    """A worker with `clients`, which trains its part of a round's cohort. Its position counts rounds."""

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker as `Worker` does. Raises ConfigError if the strategy's options do not fit the clients."""
        super().__init__(workload, plan, peers, device)
        self.clients = FederatedEngine(self)


class FederatedRounds(Loop):
    """The loop of federated strategies. All workers have equal parameters, and each stores some clients' states."""

    view: ClassVar[type[Worker]] = FederatedWorker
    w: FederatedWorker

    def join(self, companions: Companions) -> None:
        """Receive the states of the clients that are stored on this worker. See `Loop`."""
        stored = companions.get(WORKER_STATES)
        if stored is not None and stored.states is not None:
            self.w.clients.adopt_states(stored.states)

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Prepare the first round. A wait for real clients ends as soon as `stopped()` is true. See `Loop`."""
        self.w.clients.stopped = stopped
        if isinstance(self.w.clients.source, RemoteReplies):
            self.w.clients.source.waits_for = self.waits_for
        super().begin(stopped)

    def step_facts(self) -> dict[str, float]:
        """Return the learning rates of simulated clients, and the norm of the combined update. See `Loop`."""
        found, federation = super().step_facts(), self.w.clients.federation
        own = (
            federation.joining is not None or federation.client_side.answers
        )  # real clients may set rates of their own
        return {name: value for name, value in found.items() if not (own and name.startswith("lr"))}

    def evaluate(self, vector: Tensor | None = None) -> Totals:
        """Evaluate the model, and add the metrics `personal_*` and `client_*` on clients' rows. See `Loop`."""
        found = super().evaluate(vector)
        return found | self.w.clients.evaluate(found)

    def retain(self, round: int) -> None:
        """Retain the clients' states after `round`. See `Loop`."""
        self.w.clients.keep_states(round)
