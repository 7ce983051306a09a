"""A job service with a Ray of its own, which one run of chaos starts, kills, starts again and ends.

With root's rights the state directory is on a small disk of its own (tmpfs), which a fault can fill.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rayps_client.errors import ClusterError

from rayps.cluster.local import until
from rayps.service import processes
from rayps.service.client import Client
from rayps.service.local_ray.ray_daemon import read_record, remove_leftovers
from rayps.service.local_ray.ray_process import make_python_path
from rayps_chaos import shifted_service
from rayps_chaos.inject import ChaosMeans

DISK_MB = 256
_START_SECONDS = 120.0
_END_SECONDS = 60.0


class ChaosService:
    """The service. Use it as a context manager: the service, its Ray and its folder end with the block.

    Raises:
        ClusterError: the service did not start.
    """

    def __init__(self, cpus: int, *, small_disk: bool = True) -> None:
        """Make the folder. `cpus`: logical CPUs of the Ray. `small_disk`: whether to try to mount a disk of its own."""
        self.home = Path(tempfile.mkdtemp(prefix="rayps-chaos-"))
        self.mounted = small_disk and _mount(self.home)
        self.state = self.home / "state"
        self.state.mkdir()
        self._clock = self.home / "clock"
        shifted_service.create_clock(self._clock)
        self._cpus, self._port = cpus, 0  # of the first start any free port, then that one
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def means(self) -> ChaosMeans:
        """What faults may use: the disk, if it is the service's own, and the service's clock."""
        return ChaosMeans(
            self.home if self.mounted else None, lambda seconds: shifted_service.set_clock(self._clock, seconds)
        )

    @property
    def log(self) -> Path:
        """The file with the service's output."""
        return self.home / "service.log"

    def start(self) -> None:
        """Start the service if it is not alive, and wait until it answers."""
        if self._process is not None:
            if processes.start_time(self._process.pid) is not None:
                return
            self._process.wait(_END_SECONDS)  # its first thread has ended, and the others end too
        (self.state / "service.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "rayps_chaos.shifted_service", str(self._clock)]
        command += ["serve", "--state-dir", str(self.state), "--port", str(self._port)]
        command += ["--cpus", str(self._cpus), "--idle", "60"]
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": make_python_path()},
                start_new_session=True,
            )
        if not until(self._answers, _START_SECONDS):
            raise ClusterError(f"the service did not start within {_START_SECONDS:g} s: see {self.log}")
        self._port = int(self._url().rpartition(":")[2])

    def _answers(self) -> bool:
        process = self._process
        assert process is not None
        if process.poll() is not None:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ClusterError(f"the service ended with code {process.returncode}: {''.join(last)}")
        return (self.state / "service.json").exists()

    def client(self) -> Client:
        """Return a client of the running service."""
        return Client(self._url(), (self.state / "token").read_text().strip())

    def _url(self) -> str:
        return str(json.loads((self.state / "service.json").read_text())["url"])

    def close(self) -> None:
        """End the service, its Ray and its jobs, and remove the folder."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        record = read_record(self.state)
        if record is not None:
            if record.alive:
                os.kill(record.pid, signal.SIGTERM)
                until(lambda: not record.alive, _END_SECONDS)
            if record.alive:
                processes.kill_all([*processes.list_descendants(record.pid), record.pid])
            remove_leftovers(record)
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.home)], check=False, capture_output=True)
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> ChaosService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _mount(folder: Path) -> bool:
    """Mount a small file system on an empty folder; return whether that was possible."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=700", "tmpfs", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
