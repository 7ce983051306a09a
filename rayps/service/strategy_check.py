"""Strategies of a user's own, read in a child process under a deadline: the user's file never runs in the service."""

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
from typing import Any

from rayps.core.errors import ConfigError
from rayps.core.strategy import Phase
from rayps.core.topology import servers_of
from rayps.service.ray_process import python_path
from rayps.strategies.catalogue import wire

CHECK_SECONDS = 60.0  # to start a Python, import the user's file (with torch, most often) and answer
MOST_AT_ONCE = 2  # children of the service; further requests wait for their turn
_CHECKS = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="rayps-strategy")


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """What the service asks of a phase's strategy."""

    name: str
    servers: bool  # it keeps parameters on servers
    tables: bool  # it trains sparse tables


@dataclass(frozen=True, slots=True)
class CheckedStrategy:
    """A strategy in wire form, and the facts of its phases."""

    strategy: Any
    phases: list[PhaseFacts]


def checked(phases: list[Phase]) -> CheckedStrategy:
    """What is known of a strategy that has been read."""
    facts = [
        PhaseFacts(each.strategy.name, servers_of(each.strategy) is not None, each.strategy.tables is not None)
        for each in phases
    ]
    return CheckedStrategy(wire(phases), facts)


async def check_in_child(strategy: Any, working_dir: str, workers: int) -> CheckedStrategy:
    """As `check`, without blocking the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_CHECKS, check, strategy, working_dir, workers)


def check(strategy: Any, working_dir: str, workers: int, *, seconds: float | None = None) -> CheckedStrategy:
    """Read a strategy that names classes in files of `working_dir`, in a child process that is killed after `seconds`.

    Raises:
        ConfigError: it cannot be found or used, its file raises or does not return in time.
    """
    request = {"strategy": strategy, "working_dir": working_dir, "workers": workers}
    answer = _ask(request, CHECK_SECONDS if seconds is None else seconds)
    return CheckedStrategy(answer["strategy"], [PhaseFacts(**facts) for facts in answer["phases"]])


def strategies_in(working_dir: str, *, seconds: float = CHECK_SECONDS) -> tuple[list[Any], list[Any]]:
    """Return the strategies that files of a folder define, as `rayps.strategies.catalogue.described`.

    The second list holds those that cannot be read, with the message. Raises ConfigError: a file does not return in
    time.
    """
    answer = _ask({"list": True, "working_dir": str(Path(working_dir).absolute())}, seconds)
    return answer["found"], answer["broken"]


def _ask(request: dict[str, Any], seconds: float) -> dict[str, Any]:
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
        said, _ = child.communicate(json.dumps(request | {"seconds": seconds}).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"strategy: a file in {request['working_dir']} has not been imported within {seconds:g} s: look for "
            "what it waits for, and do such things in round(), not when the file is imported",
            field="strategy",
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # with what the user's file has started there
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    try:
        answer: dict[str, Any] = json.loads(said)
    except ValueError:
        raise ConfigError(
            f"strategy: the process that imported files of {request['working_dir']} ended with exit code "
            f"{child.returncode} and no answer: a file there exits or crashes when it is imported",
            field="strategy",
        ) from None
    if "error" in answer:
        raise ConfigError(answer["error"]["message"], field=answer["error"]["field"])
    return answer
