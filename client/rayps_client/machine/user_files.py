"""Find a class in the user's own files by its name, "module:Class" or "path/file.py:Class", in a working directory."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import linecache
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

from rayps_client.error_hints import left_out, not_sent
from rayps_client.errors import WorkloadError
from rayps_client.machine.file_owner import is_users_code, resolved, users_file

MODULES = threading.Lock()  # held while modules of the user are forgotten, or sent to another process


class Finder:
    """Finds the user's classes of one kind by name, such as classes derived from `rayps.Workload`.

    After `forget` the user's files are read again: a warm process never uses an older version of a file.
    """

    def __init__(self, what: str, plural: str, base: str) -> None:
        """Set the kind of class: `what` in singular, such as "workload", and `plural`, for messages.

        `base` is the public name of the class from which the user's class must derive.
        """
        self._what, self._plural, self._base = what, plural, base
        self._modules: list[str] = []  # modules that find() imported
        self._paths: list[str] = []  # folders that find() added to sys.path
        self._found: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()

    def find(self, target: str, working_dir: str | Path | None, base: type | tuple[type, ...]) -> type[Any]:
        """Return the class that `target` names, which derives from `base`, or from one of several.

        Raises:
            WorkloadError: the class cannot be found or imported; the text names the line of user code that failed.
        """
        module, name = self._module(target, working_dir), target.rpartition(":")[2]
        found = self._class(module, name, target, base)
        self._found[found] = target
        return found

    def find_function(self, target: str, working_dir: str | Path | None) -> Callable[..., Any]:
        """Return the function that `target` names. Raises WorkloadError as `find` does."""
        module, name = self._module(target, working_dir), target.rpartition(":")[2]
        found = getattr(module, name, None)
        if callable(found) and not isinstance(found, type):
            return cast(Callable[..., Any], found)
        known = [key for key, value in vars(module).items() if isinstance(value, FunctionType)]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known[:3]
        what = f"has no function {name!r}" if found is None else f"has {name!r}, which is not a function"
        hint = f"did you mean {', '.join(near)}?" if near else "define it as `def train_fn(): ...`"
        raise WorkloadError(f"{module.__file__} {what}: {hint}", target=target)

    def _module(self, target: str, working_dir: str | Path | None) -> ModuleType:
        """Import the module or file that `target` names."""
        place = target.rpartition(":")[0]
        root = Path(working_dir or ".").absolute()
        if not root.is_dir():
            raise WorkloadError(f"the working directory {root} does not exist: give another working_dir", target=target)
        linecache.checkcache()
        importlib.invalidate_caches()  # a file may be newer than what Python knows of its folder
        before = set(sys.modules)
        try:
            return self._from_file(root, place) if place.endswith(".py") else self._from_name(root, place)
        finally:
            self._modules += [key for key in set(sys.modules) - before if is_users(sys.modules[key])]

    def remember(self, kind: type, target: str) -> None:
        """Record that class `kind` was made of the class that `target` names."""
        self._found[kind] = target

    def target_of(self, kind: type) -> str:
        """Return a name by which `find` finds class `kind`: the name given to `find` before, or else "module:Class"."""
        return self._found.get(kind) or f"{kind.__module__}:{kind.__qualname__}"

    def forget(self) -> None:
        """Forget the imported modules, so that the next `find` reads them again."""
        with MODULES:  # another thread may send the modules to a process
            for key in self._modules:
                sys.modules.pop(key, None)
        for entry in self._paths:
            if entry in sys.path:
                sys.path.remove(entry)
        self._modules.clear()
        self._paths.clear()

    def _add_path(self, folder: Path) -> None:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
            self._paths.append(str(folder))

    def _from_name(self, root: Path, place: str) -> ModuleType:
        self._add_path(root)
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
                raise broken(place, error) from error
            near = difflib.get_close_matches(place, [path.stem for path in root.glob("*.py")], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "give another working_dir, or a file: 'path/file.py:Class'"
            hint = not_sent(error.name, root) or hint
            raise WorkloadError(
                f"there is no module {place!r} in {root} or among the installed packages: {hint}", module=place
            ) from error
        except (Exception, SystemExit) as error:
            raise broken(place, error) from error

    def _from_file(self, root: Path, place: str) -> ModuleType:
        path = (root / Path(place).expanduser()).resolve()
        if not path.is_file():
            near = difflib.get_close_matches(
                path.stem, [item.stem for item in path.parent.glob("*.py")], n=1, cutoff=0.75
            )
            hint = f": did you mean '{near[0]}.py'?" if near else ": give a path from the working directory"
            raise WorkloadError(f"there is no file {path}{hint}", file=str(path))
        self._add_path(path.parent)
        known = sys.modules.get(path.stem)
        if known is not None and _file(known) == path:
            return known
        name = path.stem
        if known is not None or name in sys.stdlib_module_names or not name.isidentifier():
            # a name that hides no other module
            name = f"{self._what}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise WorkloadError(f"{path} is not a Python file", file=str(path))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            sys.modules.pop(name, None)
            if isinstance(error, ImportError) and "no known parent package" in str(error):
                raise WorkloadError(
                    f"{place} has a relative import, and a file that is given by its path belongs to no package: give "
                    f"the module from the folder that has the package, such as "
                    f"'{path.parent.name}.{path.stem}:{self._what.title()}', or import by an absolute name"
                    f"{_where(error)}",
                    module=place,
                ) from error
            raise broken(place, error) from error
        return module

    def _class(self, module: ModuleType, name: str, target: str, base: type | tuple[type, ...]) -> type[Any]:
        found = getattr(module, name, None)
        bases = base if isinstance(base, tuple) else (base,)
        classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
        known = [key for key, kind in classes.items() if issubclass(kind, bases) and kind not in bases]
        if found is None:
            near = difflib.get_close_matches(name, classes, n=3, cutoff=0.5) or known
            hint = f"did you mean {', '.join(near)}?" if near else f"no class in this file derives from {self._base}"
            raise WorkloadError(f"{module.__file__} has no class {name!r}: {hint}", target=target)
        if not isinstance(found, type) or not issubclass(found, bases):
            hint = f"; the {self._plural} in this file are {', '.join(known)}" if known else ""
            raise WorkloadError(
                f"{name} in {module.__file__} is not a {self._what}: derive it from {self._base}{hint}", target=target
            )
        return found


def broken(what: str, error: BaseException) -> WorkloadError:
    """Return the error of a failed import, with the last line of the exception and the user's line that failed."""
    last = traceback.format_exception_only(error)[-1].strip().splitlines()[0][:300]
    hint = left_out(error)
    return WorkloadError(f"{what} failed: {last}{_where(error)}{hint and chr(10)}{hint}", module=what)


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"\nin {error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and Path(frame.filename) != Path(__file__)
    ]
    mine = [frame for frame in frames if is_users_code(frame.filename)] or frames
    return f"\nin {mine[-1].filename}:{mine[-1].lineno}: {mine[-1].line}" if mine else ""


def _file(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return resolved(file) if isinstance(file, str) else None


def is_users(module: ModuleType | None) -> bool:
    """Return whether a module is the user's own: not installed, not Python's, not rayps's."""
    if not isinstance(module, ModuleType):
        return False
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not users_file(file):  # first: almost all loaded modules end here
        return False
    if module.__name__.partition(".")[0] in ("__main__", "rayps", "rayps_api", "rayps_client"):
        return False
    return sys.modules.get(module.__name__) is module  # not an alias: cloudpickle knows modules by their own name only
