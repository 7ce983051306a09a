"""Measure how long a job makes no step while its workers change: beside Ray Train's elastic trainer, on equal changes.

Each contender runs in a process of its own, on a cluster of two nodes on this machine: the second node joins while two
workers train, so that there is room for four, and is drained with a deadline later, so that two must leave before its
processes are killed. Every worker records the time of each step.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from rayps_client.errors import ConfigError, TrainingError

from rayps.bench.table import BenchRow, Opt

STRATEGIES = {  # from a contender's name to its strategy
    "all_reduce": "all_reduce",
    "servers": "parameter_server:shards=2",
    "bounded": "parameter_server:shards=2,staleness=3",
    "async": "parameter_server:shards=2,staleness=none",
}
RAY_TRAIN = "ray_train"
SECONDS = 300.0  # the longest time of one contender


@dataclass(frozen=True, slots=True)
class ChangeRow(BenchRow):
    """One change of one contender."""

    columns: ClassVar[str] = (
        "contender | change: workers | pause: s without a step | "
        "to_first_step: s to the first step of the new group | repeated: steps computed again"
    )

    contender: str
    change: str  # "2 to 4", "4 to 2"
    to_first_step: float  # seconds from the notice to the first step of the new group
    pause: float  # the longest time between two steps of the job in these seconds
    repeated: int  # steps of workers that were computed again, after the notice

    @property
    def note(self) -> str:
        """The row in a line."""
        return f"{self.contender} {self.change}: {self.pause:.2f} s without a step"


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one process: when it began, the process, and a number that no other step has."""

    at: float
    pid: int
    number: int


def read_steps(folder: Path) -> list[Step]:
    """Return the steps that workers have recorded in `folder`, in the order of time."""
    found = []
    for path in folder.glob("steps-*"):
        lines = path.read_text().splitlines(keepends=True)
        for line in lines if not lines or lines[-1].endswith("\n") else lines[:-1]:
            at, number = line.split()
            found.append(Step(float(at), int(path.name.removeprefix("steps-")), int(number)))
    return sorted(found, key=lambda step: step.at)


def find_new_group(steps: Sequence[Step], size: int) -> tuple[float, set[int]] | None:
    """Return when a group of `size` processes began its first step, and the processes; None if there is no such group.

    `steps` are those after the notice. The group are the processes of the last steps: all of them have made a step by
    then, and no other process makes one after that.
    """
    group: set[int] = set()
    for step in reversed(steps):
        if step.pid not in group and len(group) == size:
            break
        group.add(step.pid)
    if len(group) < size:
        return None
    firsts = [min(step.at for step in steps if step.pid == pid) for pid in group]
    others = [step.at for step in steps if step.pid not in group]
    complete = max(*firsts, *others)  # all of the group have begun, and all others have ended
    began = [step.at for step in steps if step.pid in group and step.at >= complete]
    return (min(began), group) if began else None


def make_change_row(contender: str, change: str, steps: Sequence[Step], notice: float, size: int) -> ChangeRow | None:
    """Return the row of the change to `size` workers after the time `notice`, or None if it has not happened.

    `steps` are those until the next notice. A pause is a time in which no worker begins a step.
    """
    found = find_new_group([step for step in steps if step.at > notice], size)
    if found is None:
        return None
    first = found[0]
    begins = [max((step.at for step in steps if step.at <= notice), default=notice)]
    begins += [step.at for step in steps if notice < step.at <= first]
    pause = max((after - before for before, after in itertools.pairwise(begins)), default=0.0)
    known = {step.number for step in steps if step.at <= notice}
    later = [step.number for step in steps if step.at > notice]
    repeated = len(later) - len(set(later) - known)
    return ChangeRow(contender, change, first - notice, pause, repeated)


def bench_changes(
    names: Annotated[
        Sequence[str],
        Opt("What to measure: all_reduce, servers, bounded, async, ray_train (its elastic trainer).", "--contenders"),
    ] = ("all_reduce", "servers", "bounded", "async", "ray_train"),
    *,
    step_seconds: Annotated[float, Opt("The sleep in each step, in place of compute.")] = 0.05,
    megabytes: Annotated[float, Opt("10^6 bytes of parameters.")] = 4.0,
    deadline: Annotated[float, Opt("Seconds between the notice and the end of the second node.")] = 30.0,
    report: Callable[[ChangeRow], None] = lambda row: None,
) -> list[ChangeRow]:
    """Run the contenders one after the other; return two rows for each: growing from 2 to 4 workers, and shrinking.

    `step_seconds`: the sleep in each step, in place of compute. `megabytes`: 10^6 bytes of parameters. `deadline`: the
    seconds between the notice and the end of the second node. `report` is called with each row.

    Raises:
        ConfigError: there is no contender of a name.
        TrainingError: a contender failed; the text has the end of its output.
    """
    rows = []
    for name in names:
        if name not in (*STRATEGIES, RAY_TRAIN):
            raise ConfigError(f"there is no contender {name!r}: give some of {', '.join([*STRATEGIES, RAY_TRAIN])}")
        for row in _run(name, step_seconds, megabytes, deadline):
            report(row)
            rows.append(row)
    return rows


def _run(name: str, step_seconds: float, megabytes: float, deadline: float) -> list[ChangeRow]:
    with tempfile.TemporaryDirectory(prefix="rayps-bench-") as folder:
        config = {
            "contender": name,
            "strategy": STRATEGIES.get(name),
            "folder": folder,
            "step_seconds": step_seconds,
            "megabytes": megabytes,
            "deadline": deadline,
        }
        command = [sys.executable, "-m", "benchmarks.changes.changing_script", json.dumps(config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        notices = Path(folder) / "notices.json"
        if not notices.exists():
            raise TrainingError(f"{name} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        steps = read_steps(Path(folder))
        found = []
        changes = json.loads(notices.read_text())
        ends = [notice for _, notice, _ in changes[1:]] + [float("inf")]
        for (change, notice, size), end in zip(changes, ends, strict=True):
            row = make_change_row(name, change, [step for step in steps if step.at < end], notice, size)
            if row is None:
                raise TrainingError(f"{name} made no step with {size} workers:\n{(done.stdout + done.stderr)[-2000:]}")
            found.append(row)
        return found
