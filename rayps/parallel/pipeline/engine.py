"""Run one stage of a pipeline: execute the stage's actions, in the order of the schedule, once for each batch.

Between a micro-batch's forward and backward pass, only the values that backward needs are stored. Outputs are sent as
soon as they are computed, and a stage waits only for tensors of other stages. The gradient is that of the mean loss
over the whole batch, not an approximation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from rayps_client.errors import ConfigError, LinkError, WorkloadError
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rayps.comm.ring import Ring
from rayps.comm.ring.p2p import TensorMessage
from rayps.core.pipeline.schedule import Action
from rayps.data.base import Nested
from rayps.parallel.pipeline.cut import Layer, spans
from rayps.parallel.pipeline.layer_range import (
    Grads,
    LayerRange,
    Tape,
    WeightBackward,
    backward,
    backward_inputs,
    backward_weights,
    edge_of,
    message_of,
    split,
)
from rayps.parallel.pipeline.loss_proxy import Call
from rayps.parallel.pipeline.random_numbers import LayerRandomState
from rayps.parallel.pipeline.stage_messages import StageMessage, StageMessages
from rayps.tensors.division import Route


class ActionTime(NamedTuple):
    """When one action of the schedule ran: start and end, in seconds since the start of the batch.

    The wait for other stages before the action is not included.
    """

    action: Action
    start: float
    end: float


class _Live(NamedTuple):
    """What is stored for one chunk and one micro-batch between the forward and the backward pass."""

    tapes: list[Tape]  # one for each layer range of the chunk
    deferred: list[WeightBackward]  # deferred computations of the weights' gradients
    scale: list[Tensor]  # for the last chunk: the micro-batch's weight, as the gradient with respect to its loss


@dataclass(slots=True)
class StepStatistics:
    """Measurements of one call of `PipelineEngine.backward` or `evaluate`."""

    began: float = field(default_factory=time.perf_counter)
    bytes: int = 0  # bytes sent to other stages
    messages: int = 0  # messages sent to other stages
    peak: int = 0  # the most (chunk, micro-batch) pairs whose activations were stored at once
    idle: float = 0.0  # seconds spent waiting for other stages
    busy: float = 0.0  # all other seconds
    spans: list[ActionTime] = field(default_factory=list)


class PipelineEngine:
    """Executes one worker's actions of a pipeline schedule: the forward and backward passes of the worker's chunks.

    Only one thread at a time may use it.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        boundaries: Sequence[int],
        actions: Sequence[Action],
        ring: Ring | None,
        routes: Sequence[Route] = (),
        *,
        seed: int = 0,
        data: int = 0,
        device: str | torch.device = "cpu",
        computing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Prepare the engine. Layers run forward in the context `computing()`.

        `layers` are the layers of the whole model. The layers of this worker's chunks must have memory; the others may
        be on the meta device. `boundaries` cut the layers into chunks. Chunk c is on rank c % stages of `ring`, which
        is None if there is one stage. `actions` is this worker's row of the schedule's table. `routes` are the skip
        connections between chunks. Random numbers depend on `seed`, `data` (the replica's number) and the step.
        """
        self._messages, self._computing = StageMessages(ring), computing
        self._ring = ring
        self._actions = list(actions)
        self._device = torch.device(device)
        self._routes = list(routes)
        self._random = LayerRandomState(seed, data, device)
        self._deferred = any(action.kind == "W" for action in actions)
        at = spans(boundaries, len(layers))
        self._end = len(at) - 1  # number of the last chunk
        self._layers = len(layers)
        self._micros = 1 + max((action.micro for action in actions), default=-1)
        mine = range(self._messages.rank, len(at), self._messages.stages)
        misplaced = [str(action) for action in self._actions if action.chunk not in mine]
        if misplaced:
            raise ConfigError(
                f"the actions {', '.join(misplaced[:3])} are not for stage {self._messages.rank}, which has the chunks "
                f"{list(mine)}: the model must be cut into as many chunks as the schedule has"
            )
        self._ranges = {
            chunk: self._cut({n: layers[n] for n in range(*at[chunk])}, chunk, whole=not self._deferred)
            for chunk in mine
        }
        self._whole = (
            {chunk: self._cut({n: layers[n] for n in range(*at[chunk])}, chunk, whole=True) for chunk in mine}
            if self._deferred
            else self._ranges
        )
        self._live: dict[tuple[int, int], _Live] = {}
        self.last = StepStatistics()  # measurements of the last call

    def _cut(self, layers: Mapping[int, Layer], chunk: int, whole: bool) -> list[LayerRange]:
        receives = {route.name for route in self._routes if route.target == chunk}
        sends = {route.name for route in self._routes if route.source == chunk}
        found = []
        for numbers in [list(layers)] if whole else split(layers, receives | sends):
            some = {number: layers[number] for number in numbers}
            found.append(LayerRange.of(some, receives, sends, self._random.seed_layer, self._computing))
        return found

    # Public methods

    def backward(
        self,
        step: int,
        weights: Sequence[float],
        inputs: Callable[[int], Call],
        losses: Callable[[int, Nested], Tensor],
    ) -> float | None:
        """Run forward and backward of a batch, and add the batch's gradient to the `.grad` of this worker's parameters.

        Return the batch's mean loss on the worker of the last chunk, and None on other workers. `weights` has, for each
        micro-batch, its fraction of the batch's samples; a micro-batch of weight 0 is skipped. `inputs(micro)` returns
        the arguments of the model for a micro-batch, and is called only on the worker of the first chunk.
        `losses(micro, output)` returns the mean loss of a micro-batch, and is called only on the worker of the last
        chunk.

        Raises:
            PeerLost, PeerTimeout: another stage died, failed or does not answer.
            WorkloadError: the user's model or loss failed on this worker. The other stages then raise PeerLost.
        """
        total: list[tuple[Tensor, float]] = []

        def loss(micro: int, output: Nested) -> Tensor:
            self._random.seed_layer(micro, self._layers)
            found = losses(micro, output)
            total.append((found.detach(), weights[micro]))
            return found

        with self._run(weights, step):
            for action in self._actions:
                if weights[action.micro]:
                    self._run_action(action, weights, inputs, loss)
            self._messages.wait_sent()
        return sum(float(found) * weight for found, weight in total) if total else None

    def evaluate(
        self, weights: Sequence[float], inputs: Callable[[int], Call], done: Callable[[int, Nested], None]
    ) -> None:
        """Run the forward passes of a batch; the worker of the last chunk calls `done(micro, output)` after each.

        For `weights`, `inputs` and the errors raised, see `backward`.
        """
        with self._run(weights, -1), torch.no_grad():
            for action in self._actions:
                if action.kind == "F" and weights[action.micro]:
                    chunk, micro = action.chunk, action.micro
                    value, _ = self._forward(action, inputs, train=False)
                    if chunk == self._end:
                        self._random.seed_layer(micro, self._layers)
                        done(micro, value)
            self._messages.wait_sent()

    def close(self) -> None:
        """Drop the values and messages of an unfinished step. The caller must close the ring."""
        self._live.clear()
        self._messages.clear()

    # One action

    def _run_action(
        self,
        action: Action,
        weights: Sequence[float],
        inputs: Callable[[int], Call],
        loss: Callable[[int, Nested], Tensor],
    ) -> None:
        kind, chunk, micro = action
        if kind == "W":
            start = time.perf_counter()
            for half in self._live.pop((chunk, micro)).deferred:
                backward_weights(half)
            self._record_time(action, start)
            return
        if kind == "B":
            self._backward(action)
            return
        value, live = self._forward(action, inputs, train=True)
        if chunk == self._end:
            start = time.perf_counter()
            found = loss(micro, value)
            _check_has_gradient(found)
            live.tapes[-1] = Tape(live.tapes[-1].leaves, [[edge_of(found)]])
            live.scale.append(torch.full_like(found, weights[micro], requires_grad=False))
            self._record_time(action, start)

    def _forward(self, action: Action, inputs: Callable[[int], Call], train: bool) -> tuple[Nested, _Live]:
        _, chunk, micro = action
        given, call = None, None
        if chunk == 0:
            self._random.seed_layer(micro, self._layers)
            call = inputs(micro)
        else:
            given = self._to_device(self._messages.receive(chunk - 1, StageMessage.OUTPUT, chunk - 1, micro))
        extra = (
            {
                route.name: self._to_device(self._messages.receive(route.source, StageMessage.STASH, index, micro))
                for index, route in enumerate(self._routes)
                if route.target == chunk
            }
            if self._routes
            else {}
        )
        start = time.perf_counter()
        live = _Live([], [], [])
        outgoing: dict[str, TensorMessage] = {}
        ranges = (self._ranges if train else self._whole)[chunk]
        value: Nested = None
        if train:
            self._live[chunk, micro] = live
            self.last.peak = max(self.last.peak, len(self._live))
        for layer_range in ranges:
            value, stashed, leaves = layer_range.forward(micro, given, call, extra, train)
            # true if the output goes into the loss, and not to another stage
            ends = chunk == self._end and layer_range is ranges[-1]
            message = None if ends else message_of(value, layer_range.last)
            for name in layer_range.sends:
                outgoing[name] = message_of(stashed[name], layer_range.last)
            if train:
                out = [message or TensorMessage([], [], ""), *(outgoing[name] for name in layer_range.sends)]
                live.tapes.append(Tape(leaves, [[edge_of(t) for t in each.tensors] for each in out]))
            given, call = message, None
        self._record_time(action, start)
        if given is not None:
            self._messages.send(chunk + 1, StageMessage.OUTPUT, chunk, micro, given)
        for index, route in enumerate(self._routes):
            if route.source == chunk:
                self._messages.send(route.target, StageMessage.STASH, index, micro, outgoing[route.name])
        return value, live

    def _backward(self, action: Action) -> None:
        _, chunk, micro = action
        live, ranges = self._live[chunk, micro], self._ranges[chunk]
        out, stashes = self._receive_output_grads(action, live)
        start = time.perf_counter()
        for layer_range, tape in zip(reversed(ranges), reversed(live.tapes), strict=True):
            grads = [out, *(stashes[name] for name in layer_range.sends)]
            if self._deferred:
                back, half = backward_inputs(layer_range, tape, grads)
                live.deferred.extend([half] if half else [])
            else:
                back = backward(tape, grads)
            out = back[0]
            for name, received, leaves in zip(layer_range.receives, back[1:], tape.leaves[1:], strict=True):
                index = next(i for i, route in enumerate(self._routes) if route.name == name)
                self._send_grads(
                    self._routes[index].source, StageMessage.STASH_GRADIENT, index, micro, received, leaves
                )
        if chunk > 0:
            self._send_grads(chunk - 1, StageMessage.GRADIENT, chunk - 1, micro, out, live.tapes[0].leaves[0])
        live.tapes.clear()
        if not self._deferred:
            del self._live[chunk, micro]
        self._record_time(action, start)

    def _receive_output_grads(self, action: Action, live: _Live) -> tuple[Grads, dict[str, Grads]]:
        """Return the gradients of the chunk's output, and of the values that the chunk has stashed for other chunks.

        The gradients are received from the chunks that use these values. For the last chunk, the gradient of its output
        (the loss) is the micro-batch's weight.
        """
        _, chunk, micro = action
        out: Grads = list(live.scale)
        if chunk < self._end:
            out = self._receive_grads(chunk + 1, StageMessage.GRADIENT, chunk, micro, live.tapes[-1].edges[0])
        if not any(layer_range.sends for layer_range in self._ranges[chunk]):
            return out, {}
        edges = {
            name: edges_of_value
            for layer_range, tape in zip(self._ranges[chunk], live.tapes, strict=True)
            for name, edges_of_value in zip(layer_range.sends, tape.edges[1:], strict=True)
        }
        stashes = {
            route.name: self._receive_grads(route.target, StageMessage.STASH_GRADIENT, index, micro, edges[route.name])
            for index, route in enumerate(self._routes)
            if route.source == chunk
        }
        return out, stashes

    def _send_grads(
        self, chunk: int, kind: StageMessage, index: int, micro: int, grads: Grads, leaves: list[Tensor | None]
    ) -> None:
        """Send the gradients of the tensors whose leaf is not None; send no message if there is none."""
        wanted = [grad for grad, leaf in zip(grads, leaves, strict=True) if leaf is not None]
        if wanted:
            self._messages.send_grads(chunk, kind, index, micro, wanted)

    def _receive_grads(
        self, chunk: int, kind: StageMessage, index: int, micro: int, edges: Sequence[GradientEdge | None]
    ) -> Grads:
        """Receive the gradient of each tensor of `edges`; the result has None where `edges` has None."""
        if all(edge is None for edge in edges):
            return [None] * len(edges)
        came = iter(self._messages.receive_grads(chunk, kind, index, micro))
        return [None if edge is None else self._tensor_to_device(next(came)) for edge in edges]

    def _tensor_to_device(self, t: Tensor | None) -> Tensor | None:
        return t if t is None or self._device.type == "cpu" else t.to(self._device)

    def _to_device(self, message: TensorMessage) -> TensorMessage:
        """Copy the tensors of a received message to this worker's device."""
        if self._device.type == "cpu":
            return message
        return message._replace(tensors=[t.to(self._device) for t in message.tensors])

    def _record_time(self, action: Action, start: float) -> None:
        self.last.spans.append(ActionTime(action, start - self.last.began, time.perf_counter() - self.last.began))

    # Around a call

    @contextmanager
    def _run(self, weights: Sequence[float], step: int) -> Iterator[None]:
        """Measure the block and seed its random numbers.

        If the block fails, abort the ring, so that other stages fail too.
        """
        if len(weights) < self._micros:
            raise ConfigError(
                f"{len(weights)} micro-batches were given, but the schedule has {self._micros}: cut the batch into "
                f"{self._micros} micro-batches"
            )
        before = self._messages.counts
        self.last = StepStatistics()
        try:
            with self._random.seeds_of_step(step):
                yield
        except LinkError:
            self.close()
            raise
        except BaseException:  # other stages wait for this one: abort the ring at once, then raise the error here
            self.close()
            if self._ring is not None:
                self._ring.abort()
            raise
        finally:
            sent, messages, waited = self._messages.counts
            self.last.bytes, self.last.messages = sent - before[0], messages - before[1]
            self.last.idle = waited - before[2]
            self.last.busy = time.perf_counter() - self.last.began - self.last.idle


def _check_has_gradient(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise WorkloadError(
            "the loss has no gradient: compute it from the model's output, without detach(), item() or no_grad()"
        )
