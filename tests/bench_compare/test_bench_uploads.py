"""`python -m benchmarks uploads`: its workload and bad input. What it measures is in benchmarks/results."""

from __future__ import annotations

import numpy as np
import pytest
from rayps_client.rows import Batch

from benchmarks.__main__ import main
from benchmarks.federated.uploads import CODINGS
from benchmarks.federated.uploads_work import Digits
from rayps.strategies.catalogue import parse

pytestmark = pytest.mark.bench


def test_a_coding_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["uploads", "--codings", "int4"]) == 2
    assert "there is no coding 'int4': give some of plain, int8" in capsys.readouterr().err
    for options in CODINGS.values():
        parse(f"fedavg:{options}clients=remote(least=8)")


def test_the_gradient_is_that_of_the_loss() -> None:
    work, generator = Digits(), np.random.default_rng(1)
    work.hidden = 5
    batch = Batch(generator.normal(size=(6, 784)), generator.integers(0, 10, 6), 6)
    parameters = {name: value.astype(np.float64) for name, value in work.parameters().items()}
    _, gradient = work.loss_and_gradient(parameters, batch)
    for name, value in parameters.items():
        at = int(np.abs(gradient[name]).argmax())
        losses = []
        for step in (1e-3, -1e-3):
            value.reshape(-1)[at] += step
            losses.append(work.loss_and_gradient(parameters, batch)[0])
            value.reshape(-1)[at] -= step
        assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(gradient[name].reshape(-1)[at], rel=2e-2)
