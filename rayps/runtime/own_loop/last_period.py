"""The end of a loop whose workers train separately: its last period may be incomplete. Pure."""

from __future__ import annotations

from rayps.core.strategy import RoundMemory, StrategyView
from rayps.core.strategy_families import LOCAL_UPDATES


def open_steps(strategy: StrategyView, memory: RoundMemory) -> int:
    """Return the number of steps that a worker has taken since its last average or push."""
    return int(memory.get("rounds" if strategy.loop == LOCAL_UPDATES else "steps", 0))


def incomplete_period(strategy: StrategyView, steps: int, taken: int, known: int | None, *, even: bool) -> str:
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
