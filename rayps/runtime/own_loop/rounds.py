"""The thread that runs a strategy's rounds, with batches and gradients from the user's loop.

This thread and the user's thread take turns, and exactly one of them runs at any time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rayps_client.errors import ConfigError, PeerLost
from torch import Tensor, nn
from torch.optim import Optimizer

from rayps.comm.ring import Ring
from rayps.comm.ring.compressed_mean import CompressedRing
from rayps.core.strategy.strategy import RoundMemory, StrategyView
from rayps.core.strategy.strategy_families import LOCAL_UPDATES, SYNC_GRADIENTS
from rayps.core.strategy.topology import runs_in_step, servers_of
from rayps.ps.client.client import GroupServer
from rayps.runtime.own_loop.equal_buffers import EqualBuffers
from rayps.runtime.own_loop.grad_scaler import Scaled
from rayps.runtime.own_loop.mean_gradient import MeanGradient
from rayps.runtime.own_loop.remote_optimizer import refuse_hooks, refuse_own_step, run_pre_hooks
from rayps.runtime.own_loop.same_objects import SameObjects
from rayps.tensors.flat import FlatModel, Gradient
from rayps.tensors.learning_rate import Rates
from rayps.tensors.optim import select_plain_values
from rayps.tensors.weight_watch import check_alike, explain_change_lost, find_differing
from rayps.worker.ring_worker import BackgroundMeans


class _Ended(Exception):
    pass


class OwnStepper:
    """Takes the steps of the user's optimizer, and sets the rates of its schedule.

    If servers take the steps, `check` raises an error after a change of the optimizer's groups.
    """

    def __init__(self, optimizer: Optimizer, rates: Rates | None, objects: SameObjects, strategy: StrategyView) -> None:
        """Prepare the steps of `optimizer`. `objects` are what `wrap` was given.

        Raises:
            WorkloadError: servers take the steps under `strategy`, and the optimizer has what they would not do.
        """
        self._step, self._rates, self._optimizer = optimizer.step, rates, optimizer
        self._name, self._servers = strategy.name, servers_of(strategy)
        self.objects = objects
        if self._servers is not None:
            refuse_own_step(optimizer, self._name)
        self._refuse_hooks()
        self._note_groups()

    def _refuse_hooks(self) -> None:
        if self._servers is not None:
            refuse_hooks(self._optimizer, self._name, takes_pre_hooks=not self._servers.own_copies)

    def _note_groups(self) -> None:
        groups = [] if self._servers is None else self._optimizer.param_groups
        self._noted = [select_plain_values(group) for group in groups]

    def __call__(self, step: int) -> None:
        """Take the loop's step with this number, from 0, with the current gradients."""
        if self._rates is not None:
            self._rates.apply(self._optimizer.param_groups, step)
            self._note_groups()
        self._step()
        self.objects.note_state()

    def run_pre_hooks(self) -> bool:
        """Run the hooks before a step that servers take, on this worker, and return whether there were any."""
        return self._servers is not None and not self._servers.own_copies and run_pre_hooks(self._optimizer)

    def check(self) -> None:
        """Raise an error if the loop has changed what rayps does not see.

        Raises:
            ConfigError: servers take the steps, and this worker has changed values of the optimizer's groups.
            WorkloadError: see `SameObjects.check` and `refuse_hooks`.
        """
        self.objects.check()
        self._refuse_hooks()
        for noted, group in zip(self._noted, self._optimizer.param_groups, strict=False):
            now = select_plain_values(group)
            for key, value in noted.items():
                if now.get(key) != value:
                    raise ConfigError(
                        f"{key} of the optimizer was changed from {value!r} to {now.get(key)!r}, but under a parameter "
                        "server the shards take the steps, with the groups as they were at wrap: give the schedule as "
                        "rayps.wrap(..., schedule=lambda optimizer: SomeLR(optimizer, ...)), and step no scheduler in "
                        "the loop; or use all_reduce",
                        field="schedule",
                    )


@dataclass(slots=True)
class LoopLinks:
    """What connects a wrapped optimizer with the other workers."""

    ring: Ring
    sent: Ring | CompressedRing  # the ring that compresses gradients, or `ring` itself
    means: BackgroundMeans
    server: GroupServer | None = None
    mean: MeanGradient | None = None  # None if no round takes the mean gradient, or there is one worker
    buffers: EqualBuffers | None = None  # None if each worker keeps its own buffers

    def totals(self) -> tuple[float, float]:
        """Return the seconds in which this worker has waited for others and for servers, and those of its transfers."""
        waited = 0.0 if self.server is None else self.server.seconds_waiting
        return waited + self.ring.seconds_waiting, self.ring.seconds_moving


@dataclass(slots=True)
class RoundState:
    """A strategy's state between rounds, which a saved state has."""

    position: int = 0  # batches taken so far
    memory: RoundMemory = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    began: int = 0  # the number of steps after which the user's function continues
    behind: int = 0  # the next steps whose pushes the servers have already, from the process before this one


class RoundThread:
    """Runs a strategy's rounds in a thread. The user's thread calls `step` and `clip`; the strategy uses a view."""

    def __init__(
        self, strategy: StrategyView, flat: FlatModel, own_step: OwnStepper, links: LoopLinks, state: RoundState
    ) -> None:
        """Prepare the thread. `start` starts it."""
        self.links, self.state, self.flat = links, state, flat
        self._strategy, self._own_step = strategy, own_step
        self._view: Any = None  # the part of a WorkerView that strategies under `wrap` need
        self._round = 0  # the number of the round that awaits a gradient, or has got it
        self._samples: float = 1  # the number of samples of the current step
        self._gradient: Gradient | None = None
        self._unused: list[int] = []  # parameters that no rank has used
        # whether a GradScaler has found this step's gradient infinite; None if the loop uses no GradScaler
        self._found_inf: bool | None = None
        self._user_may_run = threading.Semaphore(0)  # the user's turn
        self._round_may_run = threading.Semaphore(0)  # the round's turn
        self._error: BaseException | None = None
        self._ending = False
        self._held = 0.0  # seconds for which steps have held up the loop
        self._totals = links.totals()  # when `take_held` was called last
        self._touched = False  # whether the loop has written parameters in place, which the workers have not compared
        self._thread = threading.Thread(target=self._run, name="rayps-round", daemon=True)
        if links.mean is not None:
            links.mean.is_due = self._takes_mean_now
            links.mean.is_touched = self._take_touched

    @property
    def takes_mean(self) -> bool:
        """Whether the round that awaits a gradient takes the mean over the workers."""
        return self._round < self._strategy.mean_rounds

    @property
    def is_in_step(self) -> bool:
        """Whether all workers end the round that awaits a gradient together, with equal parameters."""
        return self.takes_mean or (self._strategy.loop != LOCAL_UPDATES and runs_in_step(self._strategy))

    @property
    def _is_watched(self) -> bool:
        """Whether it matters that the loop changes parameters in place in the round that awaits a gradient."""
        together = self.links.ring.size > 1 and self.is_in_step
        return together or self.links.server is not None or not self.state.position

    def _takes_mean_now(self) -> bool:
        """Return `takes_mean`, after a check of the parameters, whose gradients are in their memory."""
        if self.takes_mean:
            self._own_step.objects.check_data()
        return self.takes_mean

    def _take_touched(self) -> bool:
        """Return whether the loop has written parameters in place since the last call, or since the last step."""
        found, self._touched = self._is_touched(), False
        if found:
            self.flat.watch.record()
        return found

    def _is_touched(self) -> bool:
        objects = self._own_step.objects
        replaced, objects.has_put_back = objects.has_put_back, False
        return self._touched or (self._is_watched and (replaced or self.flat.watch.touched()))

    def _check_parameters(self) -> None:
        """Raise WorkloadError if the loop has done with parameters what would be lost or wrong under the strategy."""
        self.flat.refuse_thawed()
        if self.links.server is not None:
            self.flat.refuse_frozen(self._strategy.name)
            name = self.flat.watch.changed()
            if name is not None:
                raise explain_change_lost("the loop", name, self._strategy.name)
        else:
            self._touched = self._is_touched()

    # ---- the user's side

    def changed(self) -> str | None:
        """Return the name of a parameter that the loop has changed in place after its last step, or None."""
        return self.flat.watch.changed()

    def start(self, view: object) -> None:
        """Start the strategy's first round on `view`, and return when the round requests a batch."""
        self._view = view
        self._thread.start()
        self._wait()

    def step(self, closure: Callable[[], float] | None, samples: float, scaled: Scaled | None) -> float | None:
        """Pass the gradient in `.grad` to the strategy's round, and return when the next round requests a batch.

        `scaled` is what a GradScaler has stated about the gradient.
        """
        self._own_step.check()
        loss = closure() if closure is not None else None
        self._check_parameters()
        mean = self._choose_mean(samples)
        self._found_inf = None if scaled is None else scaled.found_inf
        if scaled is not None:
            if mean is not None and not mean.in_backward:
                raise ConfigError(
                    "GradScaler has checked this worker's own gradient, not the mean over the workers: call backward "
                    "before each step on all workers, the last time outside of optimizer.no_sync(); a worker without "
                    "rows takes the backward of a loss times 0",
                    field="optimizer",
                )
            scaled.unscale()
        if not self._found_inf and self._own_step.run_pre_hooks():
            self._own_step.check()
            self._check_parameters()
        self._samples, self._gradient, in_step = samples, None, self.is_in_step
        began = time.perf_counter()
        self._round_may_run.release()
        self._wait()
        self._held += time.perf_counter() - began
        if self.links.mean is not None:
            self.links.mean.end_step()
        if self.links.buffers is not None and in_step:
            self.links.buffers.send()
        return loss

    def take_held(self) -> dict[str, float]:
        """Return for how many seconds the loop was held up since the last call, by waits and by communication.

        What the rings have waited and moved in the background while the loop went on is left out.
        """
        mean = self.links.mean
        held, self._held = self._held, 0.0
        if mean is not None:
            held, mean.held = held + mean.held, 0.0
        totals = self.links.totals()
        waiting, moving = (now - before for now, before in zip(totals, self._totals, strict=True))
        self._totals = totals
        waiting = min(waiting, held)
        return {"waiting": waiting, "communication": min(moving, held - waiting)}

    def clip(self, max_norm: float, samples: float, params: list[nn.Parameter]) -> Tensor:
        """Clip the gradient that the optimizer will use, and return its norm.

        The mean gradient is computed first, unless backward has done so.
        """
        self._own_step.objects.check_data()
        mean = self._choose_mean(samples)
        if mean is not None and mean.samples is None:
            mean.average(samples)
        elif mean is None and self._strategy.loop == SYNC_GRADIENTS and self.links.ring.size > 1:
            raise ConfigError(
                f"clip_grad_norm_ finds this worker's own gradient: {self._strategy.name} computes the mean in its "
                "round; clip it there, or let the round call w.mean_grad, and give the strategy mean_rounds",
                field="strategy",
            )
        self.flat.collect_used()
        return nn.utils.clip_grad_norm_(params, max_norm)

    def _choose_mean(self, samples: float) -> MeanGradient | None:
        """Return what computes the mean of this step. Raises ConfigError if the samples changed after backward."""
        mean = self.links.mean if self.takes_mean else None
        if mean is not None and mean.samples not in (None, samples):
            raise ConfigError(
                f"optimizer.samples was changed from {mean.samples:g} to {samples:g} after backward, which has "
                "averaged the gradients with it: set samples before the last backward of a step",
                field="samples",
            )
        return mean

    def _collect(self) -> Gradient:
        """Return the gradient in `.grad`, as one vector. If it has no samples or is skipped, it is zero."""
        if self._gradient is None:
            found = [p.grad is not None for p in self.flat.parameters] if self.links.server is None else []
            self._unused = [i for i, used in enumerate(found) if not used]
            packed = self.flat.collect_grad()
            if self._found_inf:
                self._samples = 0
            if not self._samples and not self.takes_mean:
                packed.zero_()
            self._gradient = Gradient(packed, self._samples, skipped=bool(self._found_inf))
        return self._gradient

    def _agree_on_skip(self) -> None:
        """If a GradScaler is used and workers are in step, skip the step if any worker's gradient is infinite."""
        if self._found_inf is not None and self.is_in_step and self.links.ring.size > 1:
            self._found_inf = bool(self.links.ring.max(torch.tensor([self._found_inf], dtype=torch.uint8)))

    def end_period(self) -> bool:
        """End the strategy's last period as a run that ends early does; all workers call it after their last step.

        Return whether the workers' parameters were apart. The round's thread must wait for a batch.
        """
        view = self._view
        self._strategy.finish(view)
        agreed, server = self._strategy.consensus(view), self.links.server
        if server is not None:
            server.settle()
            self.links.ring.barrier()  # all workers have pushed
            agreed = server.read()
        if agreed is not None:
            view.params = agreed
        return agreed is not None

    def close(self) -> None:
        """End the thread, in which a round is waiting for a batch.

        If another rank failed, the thread may not have started, or `start` may be starting it: it then ends at once.
        """
        self._ending = True
        self._round_may_run.release()
        if self._thread.is_alive():  # `ident` is known before a thread can be joined
            self._thread.join()

    def _wait(self) -> None:
        self._user_may_run.acquire()  # the round's own waits have deadlines
        if self._error is not None:
            raise self._error

    # ---- the strategy's side

    def batch(self) -> None:
        """Let the user's loop run until it provides a gradient."""
        self._round = self.state.position
        if self._is_watched:
            self.flat.watch.record()
        self._user_may_run.release()
        self._round_may_run.acquire()
        if self._ending:
            raise _Ended
        if not self.state.position:
            self._begin_again()
        self.state.position += 1

    def _begin_again(self) -> None:
        """If the loop has loaded parameters before its first step, alike on all workers, begin the strategy with these.

        Else the strategy keeps what all workers had at first, and a change is each worker's own.
        """
        ring = self.links.ring
        if ring.size > 1 and self.links.server is None and not self.takes_mean:  # the mean compares them
            touched = ring.max(torch.tensor([self._touched], dtype=torch.uint8)).item()
            self._touched = bool(touched) and find_differing(self.flat, ring) is None
        if self._touched:
            self.state.shared.clear()
            self._strategy.begin(self._view)

    def grad(self) -> Gradient:
        """Return the gradient that the user's loop has computed.

        Raises ConfigError if `.grad` has the mean over the workers instead.
        """
        if self.links.mean is not None and self.links.mean.samples is not None:
            raise ConfigError(
                f"a round of {self._strategy.name} calls w.grad, but its mean_rounds says that it calls w.mean_grad: "
                "give the strategy `mean_rounds = 0`",
                field="strategy",
            )
        if self._gradient is None:
            self._agree_on_skip()
        return self._collect()

    def mean_grad(self) -> Tensor:
        """Return the mean of all workers' gradients. The next step skips the parameters that no rank used."""
        mean = self.links.mean if self.takes_mean else None
        if mean is not None:
            if mean.samples is None:
                mean.average(self._samples)
            return self._collect().vector
        self._agree_on_skip()
        gradient = self._collect()
        used = torch.ones(len(self.flat.parameters) + 1, dtype=torch.uint8)
        used[self._unused] = 0
        used[-1] = self._take_touched()
        *marks, touched = self.links.ring.max(used).tolist()
        self._unused = [i for i, mark in enumerate(marks) if not mark]
        if touched:
            check_alike(self.flat, self.links.ring)
        found: Tensor = gradient.vector if gradient.skipped else self.links.sent.mean(gradient)
        return found

    def step_own(self, grad: Gradient | Tensor) -> None:
        """Apply a gradient with the user's optimizer, unless a GradScaler skips the step."""
        if self._found_inf:
            return
        self.flat.load_grad(grad.vector if isinstance(grad, Gradient) else grad)
        for i in self._unused:
            self.flat.parameters[i].grad = None
        self._own_step(self.state.position - 1)

    def _run(self) -> None:
        view = self._view
        try:
            self._strategy.begin(view)
            while True:
                self._strategy.round(view)
        except _Ended:  # a loop whose process is ended from outside must not wait for this thread
            self._error = PeerLost("this worker of the run was ended", peer="driver")
            self._user_may_run.release()
        except BaseException as error:  # any exception is raised again in the user's thread
            self._error = error
            self._user_may_run.release()
