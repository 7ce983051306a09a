"""The packages as wheels: they are installed together, and each is removed without a change of the others."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "RAYPS_SKIP_DASHBOARD": "1", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("hatchling", reason="hatchling is not installed: it builds the wheels")
    out = tmp_path_factory.mktemp("wheels")
    for source in (ROOT, ROOT / "client"):
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out), cwd=source)
    return {path.name.partition("-")[0]: path for path in out.glob("*.whl")}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as file:
        return next(file.read(name).decode() for name in file.namelist() if name.endswith("METADATA"))


def test_each_wheel_has_its_own_package(wheels: dict[str, Path]) -> None:
    assert set(wheels) == {"rayps", "rayps_client"}
    light, whole = names(wheels["rayps_client"]), names(wheels["rayps"])
    assert not light & whole
    assert {name.partition("/")[0] for name in light} == {"rayps_client", "rayps_client-0.1.0.dist-info"}
    modules = {path.relative_to(ROOT / "client").as_posix() for path in (ROOT / "client").rglob("*.py")}
    assert modules | {"rayps_client/py.typed"} <= light
    assert not any(name.startswith(("rayps_client", "client")) for name in whole)
    required = [line for line in metadata(wheels["rayps_client"]).splitlines() if line.startswith("Requires-Dist: ")]
    plain = {re.split(r"[<>=]", line.split()[1])[0] for line in required if "extra ==" not in line}
    assert plain == {"httpx2", "cryptography", "numpy", "safetensors"}
    assert "Requires-Dist: rayps-client==0.1.0" in metadata(wheels["rayps"])
    assert not any(name.startswith(("benchmarks", "rayps/chaos")) for name in whole)


def files(folder: Path, *packages: str) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for package in packages
        for path in (folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_either_package_is_removed_without_a_change_of_the_other(wheels: dict[str, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = str(tmp_path / "env" / "bin" / "python")
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    pip = (sys.executable, "-m", "pip", "--python", python)
    install = (*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile")
    light, whole = ("rayps_client",), ("rayps", "rayps_api")
    run(*install, str(wheels["rayps_client"]), str(wheels["rayps"]))
    both = files(site, *light, *whole)
    assert files(site, *light) and files(site, *whole)
    run(*pip, "uninstall", "-q", "-y", "rayps")
    assert files(site, *whole) == {} and files(site, *light).items() <= both.items()
    code = "import rayps_client, rayps_client.errors; print(rayps_client.__version__)"
    assert run(python, "-c", code, cwd=tmp_path) == "0.1.0\n"
    assert (tmp_path / "env" / "bin" / "rayps-client").exists() and not (tmp_path / "env" / "bin" / "rayps").exists()
    run(*install, str(wheels["rayps"]))
    assert files(site, *light, *whole) == both
    run(*pip, "uninstall", "-q", "-y", "rayps-client")
    left = {name: digest for name, digest in both.items() if not name.startswith("rayps_client/")}
    assert files(site, *light) == {} and files(site, *whole) == left
    assert (tmp_path / "env" / "bin" / "rayps").exists()
