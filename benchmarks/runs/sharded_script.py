"""A user's script of `python -m benchmarks sharded`: a new process that calls `rayps.train`: the run's driver.

    python -m benchmarks.runs.sharded_script CONFIG OUT

CONFIG is JSON: the fields of `RecordedLayers`, and the options of `rayps.train`. OUT is the file for the result:
{"peak": bytes}, the most memory that this process has had (VmHWM of /proc/self/status).
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

from benchmarks.runs.recorded_layers import RecordedLayers


def read_own_peak() -> int:
    """Return the most memory in bytes that this process has had (VmHWM). Linux only."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "Linux reports VmHWM"
    return 1024 * int(found[1])


def main() -> None:
    """Train as the command line says."""
    config = json.loads(sys.argv[1])
    work = RecordedLayers()
    for field, value in config["work"].items():
        setattr(work, field, value)
    rayps = importlib.import_module("rayps")
    rayps.train(work, progress=False, **config["train"])
    Path(sys.argv[2]).write_text(json.dumps({"peak": read_own_peak()}))


if __name__ == "__main__":
    main()
