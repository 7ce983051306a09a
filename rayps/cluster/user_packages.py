"""The packages that a job requires, installed for the job's processes on one host.

pip installs into a temporary folder whose name is the hash of the requirements, of this Python and of its packages. The
folder precedes the installed packages in `sys.path`. The job's processes on one host share it, and the last of them
removes it. Packages that rayps itself uses keep their versions: each is a constraint for pip, because a process has
already imported them when it installs. Ray's own `runtime_env` is not used: it covers actors only, and a driver, its
child processes and threads need the packages as well.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rayps_client.errors import ConfigError

from rayps.cluster.scratch import SharedScratch

# distributions that keep their version, because a worker has imported them before it installs anything
HELD = ("rayps", "torch", "ray", "numpy", "pyarrow", "safetensors", "cloudpickle")
INSTALL_SECONDS = 900.0
SECONDS_NAME = "RAYPS_REQUIREMENTS_SECONDS"  # environment variable of the cluster's processes
_LAST_LINES = 8  # lines of pip's output in an error


class UserPackages:
    """Installed requirements, from which this process imports until `close`."""

    def __init__(self, requirements: Sequence[str], folder: str | None, *, seconds: float | None = None) -> None:
        """Install `requirements`, lines of a requirements file, unless another process of this host has done so.

        Relative paths in the lines are relative to `folder`. `seconds` limits the installation.

        Raises:
            ConfigError: pip is missing, fails or does not end in time; the text has the last lines of its output.
        """
        seconds = install_seconds() if seconds is None else seconds
        held = held_versions()
        key = hashlib.sha256("\0".join([sys.version, folder or "", *held, "", *requirements]).encode()).hexdigest()
        self._scratch = SharedScratch(
            f"packages-{key[:24]}",
            lambda path: _install(path, requirements, held, folder, seconds),
            what="installing the job's requirements",
            timeout=seconds + 30.0,
        )
        self._path = str(_site(self._scratch.path / "env"))
        sys.path.insert(_after_user_code(folder), self._path)
        importlib.invalidate_caches()

    def close(self) -> None:
        """Stop to import from the packages, and remove them if no other process uses them."""
        if self._path in sys.path:
            sys.path.remove(self._path)
        self._scratch.close()


def install_seconds() -> float:
    """Return the seconds that an installation may take: 900, or the value of RAYPS_REQUIREMENTS_SECONDS."""
    try:
        return float(os.environ.get(SECONDS_NAME, "")) or INSTALL_SECONDS
    except ValueError:
        return INSTALL_SECONDS


def held_versions() -> list[str]:
    """Return the constraints for pip, such as `torch==2.12.0`, of the packages that keep their version."""
    found = []
    for name in HELD:
        try:
            found.append(f"{name}=={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue  # such as rayps itself when it runs from a checkout
    return found


def _install(path: Path, requirements: Sequence[str], held: Sequence[str], folder: str | None, seconds: float) -> None:
    shutil.rmtree(path / "env", ignore_errors=True)  # of a process that was killed while it installed
    wanted, constraints = path / "requirements.txt", path / "constraints.txt"
    wanted.write_text("\n".join(requirements) + "\n", encoding="utf-8")
    constraints.write_text("\n".join(held) + "\n", encoding="utf-8")
    python = _environment(path / "env")
    target = [*_installer(python), "-r", str(wanted), "-c", str(constraints)]
    with (path / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            target,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder or path,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(process)
        log.seek(0)
        output = log.read().decode(errors="replace")
    if code != 0:
        raise _failed(code, output, seconds, held)


def _environment(env: Path) -> Path:
    """Make a virtual environment that also sees the packages of this Python; return its interpreter."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(env)
    roots = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages")) and Path(entry).is_dir()]
    # pip regards what is there as installed, and installs other versions into `env` only
    (_site(env) / "_rayps_installed.pth").write_text("\n".join(roots) + "\n", encoding="utf-8")
    return env / "bin" / "python"


def _site(env: Path) -> Path:
    return env / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _installer(python: Path) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        return [sys.executable, "-m", "pip", "--python", str(python), "install", *options]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", str(python), "--no-progress"]
    raise ConfigError(
        f"requirements cannot be installed: {sys.executable} has no pip, and there is no uv on this host:\n"
        "install pip into the environment of the cluster's Python, or install the packages there",
        field="requirements",
    )


def _failed(code: int | None, output: str, seconds: float, held: Sequence[str]) -> ConfigError:
    lines = [line.rstrip() for line in output.splitlines() if line.strip()][-_LAST_LINES:]
    what = f"was ended after {seconds:g} s ({SECONDS_NAME})" if code is None else f"failed with exit code {code}"
    return ConfigError(
        f"the job's requirements could not be installed: pip {what}; these versions are held: {', '.join(held)}\n"
        + "\n".join(lines),
        field="requirements",
    )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _after_user_code(folder: str | None) -> int:
    """Return the index in `sys.path` for the packages: after the folders of the user's code."""
    if folder is None:
        return 0
    own = [number for number, entry in enumerate(sys.path) if Path(entry or ".").is_relative_to(folder)]
    return max(own, default=-1) + 1
