"""Encode and decode the messages between a job and its real clients, as safetensors.

A message to the clients has the tensors `w` (the model as one vector), `shared/NAME` (the server's state, such as
SCAFFOLD's c) and `buffers/NAME`, and the model's layout as text. A client's update has the tensors `w` (its w_k),
`sums/NAME` and `buffers/NAME`, and as numbers the samples, the steps and the mean loss. A client sends nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence

from rayps_client.errors import WorkloadError
from rayps_client.local_trainer import LayoutRow, LocalReply, RoundStart
from rayps_client.raw_tensors import RawTensor, decode_tensors, encode_tensors, metadata_of

_SLACK = 1 << 20  # largest size of an update without its tensors, in bytes
MOST_STEPS = 2**53  # an update that reports more steps or samples is rejected


def encode_start(start: RoundStart, layout: Sequence[LayoutRow]) -> bytes:
    """Encode, as safetensors, what the clients of a round start from."""
    tensors = {"w": start.w, **_named("shared", start.shared), **_named("buffers", start.buffers)}
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
    return RoundStart(tensors["w"], _of("shared", tensors), _of("buffers", tensors))


def encode_update(reply: LocalReply) -> bytes:
    """Encode a client's update: its w_k, sums, buffers, numbers of samples and steps, and loss."""
    tensors = {"w": reply.w, **_named("sums", reply.sums), **_named("buffers", reply.buffers)}
    counts = {"n": reply.n, "steps": reply.steps, "samples": reply.samples, "loss": reply.loss}
    return encode_tensors(tensors, {"counts": json.dumps(counts)})


def most_bytes(w: RawTensor, sums: Collection[str], buffers: Mapping[str, RawTensor]) -> int:
    """Return the largest number of bytes that an update may have."""
    return w.nbytes * (1 + len(sums)) + sum(value.nbytes + 512 for value in buffers.values()) + _SLACK


def decode_update(
    raw: bytes, w: RawTensor, sums: Collection[str], buffers: Mapping[str, RawTensor], most_samples: int
) -> LocalReply | str:
    """Decode a client's update. Return the reply, or the reason why the update cannot be used.

    `w` and `buffers` have the expected shapes and dtypes. `most_samples` is the number of samples that the client
    reported when it joined. The aggregation checks later whether the values are finite.
    """
    try:
        counts = json.loads(metadata_of(raw)["counts"])
        tensors = decode_tensors(raw)
        n, steps, samples, loss = (counts[key] for key in ("n", "steps", "samples", "loss"))
        loss = float(loss)
    except Exception:  # decoding untrusted bytes may raise any exception
        return "its update cannot be read"
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
