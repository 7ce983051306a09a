"""A module that an ignore file kept at home: the failed import in the job names the line, and the way out works."""

import importlib
import sys

import pytest
from rayps_client.errors import WorkloadError
from rayps_client.machine.user_files import Finder

import rayps
from rayps.core.job.code_archive import unpack
from rayps.core.job.user_code import user_code
from rayps.service.code.code_files import pack_code

WORK = "import rayps\n{import_}\nclass Work(rayps.Workload):\n    pass\n"
# the files that are kept at home, the line of .gitignore, and the import. No folder on the path of the tests has these
# names: a folder `data` beside the tests' own modules would be a namespace package.
KEPT = {
    "folder": (["kept_rows/__init__.py", "kept_rows/rows.py"], "kept_rows/", "import kept_rows"),
    "anchored": (["kept_rows/__init__.py"], "/kept_rows", "from kept_rows import rows"),
    "pattern": (["kept_rows/__init__.py"], "kept*", "import kept_rows"),
    "below": (["kept_pkg/data/__init__.py"], "kept_pkg/data/", "import kept_pkg.data"),
    "from": (["kept_pkg/data/__init__.py"], "kept_pkg/data/", "from kept_pkg import data"),
    "file": (["kept_rows.py"], "kept_rows.py", "import kept_rows"),
    "in part": (["kept_rows/rows.py"], "kept_rows/*\n!kept_rows/.keep", "from kept_rows import rows"),
    "in part, by path": (["kept_rows/rows.py"], "kept_rows/*\n!kept_rows/.keep", "import kept_rows.rows"),
}


def travel(folder, there):
    """Unpack what a job of this folder would have."""
    there.mkdir()
    unpack(pack_code(folder).archive, there)


@pytest.fixture(params=KEPT)
def project(request, tmp_path, monkeypatch):
    """The folder at home, the folder of the job, and the line and import of the case."""
    kept, line, import_ = KEPT[request.param]
    home, there = tmp_path / "home", tmp_path / "there"
    for path in kept:
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text("rows = 1\n")
    if line.startswith("kept_pkg"):
        (home / "kept_pkg" / "__init__.py").write_text("")
    if ".keep" in line:
        (home / "kept_rows" / ".keep").write_text("")
    (home / ".gitignore").write_text(f"# what stays\n\n{line}\n")
    (home / "train.py").write_text(WORK.format(import_=import_))
    travel(home, there)
    monkeypatch.chdir(there)
    monkeypatch.syspath_prepend(str(there))
    before = set(sys.modules)
    yield home, there, line.split("\n")[0], import_
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_a_failed_import_names_the_line_and_the_way_out_works(project, tmp_path, monkeypatch):
    home, there, line, import_ = project
    finder = Finder("workload", "workloads", "rayps.Workload")
    with pytest.raises(WorkloadError) as at_load:
        finder.find("train.py:Work", there, rayps.Workload)
    finder.forget()
    with pytest.raises(WorkloadError) as in_method, user_code("data"):
        exec(import_, {})
    for error in (at_load.value, in_method.value):
        assert f"line 3 of .gitignore ({line!r}) leaves it out of the code that is sent with a job" in error.message
    way = in_method.value.message.split("add to .raypsignore: ")[1].split(";")[0].split(" and ")
    (home / ".raypsignore").write_text("\n".join(way))
    travel(home, tmp_path / "again")
    monkeypatch.chdir(tmp_path / "again")
    monkeypatch.syspath_prepend(str(tmp_path / "again"))
    importlib.invalidate_caches()
    for name in ("kept_pkg", "kept_rows"):
        sys.modules.pop(name, None)  # that of the first job
    exec(import_, {})


def test_a_package_that_no_line_names_is_not_said_to_be_ignored(project):
    with pytest.raises(WorkloadError) as found, user_code("data"):
        import no_such_package_of_anyone  # noqa: F401
    assert "gitignore" not in found.value.message
    assert "install the package no_such_package_of_anyone" in found.value.message
