"""Sparse tables with workers on a GPU."""

import pytest
import test_gpu
from small_work import distance
from test_gpu import CLOSE, train
from test_hybrid import Films, both
from test_hybrid import plain as plain_films

cuda, gpu_ray = test_gpu.cuda, test_gpu.gpu_ray

pytestmark = pytest.mark.gpu


@pytest.mark.ray
@pytest.mark.parametrize("told", [False, True], ids=["plain", "prefetch"])
def test_tables(gpu_ray, told):
    work = Films(told)
    found = train(work, "hybrid:servers=2,staleness=0", gpu_ray, timeout=120.0)
    assert distance(both(found.model()), both(plain_films(work, 2)[0])) < CLOSE
