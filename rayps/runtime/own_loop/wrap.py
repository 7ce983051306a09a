"""`rayps.wrap`: an optimizer whose `step` is one round of a strategy, with a saved state of its own."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import math
import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from types import MethodType
from typing import Any, Protocol

import torch
from rayps_client.errors import ConfigError, PeerTimeout, RaypsError, WorkloadError
from rayps_client.values import Json, JsonObject
from torch import Tensor, nn
from torch.optim import Optimizer

from rayps.cluster.local import rendezvous, until
from rayps.comm.ring import Ring
from rayps.comm.ring.compressed_mean import CompressedRing, choose_compressed_ring
from rayps.core.strategy.strategy import Phase, StrategyView
from rayps.core.strategy.strategy_families import LOCAL_UPDATES
from rayps.core.strategy.text import write_strategy
from rayps.core.strategy.topology import Peers, Servers, compression_in, servers_of
from rayps.ps.client.client import GroupServer
from rayps.ps.server_group import ServerGroup, read_present_state
from rayps.runtime.own_loop.equal_buffers import EqualBuffers
from rayps.runtime.own_loop.free_worker import FreeWorker, is_free
from rayps.runtime.own_loop.grad_scaler import take_scaled
from rayps.runtime.own_loop.last_period import (
    explain_never_stepped,
    open_steps,
    warn_of_change_kept_here,
    warn_of_incomplete_period,
)
from rayps.runtime.own_loop.mean_gradient import MeanGradient
from rayps.runtime.own_loop.remote_optimizer import StateOnServers, hide_state
from rayps.runtime.own_loop.rounds import LoopLinks, OwnStepper, RoundState, RoundThread
from rayps.runtime.own_loop.same_objects import SameObjects, map_names
from rayps.runtime.own_loop.same_rows import watch_inputs
from rayps.runtime.own_loop.view import ENDLESS, LoopPlan, LoopView
from rayps.runtime.own_loop.world import World, read_number, world
from rayps.strategies.catalogue import StrategySpec, parse_for_loop, wire
from rayps.tensors import optim
from rayps.tensors.flat import FlatModel, Gradient, find_outside_vector
from rayps.tensors.learning_rate import Maker, Recipe, rates_of
from rayps.tensors.optim import Group
from rayps.tensors.packing import view_bytes
from rayps.tensors.weight_watch import check_alike
from rayps.worker.ring_worker import BackgroundMeans
from rayps.workload.max_norm import check_max_norm
from rayps.workload.model import has_tables

log = logging.getLogger(__name__)


def wrap(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: StrategySpec | None = None,
    *,
    schedule: Maker | None = None,
    steps: int | None = None,
    broadcast_buffers: bool = True,
) -> tuple[nn.Module, Optimizer]:
    """Make `optimizer.step()` one round of a strategy. All workers start with rank 0's parameters.

    The loop is written as in plain torch: zero_grad, loss, backward, step. `strategy` is a strategy as in
    `rayps.train`; the default is that of the run (`rayps.run(..., strategy=...)`), or all_reduce if it has none. Set
    `optimizer.samples` to the number of samples in the batch (default 1). This number, which may be a fraction, is the
    worker's weight in means over the workers.

    Under all_reduce, gradients leave while backward continues, or after it if they are compressed. When backward has
    ended, `.grad` has the mean over the workers, as under torch's DDP. What the loop then does with `.grad` acts on the
    mean: `torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler` with or without `unscale_`, a change by hand. It must
    be the same on all workers. Several backward passes before a step add up, as in plain torch; all workers must call
    backward equally often. To send nothing before the last of them, put the others into `with optimizer.no_sync():`.
    Set `samples` before the last backward. A worker without rows may step without a backward, with `samples` 0.

    Under the other strategies `.grad` is this worker's own. What the loop does with it before `step` acts on the
    worker's own step or push.

    Under `torch.amp.GradScaler`, a step whose gradient is infinite is skipped: by all workers if they step together
    (all_reduce, a parameter server with staleness 0), else by this worker. It counts as a step of the strategy.

    Under strategies whose workers train separately (local_sgd, diloco, downpour), give `steps`, the number of steps of
    the whole loop, so that the last one ends with an average or a push. Without it, a last period that is incomplete is
    ended when the function has returned, and a warning says so: what the function measured and saved before is of each
    worker's own parameters.

    The model and the optimizer must stay the objects that they are at `wrap`: convert, move and load them before. All
    workers start with rank 0's state of the optimizer too. Under servers, the servers take the state over, and
    `optimizer.state_dict()` reads it from them.

    `schedule` is a function such as `Workload.schedule`, which returns a scheduler, for example
    `rayps.wrap(model, optimizer, schedule=lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000))`. This scheduler
    is stepped once per step, under every strategy. A scheduler in the loop also works if the worker's optimizer takes
    the steps. Under a parameter server the shards take the steps, and a change of the optimizer's groups on the worker
    is an error at the next step.

    `optimizer.clip_grad_norm_(max_norm)`, between the last backward and `step`, clips as torch's function does, and
    first computes the mean if all backward passes were inside `no_sync`. If gradients are pushed to servers, it clips
    this worker's push. It returns the norm.

    If workers step together, they have rank 0's buffers after each step, such as BatchNorm's statistics. With
    `broadcast_buffers=False` each worker keeps its own. Local SGD and DiLoCo average them with the parameters; under
    servers with staleness there is no common moment, and each worker keeps its own.

    Raises:
        ConfigError: `wrap` is called outside a `run`, the strategy is a list of phases or works only in `train`, the
            model has sparse tables, or `steps` is no number of at least 1.
        WorkloadError: the optimizer needs a closure (LBFGS) or sparse gradients (SparseAdam), or steps parameters that
            learn and are not the model's.

    Example:
        def train_fn():
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = rayps.wrap(model, optimizer, "all_reduce")
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(8, 3)).square().mean().backward()
                optimizer.step()

        rayps.run(train_fn, workers=2)
    """
    here = world()
    chosen = parse_for_loop(here.place.strategy if strategy is None else strategy)
    if has_tables(model):
        raise ConfigError("wrap takes no model with sparse tables: use rayps.train, which gives them servers")
    check_max_norm(model, chosen, here.size)
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ConfigError(f"steps is {steps!r}: give the number of the loop's steps, at least 1", field="steps")
    optim.check_step(optimizer, keeps_sparse=False)
    number = next(here.wraps)
    if here.rank == 0:  # the driver shows it, because only the call knows its strategy
        told = wire([Phase(None, chosen)])
        message = f"rayps.wrap takes {write_strategy(told)}"
        with here.lock:
            here.events.append({"kind": "wrapped", "message": message, "number": number, "strategy": told})
    name = f"{here.place.name}/{number}"
    wrapping = _Wrapping(here, chosen, name, model, optimizer, steps=steps, broadcasts=broadcast_buffers)
    rounds = wrapping.connect(number, schedule)
    for other in here.wrapped:
        other.exclude(model, apart=wrapping.is_apart)
    here.wrapped.append(wrapping)
    here.closing.append(wrapping.disconnect)
    _extend(optimizer, rounds, here)
    if number == 0 and here.size > 1 and here.restored is None:
        watch_inputs(model, partial(setattr, here, "inputs"))
    here.begin_trace(None if steps is None else steps - rounds.state.position)
    rounds.start(LoopView(rounds, here, optimizer, LoopPlan(ENDLESS if steps is None else steps, seed=here.place.seed)))
    here.produced()  # the driver learns whether the others go on without this worker
    return model, optimizer


def _extend(optimizer: Optimizer, rounds: RoundThread, here: World) -> None:
    """Give the user's optimizer the methods of a wrapped one."""
    mean = rounds.links.mean
    optimizer.samples = 1  # type: ignore[attr-defined]
    if mean is not None:
        mean.weight = lambda: _check_weight(getattr(optimizer, "samples", 1))

    def step(self: _Wrapped, closure: Callable[[], float] | None = None) -> float | None:
        loss = rounds.step(closure, _check_weight(self.samples), take_scaled(optimizer))
        self._opt_called = True
        here.steps += 1
        here.measure.end_step(rounds.take_held())
        here.produced()
        return loss

    def clip_grad_norm_(self: _Wrapped, max_norm: float) -> Tensor:
        return rounds.clip(
            _check_norm(max_norm),
            _check_weight(self.samples),
            [p for group in self.param_groups for p in group["params"]],
        )

    @contextlib.contextmanager
    def no_sync(self: _Wrapped) -> Iterator[None]:
        if mean is None:  # gradients leave at the step anyway
            yield
            return
        mean.suspended += 1
        try:
            yield
        finally:
            mean.suspended -= 1

    def state_dict(self: Optimizer) -> dict[str, object]:
        server, flat = rounds.links.server, rounds.flat
        assert server is not None, "servers take the steps"
        with hide_state(self):
            optim.load(self, read_present_state(server)[1], flat.layout, list(flat.parameters))
            return type(self).state_dict(self)

    if rounds.links.server is not None:  # which has the moments
        optimizer.state_dict = MethodType(state_dict, optimizer)  # type: ignore[method-assign]
    # torch's learning-rate schedulers expect a bound method, and warn of one that they have not marked themselves
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # see `rayps.runtime.own_loop.grad_scaler`
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.clip_grad_norm_ = MethodType(clip_grad_norm_, optimizer)  # type: ignore[attr-defined]
    optimizer.no_sync = MethodType(no_sync, optimizer)  # type: ignore[attr-defined]


class _Wrapping:
    """A wrapped model and optimizer: their connections, and their part of a saved state."""

    def __init__(
        self,
        here: World,
        strategy: StrategyView,
        name: str,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        steps: int | None,
        broadcasts: bool,
    ) -> None:
        self._here, self._strategy, self._name, self._steps = here, strategy, name, steps
        self._broadcasts = broadcasts
        self._model, self._optimizer = model, optimizer
        self._servers = servers_of(strategy)
        # whether workers have parameters of their own between two rounds
        self._apart = strategy.loop == LOCAL_UPDATES or (self._servers is not None and self._servers.own_copies)
        self._free = FreeWorker(name, here) if is_free(strategy) else None
        self._group: ServerGroup | None = None
        self._rounds: RoundThread | None = None
        self._objects: SameObjects | None = None

    def connect(self, number: int, schedule: Maker | None) -> RoundThread:
        """Connect the workers, which then have rank 0's parameters or those of the saved state."""
        here, optimizer, servers = self._here, self._optimizer, self._servers
        place = here.place
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        alone = self._free is not None and self._free.follows  # the others have begun
        ring = Ring.join(
            f"{self._name}/{time.time_ns()}" if alone else self._name,
            0 if alone else here.rank,
            1 if alone else here.size,
            timeout=place.timeout,
            join_timeout=place.start,
            device=str(device) if device.type == "cuda" else "cpu",
        )
        if here.rank == 0 and here.size > 1:
            log.info(ring.choice)
        takes_mean = self._strategy.mean_rounds > 0 and here.size > 1
        flat = FlatModel(self._model, ring.memory(device) if takes_mean else None)
        flat.drop_grad()  # no gradient yet, as in plain torch: a parameter without a gradient was not used
        saved = here.wrap_states(number)
        # a schedule begins with the rates that the loop has set: a saved optimizer has those of its last step
        scheduled = None if schedule is None else Recipe(_make_optimizer_factory(optimizer, flat), schedule)
        if saved is not None:
            self._load(flat, *saved)
        for value in [flat.vector, *find_outside_vector(self._model).values()]:
            ring.broadcast(value)
        state = RoundState()
        if saved is not None:
            state = self._resume(flat, *saved)
        else:
            _share_state(optimizer, ring)
        factory = scheduled or _make_optimizer_factory(optimizer, flat)
        steps_here = servers is None or servers.own_copies
        rates = rates_of(factory, flat.layout) if steps_here else None
        links = self._make_links(ring, flat)
        if servers is not None:
            self._group = _open_shared_group(
                self._name, here, lambda: _start_servers(servers, flat, optimizer, factory, here, state.position, saved)
            )
            links.server = self._group.server(here.rank)
            _restore_feedback(links.server, saved)
            if self._free is not None:
                nothing = None if servers.staleness is None else flat.vector[:0]
                state.behind = self._free.begin(links.server, state.began, nothing)
            if not servers.own_copies:
                vars(optimizer)["state"] = StateOnServers(map_names(flat))
        if saved is not None:
            links.means.restore(state.memory)
        self._objects = SameObjects(flat, optimizer, remote=servers is not None)
        stepper = OwnStepper(optimizer, rates, self._objects, self._strategy)
        self._rounds = RoundThread(self._strategy, flat, stepper, links, state)
        return self._rounds

    def _make_links(self, ring: Ring, flat: FlatModel) -> LoopLinks:
        sent: Ring | CompressedRing = ring
        compression = compression_in(self._strategy)
        if compression is not None and self._servers is None:
            sent, choice = choose_compressed_ring(ring, compression, Gradient(flat.packed, 0))
            log.info(choice["message"])
        links = LoopLinks(ring, sent, BackgroundMeans(ring, sent))
        if self._strategy.mean_rounds and ring.size > 1:
            topology = self._strategy.topology
            bucket_mb = topology.bucket_mb if isinstance(topology, Peers) else None
            links.mean = MeanGradient(flat, ring, ring if self._apart else sent, bucket_mb)
            if self._here.rank == 0 and links.mean.choice:
                log.info(links.mean.choice)
        if self._broadcasts and ring.size > 1:
            links.buffers = EqualBuffers(self._model, ring)
        return links

    @property
    def is_free(self) -> bool:
        """Whether another process can take this worker's place while the others continue."""
        return self._free is not None

    @property
    def is_apart(self) -> bool:
        """Whether servers or averages set the parameters, and not the optimizer's own steps alone."""
        return self._apart or self._servers is not None

    def exclude(self, model: nn.Module, *, apart: bool) -> None:
        """Take note that another optimizer is wrapped with this model. Only all_reduce can then step both."""
        if self._objects is not None and (apart or self.is_apart):
            self._objects.exclude(model)

    # ---- saved states

    def state(self) -> JsonObject:
        """Return this worker's part of a saved state.

        Rank 0 has the parameters and the optimizer's state for all, unless workers have their own.
        """
        assert self._rounds is not None
        links, state = self._rounds.links, self._rounds.state
        self._warn_of_change("rayps.save")
        links.means.settle()
        whole = self._apart or self._here.rank == 0
        found: dict[str, Any] = {
            "position": state.position,
            "memory": state.memory | links.means.feedback(),
            "buffers": dict(self._model.named_buffers()),
        }
        if whole:
            found["vector"] = self._rounds.flat.vector
            with contextlib.nullcontext() if self._apart or links.server is None else hide_state(self._optimizer):
                found["optimizer"] = type(self._optimizer).state_dict(self._optimizer)
        if self._here.rank == 0:
            found["shared"] = state.shared
            found["layout"] = self._describe_layout(self._rounds.flat)
            if links.server is not None:
                found["servers"], found["moments"] = read_present_state(links.server)
                found["pushed"] = links.server.step
        if links.server is not None and links.server.feedback is not None:
            found["feedback"] = links.server.feedback.residual
        return found

    def _describe_layout(self, flat: FlatModel) -> JsonObject:
        """Return the names of the model's learning parameters, with shapes, and of the buffers in its state dict."""
        kept = self._model.state_dict(keep_vars=True)
        return {
            "parameters": [[entry.name, list(entry.shape)] for entry in flat.layout.entries],
            "buffers": [name for name, _ in self._model.named_buffers() if name in kept],
        }

    def _load(self, flat: FlatModel, own: JsonObject, first: JsonObject) -> None:
        """Load the parameters and the optimizer's state, before the workers agree on rank 0's parameters."""
        found: dict[str, Any] = own if "vector" in own else first
        if found["vector"].numel() != flat.vector.numel():
            raise ConfigError(
                f"the saved state has {found['vector'].numel()} parameters, and the wrapped model has "
                f"{flat.vector.numel()}: resume with the model that was saved, or start in another folder"
            )
        with torch.no_grad():
            flat.vector.copy_(found["vector"])
        self._optimizer.load_state_dict(found["optimizer"])

    def _resume(self, flat: FlatModel, own: JsonObject, first: JsonObject) -> RoundState:
        """Load what is this worker's own, after the workers have agreed, and return the strategy's state."""
        mine: dict[str, Any] = own
        common: dict[str, Any] = first
        buffers = dict(self._model.named_buffers())
        with torch.no_grad():
            if "vector" in mine:
                flat.vector.copy_(mine["vector"])
            for name, value in mine["buffers"].items():
                if name in buffers:
                    buffers[name].copy_(value)
        began = (mine if self._here.restores_own else common)[
            "position"
        ]  # `restore` returns rank 0's steps, or own ones
        return RoundState(mine["position"], dict(mine["memory"]), dict(common["shared"]), began)

    def disconnect(self, failed: bool) -> None:
        """End the connections. Before, all workers end an incomplete period together, unless the loop has failed.

        Raises:
            WorkloadError: the loop has taken no step, and changed parameters, but not alike on all workers.
        """
        rounds = self._rounds
        assert rounds is not None
        links = rounds.links
        if not failed and self._free is None:
            try:
                self._check_end(rounds)
            except RaypsError:
                self.disconnect(True)
                raise
        if failed:
            links.ring.abort()  # the other ranks must not wait for this one
            if links.server is not None:
                links.server.hang_up()
        elif self._apart:
            self._end_period(rounds)
        rounds.close()
        if links.mean is not None:
            links.mean.close()
        if links.server is not None:
            links.server.close()
        try:
            if not failed:  # the shards must not end before all workers have disconnected
                if self._free is None:
                    links.ring.barrier()
                else:
                    self._leave(self._free, rounds)
        finally:
            rounds.flat.drop_grad()  # gradients may be in the ring's memory
            links.ring.close()
            if self._group is not None:
                self._group.close()

    def _leave(self, free: FreeWorker, rounds: RoundThread) -> None:
        """End without a ring, and check what `_check_end` checks: see `disconnect`."""
        self._warn_of_change("when the function had returned")
        steps, vector = rounds.state.position, rounds.flat.vector
        digest = "" if steps else sha256(view_bytes(vector.cpu()).tobytes()).hexdigest()
        name = free.leave(rounds.changed(), steps, digest)
        if name is not None:
            raise explain_never_stepped(self._strategy, name)

    def _check_end(self, rounds: RoundThread) -> None:
        """Check what the loop has done with parameters after its last step: see `disconnect`. All workers call it."""
        self._warn_of_change("when the function had returned")
        ring, name = rounds.links.ring, rounds.changed()
        most, stepped = ring.max(
            torch.tensor([name is not None, rounds.state.position > 0], dtype=torch.uint8)
        ).tolist()
        if most and not stepped:
            try:
                check_alike(rounds.flat, ring)
            except WorkloadError as error:
                raise explain_never_stepped(self._strategy, str(error.data["parameter"])) from error

    def _warn_of_change(self, when: str) -> None:
        name = None if self._rounds is None or self._servers is None else self._rounds.changed()
        if name is not None:
            self._here.warn(warn_of_change_kept_here(self._strategy, name, f"worker-{self._here.rank}, {when}"))

    def _end_period(self, rounds: RoundThread) -> None:
        """Give all workers equal parameters if the loop ended between two averages or pushes; warn if it did."""
        strategy, steps = self._strategy, open_steps(self._strategy, rounds.state.memory)
        most, least = rounds.links.ring.max(torch.tensor([steps, -steps])).tolist()
        even = most == -least or rounds.links.server is not None
        if not (most or strategy.needs_end) or (even and not rounds.end_period()) or self._here.rank:
            return
        self._here.warn(warn_of_incomplete_period(strategy, most, rounds.state.position, self._steps, even=even))


def _start_servers(
    servers: Servers,
    flat: FlatModel,
    optimizer: Optimizer,
    factory: Callable[[list[nn.Parameter]], Optimizer],
    here: World,
    begun: int,
    saved: list[JsonObject] | None,
) -> ServerGroup:
    """Start the servers, with the parameters and moments of the saved state if there is one, else those of rank 0."""
    own = {"moments": optim.copy_moments(optimizer, flat.layout, list(flat.parameters))}
    found: dict[str, Any] = own if saved is None else saved[1]
    vector = found.get("servers", flat.vector)
    entries = flat.layout.entries
    return ServerGroup(
        {entry.name: vector[entry.lo : entry.hi].view(entry.shape) for entry in entries},
        shards=servers.count,
        replicas=servers.replicas,
        staleness=servers.staleness,
        compression=servers.compression,
        workers=here.size,
        timeout=here.place.timeout,
        optimizer=factory,
        topology=servers,
        begun=found.get("pushed", begun),
        moments=found.get("moments"),
    )


def _share_state(optimizer: Optimizer, ring: Ring) -> None:
    """Give all workers the state and the groups of rank 0's optimizer, if any worker has loaded a state before `wrap`.

    The state dict of a group numbers its parameters, which are each worker's own.
    """
    if not ring.max(torch.tensor([bool(optimizer.state)], dtype=torch.uint8)).item():
        return
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    size = ring.broadcast(torch.tensor([file.tell()])).item()
    parcel = torch.zeros(int(size), dtype=torch.uint8)
    if ring.rank == 0:
        parcel.copy_(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
    ring.broadcast(parcel)
    if ring.rank:
        optimizer.load_state_dict(
            torch.load(io.BytesIO(parcel.numpy().tobytes()), map_location="cpu", weights_only=False)
        )


def _restore_feedback(server: GroupServer, saved: list[JsonObject] | None) -> None:
    """Restore what this worker's compressed pushes have not sent yet."""
    own: dict[str, Any] = {} if saved is None else saved[0]
    left = own.get("feedback")
    if server.feedback is not None and left is not None:
        server.feedback.residual.copy_(left)


def _open_shared_group(name: str, here: World, make: Callable[[], ServerGroup]) -> ServerGroup:
    """Create the server group on rank 0; on the other ranks, wait until rank 0 has created it. Return the group."""
    values, key = rendezvous(), f"rayps/group/{name}"
    if here.rank == 0:
        group = make()
        values.put(key, pickle.dumps(group))
        return group
    if not until(lambda: values.get(key) is not None, here.place.timeout):
        raise PeerTimeout(
            f"worker-0 did not start the run's shards within {here.place.timeout:g} s: raise timeout",
            peer="worker-0",
            seconds=here.place.timeout,
        )
    shared: ServerGroup = pickle.loads(values.get(key) or b"")
    return shared


def _make_optimizer_factory(optimizer: Optimizer, flat: FlatModel) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Return a function that makes an optimizer like `optimizer`, with its groups, for slices of the parameters."""
    order = {id(p): i for i, p in enumerate(flat.parameters)}
    kind = type(optimizer)
    # not every default is an argument: AdamW has decoupled_weight_decay, and its groups carry it
    defaults = {key: value for key, value in optimizer.defaults.items() if key in inspect.signature(kind).parameters}
    groups = [
        (
            {key: value for key, value in group.items() if key not in ("params", "param_names")},
            [order[id(p)] for p in group["params"] if id(p) in order],
        )
        for group in optimizer.param_groups
    ]

    def build(params: list[nn.Parameter]) -> Optimizer:
        return kind([{**options, "params": [params[i] for i in members]} for options, members in groups], **defaults)

    return build


def _check_norm(given: Json) -> float:
    """Return `max_norm` as a number. Raises ConfigError if it is not a number above 0."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        raise ConfigError(
            f"max_norm is {given!r}: give a number above 0 (inf: measure the norm without clipping)", field="max_norm"
        )
    return float(given)


def _check_weight(given: object) -> float:
    """Return `optimizer.samples` as a number. Raises ConfigError if it is not a finite number of at least 0."""
    found = None if isinstance(given, bool) else read_number(given)
    if found is None or not 0 <= found < math.inf:
        raise ConfigError(
            f"optimizer.samples is {given!r}: give the weight of the batch, such as its number of rows: a finite "
            "number of at least 0",
            field="samples",
        )
    return found


class _Wrapped(Protocol):
    """The user's optimizer after `wrap`."""

    samples: float
    param_groups: list[Group]
    _opt_called: bool  # torch: whether `step` was called, which a scheduler expects


__all__ = ["wrap"]
