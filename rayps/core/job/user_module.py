"""Send values of the user's own modules to other processes by value. `machine.user_files` finds the modules.

`pack` includes the user's modules in the bytes, so that the process that unpacks the bytes needs none of the user's
files. An exception is an import inside a function: it runs when the function is called, and needs the imported file.

In a worker's process each module of the user exists once: `rayps.core.job.sent_module` puts it into `sys.modules`.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType
from typing import IO, Any, ClassVar

import cloudpickle
from rayps_client.errors import WorkloadError
from rayps_client.machine.user_files import MODULES, is_users
from rayps_client.machine.user_files import Finder as Finder
from rayps_client.machine.user_files import broken as broken

from rayps.core.job.sent_module import Globals, SentModule, read_one_set, reduce_module, reduce_named


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    _, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code_of_file, (code.co_filename, *args)


def _make_code_of_file(file: str, *args: Any) -> CodeType:
    return CodeType(*args).replace(co_filename=file)


class SourcePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as cloudpickle does, and keeps the name of the file of each function's code.

    cloudpickle from 3.1.3 on replaces this name by "<dynamic-code>". An error of the user's code in another process
    would then not name the file.
    """

    dispatch_table: ClassVar[ChainMap[Any, Any]] = ChainMap(
        {CodeType: _reduce_code, ModuleType: reduce_module, SentModule: reduce_module},
        cloudpickle.Pickler.dispatch_table,
    )

    def __init__(
        self,
        file: IO[bytes],
        protocol: int | None = None,
        buffer_callback: Callable[[pickle.PickleBuffer], object] | None = None,
        *,
        modules: Iterable[ModuleType] = (),
    ) -> None:
        """Write to `file`. Functions of `modules` have the dict of their module as globals in the other process too."""
        super().__init__(file, protocol, buffer_callback)
        self._sent = {id(vars(module)): Globals(module) for module in modules}
        self.globals_ref.update(self._sent)

    def reducer_override(self, obj: object) -> object:
        """Reduce as cloudpickle does, and add functions and classes to their module in the other process."""
        return reduce_named(obj, super().reducer_override(obj), self._sent)


def pack(workload: Any) -> bytes:
    """Pickle a workload, a training function or a class, and include the user's modules in the bytes.

    Raises:
        WorkloadError: the value holds something that cannot be sent, such as an open file or a lock.
    """
    with MODULES:  # pickling by value is set for the whole process
        known = cloudpickle.list_registry_pickle_by_value()
        modules = [module for key, module in list(sys.modules.items()) if key not in known and is_users(module)]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            packed = io.BytesIO()
            SourcePickler(packed, modules=modules).dump(workload)
            return packed.getvalue()
        except (Exception, SystemExit) as error:
            raise WorkloadError(
                f"{_name_workload(workload)} cannot be sent to workers: {type(error).__name__}: {error}\n"
                "create objects such as open files and locks inside model(), data() or loss(), not in __init__"
            ) from error
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def unpack(packed: bytes, *, shared: bool = False) -> Any:
    """Return the value that `pack` packed. This runs the user's code: accept bytes only from the driver of the job.

    `shared`: whether the user's modules are those of this process (`rayps.core.job.sent_module`), which serves one job.

    Raises:
        WorkloadError: the workload needs a package that is not installed on this machine.
    """
    try:
        with read_one_set(shared):
            return pickle.loads(packed)
    except (Exception, SystemExit) as error:
        raise WorkloadError(
            f"the workload cannot be unpacked here: {type(error).__name__}: {error}\n"
            "install the package that it needs on every machine of the cluster"
        ) from error


def reduce_by_value(value: Any, protocol: int) -> tuple[Any, ...]:
    """Return what `__reduce_ex__` returns for a user's object, changed so that the object's class is sent by value.

    Raises:
        WorkloadError: the object's class holds something that cannot be sent.
    """
    found = object.__reduce_ex__(value, max(2, protocol))
    assert isinstance(found, tuple), "protocol 2 gives a tuple"
    _, (kind, *args), *state = found
    return (_rebuild, (pack(kind), args), *state)


def _rebuild(kind: bytes, args: list[Any]) -> Any:
    found = unpack(kind)
    return found.__new__(found, *args)


def _name_workload(workload: Any) -> str:
    return getattr(workload, "__qualname__", type(workload).__qualname__)
