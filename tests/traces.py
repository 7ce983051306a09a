"""What a Ray could leave behind."""

import gc
import os
import tempfile
import time
from pathlib import Path

from rayps.service.processes import list_descendants


def command(pid):
    """How a process was called; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


class Traces:
    """What a Ray could leave behind: processes of this one, shared memory, temporary folders."""

    def __init__(self, root=None):
        self.root = root or os.getpid()
        self.others = set(
            list_descendants(self.root)
        )  # a browser of other tests, say: what it starts meanwhile is its own
        self.before = self.look()

    def look(self):
        temporary = {Path(tempfile.gettempdir()), Path("/tmp")}
        return {
            "processes": {f"{pid} {command(pid)}" for pid in self.started()},
            "shared memory": {entry.path for entry in os.scandir("/dev/shm") if entry.name.startswith("plasma")},
            "folders": {str(path) for folder in temporary for path in folder.glob("rayps-*")},
        }

    def started(self):
        return (
            set(list_descendants(self.root))
            - self.others
            - {pid for other in self.others for pid in list_descendants(other)}
        )

    def left(self, seconds=10.0):
        """What is there now and was not before, once `seconds` have passed for it to go away."""
        deadline = time.monotonic() + seconds
        gc.collect()  # an object of this process that is only in a cycle still holds its files
        while True:
            now = self.look()
            found = {kind: sorted(now[kind] - self.before[kind]) for kind in now if now[kind] - self.before[kind]}
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)
