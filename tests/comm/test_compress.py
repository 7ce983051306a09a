import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rayps_client.errors import ConfigError

from rayps.comm.compress import BLOCK, ErrorFeedback, decode, find_codec

NAMES = ["fp16", "bf16", "int8", "top_k:0.1", "top_k:1"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17]


def there_and_back(name, x):
    kind = find_codec(name)
    data = kind.encode(x)
    assert data.dtype == torch.uint8
    assert data.shape == (kind.size(x.numel()),)
    return decode(kind.code, data, x.numel(), x.dtype)


def bound(name, x):
    """The largest error that each element may have."""
    wide = x.double().abs()
    if name == "fp16":
        return wide * 2**-11 + 2**-25
    if name == "bf16":
        return wide * 2**-8 + 2**-134
    if name == "int8":
        blocks = [block.max().expand_as(block) for block in wide.split(BLOCK)] if x.numel() else [wide]
        most = torch.cat(blocks)
        eps = torch.finfo(x.dtype).eps
        return most * (0.5 / 127 + 2**-9 * eps**0.5 + max(eps, 2**-23)) + 1e-37  # elements are divided in float32
    k = find_codec(name).size(x.numel()) // 8
    left_out = wide.sort().values[: x.numel() - k]
    return torch.full_like(wide, left_out.max().item() if left_out.numel() else 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_lost_is_bounded(name, n, dtype):
    x = (torch.randn(n, dtype=torch.float64) * torch.logspace(-4, 3, n, dtype=torch.float64)).to(dtype)
    before = x.clone()
    back = there_and_back(name, x)
    assert torch.equal(x, before)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    slack = 0 if not name.startswith("top_k") else x.double().abs() * 2**-23  # values travel as float32
    assert ((back.double() - x.double()).abs() <= bound(name, x) + slack).all()


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-60000, max_value=60000)


@given(st.lists(FLOATS, max_size=40), st.sampled_from(NAMES))
def test_any_vector_comes_back_within_its_bound(values, name):
    x = torch.tensor(values, dtype=torch.float32)
    assert ((there_and_back(name, x).double() - x.double()).abs() <= bound(name, x)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zeros(name, dtype):
    assert torch.equal(there_and_back(name, torch.zeros(BLOCK + 5, dtype=dtype)), torch.zeros(BLOCK + 5, dtype=dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_and_not_remembered(name, bad):
    x = torch.ones(2 * BLOCK)
    x[5] = bad
    back = there_and_back(name, x)
    assert not back[5].isfinite()
    if name != "int8":
        assert torch.equal(back[5].nan_to_num(7.0), x[5].nan_to_num(7.0))
    assert back[BLOCK:].isfinite().all()
    memory = ErrorFeedback(find_codec(name), x.numel(), x.dtype)
    memory.encode(x)
    assert memory.residual.isfinite().all()


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        ("fp16", torch.float32, 65504.0),
        ("fp16", torch.bfloat16, 65536.0),
        ("bf16", torch.float64, None),
        ("int8", torch.float64, None),
        ("top_k:1", torch.float64, None),
    ],
)
def test_finite_values_stay_finite(name, dtype, most):
    x = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max, 1.0], dtype=dtype)
    back = there_and_back(name, x)
    assert back.isfinite().all()
    assert back[0] > 0 > back[1]
    if most:
        assert back[:2].tolist() == [most, -most]


def test_what_is_cut_off_at_the_range_comes_later():
    memory = ErrorFeedback(find_codec("fp16"), 1, torch.float32)
    sent = [decode(1, memory.encode(torch.tensor([x])), 1, torch.float32).item() for x in (100_000.0, 0.0, 0.0)]
    assert sum(sent) == 100_000.0
    assert memory.residual.item() == 0.0


@pytest.mark.parametrize("name", ["fp16", "bf16", "top_k:0.01", "top_k:0.3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_telescope_exactly(name, dtype):
    """The sum of what was decoded is the sum of what was given less the residual: here every sum is exact."""
    n, rounds = 300, 25
    memory, kind = ErrorFeedback(find_codec(name), n, dtype), find_codec(name)
    given = torch.zeros(n, dtype=torch.float64)
    heard = torch.zeros(n, dtype=torch.float64)
    for _ in range(rounds):
        x = torch.randint(-128, 129, (n,)).to(dtype) / 64  # few enough digits for float32 to hold any sum of them
        given += x.double()
        heard += decode(kind.code, memory.encode(x), n, torch.float64)
        assert torch.equal(heard, given - memory.residual.double())


@settings(max_examples=40)
@given(st.integers(0, 3000), st.integers(1, 8), st.sampled_from(NAMES), st.integers(0, 2**31))
def test_sums_telescope_up_to_rounding(n, rounds, name, seed):
    generator = torch.Generator().manual_seed(seed)
    memory, kind = ErrorFeedback(find_codec(name), n, torch.float32), find_codec(name)
    given, heard = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for _ in range(rounds):
        x = torch.randn(n, generator=generator)
        given += x.double()
        heard += decode(kind.code, memory.encode(x), n, torch.float64)
    assert torch.allclose(heard, given - memory.residual.double(), rtol=0, atol=rounds * 1e-5)


@pytest.mark.parametrize(("name", "large"), [("int8", 100.0), ("top_k:0.05", 0.05)])
def test_without_a_memory_small_elements_are_never_heard_of(name, large):
    """Why there is error feedback: large elements hide the small ones for good, unless those add up."""
    x = torch.full((100,), 0.01)
    x[:6] = large
    kind, memory = find_codec(name), ErrorFeedback(find_codec(name), 100, torch.float32)
    forgetful, mindful = torch.zeros(100), torch.zeros(100)
    for _ in range(400):
        forgetful += there_and_back(name, x)
        mindful += decode(kind.code, memory.encode(x), 100, torch.float32)
    assert (forgetful[6:] == 0).all()
    assert torch.allclose(mindful[6:], torch.full((94,), 4.0), atol=1.0)
    assert torch.allclose(mindful, 400 * x - memory.residual, rtol=1e-4, atol=1e-3)


def test_parts_of_a_vector_have_their_own_memory():
    whole, parts = (ErrorFeedback(find_codec("fp16"), 100, torch.float32) for _ in range(2))
    for _ in range(3):
        x = torch.randn(100)
        expected = whole.encode(x)
        found = torch.cat([parts.encode(x[:37]), parts.encode(x[37:], 37)])
        assert torch.equal(expected, found)
    assert torch.equal(whole.residual, parts.residual)


def test_bytes_on_the_wire():
    n = 1_000_000
    sizes = {name: find_codec(name).size(n) for name in ("fp16", "bf16", "int8", "top_k", "top_k:0.5")}
    assert sizes == {"fp16": 2 * n, "bf16": 2 * n, "int8": n + 4 * 977, "top_k": 80_000, "top_k:0.5": 4 * n}
    assert find_codec("top_k:0.001").size(10) == 8  # at least one
    assert [find_codec(name).size(0) for name in NAMES] == [0] * len(NAMES)


def test_what_does_not_fit_is_refused():
    kind = find_codec("int8")
    data = kind.encode(torch.randn(10))
    with pytest.raises(ConfigError, match="14 bytes do not hold 11"):
        decode(kind.code, data, 11, torch.float32)
    with pytest.raises(ConfigError, match="unknown code 9"):
        decode(9, data, 10, torch.float32)
    wild = torch.cat([torch.tensor([12], dtype=torch.int32).view(torch.uint8), torch.ones(1).view(torch.uint8)])
    with pytest.raises(ConfigError, match="outside its 10"):
        decode(4, wild, 10, torch.float32)
    with pytest.raises(ConfigError, match="zip"):
        find_codec("zip")
