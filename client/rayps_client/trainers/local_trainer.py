"""What the process of a client needs of that which trains: tensors as bytes go in, and a reply comes out.

There are three trainers: `rayps.clients.workload_trainer` (every feature of rayps),
`rayps_client.trainers.torch_trainer` and `rayps_client.trainers.numpy_trainer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from rayps_client.exchange.raw_tensors import RawTensor, item_bytes
from rayps_client.trainers.own_metrics import OwnMetrics
from rayps_client.values import JsonObject

LayoutRow: TypeAlias = tuple[str, list[int], str]  # (name, shape, dtype) of one parameter, in the order of `w`
RawTensors: TypeAlias = dict[str, RawTensor]


@dataclass(frozen=True, slots=True)
class RoundStart:
    """What all clients of a round start from: `w` (w_t, the model as one vector), the server's state, and buffers."""

    w: RawTensor
    shared: Mapping[str, RawTensor] = field(default_factory=dict)  # such as SCAFFOLD's c
    buffers: Mapping[str, RawTensor] = field(default_factory=dict)  # such as the statistics of BatchNorm


@dataclass(frozen=True, slots=True)
class LocalTask:
    """One training of one client: the facts of the order, the start, and the client's own state."""

    strategy: JsonObject  # the strategy's name and its options
    seed: int
    round: int  # number of the round in its phase
    client: int  # the client's number
    tick: int  # step of the workload's learning-rate schedule
    start: RoundStart
    state: Mapping[str, RawTensor]  # such as SCAFFOLD's c_i


@dataclass(slots=True)
class LocalReply:
    """The result of a training. Tensors may be the model's memory: they are valid until the next training."""

    w: RawTensor  # w_k
    sums: RawTensors  # vectors that the strategy sums over clients, by name
    buffers: RawTensors
    state: RawTensors  # the client's new state, which stays on this machine
    n: int  # the client's number of samples
    steps: int
    samples: int  # samples processed, with repetitions
    loss: float  # mean over all samples of this training
    start: RawTensor | None = None  # w_t without the layers that stay private, if there are any


def layout_bytes(layout: Sequence[LayoutRow]) -> int:
    """Return the number of bytes of the parameters with this layout."""
    return sum(math.prod(shape) * item_bytes(dtype) for _, shape, dtype in layout)


class LocalTrainer(Protocol):
    """Trains the client of this process."""

    @property
    def samples(self) -> int:
        """The number of the client's rows."""

    def layout(self) -> Sequence[LayoutRow]:
        """Return the names, shapes and dtypes of the parts of `w`."""

    def try_out(self) -> str | None:
        """Train on one batch to find errors before the client joins; leave the model as it was.

        Return what to tell the user although it is no error, or None.

        Raises WorkloadError or DataError if the user's code or data failed.
        """

    def train(self, task: LocalTask) -> LocalReply:
        """Train the client.

        Raises:
            WorkloadError, DataError: the user's code or data failed.
            ConfigError: the strategy cannot be trained here.
        """

    def evaluate(self, task: LocalTask, name: str) -> OwnMetrics:
        """Evaluate the model of a round's start, and this client's personal model, on its own evaluation rows.

        These are the rows of `evaluation_data()`, or those of the client `name` if that data is divided into clients.
        A workload without `evaluation_data()` is evaluated on its training rows, as on a cluster.
        `task.state` has what the personal model is made from.

        Raises:
            WorkloadError, DataError: there is no evaluation data, or the user's code or data failed.
            ConfigError: the strategy cannot be trained here.
        """
