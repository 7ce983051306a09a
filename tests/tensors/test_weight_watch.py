"""WeightWatch sees what a user's code does to the parameters of a small and of a large vector."""

import pytest
import torch
from torch import nn

from rayps.tensors.flat import FlatModel
from rayps.tensors.weight_watch import WHOLE, WeightWatch

SIZES = [7, WHOLE, WHOLE + 1, 3 * WHOLE + 5]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def watched(size, dtype=torch.float32):
    """Return the two parameters of a vector with so many elements, one of them NaN, and what watches them."""
    model = nn.ParameterDict({"a": torch.zeros(size - 3, dtype=dtype), "b": torch.ones(3, dtype=dtype)})
    flat = FlatModel(model)
    flat.vector[-2] = torch.nan
    return model["a"], model["b"], flat.watch


def records_until(watch, change, name):
    """Return the number of records until a change is found, at most 65."""
    for count in range(1, 66):
        watch.record()
        change(count)
        if watch.changed() == name:
            return count
    raise AssertionError(f"64 records have not found a change of {name}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_changed_is_not_found(size, dtype):
    _, _, watch = watched(size, dtype)
    for _ in range(70):
        watch.record()
        assert watch.changed() is None
        assert not watch.touched()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["a", "b"])
def test_one_element_that_torch_does_not_count(size, dtype, name):
    a, b, watch = watched(size, dtype)
    p = {"a": a, "b": b}[name]

    def change(count):
        p.data[-1] = count + 1

    found = records_until(watch, change, name)
    assert watch.touched()
    assert found == 1 or size > WHOLE


@pytest.mark.parametrize("size", SIZES)
def test_one_element_that_torch_counts(size):
    _, b, watch = watched(size)

    def change(count):
        with torch.no_grad():
            b[-1] = count + 1
        assert watch.touched()

    assert records_until(watch, change, "b") <= 2


@pytest.mark.parametrize("size", SIZES)
def test_a_layer_of_a_large_vector_is_found_at_once(size):
    a, _, watch = watched(size)
    watch.record()
    a.data.add_(1)
    assert watch.changed() == "a"


def test_a_part_without_parameters():
    watch = WeightWatch(torch.empty(0), [], [])
    for _ in range(2):
        watch.record()
        assert watch.changed() is None and not watch.touched()
