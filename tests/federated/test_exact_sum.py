"""The exact sum against rational numbers, in any order and over any split, and over rings."""

import math
import random
from fractions import Fraction

import pytest
import torch
from rayps_client.errors import ConfigError
from test_ring import every, form

from rayps.federated.rules.exact_sum import DIGIT, FIRST, LIMBS, NOT_FINITE, TOO_LARGE, ExactSum

DTYPES = list(LIMBS)


def quantum(dtype):
    return Fraction(1, 1 << (FIRST + DIGIT * (LIMBS[dtype] - 1)))


def replies(dtype, count, size=257, seed=0, spread=6, whole=True):
    print("seed", seed)
    generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    found = []
    for _ in range(count):
        x = torch.randn(size, generator=generator, dtype=torch.float64)
        x *= 10.0 ** (spread * torch.rand(size, generator=generator, dtype=torch.float64) - spread)
        weight = dice.randint(1, 700) if whole else dice.uniform(0.1, 3)
        found.append((x.to(dtype), weight))
    return found


def summed(dtype, parts, size=257):
    exact = ExactSum(size, dtype)
    for x, weight in parts:
        assert exact.add(x, weight) is None
    return exact


def truth(parts, at):
    """The sum as a rational number: every float is one."""
    return sum(Fraction(float(x[at])) * Fraction(weight) for x, weight in parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole", [True, False])
def test_sum_and_mean_are_those_of_rational_numbers(dtype, whole):
    parts = replies(dtype, 23, whole=whole)
    exact = summed(dtype, parts)
    weight = sum(Fraction(w) for _, w in parts)
    assert exact.count == 23
    assert exact.weight == weight if whole else abs(exact.weight - weight) <= 23 * quantum(dtype)
    total, mean = exact.total(torch.float64), exact.mean()
    assert mean.dtype == dtype
    for at in range(257):
        true, rounding = truth(parts, at), Fraction(2) ** -52
        bound = 23 * quantum(dtype) / 2 + sum(abs(Fraction(float(x[at])) * Fraction(w)) for x, w in parts) * rounding
        assert abs(Fraction(float(total[at])) - true) <= bound
        info = torch.finfo(dtype)
        half = max(abs(true / weight), Fraction(info.smallest_normal)) * Fraction(info.eps) / 2
        assert abs(Fraction(float(mean[at])) - true / weight) <= half * Fraction(101, 100) + bound / weight


def test_whole_weights_in_float32_give_what_fsum_gives():
    parts = replies(torch.float32, 50, spread=2)
    total = summed(torch.float32, parts).total(torch.float64)
    for at in range(257):
        law = math.fsum(float(x[at]) * w for x, w in parts)
        assert float(total[at]) == pytest.approx(law, rel=1e-15, abs=50 * 2.0**-51)


def test_float64_is_rounded_once():
    """Numbers that cancel: a plain sum of floats loses all that is left."""
    terms = [([1.0, 1e6], 3), ([2.0**-70, 1e-9], 5), ([-1.0, -1e6], 3)]
    parts = [(torch.tensor(x, dtype=torch.float64), weight) for x, weight in terms]
    exact = summed(torch.float64, parts, 2)
    assert exact.total().tolist() == [float(truth(parts, 0)), pytest.approx(5e-9, rel=1e-15)]
    assert exact.mean().tolist() == [float(truth(parts, 0) / 11), pytest.approx(5e-9 / 11, rel=1e-15)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [0.1, 1 / 3, 7, (1 << 24) + 1])
def test_a_product_is_kept_beyond_the_bits_of_a_float(dtype, weight):
    x = torch.tensor([1 / 3, -0.7, 1e-5], dtype=dtype)
    exact = summed(dtype, [(x, weight)], 3)
    for at in range(3):
        kept = sum(Fraction(int(limb), 1 << (FIRST + DIGIT * j)) for j, limb in enumerate(exact.limbs[:, at]))
        true = Fraction(float(x[at])) * Fraction(weight)
        assert abs(kept - true) <= 2 * quantum(dtype) + abs(true) * Fraction(1, 1 << 100)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole", [True, False])
def test_same_bits_in_any_order_and_over_any_split(dtype, whole):
    parts = replies(dtype, 31, seed=3, whole=whole)
    law = summed(dtype, parts)
    plain = set()
    for seed in range(5):
        random.Random(seed).shuffle(parts)
        plain.add(tuple(sum(x * w for x, w in parts).tolist()))
        cuts = sorted(random.Random(seed).sample(range(32), 3))
        shares = [summed(dtype, parts[a:b]) for a, b in zip([0, *cuts], [*cuts, 31], strict=True)]
        limbs = torch.stack([share.limbs for share in shares]).sum(0)
        assert torch.equal(limbs, law.limbs)
    assert len(plain) > 1, "a plain sum does not depend on the order: the test shows nothing"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_reply_comes_back_bit_for_bit(dtype):
    values = [0.0, -0.0, 1e-30, 3.0, -1 / 3, torch.finfo(dtype).smallest_normal, torch.finfo(dtype).tiny / 2, 1000.0]
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    mean = summed(dtype, [(x, 7)], len(x)).mean()
    assert torch.equal(mean.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_over_a_ring(size, dtype):
    parts = replies(dtype, 7, seed=5)
    law = summed(dtype, parts)
    lone = torch.tensor([1e-30, -0.0, 2 / 3], dtype=dtype)

    def work(ring):
        mine = summed(dtype, parts[ring.rank :: size])
        mine.sum_over_ranks(ring)
        alone = summed(dtype, [(lone, 9)] if ring.rank == size - 1 else [], 3)
        alone.sum_over_ranks(ring)
        nobody = ExactSum(3, dtype)
        nobody.sum_over_ranks(ring)
        return mine.mean(), mine.weight, alone.mean(), nobody.count

    rings = form(size)
    try:
        for mean, weight, single, none in every(rings, work):
            assert torch.equal(mean, law.mean()) and weight == law.weight and none == 0
            assert torch.equal(single.view(torch.uint8), lone.view(torch.uint8))
    finally:
        every(rings, lambda ring: ring.close())


@pytest.mark.parametrize(
    "bad, why",
    [(math.nan, NOT_FINITE), (math.inf, NOT_FINITE), (-math.inf, NOT_FINITE), (1e9, TOO_LARGE), (-1e9, TOO_LARGE)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_cannot_be_added_is_left_out_by_name(bad, why, dtype):
    parts = replies(dtype, 3)
    exact, law = summed(dtype, parts[:2]), summed(dtype, parts)
    x = torch.zeros(257, dtype=dtype)
    x[200] = bad
    assert exact.add(x, 10) == why
    assert exact.add(*parts[2]) is None
    assert torch.equal(exact.limbs, law.limbs) and exact.count == 3


def test_the_largest_values_add_without_overflow():
    """2^20 replies of the largest size stay within int64; here as limbs times 2^20."""
    x = torch.tensor([-(2.0**32) * (1 - 2.0**-50)] * 3, dtype=torch.float64)
    exact = summed(torch.float64, [(x / 3.3, 3.3)], 3)
    limbs = [int(limb) << 20 for limb in exact.limbs[:, 0]]
    assert all(abs(limb) < 1 << 63 for limb in limbs)
    assert abs(limbs[0]) > 1 << 61


def test_a_fixed_divisor_and_beginning_anew():
    exact = summed(torch.float64, [(torch.ones(3, dtype=torch.float64), 5), (torch.ones(3, dtype=torch.float64), 1)], 3)
    assert exact.mean(12).tolist() == [0.5] * 3 and exact.mean().tolist() == [1.0] * 3
    exact.clear()
    assert exact.count == 0 and not exact.limbs.any() and exact.total().tolist() == [0.0] * 3
    with pytest.raises(ConfigError, match="no replies"):
        exact.mean()


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, "3"])
def test_weights_that_cannot_be(weight):
    with pytest.raises(ConfigError, match="weight"):
        ExactSum(3, torch.float32).add(torch.zeros(3), weight)


def test_vectors_that_cannot_be():
    with pytest.raises(ConfigError, match="4 elements, but the model has 3"):
        ExactSum(3, torch.float32).add(torch.zeros(4), 1)
    with pytest.raises(ConfigError, match="int64"):
        ExactSum(3, torch.int64)


def test_a_mean_whose_weights_are_too_small_to_be_counted_is_zero():
    """As FedBuff's are with a large decay where all updates of a buffer are old: 0/0 before."""
    made = ExactSum(3, torch.float32)
    for _ in range(2):
        made.add(torch.ones(3), 2.0**-200)
    assert made.weight == 0 and made.mean().tolist() == [0.0] * 3
