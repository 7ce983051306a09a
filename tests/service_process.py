"""A job service in a process of its own, whose drivers are plain processes that outlive it: for tests that kill it.

    python service_process.py STATE_DIR     serves until it is killed; says its address in STATE_DIR/http.json

A driver is `python service_process.py driver ...`. It holds a lock on a file of its name, which is what makes it the
only one of a job and lets a later service find it, as the name of a detached actor does on Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


def write(path: Path, data: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(data))
    part.replace(path)


class Handle:
    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        assert method == "stop"
        (self._folder / f"{self.name}.stop").touch()
        return Future()


class ProcessPlace:
    """A place whose drivers are processes; each begins by itself, whoever started it. A job of more CPUs waits."""

    owned = False
    address = "processes"

    def __init__(self, folder: Path, cpus: float = 64.0) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._cpus = folder, cpus

    def capacity(self) -> None:
        return None

    def cluster(self) -> Any:
        return self

    def renew_lease(self) -> None:
        pass

    def disconnect(self, *, end: bool) -> None:
        pass

    def free(self) -> dict[str, float]:
        return {"cpu": self._cpus, "gpu": 0.0}

    total = free

    def notices(self) -> tuple[Any, ...]:
        return ()

    def spawn(self, target: str, *args: Any, name: str, **options: Any) -> Handle:
        from rayps_client.errors import ClusterError

        if self.find(name) is not None:
            raise ClusterError(f"there is an actor {name} already")
        driver = subprocess.Popen(
            [sys.executable, str(HERE), "driver", str(self._folder), name, json.dumps(args)], start_new_session=True
        )
        while self.find(name) is None and driver.poll() is None:
            time.sleep(0.02)
        return Handle(name, self._folder)

    def find(self, name: str) -> Handle | None:
        path = self._folder / f"{name}.lock"
        return Handle(name, self._folder) if path.exists() and held(path) else None

    def kill(self, handle: Any) -> None:
        path = self._folder / f"{handle.name}.lock"
        while held(path):
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
            time.sleep(0.02)


def held(path: Path) -> bool:
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return bool(path.read_text())
        return False


class StandIn:
    """What the service sees of a driver, without any training. The workload's class says what becomes of the job."""

    def __init__(self, spec: dict[str, Any], folder: Path, attempt: int, stopped: Callable[[], bool]) -> None:
        self.kind = spec["workload"].partition(":")[2]
        self.folder, self.attempt, self.stopped = folder, attempt, stopped

    def run(self) -> None:
        from rayps.service.processes import start_time

        facts = {"attempt": self.attempt, "pid": os.getpid(), "started": start_time(os.getpid())}
        write(self.folder / "driver.json", facts)
        self.note("begun")
        write(self.folder / "progress.json", {"status": "RUNNING", "time": time.time() + 1})
        while self.kind == "Hold" and self.attempt == 1 and not self.stopped():
            time.sleep(0.05)
        if self.kind == "Crash":
            write(self.folder / "driver.json", {**facts, "crash": "KeyError: 'x'"})
            time.sleep(600)  # it lives on until it is killed
        self.note("ended")
        status = "STOPPED" if self.stopped() else "SUCCEEDED"
        write(self.folder / "outcome.json", {"status": status, "message": "done", "finished_at": time.time()})

    def note(self, what: str) -> None:
        with (self.folder / "ledger.txt").open("a") as file:
            file.write(f"{what} {self.attempt}\n")


def drive(actors: Path, name: str, args: list[Any]) -> None:
    spec, folder, attempt, failures = args
    with (actors / f"{name}.lock").open("a+") as file:
        deadline = time.monotonic() + 60
        while True:  # somebody may be looking whether the lock is held
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if held(actors / f"{name}.lock") or time.monotonic() > deadline:
                    return  # there is one already
                time.sleep(0.01)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        if spec["workload"].partition(":")[0].endswith("line.py"):  # the real one, with workers of threads
            from rayps.runtime.driver.driver_actor import DriverActor

            with (Path(folder) / "ledger.txt").open("a") as ledger:
                ledger.write(f"begun {attempt}\n")
            DriverActor(spec, folder, attempt, failures).run()
        else:
            StandIn(spec, Path(folder), attempt, (actors / f"{name}.stop").exists).run()


def serve(state: Path) -> None:
    from service_site import Site

    state.mkdir(exist_ok=True)
    site = Site(state, place=ProcessPlace(state.parent / "actors"))
    write(state / "http.json", {"url": site.url, "token": site.token})
    site.thread.join()


if __name__ == "__main__":
    if sys.argv[1] == "driver":
        drive(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    else:
        serve(Path(sys.argv[1]))
