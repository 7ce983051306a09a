"""The curves of a soak: what is read of processes, the slopes, the verdict, the picture."""

import os
import random
import xml.dom.minidom
from pathlib import Path

import pytest
from rayps_chaos.curves import (
    LIMITS,
    UseSample,
    judge,
    own_shared_memory,
    read_samples,
    sample_place,
    sample_process,
    slope,
    write_samples,
)
from rayps_chaos.draw_curves import svg


def curve(growth, *, quantity="memory_mb", seconds=3600.0, count=120, pid=7, noise=0.0):
    """A curve that grows by so much in an hour after its first quarter, in which it doubles."""
    dice, found = random.Random(1), []
    for number in range(count):
        at = seconds * number / (count - 1)
        warm = min(1.0, at / (seconds / 4))
        value = 50 + 50 * warm + growth * max(0.0, at - seconds / 4) / 3600 + noise * dice.uniform(-1, 1)
        rest = dict.fromkeys(LIMITS, 10) | {quantity: round(value) if quantity != "memory_mb" else value}
        found.append(UseSample(at, "gcs", pid, **rest))
    return found


@pytest.mark.parametrize("quantity", sorted(LIMITS))
def test_growth_is_found_and_a_flat_noisy_curve_is_flat(quantity):
    verdicts = {found.quantity: found for found in judge(curve(3 * LIMITS[quantity], quantity=quantity, noise=3))}
    assert not verdicts[quantity].good and verdicts[quantity].slope > 2 * LIMITS[quantity]
    assert all(found.good for name, found in verdicts.items() if name != quantity)
    assert all(found.good for found in judge(curve(0.0, quantity=quantity, noise=3)))


def test_one_outlier_changes_no_slope():
    points = [(float(at), 1.0) for at in range(100)]
    points[50] = (50.0, 1e9)
    assert slope(points) == 0.0 and slope([(float(at), 2.0 * at) for at in range(1000)]) == pytest.approx(2.0)
    assert slope([]) == slope([(1.0, 1.0)]) == 0.0


def test_short_curves_and_each_process_by_itself():
    assert not any(found.judged for found in judge(curve(9e9, seconds=60.0)))
    assert all(found.good for found in judge(curve(9e9, seconds=60.0)))
    both = [*curve(0.0, pid=7), *curve(1e4, pid=8)]
    assert [found.good for found in judge(both) if found.quantity == "memory_mb"] == [True, False]


def test_a_process_is_sampled_as_it_is(tmp_path):
    before = sample_process(0.0, "me", os.getpid())
    with (tmp_path / "a").open("w") as held:
        after = sample_process(1.0, "me", os.getpid())
        assert after.descriptors == before.descriptors + 1 and after.threads >= 1 and after.memory_mb > 5, held
    assert sample_process(0.0, "nobody", 2**22 + 1) is None


def test_a_place_is_its_files(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1_000_000))
    (tmp_path / "b").write_bytes(b"x")
    found = sample_place(2.0, "place", [*tmp_path.iterdir(), tmp_path / "gone"])
    assert found.descriptors == 2 and 1.0 <= found.memory_mb < 1.1 and found.pid == 0
    assert all(path.is_relative_to("/dev/shm") for path in own_shared_memory([os.getpid()]))


def test_samples_survive_the_file_and_are_drawn(tmp_path):
    samples = [*curve(0.0), UseSample(5.0, "a <name> & more", 0, 1.5, 3, 0)]
    write_samples(tmp_path / "curves.csv", samples)
    assert read_samples(tmp_path / "curves.csv") == samples
    text = svg(samples, "one & two")
    xml.dom.minidom.parseString(text)
    assert text.count("<polyline") == 3 * 2 and "one &amp; two" in text and "a &lt;name&gt;" in text
    assert "<svg" in svg([], "nothing")
    assert Path(tmp_path / "curves.csv").read_text().startswith("at,name,pid,memory_mb,descriptors,threads")
