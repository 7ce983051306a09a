"""Run one stage of a pipeline: execute the stage's actions, in the order of the schedule, once for each batch.

Between a micro-batch's forward and backward pass, only the values that backward needs are stored. Outputs are sent as
soon as they are computed, and a stage waits only for tensors of other stages. The gradient is that of the mean loss
over the whole batch, not an approximation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rayps.comm.ring import Ring
from rayps.comm.ring.p2p import TensorMessage
from rayps.core.errors import ConfigError, LinkError, WorkloadError
from rayps.core.pipeline.schedule import Action
from rayps.data.base import Nested
from rayps.parallel.pipeline.cut import Layer, spans
from rayps.parallel.pipeline.layer_segment import (
    Grads,
    LayerSegment,
    Tape,
    WeightBackward,
    backward,
    edge_of,
    input_half,
    parcel_of,
    split,
    weight_half,
)
from rayps.parallel.pipeline.loss_proxy import Call
from rayps.parallel.pipeline.random_numbers import LayerRandomState
from rayps.parallel.pipeline.skip import Route
from rayps.parallel.pipeline.stage_messages import StageMessage, StageMessages


class ActionTime(NamedTuple):
    """When one action of the schedule ran: start and end, in seconds since the start of the batch.

    The wait for other stages before the action is not included.
    """

    action: Action
    start: float
    end: float


class _Live(NamedTuple):
    """What is stored for one chunk and one micro-batch between the forward and the backward pass."""

    tapes: list[Tape]  # one for each segment of the chunk
    halves: list[WeightBackward]  # deferred computations of the weights' gradients
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
    """Executes one worker's actions of a pipeline's schedule: forward and backward passes of its chunks.

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
    ) -> None:
        """Prepare the engine.

        `layers` are the layers of the whole model; those of this worker's chunks must have memory, the others may be on
        the meta device. `boundaries` cut the layers into chunks; chunk c is on rank c % stages of `ring` (None for one
        stage). `actions` is this worker's row of the schedule's table. `routes` are the skip connections between
        chunks. Random numbers depend on `seed`, `data` (the replica's number) and the step.
        """
        self._post = StageMessages(ring)
        self._ring = ring
        self._actions = list(actions)
        self._device = torch.device(device)
        self._routes = list(routes)
        self._noise = LayerRandomState(seed, data, device)
        self._halves = any(action.kind == "W" for action in actions)
        at = spans(boundaries, len(layers))
        self._end = len(at) - 1  # number of the last chunk
        self._layers = len(layers)
        self._micros = 1 + max((action.micro for action in actions), default=-1)
        mine = range(self._post.rank, len(at), self._post.stages)
        strange = [str(action) for action in self._actions if action.chunk not in mine]
        if strange:
            raise ConfigError(
                f"the actions {', '.join(strange[:3])} are not for stage {self._post.rank}, which has the chunks "
                f"{list(mine)}: the model must be cut into as many chunks as the schedule has"
            )
        self._segments = {
            chunk: self._cut({n: layers[n] for n in range(*at[chunk])}, chunk, whole=not self._halves) for chunk in mine
        }
        self._whole = (
            {chunk: self._cut({n: layers[n] for n in range(*at[chunk])}, chunk, whole=True) for chunk in mine}
            if self._halves
            else self._segments
        )
        self._live: dict[tuple[int, int], _Live] = {}
        self.last = StepStatistics()  # measurements of the last call

    def _cut(self, layers: Mapping[int, Layer], chunk: int, whole: bool) -> list[LayerSegment]:
        takes = {route.name for route in self._routes if route.target == chunk}
        ships = {route.name for route in self._routes if route.source == chunk}
        found = []
        for numbers in [list(layers)] if whole else split(layers, takes | ships):
            some = {number: layers[number] for number in numbers}
            found.append(LayerSegment.of(some, takes, ships, self._noise.at))
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

        `weights` are the fractions of the batch's samples in each micro-batch; a micro-batch of weight 0 is skipped.
        `inputs(micro)` returns the arguments of the model for a micro-batch; it is called only on the worker of the
        first chunk. `losses(micro, output)` returns the mean loss of a micro-batch; it is called only on the worker of
        the last chunk, where this method returns the batch's loss. On other workers it returns None.

        Raises:
            PeerLost, PeerTimeout: another stage died, failed or does not answer.
            WorkloadError: the user's model or loss failed on this worker; on the other stages this method raises
            PeerLost.
        """
        total: list[tuple[Tensor, float]] = []

        def loss(micro: int, output: Nested) -> Tensor:
            self._noise.at(micro, self._layers)
            found = losses(micro, output)
            total.append((found.detach(), weights[micro]))
            return found

        with self._run(weights, step):
            for action in self._actions:
                if weights[action.micro]:
                    self._do(action, weights, inputs, loss)
            self._post.settle()
        return sum(float(found) * weight for found, weight in total) if total else None

    def evaluate(
        self, weights: Sequence[float], inputs: Callable[[int], Call], done: Callable[[int, Nested], None]
    ) -> None:
        """Run the forward passes of a batch; the worker of the last chunk calls `done(micro, output)` for each.

        `weights`, `inputs` and the errors raised are those of `backward`.
        """
        with self._run(weights, -1), torch.no_grad():
            for action in self._actions:
                if action.kind == "F" and weights[action.micro]:
                    chunk, micro = action.chunk, action.micro
                    value, _ = self._forward(action, inputs, train=False)
                    if chunk == self._end:
                        self._noise.at(micro, self._layers)
                        done(micro, value)
            self._post.settle()

    def close(self) -> None:
        """Drop the values and messages of an unfinished step. The caller must close the ring."""
        self._live.clear()
        self._post.clear()

    # One action

    def _do(
        self,
        action: Action,
        weights: Sequence[float],
        inputs: Callable[[int], Call],
        loss: Callable[[int, Nested], Tensor],
    ) -> None:
        kind, chunk, micro = action
        if kind == "W":
            start = time.perf_counter()
            for half in self._live.pop((chunk, micro)).halves:
                weight_half(half)
            self._note(action, start)
            return
        if kind == "B":
            self._backward(action)
            return
        value, live = self._forward(action, inputs, train=True)
        if chunk == self._end:
            start = time.perf_counter()
            found = loss(micro, value)
            _must_learn(found)
            live.tapes[-1] = Tape(live.tapes[-1].leaves, [[edge_of(found)]])
            live.scale.append(torch.full_like(found, weights[micro], requires_grad=False))
            self._note(action, start)

    def _forward(self, action: Action, inputs: Callable[[int], Call], train: bool) -> tuple[Nested, _Live]:
        _, chunk, micro = action
        given, call = None, None
        if chunk == 0:
            self._noise.at(micro, self._layers)
            call = inputs(micro)
        else:
            given = self._near(self._post.take(chunk - 1, StageMessage.OUTPUT, chunk - 1, micro))
        extra = (
            {
                route.name: self._near(self._post.take(route.source, StageMessage.STASH, index, micro))
                for index, route in enumerate(self._routes)
                if route.target == chunk
            }
            if self._routes
            else {}
        )
        start = time.perf_counter()
        live = _Live([], [], [])
        shipped: dict[str, TensorMessage] = {}
        segments = (self._segments if train else self._whole)[chunk]
        value: Nested = None
        if train:
            self._live[chunk, micro] = live
            self.last.peak = max(self.last.peak, len(self._live))
        for segment in segments:
            value, aside, leaves = segment.forward(micro, given, call, extra, train)
            # true for the segment whose output goes into the loss, and not to another stage
            ends = chunk == self._end and segment is segments[-1]
            parcel = None if ends else parcel_of(value, segment.last)
            for name in segment.ships:
                shipped[name] = parcel_of(aside[name], segment.last)
            if train:
                out = [parcel or TensorMessage([], [], ""), *(shipped[name] for name in segment.ships)]
                live.tapes.append(Tape(leaves, [[edge_of(t) for t in each.tensors] for each in out]))
            given, call = parcel, None
        self._note(action, start)
        if given is not None:
            self._post.give(chunk + 1, StageMessage.OUTPUT, chunk, micro, given)
        for index, route in enumerate(self._routes):
            if route.source == chunk:
                self._post.give(route.target, StageMessage.STASH, index, micro, shipped[route.name])
        return value, live

    def _backward(self, action: Action) -> None:
        _, chunk, micro = action
        live, segments = self._live[chunk, micro], self._segments[chunk]
        out, stashes = self._grads_from_elsewhere(action, live)
        start = time.perf_counter()
        for segment, tape in zip(reversed(segments), reversed(live.tapes), strict=True):
            grads = [out, *(stashes[name] for name in segment.ships)]
            if self._halves:
                back, half = input_half(segment, tape, grads)
                live.halves.extend([half] if half else [])
            else:
                back = backward(tape, grads)
            out = back[0]
            for name, port, leaves in zip(segment.takes, back[1:], tape.leaves[1:], strict=True):
                index = next(i for i, route in enumerate(self._routes) if route.name == name)
                self._give_grads(self._routes[index].source, StageMessage.STASH_GRADIENT, index, micro, port, leaves)
        if chunk > 0:
            self._give_grads(chunk - 1, StageMessage.GRADIENT, chunk - 1, micro, out, live.tapes[0].leaves[0])
        live.tapes.clear()
        if not self._halves:
            del self._live[chunk, micro]
        self._note(action, start)

    def _grads_from_elsewhere(self, action: Action, live: _Live) -> tuple[Grads, dict[str, Grads]]:
        """Return the gradients of the chunk's output, and of the values that the chunk has stashed for other chunks.

        They are received from the chunks that use these values; the last chunk's output gradient is its weight.
        """
        _, chunk, micro = action
        out: Grads = list(live.scale)
        if chunk < self._end:
            out = self._take_grads(chunk + 1, StageMessage.GRADIENT, chunk, micro, live.tapes[-1].edges[0])
        if not any(segment.ships for segment in self._segments[chunk]):
            return out, {}
        edges = {
            name: port
            for segment, tape in zip(self._segments[chunk], live.tapes, strict=True)
            for name, port in zip(segment.ships, tape.edges[1:], strict=True)
        }
        stashes = {
            route.name: self._take_grads(route.target, StageMessage.STASH_GRADIENT, index, micro, edges[route.name])
            for index, route in enumerate(self._routes)
            if route.source == chunk
        }
        return out, stashes

    def _give_grads(
        self, chunk: int, sort: StageMessage, index: int, micro: int, grads: Grads, leaves: list[Tensor | None]
    ) -> None:
        """Send the gradients of the tensors that need one (whose leaf is not None); without any, send no message."""
        wanted = [grad for grad, leaf in zip(grads, leaves, strict=True) if leaf is not None]
        if wanted:
            self._post.give_grads(chunk, sort, index, micro, wanted)

    def _take_grads(
        self, chunk: int, sort: StageMessage, index: int, micro: int, edges: Sequence[GradientEdge | None]
    ) -> Grads:
        """Receive the gradients of the tensors of `edges`; return None for each tensor that needs none."""
        if all(edge is None for edge in edges):
            return [None] * len(edges)
        came = iter(self._post.take_grads(chunk, sort, index, micro))
        return [None if edge is None else self._near_one(next(came)) for edge in edges]

    def _near_one(self, t: Tensor | None) -> Tensor | None:
        return t if t is None or self._device.type == "cpu" else t.to(self._device)

    def _near(self, parcel: TensorMessage) -> TensorMessage:
        """Copy the tensors of a received message to this worker's device."""
        if self._device.type == "cpu":
            return parcel
        return parcel._replace(tensors=[t.to(self._device) for t in parcel.tensors])

    def _note(self, action: Action, start: float) -> None:
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
                f"{self._micros}"
            )
        before = self._post.counts
        self.last = StepStatistics()
        try:
            with self._noise.of(step):
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
            sent, messages, waited = self._post.counts
            self.last.bytes, self.last.messages = sent - before[0], messages - before[1]
            self.last.idle = waited - before[2]
            self.last.busy = time.perf_counter() - self.last.began - self.last.idle


def _must_learn(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise WorkloadError(
            "the loss has no gradient: compute it from the model's output, without detach(), item() or no_grad()"
        )
