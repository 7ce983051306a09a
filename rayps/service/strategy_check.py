"""Read a user's own strategies in a child process with a deadline. The service itself never runs the user's files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from rayps.core.errors import ConfigError
from rayps.core.strategy import Phase
from rayps.core.topology import servers_of
from rayps.core.values import Json
from rayps.service.ray_process import python_path
from rayps.strategies.catalogue import StrategyDescription, StrategySpec, wire

CHECK_SECONDS = 60.0  # seconds for the child to start, import the user's file (usually with torch) and answer
MOST_AT_ONCE = 2  # the most child processes at one time; further requests wait
_CHECKS = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="rayps-strategy")


class CheckRequest(TypedDict):
    """A request to the child: check `strategy` for `workers`, or if `list` is true list the folder's strategies."""

    working_dir: str
    seconds: float  # seconds after which the child ends itself
    strategy: NotRequired[StrategySpec]
    workers: NotRequired[int]
    list: NotRequired[bool]


class BrokenFile(TypedDict):
    """A strategy that cannot be read, and the reason."""

    name: str
    message: str


class CheckError(TypedDict):
    """The reason why a strategy is refused, and the field of the job that caused the refusal."""

    message: str
    field: str


class PhaseDict(TypedDict):
    """`PhaseFacts` as JSON data."""

    name: str
    servers: bool
    tables: bool


class CheckAnswer(TypedDict, total=False):
    """The child's answer: `strategy` and `phases` after a check, `found` and `broken` after a list, or `error`."""

    strategy: Json
    phases: list[PhaseDict]
    found: list[StrategyDescription]
    broken: list[BrokenFile]
    error: CheckError


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """The facts about the strategy of one phase of a job that the service needs."""

    name: str
    servers: bool  # the strategy keeps parameters on servers
    tables: bool  # the strategy trains sparse tables


@dataclass(frozen=True, slots=True)
class CheckedStrategy:
    """A strategy that could be read: its wire form, and the facts of its phases."""

    strategy: Json
    phases: list[PhaseFacts]


def checked(phases: list[Phase]) -> CheckedStrategy:
    """Return the wire form and the facts of a strategy, given its phases."""
    facts = [
        PhaseFacts(each.name, servers_of(each.strategy) is not None, each.strategy.tables is not None)
        for each in phases
    ]
    return CheckedStrategy(wire(phases), facts)


async def check_in_child(strategy: StrategySpec, working_dir: str, workers: int) -> CheckedStrategy:
    """Call `check` in a thread, without blocking the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_CHECKS, check, strategy, working_dir, workers)


def check(strategy: StrategySpec, working_dir: str, workers: int, *, seconds: float | None = None) -> CheckedStrategy:
    """Read a strategy whose classes are in files of `working_dir`, in a child process that is killed after `seconds`.

    Raises:
        ConfigError: a class cannot be found or used, or its file raises or does not return in time.
    """
    answer = _run_child(
        {
            "strategy": strategy,
            "working_dir": working_dir,
            "workers": workers,
            "seconds": CHECK_SECONDS if seconds is None else seconds,
        }
    )
    return CheckedStrategy(answer["strategy"], [PhaseFacts(**facts) for facts in answer["phases"]])


def strategies_in(
    working_dir: str, *, seconds: float = CHECK_SECONDS
) -> tuple[list[StrategyDescription], list[BrokenFile]]:
    """Return two lists: the strategies that a folder's files define, and those that cannot be read with the reasons.

    `rayps.strategies.catalogue.described` makes the descriptions.

    Raises:
        ConfigError: a file does not return in time.
    """
    answer = _run_child({"list": True, "working_dir": str(Path(working_dir).absolute()), "seconds": seconds})
    return answer["found"], answer["broken"]


def _run_child(request: CheckRequest) -> CheckAnswer:
    seconds = request["seconds"]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "rayps.service.strategy_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=request["working_dir"],
        env={**os.environ, "PYTHONPATH": python_path(), "RAY_ENABLE_AUTO_CONNECT": "0"},
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(json.dumps(request).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"strategy: a file in {request['working_dir']} has not been imported within {seconds:g} s: find the slow "
            "code at the file's top level, and move it into round()",
            field="strategy",
        ) from None
    finally:
        # kill the process group, because the user's file may have started processes
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    try:
        answer: CheckAnswer = json.loads(output)
    except ValueError:
        raise ConfigError(
            f"strategy: the process that imported files of {request['working_dir']} ended with exit code "
            f"{child.returncode} and no answer: a file there exits or crashes when it is imported",
            field="strategy",
        ) from None
    if "error" in answer:
        raise ConfigError(answer["error"]["message"], field=answer["error"]["field"])
    return answer
