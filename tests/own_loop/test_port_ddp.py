"""A usual script for torch DDP and its port: as many lines differ as the page shows, and both train the same model."""

import difflib
import re
import subprocess
import sys

import pytest
import torch
from required_module import required
from test_examples import EXAMPLES, module

import rayps

PAGE = EXAMPLES.parent / "docs" / "porting.md"


def test_the_page_shows_what_differs():
    def lines(name):
        text = (EXAMPLES / name).read_text(encoding="utf-8").partition('"""\n')[2]  # without the docstring
        return [line for line in text.splitlines() if line.strip()]

    found = difflib.ndiff(lines("porting/usual_ddp.py"), lines("porting/port_ddp.py"))
    changed = [f"{line[0]} {line[2:].strip()}" for line in found if line[0] in "-+"]
    (shown,) = re.findall(r"```text\n(- import.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown.splitlines() == changed
    assert sum(line[0] == "+" for line in changed) == 6


def scalars(folder):
    """From the name of a curve in TensorBoard's files to its values; every curve has a value at each step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.ray
def test_the_port_is_ddp_within_rounding(ray_cluster, tmp_path, monkeypatch):
    """With argparse, GradScaler and autocast, clipping, BatchNorm, EMA, schedulers, early stopping and TensorBoard."""
    required("tensorboard")
    options = ["--rows=330", "--epochs=8", "--patience=1", "--lr=0.2", "--half"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(EXAMPLES / "porting" / "usual_ddp.py"), *options, f"--out={tmp_path / 'ddp'}"]
    done = subprocess.run([*torchrun, *script], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", ["port_ddp.py", *options, f"--out={tmp_path / 'port'}"])
    rayps.run(module("porting/port_ddp", monkeypatch).main, workers=2, cluster=ray_cluster, progress=False)
    expected, found = scalars(tmp_path / "ddp"), scalars(tmp_path / "port")
    assert found.keys() == expected.keys() == {"loss", "norm", "held_out", "held_out_average"}
    for name, curve in expected.items():
        assert found[name] == [(step, pytest.approx(value, rel=1e-5)) for step, value in curve], name
    epochs = len(expected["held_out"])
    assert 2 < epochs < 8, "it has stopped early"
    assert len(expected["loss"]) == 6 * epochs
    for name in ("best.pt", "average.pt"):
        ours, theirs = torch.load(tmp_path / "port" / name), torch.load(tmp_path / "ddp" / name)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
