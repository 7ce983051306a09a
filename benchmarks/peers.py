"""Make virtual environments for contenders that need other libraries or other versions than rayps.

An environment is made once, by venv and pip. It also sees this interpreter's libraries, but its own libraries have
precedence: contenders compute with the same build of torch, and with their own versions of other libraries.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rayps_client.errors import ClusterError, ConfigError

from rayps.service.processes import die_with_parent

INSTALL_SECONDS = 900.0
# one thread per process, and equal priority: by default, Ray's workers have a lower priority than other processes
_ALIKE = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
_LINES = 12  # number of last lines of a contender's output that an error shows


def make_environment(folder: Path, name: str, requirements: Sequence[str], probe: str) -> Path:
    """Return the interpreter of the environment `name` in `folder`. If there is no such environment, make it first.

    `probe` is Python code that must run in the environment.

    Raises:
        ConfigError: the environment cannot be made. The error has the last lines of pip's output.
    """
    home, wanted = folder / name, [*requirements, torch.__version__, sys.version]
    python, ready = home / "bin" / "python", home / "ready.json"
    if ready.is_file() and json.loads(ready.read_text()) == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    _install(name, [sys.executable, "-m", "venv", str(home)])
    _install(name, [str(python), "-m", "pip", "install", "--quiet", *requirements])
    packages = next((home / "lib").glob("python*")) / "site-packages"
    (packages / "zz-torch.pth").write_text(
        f"{Path(torch.__file__).parent.parent}\n"
    )  # "zz-": its own libraries have precedence
    _install(name, [str(python), "-c", probe])
    ready.write_text(json.dumps(wanted))
    return python


def _install(name: str, command: list[str]) -> None:
    """Run one step of making an environment. Raises ConfigError if the step fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the environment for {name} cannot be made: {error}", contender=name) from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("WARNING")]
        raise ConfigError(
            f"the environment for {name} cannot be made; omit {name} from --contenders, or solve pip's problem:\n"
            + "\n".join(lines[-_LINES:]),
            contender=name,
        )


def run_script(name: str, command: Sequence[str], config: dict[str, Any], timeout: float) -> tuple[float, Any]:
    """Run `command CONFIG OUT` as a process; return its start (wall clock) and the JSON content of the file OUT.

    At the end, all processes that this process started are killed.

    Raises:
        ClusterError: the process failed, or did not end within `timeout` seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="rayps-bench-"))
    out, log = folder / "out.json", folder / "log"
    began = time.time()
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, json.dumps(config), str(out)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ | _ALIKE,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{name} did not end within {timeout:g} s", contender=name, seconds=timeout) from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10.0)
        if code or not out.is_file():
            tail = log.read_text(errors="replace").splitlines()[-_LINES:]
            raise ClusterError(f"{name} failed:\n" + "\n".join(tail), contender=name)
        return began, json.loads(out.read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
