"""Workloads by name and by value: found, refused with the reason, carried to where their file is not."""

import importlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rayps_client.errors import DataError, WorkloadError

import rayps
from rayps.cluster.local import LocalCluster
from rayps.core.job.user_module import pack, unpack
from rayps.data import Batch, Data, tensors
from rayps.workload import base
from rayps.workload.base import Workload, load

GOOD = """
import torch
import rayps.workload.base, rayps.data
import helper
from helper import Scale, twice

class Line(rayps.workload.base.Workload):
    def __init__(self, width=3):
        self.width = twice(width)
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(self.width, 1), Scale(helper.FACTOR))
    def data(self):
        return rayps.data.tensors(torch.ones(8, self.width), torch.ones(8))
    def loss(self, model, batch):
        return ((model(batch.x)[:, 0] - batch.y) ** 2).mean()

class Wide(Line):
    def __init__(self, width):
        super().__init__(width)

class Half(rayps.workload.base.Workload):
    def model(self): ...

class Angry(Line):
    def __init__(self):
        open("/nowhere/at/all")

class Careful(Line):
    def __init__(self):
        from rayps_client.errors import DataError
        raise DataError("rows.parquet: gone", file="rows.parquet")

class Other: ...
number = 3
"""
HELPER = """
import torch
FACTOR = 5.0
class Scale(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by
    def forward(self, x):
        return x * self.by
def twice(x):
    return x * 2
"""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    base.FINDER.forget()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(GOOD)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "inner.py").write_text("from line import Line\nclass Inner(Line): pass\n")
    return tmp_path


def test_the_default_optimizer_and_evaluation() -> None:
    class Plain(Workload):
        def model(self) -> torch.nn.Module:
            return torch.nn.Linear(1, 1)

        def data(self) -> Data:
            return tensors(torch.ones(3, 1))

        def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            return model(batch.x).mean()

    plain = Plain()
    optimizer = plain.optimizer(list(plain.model().parameters()))
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["lr"] == 0.01
    assert plain.evaluate(plain.model(), Batch(None, None, 1)) == {}
    assert plain.evaluation_data().rows() == 3


@pytest.mark.parametrize(
    "target", ["line:Line", "line.py:Line", "./line.py:Line", "pack.inner:Inner", "pack/../line.py:Line"]
)
def test_found_by_name(folder: Path, target: str) -> None:
    found = load(target, str(folder))
    assert isinstance(found, Workload) and found.width == 6  # type: ignore[attr-defined]


def test_found_by_absolute_path_and_from_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load(f"{folder}/line.py:Line"), Workload)
    monkeypatch.chdir(folder)
    assert isinstance(load("line.py:Line"), Workload)


def test_an_edited_file_is_read_again(folder: Path) -> None:
    load("line.py:Line", str(folder))
    (folder / "helper.py").write_text(HELPER.replace("x * 2", "x * 2 + 100"))
    assert load("line.py:Line", str(folder)).width == 106  # type: ignore[attr-defined]


def test_another_folder_has_helpers_of_its_own(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "line.py").write_text(GOOD)
    (other / "helper.py").write_text(HELPER.replace("x * 2", "x * 7"))
    first = load("line.py:Line", str(folder))
    assert load("line:Line", str(other)).width == 21  # type: ignore[attr-defined]
    assert str(folder) not in sys.path
    assert unpack(pack(first)).width == 6


@pytest.mark.parametrize("name", ["json", "torch", "my-model", "my.model", "logging"])
def test_a_file_whose_name_is_taken_hides_nothing(folder: Path, name: str) -> None:
    before = sys.modules.get(name)
    (folder / f"{name}.py").write_text(GOOD)
    assert isinstance(load(f"{name}.py:Line", str(folder)), Workload)
    assert sys.modules.get(name) is before


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("line", ["'line'", "'digits.py:Digits'"]),
        (":Line", ["digits"]),
        ("line:", ["digits"]),
        ("line:not a name", ["digits"]),
        ("line:Wide(3)", ["has arguments", "write line:Wide", "defaults"]),
        ("line.py:Wide(width={'a': f(1)})", ["has arguments", "write line.py:Wide\n", "rayps.train takes an instance"]),
        ("lime:Line", ["no module 'lime'", "did you mean 'line'"]),
        ("zzz:Line", ["no module 'zzz'", "working_dir"]),
        ("lime.py:Line", ["no file", "lime.py", "did you mean 'line.py'"]),
        ("pack/zz.py:A", ["no file"]),
        ("pack.innr:Inner", ["no module 'pack.innr'"]),
        ("line.py:Lime", ["no class 'Lime'", "did you mean Line"]),
        ("line:Zzzzzz", ["no class", "Line", "Wide"]),
        ("line:Other", ["not a workload", "rayps.Workload", "Line"]),
        ("line:number", ["not a workload"]),
        ("line:Half", ["lacks data(), loss()"]),
        ("line:Wide", ["'width'", "defaults"]),
        ("line:Angry", ["FileNotFoundError", "line.py:26", 'open("/nowhere/at/all")']),
        ("syntax.py:A", ["SyntaxError", "syntax.py:2"]),
        ("syntax:A", ["SyntaxError", "syntax.py:2"]),
        ("raises.py:A", ["ZeroDivisionError: division by zero", "deep.py:3", "return 1 / 0"]),
        ("raises:A", ["ZeroDivisionError", "deep.py:3"]),
        ("needs.py:A", ["No module named 'pandas_of_the_moon'", "needs.py:1"]),
        ("needs:A", ["No module named 'pandas_of_the_moon'", "needs.py:1"]),
        ("exits:A", ["SystemExit", "exits.py:1"]),
    ],
)
def test_refused_with_the_reason(folder: Path, target: str, words: list[str]) -> None:
    (folder / "syntax.py").write_text("x = 1\ndef broken(:\n")
    (folder / "deep.py").write_text("\ndef crash():\n    return 1 / 0\n")
    (folder / "raises.py").write_text("import deep\ndeep.crash()\n")
    (folder / "needs.py").write_text("import pandas_of_the_moon\n")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(WorkloadError) as caught:
        load(target, str(folder))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.count("\n") < 3
    assert load("line:Line", str(folder)).width == 6  # type: ignore[attr-defined]  # nothing is left half done


def test_errors_of_ours_in_a_constructor_stay_theirs(folder: Path) -> None:
    with pytest.raises(DataError, match="gone"):
        load("line:Careful", str(folder))


def test_a_working_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="does not exist"):
        load("line:Line", str(tmp_path / "nowhere"))


CHILD = """
import sys
from rayps.core.job.user_module import unpack
found = unpack(sys.stdin.buffer.read())
model = found.model()
batch = next(found.data().batches(rank=0, size=1, seed=0, epoch=0))
found.loss(model, batch).backward()
print(type(found).__name__, found.width, model[1].by)
"""


def test_a_fresh_process_needs_no_file(folder: Path) -> None:
    packed = [pack(load(target, str(folder))) for target in ("line.py:Line", "pack.inner:Inner")]
    for path in (*folder.glob("*.py"), *folder.glob("pack/*.py")):
        path.unlink()
    for name, content in zip(("Line", "Inner"), packed, strict=True):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CHILD)],
            input=content,
            capture_output=True,
            cwd=Path(__file__).parents[2],
        )
        assert done.stdout.decode().split() == [name, "6", "5.0"], done.stderr.decode()


def test_a_function_travels_too(folder: Path) -> None:
    load("line:Line", str(folder))
    content = pack(sys.modules["helper"].twice)
    base.FINDER.forget()
    assert unpack(content)(4) == 8


def test_the_code_of_a_function_names_its_file_after_the_travel(folder: Path) -> None:
    """cloudpickle 3.1.3 replaces the name by "<dynamic-code>", and errors of workers would not name the file."""

    def outer() -> str:
        return (lambda: "inner")()

    found = unpack(pack(outer))
    codes = [found.__code__, *(each for each in found.__code__.co_consts if hasattr(each, "co_filename"))]
    assert [code.co_filename for code in codes] == [__file__] * 2
    kind = unpack(pack(load("line.py:Line", str(folder)))).__class__
    assert kind.model.__code__.co_filename == str(folder / "line.py")


def test_what_cannot_be_sent_is_refused(folder: Path) -> None:
    found = load("line:Line", str(folder))
    found.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(WorkloadError, match=r"Line cannot be sent.*lock") as caught:
        pack(found)
    assert "not in __init__" in str(caught.value)
    with pytest.raises(WorkloadError, match="cannot be unpacked"):
        unpack(b"not a pickle")


class Plain(Workload):
    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self):
        return tensors(torch.ones(4, 1), torch.ones(4, 1), batch_size=4)

    def loss(self, model, batch):
        return (model(batch.x) - batch.y).square().mean()


class Nearly(Plain):
    def optimiser(self, params):
        return torch.optim.SGD(params, lr=1.0)

    def evalute(self, model, batch):
        return {}

    def helper(self):
        return None


class Derived(Plain):
    def lose(self):
        return None

    def evaluates(self, model, batch):
        return {}

    def models(self):
        return None


def test_a_misspelt_method_is_warned_of():
    assert base.misspelt(Plain()) == []
    names = [text.split("'")[1] for text in base.misspelt(Derived())]
    assert names == ["evaluates", "models"]
    said = base.misspelt(Nearly())
    assert [text.split("'")[1::2] for text in said] == [["evalute", "evaluate"], ["optimiser", "optimizer"]]
    result = rayps.train(Nearly(), workers=1, steps=1, progress=False, cluster=LocalCluster())
    warned = [event["message"] for event in result.events if event["kind"] == "warning"]
    assert set(said) <= set(warned)


OURS = [name for name in vars(Workload) if not name.startswith("_")]


@pytest.mark.parametrize("where", ["class", "constructor"])
@pytest.mark.parametrize("name", [name for name in OURS if not callable(getattr(Workload, name))])
def test_a_misspelt_attribute_is_warned_of(name: str, where: str) -> None:
    for wrong in (name[:3] + name[4:], name + "s"):
        work = type("Work", (Plain,), {wrong: 2} if where == "class" else {})()
        vars(work).update({wrong: 2} if where == "constructor" else {})
        assert [text.split("'")[1::2] for text in base.misspelt(work)] == [[wrong, name]]


def test_attributes_of_the_users_own_are_not_warned_of() -> None:
    own = ["lr", "width", "steps", "momentum", "clip", "batch_size", "betas", "warm_up", "metric", "dataset", "norm"]
    assert base.misspelt(type("Work", (Plain,), dict.fromkeys(own, 1))()) == []
    assert base.misspelt(type("Work", (Plain,), dict.fromkeys(OURS[:10], None))()) == []
    work = Plain()
    work.models = []  # the class has the method that this is similar to
    assert base.misspelt(work) == []


def test_a_workload_is_packed_while_another_thread_reads_files_again(folder: Path) -> None:
    work = load("line.py:Line", str(folder))
    others: list[threading.Thread] = []

    class Slow:
        def __reduce__(self) -> tuple[type, tuple[()]]:
            other = threading.Thread(target=base.FINDER.forget)
            other.start()
            other.join(0.2)  # it waits until the workload is packed
            others.append(other)
            return (list, ())

    content = pack((work, Slow()))
    [other] = others
    other.join(60)
    assert not other.is_alive() and "helper" not in sys.modules
    assert unpack(content)[0].width == 6


def test_a_package_installed_into_a_folder_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install --target` puts packages beside a user's files: the packages stay there, the user's files travel."""
    (tmp_path / "lib_there").mkdir()
    (tmp_path / "lib_there" / "__init__.py").write_text("def of_package(): return 1\n")
    (tmp_path / "one_file.py").write_text("def of_file(): return 2\n")
    (tmp_path / "mine_here.py").write_text("def of_user(): return 3\n")
    (tmp_path / "lib_there-1.0.dist-info").mkdir()
    (tmp_path / "lib_there-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: lib-there\n")
    record = "lib_there/__init__.py,,\none_file.py,,\n../../bin/lib,,\n"
    (tmp_path / "lib_there-1.0.dist-info" / "RECORD").write_text(record)
    monkeypatch.syspath_prepend(tmp_path)
    for name, travels in (("lib_there.of_package", False), ("one_file.of_file", False), ("mine_here.of_user", True)):
        module, _, function = name.rpartition(".")
        packed = pack(getattr(importlib.import_module(module), function))
        del sys.modules[module]
        assert (b"_code_of_file" in packed) == travels, name
