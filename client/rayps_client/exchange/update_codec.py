"""Encode and decode the messages between a job and its real clients, as safetensors.

A message to the clients has the tensors `w` (the model as one vector), `shared/NAME` (the server's state, such as
SCAFFOLD's c) and `buffers/NAME`, and the model's layout as text. A client's update has the tensors `w` (its w_k),
`sums/NAME` and `buffers/NAME`, and as numbers the samples, the steps and the mean loss. A client sends nothing else.

If the strategy codes the download, the message has `w/PART` in place of `w`. If updates are coded, an update has
`update/PART` in place of `w` (`rayps_client.exchange.upload_coding`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence

from rayps_client.errors import WorkloadError
from rayps_client.exchange.coded_vectors import Malformed, VectorCoding
from rayps_client.exchange.raw_tensors import (
    RawTensor,
    decode_tensors,
    encode_tensors,
    floats_of,
    item_bytes,
    metadata_of,
    raw_of_array,
    raw_of_floats,
)
from rayps_client.exchange.upload_coding import DOWNLOAD, UpdateCode
from rayps_client.trainers.local_trainer import LayoutRow, LocalReply, RoundStart

_SLACK = 1 << 20  # largest size of an update without its tensors, in bytes
MOST_STEPS = 2**53  # an update that reports more steps or samples is rejected


def encode_start(start: RoundStart, layout: Sequence[LayoutRow], *, coding: VectorCoding | None = None) -> bytes:
    """Encode, as safetensors, what the clients of a round start from. `coding`: how w is coded."""
    parts = {"w": start.w}
    if coding is not None:
        parts = _named("w", {name: raw_of_array(part) for name, part in coding.encode(floats_of(start.w), 0).items()})
    tensors = {**parts, **_named("shared", start.shared), **_named("buffers", start.buffers)}
    return encode_tensors(tensors, {"layout": json.dumps(list(layout))})


def decode_start(raw: bytes, layout: Sequence[LayoutRow]) -> RoundStart:
    """Decode, on a client, the parameters with which a round starts.

    Raises:
        WorkloadError: `layout`, the layout of the client's model, differs from the job's layout.
    """
    theirs, ours = json.loads(metadata_of(raw)["layout"]), [list(row) for row in layout]
    if theirs != ours:
        known = {name: shape for name, *shape in ours}
        other = next((row for row in theirs if known.get(row[0]) != row[1:]), theirs[0] if theirs else ["nothing"])
        mine = f"{known[other[0]]}" if other[0] in known else "none of that name"
        raise WorkloadError(
            f"the job's model differs from this workload's: the job has {other[0]} {other[1:]}, this workload has "
            f"{mine}:\nuse the workload file, and the versions of its packages, with which the job was submitted"
        )
    tensors = decode_tensors(raw)
    w = tensors["w"] if "w" in tensors else _decoded_start(_of("w", tensors), layout)
    return RoundStart(w, _of("shared", tensors), _of("buffers", tensors))


def _decoded_start(parts: Mapping[str, RawTensor], layout: Sequence[LayoutRow]) -> RawTensor:
    n = sum(math.prod(shape) for _, shape, _ in layout)
    found = DOWNLOAD.decode({name: raw.array() for name, raw in parts.items()}, n, 0)
    return raw_of_floats(found, RawTensor(layout[0][2], (n,), b""))


def encode_update(reply: LocalReply, coded: Mapping[str, RawTensor] | None = None) -> bytes:
    """Encode a client's update: its w_k, sums, buffers, numbers of samples and steps, and loss.

    `coded`: the parts of its coded update, which are sent in place of w_k.
    """
    parts = {"w": reply.w} if coded is None else _named("update", coded)
    tensors = {**parts, **_named("sums", reply.sums), **_named("buffers", reply.buffers)}
    counts = {"n": reply.n, "steps": reply.steps, "samples": reply.samples, "loss": reply.loss}
    return encode_tensors(tensors, {"counts": json.dumps(counts)})


def most_bytes(
    w: RawTensor, sums: Collection[str], buffers: Mapping[str, RawTensor], coding: VectorCoding | None = None
) -> int:
    """Return the largest number of bytes that an update may have. `coding`: how updates are coded."""
    update = w.nbytes if coding is None else coding.size(w.elements, max(4, item_bytes(w.dtype)))
    return update + w.nbytes * len(sums) + sum(value.nbytes + 512 for value in buffers.values()) + _SLACK


def decode_update(
    raw: bytes,
    w: RawTensor,
    sums: Collection[str],
    buffers: Mapping[str, RawTensor],
    most_samples: int,
    *,
    code: UpdateCode | None = None,
) -> LocalReply | str:
    """Decode a client's update. Return the reply, or the reason why the update cannot be used.

    `w` and `buffers` have the expected shapes and dtypes. `most_samples` is the number of samples that the client
    reported when it joined. `code`: how the update is coded; `w` is then the w_t to which it is added. The aggregation
    checks later whether the values are finite.
    """
    try:
        counts = json.loads(metadata_of(raw)["counts"])
        tensors = decode_tensors(raw)
        n, steps, samples, loss = (counts[key] for key in ("n", "steps", "samples", "loss"))
        loss = float(loss)
    except Exception:  # decoding untrusted bytes may raise any exception
        return "its update cannot be read"
    if code is not None:
        parts = _of("update", tensors)
        if "w" in tensors:
            return "its update has parameters, but the job's clients code their updates (`upload`, `download`)"
        tensors = {name: value for name, value in tensors.items() if not name.startswith("update/")}
        try:
            tensors["w"] = code.parameters(parts, w)
        except Malformed as error:
            return f"its update {error}"
    wanted = {"w": w, **{f"sums/{name}": w for name in sums}, **_named("buffers", buffers)}
    if tensors.keys() != wanted.keys():
        odd = sorted(tensors.keys() ^ wanted.keys())[0]
        return f"its update {'lacks' if odd in wanted else 'has an unknown'} {odd!r}"
    for name, like in wanted.items():
        if tensors[name].kind != like.kind:
            return f"its {name!r} is {tensors[name].kind}, but {like.kind} was expected"
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (n, steps, samples))
    if not whole or not 1 <= n <= most_samples or not 0 <= steps < MOST_STEPS or not 0 <= samples < MOST_STEPS:
        return f"it reports {n!r} samples, but joined with {most_samples}"
    if not math.isfinite(loss):
        return f"its mean loss is {loss}"
    return LocalReply(
        tensors["w"], _of("sums", tensors), _of("buffers", tensors), {}, n=n, steps=steps, samples=samples, loss=loss
    )


def _named(group: str, tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    return {f"{group}/{name}": value for name, value in tensors.items()}


def _of(group: str, tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    return {name.removeprefix(f"{group}/"): value for name, value in tensors.items() if name.startswith(f"{group}/")}
