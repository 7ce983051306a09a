"""The state that rayps 0.1.0 left on disk (`fixtures/state_0_1`) opens and goes on with the present rayps."""

from __future__ import annotations

import json
import pickle
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import ps_fakes
import pytest
import torch
from fake_manager import ThreadPlace
from service_site import Site
from small_work import train

from rayps.cluster.local import LocalCluster, surrounding, until
from rayps.core.errors import ConfigError
from rayps.ps.manager import launcher
from rayps.ps.manager.manager import Manager
from rayps.ps.manager.record import RecordFile
from rayps.ps.protocol.segment_map import SpaceMap
from rayps.ps.protocol.space import Quota, Space, SparseTable
from rayps.service.client import Client
from rayps.strategies.downpour import Downpour
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors import checkpoint
from rayps.tensors.flat import Entry, Layout
from rayps.tensors.learning_rate import Recipe, Ticks
from rayps.workload.base import Workload, load

OLD = Path(__file__).parent / "fixtures" / "state_0_1"
MADE = json.loads((OLD / "made.json").read_text())
EXPECTED = json.loads((OLD / "expected.json").read_text())
JOBS: dict[str, str] = MADE["jobs"]
STATUS = {
    "succeeded": "SUCCEEDED",
    "failed": "FAILED",
    "stopped": "STOPPED",
    "running": "RUNNING",
    "branched": "RUNNING",
    "queued": "QUEUED",
}
SAME_PYTHON = pytest.mark.skipif(
    not sys.version.startswith(MADE["python"].rpartition(".")[0]),
    reason="the optimizer of an open space is packed as byte code of one Python",
)
WORDS = SparseTable(  # of the old jobs
    "words", 3, 4, dtype="float64", optimizer={"name": "adagrad", "lr": 0.1}, init={"name": "normal", "scale": 0.01}
)
CLOSE = 1e-9  # float64; another processor or torch may round otherwise


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A copy of the old state directory, with the paths of this test in it."""
    folder, work = tmp_path / "state", tmp_path / "work"
    shutil.copytree(OLD / "state", folder)
    work.mkdir()
    shutil.copy(OLD / "work.py", work)

    def here(text: str) -> str:
        return text.replace("@STATE@", str(folder)).replace("@WORK@", str(work))

    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)  # git keeps no modes
        if path.suffix in (".json", ".jsonl") and "checkpoints" not in path.parts:
            path.write_text(here(path.read_text()))
    with sqlite3.connect(folder / "rayps.db") as database:
        for table, column in (("jobs", "spec"), ("jobs", "checkpoint"), ("jobs", "reason"), ("events", "message")):
            for row, text in database.execute(f"SELECT rowid, {column} FROM {table} WHERE {column} IS NOT NULL"):
                database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (here(text), row))
    database.close()
    return folder


@pytest.fixture
def site(state: Path) -> Iterator[Site]:
    found = Site(state)
    yield found
    found.close()


def get(site: Site, path: str, **params: Any) -> Any:
    answer = site.http.get(f"/api/v1{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_store_opens_and_lists_every_job(site: Site) -> None:
    listed = {job["name"]: job for job in get(site, "/jobs", limit=200)["jobs"]}
    assert {name: job["id"] for name, job in listed.items()} == JOBS
    ended = {name: status for name, status in STATUS.items() if status in ("SUCCEEDED", "FAILED", "STOPPED")}
    assert {name: listed[name]["status"] for name in ended} == ended
    assert (listed["queued"]["status"], listed["queued"]["attempt"]) == ("QUEUED", 0)
    for name in ("running", "branched"):
        assert listed[name]["status"] in ("RUNNING", "UNKNOWN") and listed[name]["attempt"] == 1
        assert listed[name]["spec"]["server_group"] == "main"
        assert listed[name]["spec"]["strategy"]["name"] == "parameter_server"
    assert listed["branched"]["spec"]["branch"] == JOBS["running"]
    assert listed["branched"]["spec"]["quota"] == {"bytes": 10_000_000, "operations": 1000.0}
    assert listed["succeeded"]["metrics"]["error"] == pytest.approx(0.518, abs=0.01)
    assert "row 21 has no target" in listed["failed"]["reason"]
    assert [group["name"] for group in get(site, "/server-groups")["groups"]] == ["main"]


@pytest.mark.parametrize("name", STATUS)
def test_events_metrics_logs_and_checkpoints_are_shown(site: Site, name: str) -> None:
    job = JOBS[name]
    shown = get(site, f"/jobs/{job}")
    events = [event["kind"] for event in get(site, f"/jobs/{job}/events")["events"]]
    assert "adopted" not in events  # its row is as its folder says
    if name == "queued":
        assert events == ["queued"] and not get(site, f"/jobs/{job}/metrics")["points"]
        return
    assert events[0] == "queued" and len(events) > 3 and shown["progress"]["round"] > 0
    points = get(site, f"/jobs/{job}/metrics")["points"]
    assert any("loss" in point for point in points)
    assert name in ("running", "branched") or get(site, f"/jobs/{job}/logs")["lines"]
    if shown["checkpoint"] is not None:
        assert checkpoint.load(shown["checkpoint"]).tensors


def test_the_old_tokens_are_good(site: Site, state: Path) -> None:
    assert site.token == (state / "token").read_text().strip()  # the service has made no other
    for token, code in ((site.token, 200), (MADE["token"], 200), (MADE["token"] + "x", 401)):
        answer = httpx2.get(f"{site.url}/api/v1/jobs", headers={"Authorization": f"Bearer {token}"}, timeout=60)
        assert answer.status_code == code
    assert "laptop" in [each["name"] for each in get(site, "/tokens")["tokens"]]


@SAME_PYTHON
def test_a_service_takes_the_unfinished_jobs_to_their_end(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(state.parent / "work")  # a driver in a thread goes to its job's directory
    place = ThreadPlace()
    place.threads = surrounding()  # type: ignore[assignment]  # where a driver in a thread starts its workers
    site = Site(state, place=place)
    try:
        with Client(site.url, site.token) as client:
            for name in ("running", "branched", "queued"):
                found = client.job(JOBS[name]).wait(300).data
                assert found["status"] == "SUCCEEDED", (name, found["reason"])
                events = [event["kind"] for event in client.job(JOBS[name]).events()]
                assert "began_again" not in events  # from its checkpoint, or for the first time
                assert found["attempt"] == (1 if name == "queued" else 2)
            client.servers("main").stop().wait(60)
    finally:
        site.close()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_checkpoint_is_trained_on(name: str, tmp_path: Path) -> None:
    shutil.copytree(OLD / "checkpoints" / name, tmp_path / name)
    job = EXPECTED[name]
    result = train(
        load(f"{OLD / 'work.py'}:{job['workload']}"),
        job["strategy"],
        workers=job["workers"],
        epochs=job["epochs"],
        checkpoint=tmp_path / name,
        resume=True,
    )
    assert min(result.history["round"].to_pylist()) >= job["round"]  # it is resumed, not begun
    torch.testing.assert_close(result.snapshot.params, doubles(job["params"]), rtol=CLOSE, atol=CLOSE)
    if job["outputs"] is not None:
        outputs = result.model()(torch.arange(20)).flatten().detach()
        torch.testing.assert_close(outputs, doubles(job["outputs"]), rtol=CLOSE, atol=CLOSE)


def doubles(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_a_manager_goes_on_from_an_old_record(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "HOST", "ps_fakes:FakeHost")
    monkeypatch.setattr(ps_fakes.FakeHost, "hold", set())
    monkeypatch.setattr(ps_fakes.FakeHost, "machines", {})
    folder, cluster = state / "servers" / "main", LocalCluster()
    old = json.loads((folder / "record.json").read_text())
    running, branched = JOBS["running"], JOBS["branched"]
    manager = Manager("main", 5, 0, folder, cluster=cluster, silence=0.5)
    try:
        assert manager.contact()["secret"].hex() == old["secret"]
        assert manager.facts()["wanted"] == 2 and manager.facts()["replicas"] == 1
        first, second = manager.space(running), manager.space(branched)
        assert (first.number, first.workers, first.strategy) == (1, 2, ParameterServer(staleness=1).server_half)
        assert (second.number, second.workers, second.strategy) == (2, 1, ParameterServer(staleness=None).server_half)
        assert (first.branch_of, second.branch_of) == (None, running)
        assert (first.quota, second.quota) == (Quota(), Quota(10_000_000, 1000.0))
        for space in (first, second):
            assert space.layout is not None and space.layout.dtype is torch.float64
            assert [(e.name, e.lo, e.hi, e.shape) for e in space.layout.entries] == [
                ("dense.weight", 0, 3, (1, 3)),
                ("dense.bias", 3, 4, (1,)),
            ]
            assert (
                space.cuts == ((0, 1), (1, 2), (2, 3), (3, 4)) and space.tables == (WORDS,) and space.ticks.steps == 6
            )
        assert manager.join(1, 0) == old["ranks"]["1"]["0"] + 1
        manager.drop(running)
        assert until(manager.settled, 120), manager.facts()
        held = SpaceMap.from_json(manager.map(2)).holders  # the old servers are dead: new ones hold it
        assert all(h.generation > 1 and len(h.copies) == 1 for h in held)
        made = manager.open(Space("new", 0, 1, ParameterServer(), tables=(SparseTable("t", 2, 3),)))
        assert made.number == old["next_space"]
        manager.close()
        assert {path.name for path in folder.iterdir()} == {
            "record.json",
            "space-2.json",
            "space-3.json",
            "wanted.json",
        }
        manager = Manager("main", 5, 0, folder, cluster=cluster)  # from what the first one wrote
        assert sorted(space["name"] for space in manager.facts()["spaces"]) == sorted([branched, "new"])
        assert (manager.space(branched), manager.space("new")) == (second, made)
    finally:
        manager.stop()
        cluster.close()
        ps_fakes.HOSTS.clear()


# ---------------------------------------------------------------------------------------- a group's record


def test_an_old_record_is_read_and_replaced_by_json(state: Path) -> None:
    folder = state / "servers" / "main"
    record = RecordFile(folder).read()
    assert record is not None and record.spaces.keys() == {1, 2}
    assert {path.name for path in folder.iterdir()} >= {"space-1.pickle", "space-2.pickle"}  # reading changes nothing
    book = RecordFile(folder)
    assert book.read() == record
    book.write(record)
    assert {path.name for path in folder.iterdir()} == {"record.json", "space-1.json", "space-2.json", "wanted.json"}
    assert RecordFile(folder).read() == record
    for name in ("record.json", "space-1.json", "space-2.json"):
        text = (folder / name).read_text()
        assert "rayps." not in text and json.loads(text)
        assert (folder / name).stat().st_mode & 0o777 == 0o600  # the group's secret is in it
    assert json.loads((folder / "record.json").read_text())["format"] == 2


@SAME_PYTHON
def test_an_old_optimizer_factory_makes_its_optimizer(state: Path) -> None:
    record = RecordFile(state / "servers" / "main").read()
    assert record is not None
    recipe = record.spaces[1].unpack_factory()
    optimizer = recipe([torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, torch.optim.Adam) and optimizer.param_groups[0]["lr"] == 0.02
    assert isinstance(recipe.make(optimizer), torch.optim.lr_scheduler.StepLR)


class Touch:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("what", ["code", "another class", "cut off", "not a space", "a format to come"])
def test_a_damaged_or_foreign_record_is_refused_and_left(state: Path, tmp_path: Path, what: str) -> None:
    folder, touched = state / "servers" / "main", tmp_path / "touched"
    space = folder / "space-1.pickle"
    if what == "a format to come":
        record = json.loads((folder / "record.json").read_text())
        (folder / "record.json").write_text(json.dumps(record | {"format": 3}))
    else:
        data = {
            "code": pickle.dumps(Touch(touched)),
            "another class": pickle.dumps(Fraction(1, 2)),
            "cut off": space.read_bytes()[:-100],
            "not a space": pickle.dumps({"name": "x"}),
        }
        space.write_bytes(data[what])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match=r"record.json is not the record of a server group") as caught:
        RecordFile(folder).read()
    assert caught.value.data["field"] == "folder" and not touched.exists()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("format", [1, 2])
def test_a_write_that_is_cut_off_leaves_the_old_record_or_the_new_one(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: int
) -> None:
    source = state / "servers" / "main"
    old = RecordFile(source).read()
    assert old is not None
    if format == 2:
        book = RecordFile(source)
        book.read()
        book.write(old)
    new = replace(old, spaces={2: replace(old.spaces[2], quota=Quota(5)), 3: replace(old.spaces[1], number=3)})
    new.segments, new.wanted = {id_: segment for id_, segment in old.segments.items() if id_[0] == 2}, 4
    outcomes = []
    for steps in range(20):
        folder = tmp_path / f"cut-{steps}"
        shutil.copytree(source, folder)
        book = RecordFile(folder)
        assert book.read() == old
        left = [steps]

        def cut(work: Any, left: list[int] = left) -> Any:
            def passing(*args: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
                return work(*args, **options)

            return passing

        with monkeypatch.context() as patch:
            for name in ("rename", "unlink"):
                patch.setattr(Path, name, cut(getattr(Path, name)))
            try:
                book.write(new)
            except KeyboardInterrupt:
                pass
            else:
                break
        found = RecordFile(folder).read()
        assert found is not None
        if found.wanted == new.wanted:
            assert found == new
        else:  # the quota is of a file of its own, which was replaced first
            found.spaces[2] = old.spaces[2]
            assert found == old
        outcomes.append(found.wanted == new.wanted)
    assert len(outcomes) >= 4 and False in outcomes and True in outcomes and outcomes == sorted(outcomes)


class OwnRule(ParameterServer):
    """A strategy that is not of the catalogue."""


SPACES = [
    Space("plain", 1, 1, ParameterServer()),
    Space(
        "dense",
        7,
        3,
        ParameterServer(shards=3, staleness=None, replay_mb=1.5, replicas=1),
        Layout((Entry("a.weight", 0, 6, (2, 3)), Entry("a.scale", 6, 7, ())), torch.bfloat16),
        ((0, 3), (3, 7)),
        bytes(range(256)),
        (SparseTable("t", 2, policy={"admit": 3, "evict": "lfu"}),),
        Quota(10, 0.5),
        "plain",
        Ticks((12, 3), 4),
    ),
    Space("own", 2, 2, OwnRule(staleness=4)),
    Space("downpour", 2, 2, Downpour(n_push=2)),
]


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.name)
def test_a_space_survives_json(space: Space) -> None:
    again = Space.from_json(json.loads(json.dumps(space.to_json())))
    assert again == space and type(again.strategy) is type(space.strategy)
    assert ("pickle" in space.to_json()["strategy"]) is (space.name == "own")


def test_an_option_that_is_not_plain_data_is_refused() -> None:
    table = SparseTable("t", 2, policy={"folder": Path("/x"), "admit": np.int64(3)})
    assert Space("s", 1, 1, ParameterServer(), tables=(table,)).to_json()["tables"][0]["policy"] == {
        "folder": "/x",
        "admit": 3,
    }
    with pytest.raises(ConfigError, match="table 't' has the option <object"):
        Space("s", 1, 1, ParameterServer(), tables=(SparseTable("t", 2, policy={"admit": object()}),)).to_json()


@pytest.mark.parametrize(
    ("name", "found"), [("Workload", Workload), ("Recipe", Recipe), ("ParameterServer", ParameterServer)]
)
def test_a_factory_finds_classes_that_were_moved(name: str, found: type) -> None:
    packed = f"crayps.a_module_that_is_gone\n{name}\n.".encode()
    assert Space("s", 1, 1, ParameterServer(), factory=packed).unpack_factory() is found
    with pytest.raises(ImportError):
        Space("s", 1, 1, ParameterServer(), factory=b"crayps.gone\nNothing\n.").unpack_factory()
