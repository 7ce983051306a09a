"""What a strategy is: four hooks, and what each of them is given. No torch, no message, no retry."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from rayps.core.errors import ConfigError
from rayps.core.grid import Grid

COMPRESSIONS = ("fp16", "bf16", "int8", "top_k", "auto")
REPLAY_MB = 256.0
REPLAY = "the 10^6 bytes of pushes that a worker may keep, 0 or more"  # what `replay_mb` is
TOP_K = 0.01  # of the elements, unless said otherwise


class WorkerView(Protocol):
    """The worker as `round` sees it: one replica."""

    rank: int
    size: int
    position: int  # batches taken so far
    plan: Any  # `plan.end` is the position at which this strategy ends
    ring: Any
    server: Any
    tables: Any
    clients: Any  # of the data, where the strategy is federated
    params: Any
    optimizer: Any  # of this worker's own; None where only servers step
    memory: dict[str, Any]  # what a round leaves to the next; empty when a worker begins, or is replaced: but where
    # workers learn apart its tensors, and numbers as tensors, come back with the worker's own parameters and moments
    shared: dict[str, Any]  # tensors that are the same on all workers; they come back as long as the strategy goes on
    done: bool  # set by all workers in the same round: the strategy has met its stop rule, and the phase ends here
    reason: str  # why, in words

    @property
    def rows(self) -> int:
        """Rows of this worker's share of the data."""

    @property
    def all_rows(self) -> int:
        """Rows of the data, over all workers."""

    def batch(self) -> Any:
        """The next batch of this worker's share of the data."""

    def grad(self, batch: Any) -> Any:
        """The gradient of the loss on `batch`; it knows its number of samples."""

    def mean_grad(self, batch: Any) -> Any:
        """`ring.mean(grad(batch))`, sent in parts while the gradient is being made; to be read only."""

    def step(self, grad: Any) -> None:
        """Let this worker's own optimizer apply a gradient vector, shortened to the workload's `clip_norm`."""

    def clipped(self, vector: Any) -> Any:
        """The vector, or a shorter copy where its norm is above the workload's `clip_norm`. `grad` and `step` do it
        themselves; this is for what else is pushed where a worker `steps_locally`.
        """

    def say(self, **numbers: float) -> None:
        """Numbers for this round's point, the same on all workers: they stand in the history by these names."""

    def event(self, kind: str, message: str, **facts: Any) -> None:
        """File an event of the job; for one worker to call, such as rank 0."""

    def mean(self, vector: Any, samples: float = 1.0, *, exact: bool = False) -> Any:
        """The mean over workers of a vector, weighted by `samples`, as a new one; zeros where nobody has any. It
        travels by `compression`, unless it must be `exact`.
        """

    def mean_later(self, vector: Any, samples: float = 1.0, *, slot: int = 0) -> Any:
        """As `mean`, in the background: a tensor to be kept in `memory`, untouched, until `arrived` is asked for it.

        Vectors that are parts of one have slots of their own: compression remembers what it left out of each.
        """

    def arrived(self, parcel: Any) -> Any:
        """The mean that `mean_later` has sent for, of a half-precision vector in float32; waits for it."""

    def own_loss(self) -> float:
        """The loss of this worker's own model on all of the evaluation data."""

    def together(self, samples: float, *, momentum: str, buffers: str) -> None:
        """What a meeting does to moments ("keep", "reset", "average") and to buffers ("keep", "average")."""


class ShardView(Protocol):
    """The shard as `on_push` and `on_round` see it: one slice of the parameters."""

    size: int  # workers
    rounds: int  # of the worker, that the push under way stands for: 1, or more where the strategy's pushes are `spans`

    def step(self, grad: Any, scale: float = 1.0, decays: float | None = None) -> None:
        """Let the shard's own optimizer apply `scale` times a gradient slice, which is only read.

        `decays`: how many whole steps this one counts for, by which weight decay is multiplied; None = |`scale`|.
        """

    def step_mean(self, values: Any, weights: Any) -> None:
        """As `step` of sum(w_i v_i) / sum(w_i), in one go; not all weights may be zero."""


class Replica:
    """How one copy of the model is spread over several workers: plain data, see `rayps.core.grid`."""

    name: ClassVar[str] = ""
    stages: int = 1  # parts of the model one behind another
    tensor: int = 1  # workers that share each layer


class Strategy:
    """How to learn together: the worker half and the server half of one paper."""

    name: ClassVar[str] = ""
    shards: int = 0  # servers that this strategy needs; 0 = workers speak only through the ring
    staleness: int | None = 0  # rounds a worker may lead the slowest when it pulls; None = no bound
    replay_mb: float | None = None  # 10^6 bytes of pushes that a worker keeps until they are saved; None = REPLAY_MB
    compression: str | None = None  # how gradients travel: see `compression_of`; None = as they are
    replicas: int | None = None  # copies of what a private server group holds; None = no such group
    replica: Replica | None = None  # what a copy of the model is; None = one worker
    gathers: bool = True  # whether on_round is to be called with everyone's values
    means: ClassVar[bool] = False  # on_round is step_mean(values, weights), unless all weights are 0, and nothing else
    borrows: ClassVar[bool] = False  # on_push and on_round only read values and keep none: no copy is made for them
    adagrad: float | None = None  # the rate of an Adagrad that steps on the servers; None = the workload's optimizer
    steps_locally: ClassVar[bool] = False  # a worker steps its own copy too, between two pulls: `grad` is not clipped
    in_place: ClassVar[bool] = False  # all workers, on one host, step one vector in memory that they share
    spans: ClassVar[bool] = False  # a push stands for all rounds since the one before; else for one
    fixed_servers: ClassVar[bool] = False  # an elastic server group cannot serve it
    apart: ClassVar[bool] = False  # workers hold parameters of their own between meetings: see `consensus`
    federated: ClassVar[bool] = False  # it learns from the clients of the data
    keeps_rows: bool = False  # a worker has the same rows in every epoch
    evaluate_every: int = 1  # epochs between evaluations
    meets_every: int | None = None  # steps between meetings of workers that are apart; None = no fixed number

    @property
    def remote(self) -> bool:
        """Whether it learns from clients outside of the cluster."""
        return False

    @property
    def servers(self) -> int:
        """The size of the elastic group that a job makes for itself, where none is named; 0 = it needs none."""
        return self.shards if self.replicas is not None else 0

    @property
    def tables(self) -> Strategy | None:
        """The strategy that servers of sparse tables follow; None = a model with tables cannot be trained."""
        return None

    @property
    def lockstep(self) -> bool:
        """Whether all workers are at the same round, so that one death stops them all."""
        return self.shards == 0 or self.staleness == 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of pushes that a worker keeps; none in step, where everyone goes back to the same snapshot."""
        return 0 if self.lockstep else int(1e6 * (REPLAY_MB if self.replay_mb is None else self.replay_mb))

    @property
    def group_bytes(self) -> int:
        """The same on an elastic group, where nobody goes back for a server's death."""
        return int(1e6 * (REPLAY_MB if self.replay_mb is None else self.replay_mb))

    def grid(self, workers: int) -> Grid:
        """How so many workers are laid out. Raises ConfigError where they are no whole number of replicas."""
        return Grid(workers) if self.replica is None else Grid.of(workers, self.replica.stages, self.replica.tensor)

    def split(self, model: Any, ring: Any) -> Any:
        """Which part of the model lives on this worker; the whole of it unless said otherwise."""
        return model

    def round(self, w: WorkerView) -> None:
        """The worker's half of the paper: one round."""
        raise TypeError(f"{type(self).__name__} does not say what a worker does: define round(self, w)")

    def begin(self, w: WorkerView) -> None:
        """What a worker does before its first round."""

    def finish(self, w: WorkerView) -> None:
        """What a worker does after its last round."""

    def consensus(self, w: WorkerView) -> Any:
        """What all workers would agree on if training ended now, as a vector; None = `w.params`.

        All call it together: for checkpoints, for evaluations, and after `finish`, when everyone takes it over. It
        leaves what is being learnt as it is.
        """
        return None

    def scale_warning(self, workers: int) -> str | None:
        """What to say where the optimizer takes steps of the same size whatever the gradient's; None = nothing."""
        if self.shards and not self.lockstep and workers > 1:
            return (
                "each push is scaled by 1/N, but this optimizer takes steps of the same "
                "size whatever the gradient's: N workers take N times the steps; lower its learning rate (a decay "
                "beside the gradient, as AdamW's, is then N times too, and stays in balance with the steps)"
            )
        return None

    def on_push(self, shard: ShardView, value: Any, weight: float) -> None:
        """The server's half, as each message arrives."""

    def on_round(self, shard: ShardView, values: list[Any], weights: list[float]) -> None:
        """The server's half, once everyone has spoken: values and weights in the order of ranks."""


def must_go_with(replica: Any, **others: Any) -> None:
    """Check the option `replica`; `others` are options that must be none where there is one.

    Raises:
        ConfigError: it is no replica, or it is one and another option is given.
    """
    if replica is None:
        return
    if not isinstance(replica, Replica):
        raise ConfigError(
            f"replica is {replica!r}: give Pipeline(...), TensorParallel(...), or none (a replica is one worker)",
            field="replica",
        )
    for name, given in others.items():
        if given is not None:
            raise ConfigError(
                f"{name} is {given!r}, and a replica is a {replica.name} of several workers: the two do not go "
                f"together; leave out {name}, or replica",
                field=name,
            )


def compression_of(given: Any) -> tuple[str, float]:
    """The name of a `compression`, and the share of the elements that top_k sends.

    Raises:
        ConfigError: it is none of fp16, bf16, int8, top_k, top_k:FRACTION and auto.
    """
    name, colon, share = given.partition(":") if isinstance(given, str) else ("", "", "")
    try:
        fraction = float(share) if colon else TOP_K
    except ValueError:
        fraction = 0.0
    if name not in COMPRESSIONS or not 0 < fraction <= 1 or (colon and name != "top_k"):
        raise ConfigError(
            f"compression is {given!r}: give none, fp16, bf16, int8, auto, top_k (the largest {TOP_K:.0%} of the "
            "elements) or top_k:FRACTION with a fraction above 0 and up to 1",
            field="compression",
        )
    return name, fraction


def weighted_mean(values: list[Any], weights: list[float]) -> Any:
    """Sum(w_i v_i) / sum(w_i), in the order given; None when nobody had a sample.

    Half precision adds in float32 and is rounded once. A value of weight 0 is not read: it may be NaN.
    """
    total = sum(weights)
    if total == 0:
        return None
    half = values[0].is_floating_point() and values[0].element_size() < 4
    shares = [(value.float() if half else value, w / total) for value, w in zip(values, weights, strict=True) if w]
    mean = shares[0][0] * shares[0][1]
    for value, share in shares[1:]:
        mean += value * share
    return mean.to(values[0].dtype)
