"""The package rayps-chaos as a wheel: it has its own files only, and needs rayps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_wheels import ROOT, metadata, names, run


def test_the_wheel_has_its_own_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: it builds the wheels")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=ROOT / "chaos")
    (wheel,) = tmp_path.glob("*.whl")
    assert {name.partition("/")[0] for name in names(wheel)} == {"rayps_chaos", "rayps_chaos-0.1.0.dist-info"}
    assert "Requires-Dist: rayps==0.1.0" in metadata(wheel)
