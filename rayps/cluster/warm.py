"""How many processes to keep warm: started before a job needs them, with torch and rayps imported.

A driver or worker that takes a warm process starts in milliseconds, where a new process takes seconds to import torch.
A warm process serves one job and ends with it, so that no job sees what another has left in memory.

A process is given only to an actor that would get the same environment in a new process: `environment_key` is part of
the process's key. Workers whose job has `requirements` or `env` never take one: an imported package keeps its
version, and torch has read its variables.
The hash of the job's code is no part of the key: a warm process has imported `MODULES` and no module of a user, and it
enters the code of its job after it was taken, as a new process does.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayps.core.memory import read_available_bytes, read_total_bytes

QUIET_SECONDS = 20.0  # seconds after a process was taken, in which no new one starts: the job's start needs the cores
LEAST_FREE = 0.2  # the share of a host's memory that warm processes leave available
START_SECONDS = 60.0  # seconds after which a process ends that an actor took and did not use
IDLE_SECONDS = 900.0  # seconds after which a process that no job took ends; the next one replaces it
MODULES = (
    "rayps.runtime.driver.driver_actor",
    "rayps.runtime.driver.workload_job",
    "rayps.runtime.driver.worker_actor",
    "rayps.worker.loops.sync_gradients",
    "rayps.worker.loops.server_steps",
    "rayps.runtime.own_loop.actor",
    "rayps.runtime.own_loop.wrap",
)


@dataclass(frozen=True, slots=True)
class WarmFacts:
    """The facts that decide whether a process is started."""

    wanted: int  # the number of processes to keep
    ready: int  # processes that wait for a job
    starting: int  # processes that are importing
    since_taken: float  # seconds since a job took a process
    free_memory: float  # share of the host's memory that is available
    process_memory: float = 0.0  # share of the host's memory that the largest of the ready processes occupies


@dataclass(frozen=True, slots=True)
class WarmState:
    """The warm processes of one host."""

    wanted: int = 0  # the number of processes to keep
    ready: int = 0  # processes that wait for a job
    starting: int = 0  # processes that are importing
    memory: int = 0  # bytes that the ready processes occupy: the sum of what each measured after its imports


def to_start(facts: WarmFacts) -> int:
    """Return how many processes to start now: one at most, because each needs a core for seconds.

    A process starts only if `LEAST_FREE` of the memory is still available with it.
    """
    if facts.ready + facts.starting >= facts.wanted or facts.starting:
        return 0
    room = facts.free_memory - facts.process_memory >= LEAST_FREE
    return int(facts.since_taken >= QUIET_SECONDS and room)


def to_end(facts: WarmFacts) -> int:
    """Return how many of the ready processes to end now: one, while less than `LEAST_FREE` of the memory is available.

    Processes beyond the wanted number end too, such as after a restart of the service with a smaller number.
    """
    return int(facts.ready > 0 and (facts.free_memory < LEAST_FREE or facts.ready > facts.wanted))


def environment_key(runtime_env: str, paths: Sequence[str]) -> str:
    """Return 16 hexadecimal digits that differ between environments of new processes of one host.

    `runtime_env` is Ray's runtime environment as JSON: packages, environment variables, working directory. `paths` are
    the folders that Ray adds to the Python path of a program's processes. Processes of one host have everything else in
    common, as the host's Ray daemon starts them all: its interpreter and its environment variables.
    """
    found = json.dumps([json.loads(runtime_env or "{}"), list(paths)], sort_keys=True)
    return hashlib.sha256(found.encode()).hexdigest()[:16]


def memory_share(bytes: int) -> float:
    """Return the share of this host's memory that `bytes` are, or 0 if the system does not report its memory."""
    return bytes / (read_total_bytes() or math.inf)


def free_memory() -> float:
    """Return the share of this host's memory that is available, or 1 if the system does not report it.

    In a container with a limit, it is the share of that limit.
    """
    available = read_available_bytes()
    return 1.0 if available is None else min(1.0, memory_share(available))


def own_memory() -> int:
    """Return the bytes of memory that this process occupies, or 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
