"""Encode and decode the messages between a job and its real clients, as safetensors.

Parameters: `w` (the model as one vector), `shared/NAME` (the server's state, such as SCAFFOLD's c), `buffers/NAME`; and
the layout of the model as text. An update: `w` (the client's w_k), `sums/NAME`, `buffers/NAME`; and the number of
samples, of steps, and the mean loss. Nothing else leaves a client.
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

_SLACK = 1 << 20  # bytes of an update besides its tensors
MOST_STEPS = 2**53


def packed(w: Tensor, layout: Layout, shared: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> bytes:
    """Encode a round's parameters for its clients."""
    tensors = {"w": w, **_named("shared", shared), **_named("buffers", buffers)}
    return safetensors.torch.save(
        {name: _plain(value) for name, value in tensors.items()}, {"layout": json.dumps(_said(layout))}
    )


def opened(raw: bytes, layout: Layout) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Decode a round's parameters: w, the server's shared values, and the buffers.

    Raises:
        WorkloadError: the parameters are of another model than the client's.
    """
    theirs, ours = json.loads(_metadata(raw)["layout"]), _said(layout)
    if theirs != ours:
        known = {name: shape for name, *shape in ours}
        other = next((line for line in theirs if known.get(line[0]) != line[1:]), theirs[0] if theirs else ["nothing"])
        mine = f"{known[other[0]]}" if other[0] in known else "none of that name"
        raise WorkloadError(
            f"the job's model is another than this workload's: it has {other[0]} {other[1:]}, and here is {mine}:\n"
            "use the same workload file, and the same versions of its packages, as the job was submitted with"
        )
    tensors = safetensors.torch.load(raw)
    return tensors["w"], _of("shared", tensors), _of("buffers", tensors)


def update(reply: ClientReply) -> bytes:
    """Encode a client's update: its w_k, sums, buffers, counts and loss."""
    tensors = {"w": reply.w, **_named("sums", reply.sums), **_named("buffers", reply.buffers)}
    counts = {"n": reply.n, "steps": reply.steps, "samples": reply.samples, "loss": reply.loss}
    return safetensors.torch.save(
        {name: _plain(value) for name, value in tensors.items()}, {"counts": json.dumps(counts)}
    )


def most_bytes(w: Tensor, sums: Collection[str], buffers: Mapping[str, Tensor]) -> int:
    """Return the largest size of an update in bytes."""
    whole = w.numel() * w.element_size() * (1 + len(sums))
    return whole + sum(value.numel() * value.element_size() + 512 for value in buffers.values()) + _SLACK


def received(
    raw: bytes, w: Tensor, sums: Collection[str], buffers: Mapping[str, Tensor], most_samples: int
) -> ClientReply | str:
    """Decode a client's update: return the reply, or why it cannot be used.

    Whether the numbers are finite is checked later, by the aggregation.
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
            return f"its {name!r} is {_kind(tensors[name])}, and {_kind(like)} is expected"
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (n, steps, samples))
    if not whole or not 1 <= n <= most_samples or not 0 <= steps < MOST_STEPS or not 0 <= samples < MOST_STEPS:
        return f"it reports {n!r} samples, and joined with {most_samples}"
    if not math.isfinite(loss):
        return f"its mean loss is {loss}"
    return ClientReply(tensors["w"], n, _of("sums", tensors), {}, _of("buffers", tensors), loss, samples, steps)


def _metadata(raw: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises ValueError, KeyError: there is none."""
    length = int.from_bytes(raw[:8], "little")
    if not 0 < length <= len(raw) - 8:
        raise ValueError("no safetensors")
    header = json.loads(raw[8 : 8 + length])
    found = header["__metadata__"] if isinstance(header, dict) else None
    if not isinstance(found, dict):
        raise ValueError("no metadata")
    return found


def _said(layout: Layout) -> list[list[Json]]:
    dtype = str(layout.dtype).removeprefix("torch.")
    return [[entry.name, list(entry.shape), dtype] for entry in layout.entries]


def _named(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{group}/{name}": value for name, value in tensors.items()}


def _of(group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{group}/"): value for name, value in tensors.items() if name.startswith(f"{group}/")}


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().clone()  # safetensors refuses tensors that share memory


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
