"""A project whose job needs all of its code on every host: a lazy import, a relative data file, a lower folder."""

from __future__ import annotations

from pathlib import Path

WORK = '''
from pathlib import Path

import torch

import rayps

class Line(rayps.Workload):
    """Learns the sum of four columns, scaled by the number in a file and shifted by a module that is imported late."""

    def model(self):
        return torch.nn.Linear(4, 1)

    def data(self):
        scale = float(Path("data/scale.txt").read_text())
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return rayps.data.tensors(x, scale * x.sum(dim=1, keepdim=True), batch_size=8)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05)

    def loss(self, model, batch):
        from late import SHIFT

        return ((model(batch.x) - batch.y - SHIFT) ** 2).mean()

    def evaluate(self, model, batch):
        from late import SHIFT

        network = int(Path("/proc/self/ns/net").readlink().name.strip("net:[]")) % 1_000_000
        return {
            "shift": torch.tensor(SHIFT),
            "scale": torch.tensor(float(Path("data/scale.txt").read_text())),
            "network": torch.tensor(float(network)),
        }


class Needs(Line):
    """Also needs a package that is not installed."""

    def evaluate(self, model, batch):
        import rayps_tiny_test_package

        return {"tiny": torch.tensor(float(rayps_tiny_test_package.NUMBER))}
'''


def project(folder: Path) -> Path:
    """Write the project: `src/line.py`, a module beside it, a data file, and files that must not travel."""
    files = {
        "src/line.py": WORK,
        "src/late.py": "SHIFT = 0.25\n",
        "data/scale.txt": "2.0",
        ".gitignore": "*.bin\n",
        ".env": "KEY=secret\n",
        "large.bin": "x" * 5000,
        "run.sh": "#!/bin/sh\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "run.sh").chmod(0o755)
    (folder / "alias.txt").symlink_to("data/scale.txt")
    return folder


def wheel(folder: Path, number: float = 7.0) -> Path:
    """Write a wheel of a package with one module by hand, as no network and no build tool are used."""
    import zipfile

    name = "rayps_tiny_test_package"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", f"NUMBER = {number}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", f"{name}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path
