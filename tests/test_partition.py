import pytest

from rayps.errors import ConfigError
from rayps.partition import part, place, slices


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 9, 1001])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_slices_cover_in_order_and_evenly(n, parts):
    cut = slices(n, parts)
    assert len(cut) == parts
    assert [i for s in cut for i in range(s.start, s.stop)] == list(range(n))
    assert [part(n, parts, i) for i in range(parts)] == [(s.start, s.stop) for s in cut]
    lengths = [s.stop - s.start for s in cut]
    assert max(lengths) - min(lengths) <= 1


def test_impossible_cuts_are_refused():
    with pytest.raises(ConfigError, match="parts >= 1"):
        slices(3, 0)
    with pytest.raises(ConfigError, match="n >= 0"):
        slices(-1, 2)


def test_segments_are_spread_evenly_and_few_move_when_a_server_joins_or_leaves():
    segments = [f"layer{i}.weight/{j}" for i in range(100) for j in range(100)]
    servers = [f"shard-{i}" for i in range(8)]
    before = place(segments, servers)
    counts = [before.count(i) for i in range(8)]
    assert min(counts) > 0.6 * len(segments) / 8 and max(counts) < 1.5 * len(segments) / 8
    after = place(segments, [*servers, "shard-8"])
    moved = [b for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {8}  # only to the new one
    assert 0.5 / 9 < len(moved) / len(segments) < 1.6 / 9
    left = place(segments, servers[:-1])
    assert all(a == b for a, b in zip(before, left, strict=True) if a != 7)
    assert place(segments[::-1], servers) == before[::-1]
    assert place(["a", "b", "c"], ["x", "y", "z"]) == place(["a", "b", "c"], ["x", "y", "z"])


def test_impossible_places_are_refused():
    for servers in ([], ["a", "a"]):
        with pytest.raises(ConfigError, match="servers of different names"):
            place(["x"], servers)
    with pytest.raises(ConfigError, match="points >= 1"):
        place(["x"], ["a"], points=0)
