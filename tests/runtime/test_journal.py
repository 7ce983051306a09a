import json
import re

import pytest

from rayps.runtime.records.journal import Journal


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_everything_is_in_the_folder(tmp_path):
    journal = Journal(tmp_path / "new" / "job")
    journal.event("started", "here we go", round=3)
    journal.event("warning", "café\n'quoted'")
    journal.add_points([{"kind": "round", "round": 0}, {"kind": "round", "round": 1}])
    journal.add_points([])
    journal.lines([(1_700_000_000.1234, "worker-0", "hello"), (1_700_000_001.0, "worker-1", "")])
    journal.progress({"status": "RUNNING", "round": 1}, now=True)
    journal.write_outcome({"status": "SUCCEEDED"})
    journal.close()
    folder = tmp_path / "new" / "job"
    events = read(folder / "events.jsonl")
    assert [(e["seq"], e["kind"], e["message"]) for e in events] == [
        (0, "started", "here we go"),
        (1, "warning", "café\n'quoted'"),
    ]
    assert events[0]["round"] == 3
    assert [p["round"] for p in read(folder / "metrics.jsonl")] == [0, 1]
    lines = (folder / "log.txt").read_text().splitlines()
    assert lines == ["2023-11-14T22:13:20.123Z worker-0 hello", "2023-11-14T22:13:21.000Z worker-1 "]
    assert json.loads((folder / "progress.json").read_text())["round"] == 1
    assert json.loads((folder / "outcome.json").read_text()) == {"status": "SUCCEEDED"}
    assert not list(folder.glob("*.tmp"))


def test_without_a_folder_it_is_kept_in_memory():
    heard = []
    journal = Journal(on_progress=heard.append, on_event=heard.append)
    journal.event("started", "x")
    journal.add_points([{"kind": "round", "round": 0}])
    journal.lines([(0.0, "worker-0", "text")])
    journal.progress({"round": 1}, now=True)
    journal.write_outcome({"status": "FAILED"})
    journal.close()
    assert [e["kind"] for e in journal.events] == ["started"]
    assert journal.points == [{"kind": "round", "round": 0}]
    assert heard[1:] == [{"round": 1}]


def test_the_outcome_is_sealed_once(tmp_path):
    journal = Journal(tmp_path)
    journal.write_outcome({"status": "SUCCEEDED"})
    journal.write_outcome({"status": "FAILED"})
    journal.close()
    assert json.loads((tmp_path / "outcome.json").read_text())["status"] == "SUCCEEDED"


def test_progress_is_told_twice_a_second_at_most():
    heard = []
    journal = Journal(on_progress=heard.append)
    for i in range(100):
        journal.progress({"round": i})
    assert heard == [{"round": 0}]
    journal.progress({"round": 100}, now=True)
    assert heard[-1] == {"round": 100}


def test_another_driver_goes_on_after_half_a_line(tmp_path):
    first = Journal(tmp_path)
    first.event("started", "one")
    first.add_points([{"kind": "round", "round": 0}])
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "round", "rou')  # killed here
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"seq"')
    second = Journal(tmp_path)
    second.event("driver_restarted", "two")
    second.add_points([{"kind": "round", "round": 1}])
    second.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in (lines[0], lines[2])] == [0, 1]
    last = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "driver_restarted"
    assert last["seq"] >= 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_lacks_become_null(tmp_path, value):
    journal = Journal(tmp_path)
    journal.add_points([{"kind": "evaluation", "round": 1, "metrics": {"accuracy": value}}])
    journal.event("x", "y", value=value)
    journal.progress({"loss": value}, now=True)
    journal.write_outcome({"metrics": {"accuracy": value}})
    journal.close()
    for name in ("metrics.jsonl", "events.jsonl", "progress.json", "outcome.json"):
        assert not re.search(r"NaN|Infinity", (tmp_path / name).read_text()), name
