"""docs/architecture.md is true: its files exist, its folders are the package's, its gradients take the way it says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from folders import lacks
from test_architecture import ROOMS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATHS = re.findall(r"`((?:rayps|api|dashboards|scripts|tests)/[\w./-]+)`", PAGE)
TRACED = re.findall(r"<!-- traced: (.+) -->\n\n((?:\|.*\n)+)", PAGE)


@pytest.mark.parametrize("path", sorted(path for path in set(PATHS) if not lacks(path)))
def test_a_path_exists(path):
    assert (ROOT / path).exists(), f"docs/architecture.md names {path}: update its tables"


def test_the_folders_are_those_of_the_package_in_the_order_of_imports():
    listed = re.findall(r"^\| `rayps/(\w+)` \|", PAGE, re.M)
    floors = list(dict.fromkeys(room.partition("/")[0] for room in ROOMS if room != "__init__"))
    assert listed == floors


def test_both_ways_of_a_gradient_are_traced():
    assert [options for options, _ in TRACED] == [
        "--strategy all_reduce --workers 2",
        "--strategy parameter_server:shards=2,staleness=3 --workers 2",
    ]


@pytest.mark.parametrize(("options", "table"), TRACED, ids=[options for options, _ in TRACED])
def test_a_gradient_passes_through_the_files_of_its_journey(options, table):
    command = [sys.executable, str(ROOT / "scripts" / "trace_files.py"), "--json", *options.split()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    ran = {f"rayps/{file}" for file in json.loads(run.stdout)["files"]}
    named = re.findall(r"`(rayps/[\w./-]+\.py)`", table)
    assert len(named) >= 8
    assert [file for file in named if file not in ran] == [], "update docs/architecture.md"
