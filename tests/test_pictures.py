"""The pictures of the documentation are those that their script draws today, and what they show is what happens."""

import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"


def load():
    spec = importlib.util.spec_from_file_location("draw_pictures", ROOT / "scripts" / "draw_pictures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["draw_pictures"] = module
    spec.loader.exec_module(module)
    return module


pictures = load()


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_committed_file_is_what_the_script_draws(name):
    drawn = pictures.PICTURES[name]().svg()
    ElementTree.fromstring(drawn)
    stored = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert stored == drawn, f"run: python scripts/draw_pictures.py {name}"


def test_no_file_without_its_function():
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(pictures.PICTURES)


def test_every_picture_is_on_a_page():
    pages = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md"))
    assert [name for name in pictures.PICTURES if f"pictures/{name}.svg" not in pages] == []


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_sends_a_chunk_to_the_next_rank_in_each_of_2n_minus_2_hops(ranks):
    found = pictures.sends("ring", ranks)
    assert {(send.source, send.step) for send in found} == {(r, s) for r in range(ranks) for s in range(2 * ranks - 2)}
    for send in found:
        assert send.target == (send.source + 1) % ranks
        assert send.chunk == (send.source - send.step + (send.step >= ranks - 1) * ranks) % ranks


def test_bytes_of_recorded_messages_are_those_of_the_formula():
    ranks = 4
    sent = sum(send.bytes for send in pictures.sends("ring", ranks)) / ranks / (4 * 4 * ranks)  # of the vector
    assert sent * 4 * pictures.ELEMENTS == pictures.busiest(pictures.rayps.AllReduce(), ranks)


@pytest.mark.parametrize("staleness", [0, 1, 2, None])
def test_simulated_rounds_keep_the_bound(staleness):
    turns = pictures.staleness_rounds(staleness, (1.0, 1.0, 2.5), 12.0)
    for line in turns:
        for index, turn in enumerate(line):
            ended = [sum(other.end <= turn.start for other in each) for each in turns]
            assert staleness is None or index - min(ended) <= staleness
