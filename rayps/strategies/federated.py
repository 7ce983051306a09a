"""Federated learning: what its strategies have in common. Many clients with data of their own, few workers.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, algorithm 1.
Of N clients, client k with n_k samples. In round t
    a cohort of max(1, fraction * N) clients is drawn from the seed; those that drop out or are late do not count
    each trains from w_t on its own data, `local_epochs` (E) or `local_steps` (L) of `batch_size` (B): hook `client`
    what is not finite is dropped and named; `clip` shortens updates; `rule` makes one update of all w_k - w_t
    the server takes it over: hook `server`, which every worker computes alike, so that nothing is sent for it
A client is no process: each worker holds one model, trains its share of the cohort in turn, and the workers meet once a
round. Sums are exact, so a run has the same bits for any number of workers and any order of replies; a single reply is
taken over as it is. Fewer than `min_replies` leave the model as it was. An epoch of such a job is one round.
The workload's optimizer is the client's; each client begins a round with a fresh one, at the rate of the workload.
Of speed, availability, `deadline` and the rest of the clients' world see `rayps.federated.population.options`: time is
virtual.
A workload's `clip_norm` clips the gradient of each step of a client; option `clip` clips its update.
`buffers`: BatchNorm statistics are averaged like parameters ("mean"; a robust `rule` is applied to them too, see
`rayps.federated.aggregate`), or stay with each client ("keep"), whose next training begins with them, and are then
evaluated only for that client.
`finetune`: at each evaluation every client that has rows in the evaluation data trains a copy of w for so many epochs,
and is evaluated on its own rows: metrics `personal_*`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rayps.core import options, traffic
from rayps.core.errors import ConfigError
from rayps.core.families import FEDERATED_ROUNDS, ByClient, Rows
from rayps.core.grid import Grid
from rayps.core.strategy import WorkerView
from rayps.core.traffic import Sizes, TrafficCost
from rayps.federated import rule_spec
from rayps.federated.population import options as options_module
from rayps.federated.remote import join_options
from rayps.strategies.base import Strategy


@dataclass(frozen=True)
class Federated(Strategy):
    """Clients with data of their own train apart; a server takes over what they have learnt."""

    fraction: float = 1.0
    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int | None = None
    rule: Any = "mean"
    clip: float | None = None
    attack: Any = None
    dropout: float = 0.0
    deadline: float | None = None
    min_replies: int = 1
    enough: int | None = None
    over_selection: float = 0.0
    speed: Any = None
    available: Any = None
    evaluate_every: int = 1
    buffers: str = "mean"
    finetune: int | None = None
    clients: Any = None
    loop: ClassVar[str] = FEDERATED_ROUNDS
    asynchronous: ClassVar[bool] = False  # replies may have begun from older parameters
    sums: ClassVar[tuple[str, ...]] = ()  # what `c.reply` holds, added up unweighted, each as long as w
    state: ClassVar[tuple[str, ...]] = ()  # what `c.state` keeps of each client
    personal: ClassVar[str | None] = None  # which of these is a model of the client's own
    plain: ClassVar[bool] = False  # the client's optimizer must be SGD without momentum or weight decay

    def __post_init__(self) -> None:
        options_module.check(
            fraction=self.fraction,
            speed=self.speed,
            available=self.available,
            dropout=self.dropout,
            deadline=self.deadline,
            min_replies=self.min_replies,
            enough=self.enough,
            over_selection=self.over_selection,
        )
        if self.local_epochs is not None and self.local_steps is not None:
            raise ConfigError(
                f"local_epochs is {self.local_epochs!r} and local_steps is {self.local_steps!r}: give one of them",
                field="local_steps",
            )
        for field in ("local_epochs", "local_steps", "finetune"):
            options.whole(self, field, none=True)
        options.whole(self, "batch_size", 0, none=True, said="; 0 takes all rows of a client at once")
        options.whole(self, "evaluate_every")
        rule_spec.rule_of(self.rule), rule_spec.attack_of(self.attack), rule_spec.clip_of(self.clip)
        if self.buffers not in ("mean", "keep"):
            raise ConfigError(
                f"buffers is {self.buffers!r}: give mean (averaged by samples) or keep (they stay with each client)",
                field="buffers",
            )
        join_options.check(self)

    @property
    def remote(self) -> bool:
        """Whether clients are processes outside of the cluster, with data of their own."""
        return self.clients is not None

    @property
    def rows(self) -> Rows:
        """Each client has its own."""
        return ByClient(self.remote)

    def grid(self, workers: int) -> Grid:
        """How workers are laid out. Raises ConfigError: several for clients that are elsewhere."""
        if self.remote and workers > 1:
            raise ConfigError(
                f"workers is {workers}, and the clients are remote: they train, and the worker only sums; give 1",
                field="workers",
            )
        return super().grid(workers)

    def cost(self, grid: Grid, sizes: Sizes) -> list[TrafficCost]:
        """A round's exchange: the sums of what workers have added up of their clients' replies, or all replies."""
        if grid.data == 1 or self.remote:
            return [TrafficCost("replies between workers", "0: there is one", 0, 0, 0)]
        if self.rule != "mean":
            what = f"replies gathered by {grid.data} workers"
            return [TrafficCost(what, "V of each reply to each other worker", None, None)]
        return [traffic.summed_replies(grid, sizes, len(self.sums))]

    @property
    def epochs(self) -> int:
        """E, where `local_steps` says nothing else."""
        return self.local_epochs or 1

    @property
    def stateful(self) -> bool:
        """Whether something is kept of each client from round to round."""
        return bool(self.state) or self.buffers == "keep"

    def client(self, c: Any) -> None:
        """What a client does with `c.w`, which begins as w_t."""
        for batch in c.batches():
            c.step(c.grad(batch))

    def beside(self, c: Any) -> None:
        """What a client does for itself afterwards; `c.w` and the buffers are the server's no more."""

    def weight(self, n: int, staleness: int) -> float:
        """The weight of one reply in `s.delta`, of n samples, begun so many rounds ago."""
        return n

    def server(self, s: Any) -> None:
        """What the server does with the replies: `s.w` is w_t, and w_(t+1) afterwards."""
        raise TypeError(f"{type(self).__name__} does not say what the server does: define server(self, s)")

    def round(self, w: WorkerView) -> None:
        """This worker's share of the cohort, and the meeting."""
        w.clients.round()
