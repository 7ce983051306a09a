"""The user's modules in a process to which their code was sent by value (`rayps.core.job.user_module`).

In a process of one job, other than the sender's, a module that was sent is in `sys.modules`, and the dict of the module
is the globals of its functions. So a global that is set in one place is seen in all others, as in the sender's process.
The values are those of the sender at the time of sending. What arrives first stays: a later message of the same job
changes no value that the user's code has set meanwhile.

Of a module of which only functions or classes are needed, only these, the globals that they use, and numbers and texts
are sent. At the first access to another name, the module's file is run for the names that are missing.

In the sender's own process, such as one with workers on threads, and in servers, which several jobs may share, each
message has modules of its own.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType, ModuleType

import cloudpickle
from rayps_client.machine.user_files import is_users

_HERE = uuid.uuid4().hex  # names this process as a sender
_local = threading.local()  # `reading`: modules made for the message that this thread reads, and if it is `shared`
_running = threading.RLock()  # held while the file of a module is run

_Place = tuple[str, str | None, tuple[str, ...] | None]  # a module's name, its file, and the folders of a package


class SentModule(ModuleType):
    """A module of the user that was sent to this process."""

    def __init__(self, place: _Place) -> None:
        """Make the module without its names."""
        name, file, folders = place
        super().__init__(name)
        spec = _find_spec(place)
        package = name.rpartition(".")[0] if folders is None else name
        vars(self).update({"__spec__": spec, "__file__": file, "__package__": package, _MISSING: True})
        if folders is not None:
            vars(self)["__path__"] = list(folders) if spec is None else spec.submodule_search_locations

    def __getattr__(self, name: str) -> object:
        """Return a name that was not sent, from the module's file."""
        if not name.startswith("__"):
            with _running:
                if vars(self).pop(_MISSING, False):
                    self._run_file()
            if name in vars(self):
                found: object = vars(self)[name]
                return found
        text = f"module {self.__name__!r} has no attribute {name!r}{_explain_missing(self)}"
        raise AttributeError(text, name=name, obj=self)

    def _run_file(self) -> None:
        loader = None if self.__spec__ is None else self.__spec__.loader
        code = loader.get_code(self.__name__) if loader is not None and hasattr(loader, "get_code") else None
        if code is not None:
            exec(code, vars(self), _Missing(vars(self)))


_MISSING = "_rayps_names_are_missing"
_FILLED = "_rayps_filled_classes"  # the names of the classes that have arrived with their state


class _Missing(MutableMapping[str, object]):
    """The names of a module, of which those that it has when its file is run are not set again."""

    def __init__(self, values: dict[str, object]) -> None:
        self._values, self._kept = values, frozenset(values)

    def __getitem__(self, name: str) -> object:
        return self._values[name]

    def __setitem__(self, name: str, value: object) -> None:
        if name not in self._kept:
            self._values[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self._kept:
            del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _explain_missing(module: ModuleType) -> str:
    if module.__spec__ is not None or module.__file__ is None:
        return ""
    return (
        f": it was not sent to this process, which does not have {module.__file__}; write `import {module.__name__}` "
        "at the top of the file that uses it, so that the whole module is sent"
    )


def _find_spec(place: _Place) -> ModuleSpec | None:
    """Return where this process finds the module's file, or None if it has none."""
    name, file, folders = place
    if file is not None and Path(file).is_file():
        return importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=None if folders is None else list(folders)
        )
    parent = sys.modules.get(name.rpartition(".")[0])
    return PathFinder.find_spec(name, getattr(parent, "__path__", None))


# ---- in the process that sends


_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True, eq=False)
class Globals:
    """Stands for the globals of the functions of a module in the bytes."""

    module: ModuleType

    def __reduce__(self) -> tuple[Callable[..., dict[str, object]], tuple[object, ...]]:
        plain = {name: value for name, value in vars(self.module).items() if type(value) in _PLAIN and name[:2] != "__"}
        return _make_globals, (_HERE, _list_places(self.module), plain)


def _list_places(module: ModuleType) -> list[_Place]:
    """Return the places of the packages that hold the module, from the outermost, and its own."""
    parts = module.__name__.split(".")
    names = [".".join(parts[: k + 1]) for k in range(len(parts))]
    return [_describe_place(name, sys.modules.get(name)) for name in names]


def _describe_place(name: str, module: ModuleType | None) -> _Place:
    folders = getattr(module, "__path__", None)
    return name, getattr(module, "__file__", None), None if folders is None else tuple(folders)


def reduce_module(module: ModuleType) -> tuple[object, ...]:
    """Reduce a module as cloudpickle does; one that is sent by value becomes the one of its name where it arrives."""
    if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
        reduced: tuple[object, ...] = cloudpickle.Pickler.dispatch_table[ModuleType](module)
        return reduced
    left_out = ("__builtins__", "__spec__", "__loader__", "__cached__", "__file__", "__path__", _FILLED)
    values = {name: value for name, value in vars(module).items() if name not in left_out}
    return _make_module, (_HERE, _list_places(module)), values, None, None, _fill


def reduce_named(value: object, found: object, sent: dict[int, Globals]) -> object:
    """Return how a function or a class is reduced, `found`, and add it to its module, if that is one of `sent`."""
    if not isinstance(found, tuple) or len(found) != 6 or not isinstance(value, (FunctionType, type)):
        return found
    name, module = value.__qualname__, sys.modules.get(value.__module__)
    if module is None or id(vars(module)) not in sent or vars(module).get(name) is not value:
        return found
    make, args, state, items, pairs, fill = found
    return make, args, (sent[id(vars(module))], name, state, fill), items, pairs, _fill_named


# ---- in the process that receives


@contextmanager
def read_one_set(shared: bool) -> Iterator[None]:
    """Read one message. If it is from another process and `shared`, its modules are in `sys.modules` and stay.

    Else modules are made for this message alone.
    """
    outer, _local.reading = getattr(_local, "reading", None), ({}, shared)
    try:
        yield
    finally:
        _local.reading = outer


def _make_module(sender: str, places: list[_Place]) -> ModuleType:
    """Return the module of the last of `places`.

    A module that an earlier message has made is returned as it is. A module that this process has imported from a file
    is replaced, so that it has the sender's values.
    """
    reading: tuple[dict[str, ModuleType], bool] = getattr(_local, "reading", None) or ({}, False)
    made = sys.modules if reading[1] and sender != _HERE else reading[0]
    parent = ModuleType("")
    for place in places:
        module = made.get(place[0])
        if module is None or (is_users(module) and not isinstance(module, SentModule)):
            module = made[place[0]] = SentModule(place)
            setattr(parent, place[0].rpartition(".")[2], module)
        parent = module
    return parent


def _make_globals(sender: str, places: list[_Place], plain: dict[str, object]) -> dict[str, object]:
    held = vars(_make_module(sender, places))
    held.update({name: value for name, value in plain.items() if name not in held})
    return held


def _fill(module: ModuleType, values: dict[str, object]) -> None:
    """Add the values that the module does not have."""
    held = vars(module)
    held.update({name: value for name, value in values.items() if name not in held or name in _OWN})
    if _MISSING not in values:
        held.pop(_MISSING, None)


_OWN = frozenset({"__doc__"})  # what a module has before it is filled


_State = tuple[dict[str, object], dict[str, dict[str, object]]]  # of cloudpickle, for a function or a class


def _fill_named(
    value: object, state: tuple[dict[str, object], str, _State, Callable[[object, _State], object]]
) -> None:
    """Set the state of a function or class, and add it to the globals of its module if they do not have the name."""
    held, name, found, fill = state
    if isinstance(value, FunctionType):
        found[1]["__globals__"] = {key: each for key, each in found[1]["__globals__"].items() if key not in held}
    else:
        filled = held.setdefault(_FILLED, set())
        assert isinstance(filled, set)
        if held.get(name) is value and name in filled:
            return  # an earlier message has set the state, which the user's code may have changed
        filled.add(name)
    held.setdefault(name, value)
    fill(value, found)
