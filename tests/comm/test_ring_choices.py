"""What a ring chose goes into a run's events and its checkpoint, and is used again."""

import json

import pytest
from small_work import Small, train

from rayps.comm.ring.describe import describe

TABLE = [
    {"up_to": 2048, "algorithm": "tree", "seconds": {"ring": 1e-3, "tree": 1e-4}},
    {"up_to": 32768, "algorithm": "tree", "seconds": {"ring": 1e-3, "tree": 2e-4}},
    {"up_to": 2 << 20, "algorithm": "ring", "seconds": {"ring": 1e-3, "tree": 2e-3}},
    {"up_to": None, "algorithm": "ring", "seconds": {"ring": 0.0088, "tree": 0.0144}},
]


def chosen(result):
    return [event["ring"] for event in result.events if event["kind"] == "choice" and "ring" in event]


def test_a_resumed_run_uses_the_table_of_the_first(tmp_path):
    first = train(Small(), workers=3, epochs=1, checkpoint=tmp_path)
    (choice,) = chosen(first)
    assert "measured" in choice["why"]
    event = next(event for event in first.events if event["kind"] == "choice")
    assert event["message"].startswith("all-reduce between 3 ranks over shm: ")
    meta = json.loads((first.checkpoint / "manifest.json").read_text())["meta"]
    assert meta["ring"]["table"] == choice["table"]
    again = train(Small(), workers=3, epochs=2, checkpoint=tmp_path, resume=True)
    (given,) = chosen(again)
    assert given["why"] == "given" and given["table"] == choice["table"]
    other = train(Small(), workers=2, epochs=3, checkpoint=tmp_path, resume=True)
    (fresh,) = chosen(other)
    assert fresh["ranks"] == 2 and "measured" in fresh["why"]


def test_one_worker_and_a_server_choose_nothing():
    assert chosen(train(Small(), workers=1)) == []
    assert chosen(train(Small(), "parameter_server", workers=2)) == []


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (
            {"transport": "tcp", "ranks": 4, "streams": 2, "table": TABLE, "why": "measured"},
            "all-reduce between 4 ranks over tcp (2 streams between two ranks): tree up to 32 KB, ring above; measured "
            "(the largest probe took ring 8.8 ms, tree 14 ms)",
        ),
        (
            {"transport": "shm", "ranks": 2, "table": TABLE[2:], "why": "given"},
            "all-reduce between 2 ranks over shm: ring for every size; given "
            "(the largest probe took ring 8.8 ms, tree 14 ms)",
        ),
        (
            {"transport": "gloo", "ranks": 2, "algorithm": "gloo", "why": "given"},
            "all-reduce between 2 ranks over gloo: gloo, as given",
        ),
    ],
)
def test_choices_in_words(choices, words):
    assert describe(choices) == words
