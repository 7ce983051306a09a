"""The text form of the name of a workload (`file.py:Class`) or of a loop (`file.py:train_fn`). Pure."""

from __future__ import annotations

import re


def misnamed(workload: str) -> str | None:
    """Return why `workload` cannot name a workload's class, and how to fix it, or None if it can.

    A name is `module:Class` (of a module such as `package.digits`) or `file.py:Class`. A name has no arguments, because
    the class is instantiated without arguments.
    """
    place, colon, name = workload.rpartition(":")
    module = all(part.isidentifier() for part in place.split("."))
    if colon and name.isidentifier() and (module or place.endswith(".py")):
        return None
    called = re.match(r"(.+?):(\w+)\(", workload)
    if called is None:
        return f"workload {workload!r} should name a module or file and a class: 'digits:Digits' or 'digits.py:Digits'"
    place, name = called.groups()
    return (
        f"workload {workload!r} has arguments, and a workload is named by its class alone: write {place}:{name}\n"
        f"and give the arguments of {name}.__init__ defaults, or derive a class that sets them; in Python, rayps.train "
        f"takes an instance such as {name}(...)"
    )


def misnamed_function(target: str) -> str | None:
    """Return why `target` cannot name a function, `module:train_fn` or `file.py:train_fn`, or None if it can."""
    place, colon, name = target.rpartition(":")
    module = all(part.isidentifier() for part in place.split("."))
    if colon and name.isidentifier() and (module or place.endswith(".py")):
        return None
    return (
        f"run {target!r} should name a module or file and a function: 'train:train_fn' or 'train.py:train_fn'; its "
        "arguments are given as params"
    )
