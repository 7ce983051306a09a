"""Form the transport between the devices of a ring: exchange facts, choose, probe, and agree on the result.

The choice is a pure function (`choose_gpu_transport`). A transport that is possible may still fail, for example where a
container forbids CUDA IPC. It is therefore tried with a small vector; if this fails on any rank, all ranks use staging.
"""

from __future__ import annotations

import os
import socket

from rayps_client.errors import ConfigError, LinkError, first_line

from rayps.comm.ring.choose_algorithm import Autotuner
from rayps.comm.ring.describe import DeviceChoice
from rayps.comm.ring.device.choose_gpu_transport import GpuFacts, GpuTransport, choose_gpu_transport
from rayps.comm.ring.device.device_group import GroupTransport
from rayps.comm.ring.device.device_ipc import IpcTransport
from rayps.comm.ring.device.device_staging import StagingTransport
from rayps.comm.ring.device.device_transport import DeviceTransport
from rayps.comm.ring.mesh import Mesh
from rayps.tensors.device import Device

_TEXT_BYTES = 4096  # length of a text that ranks exchange when a ring is formed, padded with spaces


def form_device_transport(
    mesh: Mesh, folder: Autotuner, device: Device, asked: GpuTransport | None, host: str
) -> tuple[DeviceTransport, DeviceChoice]:
    """Return the transport between the ranks' devices. All ranks must make this call; `host` is rank 0's address.

    Raises ConfigError if the transport that the user has asked for is not possible or fails.
    """
    facts = [
        GpuFacts.unpacked(raw) for raw in _exchange_texts(mesh, _collect_facts(mesh, folder, device, asked).packed())
    ]
    name, why = choose_gpu_transport(facts, asked)
    if name != "staging":
        made, problem = _try(mesh, folder, device, name, host)
        problems = [text.decode() for text in _exchange_texts(mesh, problem.encode())]
        failed = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
        if not failed and made is not None:
            return made, {"transport": name, "why": why}
        if asked is not None:
            raise ConfigError(f"the transport {asked} between devices failed when it was tried: {failed}", given=asked)
        why = f"{name} failed when it was tried: {failed}"
    return StagingTransport(mesh, folder, device), {"transport": "staging", "why": why}


def _try(
    mesh: Mesh, folder: Autotuner, device: Device, name: GpuTransport, host: str
) -> tuple[DeviceTransport | None, str]:
    """Form the transport and try it with a small vector; return the transport, and the problem as text."""
    made: GroupTransport | IpcTransport
    mesh.begin()
    try:
        if name == "nccl":
            made = GroupTransport(mesh, device, host)
        else:
            assert folder.shared_memory is not None, "the choice of ipc needs the host's memory"
            made = IpcTransport(mesh, folder.shared_memory, device)
        problem = made.probe()
    except (LinkError, RuntimeError) as error:
        if mesh.dead is not None:
            raise
        return None, first_line(error)[:300]
    return made, problem[:300]


def _collect_facts(mesh: Mesh, folder: Autotuner, device: Device, asked: GpuTransport | None) -> GpuFacts:
    return GpuFacts(
        device=device.identity if device.kind == "cuda" or asked != "nccl" else f"cpu of rank {mesh.rank}",
        process=f"{socket.gethostname()}:{os.getpid()}",
        nccl=device.group_library(),
        expandable=device.expandable_segments(),
        common=folder.shared_memory is not None,
    )


def _exchange_texts(mesh: Mesh, mine: bytes) -> list[bytes]:
    """Exchange a text between all ranks; return the texts in the order of ranks."""
    mesh.begin()
    padded = mine[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    found = [bytearray(padded) for _ in range(mesh.size)]
    others = [peer for peer in range(mesh.size) if peer != mesh.rank]
    mesh.exchange([(peer, padded) for peer in others], [(peer, memoryview(found[peer])) for peer in others])
    return [bytes(each).rstrip() for each in found]
