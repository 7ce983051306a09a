"""The maintainers' tracer runs a real job and lists the files whose functions ran, and no others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRACER = ROOT / "scripts" / "trace_files.py"


def traced(*arguments):
    """The tracer's JSON, from a process of its own: nothing of the package is imported before it starts."""
    command = [sys.executable, str(TRACER), "--json", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_one_worker_all_reduce():
    found = traced()
    assert found["count"] == len(found["files"]) == sum(len(names) for names in found["folders"].values())
    assert any(Path(file).name == "training.py" and "train" in names for file, names in found["files"].items())
    assert any(Path(file).parts[0] == "worker" or file.endswith("worker.py") for file in found["files"])
    assert any(file.startswith("ring/") or "/ring/" in file for file in found["files"])  # folder or subfolder
    assert "all_reduce.py" in found["folders"]["strategies"]
    assert "parameter_server.py" not in found["folders"]["strategies"]  # imported, not run


def test_another_strategy_runs_other_files():
    alone, servers = traced(), traced("--strategy", "parameter_server:shards=2", "--workers", "2")
    assert "parameter_server.py" in servers["folders"]["strategies"]
    assert set(servers["files"]) - set(alone["files"])


def test_the_journey_of_a_gradient_is_a_part_of_the_job():
    whole, journey = traced(), traced("--from", "batch", "--to", "step")
    assert set(journey["files"]) < set(whole["files"]) and journey["hops"] >= journey["count"] - 1
    assert "all_reduce.py" not in journey["folders"].get("strategies", [])  # it calls batch and step
    run = subprocess.run([sys.executable, str(TRACER), "--from", "batch"], capture_output=True, text=True)
    assert run.returncode == 2 and "give --from and --to together" in run.stderr


def test_what_counts_as_a_function(tmp_path, monkeypatch):
    sys.path.insert(0, str(TRACER.parent))
    try:
        import trace_files
    finally:
        sys.path.remove(str(TRACER.parent))
    package = tmp_path / "traced_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "names.py").write_text("def decorator(f):\n    return f\n")  # called by an import only
    (package / "values.py").write_text(
        "from dataclasses import dataclass\nfrom traced_package.names import decorator\n"
        "squares = [i * i for i in range(3)]\n@dataclass\nclass Point:\n    x: int\n"
    )
    (package / "code.py").write_text(
        "import threading\nfrom traced_package.values import Point\n"
        "def inside():\n    pass\n"
        "def run():\n    Point(1)\n"
        "    thread = threading.Thread(target=inside)\n    thread.start()\n    thread.join()\n"
    )
    (package / "values2.py").write_text("from traced_package.names import decorator\n@decorator\ndef unused(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tracer = trace_files.Tracer(package)
    tracer.start()
    try:
        import traced_package.code
        import traced_package.values2

        traced_package.code.run()
    finally:
        tracer.stop()
    assert tracer.files() == {"code.py": ["inside", "run"]}


@pytest.mark.parametrize("text", ["no_such_strategy"])
def test_an_unknown_strategy_is_an_error(text):
    run = subprocess.run([sys.executable, str(TRACER), "--strategy", text], capture_output=True, text=True, timeout=300)
    assert run.returncode != 0 and text in run.stderr
