"""The service's child process that reads a user's own strategies; importing their files runs the user's code.

    python -P -m rayps.service.strategy_child < request.json > answer.json

The request is an object with `working_dir`, `seconds`, and either `strategy` and `workers` of a job to check, or
`list`: true to list the folder's strategies, or `target` and `params` to check parameters, or `budgets` to check the
privacy budgets of built-in strategies. The answer to a check has
`strategy` (in wire form) and `phases`. The answer to a list has `found` and `broken`. After an error the answer has
only `error` (message and field). The parent process (`rayps.service.strategy_check`) kills this process at a deadline.
If the parent has ended, this process ends itself after `seconds`.
"""

from __future__ import annotations

import ast
import faulthandler
import json
import os
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from rayps_client import parameters
from rayps_client.errors import ConfigError, RaypsError, WorkloadError
from rayps_client.values import JsonObject

from rayps.runtime.own_loop import named
from rayps.service import strategy_check
from rayps.service.strategy_check import BrokenFile, CheckAnswer, CheckRequest, PhaseDict
from rayps.service.sweeps.sweep import explain_ambiguous
from rayps.strategies.base import Strategy
from rayps.strategies.catalogue import FINDER, StrategyDescription, StrategySpec, described, parse


def main() -> None:
    """Read one request from stdin, write the answer to stdout, and exit."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of the user's file must not mix with the answer
    request: CheckRequest = json.load(sys.stdin)
    faulthandler.dump_traceback_later(request["seconds"], exit=True)  # ends this process even if the service has ended
    try:
        os.chdir(request["working_dir"])
        answer = _answer(request)
    except RaypsError as error:
        answer = {"error": {"message": error.message, "field": error.data.get("field", "strategy")}}
    answers.write(json.dumps(answer))
    answers.flush()
    os._exit(0)  # do not wait for threads that the user's file has started


def _answer(request: CheckRequest) -> CheckAnswer:
    if "target" in request:
        return check_params(request)
    if "budgets" in request:
        return check_budgets(request["budgets"])
    return list_strategies(request) if request.get("list") else check_strategy(request)


def check_params(request: CheckRequest) -> CheckAnswer:
    """Return the refusal of the first parameter that the workload or the function does not have, or not of this type.

    Raises:
        WorkloadError: the target cannot be imported.
    """
    known, check = _of_function(request) if request.get("loop") else _of_workload(request)
    try:
        for name in request.get("fields", []):
            if name in known:
                raise explain_ambiguous(name)
        for given in request.get("params", []):
            check(given)
    except ConfigError as error:
        return {"refused": {"message": error.message, "field": error.data["field"]}}
    return {"refused": None}


def check_budgets(strategies: list[StrategySpec]) -> CheckAnswer:
    """Return the refusal of the first privacy budget that allows no round, or why budgets cannot be checked here."""
    from rayps.federated.private_job import must_allow_a_round
    from rayps.privacy import accountant

    why = accountant.missing()
    if why is not None:
        return {"refused": None, "unchecked": why}
    for phase in (phase for each in strategies for phase in parse(each)):
        try:
            must_allow_a_round(phase.strategy)
        except ConfigError as error:
            return {"refused": {"message": error.message, "field": error.data.get("field", "privacy")}}
    return {"refused": None}


def _of_workload(request: CheckRequest) -> tuple[Collection[str], Callable[[JsonObject], object]]:
    """Return the names of the workload's parameters, and the check of given ones."""
    from rayps.workload.base import FINDER as WORKLOADS
    from rayps.workload.base import Workload

    kind = WORKLOADS.find(request["target"], request["working_dir"], Workload)
    return parameters.declared(kind), partial(parameters.checked, kind)


def _of_function(request: CheckRequest) -> tuple[Collection[str], Callable[[JsonObject], object]]:
    """Return the names of the function's arguments, and the check of given ones."""
    function = named.load(request["target"], request["working_dir"])
    return named.list_arguments(function), partial(named.choose_arguments, function)


def check_strategy(request: CheckRequest) -> CheckAnswer:
    """Return a job's strategy in wire form, and the facts of each phase that the service needs.

    Raises:
        ConfigError: the strategy cannot be found, read, or used with this many workers.
    """
    phases = parse(request["strategy"], request["working_dir"])
    for phase in phases:
        strategy = phase.strategy
        try:
            declared = strategy.grid(request["workers"]), strategy.rows, strategy.recovery, strategy.loop
        except RaypsError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"strategy {strategy.name}: its topology, rows, recovery or loop cannot be read "
                f"({type(error).__name__}: {error}): correct the attribute that raises this error",
                field="strategy",
            ) from error
        if declared[1].remote and type(strategy).__module__.partition(".")[0] != "rayps":
            raise ConfigError(
                f"strategy {strategy.name} trains on clients outside of the cluster, and these clients do not have the "
                "file that defines it: use a built-in federated strategy, or simulated clients",
                field="strategy",
            )
    found = strategy_check.check_phases(phases)
    try:
        json.dumps(found.strategy, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"an option of the strategy cannot be stored ({error}): options are numbers, texts, true, false and none",
            field="strategy",
        ) from error
    phases_found: list[PhaseDict] = [
        {"name": each.name, "servers": each.servers, "tables": each.tables} for each in found.phases
    ]
    return {"strategy": found.strategy, "phases": phases_found}


def list_strategies(request: CheckRequest) -> CheckAnswer:
    """Return the strategies that a folder's files define, and those that cannot be read with the reasons."""
    found, broken = list[StrategyDescription](), list[BrokenFile]()
    for path in sorted(Path(request["working_dir"]).glob("*.py")):
        for name in _find_candidates(path):
            target = f"{path.name}:{name}"
            try:
                found.append(described(target, FINDER.find(target, request["working_dir"], Strategy)))
            except WorkloadError as error:
                broken.append({"name": target, "message": error.message})
    return {"found": found, "broken": broken}


def _find_candidates(path: Path) -> list[str]:
    """Return the names of the classes in a file that seem to be strategies, without running the file.

    The file must contain the name rayps, and the class must derive from a class with the name of a known strategy.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    if "rayps" not in ast.dump(tree):
        return []
    kinds = {kind.__name__ for kind in _list_subclasses(Strategy)}
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}
            if bases & (kinds | set(found)):
                found.append(node.name)
    return found


def _list_subclasses(kind: type) -> list[type]:
    below: list[type] = kind.__subclasses__()
    return [kind, *(each for one in below for each in _list_subclasses(one))]


if __name__ == "__main__":
    main()
