"""A server of an elastic group: what it answers, holds and refuses; over real links, under a scripted manager."""

import numpy as np
import pytest
import torch

from rayps.elastic.messages import Kind, Piece, read_numbers
from tests.elastic_site import Site, error, space, values

START = torch.arange(12.0)


@pytest.fixture
def site():
    with Site("s0", "s1") as made:
        yield made


def grad(value, size=4):
    return np.full(size, value, np.float32).tobytes()


def test_join_load_push_pull(site):
    one = space(staleness=None)
    places = ["s0", "s1", "s0"]
    site.open(one, places)
    site.load(one, places, START)
    worker = site.guest("s0")
    assert worker.marks == {0: 0, 2: 0}
    pieces = [Piece(0, 1, grad(1.0)), Piece(2, 1, grad(2.0))]
    answer = worker.ask(Kind.PUSH, pieces, weight=3.0)
    assert answer.kind == Kind.ACK
    empty = [Piece(2, 1, b""), Piece(0, 1, b"")]
    found = values(worker.ask(Kind.PULL, empty, a=1))
    assert list(found) == [2, 0]
    assert np.allclose(found[0], np.arange(4) - 0.1 * 1.0 / 2)
    assert np.allclose(found[2], np.arange(8, 12) - 0.1 * 2.0 / 2)
    answer = worker.ask(Kind.PUSH_PULL, pieces, a=1, weight=3.0)
    assert answer.kind == Kind.VALUE
    assert answer.a == 2
    assert np.allclose(values(answer)[0], np.arange(4) - 0.1)
    reader = site.guest("s0", rank=-1)
    assert np.allclose(values(reader.ask(Kind.READ, empty))[0], np.arange(4) - 0.1)
    assert error(reader.ask(Kind.PUSH, pieces))["kind"] == "ValueError"
    stale = worker.ask(Kind.PUSH, [Piece(0, 1, grad(1.0)), Piece(1, 1, grad(1.0))], a=2)
    assert stale.kind == Kind.STALE
    assert read_numbers(stale.payload) == [1]


def test_one_copy_is_the_same(site):
    one = space(staleness=None)
    places = ["s0"] * 3
    site.open(one, places, copies=[["s1"]] * 3)
    site.load(one, places, START)
    worker = site.guest("s0")
    for step in range(5):
        pieces = [Piece(i, 1, grad(step + i)) for i in range(3)]
        assert worker.ask(Kind.PUSH, pieces, a=step, weight=1.0).kind == Kind.ACK
    for i in range(3):
        assert site.segment("s0", i).dump() == site.segment("s1", i).dump()
        assert site.segment("s1", i).marks() == {0: 5, 1: 0}
