"""The folders of the tests, for the tests' own processes and for the programs that tests start."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
FOLDERS = [str(TESTS), *sorted(str(path) for path in TESTS.iterdir() if any(path.glob("*.py")))]
PYTHONPATH = os.pathsep.join(FOLDERS)
_LIST = TESTS.parent / "WITHOUT"  # `scripts/without.py` writes it into a copy that lacks a room
WITHOUT = set(_LIST.read_text(encoding="utf-8").splitlines()) if _LIST.is_file() else set[str]()


def lacks(path):
    """Whether a file or folder of the tree is in a room that this copy of the tree lacks."""
    return any(name == path or name.startswith(f"{path.rstrip('/')}/") for name in WITHOUT)


def add_to_path():
    """Let this process import the modules of all rooms: a test may use the helpers of another room."""
    sys.path += [folder for folder in FOLDERS if folder not in sys.path]
