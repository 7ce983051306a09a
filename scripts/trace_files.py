#!/usr/bin/env python3
"""List the files of the package whose functions run while a small job trains.

A job is `rayps.train` with a linear model on the threads cluster: no service, no API, no Ray. Each file counts from
which at least one function ran in any thread. These do not count: module bodies, class bodies, code that `dataclasses`
generates, and functions that an import calls (decorators, registries).

    python scripts/trace_files.py                                              # all_reduce, one worker
    python scripts/trace_files.py --strategy parameter_server:shards=2 --workers 2
    python scripts/trace_files.py --strategy fedavg --clients 4 --json
    python scripts/trace_files.py --from batch --to step                       # the journey of a gradient

With `--from` and `--to`, only the last journey counts: from the call of a function of the first name to the return of
one of the second, in all threads. A hop is a call from one file into another.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rayps"
COMPREHENSIONS = {"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"}  # a part of the function around them


class Tracer:
    """Record the functions of the files below `package` that any thread enters between `start` and `stop`."""

    def __init__(self, package: Path) -> None:
        self.prefix = f"{package}/"
        self.codes: set[CodeType] = set()

    def start(self) -> None:
        """Trace this thread, and each thread that starts from now on."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def stop(self) -> None:
        """Trace no thread that starts from now on, nor this one."""
        sys.setprofile(None)
        threading.setprofile(None)

    def files(self) -> dict[str, list[str]]:
        """File, relative to the package, -> qualified names of its functions that ran; both sorted."""
        found: dict[str, list[str]] = {}
        for code in self.codes:
            found.setdefault(code.co_filename.removeprefix(self.prefix), []).append(code.co_qualname)
        return {file: sorted(found[file]) for file in sorted(found)}

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in self.codes or not code.co_filename.startswith(self.prefix):
            return
        if is_function(code) and not self._importing(frame):
            self.codes.add(code)

    def _importing(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(self.prefix):
                return True
            frame = frame.f_back
        return False


class Journey(Tracer):
    """Records what runs from a call of a function `first` to the return of a function `last`; the last time counts."""

    def __init__(self, package: Path, first: str, last: str) -> None:
        super().__init__(package)
        self._first, self._last = first, last
        self._open: list[tuple[str, CodeType]] | None = None  # (caller's file, called function), in order
        self.calls: list[tuple[str, CodeType]] = []

    @property
    def hops(self) -> int:
        """The number of calls from one file into another."""
        return sum(caller != code.co_filename for caller, code in self.calls)

    def files(self) -> dict[str, list[str]]:
        """See `Tracer.files`."""
        self.codes = {code for _, code in self.calls}
        return super().files()

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(self.prefix) or not is_function(code):
            return
        if event == "call":
            if code.co_name == self._first and self._open is None:
                self._open = []
            if self._open is not None:
                self._open.append((_find_caller(frame, self.prefix), code))
        elif event == "return" and code.co_name == self._last and self._open is not None:
            self.calls, self._open = self._open, None


def _find_caller(frame: FrameType, prefix: str) -> str:
    """The file of the package from which a function was called, past frames of other packages; "" if there is none."""
    above = frame.f_back
    while above is not None and not above.f_code.co_filename.startswith(prefix):
        above = above.f_back
    return "" if above is None else above.f_code.co_filename


def is_function(code: CodeType) -> bool:
    """Whether the code is that of a function or lambda: not a module's, a class body's or a comprehension's."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in COMPREHENSIONS


def by_folder(files: Sequence[str]) -> dict[str, list[str]]:
    """Folder -> names of its files; files at the package's root are under `.`."""
    folders: dict[str, list[str]] = {}
    for file in files:
        path = Path(file)
        folders.setdefault(str(path.parent), []).append(path.name)
    return folders


def trace(strategy: str, workers: int = 1, clients: int = 0, tracer: Tracer | None = None) -> dict[str, list[str]]:
    """Train two epochs of a linear model under `strategy` and return `Tracer.files()`.

    `clients`: divide the 24 rows among that many clients, for federated strategies; 0: no clients.
    """
    tracer = Tracer(PACKAGE) if tracer is None else tracer
    tracer.start()  # before the package is imported, so that it starts no thread untraced
    try:
        train(strategy, workers, clients)
    finally:
        tracer.stop()
    return tracer.files()


def train(strategy: str, workers: int, clients: int) -> None:
    """Train two epochs of a linear model on the threads cluster."""
    import torch

    import rayps
    from rayps.cluster.local import LocalCluster

    class Line(rayps.Workload):
        """Linear regression: 24 rows of three features."""

        def model(self) -> torch.nn.Module:
            return torch.nn.Linear(3, 1)

        def data(self) -> rayps.data.Data:
            x = torch.linspace(-1, 1, 72).reshape(24, 3)
            owners = rayps.data.iid(clients) if clients else None
            return rayps.data.tensors(x, x.sum(1, keepdim=True), batch_size=4, client=owners)

        def loss(self, model: torch.nn.Module, batch: rayps.data.Batch) -> torch.Tensor:
            return torch.nn.functional.mse_loss(model(batch.x), batch.y)

    cluster = LocalCluster()
    try:
        rayps.train(Line(), strategy=strategy, workers=workers, epochs=2, cluster=cluster, progress=False)
    finally:
        cluster.close()


def report(files: dict[str, list[str]], functions: bool) -> str:
    """The files as text, a folder a paragraph; with `functions`, each file's functions too."""
    lines = []
    for folder, names in sorted(by_folder(list(files)).items()):
        lines.append(f"{folder}/  {len(names)}")
        for name in names:
            lines.append(f"    {name}")
            path = name if folder == "." else f"{folder}/{name}"
            lines.extend(f"        {function}" for function in files[path] if functions)
    count = sum(len(names) for names in files.values())
    return "\n".join([*lines, f"{len(files)} files, {count} functions"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--strategy", default="all_reduce", help="as text (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--clients", type=int, default=0, help="divide the rows among clients (federated strategies)")
    parser.add_argument("--functions", action="store_true", help="list each file's functions")
    parser.add_argument("--json", action="store_true", help="strategy, workers, folders and files as one JSON object")
    parser.add_argument("--from", dest="first", metavar="NAME", help="begin a journey with a function of this name")
    parser.add_argument("--to", dest="last", metavar="NAME", help="end it when a function of this name returns")
    chosen = parser.parse_args(arguments)
    if bool(chosen.first) != bool(chosen.last):
        parser.error("give --from and --to together")
    sys.path.insert(0, str(ROOT))
    journey = Journey(PACKAGE, chosen.first, chosen.last) if chosen.first else None
    files = trace(chosen.strategy, chosen.workers, chosen.clients, journey)
    if journey is not None and not journey.calls:
        parser.error(f"no journey from {chosen.first!r} to {chosen.last!r} took place")
    if chosen.json:
        head = {"strategy": chosen.strategy, "workers": chosen.workers, "count": len(files)}
        head |= {} if journey is None else {"hops": journey.hops}
        print(json.dumps({**head, "folders": by_folder(list(files)), "files": files}, indent=1))
    else:
        print(report(files, chosen.functions) + ("" if journey is None else f", {journey.hops} hops"))


if __name__ == "__main__":
    main()
