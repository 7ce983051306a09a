"""The thread that runs a strategy's rounds, with batches and gradients from the user's loop.

This thread and the user's thread take turns, and exactly one of them runs at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rayps.comm.ring import Ring
from rayps.comm.ring.compressed_mean import CompressedRing
from rayps.core.errors import ConfigError
from rayps.core.strategy import RoundMemory, StrategyView
from rayps.ps.client.client import GroupServer
from rayps.runtime.own_loop.early import EarlyGradients
from rayps.tensors.flat import FlatModel, Gradient
from rayps.tensors.gradient_watch import GradWatch
from rayps.tensors.learning_rate import Pace
from rayps.tensors.optim import plain_values
from rayps.worker.ring_worker import BackgroundMeans


class _Ended(Exception):
    pass


class OwnStepper:
    """Takes the steps of the user's optimizer, and sets the rates of its schedule.

    If servers take the steps (`remote`), `check` raises an error after a change of the optimizer's groups.
    """

    def __init__(self, optimizer: Optimizer, pace: Pace | None, remote: bool) -> None:
        """Prepare the steps of `optimizer`."""
        self._step, self._pace, self._optimizer, self._remote = optimizer.step, pace, optimizer, remote
        self._note_groups()

    def _note_groups(self) -> None:
        groups = self._optimizer.param_groups if self._remote else []
        self._noted = [plain_values(group) for group in groups]

    def __call__(self, step: int) -> None:
        """Take the loop's step with this number, from 0, with the current gradients."""
        if self._pace is not None:
            self._pace.at(step)
            self._note_groups()
        self._step()

    def check(self) -> None:
        """Raise ConfigError if servers take the steps and this worker has changed the optimizer's groups."""
        for noted, group in zip(self._noted, self._optimizer.param_groups, strict=False):
            now = plain_values(group)
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
    early: EarlyGradients | None = None  # None if gradients leave at the step


@dataclass(slots=True)
class RoundState:
    """A strategy's state between rounds, which a saved state has."""

    position: int = 0  # batches taken so far
    memory: RoundMemory = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)


class RoundThread:
    """Runs a strategy's rounds in a thread. The user's thread calls `step` and `clip`; the strategy uses a view."""

    def __init__(
        self, strategy: StrategyView, flat: FlatModel, own_step: OwnStepper, links: LoopLinks, state: RoundState
    ) -> None:
        """Prepare the thread. `start` starts it."""
        self.links, self.state, self.flat = links, state, flat
        self._strategy, self._own_step = strategy, own_step
        self._view: object = None
        self._samples: float = 1  # the number of samples of the current step
        self._gradient: Gradient | None = None
        self._used: list[bool] = []  # which parameters have a gradient
        self._unused: list[int] = []  # parameters that no rank has used
        self._user_may_run = threading.Semaphore(0)  # the user's turn
        self._round_may_run = threading.Semaphore(0)  # the round's turn
        self._error: BaseException | None = None
        self._ending = False
        self._watch = GradWatch(flat)
        # the state of clip_grad_norm_ in the current step. "": not called. "asked": it waits for the mean gradient.
        # "held": the mean is in `.grad`. "dropped": the loop did not step, and has computed another gradient.
        self._clip = ""
        self._thread = threading.Thread(target=self._run, name="rayps-round", daemon=True)

    # ---- the user's side

    def start(self, view: object) -> None:
        """Start the strategy's first round on `view`, and return when the round requests a batch."""
        self._view = view
        self._thread.start()
        self._wait()

    def step(self, closure: Callable[[], float] | None, samples: float) -> float | None:
        """Pass the gradient in `.grad` to the strategy's round, and return when the next round requests a batch."""
        self._own_step.check()
        loss = closure() if closure is not None else None
        if self._mean_is_held():
            self._round_may_run.release()
        else:
            self._offer(samples)
        self._wait()
        self._watch.clear()
        if self.links.early is not None:
            self.links.early.held = False
        return loss

    def clip(self, max_norm: float, samples: float, params: list[nn.Parameter]) -> Tensor:
        """Clip the gradient that the optimizer will use, and return its norm.

        The mean gradient is computed first, unless this step has done so already.
        """
        if self.links.server is not None:
            self._check_unchanged()
            self.flat.collect_used()
        elif not self._mean_is_held():
            self._clip = "asked"
            self._offer(samples)
            self._wait()
            if self._clip != "held":
                self._clip = ""
                raise ConfigError(
                    f"clip_grad_norm_ found no gradient to clip: {type(self._strategy).__name__} takes no step of this "
                    "worker's optimizer",
                    field="strategy",
                )
        norm = nn.utils.clip_grad_norm_(params, max_norm)
        self._watch.record()
        if self.links.early is not None:
            self.links.early.held = True
        return norm

    def _mean_is_held(self) -> bool:
        """Return whether the mean gradient of this step is in `.grad`. Raises ConfigError if `.grad` was changed."""
        held = self._clip == "held" and not self._watch.replaced()
        self._check_unchanged(held)
        if self._clip == "held" and not held:  # the step was skipped, and there is a new gradient
            self._clip = "dropped"
            self._round_may_run.release()
            self._wait()
        return held

    def _check_unchanged(self, held: bool = False) -> None:
        name = self._watch.changed_since_record() if held else self._watch.changed()
        if name is not None:
            raise ConfigError(
                f"the gradient of {name!r} was changed between {'clip_grad_norm_' if held else 'backward'} and "
                "optimizer.step(), not by the wrapped optimizer:\nuntil step() averages the gradients of all workers, "
                "`.grad` is this worker's own; to clip the mean, call optimizer.clip_grad_norm_(max_norm) on the "
                "wrapped optimizer after the last backward; to scale the gradient, scale the loss",
                parameter=name,
            )

    def _offer(self, samples: float) -> None:
        """Pass the gradient in `.grad` to the strategy's round, and let the round continue."""
        self._used, self._unused, self._samples = [p.grad is not None for p in self.flat.parameters], [], samples
        self._gradient = None
        if self.links.early is None:
            self._collect()
        self._round_may_run.release()

    def _collect(self) -> Gradient:
        """Return the gradient in `.grad`, as one vector."""
        if self._gradient is None:
            self._gradient = Gradient(self.flat.collect_grad(), self._samples)
        return self._gradient

    def end_period(self) -> bool:
        """End the strategy's last period as a run that ends early does; all workers call it after their last step.

        Return whether the workers' parameters were apart. The round's thread must wait for a batch.
        """
        view: Any = self._view
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
        """End the thread, in which a round is waiting for a batch. It may not have started, if another rank failed."""
        self._ending = True
        self._watch.close()
        self._round_may_run.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _wait(self) -> None:
        self._user_may_run.acquire()  # the round's own waits have deadlines
        if self._error is not None:
            raise self._error

    # ---- the strategy's side

    def batch(self) -> None:
        """Let the user's loop run until it provides a gradient."""
        self._give_turn()
        self.state.position += 1

    def _give_turn(self) -> None:
        self._user_may_run.release()
        self._round_may_run.acquire()
        if self._ending:
            raise _Ended

    def grad(self) -> Gradient:
        """Return the gradient that the user's loop has computed."""
        if self.links.early is not None:  # the strategy does not use `mean_grad`: from now on, nothing is sent early
            self.links.early.finish(self._samples)
            self.links.early.close()
            self.links.early = None
        self._unused = [i for i, used in enumerate(self._used) if not used] if self.links.server is None else []
        return self._collect()

    def mean_grad(self) -> Tensor:
        """Return the mean of all workers' gradients. The next step skips the parameters that no rank used."""
        early = self.links.early
        found = early.finish(self._samples) if early is not None else None
        if found is not None:
            self._unused = list(found[1])
            return found[0]
        mean: Tensor = self.links.sent.mean(self._collect())
        used = self.links.sent.max(torch.tensor(self._used, dtype=torch.uint8))
        self._unused = [i for i, some in enumerate(used.tolist()) if not some]
        return mean

    def step_own(self, grad: Gradient | Tensor) -> None:
        """Apply a gradient with the user's optimizer."""
        self.flat.load_grad(grad.vector if isinstance(grad, Gradient) else grad)
        for i in self._unused:
            self.flat.parameters[i].grad = None
        if self._clip == "asked":
            self._clip = "held"
            self._give_turn()  # the user's turn, until it steps
            dropped, self._clip = self._clip == "dropped", ""
            if dropped:
                return
        self._own_step(self.state.position - 1)

    def _run(self) -> None:
        view: Any = self._view  # the part of a WorkerView that strategies under `wrap` need
        try:
            self._strategy.begin(view)
            while True:
                self._strategy.round(view)
        except _Ended:
            return
        except BaseException as error:  # any exception is raised again in the user's thread
            self._error = error
            self._user_may_run.release()
