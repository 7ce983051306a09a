"""Named places in the code at which a test can kill the process that runs there, as a crash would.

`RAYPS_FAILPOINT="shard: applied, not acknowledged=17"` kills this process, without any cleanup, when it visits the
place with that name for the 17th time; several places are separated by `;`. If the variable is not set, a visit costs
one test of an empty dictionary. A place's name says which action has happened and which has not happened yet.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "RAYPS_FAILPOINT"


def parse(text: str) -> dict[str, int]:
    """Parse a value of the variable into {place: visit at which the process is killed}.

    Raises ValueError if an entry is not PLACE=VISIT with a VISIT of at least 1.
    """
    found = {}
    for item in filter(None, text.split(";")):
        place, _, visit = item.rpartition("=")
        if not place or not visit.isdigit() or int(visit) < 1:
            raise ValueError(f"{VARIABLE} has the entry {item!r}: write PLACE=VISIT, with a VISIT of at least 1")
        found[place.strip()] = int(visit)
    return found


_left = parse(os.environ.get(VARIABLE, ""))


def arm(text: str) -> None:
    """Arm the places that `text` names in the variable's form, and disarm all others.

    Raises ValueError if `text` does not have that form.
    """
    _left.clear()
    _left.update(parse(text))


def passing(place: str) -> None:
    """Count a visit of `place`; kill the process if `place` is armed for this visit."""
    if _left and place in _left:
        _left[place] -= 1
        if _left[place] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
