"""A whole run on Ray trains on a set that is four times as large as the memory of all its processes together.

The program, the raylet and the workers are in a memory cgroup, which counts what they use: their own memory, shared
memory and the pages of files that they read. Limits of address space do not suit Ray and torch, which map much more
than they use. Linux takes pages of files back when the cgroup is full; it ends a process only if that is not enough.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import missing

ROOT = Path("/sys/fs/cgroup")
MB = 1 << 20
LIMIT = 1536 * MB  # of about 0.9 GB that the program, Ray and a worker use
SET = 4 * LIMIT
WIDTH = 4096  # values of a row, 16 KiB

PROGRAM = """
    import json, sys
    import torch
    import rayps

    class Work(rayps.Workload):
        def __init__(self, kind, path):
            self.kind, self.path = kind, path

        def data(self):
            if self.kind == "memmap":
                return rayps.data.memmap(self.path, batch_size=1024, shuffle=False)
            return rayps.data.parquet([self.path] * 48, features="x", batch_size=1024, window_mb=32)

        def evaluation_data(self):
            return rayps.data.tensors(torch.zeros(8, 4096), batch_size=8)

        def model(self):
            return torch.nn.Linear(4096, 1)

        def loss(self, model, batch):
            return model(batch.x).square().mean()

        def optimizer(self, params):
            return torch.optim.SGD(params, lr=1e-9)

    if __name__ == "__main__":
        result = rayps.train(Work(sys.argv[1], sys.argv[2]), workers=1, epochs=1, progress=False)
        losses = result.history.column("loss").to_pylist()
        print(json.dumps({"rounds": len(losses), "finite": all(loss == loss for loss in losses)}))
"""


@contextmanager
def memory_group(limit):
    """A new memory cgroup, version 1 or 2, with this limit in bytes; skip where none can be made."""
    if os.getuid() != 0:
        pytest.skip("only root may make a memory cgroup")
    first = ROOT / "memory" if (ROOT / "memory").is_dir() else ROOT
    folder = first / f"rayps-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if first != ROOT else "memory.max"
    try:
        folder.mkdir()
    except OSError as error:
        missing(f"memory cgroup that this user may make ({error})")
    try:
        if not (folder / name).exists():
            missing("memory controller for new cgroups")
        (folder / name).write_text(str(limit))
        yield folder
    finally:
        for _ in range(100):
            left = (folder / "cgroup.procs").read_text().split()
            for process in left:  # none is expected; a failed run may leave some
                os.kill(int(process), signal.SIGKILL)
            if not left:
                break
            time.sleep(0.1)
        folder.rmdir()


def run_within(group, program, *words):
    """Run a program whose processes are all in the cgroup.

    Return its last line as JSON, the most bytes in use, and how many processes the kernel has ended for lack of memory.
    """
    path = group / "cgroup.procs"
    enter = f"echo $$ > {path} && exec {sys.executable} {program} {' '.join(words)}"
    done = subprocess.run(
        ["/bin/sh", "-c", enter],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1", "RAY_memory_monitor_refresh_ms": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    peak = next(group / name for name in ("memory.max_usage_in_bytes", "memory.peak") if (group / name).exists())
    events = next(group / name for name in ("memory.events", "memory.oom_control") if (group / name).exists())
    ended = dict(line.split() for line in events.read_text().splitlines())["oom_kill"]
    return json.loads(done.stdout.splitlines()[-1]), int(peak.read_text()), int(ended)


def write_parquet(path):
    """A part of the rows: the set names this file 48 times. Rows are equal, and take 16 KiB each when they are read."""
    part = SET // 48 // (WIDTH * 4)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.tile(np.float32(1), part * WIDTH)), WIDTH)
    pq.write_table(pa.table({"x": rows}), path, row_group_size=part // 4)


def write_array(path):
    """An array whose file is as large as the set; its blocks are zeros that the disk need not hold."""
    np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(SET // (WIDTH * 4), WIDTH)).flush()


@pytest.mark.ray
@pytest.mark.parametrize(("kind", "write"), [("parquet", write_parquet), ("memmap", write_array)])
def test_a_job_trains_on_four_times_its_memory(kind, write, tmp_path):
    program, rows = tmp_path / "program.py", tmp_path / f"rows.{'npy' if kind == 'memmap' else kind}"
    program.write_text(textwrap.dedent(PROGRAM))
    with memory_group(LIMIT) as group:
        write(rows)
        found, peak, ended = run_within(group, program, kind, str(rows))
    assert found == {"rounds": 4 * LIMIT // (WIDTH * 4) // 1024, "finite": True}
    assert ended == 0  # a worker that was ended would have been replaced
    assert peak > LIMIT // 3  # what the program, Ray and a worker use at least: the cgroup has counted them
