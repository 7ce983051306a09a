"""How many processes to keep warm: started before a job needs them, with torch and rayps imported.

A driver or worker that takes a warm process starts in milliseconds, where a new process takes seconds to import torch.
A warm process serves one job and ends with it, so that no job sees what another has left in memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

QUIET_SECONDS = 20.0  # seconds after a process was taken, in which no new one starts: the job's start needs the cores
LEAST_FREE = 0.2  # the share of a host's memory that must be available for a new warm process
IDLE_SECONDS = 900.0  # seconds after which a process that no job took ends; the next one replaces it
MODULES = (
    "rayps.runtime.driver_actor",
    "rayps.runtime.driver",
    "rayps.runtime.worker_actor",
    "rayps.worker.sync_gradients",
    "rayps.worker.server_steps",
)


@dataclass(frozen=True, slots=True)
class WarmFacts:
    """The facts that decide whether a process is started."""

    wanted: int  # the number of processes to keep
    ready: int  # processes that wait for a job
    starting: int  # processes that are importing
    since_taken: float  # seconds since a job took a process
    free_memory: float  # share of the host's memory that is available


def to_start(facts: WarmFacts) -> int:
    """Return how many processes to start now: one at most, because each needs a core for seconds."""
    if facts.ready + facts.starting >= facts.wanted or facts.starting:
        return 0
    return int(facts.since_taken >= QUIET_SECONDS and facts.free_memory >= LEAST_FREE)


def free_memory() -> float:
    """Return the share of this host's memory that is available, or 1 if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return found["MemAvailable"] / found["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return 1.0


def own_memory() -> int:
    """Return the bytes of memory that this process occupies, or 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
