"""Proximal operators: prox_{tg}(v) = argmin_z g(z) + |z - v|^2 / (2t), the step of a method that splits f(x) + g(x).

Parikh and Boyd, "Proximal Algorithms", 2014, chapter 6. Pure: vectors come as tensors and are changed in place.
    l1   g(z) = weight * sum |z_j|          soft threshold: sign(v) max(|v| - t weight, 0); zeros are exact
    l2   g(z) = weight / 2 * sum z_j^2      shrink: v / (1 + t weight)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rayps_client.errors import ConfigError

from rayps.core.strategy.text import form

if TYPE_CHECKING:
    from rayps_client.values import Json, JsonObject
    from torch import Tensor


def soft_threshold(v: Tensor, t: float) -> Tensor:
    """Move each element of `v` (any shape) by `t` towards zero, in place; an element does not cross zero."""
    return v.sub_(v.clamp(-t, t))


def shrink(v: Tensor, t: float) -> Tensor:
    """Compute `v` / (1 + `t`), in place."""
    return v.div_(1.0 + t)


PROX: dict[str, Callable[[Tensor, float], Tensor]] = {"l1": soft_threshold, "l2": shrink}


def prox(regularizer: str | None, v: Tensor, t: float) -> Tensor:
    """Apply prox_{tg}(v) in place. `regularizer` is g as `write_canonical` writes it; None means g = 0: no change."""
    if regularizer is None:
        return v
    name, weight = _read(form(regularizer))
    return PROX[name](v, t * weight)


def write_canonical(given: Json) -> str | None:
    """Return a regularizer as canonical text, such as `l1(weight=0.1)`, or None if `given` is None.

    `given` is the canonical text, `l1(0.1)`, or {"name": "l1", "weight": 0.1}.

    Raises:
        ConfigError: `given` is none of these forms, or the weight is not a finite number of at least 0.
    """
    if given is None:
        return None
    spec = _parse(given) if isinstance(given, str) else given
    try:
        name, weight = _read(spec)
    except ValueError:
        raise _explain_refusal(given) from None
    return f"{name}(weight={weight!r})"


def _read(spec: Json) -> tuple[str, float]:
    """Return the name and the weight of a regularizer in wire form. Raises ValueError if `spec` is no regularizer."""
    if not isinstance(spec, dict) or set(spec) != {"name", "weight"}:
        raise ValueError("a regularizer has a name and a weight")
    name, weight = spec["name"], spec["weight"]
    if not isinstance(name, str) or name not in PROX:
        raise ValueError(f"there is no regularizer {name!r}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
        raise ValueError(f"{weight!r} is no weight")
    return name, float(weight)


def _parse(given: str) -> JsonObject | None:
    name, opens, inside = given.strip().partition("(")
    if opens and "=" not in inside:
        given = f"{name}(weight={inside}"
    try:
        return form(given)
    except ConfigError:
        return None


def _explain_refusal(given: Json) -> ConfigError:
    return ConfigError(
        f"regularizer is {given!r}: give {' or '.join(f'{name}(weight=0.1)' for name in PROX)} with a weight of 0 or "
        "more, or none",
        field="regularizer",
    )
