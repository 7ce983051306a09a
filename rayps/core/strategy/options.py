"""Checks of a strategy's options. An error names the option, the given value and the expected values.

Each check reads the option `field` of the object `owner`, and raises ConfigError if its value is not allowed. With
`none`, the value None is allowed too. The error appends the text `hint` to the expected values.
"""

from __future__ import annotations

from rayps_client.errors import ConfigError
from rayps_client.values import Json

from rayps.core.refusals.table import refuse
from rayps.core.rows.dropped_steps import LATE_LIMIT, LateWorkers
from rayps.core.strategy.text import quote


def whole(owner: object, field: str, least: int = 1, *, none: bool = False, hint: str = "") -> None:
    """Check that option `field` of `owner` is a whole number of at least `least`."""
    given = getattr(owner, field)
    if (given is None and none) or (isinstance(given, int) and not isinstance(given, bool) and given >= least):
        return
    raise _explain_refusal(field, given, f"a whole number of at least {least}", none, hint)


def number(
    owner: object,
    field: str,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
    expected: str = "",
    none: bool = False,
) -> None:
    """Check that option `field` of `owner` is a finite number within these bounds.

    `expected` replaces the description of the bounds in the error's text.
    """
    given = getattr(owner, field)
    if given is None and none:
        return
    if not isinstance(given, bool) and isinstance(given, (int, float)) and abs(given) < float("inf"):
        rises = (least is None or least <= given) and (above is None or above < given)
        if rises and (below is None or given < below) and (most is None or given <= most):
            return
    bounds = (("of at least", least), ("above", above), ("below", below), ("up to", most))
    within = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    raise _explain_refusal(field, given, expected or f"a number {within}", none)


def choice(owner: object, field: str, known: tuple[str, ...]) -> None:
    """Check that option `field` of `owner` is one of the words in `known`."""
    given = getattr(owner, field)
    if given not in known:
        raise _explain_refusal(field, given, " or ".join(known) if len(known) < 3 else f"one of {', '.join(known)}")


def flag(owner: object, field: str) -> None:
    """Check that option `field` of `owner` is True or False."""
    given = getattr(owner, field)
    if not isinstance(given, bool):
        raise _explain_refusal(field, given, "true or false")


def late_workers(owner: object) -> LateWorkers:
    """Check the options `backup`, `late_limit` and `replace_late` of `owner`, and return what the last two say."""
    whole(owner, "backup", least=0, none=True)
    whole(owner, "late_limit", none=True)
    limit, replaces = getattr(owner, "late_limit"), getattr(owner, "replace_late")  # noqa: B009
    if replaces is not None:
        flag(owner, "replace_late")
    given = {name: value for name, value in (("late_limit", limit), ("replace_late", replaces)) if value is not None}
    if given and not getattr(owner, "backup"):  # noqa: B009
        refuse(given | {"no backup": True})
    return LateWorkers(LATE_LIMIT if limit is None else limit, bool(replaces))


def _explain_refusal(field: str, given: Json, expected: str, none: bool = False, hint: str = "") -> ConfigError:
    return ConfigError(f"{field} is {quote(given)}: give {expected}{', or none' * none}{hint}", field=field)
