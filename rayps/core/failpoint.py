"""Named places in the code at which a test may let its own process die, as a crash or the kernel would do it.

`RAYPS_FAILPOINT="shard: applied, not acknowledged=17"` kills this process, without a word, the 17th time it comes
by the place of that name; several are joined by `;`. Without the variable a place costs one look into an empty
dictionary. The places are where the state of two processes differs: they are named after what one of them knows and
the other does not.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "RAYPS_FAILPOINT"


def parse(text: str) -> dict[str, int]:
    """The visit at which each named place is deadly. Raises ValueError."""
    found = {}
    for item in filter(None, text.split(";")):
        place, _, visit = item.rpartition("=")
        if not place or not visit.isdigit() or int(visit) < 1:
            raise ValueError(f"{VARIABLE} has {item!r}: write PLACE=VISIT, the first visit is 1")
        found[place.strip()] = int(visit)
    return found


_left = parse(os.environ.get(VARIABLE, ""))


def arm(text: str) -> None:
    """As the variable does, for this process from now on. Raises ValueError."""
    _left.clear()
    _left.update(parse(text))


def passing(place: str) -> None:
    """Come by `place`; the process ends here if it was told to."""
    if _left and place in _left:
        _left[place] -= 1
        if _left[place] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
