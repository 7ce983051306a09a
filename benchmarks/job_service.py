"""A real job service with a Ray of its own, for the benchmarks of real clients."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rayps_client.errors import TrainingError

from rayps.service.client import Client
from rayps.service.settings import Settings

START_SECONDS = 180.0


class JobService:
    """A process `rayps serve`, whose files are in `folder`. Use this class as a context manager."""

    def __init__(self, folder: Path, more: Sequence[str] = ()) -> None:
        """`more`: further options of `rayps serve`."""
        self.folder, self._more = folder, more
        self.settings = Settings(state_dir=folder / "state").prepare()

    def __enter__(self) -> JobService:
        command = [sys.executable, "-m", "rayps.cli", "serve", "--state-dir", str(self.settings.state_dir)]
        with (self.folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--port", "0", "--cpus", "2", *self._more], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        wait_until(self.settings.service_file.exists, "the service starts")
        self.url = str(json.loads(self.settings.service_file.read_text())["url"])
        self.user = Client(self.url, self.settings.token_file.read_text().strip())
        return self

    def __exit__(self, *_: object) -> None:
        self.user.close()
        self._process.terminate()
        self._process.wait(120)


def wait_until(ready: Callable[[], Any], what: str) -> None:
    """Wait until `ready()` is true. Raises TrainingError if it is not for `START_SECONDS`."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise TrainingError(f"waited {START_SECONDS:g} s: {what}")
        time.sleep(0.1)
