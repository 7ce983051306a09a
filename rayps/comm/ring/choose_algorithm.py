"""The ring's backend `own`: choose the algorithm that reduces a vector, and the number of connections.

Ranks of one host read each other's vectors in shared memory (`rayps.comm.ring.shared_memory`); ranks of different hosts
send them over connections (`rayps.comm.ring.algorithms`). With `auto`, the ranks measure the candidates when the ring
is formed, and use the fastest one for each size.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
from rayps_client.errors import ConfigError
from torch import Tensor

from rayps.comm.ring.algorithms import ALGORITHMS, Idle, Subgroup, add, keep_first, ring_with_work, take_largest
from rayps.comm.ring.describe import ProbeRow, RingChoices
from rayps.comm.ring.mesh import Mesh
from rayps.comm.ring.shared_memory import SharedMemoryFold, tensor_of
from rayps.core.job.records import RingTable

NAMES = ("auto", *ALGORITHMS, "hierarchical")
_HALF = (torch.float16, torch.bfloat16)
_PROBES = (1 << 10, 16 << 10, 128 << 10, 1 << 20)  # bytes of the vectors that are measured
_LARGE_PROBE = 4 << 20  # a further size that is measured between hosts, as only a large transfer shows the bandwidth
TRIES = 5  # timed runs of a candidate at one size, after one that is not timed
_LARGE_TRIES = 3
_SLOW_SECONDS = 0.05  # a candidate that takes longer than this at one size is not measured at larger sizes
_STREAMS = (1, 2, 4)
_SLOW_NETWORK_SECONDS = 0.5  # if the large probe takes longer, more streams are not tried: the network is the limit
# in small vectors, candidates that take at most 1 / this share of the fastest one's time count as equally fast
_EQUAL = 0.9
# more streams, or an algorithm that sends more bytes, are chosen only if they take less than this share of the time
_WORTH = 0.8


class Autotuner:
    """The ring's backend `own`, which reduces vectors by a given algorithm or by the fastest measured one."""

    def __init__(self, mesh: Mesh, algorithm: str, table: RingTable | None, streams: int = 0) -> None:
        self.must_know(algorithm)
        self._mesh = mesh
        self._hosts, most_streams = _find_hosts(mesh)
        mine = next(group for group in self._hosts if mesh.rank in group)
        self._local = SharedMemoryFold(mesh, mine) if len(mine) > 1 else None
        self.shared_memory = self._local if len(self._hosts) == 1 else None
        if self._local is not None:
            mesh.at_end(self._local.close)
        mesh.begin()
        self.algorithm = algorithm
        self.choices: RingChoices = {
            "algorithm": algorithm,
            "transport": "shm" if self.shared_memory else _name_transport(mesh),
            "ranks": mesh.size,
            "hosts": self._hosts,
            "streams": streams or 1,
        }
        if most_streams > 1 and not streams:
            self.choices["streams"], self.choices["streams_seconds"] = self._count_streams()
        if algorithm != "auto" or mesh.size == 1:
            return
        self.choices["table"] = table["table"] if table else self._measure()
        self.choices["why"] = "given" if table else "measured when the ring was formed; the fastest by size"
        self._limits = [(int(row["up_to"] or 1 << 62), str(row["algorithm"])) for row in self.choices["table"]]

    def must_know(self, algorithm: str | None) -> None:
        """Raise ConfigError if `algorithm` is not the name of an algorithm; None is allowed."""
        if algorithm is not None and algorithm not in NAMES:
            raise ConfigError(
                f"there is no algorithm {algorithm!r}: use one of {', '.join(NAMES)}", algorithm=algorithm
            )

    def fold(self, x: Tensor, kind: str, algorithm: str | None = None) -> None:
        """Reduce a flat CPU vector over the ranks in place; `kind` is "add" or "max"."""
        if algorithm is None and self.shared_memory is not None and self.shared_memory.has_buffers:
            where = self.shared_memory.find(x)
            if where is not None:
                x.copy_(tensor_of(self.shared_memory.reduce_resident(where, x.dtype, x.nbytes, kind), x.dtype))
                return
        name = algorithm or self.algorithm
        if name == "auto":
            size = x.numel() * x.element_size()
            name = next(name for limit, name in self._limits if size <= limit)
        self._run(name, x, kind)

    def _run(self, name: str, x: Tensor, kind: str) -> None:
        if self.shared_memory is not None and name in ("one_shot", "two_shot"):
            (self.shared_memory.one_shot if name == "one_shot" else self.shared_memory.two_shot)(x, kind)
            return
        if name == "hierarchical":
            self._reduce_by_host(x, kind)
            return
        wide = x.float() if x.dtype in _HALF else x
        ALGORITHMS[name](self._mesh, wide, add if kind == "add" else take_largest)
        if wide is not x:
            x.copy_(wide)

    def _reduce_by_host(self, x: Tensor, kind: str) -> None:
        """Reduce within each host, then between one rank of each host in a ring, then copy the result within hosts."""
        wide = x.float() if x.dtype in _HALF else x
        leaders = [group[0] for group in self._hosts]
        shared_memory, host = self._local, next(i for i, group in enumerate(self._hosts) if self._mesh.rank in group)

        def before(segment: Tensor) -> None:
            if shared_memory is not None:
                shared_memory.reduce(segment, kind)

        def after(segment: Tensor) -> None:
            if shared_memory is not None:
                shared_memory.spread(segment)

        if len(leaders) == 1:
            before(wide)
        elif self._mesh.rank == leaders[host]:
            ring_with_work(Subgroup(self._mesh, leaders), wide, add if kind == "add" else take_largest, before, after)
        else:
            ring_with_work(Idle(host, len(leaders)), wide, keep_first, before, after)
        if wide is not x:
            x.copy_(wide)

    def _count_streams(self) -> tuple[int, dict[int, float]]:
        """Measure the algorithm `ring` with several numbers of TCP connections between two ranks.

        Return the smallest number that is about as fast as the fastest, and a dict from each number to its seconds.
        """
        seconds: dict[int, float] = {}
        for count in _STREAMS:
            self._mesh.use_streams(count)
            seconds[count] = self._find_slowest([self._time("ring", _LARGE_PROBE)])[0]
            if seconds[count] > _SLOW_NETWORK_SECONDS:
                break
        best = next(count for count in seconds if seconds[count] * _WORTH <= min(seconds.values()))
        self._mesh.use_streams(best, for_good=True)
        return best, seconds

    def _measure(self) -> list[ProbeRow]:
        """Measure every candidate at a few sizes. All ranks use the slowest rank's times."""
        # in ascending order of the number of bytes that they read or send
        names = ["two_shot", "one_shot"] if self.shared_memory else ["ring", "two_shot", "tree", "one_shot"]
        if 1 < len(self._hosts) < self._mesh.size:
            names.insert(0, "hierarchical")
        # of two ranks each sends the whole vector by any of these; in one step it uses the least processor time
        preferred = "one_shot" if self._mesh.size == 2 and not self.shared_memory else None
        rows: list[ProbeRow] = []
        slow: set[str] = set()
        for size in _PROBES if self.shared_memory else (*_PROBES, _LARGE_PROBE):
            tried = [name for name in names if name not in slow]
            times = self._find_slowest([self._time(name, size) for name in tried])
            seconds = dict(zip(tried, times, strict=True))
            rows.append({"up_to": 2 * size, "algorithm": choose_fastest(seconds, preferred), "seconds": seconds})
            slow |= {name for name in tried if seconds[name] > _SLOW_SECONDS and name != rows[-1]["algorithm"]}
        # for vectors above the largest probe, algorithms that send more bytes are relatively slower
        rows[-1]["algorithm"] = next(name for name in tried if seconds[name] * _WORTH <= min(times))
        rows[-1]["up_to"] = None
        return rows

    def _find_slowest(self, seconds: list[float]) -> list[float]:
        """Return the maximum over ranks of each element of `seconds`."""
        times = torch.tensor(seconds, dtype=torch.float64)
        self._mesh.begin()
        self._run("one_shot", times, "max")
        return [float(each) for each in times]

    def _time(self, name: str, size: int) -> float:
        x = torch.zeros(size // 4)
        times: list[float] = []
        large = size >= _LARGE_PROBE
        while len(times) < (_LARGE_TRIES if large else TRIES) + 1:
            self._mesh.begin()
            start = time.perf_counter()
            self._run(name, x, "add")
            times.append(time.perf_counter() - start)
        # the first run does not count, because it uses new pages. Of only a few runs, the fastest has the least noise
        return min(times[1:]) if large else statistics.median(times[1:])


def choose_fastest(seconds: dict[str, float], preferred: str | None) -> str:
    """Return the name of the fastest candidate, or `preferred` if this candidate is about as fast."""
    least = min(seconds.values())
    if preferred is not None and seconds.get(preferred, math.inf) * _EQUAL <= least:
        return preferred
    return min(seconds, key=seconds.__getitem__)


def speed_of(choices: RingChoices) -> tuple[float, float] | None:
    """Return the seconds of the smallest vector's reduction, and the bytes per second of the largest one's.

    These are the times of the fastest candidates. Return None if the ring is on one host, or has measured none.
    """
    table = choices.get("table")
    if not table or len(choices["hosts"]) == 1:
        return None
    return min(table[0]["seconds"].values()), _LARGE_PROBE / min(table[-1]["seconds"].values())


def _name_transport(mesh: Mesh) -> str:
    return "+".join(sorted(set(mesh.transports.values()))) or "none"


def _find_hosts(mesh: Mesh) -> tuple[list[list[int]], int]:
    """Return the ranks grouped by host, and the largest number of streams between any two ranks.

    Ranks count as being on one host if they are connected by shared memory. Each rank sends its findings to all others.
    """
    size = mesh.size
    if size == 1:
        return [[0]], 1
    seen = torch.zeros(size, size + 1, dtype=torch.int64)
    seen[mesh.rank, :size] = torch.tensor([mesh.transports.get(peer, "shm") == "shm" for peer in range(size)])
    seen[mesh.rank, size] = mesh.streams
    ALGORITHMS["star"](mesh, seen.view(-1), add)
    groups = [[peer for peer in range(size) if row[peer]] for row in seen.tolist()]
    most = int(seen[:, size].max())
    if any(groups[peer] != group for group in groups for peer in group):
        return [[rank] for rank in range(size)], most  # the ranks disagree: treat each as a host of its own
    return [group for rank, group in enumerate(groups) if group[0] == rank], most
