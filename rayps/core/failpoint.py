"""Named places in the code at which a test can make its own process die, as a crash or the kernel would.

`RAYPS_FAILPOINT="shard: applied, not acknowledged=17"` kills this process, without any cleanup, at the 17th visit of
the place with that name; several are joined by `;`. Without the variable a place costs one lookup in an empty
dictionary. Places are where the states of two processes differ: their names say what one of them has and the other has
not.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "RAYPS_FAILPOINT"


def parse(text: str) -> dict[str, int]:
    """Return the visit at which each named place kills the process. Raises ValueError."""
    found = {}
    for item in filter(None, text.split(";")):
        place, _, visit = item.rpartition("=")
        if not place or not visit.isdigit() or int(visit) < 1:
            raise ValueError(f"{VARIABLE} has {item!r}: write PLACE=VISIT, the first visit is 1")
        found[place.strip()] = int(visit)
    return found


_left = parse(os.environ.get(VARIABLE, ""))


def arm(text: str) -> None:
    """Set places as the variable does, for this process from now on. Raises ValueError."""
    _left.clear()
    _left.update(parse(text))


def passing(place: str) -> None:
    """Visit `place`; the process ends here if this visit was armed."""
    if _left and place in _left:
        _left[place] -= 1
        if _left[place] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
