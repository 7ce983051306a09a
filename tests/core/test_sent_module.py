"""Modules of the user in a process to which their code was sent: each exists once, with the sender's values."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import small_work
import torch

import rayps
from rayps.core.job.user_module import pack
from rayps.workload.base import FINDER

STATE = """
S = None
LR = 0.1
CACHE = {}
class Kind:
    v = 0
    def again(self):
        return refers_back()
def refers_back():
    return Kind
class Derived(Kind):
    pass
def read():
    return S, LR, dict(CACHE), Kind.v
def never_named():
    return S, LR
"""
SET = """
    state.S, state.Kind.v = "set", 5
    state.CACHE["here"] = 1
"""
WAYS = {  # how a function of the user reaches the module `state`
    "import at the top": ("import PLACE as state", SET + "    return state.read(), state"),
    "import in the function": (
        "from PLACE import read",
        "    import PLACE as state" + SET + "    return read(), state",
    ),
    "a function and a class": (
        "from PLACE import read, Kind",
        "    import PLACE as state"
        + SET
        + "    assert state.Kind is Kind and issubclass(state.Derived, Kind) and state.read is read\n"
        + "    return read(), state",
    ),
    "by another module": (
        "from sent_other import change\nimport PLACE as state",
        "    change()\n    return state.read(), state",
    ),
}
OTHER = "import PLACE as state\ndef change():" + SET
CHECK = """
def check(unpacked):
    import importlib, sys
    found, state = unpacked()
    assert found == ("set", 0.5, {"here": 1, "sender": 2}, 5), found
    assert state is sys.modules[state.__name__] is importlib.import_module(state.__name__)
    assert state.read.__globals__ is vars(state) and vars(state)["Kind"] is state.Kind
    assert state.Kind().again() is state.Kind
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    (tmp_path / "sent_pack").mkdir()
    (tmp_path / "sent_pack" / "__init__.py").write_text("ABOUT = 'a package'\n")
    for place in ("sent_state", "sent_pack/inner"):
        (tmp_path / f"{place}.py").write_text(STATE)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("sent_state", "sent_pack", "sent_other", "sent_main"):
            del sys.modules[name]
    FINDER.forget()


def _sent(folder: Path, way: str, place: str) -> bytes:
    """Return the bytes of the user's function, after the sender has set values of the module."""
    (folder / "sent_other.py").write_text(OTHER.replace("PLACE", place))
    (folder / "sent_main.py").write_text("\ndef f():\n".join(WAYS[way]).replace("PLACE", place))
    main, state = __import__("sent_main"), __import__(place, fromlist=["read"])
    state.LR = 0.5
    state.CACHE["sender"] = 2
    return pack(main.f)


def _run(source: str, given: bytes, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-c", source], input=given, capture_output=True, cwd=cwd, env=env)


@pytest.mark.parametrize("place", ["sent_state", "sent_pack.inner"])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_exists_once_where_it_was_sent(folder: Path, tmp_path_factory, way: str, place: str) -> None:
    packed = _sent(folder, way, place)
    child = f"""
import sys
from rayps.core.job.user_module import unpack
{textwrap.dedent(CHECK)}
given = sys.stdin.buffer.read()
check(unpack(given, shared=True))
state = sys.modules[{place!r}]
assert state.never_named() == ("set", 0.5)
state.S = "of the loop"
unpack(given, shared=True)  # a later message of the job
assert state.S == "of the loop" and state.read()[0] == "of the loop" and state.Kind.v == 5
if "." in {place!r}:
    import sent_pack.inner
    assert sent_pack.inner is state and sent_pack.ABOUT == "a package"
"""
    done = _run(child, packed, tmp_path_factory.mktemp("elsewhere"))
    assert done.returncode == 0, done.stderr.decode()


class Counting(rayps.Workload):
    """Counts its batches in a global of another module, by the module's name, and reads it by a function of it."""

    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self):
        return rayps.data.tensors(torch.ones(8, 1), torch.ones(8, 1), batch_size=2)

    def loss(self, model, batch):
        small_work.SENT_MODULE_COUNT += 1
        return {"loss": (model(batch.x) - batch.y).square().mean(), "seen": small_work.sent_module_count()}


def _loop():
    import small_work as again

    small_work.SENT_MODULE_COUNT += 1
    return again is small_work, small_work.sent_module_count()


def test_modules_of_workers_on_ray_exist_once(ray_cluster, monkeypatch) -> None:
    monkeypatch.setattr(small_work, "SENT_MODULE_COUNT", 10)
    assert rayps.run(_loop, workers=2, cluster=ray_cluster) == [(True, 11)] * 2
    result = rayps.train(Counting(), workers=1, epochs=1, cluster=ray_cluster, progress=False)
    assert result.history["seen"].to_pylist()[-1] == 14
    assert small_work.SENT_MODULE_COUNT == 10


def test_a_name_that_was_not_sent_and_has_no_file_is_refused_by_name(folder: Path, tmp_path_factory) -> None:
    packed = _sent(folder, "import in the function", "sent_state")
    (folder / "sent_state.py").unlink()
    child = """
import sys
from rayps.core.job.user_module import unpack
unpack(sys.stdin.buffer.read(), shared=True)
sys.modules["sent_state"].never_named
"""
    done = _run(child, packed, tmp_path_factory.mktemp("elsewhere"))
    said = done.stderr.decode().splitlines()[-1]
    assert "no attribute 'never_named'" in said and "write `import sent_state` at the top" in said


def test_the_senders_own_modules_stay_as_they_are(folder: Path) -> None:
    from rayps.core.job.user_module import unpack

    packed = _sent(folder, "import at the top", "sent_state")
    state = sys.modules["sent_state"]
    found, other = unpack(packed)()
    assert found[:2] == ("set", 0.5) and other is not state
    assert sys.modules["sent_state"] is state and state.S is None


def test_jobs_that_share_a_process_share_no_module(folder: Path, tmp_path_factory) -> None:
    """As servers do: `shared` is for processes of one job."""
    child = """
import sys
from rayps.core.job.user_module import unpack
given = sys.stdin.buffer.read()
(_, one), (_, other) = unpack(given)(), unpack(given)()
assert one is not other and one.read() == other.read() and "sent_state" not in sys.modules
"""
    packed = _sent(folder, "import at the top", "sent_state")
    done = _run(child, packed, tmp_path_factory.mktemp("elsewhere"))
    assert done.returncode == 0, done.stderr.decode()
