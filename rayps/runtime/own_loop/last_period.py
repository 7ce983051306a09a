"""The end of a loop whose workers train separately: its last period may be incomplete. Pure."""

from __future__ import annotations

from rayps_client.errors import WorkloadError

from rayps.core.strategy.strategy import RoundMemory, StrategyView
from rayps.core.strategy.strategy_families import LOCAL_UPDATES


def open_steps(strategy: StrategyView, memory: RoundMemory) -> int:
    """Return the number of steps that a worker has taken since its last average or push."""
    return int(memory.get("rounds" if strategy.loop == LOCAL_UPDATES else "steps", 0))


def explain_never_stepped(strategy: StrategyView, name: str) -> WorkloadError:
    """Return the error of a loop that has changed the parameter `name`, not alike on all workers, and taken no step."""
    return WorkloadError(
        f"the loop has changed the parameter {name!r} by itself and never called optimizer.step(), so that "
        f"{strategy.name} has averaged nothing, and the workers' models differ:\ncall optimizer.step() in the loop; or "
        "for steps of your own use all_reduce, which averages .grad in backward, and make the same step on all workers",
        parameter=name,
    )


def warn_of_change_kept_here(strategy: StrategyView, name: str, when: str) -> str:
    """Return the warning of a change of the parameter `name` after the last step, which the servers do not have."""
    return (
        f"{when}, the parameter {name!r} was changed in place after the last optimizer.step(): under {strategy.name} "
        "servers hold the parameters, and neither they nor the other workers have the change. Change a copy of the "
        "model instead (copy.deepcopy), or use all_reduce"
    )


def warn_of_incomplete_period(strategy: StrategyView, steps: int, taken: int, known: int | None, *, even: bool) -> str:
    """Return the warning of a loop that ended `steps` steps after its last average or push, of `taken` steps in all.

    `known` is the argument `steps` of `wrap`. `even`: whether the workers had taken equally many steps.
    """
    local = strategy.loop == LOCAL_UPDATES
    what, knob = ("average", "a period that divides it") if local else ("push", "n_push and n_fetch that divide it")
    which = f"its last {steps} of {taken} steps had no {what}" if steps else f"its last {what} had not arrived"
    if even:
        then = (
            "the workers' parameters became equal only when the function had returned: what it measured and saved "
            "before is of each worker's own parameters"
        )
    else:
        then = "the workers took unequal numbers of steps, so that their parameters were not averaged at the end"
    given = "" if known is None else f" (wrap was given steps={known})"
    return (
        f"the loop ended within a period of {strategy.name}: {which}{given}; {then}. Give "
        f"rayps.wrap(model, optimizer, ..., steps={taken}), the number of the loop's steps on each worker, so that the "
        f"last one ends with the {what}, or {knob}"
    )
