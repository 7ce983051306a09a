#!/usr/bin/env python3
"""Copy the tree without one of its rooms, and check that the rest stands: it imports, lints, and its tests are found.

A room is a folder that the rest can do without. What belongs to it follows from where it is and what it says:

    its folder; the folders of its name in tests/, benchmarks/ and examples/
    a file of code with the line `# room: NAME`
    in a page, the block below `<!-- room: NAME -->`
    in rayps/__init__.py, the rows of public names that are in the room

The copy has an environment of its own, with the packages of this one, and the file WITHOUT, which lists what it lacks.

    python scripts/without.py loggers            # imports, ruff, mypy, collects all tests
    python scripts/without.py loggers --quick    # also runs the tests without Ray, kills, the browser and benchmarks

Not done yet: parallel. Only its face is named outside of it, but tests of other folders use it.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"loggers": "rayps/loggers", "tables": "rayps/ps/tables", "chaos": "chaos"}
OWN_TEST = "tests/failures/test_rooms.py"  # of this program, which copies a whole tree
BESIDE = ("tests", "benchmarks", "examples")  # each may have a folder with the name of a room
FACE = "rayps/__init__.py"
PACKAGES = ("rayps", "api/rayps_api", "client/rayps_client", "chaos/rayps_chaos", "benchmarks")
QUICK = "not ray and not chaos and not browser and not bench"
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
Step = tuple[str, list[str]]  # what a command checks, and its words after the name of the interpreter


def main(arguments: list[str] | None = None) -> int:
    """Check the tree without a room; return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", choices=sorted(ROOMS))
    parser.add_argument("--quick", action="store_true", help="also run the quick tests")
    parser.add_argument("--no-lint", action="store_true", help="leave out ruff and mypy")
    parser.add_argument("--no-tests", action="store_true", help="leave out the collection of the tests")
    parser.add_argument("--into", type=Path, help="the folder of the copy, which is kept; by default a temporary one")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix=f"without-{given.room}-") as scratch:
        copy = given.into or Path(scratch) / "rayps"
        gone = copy_tree(given.room, copy)
        python = make_environment(copy, gone)
        print(f"without {given.room}: {len(gone)} files are left out")
        steps = choose_steps(copy, lint=not given.no_lint, tests=not given.no_tests, quick=given.quick)
        passed = {name: run_step(copy, python, name, words) for name, words in steps}
        return int(not all(passed.values()))


def copy_tree(room: str, copy: Path) -> list[str]:
    """Copy the files of the tree, also those that Git does not know yet; return those that are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())
    gone = [name for name in names if belongs(name, room)]
    for name in sorted(set(names) - set(gone)):
        copy_file(name, copy)
        if name.endswith(".md"):
            rewrite(copy / name, cut_blocks, room)
    rewrite(copy / FACE, cut_names, ROOMS[room])
    (copy / "WITHOUT").write_text("".join(f"{name}\n" for name in gone), encoding="utf-8")
    return gone


def copy_file(name: str, copy: Path) -> None:
    """Copy a file, and its bytecode, which holds as long as the file's time is the same."""
    path = ROOT / name
    compiled = path.parent.joinpath("__pycache__").glob(f"{path.stem}.*.pyc") if path.suffix == ".py" else ()
    for each in (path, *compiled):
        there = copy / each.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(each, there)


def belongs(name: str, room: str) -> bool:
    """Return whether a file belongs to a room, by its folder or by a line that says so."""
    folders = (ROOMS[room], *(f"{beside}/{room}" for beside in BESIDE))
    if name == OWN_TEST or name.startswith(tuple(f"{folder}/" for folder in folders)):
        return True
    return name.endswith(".py") and f"# room: {room}\n" in (ROOT / name).read_text(encoding="utf-8")


def rewrite(path: Path, cut: object, *words: str) -> None:
    """Replace a file's text by what `cut` makes of it."""
    assert callable(cut)
    text = path.read_text(encoding="utf-8")
    path.write_text(cut(text, *words), encoding="utf-8")


def cut_blocks(page: str, room: str) -> str:
    """Return a page without the blocks that are marked for a room: a fence, or the lines until an empty one."""
    block = rf"^<!-- room: {room} -->\n(?:<!--.*-->\n)?(?:(?P<fence>`{{3,}})[^\n]*\n(?:.*\n)*?(?P=fence)\n|(?:.+\n)+)"
    return re.sub(block, "", page, flags=re.M)


def cut_names(face: str, folder: str) -> str:
    """Return the text of a module without its imports from a folder, and without the entries that name its modules."""
    module = folder.replace("/", ".")
    lines: set[int] = set()
    for node in ast.walk(ast.parse(face)):
        if isinstance(node, ast.ImportFrom):
            named = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = [node.value]
        else:
            continue
        if any(name == module or name.startswith(f"{module}.") for name in named):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return "".join(line for number, line in enumerate(face.splitlines(keepends=True), 1) if number not in lines)


def make_environment(copy: Path, gone: list[str]) -> Path:
    """Give the copy an environment with the packages of this one, and return its interpreter.

    Packages that this tree installs in place are those of the copy; a package that is left out is not installed.
    """
    venv.create(copy / ".venv", symlinks=True)
    old_bin, new_bin = Path(sysconfig.get_path("scripts")), copy / ".venv" / "bin"
    site = next((copy / ".venv" / "lib").glob("python*")) / "site-packages"
    projects = [name for name in gone if name.endswith("pyproject.toml")]
    absent = {tomllib.loads((ROOT / name).read_text())["project"]["name"].replace("-", "_") for name in projects}
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.suffix == ".pth":
            (site / path.name).write_text(path.read_text().replace(str(ROOT), str(copy)))
        elif not (path.suffix == ".dist-info" and path.name.partition("-")[0] in absent):
            (site / path.name).symlink_to(path)
    for path in old_bin.iterdir():
        if path.is_file() and not (new_bin / path.name).exists():
            script = path.read_bytes()
            if script.startswith(b"#!"):  # its first line names the interpreter
                script = script.replace(str(old_bin).encode(), str(new_bin).encode(), 1)
            (new_bin / path.name).write_bytes(script)
            shutil.copymode(path, new_bin / path.name)
    return new_bin / "python"


def choose_steps(copy: Path, *, lint: bool, tests: bool, quick: bool) -> list[Step]:
    """Return the checks of a copy, in order."""
    steps = [("imports", ["-c", IMPORT_ALL, *modules_of(copy)])]
    if lint:
        steps += [("ruff", ["-m", "ruff", "check", "--quiet", "."]), ("mypy", ["-m", "mypy"])]
    if tests and not quick:
        steps.append(("collection", ["-m", "pytest", "--collect-only", "-q", "-q", "-p", "no:xdist"]))
    if quick:
        workers = str(os.environ.get("JOBS", os.cpu_count() or 2))
        words = ["-n", workers, "--dist", "loadgroup", "--no-loadscope-reorder", "-q", "-m", QUICK]
        steps.append(("quick tests", ["-m", "pytest", *words]))
    return steps


def modules_of(copy: Path) -> list[str]:
    """Return the names of all modules of a copy that do nothing but define."""
    found = []
    for package in PACKAGES:
        for path in (copy / package).rglob("*.py"):
            name = ".".join(path.relative_to((copy / package).parent).with_suffix("").parts)
            if path.name != "__main__.py" and ".migrations." not in name:
                found.append(name.removesuffix(".__init__"))
    return sorted(found)


def run_step(copy: Path, python: Path, name: str, words: list[str]) -> bool:
    """Run one check in the copy; print its name, its seconds, and its output if it fails. Return whether it passes."""
    began = time.monotonic()
    # of a test that calls this script, pytest's variables would make the copy's pytest one of its workers
    own = ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_", "RAYPS_TEST_", "TMPDIR")
    outside = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    done = subprocess.run(
        [str(python), *words], cwd=copy, env=outside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(f"  {name}: {'passes' if done.returncode == 0 else 'FAILS'}, {time.monotonic() - began:.0f} s")
    lines = done.stdout.splitlines()
    if done.returncode:
        print("\n".join(lines[-60:]))
    elif name == "quick tests":
        print(f"  {lines[-1]}")
    return done.returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
