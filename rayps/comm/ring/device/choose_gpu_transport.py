"""Choose how the tensors of a ring's devices travel between its ranks, from facts of all ranks.

- nccl: a process group of NCCL. Each rank needs a GPU of its own; NCCL refuses two ranks on one GPU.
- ipc: ranks that share one GPU read each other's memory on it (CUDA IPC).
- staging: through pinned memory of the CPU and the ring's own connections. It works everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from rayps_client.errors import ConfigError

GpuTransport = Literal["nccl", "ipc", "staging"]
NAMES: tuple[GpuTransport, ...] = get_args(GpuTransport)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What one rank knows about its device."""

    device: str  # the device's identity, equal on all ranks that use the same device
    process: str  # the rank's host and process: some ranks may be threads of one process
    nccl: str = ""  # the version of the group library, NCCL on a GPU; empty if torch has none
    expandable: bool = False  # whether torch's allocator uses expandable segments, whose memory CUDA IPC cannot share
    common: bool = True  # whether all ranks are on one host and share its memory

    def packed(self) -> bytes:
        """Return the facts as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, raw: bytes) -> GpuFacts:
        """Return the facts that `packed` has packed."""
        return cls(**json.loads(raw))


def choose_gpu_transport(facts: Sequence[GpuFacts], asked: GpuTransport | None = None) -> tuple[GpuTransport, str]:
    """Return the transport of the ranks with these facts, and the reason. All ranks get the same facts.

    `asked` is the transport that the user has asked for. Raises ConfigError if it is not possible; the error says why.
    """
    obstacles: dict[GpuTransport, str] = {"nccl": _explain_no_nccl(facts), "ipc": _explain_no_ipc(facts), "staging": ""}
    if asked is not None:
        if asked not in NAMES:
            raise ConfigError(f"there is no transport {asked!r} for devices: use {', '.join(NAMES)}", given=asked)
        if obstacles[asked]:
            raise ConfigError(
                f"the transport {asked} is not possible between these ranks: {obstacles[asked]}\n"
                "leave `device_transport` out, and the ring chooses one",
                given=asked,
            )
        return asked, "as device_transport says"
    if not obstacles["nccl"]:
        return "nccl", "each rank has a GPU of its own"
    if not obstacles["ipc"]:
        return "ipc", "all ranks share one GPU, where they read each other's memory"
    return "staging", f"no nccl: {obstacles['nccl']}; no ipc: {obstacles['ipc']}"


def _explain_no_nccl(facts: Sequence[GpuFacts]) -> str:
    """Return why NCCL is not possible, or an empty text."""
    without = [rank for rank, each in enumerate(facts) if not each.nccl]
    if without:
        return f"torch has no NCCL on {_format_ranks(without)}"
    versions = sorted({each.nccl for each in facts})
    if len(versions) > 1:
        return f"the ranks have several versions of NCCL ({', '.join(versions)})"
    if len({each.device for each in facts}) < len(facts):
        return f"{_format_ranks(_find_sharing([each.device for each in facts]))} share a GPU"
    return ""


def _explain_no_ipc(facts: Sequence[GpuFacts]) -> str:
    """Return why CUDA IPC is not possible, or an empty text."""
    if len({each.device for each in facts}) > 1:
        return "the ranks use several GPUs"
    if not all(each.common for each in facts):
        return "the ranks do not share the memory of one host"
    if len({each.process for each in facts}) < len(facts):
        return f"{_format_ranks(_find_sharing([each.process for each in facts]))} are threads of one process"
    expandable = [rank for rank, each in enumerate(facts) if each.expandable]
    if expandable:
        return (
            f"{_format_ranks(expandable)} cannot share expandable segments: remove expandable_segments:True from "
            "PYTORCH_CUDA_ALLOC_CONF"
        )
    return ""


def _find_sharing(values: Sequence[str]) -> list[int]:
    """Return the ranks of the first value that several ranks have."""
    first = next(value for value in values if values.count(value) > 1)
    return [rank for rank, value in enumerate(values) if value == first]


def _format_ranks(some: Sequence[int]) -> str:
    return f"rank{'s'[: len(some) > 1]} {', '.join(map(str, some))}"
