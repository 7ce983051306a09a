"""Workers whose parameters are on servers. A worker pulls, computes and pushes, and the servers step.

Under a strategy with `own_copies` (Downpour), a worker also steps its own copy between two pulls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from torch import Tensor

from rayps.core.job.records import Point
from rayps.core.metrics import Totals
from rayps.core.strategy.topology import runs_in_step, servers_of
from rayps.data.base import Batch
from rayps.ps.client.client import GroupServer, compress
from rayps.ps.client.device_server import DeviceServer
from rayps.tensors import optim
from rayps.tensors.device import Device
from rayps.tensors.flat import Gradient, square_of
from rayps.tensors.learning_rate import Ticks, pace_of, recipe_of
from rayps.tensors.snapshot import Snapshot
from rayps.tensors.training_state import TrainingState
from rayps.tensors.weight_watch import explain_change_lost
from rayps.worker.connections import WorkerConnections
from rayps.worker.core import VectorMemory, Worker
from rayps.worker.exchange.agreed_step import agree_on_step
from rayps.worker.exchange.early_push import EarlyPush
from rayps.worker.exchange.push_agreement import PushAgreement
from rayps.worker.loops.loop import Loop
from rayps.worker.plan import WorkerPart, WorkerPlan
from rayps.worker.privacy import Privacy
from rayps.worker.ring_worker import list_ring_choices
from rayps.worker.tables import bind_tables
from rayps.workload.accumulate import Ready, StepLoss
from rayps.workload.base import Workload


class ServerWorker(Worker):
    """A worker with a connection `server` to the servers that hold the parameters.

    Servers on the worker's host read its gradients in shared memory. Pulls write into the model.
    """

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker and connect it to the servers and to the model's sparse tables. See `Worker`."""
        server = peers.server
        assert server is not None, "the parameters are on servers"
        servers = servers_of(plan.strategy)
        assert servers is not None, "the strategy declares servers"
        place = transfer_device(device)
        memory = VectorMemory(server.buffer if place is None else None)  # on a device, servers cannot read the gradient
        super().__init__(workload, plan, peers, device, vectors=memory, steps=servers.own_copies)
        self.server: GroupServer | DeviceServer = server
        self.clip.measures = False  # what the servers apply, no worker knows
        self._early: EarlyPush | None = None
        if place is not None:
            self.server = DeviceServer(server, place, self.flat.vector, self._pulls_again)
            whole = self.clip.most is not None or self.scaling.scale is not None or self.members is not None
            if plan.division is None and not whole:
                self._early = EarlyPush(self.flat, self.server)
        view = self.server
        self.agreement = PushAgreement(lambda: view.version) if servers.adaptive else None
        self.meter.sources.append(lambda: (view.seconds_waiting, 0.0, view.bytes_moved))
        self.meter.lead = lambda: view.lead
        if plan.division is not None:
            self.log.choices += list_ring_choices(plan, peers)
        if place is None:
            server.home = self.flat.vector
        if peers.session is not None:
            bind_tables(self, peers.session)
        if self.tables is not None and isinstance(server, GroupServer):
            server.extras = self.tables.pieces
        if servers.compression is not None:
            self.log.choices.append(compress(server, servers.compression))
        if peers.rings:
            exact = plan.start < 0 and servers.in_step
            server.step = agree_on_step(*peers.steps(), peers.rings.values(), exact=exact)

    def grad(self, batch: Batch) -> Gradient:
        """Return the gradient as `Worker.grad` does, clipped to `clip_norm` together with the rows of tables.

        The worker clips the gradient, because servers do not clip pushes.
        """
        gradient = super().grad(batch)
        if batch.size and self.local is None and self.clip.most is not None:
            with self.meter.computing():
                self._clip_push(gradient.vector)
        if self.agreement is not None:
            self.agreement.add(gradient.vector)
        return gradient

    def push_grad(self, batch: Batch) -> None:
        """Push the gradient of the loss on `batch`: see `WorkerView.push_grad`.

        On a device it is sent by segment while backward continues, unless it is compressed, clipped, or in fp16: these
        need the whole gradient first. Under privacy it is this worker's part of the noised sum. With members, only
        their gradients are pushed. Raises the errors of `grad` or of `Privacy.part`, and LinkError if a connection
        fails.
        """
        if self.members is None:
            self._send(batch)
        else:
            self.members.exchange(batch, self._send)

    def _send(self, batch: Batch | None) -> None:
        """Push this worker's gradient. None: go through a round that closes without it."""
        if batch is None:
            self.server.step += 1
            return
        if self.privacy is not None:
            self._push_part(batch, self.privacy)
            return
        early, server = self._early, self.server
        if early is None or not batch.size or not isinstance(server, DeviceServer) or server.compresses:
            server.push(self.grad(batch))
            return
        try:
            gradient = self._settle(self._compute_gradient(batch, early)[0])
        except BaseException:
            early.fail()
            raise
        if self.agreement is not None:
            self.agreement.add(gradient.vector)
        if early.begun:
            early.end()
        else:  # the loss has weight 0
            server.push(gradient)

    def _push_part(self, batch: Batch, privacy: Privacy) -> None:
        """Push this worker's part: the servers' mean of N parts times N / L is the sum divided by L."""
        with self.refusing_changes("loss"):
            part = privacy.part(batch)
        gradient = Gradient(self.flat.packed, 1)
        self.server.settle()  # the vector must not change before the last push has left
        gradient.vector.copy_(part.mul_(self.size / privacy.batch))
        self.server.push(gradient)

    def refusing_changes(self, method: str) -> AbstractContextManager[None]:
        """Call the user's `method` inside the block. Raises WorkloadError if it changes a parameter in place.

        The next pull would replace the changed values, because servers hold the parameters.
        """
        who, strategy = f"{method}(model, batch)", self.plan.strategy.name
        return self.flat.watch.refusing(lambda name: explain_change_lost(who, name, strategy))

    def _backward(self, batch: Batch, ready: Ready | None = None) -> StepLoss:
        with self.refusing_changes("loss"):
            found = super()._backward(batch, ready)
        self.flat.refuse_frozen(self.plan.strategy.name)
        return found

    def _pulls_again(self) -> bool:
        leases = self.batches.leases
        return self.position < self.plan.end and (leases is None or leases.in_hand(self.position))

    def _clip_push(self, vector: Tensor) -> None:
        square = square_of(vector)
        if self.tables is not None:
            square += self.tables.square()
        factor = self.clip.factor(square)
        if factor < 1:
            vector.mul_(factor)
            if self.tables is not None:
                self.tables.scale(factor)


def transfer_device(name: str) -> Device | None:
    """Return the device between which and the servers a worker's vectors are copied; None on the CPU."""
    return None if name == "cpu" else Device.of(name)


class ServerRates:
    """The learning rates with which servers apply this worker's pushes, from an optimizer without memory.

    A server uses the rate of the push's round. Where rows are leased, a push has no round of its own schedule.
    """

    def __init__(self, w: Worker) -> None:
        """Build the optimizer. Raises WorkloadError if optimizer() or schedule() fails."""
        factory = w.part.factory(recipe_of(w.workload, w.plan.lr_factor))
        optimizer = optim.build(factory, w.layout)
        self._pace = pace_of(factory, w.layout, optimizer, Ticks(w.plan.origin, w.batches.steps_per_epoch))
        self.groups: Sequence[optim.Group] = optimizer.param_groups
        if self._pace is not None and w.plan.leased:
            self.groups = ()

    def at(self, round: int) -> None:
        """Set the rates of round `round`."""
        if self._pace is not None and self.groups:
            self._pace.at(round)


class ServerSteps(Loop):
    """The loop of strategies with servers. The servers' parameters are saved and evaluated, not the workers'.

    A worker's part of a checkpoint is its position and its random state; that of rank 0 also has the buffers.
    """

    view: ClassVar[type[Worker]] = ServerWorker
    w: ServerWorker

    def __init__(self, workload: Workload, plan: WorkerPlan, peers: WorkerConnections, device: str = "cpu") -> None:
        """Build the worker at the position that the servers report. See `Loop`."""
        super().__init__(workload, plan, peers, device)
        self._skipped_before = 0  # rounds before the current one in which no step was taken
        self._rates: ServerRates | None = None if self.w.optimizer is not None else ServerRates(self.w)
        self._buffers_before: dict[str, Tensor] = {}  # copies of before the current round, if weights are averaged
        if self.w.members is None:
            self.w.position = self.w.server.step  # a replacement worker continues after its predecessor's last push
        else:
            self.w.server.step = plan.start  # also if the others have closed rounds before this worker joined

    def await_batch(self, stopped: Callable[[], bool]) -> bool:
        """Wait for a lease, if rows are leased. Before it, all pushes of this worker are applied. See `Loop`."""
        w, leases = self.w, self.w.batches.leases
        if leases is None:
            return True
        if not leases.in_hand(w.position):
            w.server.settle()
        step = leases.wait(w.position, stopped)
        if step is None:
            return False
        w.position = w.server.step = step
        return True

    def run_round(self) -> None:
        """Run one round, with the lookups of sparse tables in it. See `Loop`."""
        self._skipped_before = self.w.scaling.skipped_by_all
        self._set_rates()
        if self.w.workload.average is not None:
            self._buffers_before = {name: value.clone() for name, value in self._read_module_buffers().items()}
        if self.w.tables is not None:
            self.w.tables.begin(self.w.position)
        super().run_round()

    def _set_rates(self) -> None:
        """Set the rates that the next round's point has."""
        if self._rates is not None:
            self._rates.at(self.steps_before_round())

    def _read_groups(self) -> Sequence[optim.Group]:
        return super()._read_groups() if self._rates is None else self._rates.groups

    def point(self) -> Point:
        """Return the metrics of the last round. See `Loop`."""
        agreement = self.w.agreement
        return super().point() | ({} if agreement is None else agreement.point())

    def finish(self) -> None:
        """Wait until the servers have applied this worker's pushes. Raises LinkError if a connection fails."""
        super().finish()  # the workers need not agree on parameters, because the servers hold them
        self.settle()

    def settle(self) -> None:
        """Wait until the servers have applied this worker's pushes. Raises LinkError if a connection fails."""
        self.w.server.settle()
        if self.push_rest_at is not None and isinstance(self.w.server, GroupServer):
            self.w.server.push_rest(self.push_rest_at)

    def close(self) -> None:
        """Release the worker's resources. See `Loop`."""
        super().close()
        if isinstance(self.w.server, DeviceServer):
            self.w.server.close()

    def _count_steps_of_params(self) -> int:
        """Return the number of steps before the last pull: a worker averages the parameters that it pulls."""
        return self.w.position - 1 - self._skipped_before

    def _read_buffers_of_params(self) -> dict[str, Tensor]:
        """Return the buffers before the round: see `_count_steps_of_params`."""
        return self._buffers_before

    def consensus(self) -> Tensor | None:
        """Return None, because the servers hold the parameters."""
        return None

    def evaluation_params(self) -> Tensor:
        """Return the servers' parameters. If workers run in step, first wait until the round's pushes are applied.

        With members, return those after this round, which are the same for all workers. Raises LinkError if a
        connection fails.
        """
        server = self.w.server
        vector: Tensor = server.pull() if runs_in_step(self.w.plan.strategy) else server.read()
        if self.w.members is not None:
            self.w.members.meet()
        return vector

    def evaluate(self, vector: Tensor | None = None) -> Totals:
        """Evaluate the model, which must not change its parameters: see `Loop.evaluate`. Raises WorkloadError."""
        if vector is not None:
            self.w.params = vector
        with self.w.refusing_changes("evaluate"):
            return super().evaluate()

    def state_dict(self, *, together: bool) -> WorkerPart:
        """Return the worker's part without parameters and moments, which the servers have. See `Loop`."""
        return self._make_part(None, {})

    def _load(self, state: Snapshot | TrainingState) -> None:
        self.w.params = state.params
        self.load_buffers(state.buffers)
