"""Encode and decode the messages between a job and its real clients, as safetensors.

A message to the clients has the tensors `w` (the model as one vector), `shared/NAME` (the server's state, such as
SCAFFOLD's c) and `buffers/NAME`, and the model's layout as text. A client's update has the tensors `w` (its w_k),
`sums/NAME` and `buffers/NAME`, and as numbers the samples, the steps and the mean loss. A client sends nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping

import safetensors
import safetensors.torch
from torch import Tensor

from rayps.core.errors import WorkloadError
from rayps.core.values import Json
from rayps.federated.client import ClientReply
from rayps.tensors.flat import Layout

_SLACK = 1 << 20  # largest size of an update without its tensors, in bytes
MOST_STEPS = 2**53  # an update that reports more steps or samples is rejected


def encode_parameters(w: Tensor, layout: Layout, shared: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> bytes:
    """Encode, as safetensors, what the clients of a round start from.

    `w`: the model as one vector. `shared`: the server's state by name, such as SCAFFOLD's c. `buffers`: the model's
    buffers by name. `layout`: the names and shapes of the parts of `w`.
    """
    tensors = {"w": w, **_named("shared", shared), **_named("buffers", buffers)}
    return safetensors.torch.save(
        {name: _plain(value) for name, value in tensors.items()}, {"layout": json.dumps(_layout_rows(layout))}
    )


def decode_parameters(raw: bytes, layout: Layout) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Decode, on a client, the parameters with which a round starts. Return (w, server's state, buffers).

    Raises:
        WorkloadError: `layout`, the layout of the client's model, differs from the job's layout.
    """
    theirs, ours = json.loads(_metadata(raw)["layout"]), _layout_rows(layout)
    if theirs != ours:
        known = {name: shape for name, *shape in ours}
        other = next((row for row in theirs if known.get(row[0]) != row[1:]), theirs[0] if theirs else ["nothing"])
        mine = f"{known[other[0]]}" if other[0] in known else "none of that name"
        raise WorkloadError(
            f"the job's model differs from this workload's: the job has {other[0]} {other[1:]}, this workload has "
            f"{mine}:\nuse the workload file, and the versions of its packages, with which the job was submitted"
        )
    tensors = safetensors.torch.load(raw)
    return tensors["w"], _of("shared", tensors), _of("buffers", tensors)


def encode_update(reply: ClientReply) -> bytes:
    """Encode a client's update: its w_k, sums, buffers, numbers of samples and steps, and loss."""
    tensors = {"w": reply.w, **_named("sums", reply.sums), **_named("buffers", reply.buffers)}
    counts = {"n": reply.n, "steps": reply.steps, "samples": reply.samples, "loss": reply.loss}
    return safetensors.torch.save(
        {name: _plain(value) for name, value in tensors.items()}, {"counts": json.dumps(counts)}
    )


def most_bytes(w: Tensor, sums: Collection[str], buffers: Mapping[str, Tensor]) -> int:
    """Return the largest number of bytes that an update may have."""
    whole = w.numel() * w.element_size() * (1 + len(sums))
    return whole + sum(value.numel() * value.element_size() + 512 for value in buffers.values()) + _SLACK


def decode_update(
    raw: bytes, w: Tensor, sums: Collection[str], buffers: Mapping[str, Tensor], most_samples: int
) -> ClientReply | str:
    """Decode a client's update. Return the reply, or the reason why the update cannot be used.

    `w` and `buffers` have the expected shapes and dtypes. `most_samples` is the number of samples that the client
    reported when it joined. The aggregation checks later whether the values are finite.
    """
    try:
        counts = json.loads(_metadata(raw)["counts"])
        tensors = safetensors.torch.load(raw)
        n, steps, samples, loss = (counts[key] for key in ("n", "steps", "samples", "loss"))
        loss = float(loss)
    except Exception:  # decoding untrusted bytes may raise any exception
        return "its update cannot be read"
    wanted = {"w": w, **{f"sums/{name}": w for name in sums}, **_named("buffers", buffers)}
    if tensors.keys() != wanted.keys():
        odd = sorted(tensors.keys() ^ wanted.keys())[0]
        return f"its update {'lacks' if odd in wanted else 'has an unknown'} {odd!r}"
    for name, like in wanted.items():
        if tensors[name].shape != like.shape or tensors[name].dtype != like.dtype:
            return f"its {name!r} is {_kind(tensors[name])}, but {_kind(like)} was expected"
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (n, steps, samples))
    if not whole or not 1 <= n <= most_samples or not 0 <= steps < MOST_STEPS or not 0 <= samples < MOST_STEPS:
        return f"it reports {n!r} samples, but joined with {most_samples}"
    if not math.isfinite(loss):
        return f"its mean loss is {loss}"
    return ClientReply(tensors["w"], n, _of("sums", tensors), {}, _of("buffers", tensors), loss, samples, steps)


def _metadata(raw: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises ValueError or KeyError if the file has no metadata."""
    length = int.from_bytes(raw[:8], "little")
    if not 0 < length <= len(raw) - 8:
        raise ValueError("no safetensors")
    header = json.loads(raw[8 : 8 + length])
    found = header["__metadata__"] if isinstance(header, dict) else None
    if not isinstance(found, dict):
        raise ValueError("no metadata")
    return found


def _layout_rows(layout: Layout) -> list[list[Json]]:
    dtype = str(layout.dtype).removeprefix("torch.")
    return [[entry.name, list(entry.shape), dtype] for entry in layout.entries]


def _named(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{group}/{name}": value for name, value in tensors.items()}


def _of(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{group}/"): value for name, value in tensors.items() if name.startswith(f"{group}/")}


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().clone()  # cloned, because safetensors refuses tensors that share memory


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
