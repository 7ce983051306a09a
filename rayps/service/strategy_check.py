"""Read a user's own strategies in a child process with a deadline. The service itself never runs the user's files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NotRequired, TypedDict

from rayps_client.errors import ConfigError
from rayps_client.values import Json, JsonObject

from rayps.core.strategy.strategy import Phase
from rayps.core.strategy.topology import servers_of
from rayps.service.local_ray.ray_process import make_python_path
from rayps.strategies.catalogue import StrategyDescription, StrategySpec, own_names, wire

CHECK_SECONDS = 60.0  # seconds for the child to start, import the user's file (usually with torch) and answer
PARAMS_SECONDS = 20.0  # the same for a workload whose parameters are checked; clients wait 30 s for an answer
MOST_AT_ONCE = 2  # the most child processes at one time; further requests wait
_CHECKS = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="rayps-strategy")
log = logging.getLogger(__name__)


class CheckRequest(TypedDict):
    """A request to the child, with the fields of one of four questions.

    `strategy` and `workers`: check the strategy of a job. `list`: list the folder's strategies. `target`, `loop`,
    `params` and `fields`: check the parameters of jobs. `budgets`: check the privacy budgets of built-in strategies.
    """

    working_dir: str
    seconds: float  # seconds after which the child ends itself
    strategy: NotRequired[StrategySpec]
    workers: NotRequired[int]
    list: NotRequired[bool]
    target: NotRequired[str]  # a workload, or a function
    loop: NotRequired[bool]  # the target is a function with a loop of its own
    params: NotRequired[list[JsonObject]]  # the parameters of each job with this target
    fields: NotRequired[list[str]]  # names that no parameter of the target may have
    budgets: NotRequired[list[StrategySpec]]  # strategies in wire form


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
    """The child's answer: `strategy` and `phases` after a check, `found` and `broken` after a list, or `error`.

    After a check of parameters or budgets, `refused` is the error of the first one that is refused, or None.
    `unchecked` is why budgets cannot be checked here.
    """

    strategy: Json
    phases: list[PhaseDict]
    found: list[StrategyDescription]
    broken: list[BrokenFile]
    error: CheckError
    refused: CheckError | None
    unchecked: str | None


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
    parsed: tuple[Phase, ...] | None = None  # the phases themselves; None of a user's own strategy, read in a child


def check_phases(phases: list[Phase]) -> CheckedStrategy:
    """Return the wire form and the facts of a strategy, given its phases."""
    facts = [
        PhaseFacts(each.name, servers_of(each.strategy) is not None, each.strategy.tables is not None)
        for each in phases
    ]
    return CheckedStrategy(wire(phases), facts, tuple(phases))


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


def find_strategies(
    working_dir: str, *, seconds: float = CHECK_SECONDS
) -> tuple[list[StrategyDescription], list[BrokenFile]]:
    """Return two lists: the strategies that a folder's files define, and those that cannot be read with the reasons.

    `rayps.strategies.catalogue.described` makes the descriptions.

    Raises:
        ConfigError: a file does not return in time.
    """
    answer = _run_child({"list": True, "working_dir": str(Path(working_dir).absolute()), "seconds": seconds})
    return answer["found"], answer["broken"]


async def refuse_params_in_child(
    target: str, working_dir: str, params: Sequence[JsonObject], fields: Sequence[str] = (), *, loop: bool = False
) -> None:
    """Call `refuse_params` in a thread, without blocking the event loop."""
    check_params = partial(refuse_params, target, working_dir, params, fields, loop=loop)
    await asyncio.get_running_loop().run_in_executor(_CHECKS, check_params)


def refuse_params(
    target: str,
    working_dir: str,
    params: Sequence[JsonObject],
    fields: Sequence[str] = (),
    *,
    loop: bool = False,
    seconds: float | None = None,
) -> None:
    """Check the parameters of jobs with this workload against its class, in a child process.

    With `loop`, the target is a function, and its arguments are checked. If the target cannot be imported here within
    `seconds`, nothing is refused: the job's driver checks again, on the machine where the target's packages are.

    Raises:
        ConfigError: a parameter is unknown or has a value of another type, or a parameter has a name of `fields`.
    """
    try:
        answer = _run_child(
            {
                "target": target,
                "loop": loop,
                "params": list(params),
                "fields": list(fields),
                "working_dir": working_dir,
                "seconds": PARAMS_SECONDS if seconds is None else seconds,
            }
        )
    except (ConfigError, OSError) as error:
        log.info("the parameters of %s are checked by the driver: %s", target, error)
        return
    refused = answer.get("refused")
    if refused is not None:
        raise ConfigError(refused["message"], field=refused["field"])


async def refuse_budgets_in_child(strategies: Sequence[StrategySpec]) -> str | None:
    """Call `refuse_budgets` in a thread, without blocking the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_CHECKS, refuse_budgets, strategies)


def refuse_budgets(strategies: Sequence[StrategySpec]) -> str | None:
    """Check the privacy budgets of strategies in wire form, as far as their options alone decide them.

    The child has the accountant, so that the service does not load it. Return why this could not be checked, or None.
    The job's driver checks again, with the data and the ledger.

    Raises:
        ConfigError: a budget allows no round, or no noise keeps the rounds within it.
    """
    private = [each for each in strategies if _has_budget(each) and not own_names(each)]
    once = {json.dumps(each, sort_keys=True): each for each in private}
    if not once:
        return None
    try:
        answer = _run_child({"budgets": [*once.values()], "working_dir": str(Path("/")), "seconds": PARAMS_SECONDS})
    except (ConfigError, OSError) as error:
        log.info("privacy budgets are checked by the driver: %s", error)
        return None
    refused = answer.get("refused")
    if refused is not None:
        raise ConfigError(refused["message"], field=refused["field"])
    return answer.get("unchecked")


def _has_budget(strategy: StrategySpec) -> bool:
    """Return whether a strategy in wire form, or one of several phases, has a privacy budget."""
    if isinstance(strategy, list):
        return any(_has_budget(phase) for phase in strategy)
    if not isinstance(strategy, dict):
        return False
    if "strategy" in strategy:
        return _has_budget(strategy["strategy"])
    privacy = strategy.get("privacy")
    return isinstance(privacy, dict) and privacy.get("epsilon") is not None


def _run_child(request: CheckRequest) -> CheckAnswer:
    seconds = request["seconds"]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "rayps.service.strategy_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=request["working_dir"],
        env={**os.environ, "PYTHONPATH": make_python_path(), "RAY_ENABLE_AUTO_CONNECT": "0"},
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
