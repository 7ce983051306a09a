"""The folders of the tests, for the tests' own processes and for the programs that tests start."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
FOLDERS = [str(TESTS), *sorted(str(path) for path in TESTS.iterdir() if any(path.glob("*.py")))]
PYTHONPATH = os.pathsep.join(FOLDERS)


def add_to_path():
    """Let this process import the modules of all rooms: a test may use the helpers of another room."""
    sys.path += [folder for folder in FOLDERS if folder not in sys.path]
