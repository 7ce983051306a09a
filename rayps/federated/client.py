"""Train clients one after another in one model. The module uses neither workers nor rings nor files.

In addition to forward, backward and step, a batch costs only microseconds. A client's rows are read once a round, and a
batch is one copy of some of these rows. A gradient is copied into a vector only on request. Plain SGD steps all
parameters in one call, with the same bits as torch's optimizer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from rayps_client.errors import ConfigError
from rayps_client.row_order import Ints, parts
from rayps_client.trainers.partial_gradient import gradients_of
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks as _GLOBAL_HOOKS

from rayps.core.job.user_code import user_code
from rayps.core.maximize import find_direction
from rayps.data.base import Batch, Nested, map_tensors
from rayps.federated.population.cohort import number
from rayps.federated.private_layers import PrivateLayers
from rayps.federated.strategy_interface import ClientSide, FederatedView, Federation
from rayps.tensors import optim
from rayps.tensors.clip import NormClip
from rayps.tensors.flat import FlatModel, make_dense
from rayps.tensors.learning_rate import rates_of, recipe_of
from rayps.tensors.random_state import seed_torch
from rayps.tensors.user_loss import check_dtypes, dtypes_of
from rayps.workload.accumulate import accumulate
from rayps.workload.base import Workload
from rayps.workload.loss_result import LossResult, loss_result
from rayps.workload.model_part import WeightCheck
from rayps.workload.precision import autocast

Tensors = dict[str, Tensor]
_PERSONAL = "beside/"  # prefix, in a client's state, of the buffers of the client's personal model


@dataclass(slots=True)
class ClientRows:
    """A client's rows: their numbers in the data, and the function `take` that reads rows by number.

    `relabel` changes the labels of each batch of an attacker; None leaves the labels unchanged.
    """

    numbers: Ints
    take: Callable[[Ints], Batch]
    batch_size: int
    shuffle: bool = True
    relabel: Callable[[Tensor], Tensor] | None = None
    drop_last: bool = False


@dataclass(slots=True)
class Task:
    """One training of the client with number `client`, in round `round` of a phase.

    The training starts from `w_t` and `buffers`. `shared` is the server's state, and `state` is the client's state.
    """

    seed: int
    round: int
    client: int
    w_t: Tensor
    shared: Mapping[str, Tensor]
    state: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    tick: int = 0  # step of the workload's schedule in this round


@dataclass(slots=True)
class ClientReply:
    """The result of a client's training.

    `w` and `buffers` may be the model's memory. They are valid until the next client trains.
    """

    w: Tensor  # w_k, without private parameters
    n: int  # the client's number of samples
    sums: Tensors  # the vectors that the strategy sums over clients, with their names
    state: Tensors  # the client's new state
    buffers: Tensors  # without private buffers
    loss: float  # mean over all samples of this training
    samples: int  # samples processed, with repetitions
    steps: int


class Grad:
    """A gradient in the tensors that backward wrote. `vector` and arithmetic copy the gradient into one vector."""

    __slots__ = ("_turn", "_vector", "used")

    def __init__(self, turn: ClientTurn) -> None:
        self._turn, self.used = turn, False
        self._vector: Tensor | None = None

    @property
    def vector(self) -> Tensor:
        """Return the gradient as a new vector."""
        if self._vector is None:
            self._vector = self._turn.collect_gradients()
        return self._vector

    def __add__(self, other: Tensor | float) -> Tensor:
        return torch.add(self.vector, other)

    def __radd__(self, other: Tensor | float) -> Tensor:
        return torch.add(self.vector, other)

    def __sub__(self, other: Tensor | float) -> Tensor:
        return torch.sub(self.vector, other)

    def __rsub__(self, other: Tensor | float) -> Tensor:
        return torch.sub(other, self.vector)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return torch.mul(self.vector, other)

    def __rmul__(self, other: Tensor | float) -> Tensor:
        return torch.mul(self.vector, other)

    def __neg__(self) -> Tensor:
        return -self.vector


class ClientTurn:
    """The argument of a strategy's `client` method: the client to train, with its rows, model and optimizer."""

    def __init__(self, trainer: Trainer, given: Federation, task: Task, rows: ClientRows) -> None:
        self.w, self.w_t = trainer.flat.vector, task.w_t
        self.n = len(rows.numbers)
        self.state, self.shared = dict(task.state), task.shared
        self.reply: Tensors = {}
        self.steps = 0  # steps since the last call of `batches`
        self.losses: list[tuple[float, float, int]] = []  # mean, weight, rows
        self._trainer, self._given, self._task, self._rows = trainer, given, task, rows
        self._all_rows: Batch | None = None
        self._last: Grad | None = None

    @property
    def private(self) -> frozenset[str]:
        """The names of the parameters that stay with the client."""
        return self._trainer.private_layers(self._given.client_side).parameters

    @property
    def shared_names(self) -> frozenset[str]:
        """The names of the parameters that the client sends."""
        return self._trainer.private_layers(self._given.client_side).shared

    @property
    def lr(self) -> float:
        """The optimizer's learning rate. Raises ConfigError if its parameter groups have different rates."""
        return self._trainer.lr

    @property
    def sign(self) -> int:
        """1, or -1 if the optimizer maximizes. Raises ConfigError if its parameter groups differ in this."""
        return self._trainer.sign

    def batches(self, epochs: int | None = None) -> Iterator[Batch]:
        """Yield the batches of `epochs` epochs, or of the epochs or steps that the strategy's options set.

        Each call starts with a new optimizer. A second call yields the same batches. If the workload accumulates k
        micro-batches, each batch has up to k of them.
        """
        self._trainer.reset_optimizer()
        self.steps = 0
        task, rows, local = self._task, self._rows, self._given.local
        size = local.rows(self.n, rows.batch_size)
        step = size * self._trainer.workload.accumulate
        stream = parts(
            task.seed,
            task.client,
            self.n,
            step,
            round=task.round,
            epochs=epochs or local.epochs,
            steps=None if epochs else local.local_steps,
            shuffle=rows.shuffle,
            used=local.used(self.n, rows.batch_size, drop_last=rows.drop_last),
        )
        for positions in stream:
            if step == size:
                yield from self._cut(positions, size)
                continue
            for lo in range(0, len(positions), step):
                micro_batches = tuple(self._cut(positions[lo : lo + step], size))
                yield Batch(None, None, sum(each.size for each in micro_batches), micro_batches)

    def _cut(self, positions: Ints, size: int) -> Iterator[Batch]:
        """Yield batches of `size` rows at these positions among the client's rows.

        If a training needs at least half of the rows, all rows are read at once. Each batch is a copy, because the bits
        of a matrix product depend on the alignment of its operands in memory.
        """
        if self._all_rows is None and 2 * len(positions) >= self.n:
            all_rows = self._read_batch(self._rows.numbers)
            self._all_rows = all_rows if _can_cut(all_rows) else None
        if self._all_rows is None:
            for lo in range(0, len(positions), size):
                yield self._read_batch(self._rows.numbers[positions[lo : lo + size]])
            return
        index = torch.from_numpy(positions).to(self._trainer.device)
        for lo in range(0, len(positions), size):
            yield _select_rows(self._all_rows, index[lo : lo + size])

    def _read_batch(self, numbers: Ints) -> Batch:
        began = time.perf_counter()
        with user_code("data"):
            batch = self._rows.take(numbers)
        self._trainer.reading += time.perf_counter() - began
        if self._rows.relabel is not None:
            batch = Batch(batch.x, self._rows.relabel(batch.y), batch.size)
        return batch.to(self._trainer.device) if self._trainer.device != "cpu" else batch

    def grad(self, batch: Batch, of: Collection[str] | None = None) -> Grad:
        """Return the gradient of the loss on a batch, at `w`. The result can be added and multiplied like a vector.

        `of` are the names of the parameters to which the gradient refers; None means all. The others have no gradient,
        so that a step leaves them unchanged. Raises WorkloadError if the user's loss failed or is not a scalar.
        """
        if self._last is not None and not self._last.used:
            _ = self._last.vector  # copies the last gradient before backward overwrites it
        trainer = self._trainer
        for p in trainer.parameters:
            p.grad = None
        with trainer.only(of):
            found = accumulate(trainer.loss, batch, _value)
        trainer.flat.refuse_thawed()
        if found.factor != 1:
            for p in trainer.parameters:
                if p.grad is not None:
                    p.grad.mul_(found.factor)
        self.losses.append((0.0 if found.mean is None else found.mean, found.weight, batch.size))
        self._last = Grad(self)
        return self._last

    def collect_gradients(self) -> Tensor:
        """Return the current gradients of all parameters as a new vector, with zeros for parameters without one."""
        found = self._trainer.parameters
        return torch.cat(
            [
                torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
                if p.grad is None
                else make_dense(p.grad).reshape(-1)
                for p in found
            ]
        )

    def step(self, grad: Grad | Tensor) -> None:
        """Take one step of the client's optimizer by a gradient."""
        self.steps += 1
        if isinstance(grad, Grad):
            grad.used = True
        elif self._last is not None:
            self._last.used = True
        self._trainer.step(grad)


class Trainer:
    """Trains clients, one after another, in one flat model, each with a new optimizer of the workload."""

    def __init__(self, flat: FlatModel, workload: Workload, device: str = "cpu") -> None:
        self.flat, self.workload, self.device = flat, workload, device
        self.reading = 0.0  # seconds spent on reading clients' rows so far
        self.parameters = flat.parameters
        self.buffers: Tensors = dict(flat.model.named_buffers())
        self._values = [flat.vector[e.lo : e.hi].view(e.shape) for e in flat.layout.entries]
        self._rates, self._tick = rates_of(recipe_of(workload), flat.layout), 0
        self._private: dict[tuple[str, ...], PrivateLayers] = {}
        self.check_weight = WeightCheck(workload, flat.model)
        self._make_optimizer()

    def _make_optimizer(self) -> None:
        self._optimizer = optim.made(recipe_of(self.workload), self.parameters)
        self._record_options()

    def private_layers(self, side: ClientSide) -> PrivateLayers:
        """Return the part of the model that stays with each client.

        Raises ConfigError if the patterns of `side` do not fit the model.
        """
        patterns = side.private
        if patterns not in self._private:
            self._private[patterns] = PrivateLayers.of_layout(patterns, self.flat.layout, self.buffers)
        return self._private[patterns]

    def only(self, names: Collection[str] | None) -> AbstractContextManager[None]:
        """Compute gradients of the parameters with these names only; None means of all."""
        return nullcontext() if names is None else gradients_of(names, self.parameters.pairs())

    @property
    def scheduled(self) -> bool:
        """Whether the workload has a learning-rate schedule."""
        return self._rates is not None

    def set_tick(self, tick: int) -> None:
        """Set the learning rates that the workload's schedule gives for step `tick`.

        Raises WorkloadError if the schedule failed.
        """
        if self._rates is not None and tick != self._tick:
            self._tick = tick
            self._record_options()

    def _record_options(self) -> None:
        """Record the optimizer's current options, and whether the optimizer's step is plain SGD."""
        if self._rates is not None:
            self._rates.apply(self._optimizer.param_groups, self._tick)
        self._begin = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        self._resettable = type(self._optimizer).__module__.startswith("torch.optim.") and not self._optimizer.state
        where = {id(p): i for i, p in enumerate(self.parameters)}
        # for each parameter group: the indices of its parameters, and its negative rate; None if not plain SGD
        self._plain: list[tuple[list[int], float]] | None = None
        if is_plain(self._optimizer) and self.workload.clip_norm is None:
            self._plain = [
                ([where[id(p)] for p in group["params"]], group["lr"] if group["maximize"] else -group["lr"])
                for group in self._optimizer.param_groups
            ]
        whole = self._plain is not None and len(self._plain) == 1 and len(self._plain[0][0]) == len(self.parameters)
        # the negative rate, if the step is plain SGD with one rate for all parameters
        self._rate = self._plain[0][1] if self._plain is not None and whole else None

    @property
    def lr(self) -> float:
        """The optimizer's learning rate. Raises ConfigError if its parameter groups have different rates."""
        found = {float(group["lr"]) for group in self._begin if "lr" in group}
        if len(found) != 1:
            raise ConfigError(
                f"the optimizer has {len(found)} learning rates, but this strategy needs a single one: give all "
                "parameters the same lr",
                field="strategy",
            )
        return found.pop()

    @property
    def sign(self) -> int:
        """1, or -1 if the optimizer maximizes. Raises ConfigError if its parameter groups differ in this."""
        return find_direction(self._begin)

    def reset_optimizer(self) -> None:
        """Reset the optimizer, or build a new one, so that it has taken no step."""
        if self._plain is not None:
            return
        if not self._resettable:  # an optimizer of a user's class, or one with an initial state
            self._make_optimizer()
            return
        self._optimizer.state.clear()
        for group, begin in zip(self._optimizer.param_groups, self._begin, strict=True):
            group.update(begin)

    def step(self, grad: Grad | Tensor) -> None:
        """Take one step of the workload's optimizer by this gradient."""
        if self._rate is not None and isinstance(grad, Tensor):
            self.flat.vector.add_(grad, alpha=self._rate)
            return
        if isinstance(grad, Grad) and self.workload.clip_norm is None:
            if self._plain is None:
                with user_code("optimizer.step"):
                    self._optimizer.step()
                return
            for members, rate in self._plain:
                held = [i for i in members if self.parameters[i].grad is not None]
                grads = [g for i in held if (g := self.parameters[i].grad) is not None]
                if grads:  # a batch of weight 0 has none
                    torch._foreach_add_([self._values[i] for i in held], grads, alpha=rate)
            return
        vector = grad.vector if isinstance(grad, Grad) else grad
        unused = [p for p in self.parameters if p.grad is None]
        self.flat.load_grad(NormClip(self.workload.clip_norm).clipped(vector))
        for p in unused:
            p.grad = None
        with user_code("optimizer.step"):
            self._optimizer.step()

    def loss(self, batch: Batch) -> LossResult:
        """Return the workload's loss of one micro-batch, at the model's parameters."""
        before = dtypes_of(self.parameters)
        with autocast(self.workload, self.device):
            found = loss_result(self.workload.loss(self.flat.model, batch), batch.size)
        check_dtypes(before, self.parameters, self.flat.layout, "loss")
        self.check_weight.once(found, batch)
        return found

    def train(self, strategy: FederatedView, task: Task, rows: ClientRows) -> ClientReply:
        """Train one client. The same task and rows give the same bits on every worker.

        Raises:
            WorkloadError, DataError: the user's code or data failed.
        """
        given = strategy.federation
        private = self.private_layers(given.client_side)
        task = self._loaded(task, private)
        self.set_tick(task.tick)
        seed_torch(number(task.seed, "model", task.round, task.client) >> 1)  # for dropout, for example
        turn = ClientTurn(self, given, task, rows)
        strategy.client(turn)
        steps, losses = turn.steps, turn.losses
        w, buffers = self.flat.vector, self.buffers
        if private:
            turn.state |= private.state_of(w, buffers)
            w, buffers = private.cut(w), private.without_private(buffers)
        if given.client_side.model is not None:
            w, buffers = w.clone(), self.copy_buffers()
            turn.losses = []
            self.load(w, task.buffers | personal_buffers(task.state))  # the buffers from before the training of w_k
            strategy.beside(turn)
            turn.state |= {f"{_PERSONAL}{name}": value for name, value in self.copy_buffers().items()}
        samples, weight = sum(rows for _, _, rows in losses), sum(weight for _, weight, _ in losses)
        total = math.fsum(mean * own for mean, own, _ in losses if own)
        return ClientReply(
            w, turn.n, turn.reply, turn.state, buffers, total / weight if weight else math.nan, samples, steps
        )

    def _loaded(self, task: Task, private: PrivateLayers) -> Task:
        """Load what a client starts from into the model: w_t and buffers, with the client's private part in them.

        Return the task with that start as its w_t.
        """
        self.load(task.w_t, task.buffers)
        if not private:
            return task
        private.load(task.state, self.flat.vector, self.buffers)
        return replace(task, w_t=self.flat.vector.clone())

    def load_start(self, side: ClientSide, task: Task) -> None:
        """Set the model to what the client of `task` starts from: w_t with its own private part and buffers."""
        self._loaded(task, self.private_layers(side))

    def finetune(self, given: Federation, task: Task, rows: ClientRows, epochs: int) -> None:
        """Set the model to what the client starts from, then train it for `epochs` epochs on the client's rows alone.

        The same task and rows give the same bits on every worker.
        """
        task = self._loaded(task, self.private_layers(given.client_side))
        self.set_tick(task.tick)
        seed_torch(number(task.seed, "finetune", task.round, task.client) >> 1)
        turn = ClientTurn(self, given, task, rows)
        for batch in turn.batches(epochs):
            turn.step(turn.grad(batch))

    def load(self, vector: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Copy parameters and buffers into the model."""
        if vector.data_ptr() != self.flat.vector.data_ptr():
            self.flat.vector.copy_(vector)
        for name, value in buffers.items():
            self.buffers[name].detach().copy_(value)

    def fixed_versions(self) -> dict[str, int]:
        """Return, by name, how often each parameter that needs no gradient was changed."""
        return {name: p._version for name, p in self.flat.model.named_parameters() if not p.requires_grad}

    def copy_buffers(self) -> Tensors:
        """Return copies of the model's buffers."""
        return {name: value.detach().clone() for name, value in self.buffers.items()}


def personal_buffers(state: Mapping[str, Tensor]) -> Tensors:
    """Return the buffers of the client's personal model from `state`, or {} if that model was never trained."""
    return {name.removeprefix(_PERSONAL): value for name, value in state.items() if name.startswith(_PERSONAL)}


def _value(loss: Tensor) -> float:
    """Return a client's loss, which may be any number: a reply that is not finite is rejected later."""
    return float(loss.detach())


def is_plain(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is p <- p - lr g for each parameter, and nothing else."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or _GLOBAL_HOOKS
    return (
        type(optimizer) is SGD
        and "step" not in vars(optimizer)
        and not hooks
        and all(optim.is_plain_group(group) for group in optimizer.param_groups)
    )


def _can_cut(batch: Batch) -> bool:
    """Return whether a smaller batch can be cut from `batch`: each of its tensors has one entry for each row."""
    return _rows_of(batch.x, batch.size) and (batch.y is None or _rows_of(batch.y, batch.size))


def _rows_of(value: Nested, size: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and len(value) == size
    if isinstance(value, dict):
        return all(_rows_of(each, size) for each in value.values())
    return isinstance(value, (list, tuple)) and all(_rows_of(each, size) for each in value)


def _select_rows(batch: Batch, index: Tensor) -> Batch:
    """Return a copy of the rows `index` of a batch."""
    if isinstance(batch.x, Tensor) and (batch.y is None or isinstance(batch.y, Tensor)):
        y = None if batch.y is None else batch.y.index_select(0, index)
        return Batch(batch.x.index_select(0, index), y, len(index))

    def some(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, index)

    return Batch(map_tensors(batch.x, some), map_tensors(batch.y, some), len(index))
