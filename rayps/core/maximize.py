"""Whether an optimizer minimizes or maximizes: the sign of the terms that a strategy adds to a gradient. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rayps_client.errors import ConfigError


def find_direction(groups: Iterable[Mapping[str, bool]]) -> int:
    """Return -1 if the optimizer of these parameter groups maximizes, else 1.

    Raises:
        ConfigError: one of the groups maximizes and another one minimizes.
    """
    found = {bool(group.get("maximize", False)) for group in groups}
    if len(found) != 1:
        raise ConfigError(
            "one parameter group of the optimizer maximizes and another does not, and this strategy needs one "
            "direction: give all of them the same maximize",
            field="strategy",
        )
    return -1 if found.pop() else 1
