"""The worker that a strategy's round uses in a user's loop: a part of `rayps.core.strategy.strategy.WorkerView`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from rayps_client.errors import ConfigError
from rayps_client.values import Json
from torch import Tensor
from torch.optim import Optimizer

from rayps.core.job.records import Event
from rayps.core.strategy.strategy import RoundMemory
from rayps.runtime.own_loop.rounds import RoundThread
from rayps.runtime.own_loop.world import World
from rayps.tensors.flat import Gradient

ENDLESS = 2**62  # the end of a loop whose number of steps is not known


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The plan of a user's loop: it begins at step 0, and ends after `end` steps."""

    end: int = ENDLESS
    origin: tuple[int, int] = (0, 0)
    seed: int = 0


class LoopView:
    """A worker of a user's loop, with the names that a strategy uses. See `rayps.core.strategy.strategy.WorkerView`."""

    def __init__(self, rounds: RoundThread, here: World, optimizer: Optimizer, plan: LoopPlan) -> None:
        self.rank, self.size, self.plan = here.rank, here.size, plan
        links = rounds.links
        self.ring, self.server = links.sent, links.server
        self.optimizer, self.done, self.reason = optimizer, False, ""
        self.step = rounds.step_own
        self._rounds, self._here, self._means = rounds, here, links.means

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"the strategy uses w.{name}, which a loop of your own does not have: use rayps.train, which runs the "
            "training loop itself",
            field="strategy",
        )

    @property
    def params(self) -> Tensor:
        """The parameters as one vector."""
        return self._rounds.flat.vector

    @params.setter
    def params(self, vector: Tensor) -> None:
        with torch.no_grad():
            self._rounds.flat.vector.copy_(vector)

    @property
    def position(self) -> int:
        """The number of steps so far, with the current one once its gradient is known."""
        return self._rounds.state.position

    @property
    def memory(self) -> RoundMemory:
        """The strategy's state between rounds."""
        return self._rounds.state.memory

    @memory.setter
    def memory(self, memory: RoundMemory) -> None:
        self._rounds.state.memory = memory

    @property
    def shared(self) -> dict[str, Tensor]:
        """Tensors of the strategy that are equal on all workers."""
        return self._rounds.state.shared

    @shared.setter
    def shared(self, shared: dict[str, Tensor]) -> None:
        self._rounds.state.shared = shared

    def batch(self) -> None:
        """Let the user's loop run until it provides a gradient."""
        self._rounds.batch()

    def grad(self, batch: None) -> Gradient:
        """Return the gradient that the user's loop has computed."""
        return self._rounds.grad()

    def mean_grad(self, batch: None) -> Tensor:
        """Return the mean of all workers' gradients."""
        return self._rounds.mean_grad()

    def push_grad(self, batch: None) -> None:
        """Push the gradient that the user's loop has computed, unless the servers have it already."""
        assert self.server is not None, "the parameters are on servers"
        gradient, state = self.grad(batch), self._rounds.state
        if state.behind:
            state.behind -= 1
            return
        self.server.push(gradient)

    def clipped(self, vector: Tensor) -> Tensor:
        """Return the vector: a loop clips its gradients itself, by `clip_grad_norm_`."""
        return vector

    def say(self, **numbers: float) -> None:
        """Do nothing: the loop logs its own numbers."""

    def event(self, kind: str, message: str, **facts: Json) -> None:
        """Add an event to the run's journal."""
        event: Event = {"kind": kind, "message": message, **facts}
        with self._here.lock:
            self._here.events.append(event)

    def mean(self, vector: Tensor, samples: float = 1.0, *, exact: bool = False) -> Tensor:
        """Return the mean of a vector over workers."""
        return self._means.mean(vector, samples, exact=exact)

    def mean_later(self, vector: Tensor, samples: float = 1.0, *, slot: int = 0) -> Tensor:
        """Start a mean in the background."""
        return self._means.mean_later(vector, samples, slot)

    def arrived(self, parcel: Tensor) -> Tensor:
        """Wait for a mean that `mean_later` started, and return it."""
        return self._means.arrived(parcel)

    def sync_optimizer_and_buffers(self, samples: float, *, momentum: str, buffers: str) -> None:
        """Keep, reset or average the optimizer's state, and keep or average floating-point buffers.

        Means are computed in float32, or in float64 if one of the tensors is float64; step counts are rounded. Raises
        ConfigError if the optimizers of the workers have different states.
        """
        flat, held = self._rounds.flat, list[Tensor]()
        if momentum == "reset":
            self.optimizer.state.clear()
        if momentum == "average":
            states = [self.optimizer.state.get(p, {}) for p in flat.parameters]
            held = [value for state in states for _, value in sorted(state.items()) if isinstance(value, Tensor)]
            count = torch.tensor([sum(each.numel() for each in held)], dtype=torch.int64)
            if self.ring.max(count.clone()).item() != -self.ring.max(-count).item():
                raise ConfigError(
                    "momentum=average needs an optimizer with the same state on all workers, and some have stepped "
                    "other parameters than others: give momentum=keep or reset",
                    field="momentum",
                )
        if buffers == "average":
            held += [value for value in dict(flat.model.named_buffers()).values() if value.is_floating_point()]
        if not held:
            return
        dtype = reduce(torch.promote_types, (each.dtype for each in held), torch.float32)
        wide = torch.cat([each.detach().reshape(-1).to(flat.vector.device, dtype) for each in held])
        mean = self._means.mean(wide, samples, exact=True)
        with torch.no_grad():
            for each, part in zip(held, torch.split_with_sizes(mean, [each.numel() for each in held]), strict=True):
                each.copy_(part.view(each.shape).round() if each.dim() == 0 else part.view(each.shape))
