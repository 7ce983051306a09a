"""Encode and decode the messages between a job and its real clients: `exchange.update_codec`, for torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rayps_client.exchange import update_codec
from rayps_client.exchange.coded_vectors import VectorCoding
from rayps_client.exchange.upload_coding import UpdateCode
from rayps_client.trainers.local_trainer import LayoutRow, RoundStart
from rayps_client.trainers.torch_tensors import raw_of, raws_of, tensor_of, tensors_of
from torch import Tensor

from rayps.federated.client import ClientReply
from rayps.tensors.flat import Layout


def encode_parameters(
    w: Tensor,
    layout: Layout,
    shared: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    coding: VectorCoding | None = None,
) -> bytes:
    """Encode, as safetensors, what the clients of a round start from.

    `w`: the model as one vector. `shared`: the server's state by name, such as SCAFFOLD's c. `buffers`: the model's
    buffers by name. `layout`: the names and shapes of the parts of `w`. `coding`: how `w` is coded.
    """
    start = RoundStart(raw_of(w), raws_of(shared), raws_of(buffers))
    return update_codec.encode_start(start, layout_rows(layout), coding=coding)


def most_bytes(
    w: Tensor, sums: Collection[str], buffers: Mapping[str, Tensor], coding: VectorCoding | None = None
) -> int:
    """Return the largest number of bytes that an update may have. `coding`: how updates are coded."""
    return update_codec.most_bytes(raw_of(w), sums, raws_of(buffers), coding)


def decode_update(
    raw: bytes,
    w: Tensor,
    sums: Collection[str],
    buffers: Mapping[str, Tensor],
    most_samples: int,
    *,
    code: UpdateCode | None = None,
) -> ClientReply | str:
    """Decode a client's update. Return the reply, or the reason why the update cannot be used.

    `w` and `buffers` have the expected shapes and dtypes. `most_samples` is the number of samples that the client
    reported when it joined. `code`: how the update is coded; `w` is then the w_t to which it is added. The aggregation
    checks later whether the values are finite.
    """
    found = update_codec.decode_update(raw, raw_of(w), sums, raws_of(buffers), most_samples, code=code)
    if isinstance(found, str):
        return found
    sums_of, buffers_of = tensors_of(found.sums), tensors_of(found.buffers)
    return ClientReply(tensor_of(found.w), found.n, sums_of, {}, buffers_of, found.loss, found.samples, found.steps)


def layout_rows(layout: Layout) -> list[LayoutRow]:
    """Return a layout as plain data: the name, shape and dtype of each parameter."""
    dtype = str(layout.dtype).removeprefix("torch.")
    return [(entry.name, list(entry.shape), dtype) for entry in layout.entries]
