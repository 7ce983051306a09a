"""The options `upload` and `download` of a federated strategy, and what a client does by them.

    upload      how a client codes its update u = w_k - w_t: int8, top_k:0.05 (the share of the elements that are sent)
                or mask:0.1. None: it sends w_k, or the whole of u if the download is coded
    download    how w_t is coded for the clients: int8. None: the whole of w_t

A client trains from the w_t that it has decoded, and its update is the difference to that. The job adds the update to
its own w_t, which is not rounded: what the coding of the download loses in one round is not lost in the model, because
the next round's coding begins with the whole model again.

Error feedback: with top_k a client adds to its update what its earlier encodings have left out, and stores the new rest
with the strategy's state, so that a round that is repeated, or an update that is rejected, takes the rest back as well.
The sum of all decoded updates and the rest is the sum of all updates. int8 rounds at random and a mask is drawn at
random, both with the right expected value: they need no memory.

SCAFFOLD's change of c, and buffers, are not coded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayps_client.exchange.coded_vectors import Floats, Int8, Malformed, Parts, RandomMask, TopK, VectorCoding, Whole
from rayps_client.exchange.coding_names import INT8, TOP_K, download_name, upload_name
from rayps_client.exchange.random_numbers import number
from rayps_client.exchange.raw_tensors import RawTensor, floats_of, item_bytes, raw_of_array, raw_of_floats
from rayps_client.trainers.local_trainer import LayoutRow, LocalReply, RawTensors, layout_bytes
from rayps_client.values import JsonObject

_MEMORY = "upload/rest"  # name, in a client's state, of what its encodings have left out
DOWNLOAD: VectorCoding = Int8(nearest=True)  # the same for all clients, and in a repeated round


def upload_of(given: object) -> VectorCoding | None:
    """Return the coding of the option `upload`, or None for None. Raises ConfigError if it cannot be read."""
    found = upload_name(given)
    if found is None:
        return None
    name, fraction = found
    if name == INT8:
        return Int8(nearest=False)
    return TopK(fraction) if name == TOP_K else RandomMask(fraction)


def download_of(given: object) -> VectorCoding | None:
    """Return the coding of the option `download`, or None for None. Raises ConfigError if it cannot be read."""
    return None if download_name(given) is None else DOWNLOAD


def update_coding(strategy: JsonObject) -> VectorCoding | None:
    """Return how the clients of a job with this strategy code their updates. None: they send their parameters.

    Raises ConfigError if an option cannot be read.
    """
    upload, download = upload_of(strategy.get("upload")), download_of(strategy.get("download"))
    return Whole() if upload is None and download is not None else upload


def bytes_of_round(received: int, layout: Sequence[LayoutRow], strategy: JsonObject) -> int:
    """Return about how many bytes a client receives and sends in a round. `received`: those of the round's start."""
    whole, n = layout_bytes(layout), sum(math.prod(shape) for _, shape, _ in layout)
    download, update = download_of(strategy.get("download")), update_coding(strategy)
    start = whole if download is None else download.size(n)
    sent = whole if update is None else update.size(n, max(4, item_bytes(layout[0][2])))
    return 2 * received - start + sent  # what is beside w, such as SCAFFOLD's c, is sent as it is received


def without_rest(state: Mapping[str, RawTensor]) -> RawTensors:
    """Return a client's state without what its encodings have left out."""
    return {name: value for name, value in state.items() if name != _MEMORY}


@dataclass(frozen=True, slots=True)
class UpdateCode:
    """The coding of one client's update in one round."""

    coding: VectorCoding
    draw: int  # the number from which its random numbers follow

    @classmethod
    def of(cls, coding: VectorCoding, seed: int, at: int, client: int) -> UpdateCode:
        """Return the coding of round `at` of the run. Each client has random numbers of its own."""
        return cls(coding, number(seed, "upload", at, client))

    def encode(self, update: Floats) -> RawTensors:
        """Encode an update w_k - w_t."""
        return {name: raw_of_array(part) for name, part in self.coding.encode(update, self.draw).items()}

    def parameters(self, parts: Mapping[str, RawTensor], w_t: RawTensor) -> RawTensor:
        """Return w_t plus the decoded update, with the dtype of w_t. Raises Malformed if it cannot be decoded."""
        start = floats_of(w_t)
        with np.errstate(over="ignore", invalid="ignore"):
            return raw_of_floats(start + self.decoded(parts, start.size), w_t)

    def decoded(self, parts: Mapping[str, RawTensor], n: int) -> Floats:
        """Return the n elements of a decoded update. Raises Malformed if it cannot be decoded."""
        return self.coding.decode(_arrays(parts), n, self.draw)


@dataclass(slots=True)
class UploadCoder:
    """What a client does with its update in one round: code it, and keep what the coding has left out."""

    code: UpdateCode | None  # None: it sends its parameters
    rest: RawTensor | None  # what its earlier encodings have left out

    @classmethod
    def of(cls, strategy: JsonObject, seed: int, at: int, client: int, *, state: RawTensors) -> UploadCoder:
        """Return the coder of round `at`. Remove the rest of earlier rounds from the client's `state`.

        Raises ConfigError if the strategy's options cannot be read.
        """
        coding, rest = update_coding(strategy), state.pop(_MEMORY, None)
        return cls(None if coding is None else UpdateCode.of(coding, seed, at, client), rest)

    def coded(self, reply: LocalReply, w_t: RawTensor) -> RawTensors | None:
        """Code the update of a training that began at `w_t`, and add the new rest to the client's state.

        Return None if the client sends its parameters.
        """
        if self.code is None:
            return None
        update = floats_of(reply.w) - floats_of(w_t)
        feeds_back = self.code.coding.feeds_back
        if feeds_back and self.rest is not None and self.rest.shape == update.shape:
            update = update + self.rest.array()
        parts = self.code.encode(update)
        if feeds_back:
            with np.errstate(invalid="ignore"):
                reply.state[_MEMORY] = raw_of_array(update - self.code.decoded(parts, update.size))
        return parts


def _arrays(parts: Mapping[str, RawTensor]) -> Parts:
    try:
        return {name: raw.array() for name, raw in parts.items()}
    except Exception as error:  # a dtype that numpy lacks
        raise Malformed("has a part of an unknown dtype") from error
