"""The program of a loader process: it reads and collates batches, and writes them to a pipe.

The parent writes orders to stdin, one after the other: the data once, then one `ReadOrder` for each pass. The process
answers on its stdout with frames: batches, then the end or an error. A new order replaces one that has not ended. The
process ends when its stdin is closed, and therefore with its parent, also after kill -9. Shared memory is not used.
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import struct
import sys
import threading
from dataclasses import dataclass
from typing import IO, Any

import cloudpickle
import torch
from rayps_client.errors import RaypsError

from rayps.core.job.user_module import SourcePickler, unpack
from rayps.data.base import Batch, Data, Place, Position
from rayps.data.pass_random import seed_generators

_COUNT = struct.Struct("<QQ")  # bytes of the pickle, number of buffers
_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Setup:
    """The packed data, the folders from which the user's modules are imported, and the arguments that they find."""

    packed: bytes
    path: tuple[str, ...]
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """A pass to read: see `Data.part`. Answers have the same `number`."""

    number: int
    place: Place
    start: int
    position: Position | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to an order: a batch, the `error` with which the pass failed, or the end if both are None."""

    number: int
    batch: Batch | None = None
    position: Position | None = None
    error: Exception | None = None


def write_frame(file: IO[bytes], value: Setup | ReadOrder | Answer) -> None:
    """Write a value. The bytes of tensors are written without a copy. Raises OSError if the other side has ended."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, 5, buffers.append).dump(value)
    raws = [buffer.raw() for buffer in buffers]
    sizes = _COUNT.pack(head.tell(), len(raws)) + b"".join(_SIZE.pack(raw.nbytes) for raw in raws)
    for part in (memoryview(sizes), head.getbuffer(), *raws):
        done = 0
        while done < part.nbytes:  # an unbuffered pipe may take a part of the bytes
            done += file.write(part[done:])


def read_frame(file: IO[bytes]) -> Any:
    """Read a value. Raises EOFError if the other side has ended."""
    length, count = _COUNT.unpack(_exactly(file, _COUNT.size))
    sizes = [_SIZE.unpack(_exactly(file, _SIZE.size))[0] for _ in range(count)]
    head = _exactly(file, length)
    return pickle.loads(head, buffers=[_exactly(file, size) for size in sizes])


def _exactly(file: IO[bytes], size: int) -> bytearray:
    found = bytearray(size)
    view, done = memoryview(found), 0
    while done < size:
        more = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not more:
            raise EOFError("the other side of the pipe has ended")
        done += more
    return found


class _Pickler(SourcePickler):
    """Pickles the bytes of plain tensors as buffers, and classes of the user's modules by value."""

    def __init__(self, file: IO[bytes], protocol: int, buffer_callback: Any) -> None:
        super().__init__(file, protocol, buffer_callback)

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild `value`: see `pickle.Pickler.reducer_override`."""
        if type(value) is torch.Tensor and _is_plain(value):
            raw = value.reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(raw.data), value.dtype, tuple(value.shape))
        return super().reducer_override(value)


def _is_plain(value: torch.Tensor) -> bool:
    return (
        value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_complex()
        and not value.is_quantized
        and value.is_contiguous()
        and value.numel() > 0
    )


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def main() -> None:
    """Answer orders until stdin is closed."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the user's code prints goes to the worker's stderr
    orders: queue.Queue[ReadOrder] = queue.Queue()
    given = os.fdopen(os.dup(0), "rb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    torch.set_num_threads(1)
    setup: Setup = read_frame(given)
    sys.path[:], sys.argv[:] = setup.path, setup.argv
    threading.Thread(target=_receive, args=(given, orders), daemon=True).start()
    try:
        data: Data = unpack(setup.packed, shared=True)
        while True:
            _answer(data, orders.get(), orders, answers)
    except BrokenPipeError:  # the parent has ended
        os._exit(1)
    except Exception as error:
        write_frame(answers, Answer(0, error=_sent(error)))
        os._exit(1)


def _receive(given: IO[bytes], orders: queue.Queue[ReadOrder]) -> None:
    try:
        while True:
            orders.put(read_frame(given))
    except (EOFError, OSError):
        os._exit(1)  # without waiting for the user's threads


def _answer(data: Data, order: ReadOrder, orders: queue.Queue[ReadOrder], answers: IO[bytes]) -> None:
    """Read one pass. Stop if there is another order."""
    place, number = order.place, order.start
    try:
        _seed(place, number)
        for batch, position in data.part(place, order.start, order.position):
            write_frame(answers, Answer(order.number, batch, position))
            if not orders.empty():
                return
            number += 1
            _seed(place, number)
    except BrokenPipeError:
        raise
    except Exception as error:
        write_frame(answers, Answer(order.number, error=_sent(error)))
        return
    write_frame(answers, Answer(order.number))


def _seed(place: Place, number: int) -> None:
    """Seed torch, numpy and random for a batch, so that random transforms do not depend on the number of processes."""
    batch = place.process + number * place.processes
    seed_generators(place.seed, place.epoch, place.rank, batch)


def _sent(error: Exception) -> Exception:
    """Return the error, or an error with its type and text if it cannot be pickled."""
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RaypsError(f"{type(error).__name__}: {error}")
    return error
