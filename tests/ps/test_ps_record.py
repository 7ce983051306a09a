"""A server group's record on disk: one format, replaced as a whole; what is not one is refused and left."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rayps_client.errors import ConfigError

from rayps.ps.manager.assign_segments import SegmentAssignment
from rayps.ps.manager.record import GroupRecord, RecordFile, ServerRecord
from rayps.ps.protocol.space import Quota, Space, SparseTable
from rayps.strategies.downpour import Downpour
from rayps.strategies.parameter_server import ParameterServer
from rayps.tensors.flat import Entry, Layout
from rayps.tensors.learning_rate import Ticks


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


def record() -> GroupRecord:
    """A record with two spaces, two servers and the segments that they hold."""
    first, second = replace(SPACES[1], number=1), replace(SPACES[0], number=2)
    segments = [
        SegmentAssignment(number, index, f"{number}/{index}", "a", 3, ("b",), frozenset({"b"}), True, True)
        for number, index in ((1, 0), (1, 1), (2, 0))
    ]
    return GroupRecord(
        "main",
        bytes(32),
        wanted=2,
        replicas=1,
        next_space=3,
        servers={name: ServerRecord("127.0.0.1:1", "here", 1) for name in ("a", "b")},
        spaces={1: first, 2: second},
        segments={(each.space, each.index): each for each in segments},
        versions={1: 4, 2: 2},
        incarnations={1: {0: 2}, 2: {}},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    RecordFile(tmp_path / "main").write(record())
    return tmp_path / "main"


def test_a_record_is_read_as_it_was_written(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"record.json", "space-1.json", "space-2.json"}
    assert RecordFile(folder).read() == record()
    for path in folder.iterdir():
        text = path.read_text()
        assert "rayps." not in text and json.loads(text)
        assert path.stat().st_mode & 0o777 == 0o600  # the group's secret is in it
    assert json.loads((folder / "record.json").read_text())["format"] == 1


@pytest.mark.parametrize("what", ["another format", "cut off", "not a space", "no space"])
def test_a_damaged_or_foreign_record_is_refused_and_left(folder: Path, what: str) -> None:
    space = folder / "space-1.json"
    if what == "another format":
        found = json.loads((folder / "record.json").read_text())
        (folder / "record.json").write_text(json.dumps(found | {"format": 2}))
    elif what == "no space":
        space.unlink()
    else:
        space.write_text({"cut off": space.read_text()[:-20], "not a space": '{"name": "x"}'}[what])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match=r"record.json is not the record of a server group") as caught:
        RecordFile(folder).read()
    assert caught.value.data["field"] == "folder"
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_write_that_is_cut_off_leaves_the_old_record_or_the_new_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = record()
    new = replace(old, spaces={2: replace(old.spaces[2], quota=Quota(5)), 3: replace(old.spaces[1], number=3)})
    new.segments, new.wanted = {id_: segment for id_, segment in old.segments.items() if id_[0] == 2}, 4
    outcomes = []
    for steps in range(20):
        copy = tmp_path / f"cut-{steps}"
        shutil.copytree(folder, copy)
        book = RecordFile(copy)
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
        found = RecordFile(copy).read()
        assert found is not None
        if found.wanted == new.wanted:
            assert found == new
        else:  # the quota is of a file of its own, which was replaced first
            found.spaces[2] = old.spaces[2]
            assert found == old
        outcomes.append(found.wanted == new.wanted)
    assert len(outcomes) >= 4 and False in outcomes and True in outcomes and outcomes == sorted(outcomes)
