"""Compressed learning of real digits ends within a stated band of the uncompressed one."""

from pathlib import Path

import pytest
from small_work import train

from rayps.workload.base import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BANDS = [  # strategy, by how much its accuracy on images not learned from may be below all_reduce's
    ("all_reduce:compression=fp16", 0.01),
    ("all_reduce:compression=int8", 0.01),
    ("all_reduce:compression=top_k:0.1", 0.02),
    ("all_reduce:compression=top_k", 0.07),
    ("parameter_server:shards=2,compression=int8", 0.01),
    ("parameter_server:staleness=3,compression=int8", 0.02),
]


def digits(strategy):
    return train(load("digits.py:Digits", str(EXAMPLES)), strategy, workers=4, epochs=2).metrics["accuracy"]


@pytest.fixture(scope="module")
def uncompressed():
    found = digits("all_reduce")
    assert found > 0.94
    return found


@pytest.mark.parametrize(("strategy", "band"), BANDS)
def test_digits(strategy, band, uncompressed):
    assert digits(strategy) > uncompressed - band
